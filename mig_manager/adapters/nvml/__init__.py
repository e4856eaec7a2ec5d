"""NVML, through ``pynvml``; the only user of it beside the simulated driver."""

from mig_manager.adapters import lean_imports

# pynvml imports it, with all that runs other programs, and calls nothing of it.
lean_imports.defer("ctypes.util", "find_library")
