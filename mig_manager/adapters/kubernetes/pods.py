"""The pods on our node: list, watch, evict, delete."""

import dataclasses
import http
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import structlog

from mig_manager import errors
from mig_manager.adapters import rest
from mig_manager.adapters.kubernetes import api, collection, pod_claims, responses
from mig_manager.core import timing
from mig_manager.core.node import eviction_rules, instance_use
from mig_manager.core.objects import api_values, pod_object, pod_parser

_BLOCKED = (http.HTTPStatus.TOO_MANY_REQUESTS, http.HTTPStatus.CONFLICT)
_TRUSTED_S = 10.0
"""After the last list. A connection that died unnoticed is as silent as a watch with no events."""

_log = structlog.get_logger()


class KubeWorkloads:
    """Implements ``ports.Workloads`` on the Kubernetes API; without a ``watch`` it only polls."""

    def __init__(
        self,
        kube: api.KubeApi,
        *,
        node_name: str,
        clock: timing.Clock,
        watch: "PodWatch | None" = None,
    ) -> None:
        self._kube = kube
        self._node_name = node_name
        self._claims = pod_claims.PodClaims(kube, node_name=node_name, clock=clock)
        self._watch = watch
        self._clock = clock
        self._listed_s = -math.inf

    def list(self) -> pod_object.Pods:
        pods = self._watch.first_list() if self._watch else None
        if pods is None:
            query = {"fieldSelector": f"spec.nodeName={self._node_name}"}
            pods = tuple(rest.list_items(self._kube.get, "/api/v1/pods", query, pod_parser.parse))
        self._listed_s = self._clock.monotonic()
        self._claims.forget_all_but({pod.uid for pod in pods})
        return self._claims.resolve(pods)

    def from_watch(self) -> pod_object.Pods | None:
        if self._watch is None or self._clock.monotonic() - self._listed_s >= _TRUSTED_S:
            return None
        pods = self._watch.pods()
        # A pod whose claims were not read yet counts until the next list reads them.
        return None if pods is None else self._claims.from_cache(pods)

    def present(self) -> pod_object.Pods:
        watched = self._watch.pods() if self._watch else None
        if watched is None:
            return self.list()
        pods = self._claims.from_cache(watched)
        return self.list() if any(pod.has_claims and not pod.is_finished for pod in pods) else pods

    def budgets(self, namespaces: Collection[str]) -> tuple[eviction_rules.Budget, ...]:
        return tuple(
            budget
            for namespace in sorted(namespaces)
            for budget in rest.list_items(
                self._kube.get,
                rest.api_path("/apis/policy/v1/namespaces", namespace, "poddisruptionbudgets"),
                {},
                eviction_rules.parse_budget,
            )
        )

    def covered_by(self, budget: eviction_rules.Budget) -> pod_object.Pods:
        path = rest.api_path("/api/v1/namespaces", budget.namespace, "pods")
        selector = budget.label_selector
        query = {"labelSelector": selector} if selector else {}
        pods = rest.list_items(self._kube.get, path, query, pod_parser.parse)
        return tuple(pod for pod in pods if budget.covers(pod))

    def unbound(self, bound: pod_object.Pods) -> pod_object.Pods:
        return tuple(
            dataclasses.replace(
                pod,
                is_unbound=not pod.node_name,
                has_claims=ids is None or bool(ids),
                claimed_ids=ids,
            )
            for claimant, ids in self._claims.reservations({pod.uid for pod in bound}).items()
            for pod in rest.list_items(
                self._kube.get,
                rest.api_path("/api/v1/namespaces", claimant.namespace, "pods"),
                {"fieldSelector": f"metadata.name={claimant.name}"},
                pod_parser.parse,
            )
            # A claim stays reserved for a moment after the end of its pod.
            if pod.uid == claimant.uid and not pod.is_finished
        )

    def can_evict(self, pod: pod_object.Pod) -> eviction_rules.EvictionResponse:
        return self.evict(pod, is_dry_run=True)

    def delete(self, pod: pod_object.Pod) -> None:
        try:
            self._kube.delete(_path(pod), _only_this_uid(pod))
        except responses.ApiError as error:
            if not _is_gone(error):
                raise

    def evict(
        self, pod: pod_object.Pod, *, is_dry_run: bool = False
    ) -> eviction_rules.EvictionResponse:
        # In the Eviction alone, admission webhooks that move the pod themselves would not learn of
        # it: ``dryRun`` of an AdmissionReview comes from the request.
        query = {"dryRun": "All"} if is_dry_run else None
        options = {"dryRun": ["All"]} if is_dry_run else {}
        eviction = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": pod.name, "namespace": pod.namespace, "labels": api.LABELS},
            "deleteOptions": {**_only_this_uid(pod), **options},
        }
        try:
            self._kube.post(f"{_path(pod)}/eviction", eviction, query)
        except responses.ApiError as error:
            if _is_gone(error):
                return eviction_rules.EvictionResponse(answer=eviction_rules.EvictionAnswer.GONE)
            if is_dry_run and _is_about_dry_run(error):
                # Nothing would ever be evicted. The budgets are counted without it.
                _log.warning("eviction_not_checked", pod=pod.key, error=error.message)
                return eviction_rules.EvictionResponse(
                    answer=eviction_rules.EvictionAnswer.ACCEPTED
                )
            # 429 is a budget's refusal. A conflict with another writer is transient, and so is the
            # 500 for a pod with two budgets if the operator removes one meanwhile.
            has_two_budgets = error.status == http.HTTPStatus.INTERNAL_SERVER_ERROR and (
                "poddisruptionbudget" in error.explanation.lower()
            )
            if has_two_budgets or error.status in _BLOCKED or _is_denied(error):
                return eviction_rules.EvictionResponse(
                    answer=eviction_rules.EvictionAnswer.BLOCKED,
                    why=error.explanation,
                    retry_after_s=error.retry_after_s or 0.0,
                )
            raise
        return eviction_rules.EvictionResponse(answer=eviction_rules.EvictionAnswer.ACCEPTED)


