"""GPUs, bars and tables as text for a terminal."""
