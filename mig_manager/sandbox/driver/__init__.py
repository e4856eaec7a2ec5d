"""A simulated NVML driver.

``library`` is what pynvml loads; ``device_functions`` and ``mig_functions`` are its C functions,
registered with ``calls``. A GPU's behaviour is pure: ``transitions`` change ``states``.
``state_file`` shares a node among processes.
"""
