"""Checks of what the cluster and kubelet tell of this node."""

from collections.abc import Mapping, Sequence

from mig_manager.adapters.kubernetes import api
from mig_manager.cli.doctor import findings
from mig_manager.cli.doctor import gpus as gpu_checks
from mig_manager.core import model
from mig_manager.core.node import clients, cluster, other_managers, resources, rights

Api = findings.Once[api.KubeApi]
Node = findings.Once[cluster.NodeView]
Pods = findings.Once[tuple[cluster.Pod, ...]]
Offers = findings.Once[Mapping[str, frozenset[str]]]

_UNDER_WAY = (model.State.PENDING.value, model.State.REBOOTING.value)


def pod_resources(offers: Offers) -> Sequence[findings.Found]:
    """Tell what kubelet offers."""
    told = [f"{len(ids)} {name}" for name, ids in sorted(offers.get().items()) if _is_ours(name)]
    return (findings.ok(f"kubelet offers {', '.join(told) or 'no NVIDIA device'}"),)


def offered_devices(offers: Offers, gpus: gpu_checks.Gpus, node: Node) -> Sequence[findings.Found]:
    """Tell whether kubelet offers what the GPUs have."""
    offered = offers.needed()
    seen = gpus.needed()
    view = node.if_told()
    # Without the node, kubelet's word stands for its counts as well.
    counts = {name: len(ids) for name, ids in offered.items() if _is_ours(name)}
    told = resources.NodeDevices.of(view) if view else resources.NodeDevices(allocatable=counts)
    why_not = resources.why_not_schedulable(seen, offered, told)
    return (findings.fail(why_not) if why_not else findings.ok("all devices and no others"),)


def connection(kube: Api, node: Node, node_name: str) -> Sequence[findings.Found]:
    """Tell whether the API answers us."""
    connected = kube.get()
    if not node_name:
        connected.is_allowed(rights.RIGHTS[0])
        return (findings.ok("the API answers; no --node-name, so no look at the node"),)
    view = node.get()
    label = view.labels.get(cluster.CONFIG_LABEL)
    state = view.labels.get(cluster.STATE_LABEL)
    wish = f"{cluster.CONFIG_LABEL} is {label!r}" if label else f"no {cluster.CONFIG_LABEL}"
    return (findings.ok(f"node {view.name}: {wish}, state {state or 'unknown'}"),)


def own_rights(kube: Api, node_name: str) -> Sequence[findings.Found]:
    """Tell which rights of the agent these credentials lack."""
    connected = kube.needed()
    lacking = [
        right
        for right in rights.RIGHTS
        if not connected.is_allowed(right, name=_object(right, node_name))
    ]
    if not lacking:
        return (findings.ok(f"all {len(rights.RIGHTS)} that the agent needs"),)
    return tuple(
        (findings.fail if right.is_needed else findings.warn)(f"may not {right}: {right.purpose}")
        for right in lacking
    )


def device_plugin(pods: Pods) -> Sequence[findings.Found]:
    """Tell whether the device plugin serves this node."""
    plugins = [
        pod for pod in pods.needed() if clients.is_device_plugin(pod) and not pod.is_finished
    ]
    if not plugins:
        return (findings.fail("no device plugin on this node"),)
    return tuple(
        findings.ok(f"{pod.key} is ready")
        if pod.is_ready and not pod.is_terminating
        else findings.fail(f"{pod.key} is not ready ({pod.phase})")
        for pod in plugins
    )


def interrupted_run(node: Node) -> Sequence[findings.Found]:
    """Tell what a run has taken and not given back."""
    view = node.needed()
    taken = [f"{key} is paused" for key, v in view.labels.items() if v == cluster.PAUSED_VALUE]
    if cluster.JOURNAL_ANNOTATION in view.annotations:
        taken.append("there is a journal")
    if cluster.CORDON_ANNOTATION in view.annotations:
        taken.append("an older version of the agent cordoned the node")
    if cluster.HOLD_TAINT in view.taint_keys:
        taken.append(f"the node has the taint {cluster.HOLD_TAINT}")
    found = []
    if taken and view.labels.get(cluster.STATE_LABEL) in _UNDER_WAY:
        found.append(findings.warn(f"a run is under way, or was killed: {', '.join(taken)}"))
    elif taken:
        found.append(findings.fail(f"no run is under way, and {', '.join(taken)}"))
    if cluster.UNREADABLE_JOURNAL_ANNOTATION in view.annotations:
        found.append(
            findings.warn(
                f"a journal that makes no sense is in {cluster.UNREADABLE_JOURNAL_ANNOTATION}",
                "Read it, and remove the annotation.",
            )
        )
    return found or [findings.ok("nothing is left to give back")]


def foreign_managers(pods: Pods, own_pod_uid: str | None) -> Sequence[findings.Found]:
    """Tell who else manages MIG here."""
    found = other_managers.managers(pods.needed(), own_pod_uid)
    return [findings.fail(name) for name in found] or [findings.ok("none on this node")]


def _object(right: rights.Right, node_name: str) -> str:
    """Return the one object that the agent does it to; empty: it asks for all of a kind."""
    is_one_node = right.resource == "nodes" and right.verb in ("get", "patch")
    return node_name if is_one_node else ""


def _is_ours(resource: str) -> bool:
    return resource.startswith(cluster.RESOURCE_PREFIX)
