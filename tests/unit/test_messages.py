"""Messages that stay short whatever they are about, and times as people write them."""

import datetime as dt

import pytest

from mig_manager import errors
from mig_manager.agent import outcomes
from mig_manager.core import messages

NOW = dt.datetime(2026, 3, 1, 12, 0, 0, tzinfo=dt.UTC)


def test_a_few_of_many_are_named_and_the_others_counted() -> None:
    assert messages.listed(["a", "b"]) == "a, b"
    assert (
        messages.listed([f"p{number}" for number in range(7)]) == "p0, p1, p2, p3, p4 and 2 more"
    )


def test_a_shared_cause_is_mentioned_once() -> None:
    message = messages.by_cause([("a", "x"), ("b", "y"), ("c", "x")])

    assert message == "a, c (x), b (y)"


def test_a_message_that_fits_stays_as_it_is() -> None:
    assert messages.fit("one. two.", 9) == "one. two."


def test_a_message_is_cut_at_a_word_by_its_bytes_and_keeps_its_last_sentence() -> None:
    message = messages.fit("äöü " * 1000 + "end. Raise the timeout.", 200)

    assert len(message.encode()) <= 200
    assert message.startswith("äöü äöü")
    assert message.endswith("äöü ... Raise the timeout.")


def test_a_message_without_words_or_sentences_is_cut_all_the_same() -> None:
    assert messages.fit("x" * 5000, 1024) == "x" * 1020 + " ..."


def test_a_failure_that_names_everything_is_bounded_and_keeps_its_remedy() -> None:
    remedy = errors.Reason.DRAIN_TIMEOUT.remedy

    message = outcomes.failed(errors.Reason.DRAIN_TIMEOUT, "a-long-word " * 20_000).message

    assert len(message.encode()) <= messages.LONGEST_BYTES
    assert message.endswith(remedy)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("2026-03-01T12:00:00Z", "2026-03-01 12:00:00Z"),
        ("2026-03-01T12:00:00.123456Z", "2026-03-01 12:00:00Z"),
        ("2026-03-01T13:00:00+01:00", "2026-03-01 12:00:00Z"), ("2026-03-01T12:00:00", ""),
        ("yesterday", ""), ("0001-01-01T00:00:00+23:00", ""), ("", ""), (None, ""), (7, ""),
    ],
)  # fmt: skip
def test_a_time_is_read_or_is_none(text: object, shown: str) -> None:
    assert messages.format_time(messages.parse_time(text)) == shown


@pytest.mark.parametrize(
    ("seconds", "age"),
    [
        (None, "-"),
        (-5, "0s"),
        (0, "0s"),
        (119, "119s"),
        (120, "2m"),
        (7199, "119m"),
        (7200, "2h"),
        (86400, "24h"),
        (2 * 86400, "2d"),
    ],
)
def test_an_age_has_two_of_its_unit_at_least(seconds: int | None, age: str) -> None:
    when = None if seconds is None else NOW - dt.timedelta(seconds=seconds)

    assert messages.age(when, NOW) == age
