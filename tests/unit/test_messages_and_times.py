"""Short messages, times as people write them, waits, and bursts of events."""

import dataclasses
import datetime as dt
import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mig_manager import errors, reasons
from mig_manager.agent import outcomes
from mig_manager.core import messages, timestamps, timing
from tests.rigs.node import fakes

NOW = dt.datetime(2026, 3, 1, 12, 0, 0, tzinfo=dt.UTC)


def test_a_few_of_many_are_named_and_a_shared_cause_is_mentioned_once() -> None:
    assert messages.list_names(["a", "b"]) == "a, b"
    assert messages.list_names([f"p{n}" for n in range(7)]) == "p0, p1, p2, p3, p4 and 2 more"
    assert messages.by_cause([("a", "x"), ("b", "y"), ("c", "x")]) == "a, c (x); b (y)"
    assert messages.by_cause([("a", ""), ("b", "y"), ("c", "")]) == "a, c; b (y)"
    many = [(f"p{n}", f"x{n // 2}") for n in range(14)]
    assert messages.by_cause(many).endswith("p8, p9 (x4); 4 more")


@pytest.mark.parametrize(
    ("text", "limit", "cut"),
    [
        ("one. two.", 9, "one. two."),
        ("x" * 5000, 1024, "x" * 1020 + " ..."),
        ("äöü " * 99 + "end. Raise the timeout.", 40, "äöü äöü ... Raise the timeout."),
        ("long " * 99 + "Is it up? Read the log.", 40, "long long long long ... Read the log."),
    ],
)
def test_long_message_is_cut_at_a_word_and_keeps_its_last_sentence(
    text: str, limit: int, cut: str
) -> None:
    assert messages.fit(text, limit) == cut
    assert len(cut.encode()) <= limit


@given(
    reason=st.sampled_from([reason for reason in reasons.Reason if reason.remedy]),
    message=st.text(max_size=40).map(lambda text: f"{text} " * 150) | st.text(),
    end=st.sampled_from(["", ".", "?", "!"]),
)
def test_an_event_of_any_failure_is_short_and_ends_with_the_remedy(
    reason: reasons.Reason, message: str, end: str
) -> None:
    published = outcomes.failure(reason, message + end).message
    event = messages.fit(published, messages.MAX_EVENT_BYTES)

    assert len(event.encode()) <= 1024
    assert event.endswith(reason.remedy)


@pytest.mark.parametrize(
    ("reason", "named"),
    [
        (reasons.Reason.DRAIN_TIMEOUT, "--drain-timeout-s"),
        (reasons.Reason.DOES_NOT_FIT, "'kubectl mig layouts NODE'"),
        (reasons.Reason.UNKNOWN_PROFILE, "'kubectl mig layouts NODE'"),
        (reasons.Reason.NO_GPU_MATCHES, "'kubectl mig layouts NODE'"),
    ],
)
def test_a_remedy_on_a_node_names_an_option_or_a_cluster_command(
    reason: reasons.Reason, named: str
) -> None:
    assert named in outcomes.failure(reason, "x").message
    assert "mig-manager" not in reason.remedy


def test_a_sentence_that_has_an_end_mark_gets_no_other() -> None:
    reason = reasons.Reason.UNKNOWN_CONFIG

    assert [messages.with_full_stop(text) for text in ("a", "a.", "a?", "a!")] == [
        "a.",
        "a.",
        "a?",
        "a!",
    ]
    assert messages.join("a", "", "b?", "c.", "d") == "a; b? c. d"
    assert (
        outcomes.failure(reason, "did you mean 'x'?").message
        == f"did you mean 'x'? {reason.remedy}"
    )


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("2026-03-01T12:00:00Z", "2026-03-01 12:00:00Z"),
        ("2026-03-01T12:00:00.123456Z", "2026-03-01 12:00:00Z"),
        ("2026-03-01T13:00:00+01:00", "2026-03-01 12:00:00Z"), ("2026-03-01T12:00:00", ""),
        ("yesterday", ""), ("0001-01-01T00:00:00+23:00", ""), ("", ""), (None, ""), (7, ""),
    ],
)  # fmt: skip
def test_a_time_is_parsed_or_none(text: object, shown: str) -> None:
    assert timestamps.show(timestamps.parse(text)) == shown


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

    assert timestamps.age(when, NOW) == age


