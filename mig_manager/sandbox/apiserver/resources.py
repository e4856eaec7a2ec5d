"""The resources that the API server serves, as data, and the discovery documents made of them.

Names, kinds and short names are those of the Kubernetes API reference.
"""

import dataclasses
import functools
from typing import Any

Object = dict[str, Any]
"""A Kubernetes object, or any JSON object, as plain Python data."""

_REASONS = {
    400: "BadRequest",
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    405: "MethodNotAllowed",
    406: "NotAcceptable",
    409: "Conflict",
    410: "Expired",
    413: "RequestEntityTooLarge",
    415: "UnsupportedMediaType",
    422: "Invalid",
    429: "TooManyRequests",
    500: "InternalError",
    503: "ServiceUnavailable",
    504: "Timeout",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """One entry of ``details.causes``."""

    reason: str
    message: str
    field: str = ""

    def to_json(self) -> Object:
        """Return the cause as the API writes it; an empty field is left out."""
        cause = {"reason": self.reason, "message": self.message}
        return cause | ({"field": self.field} if self.field else {})


class ApiError(Exception):
    """An answer that is not a success."""

    def __init__(
        self,
        code: int,
        message: str,
        *,
        reason: str | None = None,
        details: Object | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.reason = _REASONS.get(code, "") if reason is None else reason
        self.details = details or {}
        self.retry_after_s = retry_after_s

    def to_status(self) -> Object:
        """Return the ``v1.Status`` object that is the answer's body."""
        status = _status("Failure") | {"message": self.message}
        if self.reason:
            status["reason"] = self.reason
        retry = {"retryAfterSeconds": self.retry_after_s} if self.retry_after_s else {}
        if details := self.details | retry:
            status["details"] = details
        return status | {"code": self.code}


def success(**details: str) -> Object:
    """Return the Status of an action that has no object of its own to answer with."""
    return _status("Success") | ({"details": details} if details else {})


def bad_request(message: str) -> ApiError:
    """Return 400."""
    return ApiError(400, message)


def not_found(group: str, plural: str, name: str) -> ApiError:
    """Return 404 for a missing object."""
    message = f'{qualified(group, plural)} "{name}" not found'
    return ApiError(404, message, details=_details(group, plural, name))


def no_such_path() -> ApiError:
    """Return 404 for a path that no resource serves."""
    return ApiError(404, "the server could not find the requested resource")


def already_exists(group: str, plural: str, name: str) -> ApiError:
    """Return 409 for the creation of an existing name."""
    message = f'{qualified(group, plural)} "{name}" already exists'
    details = _details(group, plural, name)
    return ApiError(409, message, reason="AlreadyExists", details=details)


def conflict(group: str, plural: str, name: str, *, because: str) -> ApiError:
    """Return 409 for a write whose precondition does not hold."""
    message = f'Operation cannot be fulfilled on {qualified(group, plural)} "{name}": {because}'
    return ApiError(409, message, details=_details(group, plural, name))


def expired(message: str) -> ApiError:
    """Return 410 for a version older than the history."""
    return ApiError(410, message)


def invalid(group: str, kind: str, name: str, causes: list[Cause]) -> ApiError:
    """Return 422 for an object that breaks a rule; each cause names its field."""
    lines = [f"{cause.field}: {cause.message}" for cause in causes]
    text = lines[0] if len(lines) == 1 else f"[{', '.join(lines)}]"
    details = _details(group, kind, name) | {"causes": [cause.to_json() for cause in causes]}
    return ApiError(422, f'{qualified(group, kind)} "{name}" is invalid: {text}', details=details)


def qualified(group: str, word: str) -> str:
    """Return ``plural.group``, or the word alone for the core group."""
    return f"{word}.{group}" if group else word


def _status(outcome: str) -> Object:
    return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": outcome}


def _details(group: str, kind: str, name: str) -> Object:
    details: Object = {"name": name} if name else {}
    return details | ({"group": group} if group else {}) | {"kind": kind}


_VERBS = ("create", "delete", "get", "list", "patch", "update", "watch")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """One kind of object and its paths."""

    group: str = ""
    version: str = "v1"
    plural: str
    kind: str
    is_namespaced: bool = True
    short_names: tuple[str, ...] = ()
    subresources: tuple[str, ...] = ()
    has_generation: bool = False
    """``metadata.generation`` starts at 1 and counts the changes of ``spec``."""
    categories: tuple[str, ...] = ()
    """Such as ``all``, for ``kubectl get all``."""

    @property
    def api_version(self) -> str:
        """``v1`` or ``group/version``."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, *, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """Return the URL path of the collection, of an object, or of its subresource."""
        parts = [f"/apis/{self.api_version}" if self.group else f"/api/{self.version}"]
        if self.is_namespaced and namespace:
            parts.append(f"namespaces/{namespace}")
        return "/".join([*parts, *filter(None, (self.plural, name, subresource))])


NAMESPACES = Resource(
    plural="namespaces",
    kind="Namespace",
    is_namespaced=False,
    short_names=("ns",),
    subresources=("status",),
)
NODES = Resource(
    plural="nodes",
    kind="Node",
    is_namespaced=False,
    short_names=("no",),
    subresources=("status",),
)
PODS = Resource(
    plural="pods",
    kind="Pod",
    short_names=("po",),
    categories=("all",),
    subresources=("status", "binding", "eviction"),
)
EVENTS = Resource(plural="events", kind="Event", short_names=("ev",))
CONFIG_MAPS = Resource(plural="configmaps", kind="ConfigMap", short_names=("cm",))
SERVICE_ACCOUNTS = Resource(plural="serviceaccounts", kind="ServiceAccount", short_names=("sa",))
DAEMON_SETS = Resource(
    group="apps",
    plural="daemonsets",
    kind="DaemonSet",
    short_names=("ds",),
    categories=("all",),
    subresources=("status",),
    has_generation=True,
)
REPLICA_SETS = Resource(
    group="apps",
    plural="replicasets",
    kind="ReplicaSet",
    short_names=("rs",),
    categories=("all",),
    subresources=("status",),
    has_generation=True,
)
LEASES = Resource(group="coordination.k8s.io", plural="leases", kind="Lease")
BUDGETS = Resource(
    group="policy",
    plural="poddisruptionbudgets",
    kind="PodDisruptionBudget",
    short_names=("pdb",),
    subresources=("status",),
    has_generation=True,
)
CLAIMS = Resource(
    group="resource.k8s.io",
    plural="resourceclaims",
    kind="ResourceClaim",
    subresources=("status",),
)

RESOURCES = (
    *(NAMESPACES, NODES, PODS, EVENTS, CONFIG_MAPS, SERVICE_ACCOUNTS),
    *(DAEMON_SETS, REPLICA_SETS, LEASES, BUDGETS, CLAIMS),
)

REVIEWS = {
    ("authorization.k8s.io", "selfsubjectaccessreviews"): "SelfSubjectAccessReview",
    ("authentication.k8s.io", "selfsubjectreviews"): "SelfSubjectReview",
}
"""Kinds that are answered and never stored, by group and plural."""


def find(group: str, version: str, plural: str) -> Resource | None:
    """Return the resource served at a group, version and plural, or None."""
    for resource in RESOURCES:
        if (resource.group, resource.version, resource.plural) == (group, version, plural):
            return resource
    return None


def resource_of(obj: Object) -> Resource:
    """Return the resource that an object belongs to.

    Raises:
        ApiError: 404, no resource has this ``apiVersion`` and ``kind``.
    """
    for resource in RESOURCES:
        if (resource.api_version, resource.kind) == (obj.get("apiVersion"), obj.get("kind")):
            return resource
    raise no_such_path()


def discovery_document(path: str) -> Object | None:
    """Return the document by which clients find out what is served, or None for another path."""
    return _documents().get(path.rstrip("/"))


@functools.cache
def _documents() -> dict[str, Object]:
    groups = [_group(name) for name in _group_names()]
    documents: dict[str, Object] = {
        "/version": {
            "major": "1",
            "minor": "33",
            "gitVersion": "v1.33.0+sandbox",
            "gitCommit": "",
            "gitTreeState": "clean",
            "buildDate": "2025-04-23T00:00:00Z",
            "goVersion": "",
            "compiler": "",
            "platform": "linux/amd64",
        },
        "/api": {"kind": "APIVersions", "apiVersion": "v1", "versions": ["v1"]},
        "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups},
        "/api/v1": _resource_list(""),
    }
    for group in groups:
        path = f"/apis/{group['name']}"
        documents[path] = {"kind": "APIGroup", "apiVersion": "v1"} | group
        documents[f"{path}/v1"] = _resource_list(group["name"])
    return documents


def _group_names() -> list[str]:
    stored = {resource.group for resource in RESOURCES if resource.group}
    return sorted(stored | {group for group, _ in REVIEWS})


def _group(name: str) -> Object:
    version = {"groupVersion": f"{name}/v1", "version": "v1"}
    return {"name": name, "versions": [version], "preferredVersion": version}


def _resource_list(group: str) -> Object:
    entries = [
        entry
        for resource in RESOURCES
        if resource.group == group
        for entry in (_entry(resource), *(_subentry(resource, s) for s in resource.subresources))
    ]
    entries += [
        {"name": plural, "singularName": kind.lower(), "namespaced": False, "kind": kind,
         "verbs": ["create"]}
        for (review_group, plural), kind in REVIEWS.items()
        if review_group == group
    ]  # fmt: skip
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": f"{group}/v1" if group else "v1",
        "resources": entries,
    }


def _entry(resource: Resource) -> Object:
    return {
        "name": resource.plural,
        "singularName": resource.kind.lower(),
        "namespaced": resource.is_namespaced,
        "kind": resource.kind,
        "verbs": list(_VERBS),
        "shortNames": list(resource.short_names),
        "categories": list(resource.categories),
    }


def _subentry(resource: Resource, name: str) -> Object:
    entry: Object = {
        "name": f"{resource.plural}/{name}",
        "singularName": "",
        "namespaced": resource.is_namespaced,
        "kind": resource.kind,
        "verbs": ["get", "patch", "update"],
    }
    # The group and version of an eviction say which Eviction clients may send.
    if name == "eviction":
        entry |= {"kind": "Eviction", "group": "policy", "version": "v1", "verbs": ["create"]}
    elif name == "binding":
        entry |= {"kind": "Binding", "verbs": ["create"]}
    return entry
