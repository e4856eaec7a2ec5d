"""``kubectl mig history``: what happened to a node's layout lately, as far as anybody has kept it.

Kubernetes keeps Events for an hour unless it is told otherwise; the last run stays in the status.
"""

import dataclasses
import datetime as dt
from collections.abc import Iterable, Sequence

from mig_manager import errors
from mig_manager.core import bar, messages
from mig_manager.core.fleet import node_report
from mig_manager.kubectl import layout, selection, status


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
    """In their order; those without a time first."""
    why_no_events: str
    """Empty when Events could be read."""
    now: dt.datetime

    @property
    def in_force_since(self) -> dt.datetime | None:
        """Since when the layout has been in force at least; None: it is not, or nobody tells."""
        if self.report.standing is not node_report.Standing.IN_FORCE or self.report.told is None:
            return None
        config, since = self.report.told.config, self.report.told.at
        for moment in reversed(self.moments):
            if moment.what == errors.Reason.ALREADY_APPLIED.value or moment.at is None:
                continue
            if moment.what == errors.Reason.APPLIED.value and config in moment.message:
                return min(filter(None, (moment.at, since)), default=None)
            if moment.is_warning:
                break
        return since

    def to_data(self) -> dict[str, object]:
        """Return plain data for JSON and YAML."""
        since = self.in_force_since
        return {
            "node": self.report.node.view.name,
            "standing": self.report.standing.value,
            "in_force_since": since.isoformat() if since else None,
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
    """Put together what is known of a node's past.

    Raises:
        ClusterError: The API does not answer; that it refuses to show Events is no failure.
    """
    events: Sequence[selection.Event] = ()
    why_not = ""
    try:
        events = seen.events(report.node.view.name)
    except errors.ClusterError as error:
        if error.reason is not errors.Reason.FORBIDDEN:
            raise
        why_not = error.message
    told = [
        Moment(
            at=event.at,
            what=event.reason,
            message=event.message,
            is_warning=event.is_warning,
            count=event.count,
        )
        for event in events
    ]
    moments = [*told, *_from_node(report, told)]
    return History(
        report=report,
        moments=tuple(sorted(moments, key=_order)),
        why_no_events=why_not,
        now=now,
    )


def _order(moment: Moment) -> tuple[dt.datetime, int]:
    """Put what happened in one second in the order in which it can have happened."""
    first = _FIRST.index(moment.what) if moment.what in _FIRST else len(_FIRST)
    return moment.at or dt.datetime.min.replace(tzinfo=dt.UTC), first


_WISHED, _STARTED, _RETRY = _FIRST = ("wished", "started", "retry")


def _from_node(report: node_report.Report, told: Sequence[Moment]) -> Iterable[Moment]:
    node, run = report.node, report.told
    if node.wish and node.wished_at:
        who = node.wished_by or "somebody"
        yield Moment(
            at=node.wished_at,
            what=_WISHED,
            message=f"{who} last wrote here, and the wish for {node.wish} is theirs",
        )
    if run is None:
        return
    if run.started_at:
        message = f"a run for {run.config} began, attempt {run.attempt}"
        yield Moment(at=run.started_at, what=_STARTED, message=message)
    is_told = any(moment.at == run.finished_at and moment.what == run.reason for moment in told)
    if run.finished_at and not is_told:
        yield Moment(
            at=run.finished_at,
            what=run.reason or "finished",
            message=run.message,
            is_warning=not report.standing.is_good,
        )
    if run.retry_at:
        yield Moment(at=run.retry_at, what=_RETRY, message="the next try is due")


def page(told: History, *, style: bar.Style) -> str:
    """Return a node's past, one line for each moment."""
    lines = [status.headline(told.report, told.now, style)]
    since = told.in_force_since
    if since:
        age = messages.age(since, told.now)
        lines.append(f"  in force at least since {messages.format_time(since)}, {age} ago")
    lines += [layout.wrapped(note, indent="  ! ") for note in told.report.notes]
    rows = [
        (
            messages.format_time(moment.at) or "-",
            moment.what + (f" x{moment.count}" if moment.count > 1 else ""),
            moment.message,
        )
        for moment in told.moments
    ]
    tones = {
        (number, 1): bar.Tone.BAD if moment.is_warning else bar.Tone.PLAIN
        for number, moment in enumerate(told.moments)
    }
    if rows:
        head = ("TIME", "WHAT", "MESSAGE")
        lines += ["", *layout.columns(head, rows, tones=tones, style=style)]
    if told.why_no_events:
        why = f"Events are not shown, and so only the last run: {told.why_no_events}"
        lines += ["", layout.wrapped(why)]
    elif not rows:
        lines += ["", "Nothing is kept of its past."]
    return "\n".join(lines)
