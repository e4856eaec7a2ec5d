"""The course of ``rollout``, and how it reports."""
