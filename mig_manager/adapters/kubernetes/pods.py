"""The pods on our node: list them, evict them, delete daemons' pods."""

import dataclasses
import http
import math
import time
import urllib.parse
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar

import structlog

from mig_manager import errors
from mig_manager.adapters.kubernetes import api, api_errors, podnews
from mig_manager.core import ports
from mig_manager.core.node import cluster, policy

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
            with cluster.understood("a ResourceClaim"):
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
            except api_errors.ApiError as error:
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


_Thing = TypeVar("_Thing")

_PAGE = 500
_MOST_PAGES = 50
"""A node runs some hundred pods; more pages than this are a server that repeats itself."""
_TRUSTED_S = 10.0
"""After the last list. A connection that died unnoticed is as silent as a watch with no news."""


class KubeWorkloads:
    """Implements ``ports.Workloads`` on the Kubernetes API.

    Args:
        kube: The API.
        node_name: Our node.
        news: Watches its pods during a run; None: nobody does.
        monotonic: Seconds from some fixed point.
    """

    def __init__(
        self,
        kube: api.KubeApi,
        *,
        node_name: str,
        news: podnews.PodNews | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kube = kube
        self._node_name = node_name
        self._claims = ClaimDrivers(kube)
        self._news = news
        self._monotonic = monotonic
        self._listed_s = -math.inf

    def list(self) -> tuple[cluster.Pod, ...]:
        """Return all pods bound to our node; see ``ports.Workloads``."""
        query = {"fieldSelector": f"spec.nodeName={self._node_name}"}
        found = self._pods("/api/v1/pods", query)
        self._listed_s = self._monotonic()
        self._claims.forget_all_but(found)
        return self._with_claims(found)

    def watched(self) -> tuple[cluster.Pod, ...] | None:
        """Return them as the watch told of them; see ``ports.Workloads``."""
        if self._news is None or self._monotonic() - self._listed_s >= _TRUSTED_S:
            return None
        found = self._news.pods()
        return None if found is None else self._with_claims(found)

    def _with_claims(self, found: tuple[cluster.Pod, ...]) -> tuple[cluster.Pod, ...]:
        return tuple(
            dataclasses.replace(pod, has_claims=self._claims.may_claim_gpu(pod))
            if pod.has_claims and not pod.is_finished
            else pod
            for pod in found
        )

    def budgets(self, namespaces: Collection[str]) -> tuple[policy.Budget, ...]:
        """Return PodDisruptionBudgets; see ``ports.Workloads``."""
        return tuple(
            budget
            for namespace in sorted(namespaces)
            for budget in self._all(
                f"/apis/policy/v1/namespaces/{_quoted(namespace)}/poddisruptionbudgets",
                {},
                policy.parse_budget,
            )
        )

    def covered(self, budget: policy.Budget) -> tuple[cluster.Pod, ...]:
        """Return the pods that a budget covers; see ``ports.Workloads``."""
        path = f"/api/v1/namespaces/{_quoted(budget.namespace)}/pods"
        selector = budget.label_selector
        found = self._pods(path, {"labelSelector": selector} if selector else {})
        return tuple(pod for pod in found if budget.covers(pod))

    def evict(self, pod: cluster.Pod) -> ports.Verdict:
        """Ask for a pod's eviction with its own grace period; see ``ports.Workloads``."""
        return self._evict(pod, {})

    def can_evict(self, pod: cluster.Pod) -> ports.Verdict:
        """Ask in a dry run; see ``ports.Workloads``."""
        return self._evict(pod, {"dryRun": ["All"]})

    def _evict(self, pod: cluster.Pod, options: dict[str, Any]) -> ports.Verdict:
        eviction = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": pod.name, "namespace": pod.namespace},
            "deleteOptions": {**_guarded_by_uid(pod), **options},
        }
        try:
            self._kube.post(f"{_path(pod)}/eviction", eviction)
        except api_errors.ApiError as err:
            if _is_gone(err):
                return ports.Verdict(answer=ports.Eviction.GONE)
            if _is_blocked(err):
                return ports.Verdict(
                    answer=ports.Eviction.BLOCKED,
                    why=err.explanation,
                    retry_after_s=err.retry_after_s or 0.0,
                )
            raise
        return ports.Verdict(answer=ports.Eviction.ACCEPTED)

    def delete(self, pod: cluster.Pod) -> None:
        """Delete a pod; see ``ports.Workloads``."""
        options = {"apiVersion": "v1", "kind": "DeleteOptions", **_guarded_by_uid(pod)}
        try:
            self._kube.delete(_path(pod), options)
        except api_errors.ApiError as err:
            if not _is_gone(err):
                raise

    def _pods(self, path: str, query: Mapping[str, str]) -> tuple[cluster.Pod, ...]:
        return self._all(path, query, cluster.parse_pod)

    def _all(
        self, path: str, query: Mapping[str, str], read: Callable[[Mapping[str, Any]], _Thing]
    ) -> tuple[_Thing, ...]:
        try:
            return self._pages(path, query, read)
        except errors.ClusterError as err:
            if err.status != http.HTTPStatus.GONE:
                raise
        # The continue token expired between two pages: begin anew, once.
        return self._pages(path, query, read)

    def _pages(
        self, path: str, query: Mapping[str, str], read: Callable[[Mapping[str, Any]], _Thing]
    ) -> tuple[_Thing, ...]:
        found: list[_Thing] = []
        what = f"list of {path.rpartition('/')[2]}"
        asked = {**query, "limit": str(_PAGE)}
        for _ in range(_MOST_PAGES):
            page = self._kube.get(path, asked)
            with cluster.understood(f"the {what}"):
                found += [read(item) for item in page["items"] or ()]
                token = (page.get("metadata") or {}).get("continue")
            if not token:
                return tuple(found)
            asked["continue"] = str(token)
        raise errors.ClusterError(
            f"the Kubernetes API's {what} does not end", reason=errors.Reason.API_ERROR
        )


def _path(pod: cluster.Pod) -> str:
    return f"/api/v1/namespaces/{_quoted(pod.namespace)}/pods/{_quoted(pod.name)}"


def _quoted(name: str) -> str:
    return urllib.parse.quote(name, safe="")


def _guarded_by_uid(pod: cluster.Pod) -> dict[str, Any]:
    """Keep a namesake, such as a StatefulSet's next pod, out of it."""
    return {"preconditions": {"uid": pod.uid}}


def _is_gone(err: api_errors.ApiError) -> bool:
    if err.status == http.HTTPStatus.NOT_FOUND:
        return True
    # The API has no machine-readable cause for a failed precondition; both of its texts (the
    # registry's and the storage's) have these words.
    said = err.explanation.lower()
    return err.status == http.HTTPStatus.CONFLICT and "precondition" in said and "uid" in said


def _is_blocked(err: api_errors.ApiError) -> bool:
    """Tell whether a later eviction may be let through.

    Beside 429, which is a budget's refusal, that is a conflict with another writer, and the 500
    for a pod with two budgets: the operator can remove one while the drain waits.
    """
    if err.status == http.HTTPStatus.INTERNAL_SERVER_ERROR:
        return "poddisruptionbudget" in err.explanation.lower()
    return err.status in (http.HTTPStatus.TOO_MANY_REQUESTS, http.HTTPStatus.CONFLICT)
