"""Replay past pods on simulated nodes with the real decision: ``--simulate --replay``."""
