"""``kubectl mig status``: the state of nodes."""

import dataclasses
import datetime as dt
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, cast

from mig_manager.adapters import cluster_reader
from mig_manager.cli.toolkit import command_settings, console, gpu_report
from mig_manager.core import gpu_answers, messages, timestamps
from mig_manager.core.display import bar, picture, tables
from mig_manager.core.fleet import node_reports, overview
from mig_manager.core.node import resources
from mig_manager.core.settings import node_settings, options
from mig_manager.kubectl import cluster, history, plugin_settings

if TYPE_CHECKING:
    from mig_manager.core import answers

_HEAD = ("NODE", "STATE", "REASON", "AGE", "REQUESTED", "APPLIED", "SLICES")
_ONLY_KUBELET = "The API does not show which device a pod got; only kubelet knows."


class Settings(
    plugin_settings.NodesSettings, takes=f"node selector watch output {plugin_settings.COMMON}"
):
    """Settings of ``status``."""

    is_watched: bool = options.declare(command_settings.WATCH)
    output_format: node_settings.OutputFormat = plugin_settings.drawn_output()


def run(settings: Settings, terminal: console.Console) -> int:
    """Show nodes, once or until q is pressed."""
    command = cluster.ClusterCommand(settings, terminal)

    def status_of(search: cluster_reader.NodeSearch) -> tuple[ClusterStatus, str]:
        pods, is_drawn = cluster_reader.Pods(by_node=None), command.is_drawn(search)
        # A table has no room for the pods of many nodes, and listing them is slow.
        if is_drawn or settings.output_format is not node_settings.OutputFormat.TEXT:
            pods = command.reader.pods(search.names)
        result = ClusterStatus(reports=search.reports, pods=pods, now=command.now)
        return result, (pictures if is_drawn else table)(result, style=command.style)

    if not settings.is_watched:
        search = command.nodes(settings.nodes)
        result, text = status_of(search)
        is_good = result.is_good and not search.missing
        return command.answer(result.to_data, lambda: text, is_good=is_good)
    from mig_manager.cli.toolkit import live  # noqa: PLC0415 - rarely used

    live.require_text(settings.output_format)

    def refresh() -> live.View:
        style, search = command.style, command.find(settings.nodes)
        blocks = [status_of(search)[1]]
        # Events cost a request per node, and their table does not name it.
        if len(search.reports) == 1:
            past = history.history(command.reader, search.reports[0], now=command.now)
            blocks += history.last_run(past, style=style)
        blocks += [style.wrap(message) for message in search.missing]
        lines = {report.node.name: line(report) for report in search.reports}
        # One constant name: a node that reappears must not be reported as gone.
        lines["not found"] = "; ".join(search.missing)
        return live.View("\n\n".join(blocks), lines)

    return live.run(terminal, refresh)


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

    def to_data(self) -> "answers.ClusterStatus":
        """Return plain data for JSON and YAML."""
        return {
            "kind": "ClusterStatus",
            "is_good": self.is_good,
            "pods_not_known": self.pods.why_not or None,
            "nodes": [self._node(report) for report in self.reports],
        }

    def _node(self, report: node_reports.NodeReport) -> "answers.NodeStatus":
        run, kinds, gpus = report.node.status, self.kinds(report), report.gpus
        return {
            "node": report.node.name,
            "state": report.state.value,
            "is_good": report.state.is_good,
            "is_ready": report.node.is_ready,
            "requested": report.node.requested,
            "applied": report.node.applied or None,
            "applied_before": report.node.applied_before or None,
            "last_run": None
            if run is None
            else {
                "state": run.state.value,
                "phase": run.phase,
                "reason": run.reason,
                "message": run.message,
                "attempt": run.attempt,
                "started_at": history.iso(run.started_at),
                "finished_at": history.iso(run.finished_at),
                "retry_at": history.iso(run.retry_at),
                "origin": run.origin or None,
            },
            "notes": list(report.notes),
            "gpus": None
            if gpus is None
            else cast(
                "list[answers.PublishedGpu]",
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


def table(status: ClusterStatus, *, style: bar.Style) -> str:
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
            notes.append(style.wrap(f"{report.node.name}: {remarks}"))
    lines = tables.columns(_HEAD, rows, style=style)
    return "\n".join([*lines, "", *notes] if notes else lines)


def pictures(status: ClusterStatus, *, style: bar.Style) -> str:
    """Draw every node."""
    blocks = []
    for report in status.reports:
        lines = [history.headline(report, status.now, style)]
        if report.node.status and report.node.status.message:
            lines.append(style.wrap(report.node.status.message, indent="  "))
        lines += [style.wrap(note, indent="  ! ") for note in report.notes]
        if report.gpus is not None:
            drawn = picture.draw_gpus(report.gpus, style=style) or gpu_report.NO_GPU
            lines += ["", drawn, "", *_users(status, report, style)]
        blocks.append("\n".join(lines).rstrip())
    return "\n\n".join(blocks)


def _users(
    status: ClusterStatus, report: node_reports.NodeReport, style: bar.Style
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
    node, run = report.node, report.node.status
    words = [node.name, report.state.value, (run.reason or run.phase) if run else ""]
    words.append(f"requested {node.requested or 'nothing'}")
    words.append(f"applied {node.applied_text or 'nothing'}")
    words.append("" if report.gpus is None else gpu_report.slices(report.gpus))
    return ", ".join(filter(None, words))
