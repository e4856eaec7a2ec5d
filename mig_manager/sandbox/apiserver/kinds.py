"""The resources of the API server, their discovery documents, and failures.

Names, kinds and short names follow the Kubernetes API reference. Failures are ``StatusError``,
given by HTTP status in docstrings, and ``Status`` objects in answers. Reasons, codes and the texts
that clients match: ``sig-architecture/api-conventions.md``, "Response Status Kind", and the real
server's answers.
"""

import dataclasses
import functools
from typing import Any

Object = dict[str, Any]  # a Kubernetes object, or any JSON object, as plain Python data


def at(obj: Object, *path: str, default: Any) -> Any:
    """Return the value at a path of keys, or a default if it is missing or null."""
    value: Any = obj
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return default if value is None else value


# -- failures ---------------------------------------------------------------------------------

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


class StatusError(Exception):
    """A failure, to be answered with a Status."""

    def __init__(
        self,
        code: int,
        message: str,
        *,
        reason: str | None = None,
        details: Object | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.reason = _REASONS.get(code, "") if reason is None else reason
        self.details = details or {}

    def to_status(self) -> Object:
        """Return the ``v1.Status`` object."""
        status = _status("Failure") | {"message": self.message}
        if self.reason:
            status["reason"] = self.reason
        if self.details:
            status["details"] = self.details
        return status | {"code": self.code}


def success(**details: str) -> Object:
    """Return the Status of a successful action whose answer is no object."""
    return _status("Success") | ({"details": details} if details else {})


def _status(outcome: str) -> Object:
    return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": outcome}


def bad_request(message: str) -> StatusError:
    """Return 400."""
    return StatusError(400, message)


def no_such_path() -> StatusError:
    """Return 404 for a path without a resource."""
    return StatusError(404, "the server could not find the requested resource")


def cause(reason: str, message: str, *, field: str = "") -> Object:
    """Return one entry of ``details.causes``."""
    return {"reason": reason, "message": message} | ({"field": field} if field else {})


# -- resources --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """One kind of object, in version ``v1`` of its group, and its paths."""

    group: str = ""
    plural: str
    kind: str
    is_namespaced: bool = True
    short_names: tuple[str, ...] = ()
    subresources: tuple[str, ...] = ()
    has_generation: bool = False
    """``metadata.generation`` starts at 1 and counts the changes of ``spec``."""

    @property
    def api_version(self) -> str:
        """``v1`` or ``group/version``."""
        return f"{self.group}/v1" if self.group else "v1"

    @property
    def qualified(self) -> str:
        """``plural.group``, or the plural alone for the core group."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    def details(self, name: str) -> Object:
        """Return the details of a failure about an object."""
        words = {"name": name, "group": self.group, "kind": self.plural}
        return {key: word for key, word in words.items() if word}

    def not_found(self, name: str) -> StatusError:
        """Return 404 for a missing object."""
        message = f'{self.qualified} "{name}" not found'
        return StatusError(404, message, details=self.details(name))

    def conflict(self, name: str, *, because: str) -> StatusError:
        """Return 409 for a write whose precondition does not hold."""
        message = f'Operation cannot be fulfilled on {self.qualified} "{name}": {because}'
        return StatusError(409, message, details=self.details(name))

    def invalid(self, name: str, causes: list[Object]) -> StatusError:
        """Return 422 for an object that breaks a rule; causes name their field."""
        lines = [f"{each['field']}: {each['message']}" for each in causes]
        text = lines[0] if len(lines) == 1 else f"[{', '.join(lines)}]"
        words = f"{self.kind}.{self.group}" if self.group else self.kind
        details = self.details(name) | {"kind": self.kind, "causes": causes}
        return StatusError(422, f'{words} "{name}" is invalid: {text}', details=details)


_STATUS = ("status",)

NAMESPACES = Resource(
    plural="namespaces",
    kind="Namespace",
    is_namespaced=False,
    short_names=("ns",),
    subresources=_STATUS,
)
NODES = Resource(
    plural="nodes", kind="Node", is_namespaced=False, short_names=("no",), subresources=_STATUS
)
PODS = Resource(
    plural="pods",
    kind="Pod",
    short_names=("po",),
    subresources=("status", "binding", "eviction"),
)
EVENTS = Resource(plural="events", kind="Event", short_names=("ev",))
CONFIG_MAPS = Resource(plural="configmaps", kind="ConfigMap", short_names=("cm",))
DAEMON_SETS = Resource(
    group="apps",
    plural="daemonsets",
    kind="DaemonSet",
    short_names=("ds",),
    subresources=_STATUS,
    has_generation=True,
)
LEASES = Resource(group="coordination.k8s.io", plural="leases", kind="Lease")
BUDGETS = Resource(
    group="policy",
    plural="poddisruptionbudgets",
    kind="PodDisruptionBudget",
    short_names=("pdb",),
    subresources=_STATUS,
    has_generation=True,
)
CLAIMS = Resource(
    group="resource.k8s.io",
    plural="resourceclaims",
    kind="ResourceClaim",
    subresources=_STATUS,
)
CLASSES = Resource(
    group="resource.k8s.io",
    plural="deviceclasses",
    kind="DeviceClass",
    is_namespaced=False,
)
SLICES = Resource(
    group="resource.k8s.io",
    plural="resourceslices",
    kind="ResourceSlice",
    is_namespaced=False,
)

RESOURCES = (
    *(NAMESPACES, NODES, PODS, EVENTS, CONFIG_MAPS),
    *(DAEMON_SETS, LEASES, BUDGETS, CLAIMS, CLASSES, SLICES),
)

REVIEW = ("authorization.k8s.io", "selfsubjectaccessreviews")
"""Group and plural of the only kind that is answered without being stored."""


def find(group: str, plural: str) -> Resource | None:
    """Return the resource of a group and plural; None if not served."""
    return next((r for r in RESOURCES if (r.group, r.plural) == (group, plural)), None)


# -- discovery --------------------------------------------------------------------------------


@functools.cache
def discovery_documents() -> dict[str, Object]:
    """Return the documents that list the served resources, by path."""
    names = {resource.group for resource in RESOURCES if resource.group}
    groups = []
    for name in sorted({*names, REVIEW[0]}):
        version = {"groupVersion": f"{name}/v1", "version": "v1"}
        groups.append({"name": name, "versions": [version], "preferredVersion": version})
    documents: dict[str, Object] = {
        "/version": {
            "major": "1",
            "minor": "33",
            "gitVersion": "v1.33.0+sandbox",
        },
        "/api": {"kind": "APIVersions", "apiVersion": "v1", "versions": ["v1"]},
        "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups},
        "/api/v1": _resource_list(""),
    }
    for group in groups:
        path = f"/apis/{group['name']}"
        documents[path] = {"kind": "APIGroup", "apiVersion": "v1"} | group
        documents[f"{path}/v1"] = _resource_list(str(group["name"]))
    return documents


def _resource_list(group: str) -> Object:
    entries: list[Object] = []
    for resource in (each for each in RESOURCES if each.group == group):
        common = {"namespaced": resource.is_namespaced, "kind": resource.kind}
        entry = {
            "name": resource.plural,
            "singularName": resource.kind.lower(),
            "verbs": ["create", "delete", "get", "list", "patch", "update", "watch"],
            "shortNames": list(resource.short_names),
            # For ``kubectl get all``.
            "categories": ["all"] if resource in (PODS, DAEMON_SETS) else [],
        }
        entries.append(common | entry)
        # Clients send the Eviction of this group and version.
        subresources: dict[str, Object] = {
            "status": {"verbs": ["get", "patch", "update"]},
            "binding": {"kind": "Binding", "verbs": ["create"]},
            "eviction": {
                "kind": "Eviction",
                "group": "policy",
                "version": "v1",
                "verbs": ["create"],
            },
        }
        for subresource in resource.subresources:
            name = f"{resource.plural}/{subresource}"
            entries.append(common | {"name": name, "singularName": ""} | subresources[subresource])
    if group == REVIEW[0]:
        review = {"namespaced": False, "kind": "SelfSubjectAccessReview", "verbs": ["create"]}
        entries.append({"name": REVIEW[1], "singularName": REVIEW[1][:-1]} | review)
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": f"{group}/v1" if group else "v1",
        "resources": entries,
    }
