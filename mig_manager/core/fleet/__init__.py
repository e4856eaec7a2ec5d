"""Many nodes: rollouts, their previews, and the budget of nodes under change."""
