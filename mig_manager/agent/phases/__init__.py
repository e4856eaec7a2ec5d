"""The phases of one run, as ``agent/run.py`` calls them."""
