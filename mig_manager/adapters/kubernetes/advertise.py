"""Extended resources for simulated GPUs, which no device plugin offers.

On a node without GPUs there is nothing that a device plugin could look at, so the agent itself
tells the scheduler what a plugin would have told. Kubelet keeps resources that it has not made,
and a pod that asks for them starts without getting a device.
"""

from collections.abc import Mapping, Sequence

import structlog

from mig_manager import errors
from mig_manager.adapters.kubernetes import api, node
from mig_manager.core import model, ports, steps
from mig_manager.core.node import cluster, resources

_log = structlog.get_logger()


class NodeResources:
    """The GPU resources in our Node's status; needs the right to patch ``nodes/status``."""

    def __init__(self, kube: api.KubeApi, *, name: str) -> None:
        self._kube = kube
        self._path = node.path(name)

    def publish(self, counts: Mapping[str, int]) -> None:
        """Have the node offer these devices and no other.

        A resource that is gone becomes 0, as with kubelet: to remove it would be undone by a
        kubelet that still knows it.

        Raises:
            ClusterError: The API refused or does not answer.
        """
        status = self._kube.get(self._path).get("status") or {}
        wanted: dict[str, dict[str, str]] = {}
        # Kubelet derives allocatable from capacity, but only with its next heartbeat.
        for field in ("capacity", "allocatable"):
            with cluster.understood("the node"):
                known = cluster.gpu_resources(status.get(field))
            offered = {name: 0 for name in known if resources.is_device(name)} | dict(counts)
            wanted[field] = {
                name: str(count) for name, count in offered.items() if known.get(name) != count
            }
        if any(wanted.values()):
            self._kube.patch(f"{self._path}/status", {"status": wanted}, kind=api.PatchType.MERGE)


class AdvertisingGpus:
    """Implements ``ports.Gpus`` over another: what is observed is advertised as well.

    The pipeline observes after each change, and so the node always offers what the GPUs have. An
    API that fails costs a line in the log and not the change of the GPUs; the next look at them
    tries again.
    """

    def __init__(self, gpus: ports.Gpus, offer: NodeResources) -> None:
        self._gpus = gpus
        self._offer = offer
        self._offered: dict[str, int] | None = None
        self._seen = model.NO_GPUS
        """All GPUs as last observed."""

    def observe(self) -> model.ObservedGpus:
        """Return every GPU, and see to it that the node offers them.

        Raises:
            HardwareError: As the GPUs beneath.
        """
        gpus = self._gpus.observe()
        self._seen = gpus
        self._tell()
        return gpus

    def execute(self, plan: steps.Plan, seen: Sequence[model.Gpu] = ()) -> model.ObservedGpus:
        """Run the steps of every GPU, and see to it that the node offers what came of them.

        Raises:
            HardwareError: As the GPUs beneath.
        """
        changed = self._gpus.execute(plan, seen)
        self._seen = self._seen.updated(changed)
        self._tell()
        return changed

    def start(self) -> None:
        """Advertise what there is before anybody has asked for a layout."""
        try:
            self.observe()
        except errors.HardwareError as error:
            _log.warning("gpus_not_advertised", reason=error.reason.value, error=error.message)

    def _tell(self) -> None:
        counts = resources.counts(self._seen)
        if counts != self._offered:
            self._advertise(counts)

    def _advertise(self, counts: dict[str, int]) -> None:
        try:
            self._offer.publish(counts)
        except errors.ClusterError as error:
            self._offered = None
            _log.warning("gpus_not_advertised", reason=error.reason.value, error=error.message)
        else:
            self._offered = counts
            _log.info("gpus_advertised", resources=counts)
