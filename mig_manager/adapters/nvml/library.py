"""The NVML library: load it, open a session, call functions, translate errors.

Only this module knows how ``pynvml`` finds its library. Errors name their NVML function.
"""

import contextlib
import ctypes
import pathlib
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pynvml

from mig_manager import errors, reasons
from mig_manager.adapters.host import nvml_libraries
from mig_manager.adapters.nvml import last_calls

_REASONS: dict[int, reasons.Reason] = {
    pynvml.NVML_ERROR_UNINITIALIZED: reasons.Reason.DRIVER_NOT_LOADED,
    pynvml.NVML_ERROR_NOT_SUPPORTED: reasons.Reason.NOT_SUPPORTED,
    pynvml.NVML_ERROR_NO_PERMISSION: reasons.Reason.NO_PERMISSION,
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: reasons.Reason.DRIVER_NOT_LOADED,
    pynvml.NVML_ERROR_TIMEOUT: reasons.Reason.NVML_TIMEOUT,
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: reasons.Reason.DRIVER_NOT_LOADED,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: reasons.Reason.NOT_SUPPORTED,
    pynvml.NVML_ERROR_GPU_IS_LOST: reasons.Reason.GPU_LOST,
    # A faulty GPU. As the activation status of a new MIG mode, which ``execute`` handles, it means
    # that the mode is pending.
    pynvml.NVML_ERROR_RESET_REQUIRED: reasons.Reason.GPU_NEEDS_RESET,
    # nvml.h: the operating system or a cgroup blocks the control device.
    pynvml.NVML_ERROR_OPERATING_SYSTEM: reasons.Reason.NO_PERMISSION,
    # Library and kernel module have different versions: the container started before a driver
    # upgrade, or the host's kernel module was not reloaded.
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: reasons.Reason.DRIVER_LIBRARY_MISMATCH,
    pynvml.NVML_ERROR_IN_USE: reasons.Reason.IN_USE,
    pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES: reasons.Reason.INSUFFICIENT_RESOURCES,
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH: reasons.Reason.NOT_SUPPORTED,
    pynvml.NVML_ERROR_DEPRECATED: reasons.Reason.NOT_SUPPORTED,
    pynvml.NVML_ERROR_GPU_NOT_FOUND: reasons.Reason.DRIVER_NOT_LOADED,
}
"""The reasons for answers of the functions we call; NVML_ERROR for all others."""

_MESSAGES: Mapping[int, str] = {
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: f"NVIDIA driver not found: {nvml_libraries.NAME}",
    # Of nvmlInit (nvml.h, ``NVML_INIT_FLAG_NO_GPUS``); GPUs may be bound to it again.
    pynvml.NVML_ERROR_GPU_NOT_FOUND: "no GPU is bound to the driver: all are missing, or passed "
    "through to virtual machines",
}
"""The messages for answers that do not explain themselves."""

UNOFFERED = frozenset({pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_INVALID_ARGUMENT})
"""Answers about a profile that this GPU lacks or this library is too old to know (nvml.h)."""

UNSUPPORTED = frozenset({pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND})
"""Answers of a GPU or a library that lacks the fact or the function altogether."""

WHOLE_DRIVER = frozenset(
    {
        pynvml.NVML_ERROR_UNINITIALIZED,
        pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
        pynvml.NVML_ERROR_LIBRARY_NOT_FOUND,
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
        pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
    }
)
"""Answers about library, driver or caller, not about the GPU (nvml.h)."""

_OTHER_ERRORS: Mapping[type[Exception], int] = {
    # For a function that the library lacks.
    pynvml.NVMLLibraryMismatchError: pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
    # The binding takes every text for UTF-8; the path of a process need not be.
    UnicodeDecodeError: pynvml.NVML_ERROR_UNKNOWN,
}
"""Codes of the binding's errors that are no NVMLError."""

_MISMATCH = pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH


