"""Who must let go of a GPU before it changes: pods that are evicted, daemons that are paused.

Only what a plan takes away matters: whoever holds an instance that stays is left alone.
"""

import dataclasses
import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from mig_manager.core import fields, model, steps, yaml_tree
from mig_manager.core.node import cluster, resources

VERSION = "v1"

_DOCUMENT_KEYS = ("version", "clients")
_CLIENT_KEYS = ("labels", "namespace", "deploy-label")
_EXAMPLE = "{app: gpu-watcher}"
_DEPLOY_LABEL = re.compile(
    re.escape(cluster.DEPLOY_LABEL_PREFIX) + r"[A-Za-z0-9._-]{0,51}[A-Za-z0-9]"
)
"""63 characters are all that may follow the slash, and the prefix takes some of them."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExtraClient:
    """One daemon."""

    labels: Mapping[str, str]
    namespace: str | None = None
    """None: any, but then only pods of DaemonSets: others may have the same labels."""
    deploy_label: str | None = None
    """The node label that places it; None: its pods are deleted."""

    def matches(self, pod: cluster.Pod) -> bool:
        """Return whether a pod is this daemon's."""
        is_in_place = (
            pod.owner_kind == "DaemonSet"
            if self.namespace is None
            else pod.namespace == self.namespace
        )
        return is_in_place and self.labels.items() <= pod.labels.items()


def members(pods: Iterable[cluster.Pod], table: Sequence[ExtraClient]) -> tuple[cluster.Pod, ...]:
    """Return the pods that belong to any of the daemons."""
    return tuple(pod for pod in pods if any(client.matches(pod) for client in table))


def parse(text: str, *, source: str) -> tuple[ExtraClient, ...]:
    """Read a table; an empty one has no clients.

    Args:
        text: YAML or JSON.
        source: Name of the file for error messages.

    Raises:
        ConfigError: The table breaks the format; the message says where and what is right.
    """
    root = yaml_tree.parse(text, source=source)
    if root is None or fields.is_null(root):
        return ()
    if not isinstance(root, yaml_tree.Mapping):
        fields.fail(root, f"expected a mapping with 'version: {VERSION}' and 'clients'")
    fields.check_keys(root, _DOCUMENT_KEYS)
    version = fields.required(root, "version", example=VERSION)
    if _text(version, "version") != VERSION:
        fields.fail(version, f"version must be the text {VERSION}, not {fields.shown(version)}")
    clients = root.get("clients")
    if clients is None or fields.is_null(clients):
        return ()
    if not isinstance(clients, yaml_tree.Sequence):
        fields.fail(clients, f"clients must be a list, not {fields.shown(clients)}")
    return tuple(_client(item) for item in clients.items)


def _client(node: yaml_tree.Node) -> ExtraClient:
    if not isinstance(node, yaml_tree.Mapping):
        fields.fail(node, f"a client is a mapping with 'labels', not {fields.shown(node)}")
    fields.check_keys(node, _CLIENT_KEYS)
    labels = fields.required(node, "labels", example=_EXAMPLE)
    # No labels at all would mean every pod of the node.
    if not (isinstance(labels, yaml_tree.Mapping) and labels.entries):
        fields.fail(labels, f"labels must be a mapping such as {_EXAMPLE}")
    namespace, deploy = node.get("namespace"), node.get("deploy-label")
    return ExtraClient(
        labels={entry.key: _text(entry.value, f"label '{entry.key}'") for entry in labels.entries},
        namespace=None if namespace is None else _text(namespace, "namespace"),
        deploy_label=None if deploy is None else _deploy_label(deploy),
    )


def _deploy_label(node: yaml_tree.Node) -> str:
    key = _text(node, "deploy-label")
    if not _DEPLOY_LABEL.fullmatch(key):
        fields.fail(
            node,
            f"deploy-label must begin with '{cluster.DEPLOY_LABEL_PREFIX}' and be a label's key, "
            f"not {fields.shown(node)}",
        )
    return key


