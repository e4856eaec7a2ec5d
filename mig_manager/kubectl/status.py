"""``kubectl mig status``: the layouts and slices of nodes."""

import collections
import dataclasses
import datetime as dt
from collections.abc import Iterable, Mapping, Sequence

from mig_manager.cli import gpu_report
from mig_manager.core import bar, data, messages, model, picture
from mig_manager.core.fleet import node_report
from mig_manager.core.node import resources
from mig_manager.kubectl import selection

_MOST_NAMED = 8
"""Pods that a sentence names before it counts the rest."""
_TONES: Mapping[node_report.NodeState, bar.Tone] = {
    node_report.NodeState.APPLIED: bar.Tone.GOOD,
    node_report.NodeState.CHANGING: bar.Tone.WARN,
    node_report.NodeState.WAITING: bar.Tone.WARN,
    node_report.NodeState.NO_REQUEST: bar.Tone.FAINT,
}
_HEAD = ("NODE", "STATE", "REASON", "AGE", "REQUESTED", "APPLIED", "SLICES")
_ONLY_KUBELET = "The API does not show which device a pod got; only kubelet knows."


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The state of nodes."""

    reports: tuple[node_report.Report, ...]
    pods: selection.Pods
    """Not read for a table, and then without a reason."""
    now: dt.datetime

    @property
    def is_good(self) -> bool:
        """Whether every node has the requested layout."""
        return all(report.state.is_good for report in self.reports)

    def kinds(self, report: node_report.Report) -> tuple[resources.Kind, ...] | None:
        """Return which pods request which devices of a node; None if that is not known."""
        found = self.pods.of(report.node.name)
        if found is None or report.gpus is None:
            return None
        return resources.kinds(report.gpus, found, strategy=report.node.strategy)

    def claiming(self, report: node_report.Report) -> tuple[str, ...]:
        """Return the pods that get devices, if any, by ResourceClaims."""
        found = self.pods.of(report.node.name) or ()
        return tuple(pod.key for pod in found if pod.has_claims and not pod.is_finished)

    def to_data(self) -> dict[str, object]:
        """Return plain data for JSON and YAML."""
        return {
            "is_good": self.is_good,
            "pods_not_known": self.pods.why_not or None,
            "nodes": [self._node(report) for report in self.reports],
        }

    def _node(self, report: node_report.Report) -> dict[str, object]:
        run, kinds = report.status, self.kinds(report)
        return {
            "node": report.node.name,
            "status": report.state.value,
            "is_good": report.state.is_good,
            "is_ready": report.node.is_ready,
            "requested": report.node.requested,
            "applied": report.node.applied or None,
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
            if report.gpus is None
            else [without_ids(data.gpu(gpu)) for gpu in report.gpus],
            "unreachable_gpus": None
            if report.gpus is None
            else [data.unreachable(gpu) for gpu in report.gpus.unreachable],
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


_LOCAL_IDS = frozenset({"id", "gpu_instance_id", "compute_instance_id"})


def without_ids(data: object) -> object:
    """Return plain data of GPUs without the driver's ids, which agents do not publish."""
    if isinstance(data, list):
        return [without_ids(item) for item in data]
    if isinstance(data, Mapping):
        return {
            key: without_ids(value)
            for key, value in data.items()
            if key not in _LOCAL_IDS and not (key == "uuid" and value is None)
        }
    return data


def table(status: Status, *, style: bar.Style) -> str:
    """Return a line for each node, and below why nodes are not in order."""
    rows = [_row(report, status.now) for report in status.reports]
    tones = {(number, 1): _tone(report.state) for number, report in enumerate(status.reports)}
    lines = gpu_report.columns(_HEAD, rows, tones=tones, style=style)
    notes = [gpu_report.wrapped(text) for text in map(_note, status.reports) if text]
    return "\n".join([*lines, "", *notes] if notes else lines)


def _note(report: node_report.Report) -> str:
    parts = list(report.notes)
    if report.status and not report.state.is_good and report.status.message:
        parts.insert(0, report.status.message)
    return f"{report.node.name}: {'; '.join(parts)}" if parts else ""


def _row(report: node_report.Report, now: dt.datetime) -> Sequence[str]:
    run = report.status
    return (
        report.node.name,
        report.state.value + ("" if report.node.is_ready else ",not-ready"),
        (run.reason or run.phase) if run else "-",
        messages.age(run.at, now) if run else "-",
        report.node.requested or "-",
        report.node.applied or "-",
        "-" if report.gpus is None else slices(report.gpus),
    )


