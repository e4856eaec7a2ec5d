"""NVML, through ``pynvml``; the only user of it beside the simulated driver."""

from mig_manager.adapters import lean_imports

# pynvml imports it with everything that runs programs, and never calls it.
lean_imports.defer("ctypes.util", "find_library")
