"""NVIDIA's DRA driver: its pods, and the ResourceSlices that list the GPUs' devices."""

from collections.abc import Collection, Iterable, Mapping, Sequence

import structlog

from mig_manager import errors
from mig_manager.agent import attempts, node_context
from mig_manager.agent.pods import device_advertiser
from mig_manager.core import model, ports
from mig_manager.core.node.devices import claims, strategies
from mig_manager.core.objects import pod_object, well_known

_log = structlog.get_logger()


class DraDriver(device_advertiser.Advertiser):
    """Implements ``Advertiser`` for devices in ResourceSlices."""

    name = "DRA driver"
    deploy_label = claims.DEPLOY_LABEL

    def owns(self, pod: pod_object.Pod) -> bool:
        return claims.is_driver(pod)

    def hide_devices(self, deps: ports.Dependencies) -> None:
        """Delete the ResourceSlices, until a new driver publishes its own.

        Its start removes the taints of faulty devices. An Event keeps what they were.
        """
        if tainted := ", ".join(claims.tainted_devices(deps.slices.delete())):
            deps.node.emit(
                reason="DeviceTaintsCleared",
                message=f"the restart of the DRA driver clears the taints of {tainted}. "
                "Check the GPU: it may still be faulty.",
                is_warning=True,
            )

    def correct_and_compare(
        self,
        context: node_context.NodeContext,
        gpus: model.ObservedGpus,
        pods: pod_object.Pods,
        changed: frozenset[str],
    ) -> errors.NotReadyError | None:
        """Return how the slices differ from the GPUs; None also if they cannot be listed."""
        return device_advertiser.not_allocatable(_why_not_advertised(context.deps, gpus))

    def is_stale(self, deps: ports.Dependencies, gpus: model.ObservedGpus) -> bool:
        return bool(_why_not_advertised(deps, gpus))

    def destroyed_devices(
        self, deps: ports.Dependencies, gpus: model.ObservedGpus, pods: pod_object.Pods
    ) -> frozenset[str]:
        """Return the devices of the slices that no GPU has; none if they cannot be listed."""
        return claims.destroyed_devices(gpus, deps.slices.list() or ())

    def why_refused(
        self,
        attempt: attempts.Attempt,
        layouts: Sequence[strategies.GpuLayout],
        pods: pod_object.Pods,
    ) -> str:
        labels = attempt.node_labels
        why = claims.why_not_served(layouts)
        if why and (self.is_awaited(attempt.recorder, labels) or _is_deployed(labels, pods)):
            return f"the DRA driver would not start: {why}"
        return ""

    def is_expected(self, attempt: attempts.Attempt, pods: Collection[pod_object.Pod]) -> bool:
        """Return whether it belongs on the node, even without a pod now.

        A device allocated by a ResourceClaim proves it: only a driver allocates those.
        """
        labels = attempt.node_labels
        return (
            any(pod.claimed_ids for pod in pods)
            or self.is_awaited(attempt.recorder, labels)
            or _is_deployed(labels, pods)
            or is_being_replaced(attempt.deps, labels)
        )

    def current_uids(
        self, deps: ports.Dependencies, gpus: model.ObservedGpus, pods: Collection[pod_object.Pod]
    ) -> frozenset[str]:
        """Return the UIDs of its pods, if one is ready and the slices match."""
        slices = deps.slices.list() if has_ready(pods) else None
        if slices is None or claims.why_not_advertised(gpus, slices):
            return frozenset()
        return frozenset(p.uid for p in pods if self.owns(p) and not p.is_terminating)


def with_unbound(workloads: ports.Workloads, pods: pod_object.Pods) -> pod_object.Pods:
    """Return the pods, and those that are about to be bound with a device of the node.

    Without their device they would never start: the allocation of a claim does not change.
    """
    return (*pods, *workloads.unbound(pods))


def list_with_unbound(attempt: attempts.Attempt) -> pod_object.Pods:
    """List the node's pods; as ``with_unbound`` if a DRA driver serves the node.

    Raises:
        ClusterError: The API refused or does not answer.
    """
    workloads = attempt.deps.workloads
    pods = workloads.list()
    # The scheduler may have allocated devices until the driver was paused.
    was_paused = DraDriver.deploy_label in attempt.journal.node.advertisers
    has_driver = was_paused or any(map(claims.is_driver, pods))
    return with_unbound(workloads, pods) if has_driver else pods


def list_pods(workloads: ports.Workloads, before: Iterable[pod_object.Pod]) -> pod_object.Pods:
    """List the node's pods; as ``with_unbound`` if pods ``before`` were about to be bound."""
    pods = workloads.list()
    return with_unbound(workloads, pods) if any(pod.is_unbound for pod in before) else pods


def is_being_replaced(deps: ports.Dependencies, labels: Mapping[str, str]) -> bool:
    """Return whether a driver ran until recently: its DaemonSet may be replacing its pod.

    Kubelet keeps a stopped driver's slices for 30 s (``KubeSlices.delete``). A deploy label that
    keeps the driver away takes precedence.
    """
    return claims.DEPLOY_LABEL not in labels and bool(deps.slices.list())


def has_ready(pods: Iterable[pod_object.Pod]) -> bool:
    """Return whether a DRA driver pod is ready; without one, no pod with a claim can end."""
    return device_advertiser.is_any_ready(filter(claims.is_driver, pods))


def remedy_if_kept_away(labels: Mapping[str, str]) -> str:
    """Return the remedy if a label of another program keeps it away; empty: none does."""
    value = labels.get(claims.DEPLOY_LABEL)
    if value is None or well_known.is_deployed(value):
        return ""
    return (
        f"Set label {claims.DEPLOY_LABEL} to true: {value!r} keeps the DRA driver away, and "
        "without it pods with ResourceClaims cannot end."
    )


def _why_not_advertised(deps: ports.Dependencies, gpus: model.ObservedGpus) -> str:
    slices = deps.slices.list()
    if slices is None:
        _log.warning("resource_slices_not_verified")
        return ""
    return claims.why_not_advertised(gpus, slices)


def _is_deployed(labels: Mapping[str, str], pods: Iterable[pod_object.Pod]) -> bool:
    """Return whether it has a pod, or its deploy label is true or was before a pause."""
    if any(map(claims.is_driver, pods)):
        return True
    return well_known.is_deployed(labels.get(claims.DEPLOY_LABEL))
