"""Parse Pod objects: what a pod requests, which daemon it may be, and why it does not start."""

import collections
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mig_manager.core import messages, timestamps
from mig_manager.core.objects import api_values, pod_object, well_known

_TRUE = frozenset({"1", "t", "T", "true", "True", "TRUE"})  # True to Go (``strconv.ParseBool``)
_MIRROR_ANNOTATION = "kubernetes.io/config.mirror"
"""Set by kubelet on the pod that shows a static pod in the API."""
_GATES_OPTION = re.compile(r"--feature-gates[= ]+[\"']?([^\s\"']+)")
_DEFAULT_GRACE_S = 30  # the API server's default


def parse(item: Mapping[str, Any]) -> pod_object.Pod:
    """Parse a Pod object; see ``api_values.as_cluster_error`` for its exceptions."""
    metadata, spec = item["metadata"], item["spec"]
    status = item.get("status") or {}
    annotations = api_values.strings(metadata.get("annotations"))
    # The API server sets Pending; only an object that never went through it has none.
    phase = str(status.get("phase") or "Pending")
    claims = _claims(spec, status)
    grace = spec.get("terminationGracePeriodSeconds")
    owners = metadata.get("ownerReferences") or ()
    ends_by = timestamps.parse(metadata.get("deletionTimestamp"))
    owner = next((each for each in owners if each.get("controller")), None)
    extended = status.get("extendedResourceClaimStatus") or {}
    claimed = frozenset(
        str(each["resourceName"]) for each in extended.get("requestMappings") or ()
    )
    inits = _remaining_init_containers(spec, status)
    resources = peak(spec, _container_resources)
    mounts = _host_folders(spec)
    return pod_object.Pod(
        namespace=str(metadata["namespace"]),
        name=str(metadata["name"]),
        uid=str(metadata["uid"]),
        phase=phase,
        labels=api_values.strings(metadata.get("labels")),
        node_selector=api_values.strings(spec.get("nodeSelector")),
        owner_kind=str(owner["kind"]) if owner else None,
        owner_name=str(owner["name"]) if owner else "",
        is_mirror=_MIRROR_ANNOTATION in annotations,
        is_ready=api_values.is_ready(status),
        is_terminating=bool(metadata.get("deletionTimestamp")),
        ends_by_s=ends_by.timestamp() if ends_by else math.inf,
        is_admitted=bool(status.get("startTime")),
        gpu_resources=resources,
        container_names=tuple(str(container["name"]) for container in spec["containers"]),
        node_name=str(spec.get("nodeName") or ""),
        is_kept=annotations.get(well_known.KEEP_ANNOTATION) == "true",
        grace_s=_DEFAULT_GRACE_S if grace is None else int(grace),
        has_claims=claims is None or bool(claims),
        claims=claims or (),
        claimed_resources=claimed,
        completed_resources=frozenset(
            resources.keys() - peak({**spec, "initContainers": inits}, _container_resources).keys()
        ),
        has_gpu_init=_has_unlisted_devices(spec, inits),
        has_claim_init=_has_unlisted_claims(spec, inits, extended),
        # ``DevicePluginPath`` of k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1, and
        # ``DefaultKubeletPluginsRegistrationDirName`` of k8s.io/kubernetes/pkg/kubelet/config.
        mounts_plugin_sockets="device-plugins" in mounts,
        mounts_driver_sockets="plugins_registry" in mounts,
        images=tuple(str(container.get("image") or "") for container in spec["containers"]),
        mig_strategy=_mig_strategy(spec),
        feature_gates=_feature_gates(spec),
        waiting=_waiting(status),
        tolerated=frozenset(
            str(each["key"]) for each in spec.get("tolerations") or () if each.get("key")
        ),
    )


def _has_unlisted_devices(
    spec: Mapping[str, Any], init_containers: Iterable[Mapping[str, Any]]
) -> bool:
    """Return whether ordinary init containers have devices that no listed container has.

    Kubelet lists no devices of ordinary init containers, but allocates them again, before others,
    to later sidecars and the app containers (``devicesToReuse`` in
    ``pkg/kubelet/cm/devicemanager/manager.go``).
    """
    largest: collections.Counter[str] = collections.Counter()
    for container in init_containers:
        if _is_sidecar(container):
            largest -= _container_resources(container)
        else:
            largest |= _container_resources(container)
    for container in spec["containers"]:
        largest -= _container_resources(container)
    return bool(largest)


def _has_unlisted_claims(
    spec: Mapping[str, Any], inits: Sequence[Mapping[str, Any]], extended: Mapping[str, Any]
) -> bool:
    """Return whether ordinary init containers have claims that no other container has.

    ``extended`` is the status of the claim that the scheduler made for extended resources.
    """
    sidecars = [each for each in inits if _is_sidecar(each)]
    ordinary = [each for each in inits if not _is_sidecar(each)]
    listed = _claim_requests((*sidecars, *spec["containers"]), extended)
    return not _claim_requests(ordinary, extended) <= listed


def _claim_requests(
    containers: Iterable[Mapping[str, Any]], extended: Mapping[str, Any]
) -> frozenset[tuple[str, str]]:
    """Return claim and request of each claim of containers.

    A claim as a whole has no request, and the claim for extended resources no name in the spec.
    """
    containers = tuple(containers)
    names = {str(container["name"]) for container in containers}
    return frozenset(
        (str(claim["name"]), str(claim.get("request") or ""))
        for container in containers
        for claim in (container.get("resources") or {}).get("claims") or ()
    ) | frozenset(
        ("", str(mapping["requestName"]))
        for mapping in extended.get("requestMappings") or ()
        if mapping["containerName"] in names
    )


