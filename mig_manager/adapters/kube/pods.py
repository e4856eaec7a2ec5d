"""The pods on our node: list them, evict them, delete daemons' pods."""

import http
import urllib.parse
from collections.abc import Mapping
from typing import Any

from mig_manager import errors, ports
from mig_manager.adapters.kube import answers, api, fields
from mig_manager.core import cluster

_PAGE = 500
_MOST_PAGES = 50
"""A node runs some hundred pods; more pages than this are a server that repeats itself."""
_MIRROR_ANNOTATION = "kubernetes.io/config.mirror"
"""Set by kubelet on the pod that shows a static pod in the API."""
_DEFAULT_GRACE_S = 30
"""What the API server writes where the pod's author says nothing."""


class KubeWorkloads:
    """Implements ``ports.Workloads`` on the Kubernetes API."""

    def __init__(self, kube: api.KubeApi, *, node_name: str) -> None:
        self._kube = kube
        self._node_name = node_name

    def list(self) -> tuple[cluster.Pod, ...]:
        """Return all pods bound to our node; see ``ports.Workloads``."""
        try:
            return self._list()
        except errors.ClusterError as err:
            if err.status != http.HTTPStatus.GONE:
                raise
        # The continue token expired between two pages: begin anew, once.
        return self._list()

    def evict(self, pod: cluster.Pod) -> ports.Verdict:
        """Ask for a pod's eviction with its own grace period; see ``ports.Workloads``."""
        return self._evict(pod, {})

    def may_evict(self, pod: cluster.Pod) -> ports.Verdict:
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
        except answers.ApiError as err:
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
        except answers.ApiError as err:
            if not _is_gone(err):
                raise

    def _list(self) -> tuple[cluster.Pod, ...]:
        found: list[cluster.Pod] = []
        query = {"fieldSelector": f"spec.nodeName={self._node_name}", "limit": str(_PAGE)}
        for _ in range(_MOST_PAGES):
            page = self._kube.get("/api/v1/pods", query)
            with fields.understood("the list of pods"):
                found += [read(item) for item in page["items"] or ()]
                token = (page.get("metadata") or {}).get("continue")
            if not token:
                return tuple(found)
            query["continue"] = str(token)
        raise errors.ClusterError(
            "the Kubernetes API's list of pods does not end", reason=errors.Reason.API_ERROR
        )


def _path(pod: cluster.Pod) -> str:
    namespace = urllib.parse.quote(pod.namespace, safe="")
    return f"/api/v1/namespaces/{namespace}/pods/{urllib.parse.quote(pod.name, safe='')}"


def _guarded_by_uid(pod: cluster.Pod) -> dict[str, Any]:
    """Keep a namesake, such as a StatefulSet's next pod, out of it."""
    return {"preconditions": {"uid": pod.uid}}


def _is_gone(err: answers.ApiError) -> bool:
    if err.status == http.HTTPStatus.NOT_FOUND:
        return True
    # The API has no machine-readable cause for a failed precondition; both of its texts (the
    # registry's and the storage's) have these words.
    said = err.explanation.lower()
    return err.status == http.HTTPStatus.CONFLICT and "precondition" in said and "uid" in said


def _is_blocked(err: answers.ApiError) -> bool:
    """Tell whether a later eviction may be let through.

    Beside 429, which is a budget's refusal, that is a conflict with another writer, and the 500
    for a pod with two budgets: the operator can remove one while the drain waits.
    """
    if err.status == http.HTTPStatus.INTERNAL_SERVER_ERROR:
        return "poddisruptionbudget" in err.explanation.lower()
    return err.status in (http.HTTPStatus.TOO_MANY_REQUESTS, http.HTTPStatus.CONFLICT)


def read(item: Mapping[str, Any]) -> cluster.Pod:
    """Return what we want to know of a Pod object; surprises are the caller's to translate."""
    metadata, spec = item["metadata"], item["spec"]
    status = item.get("status") or {}
    annotations = fields.strings(metadata.get("annotations"))
    # The API server sets Pending; only an object that never went through it has none.
    phase = str(status.get("phase") or "Pending")
    return cluster.Pod(
        namespace=str(metadata["namespace"]),
        name=str(metadata["name"]),
        uid=str(metadata["uid"]),
        phase=phase,
        labels=fields.strings(metadata.get("labels")),
        node_selector=fields.strings(spec.get("nodeSelector")),
        owner_kind=_owner_kind(metadata),
        is_mirror=_MIRROR_ANNOTATION in annotations,
        is_ready=any(
            condition["type"] == "Ready" and condition["status"] == "True"
            for condition in status.get("conditions") or ()
        ),
        is_terminating=bool(metadata.get("deletionTimestamp")),
        gpu_resources=_gpu_resources(spec),
        container_names=tuple(str(container["name"]) for container in spec["containers"]),
        is_kept=annotations.get(cluster.KEEP_ANNOTATION) == "true",
        grace_s=_grace_s(spec),
        has_claims=bool(spec.get("resourceClaims")),
        may_run_gpu_init=phase == "Pending" and _has_gpu_init(spec),
        images=tuple(str(container.get("image") or "") for container in spec["containers"]),
        feature_gates=_feature_gates(spec),
    )


def _grace_s(spec: Mapping[str, Any]) -> int:
    asked = spec.get("terminationGracePeriodSeconds")
    return _DEFAULT_GRACE_S if asked is None else int(asked)


def _has_gpu_init(spec: Mapping[str, Any]) -> bool:
    return any(
        container.get("restartPolicy") != "Always" and _container_resources(container)
        for container in spec.get("initContainers") or ()
    )


def _feature_gates(spec: Mapping[str, Any]) -> dict[str, bool]:
    found: dict[str, bool] = {}
    for container in spec["containers"]:
        for variable in container.get("env") or ():
            if variable.get("name") == "FEATURE_GATES":
                found |= fields.switches(str(variable.get("value") or ""))
    return found


def _owner_kind(metadata: Mapping[str, Any]) -> str | None:
    owners = metadata.get("ownerReferences") or ()
    return next((str(owner["kind"]) for owner in owners if owner.get("controller")), None)


def _gpu_resources(spec: Mapping[str, Any]) -> dict[str, int]:
    """Return what a pod needs at its hungriest moment, by the scheduler's rule.

    Init containers run one after the other, each beside the sidecars (init containers that
    restart) before it; then all app containers run beside all sidecars.
    https://kubernetes.io/docs/concepts/workloads/pods/sidecar-containers/
    """
    sidecars: dict[str, int] = {}
    peak: dict[str, int] = {}
    for container in spec.get("initContainers") or ():
        with_sidecars = _plus(sidecars, _container_resources(container))
        peak = _larger(peak, with_sidecars)
        if container.get("restartPolicy") == "Always":
            sidecars = with_sidecars
    running = sidecars
    for container in spec["containers"]:
        running = _plus(running, _container_resources(container))
    return {name: amount for name, amount in _larger(peak, running).items() if amount}


def _container_resources(container: Mapping[str, Any]) -> dict[str, int]:
    resources = container.get("resources") or {}
    return _larger(
        fields.gpu_resources(resources.get("requests")),
        fields.gpu_resources(resources.get("limits")),
    )


def _plus(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {name: one.get(name, 0) + other.get(name, 0) for name in (*one, *other)}


def _larger(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {name: max(one.get(name, 0), other.get(name, 0)) for name in (*one, *other)}
