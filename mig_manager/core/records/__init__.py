"""Data that outlive a process: status, request, journal, GPUs of a node."""
