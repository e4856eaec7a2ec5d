"""The Kubernetes API; ``api`` is the only module to import the client library."""
