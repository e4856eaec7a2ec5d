"""Find the other programs on a node that change MIG instances, by their pods."""

import dataclasses
import re
from collections.abc import Iterable, Mapping

from mig_manager.core.objects import pod_object

_OPERATORS = "nvidia-mig-manager"
_OUR_NAME = "mig-manager"


def others(
    pods: Iterable[pod_object.Pod],
    own_uid: str | None,
    annotations: Mapping[str, str] | None = None,
) -> tuple[str, ...]:
    """Return the other pods of this node that change MIG instances, as ``namespace/name (kind)``.

    Pending pods count, because they may start at any moment. If ``own_uid``, the UID of our pod,
    is None, pods that may be ours do not count. ``annotations`` are the node's, for
    ``is_vgpu_plugin`` pods.
    """
    names: list[str] = []
    for pod in pods:
        if pod.is_finished or pod.uid == own_uid:
            continue
        kind = _manager_kind(pod, knows_ourselves=own_uid is not None)
        if kind := kind or _vgpu_manager(pod, annotations or {}):
            names.append(f"{pod.key} ({kind})")
    return tuple(names)


def is_mig_manager(labels: Mapping[str, str], container_names: Iterable[str]) -> bool:
    """Return whether a pod is an agent of this program or of NVIDIA's mig-manager."""
    names = {labels.get("app"), labels.get("app.kubernetes.io/name"), *container_names}
    return not names.isdisjoint((_OUR_NAME, _OPERATORS))


@dataclasses.dataclass(frozen=True, slots=True)
class _VgpuPlugin:
    """A device plugin that shares GPUs in one of several modes, and publishes the mode."""

    kind: str
    label: tuple[str, str]  # label of its pods
    register_annotation: str  # annotation of the node


_VGPU_PLUGINS = (
    # Project-HAMi/HAMi: charts/hami/templates/device-plugin/daemonsetnvidia.yaml,
    # pkg/device/nvidia/device.go.
    _VgpuPlugin(
        "HAMi in MIG mode",
        ("app.kubernetes.io/component", "hami-device-plugin"),
        "hami.io/node-nvidia-register",
    ),
    # Project-HAMi/volcano-vgpu-device-plugin: deployments/, pkg/util/types.go.
    _VgpuPlugin(
        "volcano's vGPU device plugin in MIG mode",
        ("name", "volcano-device-plugin"),
        "volcano.sh/node-vgpu-register",
    ),
)

_REGISTERED_IN_MIG_MODE = re.compile(r'"mode"\s*:\s*"mig"|,mig(?::|$)')
"""A GPU in MIG mode, as the plugins register it: in JSON (HAMi since 2.8), or as fields between
commas, mode last, one GPU before each colon (``EncodeNodeDevices`` of both)."""


def is_vgpu_plugin(pod: pod_object.Pod) -> bool:
    """Return whether a pod is HAMi's or volcano's plugin; the node's annotations have its mode."""
    return any(plugin.label in pod.labels.items() for plugin in _VGPU_PLUGINS)


def _vgpu_manager(pod: pod_object.Pod, annotations: Mapping[str, str]) -> str:
    """Return the kind of a plugin in MIG mode; empty in other modes, which change no instance.

    Pod and annotation decide: the pod is the same in every mode, and the annotation outlives it.
    """
    kinds = (
        plugin.kind
        for plugin in _VGPU_PLUGINS
        if plugin.label in pod.labels.items()
        and _REGISTERED_IN_MIG_MODE.search(annotations.get(plugin.register_annotation, ""))
    )
    return next(kinds, "")


def _manager_kind(pod: pod_object.Pod, *, knows_ourselves: bool) -> str:
    """Return the kind of a MIG manager's pod; empty for any other pod, or if it may be ours."""
    app, name = pod.labels.get("app"), pod.labels.get("app.kubernetes.io/name")
    component = pod.labels.get("app.kubernetes.io/component")
    containers = pod.container_names
    # The last part of an image's name is the same in every registry.
    images = {each.partition("@")[0].rpartition("/")[2].partition(":")[0] for each in pod.images}
    is_operators = app == _OPERATORS or _OPERATORS in containers
    is_nos = (
        (component == "mig-agent" and "mig-agent" in containers)
        or name == "nos-mig-agent"
        or "nos-mig-agent" in images
    )
    is_slicer = not {"das-daemonset", "instaslice-daemonset"}.isdisjoint(containers) or (
        app == "controller-daemonset" and any(each.startswith("instaslice") for each in images)
    )
    kinds = {
        "NVIDIA's mig-manager": is_operators and (knows_ourselves or "k8s-mig-manager" in images),
        "NVIDIA's DRA driver with DynamicMIG": "gpus" in containers
        and pod.feature_gates.get("DynamicMIG", False),
        "nos' mig-agent": is_nos,
        "OpenShift's Dynamic Accelerator Slicer": is_slicer,
        "another mig-manager": knows_ourselves and name == _OUR_NAME and _OUR_NAME in containers,
    }
    return next((kind for kind, is_it in kinds.items() if is_it), "")
