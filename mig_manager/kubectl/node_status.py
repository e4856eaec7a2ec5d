"""The published state of nodes, as data and as text."""

import dataclasses
import datetime as dt
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, cast

from mig_manager.adapters import cluster_reader
from mig_manager.cli.toolkit import gpu_text
from mig_manager.core import messages, timestamps
from mig_manager.core.answers import gpu_answers
from mig_manager.core.display import picture, styles
from mig_manager.core.fleet import node_reports, overview
from mig_manager.core.node.devices import resources

if TYPE_CHECKING:
    from mig_manager.core.answers import node_answers

_ONLY_KUBELET = "The API does not show which device a pod got; only kubelet knows."


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStatus:
    """The state of nodes."""

    reports: tuple[node_reports.NodeReport, ...]
    pods: cluster_reader.Pods  # for a table: unknown, without a reason
    now: dt.datetime

    @property
    def is_good(self) -> bool:
        """Whether every node has the requested layout."""
        return all(report.state.is_good for report in self.reports)

    def kinds(self, report: node_reports.NodeReport) -> tuple[resources.DeviceKind, ...] | None:
        """Return a node's devices with the pods that request them; None if unknown."""
        pods = self.pods.of(report.node.name)
        if pods is None or report.gpus is None:
            return None
        return resources.kinds(report.gpus, pods, strategy=report.node.strategy)

    def claiming(self, report: node_reports.NodeReport) -> tuple[str, ...]:
        """Return the pods with ResourceClaims, which may get devices of this node."""
        pods = self.pods.of(report.node.name) or ()
        return tuple(pod.key for pod in pods if pod.has_claims and not pod.is_finished)

    def to_data(self) -> "node_answers.ClusterStatus":
        """Return plain data for JSON and YAML."""
        return {
            "kind": "ClusterStatus",
            "is_good": self.is_good,
            "pods_not_known": self.pods.why_not or None,
            "nodes": [self._node(report) for report in self.reports],
        }

    def _node(self, report: node_reports.NodeReport) -> "node_answers.NodeStatus":
        last_run = report.node.status
        kinds = self.kinds(report)
        gpus = report.gpus
        return {
            "node": report.node.name,
            "state": report.state.value,
            "is_good": report.state.is_good,
            "is_ready": report.node.is_ready,
            "requested": report.node.requested,
            "applied": report.node.applied or None,
            "applied_before": report.node.applied_before or None,
            "last_run": None
            if last_run is None
            else {
                "state": last_run.state.value,
                "phase": last_run.phase,
                "reason": last_run.reason,
                "message": last_run.message,
                "attempt": last_run.attempt,
                "started_at": timestamps.iso(last_run.started_at),
                "finished_at": timestamps.iso(last_run.finished_at),
                "retry_at": timestamps.iso(last_run.retry_at),
                "origin": last_run.origin or None,
            },
            "notes": list(report.notes),
            "gpus": None
            if gpus is None
            else cast(
                "list[gpu_answers.PublishedGpu]",
                gpu_answers.without_ids(list(map(gpu_answers.gpu, gpus))),
            ),
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


def pictures(status: ClusterStatus, *, style: styles.Style) -> str:
    """Draw every node."""
    blocks = []
    for report in status.reports:
        lines = [headline(report, status.now, style)]
        if report.last_run and report.last_run.message:
            lines.append(style.wrap(report.last_run.message, indent="  "))
        lines += style.notes(report.notes)
        if report.gpus is not None:
            drawn = picture.draw_gpus(report.gpus, style=style) or gpu_text.NO_GPU
            lines += ["", drawn, "", *_users(status, report, style)]
        blocks.append("\n".join(lines).rstrip())
    return "\n\n".join(blocks)


def _users(
    status: ClusterStatus, report: node_reports.NodeReport, style: styles.Style
) -> Iterable[str]:
    kinds = status.kinds(report)
    if kinds is None:
        yield style.wrap(f"The pods using the GPUs are unknown: {status.pods.why_not}")
        return
    width = max((len(kind_name(kind.resource)) for kind in kinds), default=0)
    for kind in kinds:
        name = kind_name(kind.resource).ljust(width)
        yield style.wrap(f"{name}  {usage(kind)}", indent="  ")
    claiming = status.claiming(report)
    if claiming:
        names = named_pods(dict.fromkeys(claiming, 1))
        yield style.wrap(f"Pods with ResourceClaims, for these GPUs or others: {names}")
    if any(0 < kind.requested < kind.count for kind in kinds):
        yield style.wrap(_ONLY_KUBELET)


def kind_name(resource: str) -> str:
    """Return the MIG profile of a resource, or ``gpu``."""
    if resource == resources.GPU:
        return "gpu"
    return str(resources.profile_of(resource) or resource)


def named_pods(requests: Mapping[str, int]) -> str:
    """Return pod names, with the number of requested devices if more than one."""
    named = [name if count == 1 else f"{name} ({count})" for name, count in requests.items()]
    return messages.list_names(named, limit=messages.MAX_AT_A_TERMINAL)


def usage(kind: resources.DeviceKind) -> str:
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


def line(report: node_reports.NodeReport) -> str:
    """Return the state of a node for a log."""
    node, last_run = report.node, report.last_run
    words = [
        node.name,
        report.state.value,
        (last_run.reason or last_run.phase) if last_run else "",
    ]
    words.append(f"requested {node.requested or 'nothing'}")
    words.append(f"applied {node.applied_text or 'nothing'}")
    words.append("" if report.gpus is None else gpu_text.slices(report.gpus))
    return ", ".join(filter(None, words))


def headline(report: node_reports.NodeReport, now: dt.datetime, style: styles.Style) -> str:
    """Return a node's state in one line."""
    node, last_run = report.node, report.last_run
    rest = [f"requested {node.requested or 'nothing'}"]
    if node.applied_text not in ("", node.requested):
        rest.append(f"applied {node.applied_text}")
    if last_run:
        rest.append(last_run.reason or f"phase {last_run.phase}")
    if last_run and last_run.at:
        rest.append(
            f"since {timestamps.show(last_run.at)}, {timestamps.age(last_run.at, now)} ago"
        )
    if last_run and last_run.attempt > 1:
        rest.append(f"attempt {last_run.attempt}")
    if last_run and last_run.retry_at and last_run.retry_at > now:
        rest.append(f"next attempt in {timestamps.age(now, last_run.retry_at)}")
    state = report.state.value, overview.tone_of(report.state)
    return style.title([(node.name, styles.Tone.STRONG), state], rest)
