"""Preview what a layout would change on a node, from what its agent has published.

It asks the planner of the agents. Which devices are in use is not known here: an agent spares
those, and so may choose other instances of the same kind to destroy.
"""

import dataclasses
import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mig_manager import errors
from mig_manager.core import messages, model, steps
from mig_manager.core.fleet import nodes
from mig_manager.core.layout import config, plans
from mig_manager.core.node import clients, cluster, resources
from mig_manager.core.records import gpu_codec

if TYPE_CHECKING:
    from mig_manager.core import answers


class NodeFit(enum.Enum):
    """Whether a node can have a layout; the values are a public contract."""

    APPLIED = "applied"
    FITS = "fits"
    DOES_NOT_FIT = "does-not-fit"
    UNKNOWN = "unknown"  # its GPUs, or their profiles, are not known

    @property
    def fits(self) -> bool | None:
        """Whether the node can have the layout; None: unknown."""
        if self is NodeFit.UNKNOWN:
            return None
        return self is not NodeFit.DOES_NOT_FIT


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """What a layout would change on one node."""

    name: str
    layout: str
    feasibility: NodeFit
    reason: str = ""  # why it does not fit, or is not known
    message: str = ""
    content_hash: str = ""  # of the layout; empty if it is not known
    planned: plans.Planned | None = None  # None: it does not fit, or the GPUs are not known
    losses: tuple[resources.Loss, ...] | None = None
    """Devices that are destroyed and that pods request; None: no plan, or unknown pods."""
    claiming: tuple[str, ...] = ()  # pods with ResourceClaims, which may be for such devices

    @property
    def evicted(self) -> tuple[str, ...]:
        """Pods that are evicted for certain: every device of a resource of theirs is destroyed."""
        return tuple(
            sorted({pod for loss in self.losses or () if loss.is_total for pod in loss.kind.pods})
        )

    @property
    def maybe_evicted(self) -> tuple[str, ...]:
        """Pods that may be evicted: the agent spares devices in use as far as it can."""
        every = {pod for loss in self.losses or () for pod in loss.kind.pods}
        return tuple(sorted({*every, *self.claiming} - set(self.evicted)))

    def to_data(self) -> "answers.Preview":
        """Return plain data for JSON and YAML."""
        planned = self.planned
        gpu_plans = planned.plan.gpus if planned else ()
        return {
            "name": self.name,
            "layout": self.layout,
            "verdict": self.feasibility.value,
            "reason": self.reason,
            "message": self.message,
            "instances": {
                "kept": planned.staying if planned else 0,
                "destroyed": len(planned.destroyed) if planned else 0,
                "created": len(planned.created) if planned else 0,
            },
            "mode_changes": [each.gpu_index for each in gpu_plans if each.changes_mode],
            "resets": [each.gpu_index for each in gpu_plans if each.needs_reset],
            "evicted_pods": list(self.evicted),
            "maybe_evicted_pods": list(self.maybe_evicted),
            "is_provisional": bool(planned and planned.plan.is_provisional),
        }


def preview(
    node: nodes.Node,
    document: config.Document,
    name: str,
    pods: Sequence[cluster.Pod] | None = (),
    *,
    presumed: model.ObservedGpus | None = None,
    layout: config.Layout | None = None,
) -> Preview:
    """Plan a layout of a document or of the node.

    Args:
        node: The node.
        document: Has the layout, unless the node has it.
        name: The name of the layout.
        pods: Those on the node that request GPUs; None: unknown.
        presumed: The GPUs of a node that has not published them, if they are known anyway.
        layout: The layout itself, if it is in no document.
    """
    gpus, why = presumed, "no agent has published its GPUs; is one running there?"
    try:
        gpus = gpu_codec.from_json(node.gpus) if node.gpus else presumed
    except ValueError as error:
        why = f"the published GPUs cannot be read: {error}"
    if gpus is None:
        unknown = NodeFit.UNKNOWN
        return Preview(
            name=node.name, layout=name, feasibility=unknown, reason="NotPublished", message=why
        )
    try:
        chosen = layout or nodes.layout_of(node, gpus, document, name)
        printable = dataclasses.replace(chosen, name=messages.printable(chosen.name))
        planned = plans.plan(gpus, printable)
    except (errors.ConfigError, errors.LayoutError) as error:
        return Preview(
            name=node.name,
            layout=name,
            feasibility=NodeFit.DOES_NOT_FIT,
            reason=error.reason.value,
            message=messages.printable(error.message, " "),
        )
    feasibility, reason, message = NodeFit.FITS, "", ""
    if planned.plan.is_provisional:
        feasibility, reason = NodeFit.UNKNOWN, "MigDisabled"
        message = "which profiles its GPUs have is not known before MIG is enabled"
    elif planned.plan.is_empty:
        feasibility = NodeFit.APPLIED
    losses, claiming = (None, ()) if pods is None else _affected(node, planned, pods)
    return Preview(
        name=node.name,
        layout=name,
        feasibility=feasibility,
        reason=reason,
        message=message,
        content_hash=chosen.content_hash,
        planned=planned,
        losses=losses,
        claiming=claiming,
    )


def of_rollout(
    goal: nodes.Goal,
    node: nodes.Node,
    document: config.Document,
    pods: Sequence[cluster.Pod],
) -> Preview:
    """Plan what a rollout or its undo requests of a node."""
    target = goal.target(node)
    if target is not None and not goal.is_superseded(node):
        return preview(node, document, target, pods)
    layout, reason = node.requested, "Superseded"
    message = "another layout was requested since the rollout; the request stays"
    if not goal.is_superseded(node):
        layout, reason = "", "LabelRemoved"
        message = "the label is removed; the GPUs stay as they are"
    return Preview(
        name=node.name,
        layout=layout or "",
        feasibility=NodeFit.FITS,
        reason=reason,
        message=message,
    )


def _affected(
    node: nodes.Node, planned: plans.Planned, pods: Sequence[cluster.Pod]
) -> tuple[tuple[resources.Loss, ...], tuple[str, ...]]:
    """Return the devices that pods lose, and the pods with claims, which may lose others.

    Only the node's kubelet knows which pod uses which device.
    """
    requesting = [pod for pod in pods if not clients.is_device_plugin(pod)]
    strategy = node.strategy or _strategy(node)
    losses = resources.losses(planned.plan, planned.gpus, requesting, strategy=strategy)
    claims: tuple[str, ...] = ()
    if planned.mode_changes or any(
        isinstance(step, steps.DestroyComputeInstance) for step in planned.plan.steps
    ):
        claims = tuple(pod.key for pod in requesting if pod.has_claims and not pod.is_finished)
    return losses, claims


def _strategy(node: nodes.Node) -> str:
    """Return the device plugin's MIG strategy by what the node offers; empty if nothing yet."""
    resources_now = [name for name, count in node.view.allocatable.items() if count]
    if any(resources.is_device(name) and name != resources.GPU for name in resources_now):
        return "mixed"
    return "single" if resources.GPU in resources_now else ""
