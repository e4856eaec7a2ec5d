"""A process that uses a MIG device through CUDA and computes nothing, for ``acceptance``.

CUDA's driver library is loaded only there: a process with a context keeps its GPU in use.
"""

import argparse
import contextlib
import ctypes
import pathlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

from mig_manager.adapters.host import process, programs, subprocesses

LIBRARY = "libcuda.so.1"
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
_MODULE = "mig_manager.adapters.cuda"
_START_TIMEOUT_S = 60.0


def command(
    *, library_path: str | None, driver_roots: Sequence[str], program: Sequence[str] = ()
) -> tuple[str, ...]:
    """Return the command line of the process.

    Args:
        library_path: File of the NVML library, beside which CUDA's is.
        driver_roots: Where to look for both when the loader does not find them.
        program: Starts the process of a simulated GPU.
    """
    roots = (argument for root in driver_roots for argument in ("--driver-root", root))
    path = () if library_path is None else ("--library-path", library_path)
    return (*(program or subprocesses.python(_MODULE)), *path, *roots)


@contextlib.contextmanager
def using(line: Sequence[str], device_uuid: str) -> Iterator[str]:
    """Have the process use a MIG device in the body; yield why it does not, or an empty text.

    The process ends with the body and with this process, however that ends.
    """
    problem = ""
    with contextlib.ExitStack() as stack:
        try:
            child = subprocesses.Child(
                line, environment={**process.environ(), VISIBLE_DEVICES: device_uuid}
            )
            stack.callback(child.end)
            problem = child.receive(_START_TIMEOUT_S)
        except (OSError, EOFError, ValueError) as error:
            # Their texts may name the machine's files.
            late = isinstance(error, TimeoutError)
            problem = f"CUDA gave no answer in {_START_TIMEOUT_S:g} s" if late else "CUDA crashed"
        yield problem


def main(argv: Sequence[str], use_device: Callable[[], str] | None = None) -> int:
    """Use the visible device until stdin is closed; ``use_device`` does so without CUDA."""
    parser = argparse.ArgumentParser(prog=_MODULE, description=__doc__)
    parser.add_argument("--library-path", type=pathlib.Path)
    parser.add_argument("--driver-root", type=pathlib.Path, action="append", default=[])
    arguments = parser.parse_args(argv)
    parent = subprocesses.Parent()
    parent.end_with_stdin()
    if use_device is None:
        parent.send(_use_device(_candidates(arguments.library_path, arguments.driver_root)))
    else:
        parent.send(use_device())
    threading.Event().wait()
    return 0


def _candidates(nvml: pathlib.Path | None, roots: Iterable[pathlib.Path]) -> Iterator[str]:
    """Yield where CUDA's library may be: the driver installs it beside NVML's."""
    if nvml is not None:
        yield str(nvml.with_name(LIBRARY))
        return
    yield LIBRARY
    for root in roots:
        yield from (str(path.with_name(LIBRARY)) for path in programs.libraries(root))


def _use_device(paths: Iterable[str]) -> str:
    """Create a context on the visible device; return why not, or an empty text."""
    cuda = next((library for path in paths if (library := _loaded(path)) is not None), None)
    if cuda is None:
        return "no CUDA driver library"
    device, context = ctypes.c_int(), ctypes.c_void_p()
    calls: tuple[tuple[str, tuple[object, ...]], ...] = (
        ("cuInit", (0,)),
        ("cuDeviceGet", (ctypes.byref(device), 0)),
        ("cuCtxCreate_v2", (ctypes.byref(context), 0, device)),
    )
    for function, values in calls:
        if code := getattr(cuda, function)(*values):
            return f"{function} answered {code}"
    return ""


def _loaded(path: str) -> ctypes.CDLL | None:
    with contextlib.suppress(OSError):
        return ctypes.CDLL(path)
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
