"""Points in time as the API writes them, and how long ago they were as people say it."""

import datetime as dt

_UNITS = ((86400, "d"), (3600, "h"), (60, "m"), (1, "s"))
_TWICE = 2


def parse(text: object) -> dt.datetime | None:
    """Return a time in UTC; None for anything that is none."""
    if not isinstance(text, str):
        return None
    try:
        found = dt.datetime.fromisoformat(text)
        return found.astimezone(dt.UTC) if found.tzinfo else None
    except (ValueError, OverflowError):
        return None


def shown(when: dt.datetime | None) -> str:
    """Return a time to the second, as ``2026-03-01 12:00:00Z``; empty for None."""
    return when.strftime("%Y-%m-%d %H:%M:%SZ") if when else ""


def age(when: dt.datetime | None, now: dt.datetime) -> str:
    """Return how long ago it was, as kubectl's column AGE does: ``95s``, ``12m``, ``3d``."""
    if when is None:
        return "-"
    seconds = max(0, round((now - when).total_seconds()))
    # Two of a unit before the next larger one: 90 minutes say more than 1 hour.
    for size, unit in _UNITS:
        if seconds >= _TWICE * size or size == 1:
            return f"{seconds // size}{unit}"
    return "0s"
