"""Advertise simulated GPUs on a Node object, as kubelet does for a device plugin."""

from collections.abc import Mapping, Sequence

import structlog

from mig_manager import errors
from mig_manager.adapters.kubernetes import api, kube_node
from mig_manager.core import model, ports, steps
from mig_manager.core.node.devices import resources
from mig_manager.core.objects import api_values

_log = structlog.get_logger()


class AdvertisingGpus:
    """Implements ``ports.Gpus`` over another, and advertises the observed devices.

    For simulated GPUs, which no device plugin finds. Kubelet keeps resources that it did not
    create, and a pod that requests them starts without a device. The pipeline observes after every
    change, so the node always advertises the present devices. An API failure is logged and does
    not fail the change; the next observation retries.
    """

    def __init__(self, gpus: ports.Gpus, kube: api.KubeApi, *, name: str) -> None:
        self._gpus = gpus
        self._kube = kube
        self._name = name
        self._observed = model.NO_GPUS

    def observe(self) -> model.ObservedGpus:
        """Observe the GPUs and advertise their devices."""
        gpus = self._observed = self._gpus.observe()
        self._advertise()
        return gpus

    def execute(self, plan: steps.Plan, observed: Sequence[model.Gpu] = ()) -> model.ObservedGpus:
        """Execute a plan and advertise the changed devices."""
        changed = self._gpus.execute(plan, observed)
        self._observed = self._observed.with_newer(changed)
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
        try:
            if publish_resources(self._kube, self._name, counts):
                _log.info("gpus_advertised", resources=counts)
        except errors.ClusterError as error:
            _log.warning("gpus_not_advertised", reason=error.reason.value, error=error.message)


def publish_resources(kube: api.KubeApi, name: str, counts: Mapping[str, int]) -> bool:
    """Advertise exactly these devices of a node; needs the right to patch ``nodes/status``.

    A missing resource becomes 0, as with kubelet: a kubelet that still knows it would undo its
    removal.

    Returns:
        Whether the node advertised others before.

    Raises:
        ClusterError: The API refused or does not answer.
    """
    status = kube.get(kube_node.path(name)).get("status") or {}
    change: dict[str, dict[str, str]] = {}
    # Kubelet derives allocatable from capacity, but only with its next heartbeat.
    for field in ("capacity", "allocatable"):
        with api_values.as_cluster_error("the node"):
            current = api_values.gpu_resources(status.get(field))
        desired = {key: 0 for key in current if resources.is_device(key)} | dict(counts)
        change[field] = {
            key: str(count) for key, count in desired.items() if current.get(key) != count
        }
    is_changed = any(change.values())
    if is_changed:
        kube.patch(f"{kube_node.path(name)}/status", {"status": change})
    return is_changed
