"""The run of ``rollout``: its options, and how it reports."""
