"""What ``support-bundle`` collects, and what it removes from it."""
