"""Objects of the Kubernetes API, parsed, and the names that they have by agreement."""
