"""An embedded Kubernetes API server: real HTTP on the loopback.

From the outside in: ``server`` answers what ``request`` has parsed; ``registry`` has the rules of
each verb, with ``content`` for patches and checks; ``store`` keeps the objects and feeds the
watches; ``rendering`` gives answers their form.
"""