class PodWatch:
    """Watches the pods of one node while a change waits for them, or longer after ``keep``.

    It ends waits early and saves the API most of its polls. No wait depends on it: waits also end
    after a poll, and query the API before they act. Both callbacks are called in the watch's
    thread: ``on_change`` after every change of a pod, ``on_use`` if the use of GPUs may have
    changed.
    """

    def __init__(
        self,
        kube: api.KubeApi,
        *,
        node_name: str,
        on_change: Callable[[], None],
        on_use: Callable[[], None] = lambda: None,
    ) -> None:
        self._kube = kube
        self._node_name = node_name
        self._on_change = on_change
        self._on_use = on_use
        self._watch: _StrictPods | None = None
        self._is_kept = False

    def pods(self) -> pod_object.Pods | None:
        """Return the node's pods as last reported; None while the watch is not up to date."""
        watched = self._watch
        return watched.items() if watched and watched.is_current else None

    def expect_change(self) -> None:
        """Watch from the next ``first_list`` on."""
        if self._watch is None:
            self._watch = _StrictPods(
                self._kube,
                "/api/v1/pods",
                _parse,
                self._report,
                selector={"fieldSelector": f"spec.nodeName={self._node_name}"},
            )

    def first_list(self) -> pod_object.Pods | None:
        """List the pods for the caller and a watch; None if a watch is not expected, or runs.

        Raises:
            ClusterError: The API refused or does not answer; the watch tries again.
        """
        watched = self._watch
        if watched is None or watched.is_started:
            return None
        try:
            watched.list()
        except errors.ClusterError as error:
            # The continue token expired between two pages: the caller's own list begins again.
            if error.status != http.HTTPStatus.GONE:
                raise
            return None
        finally:
            watched.start()
        return watched.items()

    def keep(self) -> None:
        """Watch as ``expect_change``, until ``release``."""
        self._is_kept = True
        self.expect_change()
        if self._watch is not None and not self._watch.is_started:
            self._watch.start()

    def release(self) -> None:
        """Let ``dismiss`` end the watch again, and call it."""
        self._is_kept = False
        self.dismiss()

    def dismiss(self) -> None:
        """Stop watching, unless it is kept; a read that waits ends later, in the background."""
        if self._is_kept:
            return
        watched, self._watch = self._watch, None
        if watched is not None:
            watched.end(timeout_s=0.0)

    def _report(self, before: pod_object.Pod | None, now: pod_object.Pod | None) -> None:
        self._on_change()
        if instance_use.relevant(before) != instance_use.relevant(now):
            self._on_use()


class _StrictPods(collection.Collection[pod_object.Pod]):
    """The pods of one watch, so that a dismissed watch has no effect."""

    is_strict = True


def _parse(item: Mapping[str, Any]) -> pod_object.Pod:
    with api_values.as_cluster_error("a pod"):
        return pod_parser.parse(item)


def _path(pod: pod_object.Pod) -> str:
    return rest.api_path("/api/v1/namespaces", pod.namespace, "pods", pod.name)


def _only_this_uid(pod: pod_object.Pod) -> dict[str, Any]:
    """Return options that exclude a pod of the same name, such as a StatefulSet's next one."""
    return {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": pod.uid}}


def _is_about_dry_run(error: responses.ApiError) -> bool:
    """Return whether an admission webhook may have side effects, so that no dry run reaches it.

    A webhook of ``admissionregistration.k8s.io/v1beta1`` may still have ``sideEffects: Unknown``
    (k8s.io/apiserver, ``NewDryRunUnsupportedErr``).
    """
    is_refused = error.status == http.HTTPStatus.BAD_REQUEST
    return is_refused and "does not support dry run" in error.explanation


def _is_denied(error: responses.ApiError) -> bool:
    """Return whether an admission webhook or policy denied a request; it chooses the status.

    (k8s.io/apiserver, ``ToStatusErr`` of webhooks, and ``Validate`` of policies).
    """
    return any(words in error.explanation for words in ("denied the request", "denied request"))


def _is_gone(error: responses.ApiError) -> bool:
    if error.is_not_found:
        return True
    # The API has no machine-readable cause for a failed precondition. Both of its texts (the
    # registry's and the storage's) have these words.
    text = error.explanation.lower()
    return error.is_conflict and "precondition" in text and "uid" in text
