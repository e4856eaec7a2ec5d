"""The past of a node: its last run, which stays in the status, and its Events.

Kubernetes keeps Events for an hour by default.
"""

import dataclasses
import datetime as dt
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from mig_manager import errors, reasons
from mig_manager.adapters import cluster_reader
from mig_manager.core import timestamps
from mig_manager.core.display import styles, tables
from mig_manager.core.fleet import node_moments, node_reports

if TYPE_CHECKING:
    from mig_manager.core.answers import node_answers

_MOMENTS = ("TIME", "WHAT", "MESSAGE")
_REQUESTED, _STARTED, _RETRY = _FIRST = ("requested", "started", "retry")
"""Moments that no Event shows, in chronological order."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeHistory:
    """The known past of a node."""

    report: node_reports.NodeReport
    moments: tuple[node_moments.Moment, ...]  # ascending by time; without a time first
    why_no_events: str  # empty if Events could be read
    now: dt.datetime

    @property
    def applied_since(self) -> dt.datetime | None:
        """A time since which the layout has been applied; None if not applied or unknown."""
        status = self.report.node.status
        if self.report.state is not node_reports.NodeState.SUCCESS or status is None:
            return None
        for moment in reversed(self.moments):
            if moment.what == reasons.Reason.ALREADY_APPLIED.value or moment.at is None:
                continue
            is_applied = moment.what == reasons.Reason.APPLIED.value
            if is_applied and status.title in moment.message:
                return min(filter(None, (moment.at, status.at)), default=None)
            # Custom layouts share one name; the previous one had other content.
            if moment.is_warning or (is_applied and status.annotation_hash):
                break
        return status.at

    def to_data(self) -> "node_answers.NodeHistory":
        """Return plain data for JSON and YAML."""
        since = self.applied_since
        return {
            "kind": "NodeHistory",
            "node": self.report.node.name,
            "state": self.report.state.value,
            "applied_since": timestamps.iso(since),
            "events_not_known": self.why_no_events or None,
            "moments": [
                dataclasses.asdict(moment) | {"at": timestamps.iso(moment.at)}
                for moment in self.moments
            ],
        }


def collect(
    reader: cluster_reader.ClusterReader, report: node_reports.NodeReport, *, now: dt.datetime
) -> NodeHistory:
    """Collect a node's past from its status and Events.

    Raises:
        ClusterError: The API does not answer. Missing rights to read Events are no failure.
    """
    events: Sequence[node_moments.Moment] = ()
    why_not = ""
    try:
        events = reader.events(report.node.name)
    except errors.ClusterError as error:
        if error.reason is not reasons.Reason.FORBIDDEN:
            raise
        why_not = error.message

    def order(moment: node_moments.Moment) -> tuple[dt.datetime, int]:
        first = _FIRST.index(moment.what) if moment.what in _FIRST else len(_FIRST)
        return moment.at or dt.datetime.min.replace(tzinfo=dt.UTC), first

    moments = sorted([*events, *_from_node(report, events)], key=order)
    return NodeHistory(report=report, moments=tuple(moments), why_no_events=why_not, now=now)


def _from_node(
    report: node_reports.NodeReport, events: Sequence[node_moments.Moment]
) -> Iterable[node_moments.Moment]:
    node, status = report.node, report.node.status
    if node.requested and node.requested_at:
        yield node_moments.Moment(
            at=node.requested_at,
            what=_REQUESTED,
            message=f"last write by {node.requested_by or 'an unknown client'}, "
            f"which requested {node.requested}",
        )
    if status is None:
        return
    if status.started_at:
        message = f"run for {status.layout} started, attempt {status.attempt}"
        yield node_moments.Moment(at=status.started_at, what=_STARTED, message=message)
    is_known = any(each.at == status.finished_at and each.what == status.reason for each in events)
    if status.finished_at and not is_known:
        yield node_moments.Moment(
            at=status.finished_at,
            what=status.reason or "finished",
            message=status.message,
            is_warning=not report.state.is_good,
        )
    if status.retry_at:
        yield node_moments.Moment(
            at=status.retry_at, what=_RETRY, message="the next retry is scheduled"
        )


def last_run(past: NodeHistory, *, style: styles.Style) -> list[str]:
    """Return a table of moments since the start of the last run; empty before the first run."""
    status = past.report.node.status
    began = status.started_at if status else None
    if began is None:
        return []
    moments = [moment for moment in past.moments if moment.at and moment.at >= began]
    return ["\n".join(table(moments, style=style))]


def table(moments: Iterable[node_moments.Moment], *, style: styles.Style) -> list[str]:
    """Return a line for every moment."""
    return tables.columns(_MOMENTS, map(_row, moments), style=style)


def _row(moment: node_moments.Moment) -> tables.Row:
    what = moment.what + (f" x{moment.count}" if moment.count > 1 else "")
    tone = styles.Tone.BAD if moment.is_warning else styles.Tone.PLAIN
    return timestamps.show(moment.at) or "-", (what, tone), moment.message
