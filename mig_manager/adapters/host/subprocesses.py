"""Child processes: start one, exchange messages by a deadline, and end it for certain.

A worker's end of the pipes is in ``worker_parent``.
"""

import contextlib
import math
import os
import pickle
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, NamedTuple

from mig_manager.adapters.host import worker_messages

_CHUNK_BYTES = 64 * 1024
_POLL_INTERVAL_S = 0.02
"""Between checks of a limit; and on Linux before 5.3 between checks whether a child has ended."""
_EXIT_TIMEOUT_S = 1.0
_REAP_TIMEOUT_S = 2.0


class Keep(NamedTuple):
    """How much of a child's output to keep."""

    stdout_bytes: int = worker_messages.LENGTH.size + worker_messages.MAX_BYTES
    keeps_stdout_end: bool = False
    stderr_bytes: int = 16 * 1024  # the last bytes of stderr are kept


def python(module: str, *arguments: str) -> tuple[str, ...]:
    """Return the command line that runs a module of ours."""
    # -P: a module in the current folder must not replace a library's.
    return (sys.executable, "-P", "-m", module, *arguments)


class Child:
    """A child process in its own process group; for one thread, except ``kill`` and ``wait``.

    By default it reads a pipe, for ``ask``, and inherits our environment and folder; as much of
    its output is kept as messages need.

    Raises:
        OSError: It cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdin: int | None = None,
        environment: Mapping[str, str] | None = None,
        folder: str | None = None,
        pass_fds: Sequence[int] = (),
        keep: Keep | None = None,
    ) -> None:
        import subprocess  # noqa: PLC0415 - not for workers

        pipe = subprocess.PIPE
        self._process: subprocess.Popen[bytes] = subprocess.Popen(  # noqa: S603 - without a shell
            command,
            stdin=pipe if stdin is None else stdin,
            stdout=pipe,
            stderr=pipe,
            bufsize=0,
            env=environment,
            cwd=folder,
            pass_fds=pass_fds,
            start_new_session=True,
        )
        self.pid = self._process.pid
        self._reaping = threading.Lock()
        keep = keep or Keep()
        self.stdout = Output(
            self._process.stdout, keep.stdout_bytes, keeps_end=keep.keeps_stdout_end
        )
        self.stderr = Output(self._process.stderr, keep.stderr_bytes, keeps_end=True)
        self._outputs = {output.fd: output for output in (self.stdout, self.stderr)}
        self._outgoing = memoryview(b"")
        self._poller = select.poll()
        for fd in self._outputs:
            self._poller.register(fd, select.POLLIN)
        self._pidfd = _pidfd(self.pid)
        if self._pidfd is not None:
            self._poller.register(self._pidfd, select.POLLIN)

    @property
    def status(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        with self._reaping:
            return self._process.poll()

    def ask(self, request: object, *, timeout_s: float) -> Any:
        """Send a message and return the next one that the child sends; see ``receive``."""
        assert self._process.stdin is not None  # noqa: S101 - a pipe
        fd = self._process.stdin.fileno()
        os.set_blocking(fd, False)
        self._outgoing = memoryview(worker_messages.encode(request))
        self._poller.register(fd, select.POLLOUT)
        return self.receive(timeout_s)

    def receive(self, timeout_s: float | None = None) -> Any:
        """Return the next message; without a time-out wait for as long as the child lives.

        Raises:
            TimeoutError: None came in time; EOFError: none will come; ValueError: it is invalid.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while (message := self.stdout.take_message()) is None:
            if self.stdout.is_closed:
                # Its exit status explains more than the kill by end() would.
                exit_by_s = time.monotonic() + _EXIT_TIMEOUT_S
                while time.monotonic() < exit_by_s and self._transfer(_EXIT_TIMEOUT_S):
                    pass
                raise EOFError
            remaining_s = None if deadline_s is None else deadline_s - time.monotonic()
            if remaining_s is not None and remaining_s <= 0:
                raise TimeoutError("no answer in time")
            if not self._transfer(remaining_s):
                raise EOFError
        try:
            return pickle.loads(message)  # noqa: S301 - see ``worker_messages``
        except Exception as error:
            # Invalid bytes can make it raise any error.
            raise ValueError(f"it wrote {message[:80]!r}") from error

    def finish(self, is_late: Callable[[], bool]) -> bool:
        """Read the output until the child has ended; return False if ``is_late`` came first."""
        while self._transfer(_POLL_INTERVAL_S):
            if is_late():
                return self._has_ended()
        return True

    def kill(self) -> None:
        """Kill the child and its process group; from any thread, at any time."""
        # Once it is reaped, another process may have its number.
        with self._reaping, contextlib.suppress(ProcessLookupError, PermissionError):
            if self._process.returncode is None:
                os.killpg(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        """Wait until the child has ended; ``end`` reaps it."""
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)

    def end(self) -> bool:
        """Kill its process group and release everything; False if the kernel keeps it alive."""
        import subprocess  # noqa: PLC0415 - as above

        self.kill()
        with self._reaping, contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_REAP_TIMEOUT_S)
        if self._pidfd is not None:
            self._poller.unregister(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
        for output in self._outputs.values():
            output.drain()
        self._outputs = {}
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        return self._process.returncode is not None

    def _transfer(self, timeout_s: float | None) -> bool:
        """Write and read as soon as possible; return whether more can follow."""
        # First, so that everything that the child wrote before its end is read.
        has_ended = self._has_ended()
        if has_ended:
            timeout_s = 0.0
        elif self._pidfd is None:
            timeout_s = min(_POLL_INTERVAL_S, math.inf if timeout_s is None else timeout_s)
        ready = self._poller.poll(None if timeout_s is None else timeout_s * 1000)
        for fd, _ in ready:
            if fd in self._outputs:
                if not self._outputs[fd].read():
                    self._poller.unregister(fd)
            elif fd != self._pidfd:
                try:
                    self._outgoing = self._outgoing[os.write(fd, self._outgoing[:_CHUNK_BYTES]) :]
                except BrokenPipeError:
                    self._outgoing = memoryview(b"")
                if not self._outgoing:
                    self._poller.unregister(fd)
        has_news = any(fd != self._pidfd for fd, _ in ready)
        return has_news or not has_ended

    def _has_ended(self) -> bool:
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            # It was reaped.
            return True


class Output:
    """Keeps the first or the last bytes that a child writes to a pipe."""

    def __init__(self, stream: IO[bytes] | None, max_bytes: int, *, keeps_end: bool) -> None:
        assert stream is not None  # noqa: S101 - a pipe
        self.fd = stream.fileno()
        self.is_cut = False
        self.is_closed = False
        self._max_bytes = max_bytes
        self._keeps_end = keeps_end
        self._kept = bytearray()

    def read(self) -> bool:
        """Read some bytes; return whether more may follow."""
        chunk = os.read(self.fd, _CHUNK_BYTES)
        self._kept += chunk
        excess = len(self._kept) - self._max_bytes
        if excess > 0:
            self.is_cut = True
            del self._kept[slice(excess) if self._keeps_end else slice(self._max_bytes, None)]
        self.is_closed = not chunk
        return bool(chunk)

    def drain(self) -> None:
        """Read the rest of the pipe, without waiting for more."""
        os.set_blocking(self.fd, False)
        deadline_s = time.monotonic() + 1.0
        with contextlib.suppress(BlockingIOError):
            while not self.is_closed and time.monotonic() < deadline_s:
                self.read()

    def text(self) -> str:
        """Return the kept bytes as text."""
        return self._kept.decode(errors="replace")

    def take_message(self) -> bytes | None:
        """Remove and return the first message; None while incomplete, ValueError if invalid."""
        if len(self._kept) < worker_messages.LENGTH.size:
            return None
        (length,) = worker_messages.LENGTH.unpack_from(self._kept)
        if length > worker_messages.MAX_BYTES:
            raise ValueError(f"it wrote {bytes(self._kept[:80])!r}")
        end = worker_messages.LENGTH.size + length
        if len(self._kept) < end:
            return None
        message = bytes(self._kept[worker_messages.LENGTH.size : end])
        del self._kept[:end]
        return message


class ProgramOutcome(NamedTuple):
    """How a program ended, and its output."""

    status: int | None
    """Exit status, negative for a signal; None: it was killed because it was late."""
    stdout: str
    stderr: str
    is_cut: bool


def run(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    folder: str | None,
    is_late: Callable[[], bool],
    stdin: str = "",
    keep: Keep,
) -> ProgramOutcome:
    """Run a program to its end, or kill it when ``is_late``; OSError if it cannot be started.

    No process of its process group remains.
    """
    # Unlike a pipe, a file is never full.
    with os.fdopen(os.memfd_create("stdin", os.MFD_CLOEXEC), "w+", encoding="utf-8") as file:
        file.write(stdin)
        file.seek(0)
        child = Child(
            command, stdin=file.fileno(), environment=environment, folder=folder, keep=keep
        )
    is_done = False
    try:
        is_done = child.finish(is_late)
    finally:
        if not child.end():
            import structlog  # noqa: PLC0415 - not for workers

            structlog.get_logger().error(
                "tool_unkillable", pid=child.pid, command=" ".join(command)
            )
    status = child.status if is_done else None
    return ProgramOutcome(status, child.stdout.text(), child.stderr.text(), child.stdout.is_cut)


def ending(status: int | None) -> str:
    """Describe how a process ended."""
    if status is None:
        return "cannot be killed"
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


def _pidfd(pid: int) -> int | None:
    # Linux before 5.3 has none.
    with contextlib.suppress(OSError):
        return os.pidfd_open(pid)
    return None
