"""A simulated NVML beneath pynvml: real wrappers, real structs, no GPU.

``install`` puts an object in the place of the loaded C library, so that everything above it,
pynvml included, runs as on a GPU node. The node lives in a file which successive and concurrent
processes share.
"""

import pathlib

import pynvml

from mig_manager.sandbox.driver import libnvml, statefile, states

Options = states.Options
SharedState = statefile.SharedState
SimulatedLibrary = libnvml.SimulatedLibrary


def create(spec: str, path: pathlib.Path, *, options: Options | None = None) -> None:
    """Create a freshly booted node, unless the file holds it already.

    Args:
        spec: GPUs, such as ``8xA100-SXM4-40GB`` or ``4xH100+2xA30``.
        path: The state file; its folder is made. Lock files appear beside it.
        options: The knobs of a new node; an existing one keeps its own.

    Raises:
        UsageError: The spec is no node, or the file holds a node with another spec.
    """
    statefile.SharedState(path).create(spec, options or Options())


def install(path: pathlib.Path) -> SimulatedLibrary:
    """Put a simulated library in the place of pynvml's, in this process.

    Until the file exists, NVML answers as if no driver were loaded.
    """
    library = libnvml.SimulatedLibrary(statefile.SharedState(path))
    _load(library)
    return library


def uninstall() -> None:
    """Make pynvml look for the real library again; done when nothing is installed."""
    _load(None)


def _load(library: SimulatedLibrary | None) -> None:
    # pynvml keeps the function pointers of whichever library it saw first.
    with pynvml.libLoadLock:
        pynvml.nvmlLib = library
        pynvml._nvmlGetFunctionPointer_cache.clear()  # noqa: SLF001 - there is no other way
        pynvml._nvmlLib_refcount = 0  # noqa: SLF001 - the refcount of another library
