"""Checks of this node in the cluster, and of kubelet."""

from collections.abc import Mapping, Sequence

from mig_manager.adapters.kubernetes import api
from mig_manager.cli.doctor import checks
from mig_manager.core import model
from mig_manager.core.node import clients, cluster, resources

Api = checks.Once[api.KubeApi]
Node = checks.Once[cluster.NodeView]
Pods = checks.Once[tuple[cluster.Pod, ...]]
Allocatable = checks.Once[Mapping[str, frozenset[str]]]

_IN_PROGRESS = (model.State.PENDING.value, model.State.REBOOTING.value)


def pod_resources(allocatable: Allocatable) -> Sequence[checks.Found]:
    """List the devices that kubelet can schedule."""
    counts = [
        f"{len(ids)} {name}" for name, ids in sorted(allocatable.get().items()) if _is_ours(name)
    ]
    return (checks.ok(f"kubelet can schedule {', '.join(counts) or 'no NVIDIA device'}"),)


def schedulable_devices(
    allocatable: Allocatable, gpus: checks.Once[model.ObservedGpus], node: Node
) -> Sequence[checks.Found]:
    """Check that kubelet can schedule the devices of the GPUs."""
    schedulable = allocatable.needed()
    seen = gpus.needed()
    view = node.if_known()
    # Without the node, kubelet's devices are counted instead.
    counts = {name: len(ids) for name, ids in schedulable.items() if _is_ours(name)}
    devices = resources.NodeDevices.of(view) if view else resources.NodeDevices(allocatable=counts)
    why_not = resources.why_not_schedulable(seen, schedulable, devices)
    return (checks.fail(why_not) if why_not else checks.ok("all devices and no others"),)


def connection(kube: Api, node: Node, node_name: str) -> Sequence[checks.Found]:
    """Check that the API answers."""
    connected = kube.get()
    if not node_name:
        connected.is_allowed(cluster.RIGHTS[0])
        return (checks.ok("the API answers; the node is not checked without --node-name"),)
    view = node.get()
    label = view.labels.get(cluster.CONFIG_LABEL)
    state = view.labels.get(cluster.STATE_LABEL)
    request = f"{cluster.CONFIG_LABEL} is {label!r}" if label else f"no {cluster.CONFIG_LABEL}"
    return (checks.ok(f"node {view.name}: {request}, state {state or 'unknown'}"),)


def own_rights(kube: Api, node_name: str) -> Sequence[checks.Found]:
    """Check the rights of the agent with these credentials."""
    connected = kube.needed()
    lacking = [
        right
        for right in cluster.RIGHTS
        if not connected.is_allowed(right, name=_object(right, node_name))
    ]
    if not lacking:
        return (checks.ok(f"all {len(cluster.RIGHTS)} that the agent needs"),)
    return tuple(
        (checks.fail if right.is_needed else checks.warn)(f"may not {right}: {right.purpose}")
        for right in lacking
    )


def device_plugin(pods: Pods) -> Sequence[checks.Found]:
    """Check the device plugin of this node."""
    plugins = [
        pod for pod in pods.needed() if clients.is_device_plugin(pod) and not pod.is_finished
    ]
    if not plugins:
        return (checks.fail("no device plugin on this node"),)
    return tuple(
        checks.ok(f"{pod.key} is ready")
        if pod.is_ready and not pod.is_terminating
        else checks.fail(f"{pod.key} is not ready ({pod.phase})")
        for pod in plugins
    )


def interrupted_run(node: Node) -> Sequence[checks.Found]:
    """Check whether a run was interrupted."""
    view = node.needed()
    taken = [f"{key} is paused" for key, v in view.labels.items() if v == cluster.PAUSED_VALUE]
    if cluster.JOURNAL_ANNOTATION in view.annotations:
        taken.append("there is a journal")
    if cluster.CORDON_ANNOTATION in view.annotations:
        taken.append("an older version of the agent cordoned the node")
    if cluster.HOLD_TAINT in view.taint_keys:
        taken.append(f"the node has the taint {cluster.HOLD_TAINT}")
    found = []
    if taken and view.labels.get(cluster.STATE_LABEL) in _IN_PROGRESS:
        found.append(checks.warn(f"a run is in progress, or was killed: {', '.join(taken)}"))
    elif taken:
        found.append(checks.fail(f"no run is in progress, and {', '.join(taken)}"))
    if cluster.UNREADABLE_JOURNAL_ANNOTATION in view.annotations:
        found.append(
            checks.warn(
                f"an unreadable journal is in {cluster.UNREADABLE_JOURNAL_ANNOTATION}",
                "Read it, and remove the annotation.",
            )
        )
    return found or [checks.ok("nothing is left of a run")]


def managers(pods: Pods, own_pod_uid: str | None) -> Sequence[checks.Found]:
    """Check for other MIG managers."""
    found = clients.other_managers(pods.needed(), own_pod_uid)
    return [checks.fail(name) for name in found] or [checks.ok("none on this node")]


def _object(right: cluster.Right, node_name: str) -> str:
    """Return the name of the only object that the right is about; empty: all of the kind."""
    is_one_node = right.resource == "nodes" and right.verb in ("get", "patch")
    return node_name if is_one_node else ""


def _is_ours(resource: str) -> bool:
    return resource.startswith(cluster.RESOURCE_PREFIX)


CHECKS = (
    checks.Check(
        "pod-resources",
        "Kubelet answers on its PodResources socket which pod uses which device.",
        "Mount kubelet's pod-resources folder, or name the socket (--pod-resources-socket).",
        lambda facts: pod_resources(facts.allocatable),
    ),
    checks.Check(
        "schedulable-devices",
        "Kubelet can schedule exactly the devices of the GPUs.",
        "Read the device plugin's log, and restart its pod.",
        lambda facts: schedulable_devices(facts.allocatable, facts.gpus, facts.node),
    ),
    checks.Check(
        "api",
        "The Kubernetes API accepts our credentials and has the node.",
        "Check --kubeconfig, --node-name and the connection to the API.",
        lambda facts: connection(facts.kube, facts.node, facts.settings.node_name),
    ),
    checks.Check(
        "rights",
        "The credentials have every right that the agent needs.",
        "Grant the agent's ServiceAccount the rules in deploy/base/rbac.yaml.",
        lambda facts: own_rights(facts.kube, facts.settings.node_name),
    ),
    checks.Check(
        "device-plugin",
        "NVIDIA's device plugin runs on this node and is ready.",
        "Deploy the device plugin, or check its pod on this node.",
        lambda facts: device_plugin(facts.pods),
    ),
    checks.Check(
        "interrupted-run",
        "No change was interrupted: nothing is paused, tainted or in the journal.",
        "Start the agent on this node: it resumes or rolls back the change.",
        lambda facts: interrupted_run(facts.node),
    ),
    checks.Check(
        "other-managers",
        "No other program manages MIG on this node.",
        "Use one manager for this node's GPUs: remove the other.",
        lambda facts: managers(facts.pods, facts.own_pod_uid),
    ),
)
"""In the order of the report."""
