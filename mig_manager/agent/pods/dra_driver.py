"""NVIDIA's DRA driver: its pods, and the ResourceSlices that list the GPUs' devices."""

from collections.abc import Callable, Iterable, Sequence

import structlog

from mig_manager import errors
from mig_manager.agent.pods import advertisers
from mig_manager.core import model, ports
from mig_manager.core.node import claims, node_object, pod_object, resources, well_known

_log = structlog.get_logger()

_Pods = tuple[pod_object.Pod, ...]


def has_ready(pods: Iterable[pod_object.Pod]) -> bool:
    """Return whether a DRA driver pod is ready; without one, no pod with a claim can end."""
    return advertisers.is_any_ready(filter(claims.is_driver, pods))


class DraDriver:
    """Implements ``advertisers.Advertiser`` for devices in ResourceSlices."""

    kind = advertisers.DRIVER

    def __init__(self, deps: ports.Dependencies) -> None:
        self._deps = deps

    def withdraw(self) -> None:
        """Delete the ResourceSlices, until a new driver publishes its own.

        Its start removes the taints of faulty devices. An Event keeps what they were.
        """
        slices = self._deps.slices.withdraw() if self._deps.slices is not None else ()
        if tainted := ", ".join(claims.tainted(slices)):
            self._deps.node.emit(
                reason="DeviceTaintsCleared",
                message=f"the restart of the DRA driver clears the taints of {tainted}. "
                "Check the GPU: it may still be faulty.",
                is_warning=True,
            )

    def missing(
        self, gpus: Sequence[model.Gpu], pods: _Pods, changed: frozenset[str]
    ) -> errors.NotReadyError | None:
        """Return how the slices differ from the GPUs."""
        return advertisers.not_allocatable(self._why_not_in_slices(gpus))

    def is_stale(self, gpus: Sequence[model.Gpu]) -> bool:
        """Check whether a ready driver advertises outdated devices."""
        return bool(self._why_not_in_slices(gpus))

    def why_refused(
        self,
        layouts: Sequence[resources.GpuLayout],
        pods: _Pods,
        read_node: Callable[[], node_object.NodeView],
        *,
        is_expected: bool,
    ) -> str:
        """Return why it would exit with the new devices; empty if it would not, or if unknown."""
        why = claims.why_not_served(layouts)
        if why and (is_expected or self.is_deployed(pods, read_node)):
            return f"the DRA driver would not start: {why}"
        return ""

    def is_deployed(
        self, pods: Iterable[pod_object.Pod], read_node: Callable[[], node_object.NodeView]
    ) -> bool:
        """Check whether it has a pod, or a label deploys it or did so before it was paused."""
        if any(map(self.kind.owns, pods)):
            return True
        label = read_node().labels.get(self.kind.deploy_label)
        return label in ("true", well_known.PAUSED_VALUE)

    def current(self, gpus: Sequence[model.Gpu], pods: _Pods) -> frozenset[str]:
        """Return the UIDs of its pods, if one is ready and the slices match."""
        slices = self._deps.slices.list() if has_ready(pods) and self._deps.slices else None
        if slices is None or claims.why_not_advertised(gpus, slices):
            return frozenset()
        return frozenset(p.uid for p in pods if self.kind.owns(p) and not p.is_terminating)

    def _why_not_in_slices(self, gpus: Sequence[model.Gpu]) -> str:
        """Return why the ResourceSlices do not match; also empty if they cannot be listed."""
        slices = self._deps.slices.list() if self._deps.slices else None
        if slices is None:
            _log.warning("resource_slices_not_verified")
            return ""
        return claims.why_not_advertised(gpus, slices)
