"""ResourceClaims of pods and ResourceSlices of the DRA driver, on clusters that have them.

A request goes out only for a pod with a ResourceClaim, or on a node with the DRA driver. The
claims of pods that are not bound yet can only be found among all claims of the cluster.
"""

import collections
import contextlib
import dataclasses
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import structlog

from mig_manager import errors, reasons
from mig_manager.adapters import rest
from mig_manager.adapters.kubernetes import api
from mig_manager.core import timing
from mig_manager.core.node.devices import claims
from mig_manager.core.objects import api_values, pod_object, well_known

_VERSIONS = ("v1", "v1beta2", "v1beta1")
"""Versions of resource.k8s.io, newest first: of Kubernetes 1.34, 1.33 and 1.32."""
_FORBIDDEN_S = 300.0
"""How long a refusal to read claims stands: the right may be granted meanwhile."""

_log = structlog.get_logger()


class Claimant(NamedTuple):
    """A pod for which a ResourceClaim is reserved."""

    namespace: str
    name: str
    uid: str


class KubeSlices:
    """Implements ``ports.ResourceSlices`` on the Kubernetes API."""

    def __init__(self, kube: api.KubeApi, *, node_name: str) -> None:
        self._resources = _Resources(kube)
        self._query = {
            "fieldSelector": f"spec.driver={well_known.GPU_CLAIM_DRIVER},spec.nodeName={node_name}"
        }

    def list(self) -> tuple[claims.Slice, ...] | None:
        get = self._resources.get
        try:
            return tuple(rest.list_items(get, "resourceslices", self._query, claims.parse_slice))
        except errors.ClusterError as error:
            if not error.is_not_served:
                raise
            _log.info("resource_slices_not_listed", error=error.message)
            return None

    def delete(self) -> tuple[claims.Slice, ...]:
        # Kubelet deletes them 30 s after the driver stopped (``defaultWipingDelay`` in
        # k8s.io/kubernetes/pkg/kubelet/cm/dra). Until then, or until the new driver has published
        # its own, the scheduler allocates devices that are gone, and the claiming pods never
        # start.
        # A driver that is ending does not restore them: it waits 30 s (``defaultSyncDelay`` of
        # k8s.io/dynamic-resource-allocation/resourceslice).
        slices: tuple[claims.Slice, ...] = ()
        with _warn_on_error():
            slices = self.list() or ()
        for each in slices:
            with _warn_on_error():
                self._resources.delete(rest.api_path("resourceslices", each.name))
        return slices


