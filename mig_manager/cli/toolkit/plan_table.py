"""The table of a layout's changes on the nodes of a cluster."""

from collections.abc import Sequence

from mig_manager.cli.toolkit import gpu_text
from mig_manager.core import messages
from mig_manager.core.display import bar, tables
from mig_manager.core.fleet import preview

_NODE, _COSTS = ("NODE",), ("FIT", "CHANGE", "EVICTED")


def table(plan: preview.ClusterPlan, *, style: bar.Style) -> str:
    """Return a line for every node, notes, and a summary."""
    rows, notes = [], []
    for node in plan.nodes:
        change = "-"
        if node.planned is not None:
            change = gpu_text.summary(node.planned) if node.is_changed else "nothing"
        # The summary has the layout of all nodes; an undo has one for every node.
        layout = () if plan.layout else (node.layout or "-",)
        fit = node.fit.value, preview.TONES[node.fit]
        rows.append((node.name, *layout, fit, change, _evictions(node)))
        if remarks := messages.join(node.message, *node.notes):
            notes.append(style.wrap(f"{node.name}: {remarks}"))
    notes += [unknown_pods(plan, style)] if plan.pods_not_known else []
    head = (*_NODE, *(() if plan.layout else ("LAYOUT",)), *_COSTS)
    total = f"{plan.title}: {preview.totals(plan.nodes)}."
    total += "" if plan.pods_not_known else f" Pods: {preview.evictions(plan.nodes)}."
    return "\n".join([*tables.columns(head, rows, style=style), "", *notes, style.wrap(total)])


def unknown_pods(plan: preview.ClusterPlan, style: bar.Style) -> str:
    """Say why the affected pods are unknown."""
    return style.wrap(f"The affected pods are unknown: {plan.pods_not_known}")


def _evictions(node: preview.NodePlan) -> str:
    if node.planned and node.losses is None:
        return "?"
    parts = [_names(node.evicted)] if node.evicted else []
    parts += [f"possibly {_names(node.maybe_evicted)}"] if node.maybe_evicted else []
    return "; ".join(parts) or ("none" if node.planned else "-")


def _names(pods: Sequence[str]) -> str:
    return messages.list_names(pods, limit=messages.MAX_AT_A_TERMINAL)
