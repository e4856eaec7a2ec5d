"""The port of kubelet."""

from collections.abc import Mapping
from typing import Protocol

from mig_manager.core.objects import pod_object


class DeviceAllocations(Protocol):
    """Kubelet's PodResources API.

    Each method raises KubeletError if kubelet does not answer.
    """

    def assigned_devices(self) -> tuple[pod_object.PodDevices, ...]:
        """Return the devices of each pod."""

    def allocatable(self) -> Mapping[str, frozenset[str]]:
        """Return the healthy device ids by resource name, in use or not.

        A replica of a shared device has an id of its own, with ``::`` and a number at the end.
        """
