"""The table of a layout's changes on the nodes of a cluster."""

import collections
from collections.abc import Iterable, Mapping, Sequence

from mig_manager.cli.toolkit import gpu_text
from mig_manager.core import messages
from mig_manager.core.display import styles, tables
from mig_manager.core.fleet import cluster_plan

_NODE, _COSTS = ("NODE",), ("FIT", "CHANGE", "EVICTED")
_TONES: Mapping[cluster_plan.NodeFit, styles.Tone] = {
    cluster_plan.NodeFit.UNCHANGED: styles.Tone.GOOD,
    cluster_plan.NodeFit.FITS: styles.Tone.PLAIN,
    cluster_plan.NodeFit.DOES_NOT_FIT: styles.Tone.BAD,
    cluster_plan.NodeFit.UNKNOWN: styles.Tone.WARN,
}


def table(plan: cluster_plan.ClusterPlan, *, style: styles.Style) -> str:
    """Return a line for every node, notes, and a summary."""
    rows, notes = [], []
    for node in plan.nodes:
        change = "-"
        if node.planned is not None:
            change = gpu_text.summary(node.planned) if node.is_changed else "nothing"
        # The summary has the layout of all nodes; an undo has one for every node.
        layout = () if plan.layout else (node.layout or "-",)
        fit = node.fit.value, _TONES[node.fit]
        rows.append((node.name, *layout, fit, change, _evictions(node)))
        if remarks := messages.join(node.message, *node.notes):
            notes.append(style.wrap(f"{node.name}: {remarks}"))
    notes += [unknown_pods(plan, style)] if plan.pods_not_known else []
    head = (*_NODE, *(() if plan.layout else ("LAYOUT",)), *_COSTS)
    total = f"{plan.title}: {_totals(plan.nodes)}."
    total += "" if plan.pods_not_known else f" Pods: {evictions(plan.nodes)}."
    return "\n".join([*tables.columns(head, rows, style=style), "", *notes, style.wrap(total)])


def evictions(previews: Iterable[cluster_plan.NodePlan]) -> str:
    """Count the pods that are evicted, for a sentence."""
    counts = [(len(each.evicted), len(each.maybe_evicted)) for each in previews]
    evicted, perhaps = (sum(column) for column in zip((0, 0), *counts, strict=True))
    parts = [f"{evicted} evicted"] if evicted else []
    parts += [f"up to {perhaps} may be evicted"] if perhaps else []
    return ", ".join(parts) or "none evicted"


def unknown_pods(plan: cluster_plan.ClusterPlan, style: styles.Style) -> str:
    """Say why the affected pods are unknown."""
    return style.wrap(f"The affected pods are unknown: {plan.pods_not_known}")


def _evictions(node: cluster_plan.NodePlan) -> str:
    if node.planned and node.losses is None:
        return "?"
    parts = [_names(node.evicted)] if node.evicted else []
    parts += [f"possibly {_names(node.maybe_evicted)}"] if node.maybe_evicted else []
    return "; ".join(parts) or ("none" if node.planned else "-")


def _names(pods: Sequence[str]) -> str:
    return messages.list_names(pods, limit=messages.MAX_AT_A_TERMINAL)


def _totals(previews: Iterable[cluster_plan.NodePlan]) -> str:
    """Count the nodes by their fit, for a sentence."""
    counts = collections.Counter(each.fit for each in previews)
    fits = [each for each in cluster_plan.NodeFit if counts[each]]
    return ", ".join(f"{counts[each]} {each.words}" for each in fits)
