"""Standard errors that take no line: what a log meets on a bad day."""

import collections
import contextlib
import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence

import structlog

from mig_manager.adapters.host import line_writer, log
from tests.rigs.shell import commandline

Listen = Callable[[], contextlib.AbstractContextManager[Sequence[Mapping[str, object]]]]
"""Collects the lines that are logged within."""


@contextlib.contextmanager
def full_disk() -> Iterator[int]:
    fd = os.open("/dev/full", os.O_WRONLY)
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def closed_pipe() -> Iterator[int]:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        yield writer
    finally:
        os.close(writer)


@contextlib.contextmanager
def stalled_reader() -> Iterator[int]:
    """Give a pipe that is full, and whose reader reads no more."""
    with full_pipe() as (_, writer):
        yield writer


@contextlib.contextmanager
def full_pipe() -> Iterator[tuple[int, int]]:
    """Give both ends of a pipe that is full."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"." * 4096)
    os.set_blocking(writer, True)
    try:
        yield reader, writer
    finally:
        os.close(reader)
        os.close(writer)


@contextlib.contextmanager
def dead_terminal() -> Iterator[int]:
    """Give a terminal whose other side is gone, as after a lost ssh session."""
    master, terminal = os.openpty()
    os.close(master)
    try:
        yield terminal
    finally:
        os.close(terminal)


@contextlib.contextmanager
def read_only() -> Iterator[int]:
    """Give a file that was opened for reading alone; a process may open it again for writing."""
    with tempfile.NamedTemporaryFile() as file:
        fd = os.open(file.name, os.O_RDONLY)
        try:
            yield fd
        finally:
            os.close(fd)


WAYS: Mapping[str, Callable[[], contextlib.AbstractContextManager[int]]] = {
    "full-disk": full_disk,
    "closed-pipe": closed_pipe,
    "stalled-reader": stalled_reader,
    "dead-terminal": dead_terminal,
    "read-only": read_only,
}


@contextlib.contextmanager
def logging_lost(way: str, lost: "collections.Counter[str]") -> Iterator[tuple[()]]:
    """Have every log line of this process lost, one of ``WAYS``; counts the lines by the way."""
    before, configuration = line_writer.LineWriter.dropped, structlog.get_config()
    with (
        WAYS[way]() as fd,
        open(fd, "w", encoding="utf-8", closefd=False) as stream,
    ):
        log.configure(level="debug", is_json=True, lines=line_writer.LineWriter(stream))
        try:
            yield ()
        finally:
            commandline.forget_log()
            structlog.configure(**configuration)
            lost[way] += line_writer.LineWriter.dropped - before
