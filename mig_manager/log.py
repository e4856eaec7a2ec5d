"""Logging, configured once: one event a line, on standard error.

Event names are stable identifiers; what varies is in the fields. Tracebacks never carry the
values of local variables, because those include tokens.
"""

import io
import logging
from collections.abc import MutableMapping
from typing import TextIO

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

_LEVELS = logging.getLevelNamesMapping()


def configure(*, level: str, is_json: bool, stream: TextIO) -> None:
    """Send this process's log lines to a stream.

    Args:
        level: The least severe level written: ``debug``, ``info``, ``warning`` or ``error``.
        is_json: One JSON object a line, for machines; else ``key=value`` for people.
        stream: Where lines go; standard error, so that answers on standard output stay clean.
    """
    threshold = _LEVELS[level.upper()]
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *(_json_tail() if is_json else _console_tail()),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.PrintLoggerFactory(file=stream),
        # A cached logger would keep the stream of an earlier configuration.
        cache_logger_on_first_use=False,
    )
    _forward_foreign(max(threshold, logging.WARNING))


def _json_tail() -> list[Processor]:
    transformer = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
    return [
        structlog.processors.ExceptionRenderer(transformer),
        structlog.processors.JSONRenderer(),
    ]


def _console_tail() -> list[Processor]:
    return [structlog.processors.format_exc_info, _as_key_value]


def _as_key_value(_logger: WrappedLogger, _method: str, event_dict: EventDict) -> str:
    """Render ``time level event key=value ...``, a traceback on the lines after it."""
    line = io.StringIO()
    head = (_taken(event_dict, key) for key in ("timestamp", "level", "event"))
    traceback = _taken(event_dict, "exception")
    line.write(" ".join(head))
    for key, value in event_dict.items():
        text = str(value)
        is_bare = text and not any(character in " \t\r\n\"'=" for character in text)
        line.write(f" {key}={text if is_bare else repr(text)}")
    return line.getvalue() + (f"\n{traceback}" if traceback else "")


def _taken(event_dict: MutableMapping[str, object], key: str) -> str:
    return str(event_dict.pop(key, ""))


class _Forward(logging.Handler):
    """Passes on what libraries say through the standard library's logging."""

    def emit(self, record: logging.LogRecord) -> None:
        """Log the record as one of our events."""
        structlog.get_logger().log(
            record.levelno, "library_message", library=record.name, message=record.getMessage()
        )


def _forward_foreign(threshold: int) -> None:
    root = logging.getLogger()
    for handler in list(root.handlers):
        if isinstance(handler, _Forward):
            root.removeHandler(handler)
    root.addHandler(_Forward(level=threshold))
