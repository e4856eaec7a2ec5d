"""Objects of the Kubernetes API as tests need them: small, and otherwise as a cluster has them."""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from mig_manager.core import model
from mig_manager.core.node.devices import device_classes
from mig_manager.core.objects import well_known
from mig_manager.core.records import capacity, inventory_codec, run_status
from tests.rigs import contract

Object = dict[str, Any]

RECONFIGURING_TAINT: Object = {"key": well_known.RECONFIGURING_TAINT, "effect": "NoSchedule"}


def a_node(
    name: str = "n1",
    labels: Mapping[str, str] | None = None,
    *,
    gpus: Sequence[model.Gpu] | None = None,
    annotations: Mapping[str, str] | None = None,
    allocatable: Mapping[str, str] | None = None,
    ready: str = "True",
) -> Object:
    """Return a Node; ``gpus`` are those that its agent publishes."""
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "labels": {"kubernetes.io/hostname": name, **(labels or {})},
            "annotations": annotations_of_agent(gpus) | dict(annotations or {}),
        },
        "status": {
            "conditions": [{"type": "Ready", "status": ready}],
            **({} if allocatable is None else {"allocatable": dict(allocatable)}),
        },
    }


def annotations_of_agent(
    gpus: Sequence[model.Gpu] | None = None,
    *,
    status_text: str | None = None,
    in_use: Mapping[str, Collection[model.Placement]] | None = None,
    at: str = "2026-01-02T03:04:05Z",
) -> dict[str, str]:
    """Return the annotations of an agent; ``in_use`` is what it saw of the GPUs ``at`` a time."""
    annotations = {}
    if gpus is not None:
        annotations[well_known.GPUS_ANNOTATION] = inventory_codec.to_json(gpus)
    if in_use is not None:
        text = capacity.to_json(gpus or (), in_use, at=at)
        annotations[well_known.CAPACITY_ANNOTATION] = text
    if status_text is not None:
        annotations[well_known.STATUS_ANNOTATION] = status_text
    for key, value in annotations.items():
        contract.check_annotation(key, value)
    return annotations


def a_status(
    config: str = "custom", state: run_status.State = run_status.State.SUCCESS, **members: object
) -> str:
    """Return the text of an agent's status; ``members`` are further ones, None for absent."""
    is_done = state in (run_status.State.SUCCESS, run_status.State.FAILED)
    data = {
        "version": run_status.STATUS_VERSION,
        "config": config,
        "state": state.value,
        "phase": (run_status.Phase.DONE if is_done else run_status.Phase.DRAIN).value,
        "attempt": 1,
        **members,
    }
    text = json.dumps({key: value for key, value in data.items() if value is not None})
    contract.check_annotation(well_known.STATUS_ANNOTATION, text)
    return text


def a_container(
    name: str = "main", limits: Mapping[str, object] | None = None, **fields: object
) -> Object:
    """Return a container; what it is limited to, it requests."""
    amounts = {resource: str(amount) for resource, amount in (limits or {}).items()}
    resources = {"resources": {"limits": amounts, "requests": amounts}} if amounts else {}
    return {"name": name, "image": "app:1", **resources, **fields}


def a_pod(  # noqa: PLR0913 - each is named where it is called
    name: str = "p1",
    labels: Mapping[str, str] | None = None,
    *,
    node: str = "n1",
    namespace: str = "default",
    phase: str = "",
    limits: Mapping[str, object] | None = None,
    spec: Mapping[str, object] | None = None,
) -> Object:
    """Return a pod that runs on a node, or that the scheduler has found none for."""
    placed = {"nodeName": node} if node else {}
    running = {
        "startTime": "2026-01-02T03:04:05Z",
        "conditions": [{"type": "Ready", "status": "True"}],
        "containerStatuses": [{"name": "main", "ready": True, "restartCount": 2}],
    }
    unschedulable = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    status = running if node else {"conditions": [unschedulable]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": f"uid-{name}",
            "labels": dict(labels or {}),
        },
        "spec": {"containers": [a_container(limits=limits)], **placed, **(spec or {})},
        "status": {"phase": phase or ("Running" if node else "Pending"), **status},
    }


def a_lease(name: str, **spec: object) -> Object:
    metadata = {"name": name, "namespace": "mig-manager"}
    head = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata}
    return head | {"spec": spec}


def a_budget(
    name: str, selector: Object | None, *, namespace: str = "default", **spec: object
) -> Object:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"selector": selector, **spec},
    }


def an_event(node: str, reason: str, message: str, *, at: str, **members: object) -> Object:
    """Return an Event as the agent publishes it."""
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{node}.{reason}.{at}".lower().replace(":", "-")},
        "involvedObject": {"apiVersion": "v1", "kind": "Node", "name": node, "uid": node},
        "reason": reason,
        "message": message,
        "type": "Normal",
        "source": {"component": "mig-manager", "host": node},
        "reportingComponent": "mig-manager",
        "count": 1,
        "firstTimestamp": at,
        "lastTimestamp": at,
        **members,
    }


def a_device(name: str, *, version: str = "v1", **attributes: str) -> Object:
    """Return a device of a ResourceSlice in a version of the API."""
    members = {"attributes": {key: {"string": value} for key, value in attributes.items()}}
    return {"name": name, "basic": members} if version == "v1beta1" else {"name": name, **members}


def a_resource_slice(
    *devices: Object,
    node: str = "n1",
    driver: str = well_known.GPU_CLAIM_DRIVER,
    suffix: str = "x",
    generation: int = 1,
) -> Object:
    """Return the one ResourceSlice of a node's pool, as a driver publishes it."""
    pool = {"name": node, "generation": generation, "resourceSliceCount": 1}
    return {
        "apiVersion": device_classes.VERSION,
        "kind": "ResourceSlice",
        "metadata": {"name": f"{node}-{driver}-{suffix}"},
        "spec": {"driver": driver, "nodeName": node, "pool": pool, "devices": list(devices)},
    }


def a_claim(*results: Object, name: str = "c1") -> Object:
    """Return a ResourceClaim with an allocation, or without results one that has none."""
    allocation = {"allocation": {"devices": {"results": list(results)}}}
    return {
        "apiVersion": device_classes.VERSION,
        "kind": "ResourceClaim",
        "metadata": {"name": name, "namespace": "default"},
        "status": allocation if results else {},
    }


def a_config_map(text: str, place: str = "mig-manager/mig-manager-config") -> Object:
    """Return a ConfigMap with a layout file."""
    namespace, _, name = place.partition("/")
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"namespace": namespace, "name": name},
        "data": {"config.yaml": text},
    }
