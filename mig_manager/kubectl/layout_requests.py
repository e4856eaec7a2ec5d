"""Requests of layouts on Nodes.

One patch writes label and annotation. It applies only to the version of the Node that was planned
for, or to a version whose differences do not affect the plan.
"""

import dataclasses
import datetime as dt
from typing import TYPE_CHECKING

from mig_manager import errors, reasons
from mig_manager.core.files import yaml_text
from mig_manager.core.fleet import cluster_plan, fleet_nodes, node_reports
from mig_manager.core.layout import custom_layouts, layout_documents, layouts
from mig_manager.core.objects import node_object, well_known
from mig_manager.kubectl import cluster_command, node_plans

if TYPE_CHECKING:
    from mig_manager.core.answers import fleet_answers

_ATTEMPTS = 5  # kubelet writes to the Node too, every few seconds at its start


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestedPlan:
    """The changes of a layout on a node, and whether it was requested."""

    plans: cluster_plan.ClusterPlan
    is_requested: bool
    outcome: str  # a sentence

    @property
    def is_good(self) -> bool:
        """Whether the node can have the layout."""
        return self.plans.is_good or self.is_requested

    def to_data(self) -> "fleet_answers.ClusterPlan":
        """Return plain data for JSON and YAML."""
        return {**self.plans.to_data(), "is_requested": self.is_requested}


def apply(
    command: cluster_command.ClusterCommand,
    report: node_reports.NodeReport,
    requested: layouts.Layout | str,
    document: layout_documents.Document,
    *,
    is_dry_run: bool,
) -> RequestedPlan:
    """Plan a layout for a node's published GPUs, and request it if it fits.

    ``requested`` is a custom layout, or the name of one that the node lists; its content is in the
    document, unless it is generated.

    Raises:
        ClusterError: The API refused, or the node has changed since planning.
        ConfigError: The layout is too long for an annotation.
        LayoutError: The node lists no such layout (UNKNOWN_CONFIG).
        UsageError: No agent shows the GPUs.
    """
    node = report.node
    if report.gpus is None and not is_dry_run:
        _, why = fleet_nodes.published_gpus(node)
        raise errors.UsageError(
            f"nothing is requested for node {node.name}: {why}",
            remedy="List the node's pods, and read the agent's log: "
            f"'kubectl get pods -A --field-selector spec.nodeName={node.name}'.",
        )
    name, text, plans = _plan(command, report, requested, document)
    if plans.nodes[0].fit.fits is False:
        outcome = f"Layout {name} does not fit {node.name}. Nothing was requested."
    elif is_dry_run:
        outcome = "Nothing was requested (--dry-run)."
    elif text is None and node.requested == name:
        outcome = (
            f"The node requests layout {name} already. To have it applied again, first remove the "
            f"label: kubectl label node {node.name} {well_known.CONFIG_LABEL}-"
        )
    else:
        _request(command, report, name, text)
        outcome = (
            f"Requested {name} for {node.name}; "
            f"'kubectl mig status {node.name}' shows the outcome."
        )
        return RequestedPlan(plans=plans, is_requested=True, outcome=outcome)
    return RequestedPlan(plans=plans, is_requested=False, outcome=outcome)


def _plan(
    command: cluster_command.ClusterCommand,
    report: node_reports.NodeReport,
    requested: layouts.Layout | str,
    document: layout_documents.Document,
) -> tuple[str, str | None, cluster_plan.ClusterPlan]:
    """Return the label's value, the annotation of a custom layout, and the plan."""
    node = report.node
    if isinstance(requested, str):
        name = requested
        custom = text = None
        planned = report
    else:
        name = well_known.CUSTOM_LAYOUT
        custom = requested
        text = annotation(requested, command.now)
        custom_layouts.single(text, source=custom.location.source)
        document = layout_documents.Document(source=custom.origin, layouts={})
        annotations = {**node.view.annotations, well_known.LAYOUT_ANNOTATION: text}
        view = dataclasses.replace(node.view, annotations=annotations)
        planned = dataclasses.replace(report, node=dataclasses.replace(node, view=view))
    plans = node_plans.plan(
        name,
        [planned],
        document=document,
        pods=command.reader.pods([node.name]),
        layout=custom,
    )
    notes = (*plans.nodes[0].notes, *(_notes(node) if custom else ()))
    changed = dataclasses.replace(plans.nodes[0], notes=notes)
    return name, text, dataclasses.replace(plans, nodes=(changed,))


def annotation(layout: layouts.Layout, now: dt.datetime) -> str:
    """Return a document with only this layout; the time makes every request distinct.

    The layout keeps its name, which may say that it never evicts.
    """
    document = layout_documents.render([layout])
    return f"# kubectl mig apply, {now.isoformat()}\n{yaml_text.dump(document)}"


def _notes(node: fleet_nodes.FleetNode) -> list[str]:
    notes = []
    if node.listed.takes_custom is False:
        notes.append(
            "its agent takes no custom layouts and the request would fail; enable them with "
            "--custom-layouts"
        )
    if custom_layouts.CustomRequest.of(node.view).is_on_demand:
        notes.append("it is partitioned on demand: the partitioner may replace this layout")
    return notes


def _request(
    command: cluster_command.ClusterCommand,
    report: node_reports.NodeReport,
    name: str,
    custom: str | None,
) -> None:
    node = report.node
    patch = node_object.NodePatch(
        labels={well_known.CONFIG_LABEL: name},
        annotations={} if custom is None else {well_known.LAYOUT_ANNOTATION: custom},
    )
    for _ in range(_ATTEMPTS):
        try:
            command.kubectl.patch_node(node.name, node.version, patch)
        except errors.ClusterError as error:
            if not error.is_conflict:
                raise
        else:
            return
        node = command.node(node.name).node
        if _basis(node) != _basis(report.node):
            why = "has changed since it was planned"
            break
    else:
        why = f"was changed by other programs during each of {_ATTEMPTS} attempts"
    raise errors.ClusterError(
        f"node {node.name} {why}; nothing was requested", reason=reasons.Reason.API_ERROR
    )


def _basis(node: fleet_nodes.FleetNode) -> tuple[object, ...]:
    """Return the parts of a node that determine a plan and its notes."""
    custom = custom_layouts.CustomRequest.of(node.view)
    return node.view.uid, node.requested, node.gpus_text, node.listed.layouts, custom