def _remaining_init_containers(
    spec: Mapping[str, Any], status: Mapping[str, Any]
) -> tuple[Mapping[str, Any], ...]:
    """Return sidecars and the init containers that have not succeeded yet.

    A new pod sandbox starts the others again.
    """
    completed = {
        str(container["name"])
        for container in status.get("initContainerStatuses") or ()
        if ((container.get("state") or {}).get("terminated") or {}).get("exitCode") == 0
    }
    return tuple(
        container
        for container in spec.get("initContainers") or ()
        if _is_sidecar(container) or container["name"] not in completed
    )


def _host_folders(spec: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the host's folders that a pod mounts, without the paths to them.

    k0s, MicroK8s and ``--root-dir`` change the paths.
    """
    return frozenset(
        str((volume.get("hostPath") or {}).get("path") or "").rstrip("/").rpartition("/")[2]
        for volume in spec.get("volumes") or ()
    )


_STARTING = frozenset({"", "ContainerCreating", "PodInitializing"})
"""Reasons of containers that are just starting."""
_MAX_WAITING = 300


def _waiting(status: Mapping[str, Any]) -> pod_object.ContainerWaiting | None:
    """Return why the first container that cannot start waits."""
    for kind in ("initContainerStatuses", "containerStatuses"):
        for container in status.get(kind) or ():
            state = (container.get("state") or {}).get("waiting") or {}
            reason = str(state.get("reason") or "")
            if reason not in _STARTING:
                text = messages.printable(str(state.get("message") or ""), instead=" ")
                return pod_object.ContainerWaiting(
                    reason=reason, message=messages.fit(text, _MAX_WAITING)
                )
    return None


def _variables(spec: Mapping[str, Any], name: str) -> list[str]:
    return [
        str(variable.get("value") or "")
        for container in spec["containers"]
        for variable in container.get("env") or ()
        if variable.get("name") == name
    ]


def _claims(spec: Mapping[str, Any], status: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return the names of a pod's claims; None if one is unknown, which may be for a GPU.

    The status has the names of claims from a template, and of the claim that the scheduler made
    for extended resources (KEP-5004, Kubernetes 1.34).
    """
    made = {
        str(each["name"]): str(each.get("resourceClaimName") or "")
        for each in status.get("resourceClaimStatuses") or ()
    }
    # ``PodResourceClaimStatus``: without a name "generating a ResourceClaim was not necessary".
    unnecessary = {name for name, claim in made.items() if not claim}
    names = [
        str(each.get("resourceClaimName") or made.get(str(each["name"]), ""))
        for each in spec.get("resourceClaims") or ()
        if each["name"] not in unnecessary
    ]
    if extended := status.get("extendedResourceClaimStatus"):
        names.append(str(extended.get("resourceClaimName") or ""))
    return tuple(names) if all(names) else None


def _command_line(container: Mapping[str, Any]) -> list[str]:
    return [*map(str, container.get("command") or ()), *map(str, container.get("args") or ())]


def _feature_gates(spec: Mapping[str, Any]) -> dict[str, bool]:
    """Return the feature gates in variables and command lines, which may be shell scripts."""
    commands = (" ".join(_command_line(container)) for container in spec["containers"])
    options = (gates for command in commands for gates in _GATES_OPTION.findall(command))
    texts = (*_variables(spec, "FEATURE_GATES"), *options)
    pairs = (pair.partition("=") for text in texts for pair in text.split(","))
    return {name.strip(): value.strip() in _TRUE for name, equals, value in pairs if equals}


def _mig_strategy(spec: Mapping[str, Any]) -> str:
    """Return the device plugin's MIG strategy; its options precede its variables."""
    for container in spec["containers"]:
        words = _command_line(container)
        for word, following in zip(words, [*words[1:], ""], strict=False):
            flag, equals, value = word.partition("=")
            if flag == "--mig-strategy":
                return value if equals else following
    return next(iter(_variables(spec, "MIG_STRATEGY")), "")


def peak(
    spec: Mapping[str, Any], needs: Callable[[Mapping[str, Any]], "collections.Counter[str]"]
) -> dict[str, int]:
    """Return a pod's peak request by the scheduler's rule; ``needs`` returns a container's.

    Init containers run one after the other, each beside the sidecars (init containers that
    restart) before it; then all app containers run beside all sidecars.
    https://kubernetes.io/docs/concepts/workloads/pods/sidecar-containers/
    """
    # Of counters ``+`` adds, and ``|`` takes the larger.
    sidecars: collections.Counter[str] = collections.Counter()
    largest: collections.Counter[str] = collections.Counter()
    for container in spec.get("initContainers") or ():
        with_sidecars = sidecars + needs(container)
        largest |= with_sidecars
        if _is_sidecar(container):
            sidecars = with_sidecars
    return dict(largest | sum(map(needs, spec["containers"]), sidecars))


def _is_sidecar(container: Mapping[str, Any]) -> bool:
    """Return whether an init container runs beside the app containers."""
    return bool(container.get("restartPolicy") == "Always")


def _container_resources(container: Mapping[str, Any]) -> collections.Counter[str]:
    resources = container.get("resources") or {}
    requests, limits = (
        api_values.gpu_resources(resources.get(kind)) for kind in ("requests", "limits")
    )
    return collections.Counter(requests) | collections.Counter(limits)
