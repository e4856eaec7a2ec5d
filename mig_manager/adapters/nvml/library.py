"""The NVML library: load it, open a session, call its functions, translate their errors.

The only place that knows how ``pynvml`` finds its library. Each error names its NVML function.
"""

import contextlib
import ctypes
import pathlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import pynvml

from mig_manager import errors
from mig_manager.adapters.host import driver_files
from mig_manager.adapters.nvml import hung_call

REASONS: dict[int, errors.Reason] = {
    pynvml.NVML_ERROR_UNINITIALIZED: errors.Reason.DRIVER_NOT_LOADED,
    pynvml.NVML_ERROR_INVALID_ARGUMENT: errors.Reason.NVML_ERROR,
    pynvml.NVML_ERROR_NOT_SUPPORTED: errors.Reason.NOT_SUPPORTED,
    pynvml.NVML_ERROR_NO_PERMISSION: errors.Reason.NO_PERMISSION,
    pynvml.NVML_ERROR_ALREADY_INITIALIZED: errors.Reason.NVML_ERROR,
    pynvml.NVML_ERROR_NOT_FOUND: errors.Reason.NVML_ERROR,
    pynvml.NVML_ERROR_INSUFFICIENT_SIZE: errors.Reason.NVML_ERROR,
    pynvml.NVML_ERROR_INSUFFICIENT_POWER: errors.Reason.NVML_ERROR,
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: errors.Reason.DRIVER_NOT_LOADED,
    pynvml.NVML_ERROR_TIMEOUT: errors.Reason.NVML_TIMEOUT,
    pynvml.NVML_ERROR_IRQ_ISSUE: errors.Reason.NVML_ERROR,
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: errors.Reason.DRIVER_NOT_LOADED,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: errors.Reason.NOT_SUPPORTED,
    pynvml.NVML_ERROR_CORRUPTED_INFOROM: errors.Reason.NVML_ERROR,
    pynvml.NVML_ERROR_GPU_IS_LOST: errors.Reason.GPU_LOST,
    # A faulty GPU. As the activation status of a new MIG mode it means that the mode is pending:
    # execute tells the two apart.
    pynvml.NVML_ERROR_RESET_REQUIRED: errors.Reason.GPU_NEEDS_RESET,
    # nvml.h: the operating system or a cgroup blocks the control device.
    pynvml.NVML_ERROR_OPERATING_SYSTEM: errors.Reason.NO_PERMISSION,
    # Library and kernel module are of two versions: a container that started before an upgrade of
    # the driver, or a host whose kernel module was not reloaded.
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: errors.Reason.DRIVER_LIBRARY_MISMATCH,
    pynvml.NVML_ERROR_IN_USE: errors.Reason.IN_USE,
    pynvml.NVML_ERROR_MEMORY: errors.Reason.NVML_ERROR,
    pynvml.NVML_ERROR_NO_DATA: errors.Reason.NVML_ERROR,
    pynvml.NVML_ERROR_VGPU_ECC_NOT_SUPPORTED: errors.Reason.NOT_SUPPORTED,
    pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES: errors.Reason.INSUFFICIENT_RESOURCES,
    pynvml.NVML_ERROR_FREQ_NOT_SUPPORTED: errors.Reason.NOT_SUPPORTED,
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH: errors.Reason.NOT_SUPPORTED,
    pynvml.NVML_ERROR_DEPRECATED: errors.Reason.NOT_SUPPORTED,
    pynvml.NVML_ERROR_NOT_READY: errors.Reason.NVML_ERROR,
    pynvml.NVML_ERROR_GPU_NOT_FOUND: errors.Reason.GPU_LOST,
    pynvml.NVML_ERROR_INVALID_STATE: errors.Reason.NVML_ERROR,
    pynvml.NVML_ERROR_RESET_TYPE_NOT_SUPPORTED: errors.Reason.NOT_SUPPORTED,
    pynvml.NVML_ERROR_UNKNOWN: errors.Reason.NVML_ERROR,
}
"""What each NVML return value means to a person."""

UNOFFERED = frozenset({pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_INVALID_ARGUMENT})
"""Answers about a profile that this GPU lacks or this library is too old to know (nvml.h)."""

UNSUPPORTED = frozenset({pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND})
"""Answers of a GPU or a library that lacks the fact or the function altogether."""

WHOLE_DRIVER = frozenset(
    {
        pynvml.NVML_ERROR_UNINITIALIZED,
        pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
        pynvml.NVML_ERROR_TIMEOUT,
        pynvml.NVML_ERROR_LIBRARY_NOT_FOUND,
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
        pynvml.NVML_ERROR_MEMORY,
        pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
    }
)
"""Answers about library, driver or caller, whichever GPU was asked about (nvml.h)."""


