"""Checks of a node and what they found."""
