"""A GPU node without GPUs and without a cluster, for ``demo``, ``--simulate`` and the tests.

The wheel and the image contain all of it, and three kinds of programs use it:

- An agent or command with ``--simulate`` uses ``node_spec`` and ``driver``, an NVML beneath
  pynvml. An agent on a real cluster also advertises the simulated devices:
  ``advertising_gpus``. Both import the modules in functions, so that a program on real GPUs does
  not load them.
- ``acceptance`` compares real GPUs with simulated ones of the same product: ``twin``.
- ``demo`` and the tests use the rest. ``apiserver`` is a Kubernetes API server, and needs the
  extra ``sandbox``; ``node`` is a node of a cluster; ``stages`` puts all of them around the real
  agent, and ``demo`` shows it.
"""