@contextlib.contextmanager
def session(library_path: str | None, driver_roots: Sequence[str] = ()) -> Iterator[None]:
    """Open an NVML session for the body.

    An open session counts as a client of every GPU and can prevent a reset.

    Args:
        library_path: File of the NVML library; None leaves the search to the loader.
        driver_roots: Where to look for the library when the loader does not find it, or finds
            one of another version than the loaded driver.

    Raises:
        HardwareError: The library cannot be loaded, or NVML cannot be initialised or shut down;
            DRIVER_LIBRARY_MISMATCH: no library has the loaded driver's version.
    """
    path = library_path or find(driver_roots)
    if path is not None:
        _load(path)
    try:
        call(pynvml.nvmlInit)
    except errors.HardwareError as error:
        if library_path is not None or not _is_mismatch(error):
            raise
        _initialise_another(driver_roots, error, exclude=path)
    try:
        yield
    except BaseException:
        # The first error explains more than what then fails while closing.
        with contextlib.suppress(errors.HardwareError):
            call(pynvml.nvmlShutdown)
        raise
    call(pynvml.nvmlShutdown)


def call(function: Callable[..., Any], *args: object) -> Any:
    """Call a ``pynvml`` function.

    Raises:
        HardwareError: NVML answered anything but success; with operation and code, without GPU.
    """
    since = time.monotonic()
    hung_call.RECORDER.began(function.__name__, since)
    try:
        return function(*args)
    except pynvml.NVMLError as error:
        raise from_code(error.value, operation=function.__name__) from error
    except pynvml.NVMLLibraryMismatchError as error:
        # Not an NVMLError: what the binding raises for a function that the library lacks.
        raise from_code(
            pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, operation=function.__name__
        ) from error
    except UnicodeDecodeError as error:
        # The binding takes every text for UTF-8; the path of a process need not be.
        raise from_code(pynvml.NVML_ERROR_UNKNOWN, operation=function.__name__) from error
    finally:
        hung_call.RECORDER.returned()
        hung_call.RECORDER.count(function.__name__, time.monotonic() - since)


def call_unless(codes: Collection[int], function: Callable[..., Any], *args: object) -> Any | None:
    """Call a ``pynvml`` function; None when NVML answers one of ``codes``.

    Raises:
        HardwareError: NVML answered another error.
    """
    try:
        return call(function, *args)
    except errors.HardwareError as error:
        if error.code in codes:
            return None
        raise


def from_code(code: int, *, operation: str) -> errors.HardwareError:
    """Return the error for an NVML return value."""
    return errors.HardwareError(
        f"{operation} answered {str(pynvml.NVMLError(code))!r}",
        reason=REASONS.get(code, errors.Reason.NVML_ERROR),
        operation=operation,
        code=code,
    )


def about(gpu: str, error: errors.HardwareError, *, doing: str = "") -> errors.HardwareError:
    """Return the error with the GPU it concerns, and what failed there."""
    where = f"{gpu}: {doing}" if doing else gpu
    return errors.HardwareError(
        f"{where}: {error.message}",
        reason=error.reason,
        operation=error.operation,
        gpu=gpu,
        code=error.code,
    )


def find(roots: Iterable[str], *, is_known: Callable[[], bool] | None = None) -> str | None:
    """Return the library's file below the first root with one, or None to leave it to the loader.

    Without roots the loader is not asked; ``is_known`` asks it, by default by loading the library.
    """
    folders = tuple(roots)
    if not folders or (is_known or _is_loadable)():
        return None
    return next(_candidates(folders), None)


def _candidates(roots: Iterable[str]) -> Iterator[str]:
    for root in roots:
        yield from map(str, driver_files.libraries(pathlib.Path(root)))


def _is_loadable() -> bool:
    try:
        with hung_call.RECORDER.calling("dlopen"):
            ctypes.CDLL(driver_files.LIBRARY)
    except OSError:
        return False
    return True


def _initialise_another(
    driver_roots: Sequence[str], error: errors.HardwareError, *, exclude: str | None
) -> None:
    """Initialise the first library of the loaded driver's version below the driver roots.

    A driver upgrade leaves a container with the library that was mounted when it started.
    """
    for path in _candidates(driver_roots):
        if path == exclude:
            continue
        try:
            _load(path)
            call(pynvml.nvmlInit)
        except errors.HardwareError as refused:
            if not _is_mismatch(refused) and refused.operation != "dlopen":
                raise
        else:
            return
    folders = f", also below {', '.join(driver_roots)}" if driver_roots else ""
    error.add(f"there is no library of the loaded driver's version{folders}")
    raise error


def _is_mismatch(error: errors.HardwareError) -> bool:
    return bool(error.code == pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)


def _load(path: str) -> None:
    """Load the library at ``path`` for ``pynvml``, which by itself loads one fixed name."""
    if getattr(pynvml.nvmlLib, "_name", None) == path:
        return
    try:
        with hung_call.RECORDER.calling("dlopen"):
            library = ctypes.CDLL(path)
    except OSError as error:
        raise errors.HardwareError(
            f"the NVML library cannot be loaded: {error}",
            reason=errors.Reason.DRIVER_NOT_LOADED,
            operation="dlopen",
        ) from error
    pynvml.nvmlLib = library
    # Functions are cached by name and would still be those of the library before.
    pynvml._nvmlGetFunctionPointer_cache.clear()  # noqa: SLF001 - the binding has no function for it