def slices(gpus: Iterable[model.Gpu]) -> str:
    """Return what GPUs are divided into, all together."""
    counts: collections.Counter[model.Profile] = collections.Counter()
    whole = empty = 0
    for gpu in gpus:
        found = [ci.profile for gi in gpu.gpu_instances for ci in gi.compute_instances]
        counts.update(found)
        if gpu.current_mode is not model.MigMode.ENABLED:
            whole += 1
        elif not found:
            empty += 1
    parts = [picture.counted(counts)] if counts else []
    parts += [f"{whole}x whole GPU"] if whole else []
    parts += [f"{empty}x empty GPU"] if empty else []
    return ", ".join(parts) or "none"


def _tone(state: node_report.NodeState) -> bar.Tone:
    return _TONES.get(state, bar.Tone.BAD)


def pictures(status: Status, *, style: bar.Style) -> str:
    """Draw every node."""
    return "\n\n".join(_picture(status, report, style) for report in status.reports)


def headline(report: node_report.Report, now: dt.datetime, style: bar.Style) -> str:
    """Return a node's state in one line."""
    node, run = report.node, report.status
    name = style.paint(node.name, bar.Tone.STRONG)
    state = style.paint(report.state.value, _tone(report.state))
    rest = [f"requested {node.requested or 'nothing'}"]
    if node.applied and node.applied != node.requested:
        rest.append(f"applied {node.applied}")
    if run:
        rest.append(run.reason or f"phase {run.phase}")
    if run and run.at:
        rest.append(f"since {messages.format_time(run.at)}, {messages.age(run.at, now)} ago")
    if run and run.attempt > 1:
        rest.append(f"attempt {run.attempt}")
    return style.plain(f"{name} · {state} · {' · '.join(rest)}")


def _picture(status: Status, report: node_report.Report, style: bar.Style) -> str:
    lines = [headline(report, status.now, style)]
    if report.status and report.status.message:
        lines.append(gpu_report.wrapped(report.status.message, indent="  "))
    lines += [gpu_report.wrapped(note, indent="  ! ") for note in report.notes]
    if report.gpus is not None:
        drawn = picture.draw_gpus(report.gpus, style=style) or gpu_report.NO_GPU
        lines += ["", drawn, "", *_users(status, report)]
    return "\n".join(lines).rstrip()


def _users(status: Status, report: node_report.Report) -> Iterable[str]:
    kinds = status.kinds(report)
    if kinds is None:
        yield gpu_report.wrapped(f"The pods using the GPUs are not known: {status.pods.why_not}")
        return
    width = max((len(kind_name(kind.resource)) for kind in kinds), default=0)
    for kind in kinds:
        name = kind_name(kind.resource).ljust(width)
        yield gpu_report.wrapped(f"{name}  {used(kind)}", indent="  ")
    claiming = status.claiming(report)
    if claiming:
        names = named_pods(dict.fromkeys(claiming, 1))
        yield gpu_report.wrapped(f"Pods with ResourceClaims, for these GPUs or others: {names}")
    if any(0 < kind.requested < kind.count for kind in kinds):
        yield gpu_report.wrapped(_ONLY_KUBELET)


def kind_name(resource: str) -> str:
    """Return a resource's MIG profile, or ``gpu``."""
    if resource == resources.GPU:
        return "gpu"
    return resource.partition("mig-")[2] or resource


def named_pods(requests: Mapping[str, int]) -> str:
    """Return pods with how many devices each requests, if more than one."""
    named = [name if count == 1 else f"{name} ({count})" for name, count in requests.items()]
    return messages.listed(named, most=_MOST_NAMED)


def used(kind: resources.Kind) -> str:
    """Say which pods request devices of a kind, and whether these are in use."""
    if not kind.pods:
        return f"{kind.count} free"
    pods = named_pods(kind.pods)
    if not kind.count:
        return f"no such device, but requests for {kind.requested}: {pods}"
    if kind.requested > kind.count:
        return f"{kind.requested} requested of {kind.count}, shared or pending: {pods}"
    if kind.requested == kind.count:
        return f"{'all ' if kind.count > 1 else ''}{kind.count} in use by {pods}"
    return f"{kind.requested} of {kind.count} in use by {pods}"
