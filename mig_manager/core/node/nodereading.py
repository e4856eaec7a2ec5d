"""What a Node object says, free of the library that brought it."""

from collections.abc import Mapping
from typing import Any

from mig_manager.core.node import cluster, json_fields


def view(node: Mapping[str, Any]) -> cluster.NodeView:
    """Return what we want to know of a Node object.

    Raises:
        ClusterError: It is not a Node object.
    """
    with json_fields.understood("the node"):
        metadata = node["metadata"]
        spec = node.get("spec") or {}
        status = node.get("status") or {}
        return cluster.NodeView(
            name=str(metadata["name"]),
            uid=str(metadata.get("uid") or ""),
            labels=json_fields.strings(metadata.get("labels")),
            annotations=json_fields.strings(metadata.get("annotations")),
            is_unschedulable=bool(spec.get("unschedulable")),
            taint_keys=frozenset(str(taint["key"]) for taint in spec.get("taints") or ()),
            allocatable=json_fields.gpu_resources(status.get("allocatable")),
            capacity=json_fields.gpu_resources(status.get("capacity")),
        )
