"""Whether devices fit the GPUs of one node."""
