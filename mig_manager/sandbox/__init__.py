"""A GPU node without GPUs and without a cluster, for ``demo``, ``--simulate`` and the tests."""
