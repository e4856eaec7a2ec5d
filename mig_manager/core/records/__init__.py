"""What is kept between processes: status, journal snapshot, GPUs of a node, checkpoints."""
