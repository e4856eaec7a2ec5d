"""An embedded Kubernetes API server: real HTTP on the loopback.

From the outside in: ``server`` answers requests, which ``request`` parses. ``registry`` has the
rules of every verb, with ``content`` for patches and validation. ``store`` keeps the objects and
feeds the watches. ``rendering`` formats answers.
"""
