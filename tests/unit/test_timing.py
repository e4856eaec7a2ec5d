"""Bursts of events, waits and token buckets."""

import dataclasses
import itertools
import math

import pytest

from mig_manager import errors
from mig_manager.core import timing
from tests.rigs.node import fakes


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
