"""The checks of ``doctor`` on kubelet and the cluster."""

import dataclasses
from collections.abc import Iterator, Mapping

from mig_manager import errors
from mig_manager.adapters.kubernetes import kube_node
from mig_manager.cli.doctor.doctor_facts import Check, Facts, SkippedError, adding_to
from mig_manager.cli.doctor.doctor_report import Finding, fail, ok, persistence_off, warn
from mig_manager.core.node import rights
from mig_manager.core.node.daemons import clients, mig_managers
from mig_manager.core.node.devices import claims, phantoms, schedulable, strategies
from mig_manager.core.objects import node_object, pod_object, well_known
from mig_manager.core.records import journals, run_status

_ACCOUNTS = "system:serviceaccount:"

CHECKS: list[Check] = []
_check = adding_to(CHECKS)


@_check(
    "pod-resources",
    "Mount kubelet's pod-resources folder, or name the socket (--pod-resources-socket).",
)
def _pod_resources(facts: Facts) -> Iterator[Finding]:
    """Kubelet's PodResources socket answers which pod uses which device."""
    devices = sorted(facts.allocatable.get().items())
    counts = [f"{len(ids)} {name}" for name, ids in devices if _is_nvidia(name)]
    yield ok(f"kubelet can schedule {', '.join(counts) or 'no NVIDIA device'}")


@_check("schedulable-devices", "Read the log of the device plugin or DRA driver; restart its pod.")
def _schedulable_devices(facts: Facts) -> Iterator[Finding]:
    """Kubelet, or the DRA driver's ResourceSlices, have exactly the devices of the GPUs."""
    advertisers = tuple(filter(_advertises, facts.pods.if_known() or ()))
    if any(map(claims.is_driver, advertisers)):
        yield from _published_devices(facts)
        if not any(map(clients.is_device_plugin, advertisers)):
            return
    allocatable = facts.allocatable.require()
    gpus = facts.gpus.require()
    # Without the Node, count kubelet's devices instead.
    counts = {name: len(ids) for name, ids in allocatable.items() if _is_nvidia(name)}
    view = facts.node.if_known() or node_object.NodeView(name="", allocatable=counts)
    advertised = _phantoms(facts, view)
    real = {name: count for name, count in view.allocatable.items() if name not in advertised}
    view = dataclasses.replace(view, allocatable=real)
    strategy = strategies.of_plugin(advertisers, {})
    problem = schedulable.why_not(gpus, allocatable, view, strategy=strategy)
    yield fail(problem) if problem else ok("all devices and no others")


@_check("phantom-devices", "Remove the resources from the node with this command.")
def _phantom_devices(facts: Facts) -> Iterator[Finding]:
    """Every GPU or MIG device that the node advertises exists."""
    view = facts.node.require()
    advertised = _phantoms(facts, view)
    if advertised:
        remedy = f"Run: {phantoms.remedy(view.name, advertised)}"
        yield fail(f"{phantoms.message(advertised)}; pods run without them", remedy)
    else:
        yield ok("every advertised device can exist")


def _phantoms(facts: Facts, view: node_object.NodeView) -> Mapping[str, int]:
    strategy = strategies.of_plugin(facts.pods.if_known() or (), view.labels)
    return phantoms.find(facts.gpus.require(), view, strategy, facts.allocatable.if_known)


def _published_devices(facts: Facts) -> Iterator[Finding]:
    slices = facts.slices.require()
    if slices is None:
        yield warn("the ResourceSlices of the DRA driver cannot be listed")
        return
    why_not = claims.why_not_advertised(facts.gpus.require(), slices)
    yield fail(why_not) if why_not else ok("the DRA driver has all devices and no others")
    if tainted := claims.tainted_devices(slices):
        yield warn(
            f"the DRA driver keeps pods from {', '.join(tainted)}",
            "Repair the GPU, then restart the driver's pod: only its start removes the taints.",
        )


def _is_nvidia(resource: str) -> bool:
    return resource.startswith(well_known.RESOURCE_PREFIX)


@_check("api", "Check --kubeconfig, --node-name and the connection to the API.")
def _api(facts: Facts) -> Iterator[Finding]:
    """The Kubernetes API accepts our credentials and has the node."""
    api = facts.kube.get()
    if not facts.settings.node_name:
        api.is_allowed(rights.RIGHTS[0])
        yield ok("the API answers; the node is not checked without --node-name")
        return
    try:
        view = facts.node.get()
    except errors.ClusterError as error:
        if not error.is_not_found:
            raise
        yield fail(error.message)
        return
    label, state = map(view.labels.get, (well_known.CONFIG_LABEL, well_known.STATE_LABEL))
    request = (
        f"{well_known.CONFIG_LABEL} is {label!r}" if label else f"no {well_known.CONFIG_LABEL}"
    )
    yield ok(f"node {view.name}: {request}, state {state or 'unknown'}")


