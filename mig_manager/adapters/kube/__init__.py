"""The Kubernetes API; ``client`` is the only module to import the official client."""
