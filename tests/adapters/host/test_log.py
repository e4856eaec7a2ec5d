"""What a log line looks like and never carries, and lines that standard error does not take."""

import io
import json
import logging
import os
import pathlib
import re
import socket
import tty
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import structlog

from mig_manager.adapters.host import line_writer, log
from mig_manager.cli.toolkit import console
from tests.rigs.shell import commandline, lost_stderr


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    commandline.forget()


def writer_on(fd: int, *, journal_stream: str = "") -> line_writer.LineWriter:
    stream = open(fd, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - a descriptor
    return line_writer.LineWriter(stream, journal_stream=journal_stream)


def read_all(reader: int) -> str:
    os.set_blocking(reader, False)
    try:
        return os.read(reader, 1 << 20).decode()
    except BlockingIOError:
        return ""


def logging_to(*, is_json: bool) -> io.StringIO:
    stream = io.StringIO()
    log.configure(level="info", is_json=is_json, lines=line_writer.LineWriter(stream))
    return stream


def only_line(stream: io.StringIO) -> dict[str, Any]:
    (line,) = stream.getvalue().splitlines()
    parsed: dict[str, Any] = json.loads(line)
    return parsed


def fail() -> None:
    token = "s3cret"  # noqa: S105 - what must not be logged
    raise ValueError(f"no use for {len(token)} characters")


def test_a_json_line_has_event_level_utc_time_and_fields() -> None:
    stream = logging_to(is_json=True)
    structlog.get_logger().info("plan_made", steps=3)

    line = only_line(stream)
    assert (line["event"], line["level"], line["steps"]) == ("plan_made", "info", 3)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z", line["timestamp"])


def test_a_console_line_is_key_value_with_quotes_where_needed() -> None:
    stream = logging_to(is_json=False)
    structlog.get_logger().warning("pod_evicted", pod="a/b", why="holds it", gpu="")

    assert stream.getvalue().endswith(" warning pod_evicted pod=a/b why='holds it' gpu=''\n")


@pytest.mark.parametrize("is_json", [True, False])
def test_a_traceback_shows_no_local_variables_and_stays_on_its_json_line(*, is_json: bool) -> None:
    stream = logging_to(is_json=is_json)
    try:
        fail()
    except ValueError:
        structlog.get_logger().exception("run_crashed")

    assert "no use for 6 characters" in stream.getvalue()
    assert "s3cret" not in stream.getvalue()
    if is_json:
        assert only_line(stream)["exception"][0]["exc_type"] == "ValueError"


def test_library_warnings_become_events_from_the_level_on() -> None:
    stream = logging_to(is_json=True)
    logging.getLogger("urllib3").warning("retrying %s", "once")
    logging.getLogger("urllib3").info("connected")
    structlog.get_logger().debug("plan_made")

    line = only_line(stream)
    assert (line["event"], line["library"]) == ("library_message", "urllib3")
    assert line["message"] == "retrying once"


def test_configuring_again_moves_the_lines_to_the_new_stream() -> None:
    logger = structlog.get_logger()
    first = logging_to(is_json=True)
    logger.info("one")
    second = logging_to(is_json=True)
    logger.info("two")
    logging.getLogger("x").warning("three")

    assert "two" not in first.getvalue()
    assert second.getvalue().count("three") == 1


# -- lines that are not written ---------------------------------------------------------------


@pytest.mark.parametrize("way", lost_stderr.WAYS)
def test_unwritable_line_is_dropped_and_counted_without_an_error(way: str) -> None:
    before = line_writer.LineWriter.dropped
    with lost_stderr.WAYS[way]() as stderr:
        lines = writer_on(stderr)
        lines.put("one")
        log.configure(level="info", is_json=True, lines=lines)
        structlog.get_logger().warning("change_failed", reason="InUse")

    assert line_writer.LineWriter.dropped - before == 2


def test_a_pipe_that_cannot_be_reopened_does_not_block_either(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError

    before = line_writer.LineWriter.dropped
    with lost_stderr.full_pipe() as (reader, writer):
        with monkeypatch.context() as patched:
            patched.setattr(os, "open", refuse)
            lines = writer_on(writer)
        lines.put("one")
        assert line_writer.LineWriter.dropped - before == 1
        read_all(reader)
        lines.put("two " * 2000)
        text = read_all(reader)

    assert text.startswith("1 lines could not be written before this one\n")


def test_dropped_lines_are_reported_in_one_line_once_the_reader_resumes() -> None:
    with lost_stderr.full_pipe() as (reader, writer):
        log.configure(level="info", is_json=True, lines=writer_on(writer))
        for number in range(3):
            structlog.get_logger().info("pod_evicted", number=number)
        assert set(read_all(reader)) == {"."}
        structlog.get_logger().info("run_finished")
        structlog.get_logger().info("agent_stopped")
        lines: list[dict[str, Any]] = [json.loads(line) for line in read_all(reader).splitlines()]

    events = [line["event"] for line in lines]
    assert events == ["log_lines_dropped", "run_finished", "agent_stopped"]
    assert (lines[0]["count"], lines[0]["level"]) == (3, "warning")


def test_a_line_after_a_truncated_one_starts_on_its_own_line() -> None:
    with lost_stderr.full_pipe() as (reader, writer):
        lines = writer_on(writer)
        read_all(reader)
        lines.put("x" * 6000)
        cut = read_all(reader)
        lines.put("next")
        rest = read_all(reader)

    assert set(cut) == {"x"}
    assert rest.splitlines() == ["", "1 lines could not be written before this one", "next"]


def test_lines_are_appended_after_those_of_other_writers(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "log"
    with path.open("w", encoding="utf-8") as file:
        lines = writer_on(file.fileno())
        lines.put("one")
        os.write(file.fileno(), b"of another process\n")
        lines.put("two")

    assert path.read_text(encoding="utf-8") == "one\nof another process\ntwo\n"


@pytest.mark.parametrize("make", [os.pipe, os.openpty])
def test_pipe_or_terminal_stays_blocking_and_has_no_priorities(
    make: Callable[[], tuple[int, int]],
) -> None:
    reader, writer = make()
    if make is os.openpty:
        tty.setraw(writer)
    writer_on(writer, journal_stream="1:2").put("one", line_writer.Priority.ERROR)

    assert os.get_blocking(writer)
    assert read_all(reader) == "one\n"
    os.close(reader)
    os.close(writer)


def test_journald_gets_the_priority_of_every_line_and_remark() -> None:
    sender, journald = socket.socketpair()
    with sender, journald, open(sender.fileno(), "w", encoding="utf-8", closefd=False) as stderr:
        status = os.fstat(sender.fileno())
        stream = f"{status.st_dev}:{status.st_ino}"
        lines = writer_on(sender.fileno(), journal_stream=stream)
        log.configure(level="debug", is_json=False, lines=lines)
        logger = structlog.get_logger()
        for write in (logger.debug, logger.info, logger.warning, logger.error):
            write("line")
        try:
            int("x")
        except ValueError:
            logger.exception("crashed")
        logged = journald.recv(1 << 20).decode().splitlines()
        terminal = console.Console(
            stdin=io.StringIO(),
            stdout=io.StringIO(),
            stderr=stderr,
            environ={"JOURNAL_STREAM": stream},
        )
        terminal.note("a remark")
        terminal.note("an error", remedy="mend it", priority=line_writer.Priority.ERROR)
        remarks = journald.recv(1 << 20).decode().splitlines()

    assert [line[:3] for line in logged[:4]] == ["<7>", "<6>", "<4>", "<3>"]
    assert {line[:3] for line in logged[4:]} == {"<3>"}
    assert len(logged) > 5
    errors = ["<3>mig-manager: an error", "<3>  remedy: mend it"]
    assert remarks == ["<5>mig-manager: a remark", *errors]


class _Hostile:
    def __repr__(self) -> str:
        raise RuntimeError

    __str__ = __repr__


@pytest.mark.parametrize("is_json", [True, False])
def test_a_line_with_an_unrenderable_field_is_dropped_and_counted(*, is_json: bool) -> None:
    stream = logging_to(is_json=is_json)
    structlog.get_logger().info("one", field=_Hostile())
    structlog.get_logger().info("two")

    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert "log_lines_dropped" in lines[0]
    assert "two" in lines[1]


def test_characters_that_the_stream_cannot_encode_are_escaped() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    line_writer.LineWriter(stream).put("für \udcff")

    assert stream.buffer.getvalue() == b"f\\xfcr \\udcff\n"
