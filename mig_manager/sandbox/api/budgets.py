"""PodDisruptionBudgets: their status, and whether one lets a pod be evicted.

Rules: Kubernetes documentation, "Disruptions", "Specifying a Disruption Budget for your
Application" and "API-initiated Eviction". Percentages round up. Unlike the real disruption
controller ours is immediate, and a pod whose controller is not stored here counts for itself.
"""

import math
from collections.abc import Sequence

from mig_manager.sandbox.api import resources, selectors, statuses, stores

Object = statuses.Object
Store = stores.Store

STILL_PROCESSED_RETRY_S = 10
"""What the API asks clients to wait when a budget's status is older than its spec."""


class BudgetController:
    """Keeps the status of every PodDisruptionBudget true, at once after each change."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._is_paused = False
        store.subscribe(self._follow)

    def pause(self) -> None:
        """Let statuses go stale from now on, as a controller does that lags."""
        self._is_paused = True

    def _follow(self, record: stores.Record) -> None:
        storage, namespace, _ = record.key
        if self._is_paused or storage not in ("pods", "poddisruptionbudgets", "replicasets"):
            return
        for budget in self._store.select("poddisruptionbudgets", namespace=namespace):
            self._refresh(budget)

    def _refresh(self, budget: Object) -> None:
        status = compute_status(self._store, budget)
        old = budget.get("status") or {}
        self._store.write(
            stores.key_of(resources.BUDGETS, budget),
            budget | {"metadata": dict(budget["metadata"]), "status": old | status},
        )


def compute_status(store: Store, budget: Object) -> Object:
    """Return the counted part of a budget's status."""
    spec = budget.get("spec") or {}
    namespace = budget["metadata"]["namespace"]
    selects = selectors.compile_selector(spec.get("selector"))
    pods = [
        pod
        for pod in store.select("pods", namespace=namespace)
        if selects(pod["metadata"].get("labels") or {})
    ]
    expected = _expected(store, pods)
    if spec.get("maxUnavailable") is not None:
        desired = max(0, expected - _count(spec["maxUnavailable"], expected))
    else:
        desired = _count(spec.get("minAvailable", 1), expected)
    healthy = sum(is_ready(pod) and not is_leaving(pod) for pod in pods)
    # The controller's own list of evictions ends with what it has seen (``disruptedPods``).
    running = {pod["metadata"]["name"] for pod in pods if not is_leaving(pod)}
    disrupted = (budget.get("status") or {}).get("disruptedPods") or {}
    return {
        "disruptedPods": {name: at for name, at in disrupted.items() if name in running},
        "currentHealthy": healthy,
        "desiredHealthy": desired,
        "expectedPods": expected,
        "disruptionsAllowed": max(0, healthy - desired) if expected else 0,
        "observedGeneration": budget["metadata"].get("generation", 0),
    }


def _expected(store: Store, pods: Sequence[Object]) -> int:
    """Count the pods there should be: a stored ReplicaSet tells; other pods are themselves."""
    expected = 0
    counted: set[str] = set()
    for pod in pods:
        owner = next(
            (
                each
                for each in pod["metadata"].get("ownerReferences") or ()
                if each.get("controller")
            ),
            None,
        )
        key = ("replicasets", pod["metadata"]["namespace"], owner["name"] if owner else "")
        replica_set = store.peek(key) if owner and owner["kind"] == "ReplicaSet" else None
        if replica_set is None:
            expected += 1
        elif key[2] not in counted:
            counted.add(key[2])
            expected += int((replica_set.get("spec") or {}).get("replicas", 1))
    return expected


def _count(amount: int | str, total: int) -> int:
    if isinstance(amount, str):
        return math.ceil(int(amount.rstrip("%")) * total / 100)
    return amount


def is_ready(pod: Object) -> bool:
    """Return whether the pod's Ready condition is true."""
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def is_leaving(pod: Object) -> bool:
    """Return whether the pod has been deleted and waits for its kubelet."""
    return "deletionTimestamp" in pod["metadata"]


def check_eviction(store: Store, pod: Object, *, dry_run: bool = False) -> None:
    """Take the eviction from the pod's budget, which a dry run does not use up.

    Raises:
        ApiError: 429 when its budget does not allow it, 500 when it has more than one.
    """
    phase = (pod.get("status") or {}).get("phase")
    if phase in ("Pending", "Succeeded", "Failed") or is_leaving(pod):
        return
    budgets = _of(store, pod)
    if len(budgets) > 1:
        message = (
            "This pod has more than one PodDisruptionBudget, which the eviction subresource "
            "does not support."
        )
        raise statuses.ApiError(500, message, reason="")
    if budgets and not _tolerates_unready(pod, budgets[0]):
        _check_budget(budgets[0])
        if not dry_run:
            _use_up(store, budgets[0], pod)


def _of(store: Store, pod: Object) -> list[Object]:
    labels = pod["metadata"].get("labels") or {}
    return [
        budget
        for budget in store.select("poddisruptionbudgets", namespace=pod["metadata"]["namespace"])
        if selectors.compile_selector((budget.get("spec") or {}).get("selector"))(labels)
    ]


def _tolerates_unready(pod: Object, budget: Object) -> bool:
    """Return whether the pod may go because it is not counted as healthy anyway."""
    if is_ready(pod):
        return False
    if budget["spec"].get("unhealthyPodEvictionPolicy") == "AlwaysAllow":
        return True
    status = budget.get("status") or {}
    desired = status.get("desiredHealthy", 0)
    return bool(status.get("currentHealthy", 0) >= desired > 0)


def _check_budget(budget: Object) -> None:
    metadata, status = budget["metadata"], budget.get("status") or {}
    name = metadata["name"]
    if status.get("observedGeneration", 0) < metadata.get("generation", 0):
        cause = f"The disruption budget {name} is still being processed by the server."
        raise _blocked(cause, retry_after_s=STILL_PROCESSED_RETRY_S)
    if status.get("disruptionsAllowed", 0) == 0:
        cause = (
            f"The disruption budget {name} needs {status.get('desiredHealthy', 0)} healthy pods "
            f"and has {status.get('currentHealthy', 0)} currently"
        )
        raise _blocked(cause, retry_after_s=None)


def _use_up(store: Store, budget: Object, pod: Object) -> None:
    """Count an eviction that the controller has not seen yet, as the API server does itself."""
    status = budget.get("status") or {}
    disrupted = (status.get("disruptedPods") or {}) | {pod["metadata"]["name"]: stores.timestamp()}
    counted = {
        "disruptionsAllowed": status.get("disruptionsAllowed", 0) - 1,
        "disruptedPods": disrupted,
    }
    store.write(
        stores.key_of(resources.BUDGETS, budget),
        budget | {"metadata": dict(budget["metadata"]), "status": status | counted},
    )


def _blocked(cause: str, *, retry_after_s: int | None) -> statuses.ApiError:
    told = statuses.Cause(reason="DisruptionBudget", message=cause)
    return statuses.ApiError(
        429,
        "Cannot evict pod as it would violate the pod's disruption budget.",
        details={"causes": [told.to_json()]},
        retry_after_s=retry_after_s,
    )
