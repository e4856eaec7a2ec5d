"""Simulate a decision of the partitioner about nodes and pods in files: ``--simulate``."""

import dataclasses
import datetime as dt
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mig_manager import errors
from mig_manager.core import messages, model
from mig_manager.core.answers import partitioner_answers, plan_answers
from mig_manager.core.display import picture, styles
from mig_manager.core.files import json_text
from mig_manager.core.objects import well_known
from mig_manager.core.partitioning import decider, demand
from mig_manager.core.partitioning.decision import decisions, situations
from mig_manager.core.partitioning.nodes import node_index, node_requests, partitioned_nodes

_NO_NODE = (
    "No node of the file is opted in, or --node-selector leaves it out. Opt nodes in with "
    f"'kubectl label node NODE {well_known.PARTITIONING_LABEL}={well_known.ON_DEMAND}', and write "
    "the file again with 'kubectl get nodes -o json'."
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeResult:
    """The simulated change of one opted-in node."""

    node: partitioned_nodes.PartitionedNode
    change: decisions.NodeChange | None

    def to_data(self) -> partitioner_answers.SimulatedNode:
        """Return plain data for JSON and YAML."""
        change = self.change
        return {
            "node": self.node.name,
            "unusable": self.node.unusable or None,
            "why": change.why if change else None,
            "pods": [pod.key for pod in change.pods] if change else [],
            "layout": change.layout if change else None,
            "steps": [plan_answers.plan(gpu) for gpu in change.plan.gpus] if change else [],
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DecisionReport:
    """One decision by node and pod."""

    nodes: tuple[NodeResult, ...]
    decision: decisions.PartitioningDecision
    others: int  # nodes that are not opted in

    def to_data(self) -> partitioner_answers.Simulation:
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
        }

    def text(self, style: styles.Style) -> str:
        """Return the report for people; lines fit the style's width."""
        blocks = [_node_text(each, style) for each in self.nodes]
        if not self.nodes:
            blocks.append(style.wrap(_NO_NODE))
        for title, rows in (
            ("No node can serve", [(e.pod.key, e.message) for e in self.decision.unmet]),
            ("Waiting", [(e.pod.key, e.message) for e in self.decision.waiting]),
        ):
            if rows:
                blocks.append(pod_list(title, rows, style))
        served = sum(len(change.pods) for change in self.decision.changes)
        summary = (
            f"Opted-in nodes: {len(self.nodes)}, others: {self.others}; would change: "
            f"{len(self.decision.changes)}. Pods with new room: {served}, waiting: "
            f"{len(self.decision.waiting)}, without a possible node: {len(self.decision.unmet)}."
        )
        blocks.append(style.wrap(summary))
        return "\n\n".join(blocks)


def pod_list(title: str, rows: Iterable[tuple[str, str]], style: styles.Style) -> str:
    """Return pods with the reason of each, below a title."""
    lines = (
        style.wrap(messages.with_full_stop(f"{pod}: {why}"), indent="  ") for pod, why in rows
    )
    return "\n".join([style.paint(title, styles.Tone.STRONG), *lines])


def simulate(
    nodes: Sequence[partitioned_nodes.PartitionedNode],
    pods: Iterable[Mapping[str, Any]],
    limits: decisions.PartitionerLimits,
    *,
    now: dt.datetime,
) -> DecisionReport:
    """Decide about nodes and Pod objects.

    Raises:
        ClusterError: A pod is malformed.
    """
    parsed = [demand.parse(pod) for pod in pods]
    node_pods = [pod for pod in parsed if isinstance(pod, demand.PodOfNode)]
    pending = [pod for pod in parsed if isinstance(pod, demand.PendingPod)]
    nodes = node_requests.with_pods(nodes, node_requests.Requests(node_pods))
    situation = situations.Situation(
        index=node_index.NodeIndex(nodes),
        limits=dataclasses.replace(limits, cooldown_s=0.0),
        now=now,
    )
    decision = decider.decide(situation, pending)
    changes = {change.node: change for change in decision.changes}
    opted_in = sorted((node for node in nodes if node.is_opted_in), key=lambda node: node.name)
    return DecisionReport(
        nodes=tuple(NodeResult(node=node, change=changes.get(node.name)) for node in opted_in),
        decision=decision,
        others=len(nodes) - len(opted_in),
    )


def nodes_of(
    text: str, selects: Callable[[partitioned_nodes.PartitionedNode], bool]
) -> tuple[partitioned_nodes.PartitionedNode, ...]:
    """Parse the output of ``kubectl get nodes -o json``; nodes not selected are not opted in.

    Raises:
        UsageError: The text is not a list of nodes.
        ClusterError: A node is malformed.
    """
    nodes = filter(None, map(partitioned_nodes.parse, items(text, "Node")))
    return tuple(
        node if selects(node) else dataclasses.replace(node, is_opted_in=False) for node in nodes
    )


def items(text: str, kind: str) -> Sequence[Mapping[str, Any]]:
    """Return the objects of a JSON list, or its single object; UsageError if it is neither."""
    command = f"kubectl get {kind.lower()}s{' -A' if kind == 'Pod' else ''} -o json"
    try:
        data = json_text.parse(text)
    except ValueError as error:
        place = f", line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise errors.UsageError(
            f"the file with {kind.lower()}s is not JSON{place}; write it with '{command}'"
        ) from error
    objects = data.get("items", [data]) if isinstance(data, dict) else None
    if not isinstance(objects, list) or not all(
        isinstance(each, dict) and each.get("kind", kind) == kind for each in objects
    ):
        raise errors.UsageError(
            f"the file with {kind.lower()}s is not a list of {kind} objects; "
            f"write it with '{command}'"
        )
    return objects


def _node_text(result: NodeResult, style: styles.Style) -> str:
    node, change = result.node, result.change
    title = style.paint(style.fit(node.name), styles.Tone.STRONG)
    if change is None:
        why = f"left alone: {node.unusable}" if node.unusable else "stays as it is"
        return f"{title}\n{style.wrap(messages.with_full_stop(why), indent='  ')}"
    named = messages.list_names([pod.key for pod in change.pods])
    why = messages.with_full_stop(f"{change.why}, for {named}" if named else change.why)
    changed = {gpu.gpu_uuid for gpu in change.plan.gpus}
    drawn = picture.draw_change(
        model.ObservedGpus(gpu for gpu in node.gpus if gpu.uuid in changed),
        change.plan,
        selected=changed,
        style=style,
    )
    return f"{title}\n{style.wrap(why, indent='  ')}\n\n{drawn}"
