"""The GPU worker: a process that answers one request about GPUs and ends.

The composition root of the child behind ``adapters.gpu_child``: a pickled request comes in on
stdin, a pickled answer goes out on what was stdout.
"""

import argparse
import ctypes
import dataclasses
import os
import pathlib
import signal
import sys
from collections.abc import Sequence

from mig_manager import errors, ports
from mig_manager.adapters import clock, gpu_protocol, nvml, nvml_library, nvml_meter

_PR_SET_PDEATHSIG = 1
"""Of ``prctl(2)``."""


def main(argv: Sequence[str] | None = None) -> int:
    """Answer the one request on stdin.

    Args:
        argv: Arguments without the program's name; None takes those of the process.

    Returns:
        0 when there was an answer to give, be it an error; 1 when nothing was asked.
    """
    arguments = _parser().parse_args(argv)
    answers = _claim_stdout()
    _end_with_parent()
    request = gpu_protocol.decode_request(sys.stdin.buffer.read())
    if request is None:
        return 1
    if arguments.simulate_state is not None:
        _simulate(arguments.simulate_state)
    gpus = nvml.NvmlGpus(
        library_path=arguments.library_path or nvml_library.find(arguments.driver_root),
        in_use_timeout_s=arguments.in_use_timeout_s,
        clock=clock.SystemClock(),
    )
    told = answer(request, gpus)
    told = dataclasses.replace(told, calls=nvml_meter.METER.take())
    with os.fdopen(answers, "wb") as stream:
        stream.write(gpu_protocol.encode(told))
    return 0


def answer(request: gpu_protocol.Request, gpus: ports.Gpus) -> gpu_protocol.Answer:
    """Do what is asked and turn the outcome into a message."""
    try:
        match request:
            case gpu_protocol.Observe():
                return gpu_protocol.Observed(gpus=gpus.observe())
            case gpu_protocol.Execute(plan=plan):
                gpus.execute(plan)
                return gpu_protocol.Executed()
    except errors.HardwareError as error:
        return gpu_protocol.Failed.of(error)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mig_manager.gpu_worker", description=__doc__)
    parser.add_argument("--library-path", help="file of the NVML library")
    parser.add_argument(
        "--driver-root",
        action="append",
        default=[],
        help="where to look for the library when the loader does not find it; repeatable",
    )
    parser.add_argument("--simulate-state", help="state file of a simulated node")
    parser.add_argument("--in-use-timeout-s", type=float, default=30.0)
    return parser


def _claim_stdout() -> int:
    """Return a descriptor for the answer alone; what else is printed goes to stderr.

    A vendor's library that prints would otherwise corrupt the answer.
    """
    answers = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return answers


def _end_with_parent() -> None:
    """Have the kernel end this process with the thread that started it.

    Without an agent there is nobody to take the answer, and the next agent, which starts from
    what it observes, must not find somebody else at work.
    """
    killed = ctypes.c_ulong(signal.SIGKILL)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, killed, 0, 0, 0)


def _simulate(state: str) -> None:
    from mig_manager.sandbox import nvml as simulated  # noqa: PLC0415 - not for real GPUs

    simulated.install(pathlib.Path(state))


if __name__ == "__main__":
    sys.exit(main())
