"""``kubectl mig plan``: show the changes of a layout, even on nodes without an agent."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

from mig_manager.adapters import cluster_reader
from mig_manager.cli.toolkit import console, gpu_report
from mig_manager.core import messages
from mig_manager.core.display import bar, tables
from mig_manager.core.fleet import listed_layouts, node_reports, preview
from mig_manager.core.layout import custom_layouts, layouts
from mig_manager.core.node import resources, well_known
from mig_manager.core.settings import node_settings, options
from mig_manager.kubectl import cluster, plugin_settings, presumed_gpus, status

if TYPE_CHECKING:
    from mig_manager.core import answers

_HEAD = ("NODE", "VERDICT", "CHANGE", "PODS")
_NOT_KNOWN = ("kind", "destroyed_uuids", "evicted_pods")
"""UUIDs are not published, and ``losses`` has the evicted pods."""
_NO_EVICTION = (
    "an on-demand layout evicts no pod: it fails at once if a pod uses what it would destroy"
)


class Settings(
    plugin_settings.NodesSettings,
    takes=f"layout node selector filename config-map output {plugin_settings.COMMON}",
):
    """Settings of ``plan``."""

    layout: str = options.declare(plugin_settings.LAYOUT)
    output_format: node_settings.OutputFormat = plugin_settings.drawn_output()


def run(settings: Settings, terminal: console.Console) -> int:
    """Show what a layout would change on nodes; 1 if a node cannot have it."""
    command = cluster.ClusterCommand(settings, terminal)
    with command.layout_first("plan", settings.layout, settings.nodes):
        search = command.nodes(settings.nodes)
    is_listed = listed_layouts.is_listed((each.node for each in search.reports), settings.layout)
    document = command.document(listed_layouts.NO_FILE if is_listed else None)
    pods = command.reader.pods(search.names)
    with console.forgotten_option([settings.layout]):
        result = plan(settings.layout, search.reports, document=document, pods=pods)
    draw = pictures if command.is_drawn(search) else table
    return command.answer(
        result.to_data,
        lambda: draw(result, style=command.style),
        is_good=result.is_good and not search.missing,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodePlan:
    """The changes of a layout on one node."""

    preview: preview.Preview
    notes: tuple[str, ...]
    may_evict: bool
    """Whether the agent would evict pods for it."""

    @property
    def why_not(self) -> str:
        """Why the plan is missing; empty if it exists."""
        return "" if self.preview.planned else self.preview.message

    @property
    def is_changed(self) -> bool:
        """Whether the plan has steps."""
        planned = self.preview.planned
        return planned is not None and not planned.is_applied

    def to_data(self) -> "answers.NodePlan":
        """Return plain data for JSON and YAML."""
        planned, losses = self.preview.planned, self.preview.losses
        data: Mapping[str, object] = planned.to_data() if planned else {}
        published = {key: value for key, value in data.items() if key not in _NOT_KNOWN}
        return {
            "node": self.preview.name,
            "fits": self.preview.feasibility.fits,
            "why_not": self.why_not or None,
            "notes": list(self.notes),
            "losses": None
            if losses is None
            else [
                {
                    "resource": loss.kind.resource,
                    "devices": loss.kind.count,
                    "ending": loss.ending,
                    "in_use_ending_at_least": loss.least,
                    "pods": dict(loss.kind.pods),
                }
                for loss in losses
            ],
            "plan": cast("answers.PublishedPlan", status.without_ids(published)) or None,
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plans:
    """The changes of a layout on nodes."""

    layout: str
    source: str
    nodes: tuple[NodePlan, ...]
    pods_not_known: str

    @property
    def is_good(self) -> bool:
        """Whether every node can have the layout."""
        return all(node.preview.feasibility.fits for node in self.nodes)

    def to_data(self) -> "answers.ClusterPlan":
        """Return plain data for JSON and YAML."""
        return {
            "kind": "ClusterPlan",
            "layout": self.layout,
            "is_good": self.is_good,
            "pods_not_known": self.pods_not_known or None,
            "nodes": [node.to_data() for node in self.nodes],
        }


def plan(
    name: str,
    reports: Sequence[node_reports.NodeReport],
    *,
    document: layouts.Document,
    pods: cluster_reader.Pods,
    layout: layouts.Layout | None = None,
) -> Plans:
    """Plan a layout for nodes: ``layout`` itself, or one of the document or the node.

    LayoutError (UNKNOWN_CONFIG) if the layout is unknown.
    """
    if layout is None:
        listed_layouts.require_layout([report.node for report in reports], document, name)
    is_custom = name == well_known.CUSTOM_LAYOUT and any(
        each.node.takes_custom for each in reports
    )
    return Plans(
        layout=messages.printable(name),
        source="the node's annotation" if is_custom and layout is None else document.source,
        nodes=tuple(_of_node(name, report, document, pods, layout) for report in reports),
        pods_not_known=pods.why_not,
    )


def _of_node(
    layout_name: str,
    report: node_reports.NodeReport,
    document: layouts.Document,
    pods: cluster_reader.Pods,
    layout: layouts.Layout | None,
) -> NodePlan:
    run, presumed = report.node.status, None
    notes = list(report.notes) if report.gpus is not None else []
    if report.state in (node_reports.NodeState.PENDING, node_reports.NodeState.REBOOTING):
        notes.append("the node is changing right now: plan again when it has finished")
    is_custom = layout is not None or (
        layout_name == well_known.CUSTOM_LAYOUT and report.node.takes_custom
    )
    custom = custom_layouts.Custom.of(report.node.view) if is_custom else None
    may_evict = custom_layouts.request_for(layout_name, custom).may_evict
    notes += [] if may_evict else [_NO_EVICTION]
    why_not = ""
    if report.gpus is None:
        gpus, why_not = presumed_gpus.of(report)
        presumed = gpus or None
        notes += [why_not] if presumed else []
    result = preview.preview(
        report.node,
        document,
        layout_name,
        pods.of(report.node.name),
        presumed=presumed,
        layout=layout,
    )
    if report.gpus is None and presumed is None:
        result = dataclasses.replace(result, message=why_not)
    if result.planned:
        used = [run.config_hash] if run and run.config == layout_name and run.config_hash else []
        listed = [each.content_hash for each in report.node.layouts if each.name == layout_name]
        if layout is None and {*(listed or used)} - {result.content_hash}:
            verb = "has" if listed else "last used"
            notes.append(f"its agent {verb} another layout named {layout_name}")
        notes += [messages.printable(str(remark), " ") for remark in result.planned.overlooked]
    return NodePlan(preview=result, notes=tuple(notes), may_evict=may_evict)


def pictures(plans: Plans, *, style: bar.Style) -> str:
    """Draw the change of every node."""
    blocks = []
    for node in plans.nodes:
        result = node.preview
        title = style.fit(f"{result.name}: {plans.layout} of {plans.source}")
        lines = [style.paint(title, bar.Tone.STRONG)]
        lines += [style.wrap(note, indent="  ! ") for note in node.notes]
        if result.planned is None:
            verdict = result.feasibility.value.replace("-", " ")
            lines.append(style.wrap(f"{verdict}: {node.why_not}", indent="  "))
        else:
            evicts = node.may_evict and (
                result.losses is None or bool(result.evicted or result.maybe_evicted)
            )
            picture = gpu_report.plan(
                result.planned, is_wide=False, style=style, agent_evicts=evicts
            )
            lines += ["", picture]
            if result.losses is None:
                lines.append(_unknown_pods(plans, style))
            losses = [loss_text(loss, may_evict=node.may_evict) for loss in result.losses or ()]
            lines += map(style.wrap, losses)
            if node.is_changed and result.losses is not None:
                policy = " under the default drain policy" if node.may_evict else ""
                lines.append(f"Pods: {_evictions([node])}{policy}.")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _unknown_pods(plans: Plans, style: bar.Style) -> str:
    return style.wrap(f"The affected pods are unknown: {plans.pods_not_known}")


def loss_text(loss: resources.Loss, *, may_evict: bool = True) -> str:
    """Describe how the loss of devices of a kind affects the pods that request them."""
    kind, pods = loss.kind, status.named_pods(loss.kind.pods)
    what = f"{loss.ending} of {kind.count} {status.kind_name(kind.resource)} destroyed"
    if loss.is_total and may_evict:
        return f"{what}, which evicts {pods}"
    if loss.least:
        users = pods if len(kind.pods) == 1 else f"some of {pods}"
        return f"{what}, at least {loss.least} of them in use by {users}"
    return f"{what}; if possible, the agent keeps those in use by {pods}"


def table(plans: Plans, *, style: bar.Style) -> str:
    """Return a line for every node, notes, and a summary."""
    rows, notes = [], []
    for node in plans.nodes:
        result, change, pods = node.preview, "-", "-"
        if result.planned is not None:
            change = gpu_report.summary(result.planned) if node.is_changed else "nothing"
            pods = "?" if result.losses is None else _evictions([node])
        verdict = result.feasibility.value, preview.TONES[result.feasibility]
        rows.append((result.name, verdict, change, pods))
        if remarks := messages.join(node.why_not, *node.notes):
            notes.append(style.wrap(f"{result.name}: {remarks}"))
    notes += [_unknown_pods(plans, style)] if plans.pods_not_known else []
    lines = tables.columns(_HEAD, rows, style=style)
    totals = preview.totals(node.preview for node in plans.nodes)
    total = f"Layout {plans.layout} of {plans.source}: {totals}."
    total += "" if plans.pods_not_known else f" Pods: {_evictions(plans.nodes)}."
    return "\n".join([*lines, "", *notes, style.wrap(total)])


def _evictions(nodes: Iterable[NodePlan]) -> str:
    return preview.evictions(node.preview for node in nodes if node.may_evict)
