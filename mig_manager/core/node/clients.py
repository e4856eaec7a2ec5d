"""GPU clients: pods that a plan affects, daemons to pause for it, and the table of extra clients.

    version: v1
    clients:
    - labels: {app: gpu-watcher}                        # pods with all of these labels
      namespace: monitoring                             # optional; DaemonSets anywhere without it
      deploy-label: nvidia.com/gpu.deploy.gpu-watcher   # optional

With ``deploy-label`` the daemon's DaemonSet selects nodes by that label's value ``true``, and the
daemon is paused and resumed like the operands of the GPU operator. Without it the pods are
deleted, and a taint keeps their successors away until the device plugin runs again; a daemon that
tolerates every taint returns too early, and is deleted once more after the change.
"""

import dataclasses
import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from mig_manager.core import fields, model, steps, yaml_tree
from mig_manager.core.node import pod_object, well_known

VERSION = "v1"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExtraClient:
    """One daemon of the table."""

    labels: Mapping[str, str]
    namespace: str | None = None
    """None: any, but only pods of DaemonSets: others may have the same labels."""
    deploy_label: str | None = None
    """The node label that selects its nodes; None: its pods are deleted."""

    def matches(self, pod: pod_object.Pod) -> bool:
        """Return whether a pod belongs to this daemon."""
        if self.namespace is None and pod.owner_kind != "DaemonSet":
            return False
        is_in_namespace = self.namespace in (None, pod.namespace)
        return is_in_namespace and self.labels.items() <= pod.labels.items()


def members(
    pods: Iterable[pod_object.Pod], table: Sequence[ExtraClient]
) -> tuple[pod_object.Pod, ...]:
    """Return the pods that belong to any of the daemons."""
    return tuple(pod for pod in pods if any(client.matches(pod) for client in table))


def parse(text: str, *, source: str) -> tuple[ExtraClient, ...]:
    """Parse a table, which may be empty; ConfigError with a correction if invalid."""
    root = fields.document(text, source=source, section="clients", version=VERSION)
    listed = fields.items(root.get("clients") if root else None, "clients")
    return tuple(map(_client, listed))


def _client(item: yaml_tree.Node) -> ExtraClient:
    node = fields.mapping(item, "a client is a mapping with 'labels'")
    fields.check_keys(node, ("labels", "namespace", "deploy-label"))
    example = "{app: gpu-watcher}"
    labels = fields.required(node, "labels", example=example)
    # Without labels, the client would be every pod of the node.
    if not (isinstance(labels, yaml_tree.Mapping) and labels.entries):
        fields.fail(labels, f"labels must be a mapping such as {example}")
    namespace, deploy = node.get("namespace"), node.get("deploy-label")
    deploy_label = None if deploy is None else _text(deploy, "deploy-label")
    if deploy is not None and not well_known.is_deploy_label(deploy_label or ""):
        fields.fail(
            deploy,
            f"deploy-label must begin with '{well_known.DEPLOY_LABEL_PREFIX}' and be a label's "
            f"key, not {fields.shown(deploy)}",
        )
    return ExtraClient(
        labels={entry.key: _text(entry.value, f"label '{entry.key}'") for entry in labels.entries},
        namespace=None if namespace is None else _text(namespace, "namespace"),
        deploy_label=deploy_label,
    )


def _text(node: yaml_tree.Node, what: str) -> str:
    if not (isinstance(node, yaml_tree.Scalar) and isinstance(node.value, str)):
        fields.fail(node, f"{what} must be a text in quotes, not {fields.shown(node)}")
    return node.value


DISCOVERY_DEPLOY_LABEL = well_known.DEPLOY_LABEL_PREFIX + "gpu-feature-discovery"

_PLUGIN_CONTAINERS = frozenset({"nvidia-device-plugin", "nvidia-device-plugin-ctr"})

_GFD_CONTAINERS = frozenset({"gpu-feature-discovery", "gpu-feature-discovery-ctr"})
_VALIDATORS = frozenset(
    {f"nvidia-{name}-validator" for name in ("operator", "cuda", "device-plugin")}
)
"""Pods that validated the former layout; the operator restarts them."""

_ENUMERATE_AT_START = (
    *("device-plugin", "dra-driver", "gpu-feature-discovery"),
    *("dcgm", "dcgm-exporter", "dcgm-dra", "dcgm-exporter-dra"),
)
"""Operands of the GPU operator that list the instances only when they start."""

MONITORS = frozenset(
    well_known.DEPLOY_LABEL_PREFIX + operand
    for operand in ("dcgm-dra", "dcgm-exporter-dra", "dra-validator")
)
"""Deploy labels of operands that have every GPU by a ResourceClaim with admin access."""

_HOLD_DEVICES = ("nvsm", "client")  # operands to pause only if the plan destroys an instance


