"""The rules of the embedded Kubernetes API: what each verb does to the store.

Semantics: Kubernetes documentation, "Kubernetes API Concepts", "Pod Lifecycle" (termination),
"Finalizers", "API-initiated Eviction"; ``sig-architecture/api-conventions.md`` for concurrency
control and for what ``/status`` may change.
"""

import copy
import datetime as dt
import secrets
from typing import Any

from mig_manager.sandbox.api import (
    budgets,
    calls,
    events,
    patches,
    resources,
    statuses,
    stores,
    validation,
)

Object = statuses.Object
Target = calls.Target

DEFAULT_GRACE_S = 30
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
    "terminationGracePeriodSeconds": DEFAULT_GRACE_S,
    "schedulerName": "default-scheduler",
}
_NEEDS_VERSION = (resources.LEASES, resources.BUDGETS)
"""Kinds whose update must name the version it is based on."""


class Registry:
    """Creates, changes and deletes objects as the real API server would.

    Args:
        store: Where the objects are. Reads go to it directly.
    """

    def __init__(self, store: stores.Store) -> None:
        self._store = store

    def get(self, target: Target) -> Object:
        """Return the stored object itself, which must not be changed.

        Raises:
            ApiError: 404, it is not there.
        """
        thing = self._store.peek(target.key)
        if thing is None:
            resource = target.resource
            raise statuses.not_found(resource.group, resource.plural, target.name)
        return thing

    def create(self, target: Target, body: Any, *, dry_run: bool = False) -> Object:
        """Store a new object.

        Raises:
            ApiError: 400 or 422 for a bad object, 409 when the name is taken.
        """
        resource = target.resource
        thing = events.to_core(resource, _identified(target, body))
        metadata = thing["metadata"]
        if metadata.get("resourceVersion"):
            message = "resourceVersion should not be set on objects to be created"
            raise statuses.ApiError(500, message, reason="")
        for field in (*_SERVER_OWNED, "resourceVersion"):
            metadata.pop(field, None)
        _name(resource, metadata)
        _prepare(resource, thing)
        validation.check(resource, thing)
        if dry_run:
            if self._store.find(resource, metadata["name"], target.namespace):
                raise statuses.already_exists(resource.group, resource.plural, metadata["name"])
            return self._store.stamped(thing, resource)
        with self._store.lock:
            return self._store.create(thing)

    def update(self, target: Target, body: Any, *, dry_run: bool = False) -> Object:
        """Replace an object, or its status when the target is ``/status``.

        Raises:
            ApiError: 404, 409 for a stale version or another uid, 400 or 422 for a bad object.
        """
        thing = events.to_core(target.resource, _identified(target, body))
        with self._store.lock:
            old = self.get(target)
            is_blind = not thing["metadata"].get("resourceVersion")
            if is_blind and target.resource in _NEEDS_VERSION:
                cause = statuses.Cause(
                    reason="FieldValueInvalid",
                    field="metadata.resourceVersion",
                    message="Invalid value: 0x0: must be specified for an update",
                )
                resource = target.resource
                raise statuses.invalid(resource.group, resource.kind, target.name, [cause])
            return self._replace(target, old, thing, dry_run=dry_run)

    def patch(
        self, target: Target, content_type: str, patch: Any, *, dry_run: bool = False
    ) -> Object:
        """Apply a patch to an object, or to its status when the target is ``/status``.

        Raises:
            ApiError: As ``update``, and 415 for an unknown patch type.
        """
        resource = target.resource
        with self._store.lock:
            old = self.get(target)
            patched = patches.apply(content_type, events.from_core(resource, old), patch)
            thing = events.to_core(resource, _identified(target, patched))
            return self._replace(target, old, thing, dry_run=dry_run)

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
        validation.check(resource, new, old)
        if dry_run:
            return new
        stored = self._store.write(target.key, new)
        if _has_ended(stored):
            self._store.remove(target.key)
        return stored

    def delete(self, target: Target, options: Object, *, dry_run: bool = False) -> Object:
        """Delete an object: at once, or a running pod by asking its kubelet to.

        Returns:
            The object when it (or its pod) remains or its kind is answered so, else a Status.

        Raises:
            ApiError: 404, or 409 when a precondition does not hold.
        """
        with self._store.lock:
            thing = self.get(target)
            _check_preconditions(target, thing["metadata"], options.get("preconditions") or {})
            return self._delete(target, thing, options, dry_run=dry_run)

    def _delete(self, target: Target, thing: Object, options: Object, *, dry_run: bool) -> Object:
        resource = target.resource
        grace_s = _grace_s(thing, options) if resource is resources.PODS else 0
        stays = grace_s > 0 or bool(thing["metadata"].get("finalizers"))
        if stays:
            marked = _marked(thing, grace_s)
            return marked if dry_run else self._store.write(target.key, marked)
        if not dry_run:
            thing = self._store.remove(target.key) or thing
            if resource is resources.NAMESPACES:
                self._empty(target.name)
        if resource in (resources.PODS, resources.SERVICE_ACCOUNTS):
            return thing
        details = {"group": resource.group} if resource.group else {}
        return statuses.success(
            name=target.name, kind=resource.plural, uid=thing["metadata"]["uid"], **details
        )

    def _empty(self, namespace: str) -> None:
        for resource in resources.RESOURCES:
            for thing in self._store.select(resource.storage, namespace=namespace):
                self._store.remove(stores.key_of(resource, thing))

    def evict(self, target: Target, body: Any, *, dry_run: bool = False) -> Object:
        """Delete a pod if its PodDisruptionBudget allows that.

        Raises:
            ApiError: 404, 409 for a precondition, 429 while a budget does not allow it, 500 for
                a pod that has more than one budget.
        """
        eviction = body if isinstance(body, dict) else {}
        if (eviction.get("metadata") or {}).get("name") != target.name:
            raise statuses.bad_request("name in URL does not match name in Eviction object")
        options = eviction.get("deleteOptions") or {}
        dry_run = dry_run or "All" in (options.get("dryRun") or ())
        with self._store.lock:
            pod = self.get(target)
            budgets.check_eviction(self._store, pod, dry_run=dry_run)
            _check_preconditions(target, pod["metadata"], options.get("preconditions") or {})
            if not dry_run:
                pod = self._store.write(target.key, _disrupted(pod))
            self._delete(target, pod, options, dry_run=dry_run)
        return statuses.success()

    def bind(self, target: Target, body: Any, *, dry_run: bool = False) -> Object:
        """Give a pod that has none its node, as the scheduler does.

        Raises:
            ApiError: 404, or 409 when the pod has a node already.
        """
        node = (body.get("target") or {}).get("name", "") if isinstance(body, dict) else ""
        if not node:
            raise statuses.bad_request("target.name: Required value")
        with self._store.lock:
            pod = self.get(target)
            present = pod["spec"].get("nodeName")
            if present:
                because = f"pod {target.name} is already assigned to node {present!r}"
                raise statuses.conflict("", "pods/binding", target.name, because=because)
            if not dry_run:
                pod = pod | {"metadata": dict(pod["metadata"])}
                self._store.write(target.key, pod | {"spec": pod["spec"] | {"nodeName": node}})
        return statuses.success()


