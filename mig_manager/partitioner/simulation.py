"""Simulate a decision of the partitioner about nodes and pods in files: ``--simulate``."""

import dataclasses
import datetime as dt
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mig_manager import errors
from mig_manager.core import answers, bar, gpu_answers, json_text, messages, model, picture, steps
from mig_manager.core.fleet import demand, mixes, partitioned, partitioning
from mig_manager.core.layout import config, layouts
from mig_manager.core.planner import planner

_MOST_MIXES = 8  # in the text, besides the present layouts and the best mix


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeResult:
    """The simulated change of one opted-in node."""

    node: partitioned.PartitionedNode
    change: partitioning.Change | None
    plan: steps.Plan | None

    def to_data(self) -> answers.SimulatedNode:
        """Return plain data for JSON and YAML."""
        change, plan = self.change, self.plan
        return {
            "node": self.node.name,
            "unusable": self.node.unusable or None,
            "why": change.why if change else None,
            "pods": [pod.key for pod in change.pods] if change else [],
            "layout": change.layout if change else None,
            "steps": [gpu_answers.plan(gpu) for gpu in plan.gpus] if plan else [],
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One decision by node and pod, and the comparison of fixed layouts."""

    nodes: tuple[NodeResult, ...]
    decision: partitioning.PartitioningDecision
    others: int  # nodes that are not opted in
    jobs: int = 0  # pods of the comparison
    scores: tuple[mixes.Score, ...] = ()  # best first; empty without ``is_mix``

    def to_data(self) -> answers.Simulation:
        """Return plain data for JSON and YAML."""
        decision = self.decision
        return {
            "kind": "Simulation",
            "nodes": [each.to_data() for each in self.nodes],
            "unmet": [{"pod": each.pod.key, "message": each.message} for each in decision.unmet],
            "waiting": [
                {"pod": each.pod.key, "reason": each.reason.value, "message": each.message}
                for each in decision.waiting
            ],
            "mixes": [
                {
                    "name": each.name,
                    "served": each.served,
                    "of": self.jobs,
                    "waited_s": round(each.waited_s),
                    "gpus": dict(each.gpus),
                }
                for each in self.scores
            ],
        }

    def text(self, style: bar.Style) -> str:
        """Return the report for people; lines fit the style's width."""
        if self.scores:
            return _mix_text(self, style)
        blocks = [_node_text(each, style) for each in self.nodes]
        if not self.nodes:
            blocks.append("No node of the file is opted in.")
        for title, rows in (
            ("No node can serve", [(e.pod.key, e.message) for e in self.decision.unmet]),
            ("Waiting", [(e.pod.key, e.message) for e in self.decision.waiting]),
        ):
            lines = [
                style.wrapped(messages.with_full_stop(f"{key}: {text}"), indent="  ")
                for key, text in rows
            ]
            if lines:
                blocks.append("\n".join([style.paint(title, bar.Tone.STRONG), *lines]))
        served = sum(len(change.pods) for change in self.decision.changes)
        summary = (
            f"Opted-in nodes: {len(self.nodes)}, others: {self.others}; would change: "
            f"{len(self.decision.changes)}. Pods with new room: {served}, waiting: "
            f"{len(self.decision.waiting)}, without a possible node: {len(self.decision.unmet)}."
        )
        blocks.append(style.wrapped(summary))
        return "\n\n".join(blocks)


def simulate(
    nodes_text: str,
    pods_text: str,
    limits: partitioning.PartitionerLimits,
    *,
    now: dt.datetime,
    is_mix: bool = False,
    selects: Callable[[partitioned.PartitionedNode], bool] = lambda _: True,
) -> Report:
    """Decide about nodes and pods in the output of ``kubectl get -o json``.

    With ``is_mix``, also compare fixed layouts for all pods of the file.

    Raises:
        UsageError: A text is not a list of nodes or pods.
        ClusterError: An object is malformed.
    """
    items, pods = _items(nodes_text, "Node"), _items(pods_text, "Pod")
    parsed = [demand.parse(pod) for pod in pods]
    bound = [pod for pod in parsed if isinstance(pod, demand.Bound)]
    pending = [pod for pod in parsed if isinstance(pod, demand.Pending)]
    nodes = partitioned.with_pods(
        (
            node if selects(node) else dataclasses.replace(node, is_opted_in=False)
            for node in map(partitioned.parse, items)
            if node
        ),
        bound,
    )
    decision = partitioning.decide(nodes, pending, limits, now=now, history=partitioning.History())
    changes = {change.node: change for change in decision.changes}
    opted_in = sorted((node for node in nodes if node.is_opted_in), key=lambda node: node.name)
    jobs = [job for job in map(mixes.parse_job, pods) if job] if is_mix else []
    return Report(
        nodes=tuple(_result(node, changes.get(node.name)) for node in opted_in),
        decision=decision,
        others=len(items) - len(opted_in),
        jobs=len(jobs),
        scores=mixes.compare(nodes, jobs) if is_mix else (),
    )


def _items(text: str, kind: str) -> Sequence[Mapping[str, Any]]:
    """Return the objects of a JSON list, or its single object."""
    command = f"kubectl get {kind.lower()}s{' -A' if kind == 'Pod' else ''} -o json"
    try:
        data = json_text.parse(text)
    except ValueError as error:
        place = f", line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise errors.UsageError(
            f"the file with {kind.lower()}s is not JSON{place}; write it with '{command}'"
        ) from error
    items = data.get("items", [data]) if isinstance(data, dict) else None
    if not isinstance(items, list) or not all(
        isinstance(each, dict) and each.get("kind", kind) == kind for each in items
    ):
        raise errors.UsageError(
            f"the file with {kind.lower()}s is not a list of {kind} objects; "
            f"write it with '{command}'"
        )
    return items


