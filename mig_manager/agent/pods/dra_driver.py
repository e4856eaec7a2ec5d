"""NVIDIA's DRA driver: its pods, and the ResourceSlices that list the GPUs' devices."""

from collections.abc import Iterable, Sequence

import structlog

from mig_manager import errors
from mig_manager.agent import attempts
from mig_manager.agent.pods import advertisers
from mig_manager.core import model
from mig_manager.core.node import claims, pod_object, strategies, well_known
from mig_manager.core.records import journals

_log = structlog.get_logger()


class DraDriver(advertisers.Advertiser):
    """Implements ``Advertiser`` for devices in ResourceSlices."""

    name = "DRA driver"
    deploy_label = claims.DEPLOY_LABEL

    def owns(self, pod: pod_object.Pod) -> bool:
        return claims.is_driver(pod)

    def was_paused(self, entries: journals.Journal) -> bool:
        return entries.has_dra_driver

    def withdraw(self, attempt: attempts.Attempt) -> None:
        """Delete the ResourceSlices, until a new driver publishes its own.

        Its start removes the taints of faulty devices. An Event keeps what they were.
        """
        slices = attempt.deps.slices.withdraw() if attempt.deps.slices is not None else ()
        if tainted := ", ".join(claims.tainted_devices(slices)):
            attempt.deps.node.emit(
                reason="DeviceTaintsCleared",
                message=f"the restart of the DRA driver clears the taints of {tainted}. "
                "Check the GPU: it may still be faulty.",
                is_warning=True,
            )

    def missing(
        self,
        attempt: attempts.Attempt,
        gpus: model.ObservedGpus,
        pods: pod_object.Pods,
        changed: frozenset[str],
    ) -> errors.NotReadyError | None:
        """Return how the slices differ from the GPUs; None also if they cannot be listed."""
        slices = attempt.deps.slices.list() if attempt.deps.slices else None
        if slices is None:
            _log.warning("resource_slices_not_verified")
            return None
        return advertisers.not_allocatable(claims.why_not_advertised(gpus, slices))

    def is_stale(self, attempt: attempts.Attempt, gpus: model.ObservedGpus) -> bool:
        return self.missing(attempt, gpus, (), frozenset()) is not None

    def destroyed_devices(
        self, shared: attempts.Shared, gpus: model.ObservedGpus, pods: pod_object.Pods
    ) -> frozenset[str]:
        """Return the devices of the slices that no GPU has; none if they cannot be listed."""
        slices = shared.deps.slices.list() if shared.deps.slices else None
        return claims.destroyed_devices(gpus, slices or ())

    def why_refused(
        self,
        attempt: attempts.Attempt,
        layouts: Sequence[strategies.GpuLayout],
        pods: pod_object.Pods,
    ) -> str:
        why = claims.why_not_served(layouts)
        if why and (self.is_awaited(attempt) or _is_deployed(attempt, pods)):
            return f"the DRA driver would not start: {why}"
        return ""

    def is_expected(self, attempt: attempts.Attempt, pods: Iterable[pod_object.Pod]) -> bool:
        """Return whether it belongs on the node, even without a pod now.

        A device allocated by a ResourceClaim proves it: only a driver allocates those.
        """
        is_used = any(pod.claimed_ids for pod in pods)
        return is_used or self.is_awaited(attempt) or _is_deployed(attempt, pods)

    def current_uids(
        self, attempt: attempts.Attempt, gpus: model.ObservedGpus, pods: Iterable[pod_object.Pod]
    ) -> frozenset[str]:
        """Return the UIDs of its pods, if one is ready and the slices match."""
        slices = attempt.deps.slices.list() if has_ready(pods) and attempt.deps.slices else None
        if slices is None or claims.why_not_advertised(gpus, slices):
            return frozenset()
        return frozenset(p.uid for p in pods if self.owns(p) and not p.is_terminating)


def has_ready(pods: Iterable[pod_object.Pod]) -> bool:
    """Return whether a DRA driver pod is ready; without one, no pod with a claim can end."""
    return advertisers.is_any_ready(filter(claims.is_driver, pods))


def remedy_if_kept_away(attempt: attempts.Attempt) -> str:
    """Return the remedy if another program's label keeps it away; empty: none does."""
    value = attempt.node_labels.get(claims.DEPLOY_LABEL)
    if value is None or well_known.is_deployed(value):
        return ""
    return (
        f"Set label {claims.DEPLOY_LABEL} to true: {value!r} keeps the DRA driver away, and "
        "without it pods with ResourceClaims cannot end."
    )


def _is_deployed(attempt: attempts.Attempt, pods: Iterable[pod_object.Pod]) -> bool:
    """Return whether it has a pod, or its deploy label is true or was before a pause."""
    if any(map(claims.is_driver, pods)):
        return True
    return well_known.is_deployed(attempt.node_labels.get(claims.DEPLOY_LABEL))
