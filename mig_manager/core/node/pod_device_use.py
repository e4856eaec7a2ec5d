"""The devices that one pod uses or may use: listed by kubelet, claimed, or requested."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Self

from mig_manager.core.node.devices import device_ids, resources
from mig_manager.core.objects import pod_object, well_known


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PodDeviceUse:
    """The devices of a pod, as far as kubelet and the API show them."""

    pod: pod_object.Pod
    listed_ids: frozenset[str]  # that kubelet lists, also of other device plugins
    claimed_ids: frozenset[str]  # of its ResourceClaims, if they are known
    unknown_ids: frozenset[str]
    """Those of NVIDIA's that no GPU has: another program destroyed the instance, or the DRA
    driver's ResourceSlices are stale."""
    claim_drivers: frozenset[str]  # the drivers of its ResourceClaims, as kubelet lists them
    plugin_resources: frozenset[str]
    """The ``nvidia.com/*`` resources of a device plugin that it uses or will use."""

    @classmethod
    def of(
        cls,
        pod: pod_object.Pod,
        listed: pod_object.PodDevices | None,
        known_ids: frozenset[str] | None,
    ) -> Self:
        """Return the devices of a pod.

        Args:
            pod: The pod.
            listed: What kubelet lists for the pod; None: nothing.
            known_ids: The devices of the GPUs, as from ``device_ids.of_gpus``.
        """
        listed_ids = listed.device_ids if listed else frozenset[str]()
        claimed_ids = pod.claimed_ids or frozenset[str]()
        return cls(
            pod=pod,
            listed_ids=listed_ids,
            claimed_ids=claimed_ids,
            unknown_ids=frozenset(
                each for each in listed_ids | claimed_ids if device_ids.is_unknown(each, known_ids)
            ),
            claim_drivers=listed.claim_drivers if listed else frozenset(),
            plugin_resources=frozenset(
                pod.gpu_resources.keys() - pod.claimed_resources - pod.completed_resources
            ),
        )

    @property
    def ids(self) -> frozenset[str]:
        """The devices that it is known to have, by kubelet or by a claim."""
        return self.listed_ids | self.claimed_ids

    @property
    def _listed_uuids(self) -> frozenset[str]:
        """The listed devices of NVIDIA's plugin; a plugin for network cards has other ids."""
        return frozenset(filter(device_ids.DEVICE_UUID.fullmatch, self.listed_ids))

    @property
    def _may_claim_gpu(self) -> bool:
        """Whether it has ResourceClaims for unknown devices that may be GPUs."""
        if self.pod.claimed_ids is not None:
            return False
        # Kubelet does not list the claims of ordinary init containers (PodResources v1).
        if self.claim_drivers and not self.pod.has_claim_init:
            return well_known.GPU_CLAIM_DRIVER in self.claim_drivers
        return self.pod.has_claims

    def may_be_listed(self, *, is_incomplete: bool) -> bool:
        """Return whether kubelet may list devices of it later, and lists none now.

        ``is_incomplete``: kubelet's answer does not show which pods have which devices.
        """
        is_starting = not (self.pod.has_gpu_init or self.pod.is_terminating)
        return not (self.listed_ids or self.claim_drivers) and (is_starting or is_incomplete)

    def may_use(self, affected: Collection[str] | None, resource_names: Mapping[str, str]) -> bool:
        """Return whether it has, or may have, one of the devices of known GPUs.

        Args:
            affected: Ids of the devices; None: any GPU.
            resource_names: The resource of each device by its id; a missing one may have any.
        """
        requested = set(filter(resources.is_device_or_shared, self.plugin_resources))
        if self._may_claim_gpu:
            return True
        if affected is None:
            return bool(self.claimed_ids or self._listed_uuids or requested)
        if not self.ids.isdisjoint(affected):
            return True
        if not requested:
            return False
        if self.listed_ids and not self.pod.has_gpu_init:
            return not self._listed_uuids
        # A resource with the name of a MIG profile has devices of this profile only: NVIDIA's
        # plugin ignores other names (k8s-device-plugin, ``DisableResourceNamingInConfig``).
        names = {*map(resources.base, requested)}
        return not all(map(resources.profile_of, names)) or any(
            resource_names.get(each) in {None, *names} for each in affected
        )

    def why_uncertain(self, *, is_kubelet_silent: bool) -> str:
        """Return why it may use none of the devices that it may use; empty if it does use one."""
        if self._may_claim_gpu:
            return "its ResourceClaim may stand for any GPU"
        if self.unknown_ids:
            return "no GPU has its device, so it may use any"
        if self.claimed_ids and not self.plugin_resources:
            return ""
        if not self.listed_ids:
            return (
                "kubelet does not answer"
                if is_kubelet_silent
                else "kubelet lists no device of it yet"
            )
        if self.pod.has_gpu_init:
            return "kubelet does not list the devices of its init container"
        return "" if self._listed_uuids else "its device ids are not UUIDs"
