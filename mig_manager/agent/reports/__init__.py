"""What a node reports: capacity, faults, metrics, and its state without a request."""
