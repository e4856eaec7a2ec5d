"""``kubectl mig status`` and ``history``: the state of nodes, and the past of one.

Kubernetes keeps Events for an hour by default; the last run stays in the status.
"""

import dataclasses
import datetime as dt
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

from mig_manager import errors
from mig_manager.adapters import cluster_reader
from mig_manager.cli.toolkit import gpu_report, tables
from mig_manager.core import bar, gpu_answers, messages, picture, timestamps
from mig_manager.core.fleet import node_reports, overview
from mig_manager.core.node import resources
from mig_manager.core.records import status as run_status

if TYPE_CHECKING:
    from mig_manager.core import answers

_MOST_NAMED = 8  # pods that a sentence names before it counts the rest
_HEAD = ("NODE", "STATE", "REASON", "AGE", "REQUESTED", "APPLIED", "SLICES")
_MOMENTS = ("TIME", "WHAT", "MESSAGE")
_REQUESTED, _STARTED, _RETRY = _FIRST = ("requested", "started", "retry")
"""Moments that no Event shows, in chronological order."""
LOCAL_IDS = frozenset({"id", "gpu_instance_id", "compute_instance_id"})
_ONLY_KUBELET = "The API does not show which device a pod got; only kubelet knows."


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The state of nodes."""

    reports: tuple[node_reports.Report, ...]
    pods: cluster_reader.Pods  # for a table: unknown, without a reason
    now: dt.datetime

    @property
    def is_good(self) -> bool:
        """Whether every node has the requested layout."""
        return all(report.state.is_good for report in self.reports)

    def kinds(self, report: node_reports.Report) -> tuple[resources.DeviceKind, ...] | None:
        """Return a node's devices with the pods that request them; None if unknown."""
        pods = self.pods.of(report.node.name)
        if pods is None or report.gpus is None:
            return None
        return resources.kinds(report.gpus, pods, strategy=report.node.strategy)

    def claiming(self, report: node_reports.Report) -> tuple[str, ...]:
        """Return the pods with ResourceClaims, which may get devices of this node."""
        pods = self.pods.of(report.node.name) or ()
        return tuple(pod.key for pod in pods if pod.has_claims and not pod.is_finished)

    def to_data(self) -> "answers.ClusterStatus":
        """Return plain data for JSON and YAML."""
        return {
            "kind": "ClusterStatus",
            "is_good": self.is_good,
            "pods_not_known": self.pods.why_not or None,
            "nodes": [self._node(report) for report in self.reports],
        }

    def _node(self, report: node_reports.Report) -> "answers.NodeStatus":
        run, kinds, gpus = report.node.status, self.kinds(report), report.gpus
        return {
            "node": report.node.name,
            "status": report.state.value,
            "is_good": report.state.is_good,
            "is_ready": report.node.is_ready,
            "requested": report.node.requested,
            "applied": report.node.applied or None,
            "applied_before": report.node.applied_before or None,
            "origin": (run.origin or None) if run else None,
            "state": run.state.value if run else None,
            "phase": run.phase if run else None,
            "reason": run.reason if run else None,
            "message": run.message if run else None,
            "attempt": run.attempt if run else None,
            "started_at": _iso(run.started_at) if run else None,
            "finished_at": _iso(run.finished_at) if run else None,
            "retry_at": _iso(run.retry_at) if run else None,
            "notes": list(report.notes),
            "gpus": None
            if gpus is None
            else cast("list[answers.PublishedGpu]", without_ids(list(map(gpu_answers.gpu, gpus)))),
            "unreachable_gpus": None
            if gpus is None
            else [gpu_answers.unreachable(gpu) for gpu in gpus.unreachable],
            "device_requests": None
            if kinds is None
            else [
                {"resource": kind.resource, "devices": kind.count, "pods": dict(kind.pods)}
                for kind in kinds
            ],
            "pods_with_claims": list(self.claiming(report)),
        }


def _iso(when: dt.datetime | None) -> str | None:
    return when.isoformat() if when else None


def without_ids(data: object) -> object:
    """Remove the driver's ids, which agents do not publish, from plain data of GPUs."""
    if isinstance(data, list):
        return [without_ids(item) for item in data]
    if isinstance(data, Mapping):
        return {
            key: without_ids(value)
            for key, value in data.items()
            if key not in LOCAL_IDS and not (key == "uuid" and value is None)
        }
    return data


def table(status: Status, *, style: bar.Style) -> str:
    """Return a line for every node, and explanations of problems below."""
    rows, notes = [], []
    for report in status.reports:
        run = report.node.status
        state = report.state.value + ("" if report.node.is_ready else ",not-ready")
        rows.append(
            (
                report.node.name,
                (state, overview.TONES.get(report.state, bar.Tone.BAD)),
                (run.reason or run.phase) if run else "-",
                timestamps.age(run.at, status.now) if run else "-",
                report.node.requested or "-",
                report.node.applied_text or "-",
                "-" if report.gpus is None else gpu_report.slices(report.gpus),
            )
        )
        why = run.message if run and not report.state.is_good else ""
        if remarks := messages.join(why, *report.notes):
            notes.append(style.wrapped(f"{report.node.name}: {remarks}"))
    lines = tables.columns(_HEAD, rows, style=style)
    return "\n".join([*lines, "", *notes] if notes else lines)


