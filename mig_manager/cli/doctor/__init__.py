"""What ``doctor`` examines, and how it reports."""
