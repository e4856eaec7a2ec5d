"""One NVML session: the library loaded, initialised, and always given back."""

import contextlib
import ctypes
from collections.abc import Iterator

import pynvml

from mig_manager import errors
from mig_manager.adapters import gpu_progress, nvml_errors


@contextlib.contextmanager
def opened(library_path: str | None) -> Iterator[None]:
    """Hold an NVML session for the body.

    An open session counts as a client of every GPU and can hold off a reset, hence none is kept.

    Args:
        library_path: File of the NVML library; None leaves the search to the loader.

    Raises:
        HardwareError: The library cannot be loaded, or NVML cannot be initialised or shut down.
    """
    if library_path is not None:
        _load(library_path)
    nvml_errors.call(pynvml.nvmlInit)
    try:
        yield
    except BaseException:
        # What went wrong inside says more than what then goes wrong while closing.
        with contextlib.suppress(errors.HardwareError):
            nvml_errors.call(pynvml.nvmlShutdown)
        raise
    nvml_errors.call(pynvml.nvmlShutdown)


def _load(path: str) -> None:
    """Put the library at ``path`` under ``pynvml``, which else knows but one name to load."""
    if getattr(pynvml.nvmlLib, "_name", None) == path:
        return
    try:
        with gpu_progress.PROGRESS.calling("dlopen"):
            library = ctypes.CDLL(path)
    except OSError as error:
        raise errors.HardwareError(
            f"the NVML library cannot be loaded: {error}",
            reason=errors.Reason.DRIVER_NOT_LOADED,
            operation="dlopen",
        ) from error
    pynvml.nvmlLib = library
    # Resolved functions are cached by name and would go on to call the library before.
    pynvml._nvmlGetFunctionPointer_cache.clear()  # noqa: SLF001 - the binding offers no way