def pictures(status: Status, *, style: bar.Style) -> str:
    """Draw every node."""
    blocks = []
    for report in status.reports:
        lines = [headline(report, status.now, style)]
        if report.node.status and report.node.status.message:
            lines.append(style.wrapped(report.node.status.message, indent="  "))
        lines += [style.wrapped(note, indent="  ! ") for note in report.notes]
        if report.gpus is not None:
            drawn = picture.draw_gpus(report.gpus, style=style) or gpu_report.NO_GPU
            lines += ["", drawn, "", *_users(status, report, style)]
        blocks.append("\n".join(lines).rstrip())
    return "\n\n".join(blocks)


def headline(report: node_reports.Report, now: dt.datetime, style: bar.Style) -> str:
    """Return a node's state in one line."""
    node, run = report.node, report.node.status
    rest = [f"requested {node.requested or 'nothing'}"]
    if node.applied_text not in ("", node.requested):
        rest.append(f"applied {node.applied_text}")
    if run:
        rest.append(run.reason or f"phase {run.phase}")
    if run and run.at:
        rest.append(f"since {timestamps.show(run.at)}, {timestamps.age(run.at, now)} ago")
    if run and run.attempt > 1:
        rest.append(f"attempt {run.attempt}")
    if run and run.retry_at and run.retry_at > now:
        rest.append(f"next attempt in {timestamps.age(now, run.retry_at)}")
    line = style.fitted(" · ".join([node.name, report.state.value, *rest]))
    name = style.paint(node.name, bar.Tone.STRONG)
    state = style.paint(report.state.value, overview.TONES.get(report.state, bar.Tone.BAD))
    start = f"{node.name} · {report.state.value}"
    return style.plain(line.replace(start, f"{name} · {state}", 1))


def _users(status: Status, report: node_reports.Report, style: bar.Style) -> Iterable[str]:
    kinds = status.kinds(report)
    if kinds is None:
        yield style.wrapped(f"The pods using the GPUs are unknown: {status.pods.why_not}")
        return
    width = max((len(kind_name(kind.resource)) for kind in kinds), default=0)
    for kind in kinds:
        name = kind_name(kind.resource).ljust(width)
        yield style.wrapped(f"{name}  {used(kind)}", indent="  ")
    claiming = status.claiming(report)
    if claiming:
        names = named_pods(dict.fromkeys(claiming, 1))
        yield style.wrapped(f"Pods with ResourceClaims, for these GPUs or others: {names}")
    if any(0 < kind.requested < kind.count for kind in kinds):
        yield style.wrapped(_ONLY_KUBELET)


def kind_name(resource: str) -> str:
    """Return a resource's MIG profile, or ``gpu``."""
    if resource == resources.GPU:
        return "gpu"
    return resource.partition("mig-")[2] or resource


def named_pods(requests: Mapping[str, int]) -> str:
    """Return pod names, with the number of requested devices if more than one."""
    named = [name if count == 1 else f"{name} ({count})" for name, count in requests.items()]
    return messages.listed(named, most=_MOST_NAMED)


def used(kind: resources.DeviceKind) -> str:
    """Name the pods that request devices of a kind, and the number of devices in use."""
    if not kind.pods:
        return f"{kind.count} free"
    pods = named_pods(kind.pods)
    if not kind.count:
        return f"{kind.requested} requested, none exist: {pods}"
    if kind.requested > kind.count:
        return f"{kind.requested} requested of {kind.count}, shared or pending: {pods}"
    if kind.requested == kind.count:
        return f"{'all ' if kind.count > 1 else ''}{kind.count} in use by {pods}"
    return f"{kind.requested} of {kind.count} in use by {pods}"


# -- history -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The known past of a node."""

    report: node_reports.Report
    moments: tuple[cluster_reader.Moment, ...]  # ascending by time; without a time first
    why_no_events: str  # empty if Events could be read
    now: dt.datetime

    @property
    def applied_since(self) -> dt.datetime | None:
        """A time since which the layout has been applied; None if not applied or unknown."""
        run = self.report.node.status
        if self.report.state is not node_reports.NodeState.APPLIED or run is None:
            return None
        for moment in reversed(self.moments):
            if moment.what == errors.Reason.ALREADY_APPLIED.value or moment.at is None:
                continue
            is_applied = moment.what == errors.Reason.APPLIED.value
            if is_applied and _title(run) in moment.message:
                return min(filter(None, (moment.at, run.at)), default=None)
            # Custom layouts share one name; the previous one had other content.
            if moment.is_warning or (is_applied and run.annotation_hash):
                break
        return run.at

    def to_data(self) -> "answers.NodeHistory":
        """Return plain data for JSON and YAML."""
        since = self.applied_since
        return {
            "kind": "NodeHistory",
            "node": self.report.node.name,
            "status": self.report.state.value,
            "applied_since": _iso(since),
            "events_not_known": self.why_no_events or None,
            "moments": [
                dataclasses.asdict(moment) | {"at": _iso(moment.at)} for moment in self.moments
            ],
        }


