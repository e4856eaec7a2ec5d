"""One NVML session: the library loaded, initialised, and always given back."""

import contextlib
import ctypes
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import pynvml

from mig_manager import errors
from mig_manager.adapters.host import driver_files
from mig_manager.adapters.nvml import gpu_progress, nvml_calls


def candidates(roots: Iterable[str]) -> Iterator[str]:
    """Yield the files of the library below file systems with a driver, best first."""
    for root in roots:
        yield from map(str, driver_files.libraries(pathlib.Path(root)))


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
            ctypes.CDLL(driver_files.LIBRARY)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def opened(library_path: str | None, driver_roots: Sequence[str] = ()) -> Iterator[None]:
    """Hold an NVML session for the body.

    An open session counts as a client of every GPU and can hold off a reset, hence none is kept.

    Args:
        library_path: File of the NVML library; None leaves the search to the loader.
        driver_roots: Where to look for the library when the loader does not find it, or finds
            one of another version than the loaded driver.

    Raises:
        HardwareError: The library cannot be loaded, or NVML cannot be initialised or shut down;
            DRIVER_LIBRARY_MISMATCH: there is none of the loaded driver's version.
    """
    path = library_path or find(driver_roots)
    if path is not None:
        _load(path)
    try:
        nvml_calls.call(pynvml.nvmlInit)
    except errors.HardwareError as error:
        if library_path is not None or not _is_mismatch(error):
            raise
        _initialise_another(driver_roots, error, but=path)
    try:
        yield
    except BaseException:
        # What went wrong inside says more than what then goes wrong while closing.
        with contextlib.suppress(errors.HardwareError):
            nvml_calls.call(pynvml.nvmlShutdown)
        raise
    nvml_calls.call(pynvml.nvmlShutdown)


def _initialise_another(
    driver_roots: Sequence[str], error: errors.HardwareError, *, but: str | None
) -> None:
    """Initialise the first library of the loaded driver's version below the driver roots.

    A driver upgrade leaves a container with the library that was mounted when it started.
    """
    for path in candidates(driver_roots):
        if path == but:
            continue
        try:
            _load(path)
            nvml_calls.call(pynvml.nvmlInit)
        except errors.HardwareError as refused:
            if not _is_mismatch(refused) and refused.operation != "dlopen":
                raise
        else:
            return
    places = f", also below {', '.join(driver_roots)}" if driver_roots else ""
    error.add(f"there is no library of the loaded driver's version{places}")
    raise error


def _is_mismatch(error: errors.HardwareError) -> bool:
    return bool(error.code == pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)


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
