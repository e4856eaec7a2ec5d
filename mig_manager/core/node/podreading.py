"""What a Pod object says, free of the library that brought it."""

from collections.abc import Mapping
from typing import Any

from mig_manager.core.node import cluster, json_fields

_MIRROR_ANNOTATION = "kubernetes.io/config.mirror"
"""Set by kubelet on the pod that shows a static pod in the API."""
_DEFAULT_GRACE_S = 30
"""What the API server writes where the pod's author says nothing."""


def read(item: Mapping[str, Any]) -> cluster.Pod:
    """Return what we want to know of a Pod object; surprises are the caller's to translate."""
    metadata, spec = item["metadata"], item["spec"]
    status = item.get("status") or {}
    annotations = json_fields.strings(metadata.get("annotations"))
    # The API server sets Pending; only an object that never went through it has none.
    phase = str(status.get("phase") or "Pending")
    return cluster.Pod(
        namespace=str(metadata["namespace"]),
        name=str(metadata["name"]),
        uid=str(metadata["uid"]),
        phase=phase,
        labels=json_fields.strings(metadata.get("labels")),
        node_selector=json_fields.strings(spec.get("nodeSelector")),
        owner_kind=_owner_kind(metadata),
        is_mirror=_MIRROR_ANNOTATION in annotations,
        is_ready=any(
            condition["type"] == "Ready" and condition["status"] == "True"
            for condition in status.get("conditions") or ()
        ),
        is_terminating=bool(metadata.get("deletionTimestamp")),
        gpu_resources=_gpu_resources(spec),
        container_names=tuple(str(container["name"]) for container in spec["containers"]),
        node_name=str(spec.get("nodeName") or ""),
        is_kept=annotations.get(cluster.KEEP_ANNOTATION) == "true",
        grace_s=_grace_s(spec),
        has_claims=bool(spec.get("resourceClaims")),
        claims=_claims(spec, status),
        may_run_gpu_init=phase == "Pending" and _has_gpu_init(spec),
        mounts_plugin_sockets=_mounts_plugin_sockets(spec),
        images=tuple(str(container.get("image") or "") for container in spec["containers"]),
        mig_strategy=_mig_strategy(spec),
        feature_gates=_feature_gates(spec),
    )


def _mounts_plugin_sockets(spec: Mapping[str, Any]) -> bool:
    """Tell whether a pod mounts kubelet's ``device-plugins``, wherever kubelet's root is.

    ``DevicePluginPath`` of k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1 ends so; k0s, MicroK8s and
    ``--root-dir`` change what stands before it.
    """
    paths = (
        str((volume.get("hostPath") or {}).get("path") or "")
        for volume in spec.get("volumes") or ()
    )
    return any(path.rstrip("/").endswith("/device-plugins") for path in paths)


def _grace_s(spec: Mapping[str, Any]) -> int:
    asked = spec.get("terminationGracePeriodSeconds")
    return _DEFAULT_GRACE_S if asked is None else int(asked)


def _has_gpu_init(spec: Mapping[str, Any]) -> bool:
    return any(
        container.get("restartPolicy") != "Always" and _container_resources(container)
        for container in spec.get("initContainers") or ()
    )


def _claims(spec: Mapping[str, Any], status: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of a pod's claims; those made from a template are in its status."""
    made = {
        str(each["name"]): str(each.get("resourceClaimName") or "")
        for each in status.get("resourceClaimStatuses") or ()
    }
    names = [
        str(each.get("resourceClaimName") or made.get(str(each["name"]), ""))
        for each in spec.get("resourceClaims") or ()
    ]
    # One that is not known by name may be for a GPU, whatever the others are for.
    return tuple(names) if all(names) else ()


def _mig_strategy(spec: Mapping[str, Any]) -> str:
    """Return what NVIDIA's device plugin was told: its options go before its variables."""
    for container in spec["containers"]:
        words = [str(each) for each in (container.get("command") or ())]
        words += [str(each) for each in (container.get("args") or ())]
        for word, following in zip(words, [*words[1:], ""], strict=False):
            flag, equals, value = word.partition("=")
            if flag == "--mig-strategy":
                return value if equals else following
    return next(
        (
            str(variable.get("value") or "")
            for container in spec["containers"]
            for variable in container.get("env") or ()
            if variable.get("name") == "MIG_STRATEGY"
        ),
        "",
    )


def _feature_gates(spec: Mapping[str, Any]) -> dict[str, bool]:
    found: dict[str, bool] = {}
    for container in spec["containers"]:
        for variable in container.get("env") or ():
            if variable.get("name") == "FEATURE_GATES":
                found |= json_fields.switches(str(variable.get("value") or ""))
    return found


def _owner_kind(metadata: Mapping[str, Any]) -> str | None:
    owners = metadata.get("ownerReferences") or ()
    return next((str(owner["kind"]) for owner in owners if owner.get("controller")), None)


def _gpu_resources(spec: Mapping[str, Any]) -> dict[str, int]:
    """Return what a pod needs at its hungriest moment, by the scheduler's rule.

    Init containers run one after the other, each beside the sidecars (init containers that
    restart) before it; then all app containers run beside all sidecars.
    https://kubernetes.io/docs/concepts/workloads/pods/sidecar-containers/
    """
    sidecars: dict[str, int] = {}
    peak: dict[str, int] = {}
    for container in spec.get("initContainers") or ():
        with_sidecars = _plus(sidecars, _container_resources(container))
        peak = _larger(peak, with_sidecars)
        if container.get("restartPolicy") == "Always":
            sidecars = with_sidecars
    running = sidecars
    for container in spec["containers"]:
        running = _plus(running, _container_resources(container))
    return {name: amount for name, amount in _larger(peak, running).items() if amount}


def _container_resources(container: Mapping[str, Any]) -> dict[str, int]:
    resources = container.get("resources") or {}
    return _larger(
        json_fields.gpu_resources(resources.get("requests")),
        json_fields.gpu_resources(resources.get("limits")),
    )


def _plus(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {name: one.get(name, 0) + other.get(name, 0) for name in (*one, *other)}


def _larger(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {name: max(one.get(name, 0), other.get(name, 0)) for name in (*one, *other)}
