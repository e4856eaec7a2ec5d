"""The rules of the API: what each verb does to the store.

Semantics: Kubernetes documentation, "Kubernetes API Concepts", "Pod Lifecycle" (termination),
"Finalizers", "API-initiated Eviction"; ``sig-architecture/api-conventions.md`` for concurrency
control and for what ``/status`` may change.

PodDisruptionBudgets: "Disruptions", "Specifying a Disruption Budget for your Application".
Percentages round up. Unlike the real disruption controller ours is immediate, and a pod whose
controller is not stored here counts for itself.
"""

import copy
import datetime as dt
import math
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from mig_manager.sandbox.apiserver import content, request, resources, store

Object = resources.Object
Target = request.Target

_DEFAULT_GRACE_S = 30
"""``terminationGracePeriodSeconds`` of a pod that does not say."""
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
_STILL_PROCESSED_RETRY_S = 10
"""The server's ``Retry-After`` while a budget's status is older than its spec."""


class Registry:
    """Creates, changes and deletes objects as the real API server would.

    Its methods raise ``ApiError`` with the codes of the real server.
    """

    def __init__(self, objects: store.Store) -> None:
        self._store = objects

    def get(self, target: Target) -> Object:
        """Return the stored object itself, which must not be changed."""
        obj = self._store.peek(target.key)
        if obj is None:
            raise target.resource.not_found(target.name)
        return obj

    def create(self, target: Target, body: Any, *, dry_run: bool = False) -> Object:
        """Store a new object."""
        resource = target.resource
        obj = _identified(target, body)
        metadata = obj["metadata"]
        if metadata.get("resourceVersion"):
            message = "resourceVersion should not be set on objects to be created"
            raise resources.ApiError(500, message, reason="")
        for field in (*_SERVER_OWNED, "resourceVersion"):
            metadata.pop(field, None)
        if not metadata.get("name") and metadata.get("generateName"):
            metadata["name"] = metadata["generateName"] + secrets.token_hex(3)[:5]
        if not metadata.get("name"):
            message = "Required value: name or generateName is required"
            cause = resources.cause("FieldValueRequired", message, field="metadata.name")
            raise resource.invalid("", [cause])
        if resource is resources.PODS:
            obj["spec"] = _POD_DEFAULTS | (obj.get("spec") or {})
            obj["status"] = {"phase": "Pending", "qosClass": "BestEffort"}
        elif resource is resources.NAMESPACES:
            obj["status"] = {"phase": "Active"}
        elif "status" in resource.subresources and resource is not resources.NODES:
            obj["status"] = {}
        content.check(resource, obj)
        if not dry_run:
            return self._store.create(obj)
        if self._store.find(resource, metadata["name"], target.namespace):
            raise resource.already_exists(metadata["name"])
        return store.stamped(obj, resource)

    def update(self, target: Target, body: Any, *, dry_run: bool = False) -> Object:
        """Replace an object, or its status when the target is ``/status``."""
        obj = _identified(target, body)
        with self._store.lock:
            old = self.get(target)
            resource = target.resource
            is_blind = not obj["metadata"].get("resourceVersion")
            if is_blind and resource in (resources.LEASES, resources.BUDGETS):
                message = "Invalid value: 0x0: must be specified for an update"
                field = "metadata.resourceVersion"
                cause = resources.cause("FieldValueInvalid", message, field=field)
                raise resource.invalid(target.name, [cause])
            return self._replace(target, old, obj, dry_run=dry_run)

    def patch(
        self, target: Target, content_type: str, patch: Any, *, dry_run: bool = False
    ) -> Object:
        """Apply a patch to an object, or to its status when the target is ``/status``."""
        with self._store.lock:
            old = self.get(target)
            obj = _identified(target, content.patched(content_type, old, patch))
            return self._replace(target, old, obj, dry_run=dry_run)

    def _replace(self, target: Target, old: Object, new: Object, *, dry_run: bool) -> Object:
        resource, before, metadata = target.resource, old["metadata"], new["metadata"]
        _check_preconditions(target, before, metadata)
        for field in _SERVER_OWNED:
            metadata.pop(field, None)
            if field in before:
                metadata[field] = before[field]
        # A status write may change metadata too, as it may in the real strategies.
        kept = "spec" if target.subresource == "status" else "status"
        if "status" in resource.subresources:
            new.pop(kept, None)
            if kept in old:
                new[kept] = old[kept]
        if resource.has_generation and new.get("spec") != old.get("spec"):
            metadata["generation"] = before.get("generation", 0) + 1
        metadata["resourceVersion"] = before["resourceVersion"]
        content.check(resource, new, old)
        if dry_run:
            return new
        stored = self._store.write(target.key, new)
        now = stored["metadata"]
        is_kept = now.get("finalizers") or now.get("deletionGracePeriodSeconds")
        if "deletionTimestamp" in now and not is_kept:
            self._store.remove(target.key)
        return stored

    def delete(self, target: Target, options: Object, *, dry_run: bool = False) -> Object:
        """Delete an object: at once, or a running pod by asking its kubelet to.

        Returns:
            The object when it (or its pod) remains or its kind is answered so, else a Status.
        """
        with self._store.lock:
            obj = self.get(target)
            _check_preconditions(target, obj["metadata"], options.get("preconditions") or {})
            return self._delete(target, obj, options, dry_run=dry_run)

    def _delete(self, target: Target, obj: Object, options: Object, *, dry_run: bool) -> Object:
        resource = target.resource
        grace_s = _grace_s(obj, options) if resource is resources.PODS else 0
        if grace_s > 0 or obj["metadata"].get("finalizers"):
            marked = _marked(obj, grace_s)
            return marked if dry_run else self._store.write(target.key, marked)
        if not dry_run:
            obj = self._store.remove(target.key) or obj
            if resource is resources.NAMESPACES:
                for each in resources.RESOURCES:
                    for inside in self._store.select(each.plural, namespace=target.name):
                        self._store.remove(store.key_of(each, inside))
        if resource in (resources.PODS, resources.SERVICE_ACCOUNTS):
            return obj
        return resources.success(**resource.details(target.name), uid=obj["metadata"]["uid"])

    def evict(self, target: Target, body: Any, *, dry_run: bool = False) -> Object:
        """Delete a pod; 429 while its PodDisruptionBudget forbids that, 500 where it has two."""
        eviction = body if isinstance(body, dict) else {}
        if (eviction.get("metadata") or {}).get("name") != target.name:
            raise resources.bad_request("name in URL does not match name in Eviction object")
        options = eviction.get("deleteOptions") or {}
        dry_run = dry_run or "All" in (options.get("dryRun") or ())
        with self._store.lock:
            pod = self.get(target)
            _check_eviction(self._store, pod, dry_run=dry_run)
            _check_preconditions(target, pod["metadata"], options.get("preconditions") or {})
            if not dry_run:
                pod = self._store.write(target.key, _disrupted(pod))
            self._delete(target, pod, options, dry_run=dry_run)
        return resources.success()

    def bind(self, target: Target, body: Any, *, dry_run: bool = False) -> Object:
        """Assign an unassigned pod to a node, as the scheduler does."""
        node = (body.get("target") or {}).get("name", "") if isinstance(body, dict) else ""
        if not node:
            raise resources.bad_request("target.name: Required value")
        with self._store.lock:
            pod = self.get(target)
            present = pod["spec"].get("nodeName")
            if present:
                raise resources.ApiError(
                    409,
                    f'Operation cannot be fulfilled on pods/binding "{target.name}": '
                    f"pod {target.name} is already assigned to node {present!r}",
                    details={"name": target.name, "kind": "pods/binding"},
                )
            if not dry_run:
                spec = pod["spec"] | {"nodeName": node}
                bound = pod | {"metadata": dict(pod["metadata"]), "spec": spec}
                self._store.write(target.key, bound)
        return resources.success()


