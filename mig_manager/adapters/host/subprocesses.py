"""The process of a program that is run to its end: started, listened to, and ended for certain.

A program below another root is run by ``chroot(2)``, in a small interpreter of our own between us
and it: an image need not have a ``chroot`` program, and code that runs between fork and exec is
not safe beside threads (``subprocess``, ``preexec_fn``).
"""

import contextlib
import os
import pathlib
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import IO

import structlog

_ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    # Its messages are for logs, and some of them are recognised.
    "LC_ALL": "C",
}
_LAUNCHER = """\
import os, sys
root, count = sys.argv[1], int(sys.argv[2])
extra, line = sys.argv[3:3 + count], sys.argv[3 + count:]
try:
    os.chroot(root)
    os.chdir("/")
    os.execve(line[0], line, {**os.environ, **dict(each.split("=", 1) for each in extra)})
except OSError as error:
    sys.exit(f"cannot run {line[0]} below {root}: {error.strerror}")
"""
_CHUNK_BYTES = 64 * 1024
_LOOK_INTERVAL_S = 0.02
"""How late the end of a program may be noticed; its pipes wake us before that."""
_REAP_TIMEOUT_S = 2.0


_log = structlog.get_logger()


class Kept:
    """What is kept of what a program writes: the beginning or the end."""

    def __init__(self, stream: IO[bytes] | None, most: int, *, is_end: bool = False) -> None:
        assert stream is not None  # noqa: S101 - it was opened as a pipe
        self.fd = stream.fileno()
        self.is_cut = False
        self._most = most
        self._is_end = is_end
        self._kept = bytearray()

    def read(self) -> bool:
        """Take what there is; return whether more may come."""
        chunk = os.read(self.fd, _CHUNK_BYTES)
        self._kept += chunk
        over = len(self._kept) - self._most
        if over > 0:
            self.is_cut = True
            del self._kept[slice(over) if self._is_end else slice(self._most, None)]
        return bool(chunk)

    def text(self) -> str:
        """Return what was kept."""
        return self._kept.decode(errors="replace")


def attend(pid: int, outputs: Sequence[Kept], is_late: Callable[[], bool]) -> bool:
    """Read what a program writes until it has ended.

    Args:
        pid: Our child.
        outputs: Its pipes.
        is_late: Tells whether it has had its time.

    Returns:
        Whether it has ended, and not just had its time.
    """
    poll = select.poll()
    by_fd = {output.fd: output for output in outputs}
    for fd in by_fd:
        poll.register(fd, select.POLLIN)
    while True:
        # Asked before reading, so that all it wrote before it ended is read.
        has_ended = _has_ended(pid)
        ready = poll.poll(0 if has_ended else _LOOK_INTERVAL_S * 1000)
        for fd, _ in ready:
            if not by_fd[fd].read():
                poll.unregister(fd)
        # A child of its own may still have the pipes open; that one is not waited for.
        if (has_ended and not ready) or is_late():
            return has_ended


def start_bare(
    line: Sequence[str], *, environment: Mapping[str, str], folder: str | None
) -> subprocess.Popen[bytes]:
    """Start a program in a process group of its own, with this environment and no other.

    Args:
        line: The program by its path, and its arguments.
        environment: All that it has.
        folder: Where it begins; None: where we are.

    Raises:
        OSError: It cannot be started.
    """
    with contextlib.closing(_Input("")) as stdin:
        return _spawn(line, stdin.fd, environment=environment, folder=folder)


def start(
    line: Sequence[str], *, root: pathlib.Path, variables: Mapping[str, str], given: str
) -> subprocess.Popen[bytes]:
    """Start a program in a process group of its own, with a minimal environment.

    Args:
        line: The program as seen from its root, and its arguments.
        root: Where we see its root.
        variables: What its environment has beside the usual.
        given: What it reads from stdin.

    Raises:
        OSError: It cannot be started; below another root it ends with a message instead.
    """
    if root != pathlib.Path("/"):
        # The variables are for the program alone: our interpreter could not preload its library.
        extra = [f"{name}={value}" for name, value in variables.items()]
        own = [sys.executable, "-I", "-S", "-c", _LAUNCHER]
        line = [*own, str(root), str(len(extra)), *extra, *line]
        variables = {}
    with contextlib.closing(_Input(given)) as stdin:
        environment = {**_ENVIRONMENT, **variables}
        return _spawn(line, stdin.fd, environment=environment, folder="/")


def _spawn(
    line: Sequence[str], stdin: int, *, environment: Mapping[str, str], folder: str | None
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(  # noqa: S603 - a program that was found, without a shell
        line,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        env=environment,
        cwd=folder,
        # A group of its own, to be killed with whatever it starts.
        start_new_session=True,
    )


class _Input:
    """Text to read as a file: unlike a pipe it is never full, whatever its reader does."""

    def __init__(self, text: str) -> None:
        self.fd = os.memfd_create("stdin", os.MFD_CLOEXEC)
        left = memoryview(text.encode())
        try:
            while left:
                left = left[os.write(self.fd, left) :]
            os.lseek(self.fd, 0, os.SEEK_SET)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        os.close(self.fd)


def _has_ended(pid: int) -> bool:
    """Return whether a child has ended, and leave it for its exit status to be asked."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def end(process: subprocess.Popen[bytes], line: str) -> None:
    """Kill what there still is of a program's process group, and let go of it."""
    # Before its leader is waited for: until then the number is nobody else's.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        process.wait(_REAP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        # In an uninterruptible wait in the driver; the kernel ends it when that lets go.
        _log.error("tool_unkillable", pid=process.pid, command=line)
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
