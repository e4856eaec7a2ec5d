"""The rules of the API: the effect of every verb on the store.

Semantics: Kubernetes documentation, "Kubernetes API Concepts", "Pod Lifecycle" (termination),
"API-initiated Eviction"; ``sig-architecture/api-conventions.md`` for concurrency control and for
changes of ``/status``. Only evictions have dry runs.

PodDisruptionBudgets: "Disruptions", "Specifying a Disruption Budget for your Application".
Percentages round up. Unlike the real disruption controller, this one is immediate, and expects the
present pods, not the number that their controller wants.
"""

import copy
import datetime as dt
import math
from typing import Any

from mig_manager.core.objects import api_values, selectors
from mig_manager.sandbox.apiserver import content, kinds, request, store

Object = kinds.Object
Target = request.RequestTarget

_DEFAULT_GRACE_S = 30  # the default of a pod's ``terminationGracePeriodSeconds``
_SERVER_OWNED = (
    "uid",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "generation",
)
_POD_DEFAULTS = {
    "restartPolicy": "Always",
    "terminationGracePeriodSeconds": _DEFAULT_GRACE_S,
    "schedulerName": "default-scheduler",
}


class Registry:
    """Creates, changes and deletes objects as the real API server.

    Its methods raise ``StatusError`` with the real server's codes.
    """

    def __init__(self, objects: store.Store) -> None:
        self._store = objects

    def get(self, target: Target) -> Object:
        """Return the stored object itself, which must not be changed."""
        obj = self._store.peek(target.key)
        if obj is None:
            raise target.resource.not_found(target.name)
        return obj

    def create(self, target: Target, body: Any) -> Object:
        """Store a new object."""
        resource = target.resource
        obj = _check_identity(target, body)
        metadata = obj["metadata"]
        for field in (*_SERVER_OWNED, "resourceVersion"):
            metadata.pop(field, None)
        if not metadata.get("name"):
            message = "Required value: name is required"
            cause = kinds.cause("FieldValueRequired", message, field="metadata.name")
            raise resource.invalid("", [cause])
        if resource is kinds.PODS:
            obj["spec"] = _POD_DEFAULTS | (obj.get("spec") or {})
            obj["status"] = {"phase": "Pending", "qosClass": "BestEffort"}
        elif resource is kinds.NAMESPACES:
            obj["status"] = {"phase": "Active"}
        elif "status" in resource.subresources and resource is not kinds.NODES:
            obj["status"] = {}
        content.check(resource, obj)
        return self._store.create(obj)

    def update(self, target: Target, body: Any) -> Object:
        """Replace an object, or its status if the target is ``/status``."""
        obj = _check_identity(target, body)
        with self._store.lock:
            old = self.get(target)
            resource = target.resource
            is_blind = not obj["metadata"].get("resourceVersion")
            if is_blind and resource in (kinds.LEASES, kinds.BUDGETS):
                message = "Invalid value: 0x0: must be specified for an update"
                field = "metadata.resourceVersion"
                cause = kinds.cause("FieldValueInvalid", message, field=field)
                raise resource.invalid(target.name, [cause])
            return self._replace(target, old, obj)

    def patch(self, target: Target, content_type: str, patch: Any) -> Object:
        """Patch an object, or its status if the target is ``/status``."""
        with self._store.lock:
            old = self.get(target)
            obj = _check_identity(target, content.apply_patch(content_type, old, patch))
            return self._replace(target, old, obj)

    def _replace(self, target: Target, old: Object, new: Object) -> Object:
        resource = target.resource
        before = old["metadata"]
        metadata = new["metadata"]
        _check_preconditions(target, before, metadata)
        for field in _SERVER_OWNED:
            metadata.pop(field, None)
            if field in before:
                metadata[field] = before[field]
        # A status write may change metadata too, as in the real strategies.
        unchanged = "spec" if target.subresource == "status" else "status"
        if "status" in resource.subresources:
            new.pop(unchanged, None)
            if unchanged in old:
                new[unchanged] = old[unchanged]
        if resource.has_generation and new.get("spec") != old.get("spec"):
            metadata["generation"] = before.get("generation", 0) + 1
        metadata["resourceVersion"] = before["resourceVersion"]
        content.check(resource, new, old)
        return self._store.write(target.key, new)

    def delete(self, target: Target, options: Object) -> Object:
        """Delete an object at once; a running pod terminates, until its kubelet deletes it.

        Returns:
            The pod; for other kinds a Status.
        """
        with self._store.lock:
            obj = self.get(target)
            _check_preconditions(target, obj["metadata"], options.get("preconditions") or {})
            if target.resource is kinds.PODS:
                return self._delete_pod(target, obj, options.get("gracePeriodSeconds"))
            self._store.remove(target.key)
            uid = obj["metadata"]["uid"]
            return kinds.success(**target.resource.details(target.name), uid=uid)

    def _delete_pod(self, target: Target, pod: Object, grace_s: int | None) -> Object:
        spec = pod.get("spec") or {}
        phase = (pod.get("status") or {}).get("phase")
        if grace_s is None:
            grace_s = int(spec.get("terminationGracePeriodSeconds", _DEFAULT_GRACE_S))
        # Without running containers, kubelet has nothing to stop.
        if not spec.get("nodeName") or phase in ("Succeeded", "Failed") or grace_s == 0:
            return self._store.remove(target.key) or pod
        metadata = dict(pod["metadata"])
        # A second request can only shorten the remaining time.
        if metadata.get("deletionGracePeriodSeconds", grace_s + 1) > grace_s:
            ends = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=grace_s)
            metadata["deletionTimestamp"] = store.timestamp(ends)
            metadata["deletionGracePeriodSeconds"] = grace_s
        return self._store.write(target.key, pod | {"metadata": metadata})

    def evict(self, target: Target, body: Any, *, dry_run: bool = False) -> Object:
        """Delete a pod; 429 if its PodDisruptionBudget forbids that, 500 if it has two."""
        eviction = body if isinstance(body, dict) else {}
        if (eviction.get("metadata") or {}).get("name") != target.name:
            raise kinds.bad_request("name in URL does not match name in Eviction object")
        options = eviction.get("deleteOptions") or {}
        with self._store.lock:
            pod = self.get(target)
            _check_eviction(self._store, pod)
            _check_preconditions(target, pod["metadata"], options.get("preconditions") or {})
            if not dry_run and "All" not in (options.get("dryRun") or ()):
                self._delete_pod(target, pod, options.get("gracePeriodSeconds"))
        return kinds.success()

    def bind(self, target: Target, body: Any) -> Object:
        """Assign an unassigned pod to a node, as the scheduler does."""
        node = body["target"]["name"]
        with self._store.lock:
            pod = self.get(target)
            present = pod["spec"].get("nodeName")
            if present:
                raise kinds.StatusError(
                    409,
                    f'Operation cannot be fulfilled on pods/binding "{target.name}": '
                    f"pod {target.name} is already assigned to node {present!r}",
                    details={"name": target.name, "kind": "pods/binding"},
                )
            # In place of the scheduler's earlier refusal.
            others = kinds.at(pod, "status", "conditions", default=())
            conditions = [each for each in others if each["type"] != "PodScheduled"]
            conditions.append({"type": "PodScheduled", "status": "True"})
            bound = {
                "metadata": dict(pod["metadata"]),
                "spec": pod["spec"] | {"nodeName": node},
                "status": (pod.get("status") or {}) | {"conditions": conditions},
            }
            self._store.write(target.key, pod | bound)
        return kinds.success()


