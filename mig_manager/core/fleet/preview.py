"""Preview the changes of a layout on a node from its published GPUs.

It uses the agent's planner. The preview does not know which devices are in use. An agent avoids
them, so it can destroy other instances of the same kind.
"""

import collections
import dataclasses
import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

from mig_manager import errors, reasons
from mig_manager.core import messages, model, steps
from mig_manager.core.answers import gpu_answers
from mig_manager.core.display import bar
from mig_manager.core.fleet import fleet_nodes, goals, listed_layouts
from mig_manager.core.layout import custom_layouts, layout_documents, layouts, plans
from mig_manager.core.node.daemons import clients
from mig_manager.core.node.devices import resources, strategies
from mig_manager.core.objects import pod_object, well_known

if TYPE_CHECKING:
    from mig_manager.core.answers import fleet_answers, plan_answers

_OMITTED_KEYS = ("kind", "destroyed_uuids", "evicted_pods")
"""Keys of a plan to leave out: UUIDs are not published, and ``NodePlan`` has the evicted pods."""
_NO_EVICTION = (
    "an on-demand layout evicts no pod: it fails at once if a pod uses what it would destroy"
)
_NO_CONTENT = "only its agent has the content of this layout: name the agent's file with -f"


class NodeFit(enum.Enum):
    """Whether a node can have a layout; the values are a public contract."""

    UNCHANGED = "unchanged"
    FITS = "fits"
    DOES_NOT_FIT = "does-not-fit"
    UNKNOWN = "unknown"  # its GPUs, their profiles, its strategy, or the layout's content

    @property
    def words(self) -> str:
        """The value for a sentence."""
        return self.value.replace("-", " ")

    @property
    def fits(self) -> bool | None:
        """Whether the node can have the layout; None: unknown."""
        if self is NodeFit.UNKNOWN:
            return None
        return self is not NodeFit.DOES_NOT_FIT