def _result(node: partitioned.PartitionedNode, change: partitioning.Change | None) -> NodeResult:
    if change is None:
        return NodeResult(node=node, change=None, plan=None)
    (layout,) = config.parse(change.layout, source=node.name).layouts.values()
    plan = planner.plan(node.gpus, layouts.select(layout, node.gpus))
    return NodeResult(node=node, change=change, plan=plan)


def _node_text(result: NodeResult, style: bar.Style) -> str:
    node, change = result.node, result.change
    title = style.paint(style.fitted(node.name), bar.Tone.STRONG)
    if change is None or result.plan is None:
        why = f"left alone: {node.unusable}" if node.unusable else "stays as it is"
        return f"{title}\n{style.wrapped(messages.with_full_stop(why), indent='  ')}"
    named = messages.listed([pod.key for pod in change.pods])
    why = messages.with_full_stop(f"{change.why}, for {named}" if named else change.why)
    changed = {gpu.gpu_uuid for gpu in result.plan.gpus}
    drawn = picture.draw_change(
        model.ObservedGpus(gpu for gpu in node.gpus if gpu.uuid in changed),
        result.plan,
        selected=changed,
        style=style,
    )
    return f"{title}\n{style.wrapped(why, indent='  ')}\n\n{drawn}"


def _mix_text(report: Report, style: bar.Style) -> str:
    best = report.scores[0]
    lines = [style.fitted(f"{'LAYOUT':<28}{'SERVED':>14}{'WAITED':>12}")]
    for rank, each in enumerate(report.scores):
        if rank >= _MOST_MIXES and each.name not in (mixes.NOW, mixes.BEST):
            continue
        waited = f"{each.waited_s / 3600:.1f} h"
        served = f"{each.served} of {report.jobs}"
        lines.append(style.fitted(f"{each.name:<28}{served:>14}{waited:>12}"))
    lines += ["", f"{best.name}:"]
    lines += [
        style.wrapped(f"{count} x GPU with {content}", indent="  ")
        for content, count in sorted(best.gpus.items())
    ]
    remarks = (
        "WAITED is the total time that pods waited for their devices. The comparison ignores CPU, "
        "memory, priority, pod affinity and the cost of changes. Deleted pods are not in the "
        "file; a pod that has not ended counts until the latest time in the file."
    )
    return "\n".join([*lines, "", style.wrapped(remarks)])
