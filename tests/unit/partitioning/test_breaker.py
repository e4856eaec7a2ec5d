"""The partitioner's circuit breaker: when requests stop, and how they resume."""

import pytest

from mig_manager.core.partitioning import breaker

_MIN_S = 60.0
Answer = tuple[float, int, int]  # minutes, applied and failed requests


def after(*answers: Answer, max_failures: int = 3) -> breaker.Breaker:
    last = breaker.Breaker()
    for minutes, applied, failed in answers:
        last = last.after(
            applied=applied, failed=failed, max_failures=max_failures, now_s=minutes * _MIN_S
        )
    return last


@pytest.mark.parametrize(
    ("answers", "max_failures", "stop_min"),
    [
        ([(0, 0, 2)], 3, 0),
        ([(0, 0, 3)], 3, 10),
        ([(0, 0, 1), (4, 0, 1), (9, 0, 1)], 3, 10),
        ([(0, 0, 2), (11, 0, 1)], 3, 0),
        ([(0, 4, 0), (1, 0, 3)], 3, 0),
        ([(0, 3, 0), (1, 0, 3)], 3, 10),
        # Successes leave the window.
        ([(0, 4, 0), (1, 0, 3), (10.5, 0, 0)], 3, 0),
        ([(0, 4, 0), (1, 0, 3), (10.5, 1, 0)], 3, 0),
        ([(0, 4, 0), (1, 0, 3), (10.5, 0, 1)], 3, 10),
        ([(0, 0, 99)], 0, 0),
        # Answers during the stop are about requests from before it.
        ([(0, 0, 3), (5, 0, 3)], 3, 10),
        ([(0, 0, 3), (5, 3, 0)], 3, 10),
        # The trial.
        ([(0, 0, 3), (11, 0, 1)], 3, 20),
        ([(0, 0, 3), (11, 1, 0)], 3, 0),
        ([(0, 0, 3), (11, 0, 1), (32, 0, 1), (73, 0, 1), (134, 0, 1)], 3, 60),
        ([(0, 0, 3), (11, 1, 0), (12, 0, 2)], 3, 0),
    ],
)
def test_the_breaker_stops_after_failures_and_resumes(
    answers: list[Answer], max_failures: int, stop_min: float
) -> None:
    assert after(*answers, max_failures=max_failures).stop_s == stop_min * _MIN_S


@pytest.mark.parametrize(
    ("minutes", "awaited", "allowed"), [(9.9, 0, 0), (10, 0, 1), (10, 1, 0), (99, 2, 0)]
)
def test_one_request_at_a_time_is_allowed_after_a_stop(
    minutes: float, awaited: int, allowed: int
) -> None:
    stopped = after((0, 0, 3))

    assert stopped.allowance(awaited, now_s=minutes * _MIN_S) == allowed
    assert breaker.Breaker().allowance(awaited, now_s=minutes * _MIN_S) is None
