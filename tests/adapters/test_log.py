"""What a log line looks like, and what it never carries."""

import contextlib
import io
import json
import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from mig_manager.adapters.host import log


@contextlib.contextmanager
def logging_to(*, is_json: bool, level: str = "info") -> Iterator[io.StringIO]:
    stream = io.StringIO()
    log.configure(level=level, is_json=is_json, stream=stream)
    try:
        yield stream
    finally:
        structlog.reset_defaults()
        root = logging.getLogger()
        for handler in list(root.handlers):
            if type(handler).__module__ == "mig_manager.adapters.host.log":
                root.removeHandler(handler)


def only_line(stream: io.StringIO) -> dict[str, Any]:
    (line,) = stream.getvalue().splitlines()
    parsed: dict[str, Any] = json.loads(line)
    return parsed


def fail() -> None:
    token = "s3cret"  # noqa: S105 - what must not be logged
    raise ValueError(f"no use for {len(token)} characters")


def test_a_json_line_has_event_level_utc_time_and_fields() -> None:
    with logging_to(is_json=True) as stream:
        structlog.get_logger().info("plan_made", steps=3)

    line = only_line(stream)
    assert (line["event"], line["level"], line["steps"]) == ("plan_made", "info", 3)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z", line["timestamp"])


def test_a_console_line_is_key_value_with_quotes_where_needed() -> None:
    with logging_to(is_json=False) as stream:
        structlog.get_logger().warning("pod_evicted", pod="a/b", why="holds it", gpu="")

    assert stream.getvalue().endswith(" warning pod_evicted pod=a/b why='holds it' gpu=''\n")


def test_lines_below_the_level_are_not_written() -> None:
    with logging_to(is_json=True, level="warning") as stream:
        structlog.get_logger().info("plan_made")

    assert stream.getvalue() == ""


@pytest.mark.parametrize("is_json", [True, False])
def test_a_traceback_shows_no_local_variables(*, is_json: bool) -> None:
    with logging_to(is_json=is_json) as stream:
        try:
            fail()
        except ValueError:
            structlog.get_logger().exception("run_crashed")

    assert "no use for 6 characters" in stream.getvalue()
    assert "s3cret" not in stream.getvalue()


def test_a_json_traceback_stays_on_its_line() -> None:
    with logging_to(is_json=True) as stream:
        try:
            fail()
        except ValueError:
            structlog.get_logger().exception("run_crashed")

    assert only_line(stream)["exception"][0]["exc_type"] == "ValueError"


def test_library_warnings_are_logged_as_our_events() -> None:
    with logging_to(is_json=True) as stream:
        logging.getLogger("urllib3").warning("retrying %s", "once")
        logging.getLogger("urllib3").info("connected")

    line = only_line(stream)
    assert (line["event"], line["library"]) == ("library_message", "urllib3")
    assert line["message"] == "retrying once"


def test_configuring_again_moves_the_lines_to_the_new_stream() -> None:
    logger = structlog.get_logger()
    with logging_to(is_json=True) as first:
        logger.info("one")
        with logging_to(is_json=True) as second:
            logger.info("two")
            logging.getLogger("x").warning("three")

    assert "two" not in first.getvalue()
    assert second.getvalue().count("three") == 1
