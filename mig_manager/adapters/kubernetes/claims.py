"""Which DRA drivers serve a pod's ResourceClaims: the API knows where kubelet does not tell.

Kubelet tells the drivers of claims only with its feature gate KubeletPodResourcesDynamicResources.
"""

import http
import urllib.parse
from collections.abc import Iterable, Mapping
from typing import Any

import structlog

from mig_manager import errors
from mig_manager.adapters.kubernetes import answers, api
from mig_manager.core.node import cluster, objects

_VERSIONS = ("v1", "v1beta2", "v1beta1")
"""Of resource.k8s.io, newest first: Kubernetes 1.34, 1.33 and 1.32."""

_log = structlog.get_logger()


class ClaimDrivers:
    """Looks up the claims of pods; the allocation of a claim in use does not change."""

    def __init__(self, kube: api.KubeApi) -> None:
        self._kube = kube
        self._known: dict[str, bool] = {}
        """UID of a pod -> whether one of its claims may be for a GPU."""
        self._may_read = True

    def may_claim_gpu(self, pod: cluster.Pod) -> bool:
        """Tell whether a ResourceClaim of a pod is for a GPU, or may be."""
        if not (pod.has_claims and pod.claims and self._may_read):
            return pod.has_claims
        if pod.uid not in self._known:
            found = [self._drivers(pod.namespace, name) for name in pod.claims]
            if None in found:
                return True
            every = frozenset().union(*(drivers for drivers in found if drivers))
            self._known[pod.uid] = cluster.GPU_CLAIM_DRIVER in every
        return self._known[pod.uid]

    def forget_all_but(self, pods: Iterable[cluster.Pod]) -> None:
        """Forget pods that are no more."""
        uids = {pod.uid for pod in pods}
        self._known = {uid: known for uid, known in self._known.items() if uid in uids}

    def _drivers(self, namespace: str, name: str) -> frozenset[str] | None:
        """Return the drivers of an allocated claim; None if that is not known."""
        try:
            claim = self._claim(namespace, name)
            with objects.understood("a ResourceClaim"):
                return _allocated(claim)
        except errors.ClusterError as error:
            if error.reason is errors.Reason.FORBIDDEN:
                self._may_read = False
            _log.info("claim_not_read", claim=f"{namespace}/{name}", error=error.message)
            return None

    def _claim(self, namespace: str, name: str) -> Mapping[str, Any]:
        quoted = [urllib.parse.quote(part, safe="") for part in (namespace, name)]
        for version in _VERSIONS:
            path = "/apis/resource.k8s.io/{}/namespaces/{}/resourceclaims/{}"
            try:
                return self._kube.get(path.format(version, *quoted))
            except answers.ApiError as error:
                # Neither the version nor the claim can be told from the status.
                if error.status != http.HTTPStatus.NOT_FOUND or version == _VERSIONS[-1]:
                    raise
        raise AssertionError  # pragma: no cover - the loop returns or raises


def _allocated(claim: Mapping[str, Any]) -> frozenset[str] | None:
    allocation = (claim.get("status") or {}).get("allocation")
    if allocation is None:
        return None
    results = (allocation.get("devices") or {}).get("results") or ()
    return frozenset(str(result["driver"]) for result in results)
