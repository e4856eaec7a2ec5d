"""The terminal: answers on standard output, remarks and errors on standard error."""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import NoReturn, Protocol, TextIO, TypeVar

from mig_manager import errors, reasons
from mig_manager.adapters.host import line_writer, process
from mig_manager.core.display import styles
from mig_manager.core.files import json_text
from mig_manager.core.settings import node_settings

API_VERSION = "mig-manager.io/v1"  # answers have it; docs/labels.md promises its stability
DONE, FAILED, UNUSABLE, UNKNOWN_COMMAND = 0, 1, 2, 3
INTERRUPTED = 128 + 2  # as a shell reports a program that SIGINT ended
_BROKEN_PIPE = 128 + 13  # the same for SIGPIPE
_INPUT_REASONS = frozenset(
    {
        reasons.Reason.USAGE,
        reasons.Reason.INVALID_CONFIG,
        reasons.Reason.INVALID_CHECKPOINT,
        reasons.Reason.UNKNOWN_CONFIG,
    }
)
STANDARD_OUTPUT = pathlib.Path("-")  # instead of a file to write
_MAX_DIGITS = 5  # in COLUMNS
_MAX_ERRORS = 20  # shown for a document; the rest is counted
_COERCED = "C.UTF-8"
_DRAWN_WITH = "┌─┬│·→✓░"

_Parsed = TypeVar("_Parsed")
_Adapter = TypeVar("_Adapter")


class ReplaceAdapter(Protocol):
    """Maps an adapter that a command made from its settings to the one to use."""

    def __call__(self, adapter: _Adapter, /) -> _Adapter:
        """Return the adapter, or one that a test puts in its place."""


def keep(adapter: _Adapter, /) -> _Adapter:
    """Replace no adapter."""
    return adapter


