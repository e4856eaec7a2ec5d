"""Our Node object: what the agent reads of it, and a write to it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from mig_manager import errors, reasons
from mig_manager.core.objects import api_values, well_known


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """A Node object."""

    name: str
    uid: str = ""
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    annotations: Mapping[str, str] = dataclasses.field(default_factory=dict)
    is_unschedulable: bool = False
    taint_keys: frozenset[str] = frozenset()
    closing_taints: frozenset[str] = frozenset()
    """Keys of the taints with the effect NoSchedule or NoExecute."""
    allocatable: Mapping[str, int]
    """Healthy ``nvidia.com/*`` extended resources; a shared device counts once per replica."""
    capacity: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """All such resources, also unhealthy devices, which are not allocatable; empty: unknown."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodePatch:
    """One write to our node; None as a value removes the key, absent keys stay as they are."""

    labels: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    annotations: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    reconfiguring_taint: bool | None = None
    """True adds, False removes ``well_known.RECONFIGURING_TAINT``; None leaves it as it is."""
    removed_taints: frozenset[str] = frozenset()  # keys of taints to remove, other programs' too

    def merge(self, other: "NodePatch") -> "NodePatch":
        """Return both patches as one write; where they differ, ``other`` counts."""
        return NodePatch(
            labels={**self.labels, **other.labels},
            annotations={**self.annotations, **other.annotations},
            reconfiguring_taint=self.reconfiguring_taint
            if other.reconfiguring_taint is None
            else other.reconfiguring_taint,
            removed_taints=self.removed_taints | other.removed_taints,
        )

    def is_in(self, view: NodeView) -> bool:
        """Return whether the patch would change nothing."""
        return (
            not self.differing_keys(view)
            and self.reconfiguring_taint
            in (None, well_known.RECONFIGURING_TAINT in view.taint_keys)
            and not self.removed_taints & view.taint_keys
        )

    def differing_keys(self, view: NodeView) -> list[str]:
        """Return the keys of labels and annotations that a node has otherwise."""
        return [
            key
            for values, current in (
                (self.labels, view.labels),
                (self.annotations, view.annotations),
            )
            for key, value in values.items()
            if current.get(key) != value
        ]


def require_kept(patch: NodePatch, node: Mapping[str, Any]) -> None:
    """Require that a Node object has the labels and annotations of a patch that the API accepted.

    Raises:
        ClusterError: It is malformed, or lacks some: an admission webhook can change them.
    """
    view = parse_node(node)
    if keys := patch.differing_keys(view):
        raise errors.ClusterError(
            f"the API accepted a layout for node {view.name} but did not keep {', '.join(keys)}: "
            "does an admission webhook change it?",
            reason=reasons.Reason.API_ERROR,
        )


def parse_node(node: Mapping[str, Any]) -> NodeView:
    """Parse a Node object; ClusterError if it is malformed."""
    with api_values.as_cluster_error("the node"):
        metadata = node["metadata"]
        spec = node.get("spec") or {}
        status = node.get("status") or {}
        return NodeView(
            name=str(metadata["name"]),
            uid=str(metadata.get("uid") or ""),
            labels=api_values.strings(metadata.get("labels")),
            annotations=api_values.strings(metadata.get("annotations")),
            is_unschedulable=bool(spec.get("unschedulable")),
            taint_keys=frozenset(str(taint["key"]) for taint in spec.get("taints") or ()),
            closing_taints=frozenset(
                str(taint["key"])
                for taint in spec.get("taints") or ()
                if taint.get("effect") != "PreferNoSchedule"
            ),
            allocatable=api_values.gpu_resources(status.get("allocatable")),
            capacity=api_values.gpu_resources(status.get("capacity")),
        )