@_check("rights", "Grant the agent's ServiceAccount the rules in deploy/base/rbac.yaml.")
def _rights(facts: Facts) -> Iterator[Finding]:
    """The credentials have every right that the agent needs."""
    api = facts.kube.require()
    is_complete = True
    for right in rights.RIGHTS:
        is_one_node = right.resource == "nodes" and right.verb in ("get", "patch")
        name = facts.settings.node_name if is_one_node else ""
        if not api.is_allowed(right, name=name):
            is_complete = False
            yield (fail if right.is_needed else warn)(f"may not {right}: {right.purpose}")
    if is_complete:
        whose = facts.settings.kubeconfig or "the pod's ServiceAccount"
        yield ok(f"{whose} has all {len(rights.RIGHTS)} rights that the agent needs")


@_check(
    "admission-policy",
    "Apply deploy/policy for this ServiceAccount; in another namespace with deploy/policy/user.",
)
def _admission_policy(facts: Facts) -> Iterator[Finding]:
    """An admission policy confines the agent's ServiceAccount to its own node."""
    api = facts.kube.require()
    view = facts.node.require()
    try:
        user = api.user()
    except errors.ClusterError as error:
        raise SkippedError(f"unknown user: {error.message}") from error
    if not user.startswith(_ACCOUNTS):
        raise SkippedError(f"it confines the agent's ServiceAccount, not the user {user}")
    # The policy refuses this label on every node: only people set it. A dry run changes nothing.
    change = {"metadata": {"labels": {well_known.PARTITIONING_LABEL: "probe"}}}
    try:
        api.patch(f"{kube_node.path(view.name)}?dryRun=All", change)
    except errors.ClusterError as error:
        if "AdmissionPolicy" not in error.message:
            raise
        yield ok(f"confines {user} to its own node")
    else:
        yield warn(f"no policy confines {user}: its token may change every node")


@_check("device-plugin", "Deploy the device plugin or DRA driver, or check its pod on this node.")
def _device_plugin(facts: Facts) -> Iterator[Finding]:
    """NVIDIA's device plugin or DRA driver runs on this node and is ready."""
    pods = facts.pods.require()
    plugins = [pod for pod in pods if _advertises(pod) and not pod.is_finished]
    if not plugins:
        yield fail("no device plugin and no DRA driver on this node")
    for pod in plugins:
        if pod.is_ready and not pod.is_terminating:
            yield ok(f"{pod.key} is ready")
        else:
            yield fail(f"{pod.key} is not ready ({pod.waiting or pod.phase})")


def _advertises(pod: pod_object.Pod) -> bool:
    return clients.is_device_plugin(pod) or claims.is_driver(pod)


@_check("interrupted-run", "Start the agent on this node: it resumes or rolls back the change.")
def _interrupted_run(facts: Facts) -> Iterator[Finding]:
    """No change was interrupted: no paused pod, no taint, no journal."""
    view = facts.node.require()
    traces = [f"{key} is paused" for key, v in view.labels.items() if well_known.is_paused(v)]
    text = view.annotations.get(well_known.JOURNAL_ANNOTATION)
    journal = journals.parse_or_none(text) if text else journals.NONE
    if journal is None or journal.remainder is journals.Remainder.CHANGE:
        traces.append("there is a journal")
    elif journal.remainder is journals.Remainder.PERSISTENCE:
        yield persistence_off(journal.gpus.persistent_gpus)
    if well_known.RECONFIGURING_TAINT in view.taint_keys:
        traces.append(f"the node has the taint {well_known.RECONFIGURING_TAINT}")
    is_unreadable = well_known.UNREADABLE_JOURNAL_ANNOTATION in view.annotations
    if traces and view.labels.get(well_known.STATE_LABEL) in run_status.UNDER_WAY:
        yield warn(f"a run is in progress, or was killed: {', '.join(traces)}")
    elif traces:
        yield fail(f"no run is in progress, but {', '.join(traces)}")
    elif not is_unreadable:
        yield ok("no interrupted run")
    if is_unreadable:
        yield warn(
            f"an unreadable journal is in {well_known.UNREADABLE_JOURNAL_ANNOTATION}",
            "Read it, and remove the annotation.",
        )


@_check("other-managers", "Use one manager for this node's GPUs: remove the other.")
def _other_managers(facts: Facts) -> Iterator[Finding]:
    """No other program manages MIG on this node."""
    pods = facts.pods.require()
    annotations = (
        facts.node.require().annotations if any(map(mig_managers.is_vgpu_plugin, pods)) else {}
    )
    managers = mig_managers.others(pods, facts.own_pod_uid, annotations)
    yield from map(fail, managers) if managers else [ok("none on this node")]
