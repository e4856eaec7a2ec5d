"""What the child processes for GPUs have in common: how they are started and how they end.

Both sides use it, so it imports next to nothing.
"""

import argparse
import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1
"""Of ``prctl(2)``."""


def command(
    module: str,
    *,
    library_path: str | None = None,
    driver_roots: Sequence[str] = (),
    simulate_state: str | None = None,
) -> list[str]:
    """Return a command line with the arguments of ``add_arguments``.

    Args:
        module: The child's composition root.
        library_path: File of the NVML library; None leaves the search to the loader.
        driver_roots: Where to look for the library when the loader does not find it.
        simulate_state: State file of a simulated node; None for real GPUs.
    """
    # -P: a module in whatever folder we were started from must not stand in for a library's.
    line = [sys.executable, "-P", "-m", module]
    if library_path is not None:
        line += ["--library-path", library_path]
    for root in driver_roots:
        line += ["--driver-root", root]
    if simulate_state is not None:
        line += ["--simulate-state", simulate_state]
    return line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Have a child take what ``command`` passes."""
    parser.add_argument("--library-path", help="file of the NVML library")
    parser.add_argument(
        "--driver-root",
        action="append",
        default=[],
        help="where to look for the library when the loader does not find it; repeatable",
    )
    parser.add_argument("--simulate-state", help="state file of a simulated node")


def claim_stdout() -> int:
    """Return a descriptor for answers alone; what else is printed goes to stderr.

    A vendor's library that prints would otherwise corrupt the answers.
    """
    answers = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return answers


def end_with_parent() -> None:
    """Have the kernel end this process with the thread that started it.

    Without an agent there is nobody to take the answers, and the next agent, which starts from
    what it observes, must not find somebody else at work.
    """
    killed = ctypes.c_ulong(signal.SIGKILL)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, killed, 0, 0, 0)
