"""The GPU worker: a process that answers one request about GPUs and ends.

The composition root of the child behind ``adapters.gpu_child``: a pickled request comes in on
stdin, a pickled answer goes out on what was stdout.
"""

import argparse
import contextlib
import dataclasses
import gc
import os
import pathlib
import select
import sys
from collections.abc import Sequence

from mig_manager import errors
from mig_manager.adapters.host import clock
from mig_manager.adapters.nvml import gpu_progress, nvml_meter
from mig_manager.adapters.nvml import gpus as nvml_gpus
from mig_manager.adapters.nvml_worker import gpu_process, gpu_protocol

_PROC = pathlib.Path("/proc")


def main(argv: Sequence[str] | None = None) -> int:
    """Answer the one request on stdin.

    Args:
        argv: Arguments without the program's name; None takes those of the process.

    Returns:
        0 when there was an answer to give, be it an error; 1 when nothing was asked, or by nobody
        who is still there.
    """
    arguments = _parser().parse_args(argv)
    answers = gpu_process.claim_stdout()
    gpu_process.end_with_parent()
    if not _is_awaited(answers):
        return 1
    if arguments.progress_fd is not None:
        gpu_progress.PROGRESS.attach(arguments.progress_fd)
    if arguments.simulate_state is not None:
        _simulate(arguments.simulate_state)
    # Whoever started us ahead asks only now; nothing of the driver was touched up to here.
    request = gpu_protocol.decode_request(sys.stdin.buffer.read())
    if request is None:
        return 1
    gpus = nvml_gpus.NvmlGpus(
        library_path=arguments.library_path,
        driver_roots=arguments.driver_root,
        in_use_timeout_s=arguments.in_use_timeout_s,
        clock=clock.SystemClock(),
        proc_root=_proc_root(arguments),
    )
    told = answer(request, gpus)
    told = dataclasses.replace(told, calls=nvml_meter.METER.take())
    with os.fdopen(answers, "wb") as stream:
        stream.write(gpu_protocol.encode(told))
    return 0


def answer(request: gpu_protocol.Request, gpus: nvml_gpus.NvmlGpus) -> gpu_protocol.Answer:
    """Do what is asked and turn the outcome into a message."""
    try:
        match request:
            case gpu_protocol.Observe():
                return gpu_protocol.Observed(gpus=gpus.observe())
            case gpu_protocol.Execute(plan=plan, seen=seen):
                return gpu_protocol.Executed(gpus=gpus.execute(plan, seen))
    except errors.HardwareError as error:
        return gpu_protocol.Failed.of(error)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mig_manager.adapters.nvml_worker.gpu_worker", description=__doc__
    )
    gpu_process.add_arguments(parser)
    parser.add_argument("--in-use-timeout-s", type=float, default=30.0)
    parser.add_argument("--proc-root", type=pathlib.Path, help="where processes are looked for")
    parser.add_argument("--progress-fd", type=int, help="inherited; tells what is being done")
    return parser


def _proc_root(arguments: argparse.Namespace) -> pathlib.Path | None:
    """Return where to look for holders; nowhere, unless told, when the GPUs are simulated."""
    told: pathlib.Path | None = arguments.proc_root
    return _PROC if told is None and arguments.simulate_state is None else told


def _is_awaited(answers: int) -> bool:
    """Tell whether anybody will take the answer.

    A parent that was killed before the kernel knew to end us with it has left its request.
    """
    poll = select.poll()
    poll.register(answers, 0)
    return not any(events & select.POLLERR for _, events in poll.poll(0))


def _simulate(state: str) -> None:
    from mig_manager.sandbox import nvml as simulated  # noqa: PLC0415 - not for real GPUs

    library = simulated.install(pathlib.Path(state))
    # A driver has its state at hand.
    with contextlib.suppress(FileNotFoundError):
        _ = library.state.boards


if __name__ == "__main__":
    # It ends before there is anything worth collecting.
    gc.disable()
    ended = main()
    sys.stderr.flush()
    # The answer is out and the session closed. To take the interpreter and the vendor's library
    # apart would only keep the agent waiting.
    os._exit(ended)
