"""A GPU node without GPUs and without a cluster, for ``demo``, ``--simulate`` and the tests.

``apiserver`` is a Kubernetes API server, ``driver`` an NVML beneath pynvml, ``node`` a node of a
cluster, and ``demo`` the demonstration with the real agent.
"""
