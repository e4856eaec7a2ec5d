"""From what GPUs have and what a layout wants to the smallest list of steps, and back."""
