"""Times as people read them."""

import datetime as dt

import pytest

from mig_manager.core import timestamps

NOW = dt.datetime(2026, 3, 1, 12, 0, 0, tzinfo=dt.UTC)


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
