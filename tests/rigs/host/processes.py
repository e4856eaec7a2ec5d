"""What tests of child processes look at: our children, our descriptors, and whether one ended."""

import contextlib
import pathlib
import subprocess
import sys
import threading
from collections.abc import Iterator

from tests.rigs import waiting


def children(pid: int | str = "self") -> set[int]:
    """Return the pids of a process's children, zombies included."""
    pids: set[int] = set()
    for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
        # A thread may just be ending; its children then belong to another one.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            pids |= set(map(int, (task / "children").read_text().split()))
    return pids


def descriptors() -> set[str]:
    """Return the numbers of our open descriptors, that of the listing itself included."""
    return {entry.name for entry in pathlib.Path("/proc/self/fd").iterdir()}


def is_dead(pid: int) -> bool:
    """Return whether a process has ended; a zombie has."""
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] in "ZX"


@contextlib.contextmanager
def leaving_nothing_behind() -> Iterator[None]:
    """Check that the body leaves no descriptor, child or thread."""
    # Servers of earlier tests may still be closing theirs, so only new ones count.
    files, others, threads = descriptors(), children(), set(threading.enumerate())
    yield
    waiting.until(lambda: descriptors() <= files, "closed files")
    waiting.until(lambda: children() <= others, "the end of the children")
    waiting.until(lambda: set(threading.enumerate()) <= threads, "the end of the threads")


def worker_command(script: str) -> list[str]:
    """Return the command line of a worker that is this script, with its end of the pipes."""
    preamble = "import os, signal, sys, time\nfrom mig_manager import errors, reasons\n"
    preamble += "from mig_manager.adapters.host import worker_messages, worker_parent\n"
    return [sys.executable, "-c", f"{preamble}parent = worker_parent.Parent()\n{script}"]


def run_python(script: str) -> "subprocess.CompletedProcess[str]":
    """Run a script in an interpreter of its own, which must end well."""
    return subprocess.run(  # noqa: S603 - our own interpreter
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    )
