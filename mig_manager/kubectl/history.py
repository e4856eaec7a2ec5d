"""``kubectl mig history``: a node's Events and last run.

Kubernetes keeps Events for an hour by default; the last run stays in the status.
"""

import dataclasses
import datetime as dt
from collections.abc import Iterable, Sequence

from mig_manager import errors
from mig_manager.cli import gpu_report
from mig_manager.core import bar, messages
from mig_manager.core.fleet import node_report
from mig_manager.kubectl import selection, status


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One thing that happened."""

    at: dt.datetime | None
    what: str
    """The Event's reason, or a word of ours in lower case."""
    message: str
    is_warning: bool = False
    count: int = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What is known of a node's past."""

    report: node_report.Report
    moments: tuple[Moment, ...]
    """Ascending by time; those without a time first."""
    why_no_events: str
    """Empty if Events could be read."""
    now: dt.datetime

    @property
    def applied_since(self) -> dt.datetime | None:
        """Since when the layout has been applied at least; None if it is not, or unknown."""
        run = self.report.status
        if self.report.state is not node_report.NodeState.APPLIED or run is None:
            return None
        for moment in reversed(self.moments):
            if moment.what == errors.Reason.ALREADY_APPLIED.value or moment.at is None:
                continue
            if moment.what == errors.Reason.APPLIED.value and run.config in moment.message:
                return min(filter(None, (moment.at, run.at)), default=None)
            if moment.is_warning:
                break
        return run.at

    def to_data(self) -> dict[str, object]:
        """Return plain data for JSON and YAML."""
        since = self.applied_since
        return {
            "node": self.report.node.name,
            "status": self.report.state.value,
            "applied_since": since.isoformat() if since else None,
            "events_not_known": self.why_no_events or None,
            "moments": [
                {
                    "at": moment.at.isoformat() if moment.at else None,
                    "what": moment.what,
                    "message": moment.message,
                    "is_warning": moment.is_warning,
                    "count": moment.count,
                }
                for moment in self.moments
            ],
        }


def history(seen: selection.Cluster, report: node_report.Report, *, now: dt.datetime) -> History:
    """Collect what is known of a node's past.

    Raises:
        ClusterError: The API does not answer; missing rights to read Events are no failure.
    """
    events: Sequence[selection.Event] = ()
    why_not = ""
    try:
        events = seen.events(report.node.name)
    except errors.ClusterError as error:
        if error.reason is not errors.Reason.FORBIDDEN:
            raise
        why_not = error.message
    from_events = [
        Moment(
            at=event.at,
            what=event.reason,
            message=event.message,
            is_warning=event.is_warning,
            count=event.count,
        )
        for event in events
    ]
    moments = [*from_events, *_from_node(report, from_events)]
    return History(
        report=report,
        moments=tuple(sorted(moments, key=_order)),
        why_no_events=why_not,
        now=now,
    )


def _order(moment: Moment) -> tuple[dt.datetime, int]:
    """Order moments of one second as they can have happened."""
    first = _FIRST.index(moment.what) if moment.what in _FIRST else len(_FIRST)
    return moment.at or dt.datetime.min.replace(tzinfo=dt.UTC), first


_REQUESTED, _STARTED, _RETRY = _FIRST = ("requested", "started", "retry")


def _from_node(report: node_report.Report, events: Sequence[Moment]) -> Iterable[Moment]:
    node, run = report.node, report.status
    if node.requested and node.requested_at:
        yield Moment(
            at=node.requested_at,
            what=_REQUESTED,
            message=f"last write by {node.requested_by or 'an unknown client'}, "
            f"which requested {node.requested}",
        )
    if run is None:
        return
    if run.started_at:
        message = f"run for {run.config} started, attempt {run.attempt}"
        yield Moment(at=run.started_at, what=_STARTED, message=message)
    is_known = any(each.at == run.finished_at and each.what == run.reason for each in events)
    if run.finished_at and not is_known:
        yield Moment(
            at=run.finished_at,
            what=run.reason or "finished",
            message=run.message,
            is_warning=not report.state.is_good,
        )
    if run.retry_at:
        yield Moment(at=run.retry_at, what=_RETRY, message="the next retry is scheduled")


def page(past: History, *, style: bar.Style) -> str:
    """Return a node's past, one line for each moment."""
    lines = [status.headline(past.report, past.now, style)]
    since = past.applied_since
    if since:
        age = messages.age(since, past.now)
        lines.append(f"  applied at least since {messages.format_time(since)}, {age} ago")
    lines += [gpu_report.wrapped(note, indent="  ! ") for note in past.report.notes]
    rows = [
        (
            messages.format_time(moment.at) or "-",
            moment.what + (f" x{moment.count}" if moment.count > 1 else ""),
            moment.message,
        )
        for moment in past.moments
    ]
    tones = {
        (number, 1): bar.Tone.BAD if moment.is_warning else bar.Tone.PLAIN
        for number, moment in enumerate(past.moments)
    }
    if rows:
        head = ("TIME", "WHAT", "MESSAGE")
        lines += ["", *gpu_report.columns(head, rows, tones=tones, style=style)]
    if past.why_no_events:
        why = f"Only the last run is shown; Events cannot be read: {past.why_no_events}"
        lines += ["", gpu_report.wrapped(why)]
    elif not rows:
        lines += ["", "No history is known."]
    return "\n".join(lines)