def _text(node: yaml_tree.Node, what: str) -> str:
    if not (isinstance(node, yaml_tree.Scalar) and isinstance(node.value, str)):
        fields.fail(node, f"{what} must be a text, in quotes if need be, not {fields.shown(node)}")
    return node.value


DISCOVERY_DEPLOY_LABEL = cluster.DEPLOY_LABEL_PREFIX + "gpu-feature-discovery"

_PLUGIN_APPS = frozenset({"nvidia-device-plugin-daemonset"})
_PLUGIN_NAMES = frozenset({"nvidia-device-plugin-ds"})
_PLUGIN_CONTAINERS = frozenset({"nvidia-device-plugin", "nvidia-device-plugin-ctr"})

_GFD_CONTAINERS = frozenset({"gpu-feature-discovery", "gpu-feature-discovery-ctr"})
_VALIDATORS = frozenset(
    {
        "nvidia-operator-validator",
        "nvidia-cuda-validator",
        "nvidia-device-plugin-validator",
    }
)
"""Pods whose finding was about the former layout; the operator runs the validation anew."""

_UUID = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_DEVICE_UUID = re.compile(rf"(?:GPU|MIG)-{_UUID}|MIG-GPU-{_UUID}/\d+/\d+", re.IGNORECASE)
"""Device ids of NVIDIA's plugin are UUIDs; before driver 470 MIG devices had the longer form."""

_SHARED = ".shared"
"""What the plugin appends to the name of a resource with replicas, where it is told to."""
_REPLICAS = ".replicas"

DISPLAYS = frozenset({"DGX Display", "NVIDIA DGX Display"})
"""Console GPUs of a DGX Station, which no plugin offers: go-nvlib skips them by name."""

_ENUMERATE_AT_START = ("device-plugin", "gpu-feature-discovery", "dcgm", "dcgm-exporter")
"""Operands of the GPU operator that see instances only as they were when they started."""

_HOLD_DEVICES = ("nvsm", "client")
"""Operands that must be away only when something is taken from them."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeDevices:
    """What a Node object says of its devices."""

    allocatable: Mapping[str, int]
    """Healthy devices by resource name, a shared one once per replica."""
    capacity: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """The same with unhealthy ones; empty: not known."""
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @staticmethod
    def of(view: cluster.NodeView) -> "NodeDevices":
        """Return those of a node."""
        return NodeDevices(
            allocatable=view.allocatable, capacity=view.capacity, labels=view.labels
        )

    def matches(self, counts: Mapping[str, int], expected: Mapping[str, int]) -> bool:
        """Return whether counts are those expected, replicas of shared devices apart."""
        bare = {name.removesuffix(_SHARED): (name, n) for name, n in counts.items()}
        return bare.keys() == expected.keys() and all(
            n == expected[key] or (n % expected[key] == 0 and self._is_shared(name))
            for key, (name, n) in bare.items()
        )

    def _is_shared(self, name: str) -> bool:
        """Return whether a resource has replicas, by its name or GPU feature discovery's label.

        Replicas of the former layout are those of the next, unless the plugin's config changes.
        """
        replicas = [
            value
            for key, value in self.labels.items()
            if _is_device_resource(key.removesuffix(_REPLICAS)) and key.endswith(_REPLICAS)
        ]
        return name.endswith(_SHARED) or any(value not in ("0", "1") for value in replicas)


def affected_ids(plan: steps.Plan, gpus: Iterable[model.Gpu]) -> frozenset[str]:
    """Return the device ids whose holders the plan would hurt.

    Besides the instances that end, this covers a whole GPU given to a pod (``mig.strategy=none``
    hands out MIG-enabled GPUs whole) once anything on it is destroyed or its mode is switched.
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


def busy_uuids(assigned: Iterable[cluster.PodDevices]) -> frozenset[str]:
    """Return every device id that a pod holds."""
    return frozenset(device for pod in assigned for device in pod.device_ids)


