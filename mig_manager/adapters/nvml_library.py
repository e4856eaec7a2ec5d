"""Where NVML's library is when the dynamic loader does not know it.

A container has the driver's libraries in the loader's way when NVIDIA's container toolkit put
them there. A privileged container without the toolkit sees them below a mount of the host or of
the driver's container instead.
"""

import ctypes
import pathlib
from collections.abc import Callable, Iterable

from mig_manager.adapters import gpu_progress

_NAME = "libnvidia-ml.so.1"
_FOLDERS = (
    "usr/lib64",
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib",
    "lib64",
    "lib/x86_64-linux-gnu",
    "lib/aarch64-linux-gnu",
    # Where GKE's driver installer puts it on the host.
    "home/kubernetes/bin/nvidia/lib64",
)


def candidates(roots: Iterable[str]) -> tuple[pathlib.Path, ...]:
    """Return where the library may be, best first, given roots of file systems with a driver."""
    return tuple(pathlib.Path(root) / folder / _NAME for root in roots for folder in _FOLDERS)


def find(roots: Iterable[str], *, is_known: Callable[[], bool] | None = None) -> str | None:
    """Return the library's file below one of the roots, or None to leave it to the loader.

    Args:
        roots: Where drivers may be, best first; without any the loader is not even asked.
        is_known: Tells whether the loader finds the library by itself; the loader is asked.
    """
    places = candidates(roots)
    if not places or (is_known or _is_loadable)():
        return None
    return next((str(place) for place in places if place.is_file()), None)


def _is_loadable() -> bool:
    try:
        with gpu_progress.PROGRESS.calling("dlopen"):
            ctypes.CDLL(_NAME)
    except OSError:
        return False
    return True
