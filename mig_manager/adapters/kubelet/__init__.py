"""Kubelet's PodResources API; gRPC stays in a child process."""
