"""What Python runs at the start of the processes that tests start."""
