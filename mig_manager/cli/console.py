"""The terminal, or what stands for it: answers on one stream, remarks and errors on another."""

import contextlib
import dataclasses
import os
import pathlib
import re
import sys
from collections.abc import Mapping
from typing import TextIO

from mig_manager.adapters.host import line_writer
from mig_manager.agent import settings
from mig_manager.core import bar

_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f]+")
_DRAWN_WITH = "┌─┬│·→✓░"


class AnswerLostError(Exception):
    """Standard output takes no more, though its reader is still there: a disk that is full."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Console:
    """What a command line talks to; tests bring their own."""

    stdin: TextIO
    stdout: TextIO
    stderr: TextIO
    environ: Mapping[str, str]
    program: str = "mig-manager"
    """Stands before each remark."""
    remarks: line_writer.LineWriter = dataclasses.field(init=False)
    """Standard error as remarks and log lines are written to it: no write raises or blocks."""

    def __post_init__(self) -> None:
        """Prepare standard error."""
        remarks = line_writer.LineWriter(
            self.stderr, journal_stream=self.environ.get("JOURNAL_STREAM", "")
        )
        object.__setattr__(self, "remarks", remarks)

    @staticmethod
    def of_process(program: str = "mig-manager") -> "Console":
        """Return the streams and the environment of this process.

        Of a stream that was closed before we started Python knows nothing; it is then empty.
        """
        nowhere = pathlib.Path(os.devnull)
        return Console(
            stdin=sys.stdin or nowhere.open(),
            stdout=sys.stdout or nowhere.open("w"),
            stderr=sys.stderr or nowhere.open("w"),
            environ=settings.process_environ(),
            program=program,
        )

    def style(self, colour: settings.Colour) -> bar.Style:
        """Return what standard output can show."""
        is_coloured = colour is settings.Colour.ALWAYS or (
            colour is settings.Colour.AUTO and self.stdout.isatty()
        )
        return bar.Style(
            colour=is_coloured, unicode=_encodable(self.stdout, _DRAWN_WITH) == _DRAWN_WITH
        )

    def say(self, text: str) -> None:
        """Write an answer.

        Raises:
            AnswerLostError: It cannot be written.
            BrokenPipeError: The reader has gone away.
        """
        line = text if text.endswith("\n") else f"{text}\n"
        try:
            self.stdout.write(_encodable(self.stdout, line))
            self.stdout.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            why = error.strerror or str(error)
            raise AnswerLostError(f"cannot write the answer: {why}") from error

    def note(
        self,
        text: str,
        *,
        remedy: str = "",
        priority: line_writer.Priority = line_writer.Priority.NOTICE,
    ) -> None:
        """Write a remark or an error, each of its parts on a line of its own; never raises.

        Args:
            text: One sentence.
            remedy: What to do about it; empty when there is nothing to do.
            priority: For journald.
        """
        # Names from files and from the API end up here; they must not drive the terminal.
        lines = [f"{self.program}: {_CONTROLS.sub(' ', text)}"]
        if remedy:
            lines.append(f"  remedy: {_CONTROLS.sub(' ', remedy)}")
        self.remarks.put("\n".join(lines), priority)

    def forget(self) -> None:
        """Point standard output nowhere: the interpreter flushes it once more at the end."""
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.stdout.fileno())
            os.close(nowhere)


def _encodable(stream: TextIO, text: str) -> str:
    """Return the text with escapes for what the stream cannot encode."""
    encoding = stream.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)