def _check_identity(target: Target, body: Any) -> Object:
    """Return a copy of the body, after checks of its JSON types and of its name in the URL."""
    if not isinstance(body, dict) or not isinstance(body.get("metadata", {}), dict):
        raise kinds.bad_request("the object provided is unrecognized")
    obj = copy.deepcopy(body)
    resource = target.resource
    metadata = obj.setdefault("metadata", {})
    for parent, fields in ((obj, ("spec", "status")), (metadata, ("labels", "annotations"))):
        for field in fields:
            if not isinstance(parent.get(field) or {}, dict):
                raise kinds.bad_request(f"json: cannot unmarshal {field}: not an object")
    for field, expected in (("apiVersion", resource.api_version), ("kind", resource.kind)):
        if obj.setdefault(field, expected) != expected:
            message = f"the {field} in the data ({obj[field]}) does not match the expected one"
            raise kinds.bad_request(f"{message} ({expected})")
    if resource.is_namespaced:
        metadata["namespace"] = metadata.get("namespace") or target.namespace
        if metadata["namespace"] != target.namespace:
            message = "the namespace of the provided object does not match the namespace sent on"
            raise kinds.bad_request(f"{message} the request")
    if target.name and metadata.setdefault("name", target.name) != target.name:
        message = f"the name of the object ({metadata['name']}) does not match the name on the URL"
        raise kinds.bad_request(f"{message} ({target.name})")
    return obj


