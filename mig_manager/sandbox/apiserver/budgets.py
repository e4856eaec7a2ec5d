"""PodDisruptionBudgets: their status, and the check of an eviction.

Rules: Kubernetes documentation, "Disruptions", "Specifying a Disruption Budget for your
Application" and "API-initiated Eviction". Percentages round up. Unlike the real disruption
controller ours is immediate, and a pod whose controller is not stored here counts for itself.
"""

import math
from collections.abc import Callable, Sequence

from mig_manager.sandbox.apiserver import request, resources, status, store

Object = status.Object
Store = store.Store

_STILL_PROCESSED_RETRY_S = 10
"""The server's ``Retry-After`` while a budget's status is older than its spec."""


def start_controller(objects: Store) -> Callable[[], None]:
    """Update the status of every budget at once after each change; return how to stop that."""

    def follow(record: store.Record) -> None:
        plural, namespace, _ = record.key
        if plural in ("pods", "poddisruptionbudgets", "replicasets"):
            for budget in objects.select("poddisruptionbudgets", namespace=namespace):
                _write_status(objects, budget, _counted(objects, budget))

    return objects.subscribe(follow)


def _write_status(objects: Store, budget: Object, change: Object) -> None:
    key = store.key_of(resources.BUDGETS, budget)
    new = (budget.get("status") or {}) | change
    objects.write(key, budget | {"metadata": dict(budget["metadata"]), "status": new})


def _counted(objects: Store, budget: Object) -> Object:
    """Return the counted part of a budget's status."""
    spec = budget.get("spec") or {}
    selects = request.compile_selector(spec.get("selector"))
    pods = [
        pod
        for pod in objects.select("pods", namespace=budget["metadata"]["namespace"])
        if selects(pod["metadata"].get("labels") or {})
    ]
    expected = _expected(objects, pods)
    if spec.get("maxUnavailable") is not None:
        desired = max(0, expected - _amount(spec["maxUnavailable"], expected))
    else:
        desired = _amount(spec.get("minAvailable", 1), expected)
    healthy = sum(_is_ready(pod) and not _is_terminating(pod) for pod in pods)
    # An eviction stays listed until the controller has seen the pod terminate.
    running = {pod["metadata"]["name"] for pod in pods if not _is_terminating(pod)}
    disrupted = (budget.get("status") or {}).get("disruptedPods") or {}
    return {
        "disruptedPods": {name: at for name, at in disrupted.items() if name in running},
        "currentHealthy": healthy,
        "desiredHealthy": desired,
        "expectedPods": expected,
        "disruptionsAllowed": max(0, healthy - desired) if expected else 0,
        "observedGeneration": budget["metadata"].get("generation", 0),
    }


def _expected(objects: Store, pods: Sequence[Object]) -> int:
    """Count the expected pods: as many as a stored ReplicaSet says, and each other pod."""
    expected = 0
    counted: set[str] = set()
    for pod in pods:
        owners = pod["metadata"].get("ownerReferences") or ()
        owner = next((each for each in owners if each.get("controller")), None)
        key = ("replicasets", pod["metadata"]["namespace"], owner["name"] if owner else "")
        replica_set = objects.peek(key) if owner and owner["kind"] == "ReplicaSet" else None
        if replica_set is None:
            expected += 1
        elif key[2] not in counted:
            counted.add(key[2])
            expected += int((replica_set.get("spec") or {}).get("replicas", 1))
    return expected


def _amount(amount: int | str, total: int) -> int:
    if isinstance(amount, str):
        return math.ceil(int(amount.rstrip("%")) * total / 100)
    return amount


def _is_ready(pod: Object) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def _is_terminating(pod: Object) -> bool:
    return "deletionTimestamp" in pod["metadata"]


def check_eviction(objects: Store, pod: Object, *, dry_run: bool = False) -> None:
    """Check an eviction against the pod's budget and, except in a dry run, count it there.

    Raises:
        ApiError: 429 when its budget does not allow it, 500 when it has more than one.
    """
    phase = (pod.get("status") or {}).get("phase")
    if phase in ("Pending", "Succeeded", "Failed") or _is_terminating(pod):
        return
    budgets = _of(objects, pod)
    if len(budgets) > 1:
        message = (
            "This pod has more than one PodDisruptionBudget, which the eviction subresource "
            "does not support."
        )
        raise status.ApiError(500, message, reason="")
    if budgets and not _tolerates_unready(pod, budgets[0]):
        _check_budget(budgets[0])
        if not dry_run:
            _count_eviction(objects, budgets[0], pod)


def _of(objects: Store, pod: Object) -> list[Object]:
    labels = pod["metadata"].get("labels") or {}
    return [
        budget
        for budget in objects.select(
            "poddisruptionbudgets", namespace=pod["metadata"]["namespace"]
        )
        if request.compile_selector((budget.get("spec") or {}).get("selector"))(labels)
    ]


def _tolerates_unready(pod: Object, budget: Object) -> bool:
    """Return whether the pod may be evicted because it does not count as healthy."""
    if _is_ready(pod):
        return False
    if budget["spec"].get("unhealthyPodEvictionPolicy") == "AlwaysAllow":
        return True
    now = budget.get("status") or {}
    return bool(now.get("currentHealthy", 0) >= now.get("desiredHealthy", 0) > 0)


def _check_budget(budget: Object) -> None:
    metadata, now = budget["metadata"], budget.get("status") or {}
    name = metadata["name"]
    if now.get("observedGeneration", 0) < metadata.get("generation", 0):
        cause = f"The disruption budget {name} is still being processed by the server."
        raise _blocked(cause, retry_after_s=_STILL_PROCESSED_RETRY_S)
    if now.get("disruptionsAllowed", 0) == 0:
        cause = (
            f"The disruption budget {name} needs {now.get('desiredHealthy', 0)} healthy pods "
            f"and has {now.get('currentHealthy', 0)} currently"
        )
        raise _blocked(cause, retry_after_s=None)


def _count_eviction(objects: Store, budget: Object, pod: Object) -> None:
    """Count an eviction that the controller has not seen yet, as the API server does itself."""
    now = budget.get("status") or {}
    disrupted = (now.get("disruptedPods") or {}) | {pod["metadata"]["name"]: store.timestamp()}
    allowed = now.get("disruptionsAllowed", 0) - 1
    _write_status(objects, budget, {"disruptionsAllowed": allowed, "disruptedPods": disrupted})


def _blocked(cause: str, *, retry_after_s: int | None) -> status.ApiError:
    return status.ApiError(
        429,
        "Cannot evict pod as it would violate the pod's disruption budget.",
        details={"causes": [status.Cause(reason="DisruptionBudget", message=cause).to_json()]},
        retry_after_s=retry_after_s,
    )
