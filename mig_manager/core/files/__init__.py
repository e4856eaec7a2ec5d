"""Texts of owners and of other programs, parsed: YAML, JSON, hooks, services, checkpoints."""
