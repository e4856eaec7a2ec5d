"""Which nodes a command is about, and how each of them stands."""

import dataclasses
import datetime as dt
import http
from collections.abc import Mapping, Sequence

from mig_manager import errors
from mig_manager.core.fleet import standing
from mig_manager.core.node import cluster
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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The nodes that a command is about."""

    reports: tuple[standing.Report, ...]
    """How each stands; by name, never empty."""
    missing: tuple[str, ...]
    """What was said of nodes that are not there."""

    @property
    def names(self) -> tuple[str, ...]:
        """The nodes that are there."""
        return tuple(report.node.view.name for report in self.reports)


def find(seen: asking.Cluster, selection: Selection, *, now: dt.datetime) -> Found:
    """Look how the selected nodes stand.

    Raises:
        ClusterError: None of the nodes named is there, or the API refused or does not answer.
        UsageError: Nodes are given by name and by selector, or nothing is selected.
    """
    if selection.names and selection.selector:
        raise errors.UsageError("name nodes or select them with -l, not both")
    missing: list[str] = []
    if selection.names:
        nodes = _named(seen, selection.names, missing)
    else:
        found = seen.selected(selection.selector)
        # Who selects by hand gets what was selected.
        nodes = [node for node in found if selection.selector or node.is_about_gpus]
    if not nodes:
        what = f"selector {selection.selector!r}" if selection.selector else "NVIDIA GPUs"
        raise errors.UsageError(f"the cluster has no node with {what}")
    ordered = sorted(nodes, key=lambda node: node.view.name)
    return Found(
        reports=tuple(standing.judge(node, now) for node in ordered), missing=tuple(missing)
    )


def _named(seen: asking.Cluster, names: Sequence[str], missing: list[str]) -> list[standing.Node]:
    nodes: list[standing.Node] = []
    for name in dict.fromkeys(names):
        try:
            nodes.append(seen.node(name))
        except errors.ClusterError as error:
            if error.status != http.HTTPStatus.NOT_FOUND or len(names) == 1:
                raise
            missing.append(error.message)
    if not nodes:
        raise errors.ClusterError("; ".join(missing), reason=errors.Reason.API_ERROR)
    return nodes


def pods(seen: asking.Cluster, names: Sequence[str]) -> Pods:
    """Return the pods of nodes; without the right to list them, why they are not known."""
    try:
        return Pods(by_node=seen.pods(names))
    except errors.ClusterError as error:
        return Pods(by_node=None, why_not=error.message)