def _identified(target: Target, body: Any) -> Object:
    """Return a copy of the body that agrees with the URL, as far as the body says."""
    resource = target.resource
    thing = copy.deepcopy(_shaped(body))
    for field, expected in (("apiVersion", resource.api_version), ("kind", resource.kind)):
        if thing.setdefault(field, expected) != expected:
            message = f"the {field} in the data ({thing[field]}) does not match the expected one"
            raise statuses.bad_request(f"{message} ({expected})")
    metadata = thing.setdefault("metadata", {})
    if resource.is_namespaced:
        metadata["namespace"] = metadata.get("namespace") or target.namespace
        if metadata["namespace"] != target.namespace:
            message = "the namespace of the provided object does not match the namespace sent on"
            raise statuses.bad_request(f"{message} the request")
    if target.name and metadata.setdefault("name", target.name) != target.name:
        message = f"the name of the object ({metadata['name']}) does not match the name on the URL"
        raise statuses.bad_request(f"{message} ({target.name})")
    return thing


def _shaped(body: Any) -> Object:
    """Return the body, seen to have members of the right JSON types where we look into them."""
    if not isinstance(body, dict) or not isinstance(body.get("metadata", {}), dict):
        raise statuses.bad_request("the object provided is unrecognized")
    metadata = body.get("metadata", {})
    for holder, fields in ((body, ("spec", "status")), (metadata, ("labels", "annotations"))):
        for field in fields:
            if not isinstance(holder.get(field) or {}, dict):
                raise statuses.bad_request(f"json: cannot unmarshal {field}: not an object")
    return body


