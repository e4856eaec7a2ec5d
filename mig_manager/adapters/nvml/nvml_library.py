"""Where NVML's library is when the dynamic loader does not know it.

A container has the driver's libraries in the loader's way when NVIDIA's container toolkit put
them there. A privileged container without the toolkit sees them below a mount of the host or of
the driver's container instead.
"""

import ctypes
import pathlib
from collections.abc import Callable, Iterable, Iterator

from mig_manager.adapters.host import driverfiles
from mig_manager.adapters.nvml import gpu_progress


def candidates(roots: Iterable[str]) -> Iterator[str]:
    """Yield the files of the library below file systems with a driver, best first."""
    for root in roots:
        yield from map(str, driverfiles.libraries(pathlib.Path(root)))


def find(roots: Iterable[str], *, is_known: Callable[[], bool] | None = None) -> str | None:
    """Return the library's file below one of the roots, or None to leave it to the loader.

    Args:
        roots: Where drivers may be, best first; without any the loader is not even asked.
        is_known: Tells whether the loader finds the library by itself; the loader is asked.
    """
    places = tuple(roots)
    if not places or (is_known or _is_loadable)():
        return None
    return next(candidates(places), None)


def _is_loadable() -> bool:
    try:
        with gpu_progress.PROGRESS.calling("dlopen"):
            ctypes.CDLL(driverfiles.LIBRARY)
    except OSError:
        return False
    return True
