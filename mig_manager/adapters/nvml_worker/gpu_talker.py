"""A child process that talks for as long as it lives: lines on stdout, trouble on stderr."""

import contextlib
import os
import selectors
import signal
import subprocess
from collections.abc import Sequence

import structlog

from mig_manager import errors
from mig_manager.adapters.nvml_worker import gpu_news

_CHUNK_BYTES = 16 * 1024
_STDERR_KEPT_BYTES = 16 * 1024
_LINE_BYTES = 64 * 1024
"""Far longer than any line of ours."""
_REAP_TIMEOUT_S = 2.0

_log = structlog.get_logger()


class Talker:
    """A running listener and what it says; for one thread, but for ``kill``."""

    def __init__(self, command: Sequence[str]) -> None:
        """Start it.

        Args:
            command: Starts a process that ends when its stdin does.

        Raises:
            HardwareError: It cannot be started.
        """
        try:
            self._process = subprocess.Popen(  # noqa: S603 - our own command line, without a shell
                command,
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                # A group of its own, to be killed with whatever it starts.
                start_new_session=True,
            )
        except OSError as error:
            raise errors.HardwareError(
                f"the GPU listener cannot be started: {error}", reason=errors.Reason.INTERNAL
            ) from error
        pipes = (self._process.stdin, self._process.stdout, self._process.stderr)
        self._pipes = tuple(pipe for pipe in pipes if pipe is not None)
        _, self._stdout, self._stderr = (pipe.fileno() for pipe in self._pipes)
        self._selector = selectors.DefaultSelector()
        for number in (self._stdout, self._stderr):
            self._selector.register(number, selectors.EVENT_READ)
        self._line = b""
        self._words = bytearray()

    @property
    def is_gone(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None

    def hear(self, timeout_s: float | None) -> tuple[gpu_news.News, ...] | None:
        """Return what is said now, if anything; None when nothing more comes.

        Args:
            timeout_s: How long to wait at most; None: until something happens.
        """
        said = self._read(timeout_s).get(self._stdout)
        if said is None:
            return ()
        if not said or len(self._line) > _LINE_BYTES:
            return None
        *lines, self._line = (self._line + said).split(b"\n")
        return tuple(map(gpu_news.decode, lines))

    def kill(self) -> None:
        """End it at once, from any thread and before ``close``; what it held is given back."""
        # Nobody but close() waits for it: until then its number is nobody else's.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> bool:
        """End it and give everything back; tell whether the kernel let it go."""
        if not self.is_gone:
            self.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_REAP_TIMEOUT_S)
        while self._read(0):
            pass
        self._selector.close()
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.close()
        if self._words:
            stderr = bytes(self._words).decode(errors="replace").strip()
            _log.warning("gpu_listener_stderr", stderr=stderr)
        if not self.is_gone:
            _log.error("gpu_listener_unkillable", pid=self._process.pid)
        return self.is_gone

    def epitaph(self) -> gpu_news.Failed:
        """Return how it ended, after ``close``."""
        status = self._process.returncode
        if status is None:
            return _failed(errors.Reason.NVML_TIMEOUT, "cannot be killed")
        if status < 0:
            return _failed(errors.Reason.NVML_ERROR, f"was killed by signal {-status}")
        return _failed(errors.Reason.INTERNAL, f"ended with status {status}")

    def _read(self, timeout_s: float | None) -> dict[int, bytes]:
        """Return what is there by descriptor, nothing at its end; keep what is on stderr."""
        found: dict[int, bytes] = {}
        for key, _ in self._selector.select(timeout_s):
            found[key.fd] = os.read(key.fd, _CHUNK_BYTES)
            if not found[key.fd]:
                self._selector.unregister(key.fd)
            elif key.fd == self._stderr:
                self._words += found[key.fd]
                del self._words[:-_STDERR_KEPT_BYTES]
        return found


def _failed(reason: errors.Reason, how: str) -> gpu_news.Failed:
    return gpu_news.Failed(reason=reason, message=f"the GPU listener {how}")