def affected_ids(plan: steps.Plan, gpus: Iterable[model.Gpu]) -> frozenset[str]:
    """Return the ids of devices that the plan destroys or changes.

    That includes a whole GPU if an instance on it is destroyed or its mode changes, because
    ``mig.strategy=none`` allocates MIG-enabled GPUs whole.
    """
    by_uuid = {gpu.uuid: gpu for gpu in gpus}
    ids: set[str] = set(plan.destroyed_uuids)
    for gpu_plan in plan.gpus:
        destroys = any(
            isinstance(step, steps.DestroyComputeInstance | steps.DestroyGpuInstance)
            for step in gpu_plan.steps
        )
        if destroys or gpu_plan.changes_mode:
            ids.add(gpu_plan.gpu_uuid)
        if gpu_plan.changes_mode:
            ids.update(by_uuid[gpu_plan.gpu_uuid].mig_uuids)
    return frozenset(ids)


def is_device_plugin(pod: pod_object.Pod) -> bool:
    """Return whether a pod is NVIDIA's device plugin, however it was deployed.

    The GPU operator sets label ``app``, the static manifest label ``name``. The Helm chart's label
    ``app.kubernetes.io/name`` is also on its GFD and MPS daemons, so the container name decides.

    Any user can choose these names, and the plugin's pods get deleted. So the pod must also belong
    to a DaemonSet and mount the directory where plugins register with kubelet, which requires
    access to the host's files.
    """
    has_known_name = (
        pod.labels.get("app") == "nvidia-device-plugin-daemonset"
        or pod.labels.get("name") == "nvidia-device-plugin-ds"
        or not _PLUGIN_CONTAINERS.isdisjoint(pod.container_names)
    )
    return has_known_name and pod.owner_kind == "DaemonSet" and pod.mounts_plugin_sockets


def is_feature_discovery(pod: pod_object.Pod) -> bool:
    """Return whether a pod is NVIDIA's GPU feature discovery, which labels the node."""
    return not _GFD_CONTAINERS.isdisjoint(pod.container_names)


def is_validator(pod: pod_object.Pod) -> bool:
    """Return whether a pod is one of the GPU operator's validators."""
    return pod.labels.get("app") in _VALIDATORS


def destroys_instances(plan: steps.Plan) -> bool:
    """Return whether the plan destroys an instance or changes a mode."""
    return bool(plan.destroyed_uuids) or any(
        isinstance(step, steps.DestroyGpuInstance) for step in plan.steps
    )


def labels_to_pause(
    labels: Mapping[str, str],
    plan: steps.Plan,
    daemons: Iterable[ExtraClient] = (),
) -> dict[str, str]:
    """Return the deploy labels to set to ``paused-for-mig-change``, with their original values.

    Only labels with value ``true``: absent labels, ``false`` and other values (a pause by another
    component) stay. A label with the paused value, from a manager that did not resume it, counts
    as ``true``, or its daemon would never run again.

    In the order of the resume: a monitor that starts at the same time as the device plugin can
    hang the driver, and a monitor that starts before its data source fails.
    """
    operands = _ENUMERATE_AT_START + (_HOLD_DEVICES if destroys_instances(plan) else ())
    keys = [well_known.DEPLOY_LABEL_PREFIX + operand for operand in operands]
    keys += [daemon.deploy_label for daemon in daemons if daemon.deploy_label]
    return {key: "true" for key in keys if labels.get(key) in ("true", well_known.PAUSED_VALUE)}


def gated_by(pods: Iterable[pod_object.Pod], keys: Collection[str]) -> tuple[pod_object.Pod, ...]:
    """Return the pods of DaemonSets that select nodes by one of these labels.

    Only the DaemonSet controller deletes a pod when its node no longer matches.
    """
    return tuple(
        pod
        for pod in pods
        if pod.owner_kind == "DaemonSet" and not pod.node_selector.keys().isdisjoint(keys)
    )


_OPERATORS = "nvidia-mig-manager"
_OURS = "mig-manager"


def other_managers(
    pods: Iterable[pod_object.Pod],
    own_uid: str | None,
    annotations: Mapping[str, str] | None = None,
) -> tuple[str, ...]:
    """Return the other pods of this node that change MIG instances, as ``namespace/name (kind)``.

    Pending pods count, because they may start at any moment. If ``own_uid``, the UID of our pod,
    is None, pods that may be ours do not count. ``annotations`` are the node's, for
    ``is_vgpu_plugin`` pods.
    """
    return tuple(
        f"{pod.key} ({kind})"
        for pod in pods
        if not pod.is_finished
        and pod.uid != own_uid
        and (
            kind := _manager_kind(pod, knows_ourselves=own_uid is not None)
            or _vgpu_manager(pod, annotations or {})
        )
    )


def is_mig_manager(pod: pod_object.Pod) -> bool:
    """Return whether a pod is an agent of this program or of NVIDIA's mig-manager."""
    names = {pod.labels.get("app"), pod.labels.get("app.kubernetes.io/name"), *pod.container_names}
    return not names.isdisjoint((_OURS, _OPERATORS))


@dataclasses.dataclass(frozen=True, slots=True)
class _VgpuPlugin:
    """A device plugin that shares GPUs in one of several modes, and publishes the mode."""

    kind: str
    label: tuple[str, str]  # of its pods
    register_annotation: str  # of the node


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
        "another mig-manager": knows_ourselves and name == _OURS and _OURS in containers,
    }
    return next((kind for kind, is_it in kinds.items() if is_it), "")
