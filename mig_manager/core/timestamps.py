"""Times of programs and people: parsed, shown, and as an age."""

import datetime as dt

_UNITS = ((86400, "d"), (3600, "h"), (60, "m"), (1, "s"))
_TWICE = 2


def parse(text: object) -> dt.datetime | None:
    """Parse an ISO 8601 time with an offset, as UTC; None if it is anything else."""
    if not isinstance(text, str):
        return None
    try:
        when = dt.datetime.fromisoformat(text)
        return when.astimezone(dt.UTC) if when.tzinfo else None
    except (ValueError, OverflowError):
        return None


def show(when: dt.datetime | None) -> str:
    """Return a time to the second, as ``2026-03-01 12:00:00Z``; empty for None."""
    return when.strftime("%Y-%m-%d %H:%M:%SZ") if when else ""


def iso(when: dt.datetime | None) -> str | None:
    """Return a time for JSON and YAML."""
    return when.isoformat() if when else None


def age(when: dt.datetime | None, now: dt.datetime) -> str:
    """Return the time since then as in kubectl's column AGE: ``95s``, ``12m``, ``3d``."""
    if when is None:
        return "-"
    seconds = max(0, round((now - when).total_seconds()))
    # Two of a unit before the next larger one: 90 minutes say more than 1 hour.
    size, unit = next(row for row in _UNITS if seconds >= _TWICE * row[0] or row[0] == 1)
    return f"{seconds // size}{unit}"
