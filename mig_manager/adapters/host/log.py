"""Logging, configured once: one event a line, on standard error.

Event names are stable identifiers; what varies is in the fields. Tracebacks never show the values
of local variables, because those include tokens. Logging never raises and never blocks: see
``line_writer``.
"""

import io
import logging
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, TextIO

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from mig_manager.adapters.host import line_writer

_LEVELS = logging.getLevelNamesMapping()


def configure(*, level: str, is_json: bool, stream: TextIO | line_writer.LineWriter) -> None:
    """Configure logging for this process.

    Args:
        level: The least severe level written: ``debug``, ``info``, ``warning`` or ``error``.
        is_json: One JSON object a line, for machines; else ``key=value`` for people.
        stream: Standard error, so that standard output has only results.
    """
    threshold = _LEVELS[level.upper()]
    lines = (
        stream if isinstance(stream, line_writer.LineWriter) else line_writer.LineWriter(stream)
    )
    processors: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        *(_json_renderers() if is_json else _console_renderers()),
    ]
    lines.notice = _notice(processors)
    structlog.configure(
        processors=processors,
        wrapper_class=_never_raising(threshold, lines),
        logger_factory=lambda *_: _Logger(lines),
        # A cached logger would keep the stream of an earlier configuration.
        cache_logger_on_first_use=False,
    )
    _forward_libraries(max(threshold, logging.WARNING))


class _Logger:
    """Writes rendered lines, with the priority of the method that structlog calls."""

    def __init__(self, lines: line_writer.LineWriter) -> None:
        self._lines = lines

    def debug(self, line: str) -> None:
        self._lines.put(line, line_writer.Priority.DEBUG)

    def info(self, line: str) -> None:
        self._lines.put(line, line_writer.Priority.INFO)

    def warning(self, line: str) -> None:
        self._lines.put(line, line_writer.Priority.WARNING)

    def error(self, line: str) -> None:
        self._lines.put(line, line_writer.Priority.ERROR)

    critical = exception = error


def _never_raising(threshold: int, lines: line_writer.LineWriter) -> type[Any]:
    """Return structlog's logger for a level, whose methods never raise."""
    logger: Any = structlog.make_filtering_bound_logger(threshold)

    class NeverRaising(logger):  # type: ignore[misc]
        """Drops and counts a line that cannot be rendered."""

        def _proxy_to_logger(self, *arguments: Any, **fields: Any) -> None:
            try:
                super()._proxy_to_logger(*arguments, **fields)
            except Exception:  # noqa: BLE001 - a bad field must not harm the caller
                lines.drop()

    return NeverRaising


def _notice(processors: Sequence[Processor]) -> Callable[[int], str]:
    """Return a renderer of the event that reports how many lines were dropped."""

    def write(event: str, **fields: object) -> str:
        rendered: Any = {"event": event, **fields}
        for processor in processors:
            rendered = processor(None, "warning", rendered)
        return str(rendered)

    return lambda count: write("log_lines_dropped", count=count)


def _json_renderers() -> list[Processor]:
    transformer = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
    return [
        structlog.processors.ExceptionRenderer(transformer),
        structlog.processors.JSONRenderer(),
    ]


def _console_renderers() -> list[Processor]:
    return [structlog.processors.format_exc_info, _as_key_value]


def _as_key_value(_logger: WrappedLogger, _method: str, event_dict: EventDict) -> str:
    """Render ``time level event key=value ...``, a traceback on the lines after it."""
    line = io.StringIO()
    head = (_pop(event_dict, key) for key in ("timestamp", "level", "event"))
    traceback = _pop(event_dict, "exception")
    line.write(" ".join(head))
    for key, value in event_dict.items():
        text = str(value)
        is_bare = text and not any(character in " \t\r\n\"'=" for character in text)
        line.write(f" {key}={text if is_bare else repr(text)}")
    return line.getvalue() + (f"\n{traceback}" if traceback else "")


def _pop(event_dict: MutableMapping[str, object], key: str) -> str:
    return str(event_dict.pop(key, ""))


class _Forward(logging.Handler):
    """Forwards log records of libraries."""

    def emit(self, record: logging.LogRecord) -> None:
        """Log the record as one of our events."""
        try:
            message = record.getMessage()
        except (TypeError, ValueError):
            # The arguments do not fit the format.
            message = str(record.msg)
        structlog.get_logger().log(
            record.levelno, "library_message", library=record.name, message=message
        )


def _forward_libraries(threshold: int) -> None:
    root = logging.getLogger()
    for handler in list(root.handlers):
        if isinstance(handler, _Forward):
            root.removeHandler(handler)
    root.addHandler(_Forward(level=threshold))