def affected_pods(
    pods: Iterable[cluster.Pod],
    assigned: Sequence[cluster.PodDevices] | None,
    affected: Collection[str],
    *,
    is_whole_node: bool = False,
    daemons: Sequence[ExtraClient] = (),
) -> tuple[cluster.Pod, ...]:
    """Return the pods that must leave, in the order given.

    Args:
        pods: All pods of the node.
        assigned: Kubelet's allocations, or None when kubelet cannot be asked: then every pod
            that asks for a GPU counts, because any of them may hold what is destroyed.
        affected: Device ids that are taken away; nobody must leave when there are none.
        is_whole_node: Whether every pod that has or wants a GPU must leave, affected or not.
        daemons: Daemons that are paused or deleted later, and so need not leave before.

    A pod that asks for a GPU and has no device in ``assigned`` counts too: kubelet lists every
    pod, but not the devices of ordinary init containers (PodResources v1). So does a pod with a
    ResourceClaim on a GPU, for kubelet does not tell which, and one with a ResourceClaim of which
    kubelet tells nothing, as old ones do. Other device plugins do not use UUIDs as device ids
    (GKE: ``nvidia0/gi7``): a pod with a GPU from one of these may use any device.
    """
    if not (affected or is_whole_node):
        return ()
    held = {pod.key: pod for pod in assigned or ()}
    wanted = None if is_whole_node else affected
    return tuple(
        pod
        for pod in pods
        if not pod.is_finished
        and not is_device_plugin(pod)
        and not any(daemon.matches(pod) for daemon in daemons)
        and _holds(pod, held.get(pod.key), wanted)
    )


def _holds(
    pod: cluster.Pod, found: cluster.PodDevices | None, affected: Collection[str] | None
) -> bool:
    """Return whether a pod has, or may have, one of the devices; ``affected`` None means any."""
    if _may_claim_gpu(pod, found):
        return True
    has_gpu = any(map(_is_device_resource, pod.gpu_resources))
    if found is None or not found.device_ids or pod.may_run_gpu_init or affected is None:
        return has_gpu
    if not found.device_ids.isdisjoint(affected):
        return True
    # The ids of one pod can belong to several plugins, such as one for network cards.
    return has_gpu and not any(map(_DEVICE_UUID.fullmatch, found.device_ids))


def _may_claim_gpu(pod: cluster.Pod, found: cluster.PodDevices | None) -> bool:
    if found is not None and found.claim_drivers:
        return cluster.GPU_CLAIM_DRIVER in found.claim_drivers
    return pod.has_claims


def describe_pod(pod: cluster.Pod, assigned: Iterable[cluster.PodDevices] | None) -> str:
    """Return a pod's name, and why it counts where its devices do not tell."""
    if _may_claim_gpu(pod, next((one for one in assigned or () if one.key == pod.key), None)):
        return f"{pod.key} [its ResourceClaim may stand for any GPU]"
    return pod.key


def is_device_plugin(pod: cluster.Pod) -> bool:
    """Return whether a pod is NVIDIA's device plugin, however it was deployed.

    Facts: GPU operator (label ``app``), static manifest (label ``name``), Helm chart: its label
    ``app.kubernetes.io/name`` stands on its GFD and MPS daemons as well, so that only the name of
    the container tells them apart.

    Anybody may call a pod so, and the plugin's pods are deleted and waited for. So it must also be
    a DaemonSet's and mount the directory where plugins register with kubelet: the plugin cannot do
    without, and only namespaces that are trusted with the host's files can have it.
    """
    is_called_so = (
        pod.labels.get("app") in _PLUGIN_APPS
        or pod.labels.get("name") in _PLUGIN_NAMES
        or not _PLUGIN_CONTAINERS.isdisjoint(pod.container_names)
    )
    return is_called_so and pod.owner_kind == "DaemonSet" and pod.mounts_plugin_sockets