class AnswerLostError(Exception):
    """Standard output cannot be written although its reader lives, as on a full disk."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Console:
    """Streams and environment of one command line."""

    stdin: TextIO
    stdout: TextIO
    stderr: TextIO
    environ: Mapping[str, str]
    program: str = "mig-manager"  # at the start of every remark
    replace_adapter: ReplaceAdapter = keep

    @functools.cached_property
    def remarks(self) -> line_writer.LineWriter:
        """Standard error for remarks and log lines: no write raises or blocks."""
        return line_writer.LineWriter(
            self.stderr, journal_stream=self.environ.get("JOURNAL_STREAM", "")
        )

    @staticmethod
    def of_process(program: str = "mig-manager") -> "Console":
        """Return the streams and the environment of this process; a closed stream is empty."""
        nowhere = pathlib.Path(os.devnull)
        return Console(
            stdin=sys.stdin or nowhere.open(),
            stdout=sys.stdout or nowhere.open("w"),
            stderr=sys.stderr or nowhere.open("w"),
            environ=process.environ(),
            program=program,
        )

    def style(self, colour: node_settings.Colour) -> styles.Style:
        """Return the style that standard output supports."""
        is_coloured = colour is node_settings.Colour.ALWAYS or (
            colour is node_settings.Colour.AUTO and self.stdout.isatty()
        )
        # In the C locale Python writes UTF-8, and may set LC_CTYPE itself (PEP 538, PEP 540).
        variables = ("LC_ALL", "LC_CTYPE", "LANG")
        everywhere, characters, language = (self.environ.get(name, "") for name in variables)
        locale = everywhere or characters.replace(_COERCED, "") or language
        is_drawable = _encodable(self.stdout, _DRAWN_WITH) == _DRAWN_WITH
        return styles.Style(
            colour=is_coloured,
            unicode=is_drawable and locale not in ("C", "POSIX"),
            columns=self._columns(),
        )

    def _columns(self) -> int | None:
        """Return the width of the terminal, or COLUMNS; None if lines have no limit."""
        text = self.environ.get("COLUMNS", "")
        if text.isascii() and text.isdecimal() and int(text[:_MAX_DIGITS]):
            return int(text[:_MAX_DIGITS])
        return _columns_of(self.stdout)

    @property
    def can_redraw(self) -> bool:
        """Whether standard output is a terminal that can erase lines."""
        return self.stdout.isatty() and self._can_erase

    @property
    def progress_columns(self) -> int:
        """The width of the terminal that shows progress; 0 if it cannot erase a line."""
        return (self.remark_columns or 0) if self._can_erase else 0

    @property
    def _can_erase(self) -> bool:
        return self.environ.get("TERM") != "dumb"

    @property
    def remark_columns(self) -> int | None:
        """The width of the terminal that shows the remarks; None without a terminal."""
        return _columns_of(self.stderr)

    def say(self, text: str) -> None:
        """Write an answer.

        Raises:
            AnswerLostError: It cannot be written.
            BrokenPipeError: The reader has ended.
        """
        self.write(text if text.endswith("\n") else f"{text}\n")

    def write(self, content: str | bytes) -> None:
        """Write an answer unchanged.

        Raises:
            AnswerLostError: It cannot be written.
            BrokenPipeError: The reader has ended.
        """
        try:
            if isinstance(content, str):
                self.stdout.write(_encodable(self.stdout, content))
            else:
                self.stdout.buffer.write(content)
            self.stdout.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            why = error.strerror or str(error)
            raise AnswerLostError(f"cannot write the answer: {why}") from error

    def answer(
        self,
        output_format: node_settings.OutputFormat,
        data: Callable[[], Mapping[str, object]],
        text: Callable[[], str],
        *,
        is_good: bool = True,
    ) -> int:
        """Write an answer as JSON, as YAML, or else as text; return the exit status.

        Raises:
            AnswerLostError: It cannot be written.
            BrokenPipeError: The reader has ended.
        """
        if output_format.is_data:
            self.say(render_answer(data(), output_format))
        else:
            self.say(styles.harmless(text()))
        return DONE if is_good else FAILED

    def note(
        self,
        text: str,
        *,
        remedy: str = "",
        priority: line_writer.Priority = line_writer.Priority.NOTICE,
    ) -> None:
        """Write a sentence, and the remedy below it; never raises."""
        style = styles.Style(columns=self.remark_columns)
        lines = [style.fit(f"{self.program}: {text}")]
        if remedy:
            lines.append(style.fit(f"  remedy: {remedy}"))
        self.remarks.put("\n".join(lines), priority)

    def note_error(
        self,
        error: errors.MigManagerError,
        remedy: str,
        priority: line_writer.Priority = line_writer.Priority.NOTICE,
    ) -> None:
        """Write the message of an error, and the messages of its document's later errors."""
        *texts, last = error.message, *error.others
        if len(texts) >= _MAX_ERRORS:
            last = f"{len(texts) + 1 - _MAX_ERRORS} more errors"
        for message in texts[:_MAX_ERRORS]:
            self.note(message, priority=priority)
        self.note(last, remedy=remedy, priority=priority)

    def configure_log(
        self, level: node_settings.LogLevel, *, is_debug: bool, is_json: bool = False
    ) -> None:
        """Write the log beside the remarks, from this level on or in full."""
        from mig_manager.adapters.host import log  # noqa: PLC0415 - not for every command

        level = node_settings.LogLevel.DEBUG if is_debug else level
        log.configure(level=level.value, is_json=is_json, lines=self.remarks)

    def parse_command_line(self, parse: Callable[[], _Parsed]) -> _Parsed | None:
        """Parse a command line; None if it requests help, which argparse prints.

        Raises:
            AnswerLostError: The help cannot be written.
            BrokenPipeError: The reader has ended.
        """
        try:
            with contextlib.redirect_stdout(self.stdout):
                return parse()
        except SystemExit:
            self.write("")  # argparse ignores that its text cannot be written
            return None

    def exit_status(
        self,
        run: Callable[[], int],
        *,
        remedy: Callable[[errors.MigManagerError], str],
        priority: line_writer.Priority = line_writer.Priority.NOTICE,
    ) -> int:
        """Run a command line, report its exception, and return its exit status."""
        try:
            return run()
        except errors.MigManagerError as error:
            self.note_error(error, remedy(error), priority)
            status = UNUSABLE if error.reason in _INPUT_REASONS else FAILED
            return UNKNOWN_COMMAND if isinstance(error, errors.UnknownCommandError) else status
        except KeyboardInterrupt:
            return INTERRUPTED
        except BrokenPipeError:
            self.forget()
            return _BROKEN_PIPE
        except AnswerLostError as error:
            self.note(str(error), priority=priority)
            self.forget()
            return FAILED
        except Exception as error:  # noqa: BLE001 - a bug gets a remedy, too
            what = f"internal error: {type(error).__name__}: {error}"
            remedy_text = f"This is a bug in {self.program}; please report it with these lines:"
            self.note(what, remedy=remedy_text, priority=priority)
            traceback.print_exception(error, file=self.remarks)
            return FAILED

    def forget(self) -> None:
        """Redirect standard output to /dev/null: the interpreter flushes it at the end."""
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.stdout.fileno())
            os.close(nowhere)


def _columns_of(stream: TextIO) -> int | None:
    """Return the width of a stream's terminal; None if it is no terminal or has no size."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or None
    except (OSError, ValueError):
        return None


def _encodable(stream: TextIO, text: str) -> str:
    """Return the text; escape characters that the stream cannot encode."""
    encoding = stream.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def end_process(status: int) -> NoReturn:
    """End this process with an exit status, even if a call of a command never returns."""
    if threading.active_count() > 1:
        from mig_manager.adapters.host import call_thread  # noqa: PLC0415 - not for `--help`

        call_thread.exit_if_hung(status)
    sys.exit(status)


def render_answer(
    data: Mapping[str, object],
    output_format: node_settings.OutputFormat = node_settings.OutputFormat.JSON,
) -> str:
    """Return an answer for machines, with the version of its schema."""
    return render({"apiVersion": API_VERSION, **json_text.in_camel_case(data)}, output_format)


def render(data: Mapping[str, object], output_format: node_settings.OutputFormat) -> str:
    """Return an answer as JSON or YAML."""
    if output_format is node_settings.OutputFormat.JSON:
        return json.dumps(data, indent=2) + "\n"

    from mig_manager.core.files import yaml_text  # noqa: PLC0415 - loads YAML

    # Mappings and words of any type become JSON's.
    return yaml_text.dump(json.loads(json.dumps(data)))
