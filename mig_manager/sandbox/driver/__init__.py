"""The parts of the simulated NVML; ``sandbox.nvml`` puts them in the place of the C library.

``libnvml`` is the library as ctypes sees it; ``queries``, ``events``, ``mig`` and ``instances``
are its C functions, built from ``calls`` and ``memory``. What a GPU does is pure: ``transitions``
change ``states`` by the driver's ``rules``, and ``identities`` never change. ``statefile`` keeps
a node where all processes find it, written by ``codec``.
"""