def is_feature_discovery(pod: cluster.Pod) -> bool:
    """Return whether a pod is NVIDIA's GPU feature discovery, which labels the node."""
    return not _GFD_CONTAINERS.isdisjoint(pod.container_names)


def is_validator(pod: cluster.Pod) -> bool:
    """Return whether a pod is one of the GPU operator's validators."""
    return pod.labels.get("app") in _VALIDATORS


def destroys_instances(plan: steps.Plan) -> bool:
    """Return whether anything ends that somebody may hold."""
    return bool(plan.destroyed_uuids) or any(
        isinstance(step, steps.DestroyGpuInstance) for step in plan.steps
    )


def labels_to_pause(
    labels: Mapping[str, str],
    plan: steps.Plan,
    daemons: Iterable[ExtraClient] = (),
) -> dict[str, str]:
    """Return the deploy labels to set to ``paused-for-mig-change``, with their original values.

    Only labels that exist and say ``true``: an absent label is not ours to create, ``false`` and
    foreign values (another component's pause) are not ours to change. A label that a manager
    left paused counts as ``true``, or its daemon would never come back.

    The order is that of the resume: a monitor that starts beside the device plugin can hang the
    driver, and one that starts before its source of data fails.
    """
    operands = _ENUMERATE_AT_START + (_HOLD_DEVICES if destroys_instances(plan) else ())
    keys = [cluster.DEPLOY_LABEL_PREFIX + operand for operand in operands]
    keys += [daemon.deploy_label for daemon in daemons if daemon.deploy_label]
    return {key: "true" for key in keys if labels.get(key) in ("true", cluster.PAUSED_VALUE)}


def gated_by(pods: Iterable[cluster.Pod], keys: Collection[str]) -> tuple[cluster.Pod, ...]:
    """Return the pods whose DaemonSet places them by one of these node labels.

    Only the DaemonSet controller takes a pod away when its node no longer matches; a workload
    that selects nodes by such a label stays.
    """
    return tuple(
        pod
        for pod in pods
        if pod.owner_kind == "DaemonSet" and not pod.node_selector.keys().isdisjoint(keys)
    )


def expected_devices(gpus: Iterable[model.Gpu]) -> tuple[frozenset[str], frozenset[str]]:
    """Return what a device plugin should offer: by instances, and with ``mig.strategy=none``."""
    known = tuple(gpu for gpu in gpus if gpu.name not in DISPLAYS)
    whole = frozenset(gpu.uuid for gpu in known)
    enabled = (gpu for gpu in known if gpu.current_mode is model.MigMode.ENABLED)
    sliced = whole - {gpu.uuid for gpu in known if gpu.current_mode is model.MigMode.ENABLED}
    return sliced.union(*(gpu.mig_uuids for gpu in enabled)), whole


def why_not_schedulable(
    gpus: Iterable[model.Gpu],
    offered: Mapping[str, frozenset[str]] | None,
    node: NodeDevices,
    *,
    changed: Collection[str] | None = None,
) -> str:
    """Say why the devices are not schedulable yet; empty when they are.

    The plugin may offer a device of an unchanged GPU as unhealthy: that is no matter of a change.

    Args:
        gpus: The GPUs as they are now.
        offered: Healthy device ids by resource name from kubelet, or None when it cannot be
            asked; then only the node's counts can be compared.
        node: What the node counts.
        changed: UUIDs of the GPUs whose devices must all be healthy; None: of all GPUs.
    """
    # What a GPU has that cannot be observed is not known, and may be offered beside the rest.
    is_partial = bool(model.unreachable(gpus))
    known = tuple(gpus)
    if offered is None:
        why = _why_not_counted(known, node, changed)
        total = sum(_devices_of(node.allocatable).values())
        is_enough = is_partial and total >= len(expected_devices(_among(known, changed))[0])
        return "" if is_enough else why
    devices = {name: ids for name, ids in offered.items() if _is_device_resource(name) and ids}
    ids: frozenset[str] = frozenset().union(*devices.values())
    for expected, needed in zip(
        expected_devices(known), expected_devices(_among(known, changed)), strict=True
    ):
        is_registered = sum(_devices_of(node.capacity).values()) >= len(expected)
        is_known = is_partial or ids <= expected
        if ids == expected or (ids and is_registered and is_known and needed <= ids):
            return _compare_counts(devices, _devices_of(node.allocatable))
    sliced, _ = expected_devices(known)
    return (
        f"kubelet offers {len(ids)} devices of which {len(ids & sliced)} exist; "
        f"{len(sliced)} are expected"
    )