TONES: Mapping[NodeFit, bar.Tone] = {
    NodeFit.UNCHANGED: bar.Tone.GOOD,
    NodeFit.FITS: bar.Tone.PLAIN,
    NodeFit.DOES_NOT_FIT: bar.Tone.BAD,
    NodeFit.UNKNOWN: bar.Tone.WARN,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodePlan:
    """The changes of a layout on one node."""

    name: str
    layout: str
    fit: NodeFit
    reason: str = ""  # why it does not fit, or is unknown
    message: str = ""
    content_hash: str = ""  # hash of the layout; empty if unknown
    planned: plans.Planned | None = None  # None: it does not fit, or the GPUs are unknown
    losses: tuple[resources.Loss, ...] | None = None
    """Destroyed devices that pods request; None: no plan, or unknown pods."""
    claiming: tuple[str, ...] = ()  # pods with ResourceClaims, perhaps for destroyed devices
    notes: tuple[str, ...] = ()
    may_evict: bool = True  # whether the agent would evict pods for it
    strategy: strategies.Strategy | None = None  # of the node's device plugin; None: unknown

    @property
    def evicted(self) -> tuple[str, ...]:
        """Pods that are certainly evicted: all devices of one of their resources are destroyed."""
        total = [loss for loss in self.losses or () if loss.is_total and self.may_evict]
        return tuple(sorted({pod for loss in total for pod in loss.kind.pods}))

    @property
    def maybe_evicted(self) -> tuple[str, ...]:
        """Pods that may be evicted: the agent avoids devices in use where possible."""
        every = {pod for loss in self.losses or () for pod in loss.kind.pods} | {*self.claiming}
        return tuple(sorted(every - {*self.evicted})) if self.may_evict else ()

    @property
    def is_changed(self) -> bool:
        """Whether the plan has steps."""
        return self.planned is not None and not self.planned.is_applied

    def to_data(self) -> "fleet_answers.NodePlan":
        """Return plain data for JSON and YAML."""
        data: Mapping[str, object] = self.planned.to_data() if self.planned else {}
        published = {key: value for key, value in data.items() if key not in _OMITTED_KEYS}
        return {
            "node": self.name,
            "layout": self.layout or None,
            "fit": self.fit.value,
            "reason": self.reason or None,
            "message": self.message or None,
            "notes": list(self.notes),
            "evicted_pods": list(self.evicted),
            "maybe_evicted_pods": list(self.maybe_evicted),
            "losses": None
            if self.losses is None
            else [
                {
                    "resource": loss.kind.resource,
                    "devices": loss.kind.count,
                    "destroyed": loss.destroyed,
                    "in_use_destroyed_at_least": loss.least,
                    "pods": dict(loss.kind.pods),
                }
                for loss in self.losses
            ],
            "plan": cast("plan_answers.PublishedPlan", gpu_answers.without_ids(published)) or None,
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlan:
    """The changes of a layout, or of a rollout's undo, on nodes."""

    layout: str | None  # None: an undo
    source: str
    nodes: tuple[NodePlan, ...]
    pods_not_known: str

    @property
    def is_good(self) -> bool:
        """Whether every node can have the layout."""
        return all(node.fit.fits for node in self.nodes)

    @property
    def title(self) -> str:
        """The layout or undo that is previewed, as the subject of a sentence."""
        return f"Layout {self.layout} of {self.source}" if self.layout else "Undo of the rollout"

    def to_data(self) -> "fleet_answers.ClusterPlan":
        """Return plain data for JSON and YAML."""
        return {
            "kind": "ClusterPlan",
            "layout": self.layout,
            "is_good": self.is_good,
            "pods_not_known": self.pods_not_known or None,
            "nodes": [node.to_data() for node in self.nodes],
        }


def totals(previews: Iterable[NodePlan]) -> str:
    """Count the nodes by their fit, for a sentence."""
    counts = collections.Counter(each.fit for each in previews)
    return ", ".join(f"{counts[each]} {each.words}" for each in NodeFit)


def evictions(previews: Iterable[NodePlan]) -> str:
    """Count the pods that are evicted, for a sentence."""
    counts = [(len(each.evicted), len(each.maybe_evicted)) for each in previews]
    evicted, perhaps = (sum(column) for column in zip((0, 0), *counts, strict=True))
    parts = [f"{evicted} evicted"] if evicted else []
    parts += [f"up to {perhaps} may be evicted"] if perhaps else []
    return ", ".join(parts) or "none evicted"


def preview(
    node: fleet_nodes.FleetNode,
    document: layout_documents.Document,
    name: str,
    pods: Sequence[pod_object.Pod] | None = (),
    *,
    presumed: model.ObservedGpus | None = None,
    layout: layouts.Layout | None = None,
) -> NodePlan:
    """Plan a layout of a document or of the node.

    Args:
        node: The node.
        document: Has the layout, unless the node has it.
        name: The name of the layout.
        pods: The node's pods that request GPUs; None: unknown.
        presumed: The GPUs of a node that has not published them.
        layout: The layout, if it is in no document.
    """
    gpus, why = fleet_nodes.published_gpus(node)
    gpus = presumed if gpus is None else gpus
    if gpus is None:
        return _unknown(node, name, "NotPublished", why)
    is_custom = layout is not None or listed_layouts.is_from_annotation(node, name)
    custom = custom_layouts.CustomRequest.of(node.view) if is_custom else None
    may_evict = custom_layouts.request_for(name, custom).may_evict
    try:
        layout = layout or listed_layouts.layout_of(node, gpus, document, name)
        if layout is None:
            return _unknown(node, name, "ContentUnknown", _NO_CONTENT)
        printable = dataclasses.replace(layout, name=messages.printable(layout.name))
        planned = plans.plan(gpus, printable)
    except (errors.ConfigError, errors.LayoutError) as error:
        return NodePlan(
            name=node.name,
            layout=name,
            fit=NodeFit.DOES_NOT_FIT,
            reason=error.reason.value,
            message=messages.printable(error.message, " "),
        )
    fit, reason, message = _fit(planned, node.view.labels)
    losses, claiming = (None, ()) if pods is None else _losses_and_claims(node, planned, pods)
    return NodePlan(
        name=node.name,
        layout=name,
        fit=fit,
        reason=reason,
        message=message,
        content_hash=layout.content_hash,
        planned=planned,
        losses=losses,
        claiming=claiming,
        notes=() if may_evict else (_NO_EVICTION,),
        may_evict=may_evict,
        strategy=node.strategy,
    )


def _fit(planned: plans.Planned, labels: Mapping[str, str]) -> tuple[NodeFit, str, str]:
    """Return whether a node can have a planned layout, with the reason and the message.

    ``labels`` are the node's: the device plugin's strategy is the one that GPU feature discovery
    shows. The one inferred from the resources does not count: on a node without MIG, single and
    mixed look alike.
    """
    if planned.plan.is_provisional:
        message = "the profiles of its GPUs are unknown until MIG is enabled"
        return NodeFit.UNKNOWN, "MigDisabled", message
    if planned.plan.is_empty:
        return NodeFit.UNCHANGED, "", ""
    strategy = strategies.from_labels(labels)
    results = strategies.gpu_layouts(planned.gpus, planned.desired)
    why = strategies.refusal(results, strategy, labels)
    if strategy and why:
        # The node does not show whether its agent sets another plugin config for the layout.
        message = (
            f"the device plugin has MIG strategy {strategy.value} and would not start, "
            f"unless the agent sets another config: {why}"
        )
        return NodeFit.UNKNOWN, reasons.Reason.STRATEGY_MISMATCH.value, message
    return NodeFit.FITS, "", ""


def source_of(
    document: layout_documents.Document, name: str, among: Iterable[fleet_nodes.FleetNode]
) -> str:
    """Return where a layout's content comes from, for a sentence."""
    is_custom = any(listed_layouts.is_from_annotation(node, name) for node in among)
    return "the node's annotation" if is_custom else document.source


def misfit(
    goal: goals.RolloutGoal, node: fleet_nodes.FleetNode, cache: "dict[object, NodePlan | None]"
) -> NodePlan | None:
    """Return why a node cannot have a rollout's layout; None if it can, or that is unknown.

    ``cache`` has the answers for other nodes: thousands have the same GPUs, and their instances
    do not matter here.
    """
    if goal.layout is None:
        return None
    if goal.document.is_presumed and not (
        node.listed.is_complete or node.listed.find(goal.layout)
    ):
        # Its agent may have another layout of this name.
        return None
    gpus, _ = fleet_nodes.published_gpus(node)
    if gpus is None:
        return None
    layout = goal.document.layouts.get(goal.layout)
    is_about_kinds = layout is not None and not any(rule.identities for rule in layout.rules)
    alike = tuple(
        dataclasses.replace(
            gpu, gpu_instances=(), pci_address="", uuid="" if is_about_kinds else gpu.uuid
        )
        for gpu in gpus
    )
    annotations = map(
        node.view.annotations.get, (well_known.LAYOUTS_ANNOTATION, well_known.LAYOUT_ANNOTATION)
    )
    key = alike, gpus.unreachable, *annotations
    try:
        return cache[key]  # the hash of GPUs takes long
    except KeyError:
        result = preview(node, goal.document, goal.layout, None)
        cache[key] = result if result.fit is NodeFit.DOES_NOT_FIT else None
        return cache[key]


def _unknown(node: fleet_nodes.FleetNode, layout: str, reason: str, message: str) -> NodePlan:
    return NodePlan(
        name=node.name,
        layout=layout,
        fit=NodeFit.UNKNOWN,
        reason=reason,
        message=message,
    )


def of_rollout(
    goal: goals.RolloutGoal, node: fleet_nodes.FleetNode, pods: Sequence[pod_object.Pod] | None
) -> NodePlan:
    """Plan what a rollout or its undo requests of a node."""
    target = goal.target(node)
    if goal.is_superseded(node):
        layout, reason = node.requested, "Superseded"
        message = "another layout was requested since the rollout; the request stays"
    elif target is None:
        layout, reason = None, "LabelRemoved"
        message = "the label is removed; the GPUs stay as they are"
    else:
        return preview(node, goal.document, target, pods)
    return NodePlan(
        name=node.name,
        layout=layout or "",
        fit=NodeFit.FITS,
        reason=reason,
        message=message,
    )


def _losses_and_claims(
    node: fleet_nodes.FleetNode, planned: plans.Planned, pods: Sequence[pod_object.Pod]
) -> tuple[tuple[resources.Loss, ...], tuple[str, ...]]:
    """Return the devices that pods lose, and the pods with claims, which can lose others.

    Only the node's kubelet knows which pod uses which device.
    """
    requesting = [pod for pod in pods if not clients.is_device_plugin(pod)]
    losses = resources.losses(
        planned.plan,
        planned.gpus,
        requesting,
        strategy=node.strategy,
        capacity=node.view.capacity,
    )
    claims: tuple[str, ...] = ()
    modes = planned.plan.of(steps.SetMode)
    destroyed = planned.plan.of(steps.DestroyComputeInstance)
    if modes or destroyed:
        claims = tuple(pod.key for pod in requesting if pod.has_claims and not pod.is_finished)
    return losses, claims
