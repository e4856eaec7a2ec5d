"""A GPU node without GPUs and without a cluster, for ``demo``, ``--simulate`` and the tests.

Four facades: ``apiserver`` is a Kubernetes API server (its parts: ``api``), ``nvml`` a driver
beneath pynvml (``driver``), ``node`` a node of a cluster (``cluster``), and ``demo`` the
demonstration (``show``). ``hardware`` tells which GPUs they can play.
"""
