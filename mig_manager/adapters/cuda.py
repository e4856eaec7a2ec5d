"""A process that uses a MIG device through CUDA and computes nothing, for ``acceptance``.

CUDA's driver library is loaded only there: a process with a context keeps its GPU in use.
"""

import contextlib
import ctypes
import pathlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence

from mig_manager.adapters.host import nvml_libraries, process, subprocesses, worker_parent

LIBRARY = "libcuda.so.1"
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
_MODULE = "mig_manager.adapters.cuda"
_START_TIMEOUT_S = 60.0


def command(
    *, library_path: str | None, driver_roots: Sequence[str], program: Sequence[str] = ()
) -> tuple[str, ...]:
    """Return the command line of the process.

    Args:
        library_path: File of the NVML library, beside which the driver has CUDA's.
        driver_roots: Where to look for both if the loader does not find them.
        program: Starts the process of a simulated GPU.
    """
    if library_path is not None:
        paths = [pathlib.Path(library_path).with_name(LIBRARY)]
    else:
        nvml = (path for root in driver_roots for path in nvml_libraries.find(pathlib.Path(root)))
        paths = [pathlib.Path(LIBRARY), *(path.with_name(LIBRARY) for path in nvml)]
    return (*(program or subprocesses.python(_MODULE)), *map(str, paths))


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


def main(paths: Sequence[str], use_device: Callable[[], str] | None = None) -> int:
    """Use the visible device until stdin is closed; ``use_device`` does so without CUDA."""
    parent = worker_parent.Parent()
    parent.end_with_stdin()
    parent.send(use_device() if use_device else _use_device(paths))
    threading.Event().wait()
    return 0


def _use_device(paths: Sequence[str]) -> str:
    """Create a context on the visible device; return why not, or an empty text."""
    cuda = next((library for path in paths if (library := _load(path)) is not None), None)
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


def _load(path: str) -> ctypes.CDLL | None:
    with contextlib.suppress(OSError):
        return ctypes.CDLL(path)
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