class PodClaims:
    """Finds the devices of the ResourceClaims of pods.

    The allocation of a claim that a pod on a node uses does not change: it is read once. A pod
    that has not started may have a device from a stale slice. So its devices are looked up
    again until it has started.
    """

    def __init__(
        self,
        kube: api.KubeApi,
        *,
        node_name: str,
        clock: timing.Clock,
    ) -> None:
        self._resources = _Resources(kube)
        self._slices = KubeSlices(kube, node_name=node_name)
        self._node_name = node_name
        self._clock = clock
        self._allocated: dict[str, frozenset[claims.Device]] = {}
        """UID of a pod -> the devices that its claims were allocated."""
        self._devices: dict[str, frozenset[str]] = {}
        """UID of a pod -> the UUIDs of its devices."""
        self._final: frozenset[str] = frozenset()
        """UIDs of the pods whose devices were looked up after their start."""
        self._last_slices: tuple[claims.Slice, ...] = ()
        """The slices as last listed: kubelet deletes them 30 s after the driver stopped."""
        self._forbidden_s = -math.inf
        """When the API last refused to read a claim."""

    def resolve(self, pods: Iterable[pod_object.Pod]) -> pod_object.Pods:
        """Return pods with the devices of their claims, where all devices of a pod are known.

        Raises:
            ClusterError: The API failed. A missing right, claim or version is no error.
        """
        listed = tuple(pods)
        self._read(pod for pod in listed if not pod.is_finished)
        return self.from_cache(listed)

    def from_cache(self, pods: Iterable[pod_object.Pod]) -> pod_object.Pods:
        """Return the same from earlier answers, without a request."""
        return tuple(
            dataclasses.replace(pod, has_claims=bool(uuids), claimed_ids=uuids)
            if (uuids := self._devices.get(pod.uid)) is not None
            else pod
            for pod in pods
        )

    def reservations(self, bound: Collection[str]) -> Mapping[Claimant, frozenset[str] | None]:
        """Return the UUIDs of our node's devices that pods have by claims; None if one is unknown.

        The pods with the UIDs ``bound`` are left out.

        Raises:
            ClusterError: The API failed. A missing right or version is no error.
        """
        slices = self._list_slices() or self._last_slices
        # After a kill in mid-change there may be no slices, but claims for the driver's devices:
        # its pool has the node's name.
        pools = {self._node_name, *(each.pool for each in slices)}
        get = self._resources.get
        try:
            listed = rest.list_items(get, "resourceclaims", {}, claims.parse_reservation)
        except errors.ClusterError as error:
            if not error.is_not_served:
                raise
            _log.info("claims_not_listed", error=error.message)
            return {}
        devices = collections.defaultdict[Claimant, set[claims.Device]](set)
        for each in listed:
            of_node = {device for device in each.devices if device[0] in pools}
            for uid in (each.pods.keys() - bound) if of_node else ():
                devices[Claimant(each.namespace, each.pods[uid], uid)] |= of_node
        return {pod: claims.resolve(of_pod, slices) for pod, of_pod in devices.items()}

    def forget_all_but(self, uids: Collection[str]) -> None:
        """Forget the pods that are gone."""
        self._allocated = {uid: each for uid, each in self._allocated.items() if uid in uids}
        self._devices = {uid: each for uid, each in self._devices.items() if uid in uids}
        self._final = self._final.intersection(uids)

    def _read(self, pods: Iterable[pod_object.Pod]) -> None:
        unsettled = {pod.uid: pod for pod in pods if pod.uid not in self._final}
        claimed = {
            uid: devices
            for uid, pod in unsettled.items()
            if (devices := self._claimed_devices(pod)) is not None
        }
        self._allocated |= claimed
        slices = self._list_slices() if any(claimed.values()) else ()
        for uid, devices in claimed.items():
            uuids = claims.resolve(devices, slices)
            if uuids is not None:
                self._devices[uid] = uuids
                if unsettled[uid].phase != "Pending":
                    self._final |= {uid}

    def _claimed_devices(self, pod: pod_object.Pod) -> frozenset[claims.Device] | None:
        """Return the pod's devices of NVIDIA's driver; None if they are not known."""
        if pod.uid in self._allocated:
            return self._allocated[pod.uid]
        if not pod.claims or self._clock.monotonic() - self._forbidden_s < _FORBIDDEN_S:
            return None
        devices: set[claims.Device] = set()
        for name in pod.claims:
            path = rest.api_path("namespaces", pod.namespace, "resourceclaims", name)
            try:
                claim = self._resources.get(path)
                with api_values.as_cluster_error("a ResourceClaim"):
                    allocated = claims.parse_claim(claim)
            except errors.ClusterError as error:
                _raise_if_transient(error)
                if error.reason is reasons.Reason.FORBIDDEN:
                    self._forbidden_s = self._clock.monotonic()
                key = f"{pod.namespace}/{name}"
                _log.info("claim_not_read", claim=key, error=error.message)
                return None
            if allocated is None:
                return None
            devices |= allocated
        return frozenset(devices)

    def _list_slices(self) -> tuple[claims.Slice, ...]:
        try:
            slices = self._slices.list() or ()
        except errors.ClusterError as error:
            _raise_if_transient(error)
            _log.info("resource_slices_not_listed", error=error.message)
            return ()
        self._last_slices = slices or self._last_slices
        return slices


class _Resources:
    """Reads and deletes resources of resource.k8s.io, in the newest version that is served."""

    def __init__(self, kube: api.KubeApi) -> None:
        self._kube = kube
        self._versions: tuple[str, ...] = _VERSIONS
        """The version that answered last comes first."""

    def get(self, path: str, query: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Get an object or a list."""
        *versions, last = self._versions
        for version in versions:
            try:
                return self._get(version, path, query)
            except errors.ClusterError as error:
                # The status is the same for an unknown version and an unknown object.
                if not error.is_not_found:
                    raise
        return self._get(last, path, query)

    def _get(self, version: str, path: str, query: Mapping[str, str] | None) -> dict[str, Any]:
        answer = self._kube.get(f"/apis/resource.k8s.io/{version}/{path}", query)
        self._versions = (version, *(each for each in _VERSIONS if each != version))
        return answer

    def delete(self, path: str) -> None:
        """Delete an object that ``get`` has just listed; done when it is gone."""
        try:
            self._kube.delete(f"/apis/resource.k8s.io/{self._versions[0]}/{path}")
        except errors.ClusterError as error:
            if not error.is_not_found:
                raise


def _raise_if_transient(error: errors.ClusterError) -> None:
    """Raise an error that is not about claims: no answer, or refused credentials."""
    if error.reason is reasons.Reason.API_UNAVAILABLE:
        raise error


@contextlib.contextmanager
def _warn_on_error() -> Iterator[None]:
    try:
        yield
    except errors.ClusterError as error:
        _log.warning("resource_slices_not_withdrawn", error=error.message)
