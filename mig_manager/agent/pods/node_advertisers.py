"""The advertisers of a node: which of them serve it, must do so again, or are restarted.

Every function with ports or an attempt raises ClusterError if the API refuses or does not answer.
"""

from collections.abc import Iterable, Mapping

from mig_manager.agent import attempts, run_recorder
from mig_manager.agent.pods import device_advertiser, device_plugin, dra_driver
from mig_manager.core import model, ports
from mig_manager.core.node.daemons import clients
from mig_manager.core.node.devices import resources
from mig_manager.core.objects import node_object, pod_object, well_known

PLUGIN = device_plugin.DevicePlugin()
DRIVER = dra_driver.DraDriver()
ALL: tuple[device_advertiser.Advertiser, ...] = (PLUGIN, DRIVER)
DEPLOY_LABELS = tuple(advertiser.deploy_label for advertiser in ALL)

Advertisers = frozenset[device_advertiser.Advertiser]


def is_advertiser(pod: pod_object.Pod) -> bool:
    """Return whether a pod is the device plugin or the DRA driver."""
    return any(advertiser.owns(pod) for advertiser in ALL)


def of_pods(pods: Iterable[pod_object.Pod]) -> Advertisers:
    """Return the advertisers that these pods run."""
    return frozenset(advertiser for pod in pods for advertiser in ALL if advertiser.owns(pod))


def labels_to_await(pods: Iterable[pod_object.Pod]) -> frozenset[str]:
    """Return the deploy labels of the advertisers that run here without one."""
    ungated = (pod for pod in pods if not clients.gated_by((pod,), DEPLOY_LABELS))
    return frozenset(advertiser.deploy_label for advertiser in of_pods(ungated))


def uids(pods: Iterable[pod_object.Pod]) -> frozenset[str]:
    """Return the UIDs of the device plugin and DRA driver pods."""
    return frozenset(pod.uid for pod in pods if is_advertiser(pod))


def find_awaited(attempt: attempts.Attempt) -> Advertisers:
    """Return the advertisers that must serve the node again, even without a pod now."""
    view = attempt.deps.node.latest()
    advertisers = _list_awaited(attempt.recorder, view.labels)
    return _with_replaced(attempt.deps, advertisers, view)


def find_resumed(recorder: run_recorder.RunRecorder, labels: Mapping[str, str]) -> Advertisers:
    """Return the advertisers that were paused for a change, and may run again."""
    entries = recorder.journal.node
    if entries.has_reconfiguring_taint:
        # It keeps the new pods of those without a deploy label away.
        return frozenset()
    return frozenset(
        advertiser
        for advertiser in _list_awaited(recorder, labels)
        if advertiser.deploy_label in entries.advertisers
        and advertiser.deploy_label not in entries.paused_labels
    )


def remove_phantoms_and_find(
    attempt: attempts.Attempt, pods: pod_object.Pods, gpus: model.ObservedGpus
) -> Advertisers:
    """Return the advertisers that serve the node, or must do so again.

    Phantom devices are removed from the node first: they look like a lost plugin's devices.
    """
    view, _ = device_plugin.remove_phantoms(attempt, gpus, pods)
    # Any other value is another program's decision to keep it away, not a failure.
    deployed = frozenset(
        advertiser
        for advertiser in ALL
        if well_known.is_deployed(view.labels.get(advertiser.deploy_label))
    )
    advertisers = of_pods(pods) | deployed | _list_awaited(attempt.recorder, view.labels)
    return _with_replaced(attempt.deps, advertisers, view)


def _list_awaited(recorder: run_recorder.RunRecorder, labels: Mapping[str, str]) -> Advertisers:
    return frozenset(advertiser for advertiser in ALL if advertiser.is_awaited(recorder, labels))


def _with_replaced(
    deps: ports.Dependencies, advertisers: Advertisers, view: node_object.NodeView
) -> Advertisers:
    """Add a device plugin or DRA driver whose pod is being replaced."""
    if PLUGIN not in advertisers and device_plugin.is_being_replaced(deps, view):
        advertisers |= {PLUGIN}
    # Where a plugin serves the node, no request goes to an API that the cluster may lack.
    is_served = bool(advertisers) or any(resources.devices_of(view.capacity).values())
    if not is_served and dra_driver.is_being_replaced(deps, view.labels):
        advertisers |= {DRIVER}
    return advertisers


def restart_pods(
    deps: ports.Dependencies,
    advertiser: device_advertiser.Advertiser,
    pods: Iterable[pod_object.Pod],
) -> pod_object.Pods:
    """Delete an advertiser's pods, and hide its devices until new pods advertise theirs.

    Kubelet reports only after up to 10 s that a plugin has ended. Pods that are bound until then
    fail, or never start. Returns the advertiser's pods.
    """
    owned = tuple(filter(advertiser.owns, pods))
    delete(deps.workloads, owned)
    if owned:
        advertiser.hide_devices(deps)
    return owned


def delete(workloads: ports.Workloads, pods: Iterable[pod_object.Pod]) -> None:
    """Delete the pods that are not terminating already, so that new ones start."""
    for pod in pods:
        if not pod.is_terminating:
            workloads.delete(pod)
