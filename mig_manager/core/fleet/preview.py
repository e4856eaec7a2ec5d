"""Preview the changes of a layout on a node from its published GPUs.

It uses the agent's planner. The preview does not know which devices are in use. An agent avoids
them, so it can destroy other instances of the same kind.
"""

import dataclasses
from collections.abc import Iterable, Sequence

from mig_manager import errors, reasons
from mig_manager.core import messages, model, steps
from mig_manager.core.fleet import cluster_plan, fleet_nodes, goals, listed_layouts
from mig_manager.core.layout import custom_layouts, layout_documents, layouts, plans
from mig_manager.core.node.daemons import clients
from mig_manager.core.node.devices import resources, strategies
from mig_manager.core.objects import pod_object, well_known

_NO_EVICTION = (
    "an on-demand layout evicts no pod: it fails at once if a pod uses what it would destroy"
)
_NO_CONTENT = "only its agent has the content of this layout: name the agent's file with -f"


def of_layout(
    node: fleet_nodes.FleetNode,
    document: layout_documents.Document,
    name: str,
    pods: Sequence[pod_object.Pod] | None = (),
    *,
    presumed: model.ObservedGpus | None = None,
    layout: layouts.Layout | None = None,
) -> cluster_plan.NodePlan:
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
        return _unknown(node, name, cluster_plan.PreviewReason.NOT_PUBLISHED, why)
    is_custom = layout is not None or listed_layouts.is_from_annotation(node, name)
    custom = custom_layouts.CustomRequest.of(node.view) if is_custom else None
    may_evict = custom_layouts.request_for(name, custom).may_evict
    try:
        layout = layout or listed_layouts.layout_of(node, gpus, document, name)
        if layout is None:
            return _unknown(node, name, cluster_plan.PreviewReason.CONTENT_UNKNOWN, _NO_CONTENT)
        printable = dataclasses.replace(layout, name=messages.printable(layout.name))
        planned = plans.plan(gpus, printable)
    except (errors.ConfigError, errors.LayoutError) as error:
        return cluster_plan.NodePlan(
            name=node.name,
            layout=name,
            fit=cluster_plan.NodeFit.DOES_NOT_FIT,
            reason=error.reason,
            message=messages.printable(error.message, " "),
        )
    fit, reason, message = _fit(planned, node)
    losses, claiming = (None, ()) if pods is None else _losses_and_claims(node, planned, pods)
    return cluster_plan.NodePlan(
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


def _fit(
    planned: plans.Planned, node: fleet_nodes.FleetNode
) -> tuple[cluster_plan.NodeFit, cluster_plan.Reason | None, str]:
    """Return whether a node can have a planned layout, with the reason and the message.

    Without a label of GPU feature discovery, the strategy inferred from the resources does not
    count: on a node without MIG, single and mixed look alike.
    """
    if planned.plan.is_provisional:
        message = "the profiles of its GPUs are unknown until MIG is enabled"
        return cluster_plan.NodeFit.UNKNOWN, cluster_plan.PreviewReason.MIG_DISABLED, message
    if planned.plan.is_empty:
        return cluster_plan.NodeFit.UNCHANGED, None, ""
    labels = node.view.labels
    strategy = node.strategy if strategies.from_labels(labels) else None
    results = strategies.gpu_layouts(planned.gpus, planned.desired)
    if strategy and (why := strategies.refusal(results, strategy, labels)):
        # The node does not show whether its agent sets another plugin config for the layout.
        message = (
            f"the device plugin has MIG strategy {strategy.value} and would not start, "
            f"unless the agent sets another config: {why}"
        )
        return cluster_plan.NodeFit.UNKNOWN, reasons.Reason.STRATEGY_MISMATCH, message
    return cluster_plan.NodeFit.FITS, None, ""


def source_of(
    document: layout_documents.Document, name: str, among: Iterable[fleet_nodes.FleetNode]
) -> str:
    """Return where a layout's content comes from, for a sentence."""
    is_custom = any(listed_layouts.is_from_annotation(node, name) for node in among)
    return "the node's annotation" if is_custom else document.source


def misfit(
    goal: goals.RolloutGoal,
    node: fleet_nodes.FleetNode,
    cache: "dict[object, cluster_plan.NodePlan | None]",
) -> cluster_plan.NodePlan | None:
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
        result = of_layout(node, goal.document, goal.layout, None)
        cache[key] = result if result.fit is cluster_plan.NodeFit.DOES_NOT_FIT else None
        return cache[key]


def _unknown(
    node: fleet_nodes.FleetNode, layout: str, reason: cluster_plan.Reason, message: str
) -> cluster_plan.NodePlan:
    return cluster_plan.NodePlan(
        name=node.name,
        layout=layout,
        fit=cluster_plan.NodeFit.UNKNOWN,
        reason=reason,
        message=message,
    )


def of_rollout(
    goal: goals.RolloutGoal, node: fleet_nodes.FleetNode, pods: Sequence[pod_object.Pod] | None
) -> cluster_plan.NodePlan:
    """Plan what a rollout or its undo requests of a node."""
    target = goal.target(node)
    if goal.is_superseded(node):
        layout, reason = node.requested, cluster_plan.PreviewReason.SUPERSEDED
        message = "another layout was requested since the rollout; the request stays"
    elif target is None:
        layout, reason = None, cluster_plan.PreviewReason.LABEL_REMOVED
        message = "the label is removed; the GPUs stay as they are"
    else:
        return of_layout(node, goal.document, target, pods)
    return cluster_plan.NodePlan(
        name=node.name,
        layout=layout or "",
        fit=cluster_plan.NodeFit.FITS,
        reason=reason,
        message=message,
    )


def _losses_and_claims(
    node: fleet_nodes.FleetNode, planned: plans.Planned, pods: Sequence[pod_object.Pod]
) -> tuple[tuple[resources.Loss, ...], tuple[str, ...]]:
    """Return the devices that pods lose, and the pods with claims, which can lose others.

    Only the node's kubelet knows which pod uses which device.
    """
    requesting = [pod for pod in pods if not clients.is_plugin_or_monitor(pod)]
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
