"""The steps of one run, as ``agent/run.py`` calls them."""
