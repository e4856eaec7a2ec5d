"""A GPU node without GPUs and without a cluster, for ``demo``, ``--simulate`` and the tests.

``apiserver`` is a Kubernetes API server, ``driver`` an NVML beneath pynvml, ``node`` a node of a
cluster. ``stages`` puts all of them around the real agent, and ``scenarios`` demonstrates it.
"""
