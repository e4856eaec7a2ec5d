"""The nodes of a cluster: what they show, rollouts, and slots for nodes under change."""
