"""NVML, through ``pynvml``; the only user of it beside the simulated driver."""

from mig_manager.adapters import sparing

# pynvml imports it, with all that runs other programs, and calls nothing of it.
sparing.put_off("ctypes.util", "find_library")
