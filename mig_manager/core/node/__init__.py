"""The node of an agent: its devices, its daemons, the use of its GPUs, and a drain's rules."""