def _title(run: run_status.PublishedStatus) -> str:
    """Return the name of a run's layout in Events."""
    return f"{run.config} ({run.config_hash})" if run.annotation_hash else run.config


def history(
    reader: cluster_reader.ClusterReader, report: node_reports.Report, *, now: dt.datetime
) -> History:
    """Collect a node's past from its status and Events.

    Raises:
        ClusterError: The API does not answer. Missing rights to read Events are no failure.
    """
    events: Sequence[cluster_reader.Moment] = ()
    why_not = ""
    try:
        events = reader.events(report.node.name)
    except errors.ClusterError as error:
        if error.reason is not errors.Reason.FORBIDDEN:
            raise
        why_not = error.message

    def order(moment: cluster_reader.Moment) -> tuple[dt.datetime, int]:
        first = _FIRST.index(moment.what) if moment.what in _FIRST else len(_FIRST)
        return moment.at or dt.datetime.min.replace(tzinfo=dt.UTC), first

    moments = sorted([*events, *_from_node(report, events)], key=order)
    return History(report=report, moments=tuple(moments), why_no_events=why_not, now=now)


def _from_node(
    report: node_reports.Report, events: Sequence[cluster_reader.Moment]
) -> Iterable[cluster_reader.Moment]:
    node, run = report.node, report.node.status
    if node.requested and node.requested_at:
        yield cluster_reader.Moment(
            at=node.requested_at,
            what=_REQUESTED,
            message=f"last write by {node.requested_by or 'an unknown client'}, "
            f"which requested {node.requested}",
        )
    if run is None:
        return
    if run.started_at:
        message = f"run for {run.config} started, attempt {run.attempt}"
        yield cluster_reader.Moment(at=run.started_at, what=_STARTED, message=message)
    is_known = any(each.at == run.finished_at and each.what == run.reason for each in events)
    if run.finished_at and not is_known:
        yield cluster_reader.Moment(
            at=run.finished_at,
            what=run.reason or "finished",
            message=run.message,
            is_warning=not report.state.is_good,
        )
    if run.retry_at:
        yield cluster_reader.Moment(
            at=run.retry_at, what=_RETRY, message="the next retry is scheduled"
        )


def last_run(past: History, *, style: bar.Style) -> list[str]:
    """Return a table of moments since the start of the last run; empty before the first run."""
    run = past.report.node.status
    began = run.started_at if run else None
    if began is None:
        return []
    moments = [moment for moment in past.moments if moment.at and moment.at >= began]
    table = tables.columns(_MOMENTS, map(_row, moments), style=style)
    return ["\n".join(table)] if moments else []


def line(report: node_reports.Report) -> str:
    """Return the state of a node for a log."""
    node, run = report.node, report.node.status
    words = [node.name, report.state.value, (run.reason or run.phase) if run else ""]
    words.append(f"requested {node.requested or 'nothing'}")
    words.append(f"applied {node.applied_text or 'nothing'}")
    words.append("" if report.gpus is None else gpu_report.slices(report.gpus))
    return ", ".join(filter(None, words))


def _row(moment: cluster_reader.Moment) -> tuple[str | tuple[str, bar.Tone], ...]:
    what = moment.what + (f" x{moment.count}" if moment.count > 1 else "")
    tone = bar.Tone.BAD if moment.is_warning else bar.Tone.PLAIN
    return timestamps.show(moment.at) or "-", (what, tone), moment.message


def page(past: History, *, style: bar.Style) -> str:
    """Return a node's past, one line per moment."""
    lines = [headline(past.report, past.now, style)]
    since = past.applied_since
    if since:
        age = timestamps.age(since, past.now)
        lines.append(f"  applied at least since {timestamps.show(since)}, {age} ago")
    lines += [style.wrapped(note, indent="  ! ") for note in past.report.notes]
    if past.moments:
        rows = map(_row, past.moments)
        lines += ["", *tables.columns(_MOMENTS, rows, style=style)]
    if past.why_no_events:
        why = f"Only the last run is shown; Events cannot be read: {past.why_no_events}"
        lines += ["", style.wrapped(why)]
    elif not past.moments:
        lines += ["", "No history is known."]
    return "\n".join(lines)