def _identified(target: Target, body: Any) -> Object:
    """Return a copy of the body, of checked JSON types, whose identity agrees with the URL."""
    if not isinstance(body, dict) or not isinstance(body.get("metadata", {}), dict):
        raise resources.bad_request("the object provided is unrecognized")
    obj, resource = copy.deepcopy(body), target.resource
    metadata = obj.setdefault("metadata", {})
    for parent, fields in ((obj, ("spec", "status")), (metadata, ("labels", "annotations"))):
        for field in fields:
            if not isinstance(parent.get(field) or {}, dict):
                raise resources.bad_request(f"json: cannot unmarshal {field}: not an object")
    for field, expected in (("apiVersion", resource.api_version), ("kind", resource.kind)):
        if obj.setdefault(field, expected) != expected:
            message = f"the {field} in the data ({obj[field]}) does not match the expected one"
            raise resources.bad_request(f"{message} ({expected})")
    if resource.is_namespaced:
        metadata["namespace"] = metadata.get("namespace") or target.namespace
        if metadata["namespace"] != target.namespace:
            message = "the namespace of the provided object does not match the namespace sent on"
            raise resources.bad_request(f"{message} the request")
    if target.name and metadata.setdefault("name", target.name) != target.name:
        message = f"the name of the object ({metadata['name']}) does not match the name on the URL"
        raise resources.bad_request(f"{message} ({target.name})")
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


def _grace_s(pod: Object, options: Object) -> int:
    """Return how long a pod may take to end; 0 when no kubelet has to agree."""
    spec, phase = pod.get("spec") or {}, (pod.get("status") or {}).get("phase")
    if not spec.get("nodeName") or phase in ("Succeeded", "Failed"):
        return 0
    grace_s = options.get("gracePeriodSeconds")
    if grace_s is None:
        grace_s = spec.get("terminationGracePeriodSeconds", _DEFAULT_GRACE_S)
    return int(grace_s) if int(grace_s) >= 0 else 1


