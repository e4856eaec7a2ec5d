"""Layout files: parse the v1 grammar, select GPUs, export, generate."""
