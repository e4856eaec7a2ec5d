"""Say what a cluster is doing while it builds and starts, which may take half an hour."""

import pathlib
import sys
import time
from collections.abc import Callable

from tests.rigs import waiting

_MARKS = ("building ", "starting ", "installing ")


def note(what: str) -> None:
    """Write a line about what begins now to standard error."""
    sys.stderr.write(f"{what}\n")
    sys.stderr.flush()


def is_note(line: str) -> bool:
    """Check whether a line says what begins, and is no other output of a program."""
    return line.startswith(_MARKS)


def follow(log: pathlib.Path, has_ended: Callable[[], bool], *, within_s: float) -> None:
    """Print the notes of a log with the seconds since now, until something has ended."""
    began = time.monotonic()
    with log.open(encoding="utf-8", errors="replace") as lines:
        rest = ""

        def is_over() -> bool:
            nonlocal rest
            over = has_ended()
            *whole, rest = (rest + lines.read()).split("\n")
            for line in filter(is_note, whole):
                sys.stdout.write(f"{time.monotonic() - began:5.0f} s  {line}\n")
                sys.stdout.flush()
            return over

        waiting.until(is_over, "the cluster", within_s=within_s)
