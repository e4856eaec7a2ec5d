"""The changes of a layout on nodes, even on nodes without an agent."""

import dataclasses
from collections.abc import Sequence

from mig_manager.adapters import cluster_reader
from mig_manager.cli.toolkit import gpu_text, plan_table
from mig_manager.core import messages
from mig_manager.core.display import styles
from mig_manager.core.fleet import cluster_plan, listed_layouts, node_reports, preview
from mig_manager.core.layout import layout_documents, layouts
from mig_manager.core.node.devices import resources
from mig_manager.kubectl import node_status, presumed_gpus


def plan(
    name: str,
    reports: Sequence[node_reports.NodeReport],
    *,
    document: layout_documents.Document,
    pods: cluster_reader.Pods,
    layout: layouts.Layout | None = None,
) -> cluster_plan.ClusterPlan:
    """Plan a layout for nodes: ``layout`` itself, or one of the document or the node.

    Raises:
        LayoutError: UNKNOWN_CONFIG.
    """
    if layout is None:
        listed_layouts.require_layout([report.node for report in reports], document, name)
    return cluster_plan.ClusterPlan(
        layout=messages.printable(name),
        source=document.source
        if layout
        else preview.source_of(document, name, (report.node for report in reports)),
        nodes=tuple(_of_node(name, report, document, pods, layout) for report in reports),
        pods_not_known=pods.why_not,
    )


def _of_node(
    layout_name: str,
    report: node_reports.NodeReport,
    document: layout_documents.Document,
    pods: cluster_reader.Pods,
    layout: layouts.Layout | None,
) -> cluster_plan.NodePlan:
    last_run = report.node.status
    presumed = None
    notes = list(report.notes) if report.gpus is not None else []
    if report.state in (node_reports.NodeState.PENDING, node_reports.NodeState.REBOOTING):
        notes.append("the node is changing right now: plan again when it has finished")
    why_not = ""
    # An agent that ran, and shows no GPUs, can observe none: they may be partitioned.
    if report.gpus is None and last_run is None and not report.node.gpu_problem:
        gpus, why_not = presumed_gpus.of(report)
        # Which instances and pods a layout costs there is unknown.
        presumed = None if presumed_gpus.is_partitioned(report) else gpus or None
        notes += [why_not] if presumed else []
    result = preview.of_layout(
        report.node,
        document,
        layout_name,
        pods.of(report.node.name),
        presumed=presumed,
        layout=layout,
    )
    if why_not and presumed is None:
        result = dataclasses.replace(result, message=why_not)
    if result.planned:
        used = (
            [last_run.content_hash]
            if last_run and last_run.layout == layout_name and last_run.content_hash
            else []
        )
        entries = report.node.listed.layouts
        listed = [each.content_hash for each in entries if each.name == layout_name]
        if layout is None and {*(listed or used)} - {result.content_hash}:
            verb = "has" if listed else "last used"
            notes.append(f"its agent {verb} another layout named {layout_name}")
        notes += map(str, result.planned.lenient_warnings)
    return dataclasses.replace(result, notes=(*notes, *result.notes))


def pictures(plans: cluster_plan.ClusterPlan, *, style: styles.Style) -> str:
    """Draw the change of every node."""
    blocks = []
    for node in plans.nodes:
        title = style.fit(f"{node.name}: {plans.layout} of {plans.source}")
        lines = [style.paint(title, styles.Tone.STRONG)]
        lines += style.notes(node.notes)
        if node.planned is None:
            lines.append(style.wrap(f"{node.fit.words}: {node.message}", indent="  "))
        else:
            evicts = bool(node.evicted or node.maybe_evicted)
            picture = gpu_text.plan(
                node.planned,
                is_wide=False,
                style=style,
                agent_evicts=node.may_evict and (node.losses is None or evicts),
                strategy=node.strategy,
            )
            lines += ["", picture]
            if node.losses is None:
                lines.append(plan_table.unknown_pods(plans, style))
            losses = [loss_text(loss, may_evict=node.may_evict) for loss in node.losses or ()]
            lines += map(style.wrap, losses)
            if node.is_changed and node.losses is not None:
                policy = " under the default drain policy" if node.may_evict else ""
                lines.append(f"Pods: {plan_table.evictions([node])}{policy}.")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def loss_text(loss: resources.Loss, *, may_evict: bool = True) -> str:
    """Describe how the loss of devices of a kind affects the pods that request them."""
    kind = loss.kind
    pods = node_status.named_pods(loss.kind.pods)
    what = f"{loss.destroyed} of {kind.count} {node_status.kind_name(kind.resource)} destroyed"
    if loss.is_total and may_evict:
        return f"{what}, which evicts {pods}"
    if loss.least:
        users = pods if len(kind.pods) == 1 else f"some of {pods}"
        return f"{what}, at least {loss.least} of them in use by {users}"
    return f"{what}; if possible, the agent keeps those in use by {pods}"