def _name(resource: resources.Resource, metadata: Object) -> None:
    if not metadata.get("name") and metadata.get("generateName"):
        metadata["name"] = metadata["generateName"] + secrets.token_hex(3)[:5]
    if not metadata.get("name"):
        cause = statuses.Cause(
            reason="FieldValueRequired",
            field="metadata.name",
            message="Required value: name or generateName is required",
        )
        raise statuses.invalid(resource.group, resource.kind, "", [cause])


def _prepare(resource: resources.Resource, thing: Object) -> None:
    """Fill in the defaults, and drop a status that a creator may not set."""
    if resource is resources.PODS:
        thing["spec"] = _POD_DEFAULTS | (thing.get("spec") or {})
        thing["status"] = {"phase": "Pending", "qosClass": "BestEffort"}
    elif resource is resources.NAMESPACES:
        thing["status"] = {"phase": "Active"}
    elif "status" in resource.subresources and resource is not resources.NODES:
        thing["status"] = {}


def _check_preconditions(target: Target, present: Object, wanted: Object) -> None:
    resource = target.resource
    uid, version = wanted.get("uid"), wanted.get("resourceVersion")
    if uid and uid != present["uid"]:
        because = (
            f"Precondition failed: UID in precondition: {uid}, UID in object meta: "
            f"{present['uid']}"
        )
        raise statuses.conflict(resource.group, resource.plural, target.name, because=because)
    if version and version != present["resourceVersion"]:
        because = (
            "the object has been modified; please apply your changes to the latest version and "
            "try again"
        )
        raise statuses.conflict(resource.group, resource.plural, target.name, because=because)


def _grace_s(pod: Object, options: Object) -> int:
    """Return how long a pod may take to end; 0 when no kubelet has to agree."""
    spec, phase = pod.get("spec") or {}, (pod.get("status") or {}).get("phase")
    if not spec.get("nodeName") or phase in ("Succeeded", "Failed"):
        return 0
    asked = options.get("gracePeriodSeconds")
    if asked is None:
        asked = spec.get("terminationGracePeriodSeconds", DEFAULT_GRACE_S)
    return max(int(asked), 0) if int(asked) >= 0 else 1


def _marked(thing: Object, grace_s: int) -> Object:
    """Return the object as being deleted; a second request can only shorten the time left."""
    metadata = dict(thing["metadata"])
    if metadata.get("deletionGracePeriodSeconds", grace_s + 1) > grace_s:
        ends = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=grace_s)
        metadata["deletionTimestamp"] = stores.timestamp(ends)
        metadata["deletionGracePeriodSeconds"] = grace_s
    return thing | {"metadata": metadata}


def _has_ended(thing: Object) -> bool:
    metadata = thing["metadata"]
    return (
        "deletionTimestamp" in metadata
        and not metadata.get("finalizers")
        and not metadata.get("deletionGracePeriodSeconds")
    )


def _disrupted(pod: Object) -> Object:
    """Return the pod with the condition that tells its owner why it ends."""
    status = pod.get("status") or {}
    conditions = [
        each for each in status.get("conditions") or () if each["type"] != "DisruptionTarget"
    ]
    conditions.append(
        {
            "type": "DisruptionTarget",
            "status": "True",
            "reason": "EvictionByEvictionAPI",
            "message": "Eviction API: evicting",
            "lastTransitionTime": stores.timestamp(),
        }
    )
    return pod | {
        "metadata": dict(pod["metadata"]),
        "status": status | {"conditions": conditions},
    }
