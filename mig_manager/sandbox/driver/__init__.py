"""A simulated NVML driver.

``library`` is what pynvml loads; ``device_functions`` and ``mig_functions`` are its C functions,
registered with ``calls``. A GPU's behaviour is pure: ``transitions`` change ``states``.
``state_file`` shares a node among processes, and ``nvidia_smi`` is a program over the same file.
"""