@contextlib.contextmanager
def session(library_path: str | None, driver_roots: Sequence[str] = ()) -> Iterator[None]:
    """Open an NVML session for the body, which counts as a client of every GPU.

    Without ``library_path`` the loader searches, and then the driver roots if it finds no library
    or a library of another version than the loaded driver. If the session cannot be closed, stderr
    gets a warning: its changes are complete.

    Raises:
        HardwareError: The library cannot be loaded, or NVML cannot be initialised;
            DRIVER_LIBRARY_MISMATCH: no library has the loaded driver's version.
    """
    path = library_path or find(driver_roots)
    if path is not None:
        _load(path)
    try:
        call(pynvml.nvmlInit)
    except errors.HardwareError as error:
        if library_path is not None or error.code != _MISMATCH:
            raise
        _initialise_another(driver_roots, error, exclude=path)
    try:
        yield
    except BaseException:
        # The first error explains more than a second one while closing.
        with contextlib.suppress(errors.HardwareError):
            call(pynvml.nvmlShutdown)
        raise
    try:
        call(pynvml.nvmlShutdown)
    except errors.HardwareError as error:
        sys.stderr.write(f"the NVML session is not closed: {error.message}\n")


def call(function: Callable[..., Any], *args: object) -> Any:
    """Call a ``pynvml`` function.

    Raises:
        HardwareError: NVML did not report success; with operation and code, without GPU.
    """
    since = time.monotonic()
    code: int = pynvml.NVML_SUCCESS
    last_calls.RECORDER.began(function.__name__, since)
    try:
        return function(*args)
    except (pynvml.NVMLError, *_OTHER_ERRORS) as error:
        code = _OTHER_ERRORS.get(type(error)) or error.value
        raise from_code(code, operation=function.__name__) from error
    finally:
        last_calls.RECORDER.record_return()
        last_calls.RECORDER.count(function.__name__, time.monotonic() - since, code)


def call_unless(codes: Collection[int], function: Callable[..., Any], *args: object) -> Any | None:
    """Call a ``pynvml`` function; None when NVML answers one of ``codes``."""
    try:
        return call(function, *args)
    except errors.HardwareError as error:
        if error.code in codes:
            return None
        raise


def from_code(code: int, *, operation: str) -> errors.HardwareError:
    """Return the error for an NVML return value."""
    return errors.HardwareError(
        _MESSAGES.get(code) or f"{operation} answered {str(pynvml.NVMLError(code))!r}",
        reason=_REASONS.get(code, reasons.Reason.NVML_ERROR),
        operation=operation,
        code=code,
    )


def find(roots: Iterable[str]) -> str | None:
    """Return the first library below the roots if the loader finds none; else None.

    Without roots the loader does not try.
    """
    folders = tuple(roots)
    return None if not folders or _is_loadable() else next(_candidates(folders), None)


def _is_loadable() -> bool:
    try:
        with last_calls.RECORDER.loading_library():
            ctypes.CDLL(nvml_libraries.NAME)
    except OSError:
        return False
    return True


def _candidates(roots: Iterable[str]) -> Iterator[str]:
    for root in roots:
        yield from map(str, nvml_libraries.find(pathlib.Path(root)))


def _initialise_another(
    driver_roots: Sequence[str], error: errors.HardwareError, *, exclude: str | None
) -> None:
    """Initialise the first library of the loaded driver's version below the driver roots.

    After a driver upgrade a container still has the library that was mounted at its start.
    """
    for path in _candidates(driver_roots):
        if path == exclude:
            continue
        try:
            _load(path)
            call(pynvml.nvmlInit)
        except errors.HardwareError as refused:
            if refused.code != _MISMATCH and refused.operation != "dlopen":
                raise
        else:
            return
    folders = f", also below {', '.join(driver_roots)}" if driver_roots else ""
    error.add(f"no library has the loaded driver's version{folders}")
    raise error


def _load(path: str) -> None:
    """Load the library at ``path`` for ``pynvml``, which by itself loads one fixed name."""
    if getattr(pynvml.nvmlLib, "_name", None) == path:
        return
    try:
        with last_calls.RECORDER.loading_library():
            library = ctypes.CDLL(path)
    except OSError as error:
        raise errors.HardwareError(
            f"the NVML library cannot be loaded: {error}",
            reason=reasons.Reason.DRIVER_NOT_LOADED,
            operation="dlopen",
        ) from error
    pynvml.nvmlLib = library
    # The functions of the previous library are cached by name.
    pynvml._nvmlGetFunctionPointer_cache.clear()  # noqa: SLF001 - the binding has no function for it
