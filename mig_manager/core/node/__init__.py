"""The node in Kubernetes' terms: labels, pods, GPU clients, disruption, other managers."""
