"""ResourceClaims of pods and ResourceSlices of the DRA driver, on clusters that have them.

A request goes out only for a pod with a ResourceClaim, or on a node with the DRA driver.
"""

import dataclasses
import http
import urllib.parse
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import structlog

from mig_manager import errors
from mig_manager.adapters.kubernetes import api
from mig_manager.core.node import claims, cluster

_VERSIONS = ("v1", "v1beta2", "v1beta1")
"""Of resource.k8s.io, newest first: Kubernetes 1.34, 1.33 and 1.32."""
_UNAVAILABLE = (http.HTTPStatus.NOT_FOUND, http.HTTPStatus.FORBIDDEN)

_log = structlog.get_logger()


class KubeSlices:
    """Implements ``ports.ResourceSlices`` on the Kubernetes API."""

    def __init__(self, kube: api.KubeApi, *, node_name: str) -> None:
        self._resources = _Resources(kube)
        self._query = {
            "fieldSelector": f"spec.driver={cluster.GPU_CLAIM_DRIVER},spec.nodeName={node_name}"
        }

    def list(self) -> tuple[claims.Slice, ...] | None:
        get = self._resources.get
        try:
            return tuple(cluster.listed(get, "resourceslices", self._query, claims.parse_slice))
        except errors.ClusterError as error:
            if error.status not in _UNAVAILABLE:
                raise
            _log.info("resource_slices_not_listed", error=error.message)
            return None

    def withdraw(self) -> None:
        # Kubelet deletes them 30 s after the driver stopped (``defaultWipingDelay`` in
        # k8s.io/kubernetes/pkg/kubelet/cm/dra). Until then, or until the new driver has published
        # its own, the scheduler allocates devices that are gone to claims, and the pods of those
        # claims never start.
        try:
            for each in self.list() or ():
                self._resources.delete(f"resourceslices/{_quoted(each.name)}")
        except errors.ClusterError as error:
            _log.warning("resource_slices_not_withdrawn", error=error.message)


class PodClaims:
    """Finds the devices of the ResourceClaims of pods, once for each pod that runs.

    The allocation of a claim in use does not change. A pod that has not started may have been
    allocated a device from an outdated slice.
    """

    def __init__(self, kube: api.KubeApi, *, node_name: str) -> None:
        self._resources = _Resources(kube)
        self._slices = KubeSlices(kube, node_name=node_name)
        self._devices: dict[str, frozenset[str]] = {}
        """UID of a pod -> the UUIDs of its devices."""
        self._may_read = True

    def resolve(self, pods: Iterable[cluster.Pod]) -> tuple[cluster.Pod, ...]:
        """Return pods with the devices of their claims, where all devices of a pod are known."""
        known = tuple(pods)
        self._find(pod for pod in known if pod.has_claims and not pod.is_finished)
        return tuple(
            dataclasses.replace(pod, has_claims=bool(uuids), claimed_ids=uuids)
            if (uuids := self._devices.get(pod.uid)) is not None
            else pod
            for pod in known
        )

    def forget_all_but(self, uids: Collection[str]) -> None:
        """Forget the pods that are gone."""
        self._devices = {uid: found for uid, found in self._devices.items() if uid in uids}

    def _find(self, pods: Iterable[cluster.Pod]) -> None:
        claimed = {
            pod.uid: devices
            for pod in pods
            if (pod.uid not in self._devices or pod.phase == "Pending")
            and (devices := self._claimed(pod)) is not None
        }
        slices = self._list_slices() if any(claimed.values()) else ()
        for uid, devices in claimed.items():
            uuids = claims.resolve(devices, slices)
            if uuids is not None:
                self._devices[uid] = uuids

    def _claimed(self, pod: cluster.Pod) -> frozenset[claims.Device] | None:
        """Return the pod's devices of NVIDIA's driver; None if they are not known."""
        if not (pod.claims and self._may_read):
            return None
        devices: set[claims.Device] = set()
        for name in pod.claims:
            path = f"namespaces/{_quoted(pod.namespace)}/resourceclaims/{_quoted(name)}"
            try:
                claim = self._resources.get(path)
                with cluster.understood("a ResourceClaim"):
                    found = claims.parse_claim(claim)
            except errors.ClusterError as error:
                if error.reason is errors.Reason.FORBIDDEN:
                    self._may_read = False
                key = f"{pod.namespace}/{name}"
                _log.info("claim_not_read", claim=key, error=error.message)
                return None
            if found is None:
                return None
            devices |= found
        return frozenset(devices)

    def _list_slices(self) -> tuple[claims.Slice, ...]:
        try:
            return self._slices.list() or ()
        except errors.ClusterError as error:
            _log.info("resource_slices_not_listed", error=error.message)
            return ()


class _Resources:
    """Reads and deletes resources of resource.k8s.io, in the newest version that is served."""

    def __init__(self, kube: api.KubeApi) -> None:
        self._kube = kube
        self._versions: tuple[str, ...] = _VERSIONS
        """The one that answered last comes first."""

    def get(self, path: str, query: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Get an object or a list."""
        *versions, last = self._versions
        for version in versions:
            try:
                return self._get(version, path, query)
            except errors.ClusterError as error:
                # The status is the same for an unknown version and an unknown object.
                if error.status != http.HTTPStatus.NOT_FOUND:
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
            if error.status != http.HTTPStatus.NOT_FOUND:
                raise


def _quoted(name: str) -> str:
    return urllib.parse.quote(name, safe="")
