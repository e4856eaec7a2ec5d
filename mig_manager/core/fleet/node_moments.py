"""What happened to a node, for its history: parsed from Events, or recorded by a command."""

import dataclasses
import datetime as dt
from collections.abc import Mapping
from typing import Any

from mig_manager.core import messages, timestamps


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """An event in a node's past."""

    at: dt.datetime | None
    what: str  # the reason of an Event, or a word of ours in lower case
    message: str
    is_warning: bool = False
    count: int = 1


def parse(item: Mapping[str, Any]) -> Moment:
    """Parse an Event object; see ``api_values.as_cluster_error`` for its exceptions."""
    series = item.get("series") or {}
    times = (
        series.get("lastObservedTime"),
        item.get("lastTimestamp"),
        item.get("eventTime"),
        item["metadata"].get("creationTimestamp"),
    )
    return Moment(
        at=next(filter(None, map(timestamps.parse, times)), None),
        what=messages.printable(str(item.get("reason") or "")),
        message=messages.fit(
            messages.printable(str(item.get("message") or ""), " "), messages.MAX_EVENT_BYTES
        ),
        is_warning=item.get("type") == "Warning",
        count=int(series.get("count") or item.get("count") or 1),
    )
