"""The machine underneath: hooks, host services, GPU processes."""
