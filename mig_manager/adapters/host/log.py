"""Configure the log: one event a line, in the words of structlog.

Many commands write remarks and log nothing: they do not load this module, or structlog.
"""

import functools
import logging
import types
from collections.abc import MutableMapping
from typing import Any

import structlog

from mig_manager.adapters.host import line_writer

_FORWARDER = "mig-manager"
_PRIORITIES = {
    "debug": line_writer.Priority.DEBUG,
    "info": line_writer.Priority.INFO,
    "warning": line_writer.Priority.WARNING,
    "error": line_writer.Priority.ERROR,
    "critical": line_writer.Priority.ERROR,
    "exception": line_writer.Priority.ERROR,
}


def configure(*, level: str, is_json: bool, lines: line_writer.LineWriter) -> None:
    """Configure logging for this process: one event a line; logging never raises.

    Event names are stable identifiers; variable parts are in the fields. Tracebacks never show the
    values of local variables, which include tokens.

    Args:
        level: The least severe level written: ``debug``, ``info``, ``warning`` or ``error``.
        is_json: One JSON object a line, for machines; else ``key=value`` for people.
        lines: To standard error, so that standard output has only results.
    """
    threshold = logging.getLevelNamesMapping()[level.upper()]
    processors = _processors(is_json=is_json)

    def write(event: str, **fields: object) -> str:
        rendered: Any = {"event": event, **fields}
        for processor in processors:
            rendered = processor(None, "warning", rendered)
        return str(rendered)

    def render_dropped(count: int) -> str:
        return write("log_lines_dropped", count=count)

    logger: Any = structlog.make_filtering_bound_logger(threshold)

    class NeverRaising(logger):  # type: ignore[misc]
        """Drops and counts a line that cannot be rendered."""

        def _proxy_to_logger(self, *arguments: Any, **fields: Any) -> None:
            try:
                super()._proxy_to_logger(*arguments, **fields)
            except Exception:  # noqa: BLE001 - a bad field must not harm the caller
                lines.drop()

    writers = {
        method: functools.partial(lines.put, priority=priority, render_dropped=render_dropped)
        for method, priority in _PRIORITIES.items()
    }
    structlog.configure(
        processors=processors,
        wrapper_class=NeverRaising,
        logger_factory=lambda *_: types.SimpleNamespace(**writers),
        # A cached logger would keep the stream of an earlier configuration.
        cache_logger_on_first_use=False,
    )
    _forward_records(max(threshold, logging.WARNING))


def _processors(*, is_json: bool) -> list[Any]:
    """Return the steps from the fields of an event to its line."""
    transformer = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
    for_machines = (
        structlog.processors.ExceptionRenderer(transformer),
        structlog.processors.JSONRenderer(),
    )
    for_people = structlog.processors.format_exc_info, _as_key_value
    return [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        *(for_machines if is_json else for_people),
    ]


def _forward_records(level: int) -> None:
    """Log the records of libraries from this level on as our events, and only once."""

    class Forwarder(logging.Handler):
        """Logs the records of libraries as our events."""

        def emit(self, record: logging.LogRecord) -> None:
            try:
                message = record.getMessage()
            except (TypeError, ValueError):
                # The arguments do not fit the format.
                message = str(record.msg)
            structlog.get_logger().log(
                record.levelno, "library_message", library=record.name, message=message
            )

    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if handler.name == _FORWARDER]:
        root.removeHandler(handler)
    forwarder = Forwarder(level)
    forwarder.name = _FORWARDER
    root.addHandler(forwarder)


def _as_key_value(_logger: object, _method: str, event: MutableMapping[str, object]) -> str:
    """Render ``time level event key=value ...``, a traceback on the lines after it."""
    words = [str(event.pop(key, "")) for key in ("timestamp", "level", "event")]
    traceback = event.pop("exception", "")
    for key, value in event.items():
        text = str(value)
        is_bare = text and not any(character in " \t\r\n\"'=" for character in text)
        words.append(f"{key}={text if is_bare else repr(text)}")
    return " ".join(words) + (f"\n{traceback}" if traceback else "")