def burst(*added: float) -> timing.Burst:
    events = timing.Burst(quiet_s=0.5, max_s=5.0)
    for now in added:
        events.add(now)
    return events


def test_a_burst_ends_after_a_quiet_while() -> None:
    quiet = burst(10.0, 10.25)

    assert [quiet.ends_in_s(now) for now in (10.25, 10.5, 11.0)] == [0.5, 0.25, 0.0]
    quiet.begin(10.4)
    assert quiet.ends_in_s(10.5) == 0.25


def test_an_endless_burst_ends_after_its_longest_time() -> None:
    endless = burst(*(tenth / 10 for tenth in range(100, 150)))

    assert endless.ends_in_s(14.9) == pytest.approx(0.1)
    assert endless.ends_in_s(15.0) == 0.0


def test_no_burst_ends_before_an_event_or_after_it_was_cleared() -> None:
    events = burst()
    assert events.ends_in_s(1000.0) is None
    events.add(1000.0)
    events.clear()

    assert events.ends_in_s(1000.0) is None
    events.add(1030.0)
    assert events.ends_in_s(1030.0) == 0.5


PAUSES = timing.Backoff(first_s=1.0, max_s=4.0, factor=2.0)


def wait_of(timeout_s: float) -> timing.Wait:
    return timing.Wait(clock=fakes.FakeClock(), timeout_s=timeout_s, backoff=PAUSES)


@pytest.mark.parametrize(
    ("timeout_s", "attempt_s", "expected_s"),
    [
        (0.0, 0.0, [0.0]),
        (9.0, 0.0, [0.0, 1.0, 3.0, 7.0, 9.0]),
        # The time of the first attempt is no wait, and that of others is.
        (9.0, 10.0, [0.0, 11.0, 21.0]),
    ],
)
def test_last_pause_of_a_wait_ends_at_its_deadline(
    timeout_s: float, attempt_s: float, expected_s: list[float]
) -> None:
    wait, at_s = wait_of(timeout_s), list[float]()
    for is_last in wait.tries():
        at_s.append(wait.clock.monotonic())
        assert is_last is (len(at_s) == len(expected_s))
        if attempt_s:
            wait.clock.wait(attempt_s)

    assert at_s == expected_s


def test_a_wait_of_inf_has_no_last_attempt() -> None:
    wait = wait_of(math.inf)

    assert not any(itertools.islice(wait.tries(), 1000))
    assert wait.clock.monotonic() == 1 + 2 + 997 * 4


def test_a_sleep_that_raises_ends_the_wait_with_its_exception() -> None:
    def interrupt(seconds: float) -> None:
        raise errors.Superseded(f"after {seconds:g} s", errors.SupersededBy.OTHER_LAYOUT)

    wait = dataclasses.replace(wait_of(math.inf), sleep=interrupt)
    attempts = wait.tries()

    assert next(attempts) is False
    with pytest.raises(errors.Superseded, match="after 1 s"):
        next(attempts)


def test_the_last_attempt_is_at_the_deadline() -> None:
    assert list(wait_of(2.0).tries()) == [False, False, True]
    assert list(wait_of(0.0).tries()) == [True]


def test_a_token_bucket_grants_a_burst_and_then_one_act_after_each_pause() -> None:
    bucket = timing.TokenBucket(burst=3, pause_s=6.0)

    assert [bucket.take(100.0) for _ in range(4)] == [True, True, True, False]
    assert not bucket.take(105.0)
    assert [bucket.take(106.0) for _ in range(2)] == [True, False]
    assert [bucket.reserve(112.0) for _ in range(3)] == [0.0, 6.0, 12.0]
    assert [bucket.take(1000.0) for _ in range(4)] == [True, True, True, False]
