"""Which nodes a command is about, and how each of them stands."""

import dataclasses
import datetime as dt
from collections.abc import Mapping

from mig_manager import errors
from mig_manager.core import cluster, standing
from mig_manager.kubectl import asking


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What was asked for on the command line."""

    names: tuple[str, ...]
    """Empty: see ``selector``."""
    selector: str | None
    """None: all nodes with GPUs."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pods:
    """The pods of nodes, or why they are not known."""

    by_node: Mapping[str, tuple[cluster.Pod, ...]] | None
    why_not: str = ""

    def of(self, name: str) -> tuple[cluster.Pod, ...] | None:
        """Return the pods of a node that ask for GPUs; None when they are not known."""
        return None if self.by_node is None else self.by_node.get(name, ())


def reports(
    seen: asking.Cluster, selection: Selection, *, now: dt.datetime
) -> tuple[standing.Report, ...]:
    """Return how the selected nodes stand, by name.

    Raises:
        ClusterError: A node is not there, or the API refused or does not answer.
        UsageError: Nodes are given by name and by selector, or nothing is selected.
    """
    if selection.names and selection.selector:
        raise errors.UsageError("name nodes or select them with -l, not both")
    if selection.names:
        nodes = list(seen.named(selection.names))
    else:
        found = seen.selected(selection.selector)
        # Who selects by hand gets what was selected.
        nodes = [node for node in found if selection.selector or node.is_about_gpus]
    if not nodes:
        what = f"selector {selection.selector!r}" if selection.selector else "NVIDIA GPUs"
        raise errors.UsageError(f"the cluster has no node with {what}")
    ordered = sorted(nodes, key=lambda node: node.view.name)
    return tuple(standing.judge(node, now) for node in ordered)


def pods(seen: asking.Cluster, names: list[str]) -> Pods:
    """Return the pods of nodes; without the right to list them, why they are not known."""
    try:
        return Pods(by_node=seen.pods(names))
    except errors.ClusterError as error:
        return Pods(by_node=None, why_not=error.message)