def _marked(obj: Object, grace_s: int) -> Object:
    """Return the object as being deleted; a second request can only shorten the time left."""
    metadata = dict(obj["metadata"])
    if metadata.get("deletionGracePeriodSeconds", grace_s + 1) > grace_s:
        ends = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=grace_s)
        metadata["deletionTimestamp"] = store.timestamp(ends)
        metadata["deletionGracePeriodSeconds"] = grace_s
    return obj | {"metadata": metadata}


def _disrupted(pod: Object) -> Object:
    """Return the pod with the condition that names the reason for its end."""
    target = {
        "type": "DisruptionTarget",
        "status": "True",
        "reason": "EvictionByEvictionAPI",
        "message": "Eviction API: evicting",
        "lastTransitionTime": store.timestamp(),
    }
    status = pod.get("status") or {}
    others = [c for c in status.get("conditions") or () if c["type"] != target["type"]]
    status = status | {"conditions": [*others, target]}
    return pod | {"metadata": dict(pod["metadata"]), "status": status}


# -- disruption budgets -----------------------------------------------------------------------


def start_budget_controller(objects: store.Store) -> Callable[[], None]:
    """Update the status of every budget at once after each change; return how to stop that."""

    def follow(record: store.Record) -> None:
        plural, namespace, _ = record.key
        if plural in ("pods", "poddisruptionbudgets", "replicasets"):
            for budget in objects.select("poddisruptionbudgets", namespace=namespace):
                _write_status(objects, budget, _counted(objects, budget))

    return objects.subscribe(follow)


def _write_status(objects: store.Store, budget: Object, change: Object) -> None:
    key = store.key_of(resources.BUDGETS, budget)
    new = (budget.get("status") or {}) | change
    objects.write(key, budget | {"metadata": dict(budget["metadata"]), "status": new})


def _counted(objects: store.Store, budget: Object) -> Object:
    """Return the counted part of a budget's status."""
    spec = budget.get("spec") or {}
    pods = [
        pod
        for pod in objects.select("pods", namespace=budget["metadata"]["namespace"])
        if _selects(budget, pod)
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


def _selects(budget: Object, pod: Object) -> bool:
    selector = (budget.get("spec") or {}).get("selector")
    return request.compile_selector(selector)(pod["metadata"].get("labels") or {})


def _expected(objects: store.Store, pods: Sequence[Object]) -> int:
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


def _check_eviction(objects: store.Store, pod: Object, *, dry_run: bool) -> None:
    """Refuse an eviction that the pod's budget forbids (429, 500); else count it there."""
    phase = (pod.get("status") or {}).get("phase")
    if phase in ("Pending", "Succeeded", "Failed") or _is_terminating(pod):
        return
    candidates = objects.select("poddisruptionbudgets", namespace=pod["metadata"]["namespace"])
    budgets = [budget for budget in candidates if _selects(budget, pod)]
    if len(budgets) > 1:
        message = (
            "This pod has more than one PodDisruptionBudget, which the eviction subresource "
            "does not support."
        )
        raise resources.ApiError(500, message, reason="")
    if not budgets:
        return
    (budget,) = budgets
    now = budget.get("status") or {}
    name, healthy = budget["metadata"]["name"], now.get("currentHealthy", 0)
    desired, allowed = now.get("desiredHealthy", 0), now.get("disruptionsAllowed", 0)
    # A pod that does not count as healthy may go while enough others do, or as the policy says.
    always = budget["spec"].get("unhealthyPodEvictionPolicy") == "AlwaysAllow"
    if not _is_ready(pod) and (always or healthy >= desired > 0):
        return
    if now.get("observedGeneration", 0) < budget["metadata"].get("generation", 0):
        message = f"The disruption budget {name} is still being processed by the server."
        raise _blocked(message, retry_after_s=_STILL_PROCESSED_RETRY_S)
    if allowed == 0:
        raise _blocked(
            f"The disruption budget {name} needs {desired} healthy pods and has {healthy} "
            "currently"
        )
    if not dry_run:
        # The API server counts an eviction itself, before the controller has seen it.
        disrupted = now.get("disruptedPods") or {}
        disrupted = disrupted | {pod["metadata"]["name"]: store.timestamp()}
        change = {"disruptionsAllowed": allowed - 1, "disruptedPods": disrupted}
        _write_status(objects, budget, change)


def _blocked(message: str, *, retry_after_s: int | None = None) -> resources.ApiError:
    return resources.ApiError(
        429,
        "Cannot evict pod as it would violate the pod's disruption budget.",
        details={"causes": [resources.cause("DisruptionBudget", message)]},
        retry_after_s=retry_after_s,
    )