def is_plugin_stale(
    gpus: Sequence[model.Gpu], offered: Mapping[str, frozenset[str]] | None, node: NodeDevices
) -> bool:
    """Return whether the device plugin does not know the devices that there are.

    Args:
        gpus: The GPUs as they are now.
        offered: As of ``why_not_schedulable``.
        node: What the node counts.
    """
    is_partial = bool(model.unreachable(gpus))
    sliced, whole = expected_devices(gpus)
    ids = frozenset().union(
        *(ids for name, ids in (offered or {}).items() if _is_device_resource(name))
    )
    if not (is_partial or ids <= sliced or ids <= whole):
        return True
    if offered is None:
        return bool(why_not_schedulable(gpus, None, node, changed=()))
    registered = sum(_devices_of(node.capacity or node.allocatable).values())
    # Only devices that are in one of the two tell the plugin's strategy.
    likely = [expected for expected in (sliced, whole) if ids & (expected - (sliced & whole))]
    return registered < min(map(len, likely or (sliced, whole)))


def _why_not_counted(
    gpus: Sequence[model.Gpu], node: NodeDevices, changed: Collection[str] | None
) -> str:
    """Compare the node's counts with what the plugin should register by one of its strategies."""
    sliced, whole = expected_devices(gpus)
    seen = [gpu for gpu in gpus if gpu.name not in DISPLAYS]
    allocatable = {name: n for name, n in _devices_of(node.allocatable).items() if n}
    total = sum(allocatable.values())
    if total in (len(sliced), len(whole)):
        return ""
    needed = len(expected_devices(_among(gpus, changed))[0])
    for expected in (
        resources.counts(seen),
        {resources.GPU: len(sliced)},
        {resources.GPU: len(whole)},
    ):
        if node.matches(allocatable, expected):
            return ""
        # Kubelet counts an unhealthy device in the capacity alone.
        if (
            total >= needed
            and all(allocatable.values())
            and node.matches(
                {name: n for name, n in _devices_of(node.capacity).items() if name in allocatable},
                expected,
            )
        ):
            return ""
    return f"the node's allocatable counts {total} devices, {len(sliced)} are expected"


def _among(gpus: Iterable[model.Gpu], uuids: Collection[str] | None) -> tuple[model.Gpu, ...]:
    return tuple(gpu for gpu in gpus if uuids is None or gpu.uuid in uuids)


def _devices_of(counts: Mapping[str, int]) -> dict[str, int]:
    return {name: n for name, n in counts.items() if _is_device_resource(name)}


def _compare_counts(devices: Mapping[str, frozenset[str]], counts: Mapping[str, int]) -> str:
    for name in sorted(devices.keys() | counts.keys()):
        expected, actual = len(devices.get(name, ())), counts.get(name, 0)
        # A shared (time-sliced) device counts once per replica.
        if (expected == 0 and actual != 0) or (expected and (actual == 0 or actual % expected)):
            return f"the node's allocatable {name} is {actual}, {expected} expected"
    return ""


def _is_device_resource(name: str) -> bool:
    bare = name.removesuffix(_SHARED)
    return bare == cluster.RESOURCE_PREFIX + "gpu" or bare.startswith(
        cluster.RESOURCE_PREFIX + "mig-"
    )
