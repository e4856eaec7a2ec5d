"""Extended resources for simulated GPUs, which no device plugin advertises.

On a node without GPUs a device plugin finds nothing, so the agent advertises the devices itself.
Kubelet keeps resources that it did not create, and a pod that requests them starts without a
device.
"""

from collections.abc import Mapping, Sequence

import structlog

from mig_manager import errors
from mig_manager.adapters.kubernetes import api, node
from mig_manager.core import model, ports, steps
from mig_manager.core.node import cluster, resources

_log = structlog.get_logger()


class AdvertisingGpus:
    """Implements ``ports.Gpus`` over another, and advertises what it observes.

    The pipeline observes after each change, so the node always advertises what the GPUs have. An
    API failure is logged and does not fail the change; the next observation tries again.
    """

    def __init__(self, gpus: ports.Gpus, node_resources: "NodeResources") -> None:
        self._gpus = gpus
        self._resources = node_resources
        self._advertised: dict[str, int] | None = None
        self._observed = model.NO_GPUS
        """All GPUs as last observed."""

    def observe(self) -> model.ObservedGpus:
        """Return every GPU, and advertise them.

        Raises:
            HardwareError: From the wrapped port.
        """
        gpus = self._observed = self._gpus.observe()
        self._advertise()
        return gpus

    def execute(self, plan: steps.Plan, seen: Sequence[model.Gpu] = ()) -> model.ObservedGpus:
        """Run the steps of every GPU, and advertise the result.

        Raises:
            HardwareError: From the wrapped port.
        """
        changed = self._gpus.execute(plan, seen)
        self._observed = self._observed.updated(changed)
        self._advertise()
        return changed

    def start(self) -> None:
        """Advertise the present devices before any layout is requested."""
        try:
            self.observe()
        except errors.HardwareError as error:
            _log.warning("gpus_not_advertised", reason=error.reason.value, error=error.message)

    def _advertise(self) -> None:
        counts = resources.counts(self._observed)
        if counts == self._advertised:
            return
        try:
            self._resources.publish(counts)
        except errors.ClusterError as error:
            self._advertised = None
            _log.warning("gpus_not_advertised", reason=error.reason.value, error=error.message)
        else:
            self._advertised = counts
            _log.info("gpus_advertised", resources=counts)


class NodeResources:
    """The GPU resources in our Node's status; needs the right to patch ``nodes/status``."""

    def __init__(self, kube: api.KubeApi, *, name: str) -> None:
        self._kube = kube
        self._path = node.path(name)

    def publish(self, counts: Mapping[str, int]) -> None:
        """Advertise these devices and no others.

        A resource that is gone becomes 0, as with kubelet: a kubelet that still knows it would
        undo its removal.

        Raises:
            ClusterError: The API refused or does not answer.
        """
        status = self._kube.get(self._path).get("status") or {}
        change: dict[str, dict[str, str]] = {}
        # Kubelet derives allocatable from capacity, but only with its next heartbeat.
        for field in ("capacity", "allocatable"):
            with cluster.understood("the node"):
                current = cluster.gpu_resources(status.get(field))
            desired = {name: 0 for name in current if resources.is_device(name)} | dict(counts)
            change[field] = {
                name: str(count) for name, count in desired.items() if current.get(name) != count
            }
        if any(change.values()):
            self._kube.patch(f"{self._path}/status", {"status": change}, kind=api.PatchType.MERGE)
