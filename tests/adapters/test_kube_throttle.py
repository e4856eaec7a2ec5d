"""How fast the agent may ask the API."""

import pytest

from mig_manager.adapters.kubernetes import api


class Time:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_burst_passes_without_waiting() -> None:
    bucket = api.RateLimit(per_s=10, burst=5, monotonic=Time())

    assert [bucket.take() for _ in range(5)] == [0.0] * 5


def test_whoever_comes_after_the_burst_waits_in_turn() -> None:
    bucket = api.RateLimit(per_s=10, burst=2, monotonic=Time())

    waits = [bucket.take() for _ in range(5)]

    assert waits == pytest.approx([0.0, 0.0, 0.1, 0.2, 0.3])


def test_tokens_come_back_with_time_and_never_beyond_the_burst() -> None:
    time = Time()
    bucket = api.RateLimit(per_s=10, burst=2, monotonic=time)
    for _ in range(4):
        bucket.take()

    time.now_s += 0.3
    assert bucket.take() == pytest.approx(0.0)
    time.now_s += 3600
    assert [bucket.take() for _ in range(3)] == pytest.approx([0.0, 0.0, 0.1])
