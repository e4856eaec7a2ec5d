"""The GPU worker: the process that calls NVML for the agent.

``serve`` answers one request about the GPUs and ends; ``listen`` reports events until its stdin is
closed. A listener lives as long as the agent, so this module imports only what both need.
"""

import argparse
import contextlib
import gc
import os
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from mig_manager import errors
from mig_manager.adapters.host import worker_messages, worker_parent
from mig_manager.adapters.nvml import last_calls

if TYPE_CHECKING:
    from mig_manager.adapters.nvml import nvml_gpus

_PROC = pathlib.Path("/proc")
_WAIT_S = 60.0
_BURST_S = 0.1
"""One ``nvidia-smi`` command changes many instances: changes within this time are one message."""


def main(
    argv: Sequence[str] | None = None, *, load_driver: Callable[[], object] | None = None
) -> int:
    """Return 0 after an answer, also an error; 1 without a request, or if listening failed.

    ``load_driver`` loads another driver in place of NVIDIA's; the kernel does not know its GPUs.
    """
    parser = argparse.ArgumentParser(
        prog="mig_manager.adapters.nvml.worker",
        description=__doc__,
        # Without a width, argparse loads shutil and all compressors at each start of a worker.
        formatter_class=lambda prog: argparse.HelpFormatter(prog, width=80),
    )
    parser.add_argument("task", choices=("serve", "listen"))
    parser.add_argument("--library-path", help="file of the NVML library")
    parser.add_argument(
        "--driver-root",
        action="append",
        default=[],
        help="where to look for the library when the loader does not find it; repeatable",
    )
    parser.add_argument("--in-use-timeout-s", type=float, default=30.0)
    parser.add_argument("--proc-root", type=pathlib.Path, help="where to look for processes")
    parser.add_argument("--reports-steps", action="store_true", help="send each step and call")
    parser.add_argument("--last-calls-fd", type=int, help="inherited memory to record calls in")
    arguments = parser.parse_args(argv)
    parent = worker_parent.Parent()
    return (_listen if arguments.task == "listen" else _serve)(arguments, parent, load_driver)


def _serve(
    arguments: argparse.Namespace,
    parent: worker_parent.Parent,
    load_driver: Callable[[], object] | None,
) -> int:
    """Answer one request; its parts are in ``worker_client.WorkerGpus``."""
    if not parent.is_there():
        return 1
    # It ends before a collection pays off.
    gc.disable()
    from mig_manager.adapters import host  # noqa: PLC0415 - not for a listener
    from mig_manager.adapters.nvml import nvml_gpus  # noqa: PLC0415 - as above

    if arguments.last_calls_fd is not None:
        last_calls.RECORDER.attach(arguments.last_calls_fd)
    proc_root = arguments.proc_root
    if load_driver is not None:
        load_driver()
    elif proc_root is None:
        proc_root = _PROC
    gpus = nvml_gpus.NvmlGpus(
        library_path=arguments.library_path,
        driver_roots=arguments.driver_root,
        in_use_timeout_s=arguments.in_use_timeout_s,
        clock=host.SystemClock(),
        proc_root=proc_root,
        on_step=_step_reporter(parent) if arguments.reports_steps else None,
    )
    # A worker that was started ahead waits here, before it touches the driver.
    request = parent.receive()
    if request is None:
        return 1
    recorder = last_calls.RECORDER
    with recorder.traced() if arguments.reports_steps else contextlib.nullcontext(()) as trace:
        outcome = worker_messages.attempt(lambda: _answer(request, gpus))
    # One by one for ``acceptance``: a total hides a slow call, and refusals are quick.
    calls = tuple((function, 1, seconds) for function, code, seconds in trace if not code)
    parent.send((outcome, calls or recorder.take_totals()))
    return 0


def _answer(request: Any, gpus: "nvml_gpus.NvmlGpus") -> object:
    """Answer a request; most workers do not load the code of the last two."""
    match request:
        case ("observe",):
            return gpus.observe()
        case ("execute", plan, known):
            return gpus.execute(plan, known)
        case ("inspect",):
            from mig_manager.adapters.nvml import processes  # noqa: PLC0415 - see above

            return processes.inspect(
                gpus.library_path,
                driver_roots=gpus.driver_roots,
                proc_root=gpus.proc_root,
                exclude=(os.getppid(),),
            )
        case ("survey",):
            from mig_manager.adapters.nvml import survey  # noqa: PLC0415 - see above

            return survey.survey(gpus.library_path, gpus.driver_roots)
        case _:
            raise ValueError(f"unknown request {request!r}")


def _step_reporter(parent: worker_parent.Parent) -> Callable[[int], None]:
    """Return a function that sends ``("step", INDEX)``, from any thread."""

    def report(gpu_index: int) -> None:
        # No lock: the kernel does not split so short a message (pipe(7), PIPE_BUF).
        with contextlib.suppress(BrokenPipeError):
            parent.send(("step", gpu_index))

    return report


def _listen(
    arguments: argparse.Namespace,
    parent: worker_parent.Parent,
    load_driver: Callable[[], object] | None,
) -> int:
    """Send ``("watching", N, M)``, then ``("events", ...)``; or ``("failed", reason, why)``.

    The events of a burst are UUIDs of changed GPUs, and critical errors as ``(UUID, Xid)``.
    """
    from mig_manager.adapters.nvml import events  # noqa: PLC0415 - not for a server

    parent.end_with_stdin()
    if load_driver is not None:
        load_driver()
    try:
        with events.listening(arguments.library_path, arguments.driver_root) as changes:
            parent.send(("watching", len(changes.gpus), changes.gpu_count))
            while True:
                burst: list[events.GpuEvent] = []
                event = changes.wait(_WAIT_S)
                deadline = time.monotonic() + _BURST_S
                while event is not None:
                    burst.append(event)
                    left_s = deadline - time.monotonic()
                    event = changes.wait(left_s) if left_s > 0 else None
                if burst:
                    changed = dict.fromkeys(each.uuid for each in burst if each.xid is None)
                    xids = ((each.uuid, each.xid) for each in burst if each.xid is not None)
                    parent.send(("events", tuple(changed), tuple(dict.fromkeys(xids))))
    except errors.HardwareError as error:
        parent.send(("failed", error.reason.value, error.message))
        return 1
    except BrokenPipeError:
        return 0


def end(status: int) -> NoReturn:
    """End this process without finalizing the interpreter and the vendor's library.

    The answer is sent and the session closed, so finalizing would only delay the agent.
    """
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    end(main())
