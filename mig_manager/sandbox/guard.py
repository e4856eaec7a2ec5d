"""End the processes of a demo and remove its folder, even if the demo is killed.

A process cannot clean up after SIGKILL. The guard is another process, and waits for the end of a
pipe that only the demo has open. It runs by its path, without site packages, for a quick start.
"""

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

_STOP_TIMEOUT_S = 5.0
_POLL_S = 0.05


@contextlib.contextmanager
def guarding(folder: pathlib.Path) -> Iterator[int]:
    """Guard a folder in the context, and the members of the process group that is yielded."""
    guard = subprocess.Popen(  # noqa: S603 - this file
        [sys.executable, "-I", "-S", __file__, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        process_group=0,
    )
    with guard:
        yield guard.pid


def _others() -> list[int]:
    """Return the other live processes of this process group."""
    group = str(os.getpgrp())
    own_pid = os.getpid()
    others = []
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # proc(5): the name is in brackets and may have spaces.
            state, _, pgrp, *_ = stat.read_text().rpartition(")")[2].split()
            pid = int(stat.parent.name)
            if pgrp == group and pid != own_pid and state != "Z":
                others.append(pid)
    return others


def main() -> None:
    """Wait for the end of standard input, then end the others and remove the folder.

    A process that even SIGKILL does not end, as one in a system call, is left.
    """
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline_s = time.monotonic() + _STOP_TIMEOUT_S
        while (others := _others()) and time.monotonic() < deadline_s:
            for pid in others:
                with contextlib.suppress(OSError):
                    os.kill(pid, number)
            threading.Event().wait(_POLL_S)
    shutil.rmtree(sys.argv[1], ignore_errors=True)


if __name__ == "__main__":
    main()