def _check_preconditions(target: Target, present: Object, required: Object) -> None:
    uid, version = required.get("uid"), required.get("resourceVersion")
    if uid and uid != present["uid"]:
        because = (
            f"Precondition failed: UID in precondition: {uid}, UID in object meta: "
            f"{present['uid']}"
        )
        raise target.resource.conflict(target.name, because=because)
    if version and version != present["resourceVersion"]:
        because = (
            "the object has been modified; please apply your changes to the latest version and "
            "try again"
        )
        raise target.resource.conflict(target.name, because=because)


# -- disruption budgets -----------------------------------------------------------------------


def start_budget_controller(objects: store.Store) -> None:
    """Update the status of a namespace's budgets at every change of its pods and budgets."""

    def follow(record: store.Record) -> None:
        plural, namespace, _ = record.key
        if plural in ("pods", "poddisruptionbudgets"):
            for budget in objects.select("poddisruptionbudgets", namespace=namespace):
                status = (budget.get("status") or {}) | _pod_counts(objects, budget)
                new = budget | {"metadata": dict(budget["metadata"]), "status": status}
                objects.write(store.key_of(kinds.BUDGETS, budget), new)

    objects.subscribe(follow)


def _pod_counts(objects: store.Store, budget: Object) -> Object:
    """Return the counted part of a budget's status."""
    spec, namespace = budget.get("spec") or {}, budget["metadata"]["namespace"]
    pods = [pod for pod in objects.select("pods", namespace=namespace) if _selects(budget, pod)]
    healthy = sum(
        api_values.is_ready(pod.get("status") or {}) and "deletionTimestamp" not in pod["metadata"]
        for pod in pods
    )
    if spec.get("maxUnavailable") is not None:
        desired = max(0, len(pods) - _amount(spec["maxUnavailable"], len(pods)))
    else:
        desired = _amount(spec.get("minAvailable", 1), len(pods))
    return {
        "currentHealthy": healthy,
        "desiredHealthy": desired,
        "expectedPods": len(pods),
        "disruptionsAllowed": max(0, healthy - desired),
        "observedGeneration": budget["metadata"].get("generation", 0),
    }


def _selects(budget: Object, pod: Object) -> bool:
    selector = (budget.get("spec") or {}).get("selector")
    if selector is None:
        return False
    labels = pod["metadata"].get("labels") or {}
    return all(each.matches(labels) for each in selectors.parse_label_selector(selector))


def _amount(amount: int | str, total: int) -> int:
    if isinstance(amount, str):
        return math.ceil(int(amount.rstrip("%")) * total / 100)
    return amount


def _check_eviction(objects: store.Store, pod: Object) -> None:
    """Refuse an eviction that the budget forbids (429), or of a pod with two budgets (500)."""
    status, metadata = pod.get("status") or {}, pod["metadata"]
    is_running = status.get("phase") not in ("Pending", "Succeeded", "Failed")
    if not is_running or "deletionTimestamp" in metadata:
        return
    candidates = objects.select("poddisruptionbudgets", namespace=metadata["namespace"])
    budgets = [budget for budget in candidates if _selects(budget, pod)]
    if len(budgets) > 1:
        message = (
            "This pod has more than one PodDisruptionBudget, which the eviction subresource "
            "does not support."
        )
        raise kinds.StatusError(500, message, reason="")
    for budget in budgets:
        now, name = budget["status"], budget["metadata"]["name"]
        healthy, desired = now["currentHealthy"], now["desiredHealthy"]
        # A pod that is not ready may go while enough others are healthy, or if the policy says so.
        always = budget["spec"].get("unhealthyPodEvictionPolicy") == "AlwaysAllow"
        may_go = not api_values.is_ready(status) and (always or healthy >= desired > 0)
        if not may_go and now["disruptionsAllowed"] == 0:
            because = (
                f"The disruption budget {name} needs {desired} healthy pods and has {healthy} "
                "currently"
            )
            raise kinds.StatusError(
                429,
                "Cannot evict pod as it would violate the pod's disruption budget.",
                details={"causes": [kinds.cause("DisruptionBudget", because)]},
            )
