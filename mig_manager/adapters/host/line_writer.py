"""Write log lines and remarks to standard error, which may fail or stall at any time.

A change of the GPUs must not depend on it. A write that raises would interrupt the change; a write
that blocks (a pipe that is not read, a terminal stopped with Ctrl-S) would halt it. So lines that
cannot be written at once are dropped and counted.
"""

import contextlib
import enum
import functools
import os
import select
import stat
import threading
import weakref
from collections.abc import Callable
from typing import TextIO

_CHUNK = select.PIPE_BUF
"""Bytes that a writable pipe takes as a whole (pipe(7)); poll(2) reports no smaller room."""
_REOPENED = stat.S_IFIFO, stat.S_IFCHR
_DROPPED = "{} lines could not be written before this one"
_ERASED = "\r\x1b[K"  # the cursor's line is empty, and the cursor at its start (ECMA-48: EL)


class Priority(enum.IntEnum):
    """Priorities of syslog(3), which journald stores with each line."""

    ERROR = 3
    WARNING = 4
    NOTICE = 5
    INFO = 6
    DEBUG = 7


class LineWriter:
    """Writes lines to a stream; never raises and never blocks.

    Args:
        stream: Usually standard error.
        journal_stream: The variable ``JOURNAL_STREAM`` of the environment. Where it names this
            stream, journald reads it, and each line carries its priority (sd-daemon(3)).
    """

    dropped = 0

    def __init__(self, stream: TextIO, *, journal_stream: str = "") -> None:
        self._stream = stream
        self._encoding = stream.encoding or "utf-8"
        # A signal handler may write while the main thread does.
        self._lock = threading.RLock()
        self._unreported = 0
        self._is_torn = False
        self._is_shown = False
        self._is_journal = False
        self._write_some = self._write_to_stream
        with contextlib.suppress(OSError, ValueError):
            self._use_descriptor(stream.fileno(), journal_stream)

    def drop(self) -> None:
        """Count a line that could not be rendered."""
        with self._lock:
            LineWriter.dropped += 1
            self._unreported += 1

    def put(
        self,
        text: str,
        priority: Priority = Priority.INFO,
        render_dropped: Callable[[int], str] = _DROPPED.format,
    ) -> None:
        """Write lines that belong together, the last without newline; drop them if impossible.

        If lines were dropped before, ``render_dropped`` renders a line with their number.
        """
        with self._lock:
            if self._unreported and self._put(render_dropped(self._unreported), Priority.WARNING):
                self._unreported = 0
            if self._unreported or not self._put(text, priority):
                self.drop()

    def show(self, text: str) -> None:
        """Write a line over the last one shown, on a terminal; the next ``put`` removes it.

        Args:
            text: Less than a terminal's line; empty: only remove the last one.
        """
        with self._lock:
            if self._unreported or not (text or self._is_shown):
                return
            self._is_shown = bool(text)
            with contextlib.suppress(OSError, ValueError, RuntimeError):
                data = f"{_ERASED}{text}".encode(self._encoding, "backslashreplace")
                self._write_some(data)

    def write(self, text: str) -> int:
        """Write text as a file does, for ``print``."""
        if text := text.removesuffix("\n"):
            self.put(text, Priority.ERROR)
        return len(text)

    def flush(self) -> None:
        """Do nothing: there is no buffer."""

    def _put(self, text: str, priority: Priority) -> bool:
        lines = text.split("\n")
        if self._is_journal:
            lines = [f"<{priority.value}>{line}" for line in lines]
        # Ends the rest of a truncated line.
        lead = [""] if self._is_torn else []
        erased = _ERASED if self._is_shown else ""
        self._is_shown = False
        data = (erased + "\n".join([*lead, *lines, ""])).encode(self._encoding, "backslashreplace")
        written = 0
        try:
            while written < len(data):
                written += self._write_some(data[written:])
        except (OSError, ValueError, RuntimeError):
            # Also a closed file, and one in the middle of a write that a signal interrupted.
            self._is_torn = self._is_torn or written > 0
            return False
        self._is_torn = False
        return True

    def _use_descriptor(self, fd: int, journal_stream: str) -> None:
        """Choose a way to write to a descriptor that does not block.

        O_NONBLOCK on it would affect every process that shares it, such as the shell.
        """
        status = os.fstat(fd)
        self._is_journal = journal_stream == f"{status.st_dev}:{status.st_ino}"
        self._write_some = functools.partial(os.write, fd)
        if stat.S_ISSOCK(status.st_mode):
            self._write_some = functools.partial(_send, fd)
        elif stat.S_IFMT(status.st_mode) in _REOPENED:
            try:
                # The same pipe or terminal, with a file description of our own (proc_pid_fd(5)).
                own_fd = os.open(
                    f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
                )
            except OSError:
                # Another user's, or a pipe without a reader.
                self._write_some = functools.partial(_write_if_ready, fd)
            else:
                weakref.finalize(self, os.close, own_fd).atexit = False
                self._write_some = functools.partial(os.write, own_fd)

    def _write_to_stream(self, data: bytes) -> int:
        self._stream.write(data.decode(self._encoding))
        self._stream.flush()
        return len(data)


def _send(fd: int, data: bytes) -> int:
    import socket  # noqa: PLC0415 - only journald gives us one

    connection = socket.socket(fileno=fd)
    try:
        return connection.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
    finally:
        connection.detach()


def _write_if_ready(fd: int, data: bytes) -> int:
    ready = select.poll()
    ready.register(fd, select.POLLOUT)
    if not ready.poll(0):
        raise BlockingIOError
    return os.write(fd, data[:_CHUNK])
