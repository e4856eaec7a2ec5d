"""From a URL to what is asked: the verb, the resource, the object, and the list options.

Paths and parameters: Kubernetes documentation, "Kubernetes API Concepts".
"""

import base64
import binascii
import dataclasses
import json
from collections.abc import Callable, Mapping

from mig_manager.sandbox.api import resources, selectors, statuses

_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete", "GET": "get"}
_CREATED_THROUGH = ("binding", "eviction")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a request is about."""

    resource: resources.Resource
    namespace: str = ""
    """Empty for cluster-wide resources, and for a collection over all namespaces."""
    name: str = ""
    """Empty for a collection."""
    subresource: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        """Key of the object in the store."""
        return self.resource.storage, self.namespace, self.name

    @property
    def resource_and_subresource(self) -> str:
        """``pods`` or ``pods/eviction``, as rules and counters name it."""
        plural = self.resource.plural
        return f"{plural}/{self.subresource}" if self.subresource else plural


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A request that is about a resource."""

    verb: str
    target: Target
    query: Mapping[str, str]

    @property
    def is_dry_run(self) -> bool:
        """Whether everything but the storing is to be done."""
        return "All" in self.query.get("dryRun", "")


def parse(method: str, path: str, query: Mapping[str, str]) -> Call | None:
    """Return what a request asks for; None when its path is not that of a known resource.

    Raises:
        ApiError: 405, the resource does not have this method here.
    """
    target = _target([part for part in path.split("/") if part])
    if target is None:
        return None
    return Call(verb=_verb(method, target, query), target=target, query=query)


def _target(parts: list[str]) -> Target | None:
    match parts:
        case ["api", version, *rest]:
            group = ""
        case ["apis", group, version, *rest]:
            pass
        case _:
            return None
    match rest:
        case ["namespaces", namespace, plural, *rest] if plural != "status":
            return _within(resources.find(group, version, plural), namespace, rest)
        case [plural, *rest]:
            return _within(resources.find(group, version, plural), "", rest)
        case _:
            return None


def _within(resource: resources.Resource | None, namespace: str, rest: list[str]) -> Target | None:
    if resource is None or (namespace and not resource.is_namespaced):
        return None
    match rest:
        case []:
            return Target(resource=resource, namespace=namespace)
        case _ if resource.is_namespaced and not namespace:
            return None
        case [name]:
            return Target(resource=resource, namespace=namespace, name=name)
        case [name, subresource] if subresource in resource.subresources:
            return Target(
                resource=resource, namespace=namespace, name=name, subresource=subresource
            )
        case _:
            return None


def _verb(method: str, target: Target, query: Mapping[str, str]) -> str:
    verb = _VERBS.get(method, "")
    if not _is_allowed(verb, target):
        message = "the server does not allow this method on the requested resource"
        raise statuses.ApiError(405, message)
    if verb == "get" and not target.name:
        return "watch" if query.get("watch", "") in ("1", "true") else "list"
    if verb == "delete" and not target.name:
        return "deletecollection"
    return verb


def _is_allowed(verb: str, target: Target) -> bool:
    if target.subresource in _CREATED_THROUGH:
        return verb == "create"
    if target.name:
        return verb in ("get", "update", "patch") or (verb == "delete" and not target.subresource)
    is_one_place = bool(target.namespace) or not target.resource.is_namespaced
    return verb == "get" or (verb in ("create", "delete") and is_one_place)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which objects of a collection are wanted."""

    storage: str
    namespace: str
    labels: Callable[[selectors.Labels], bool]
    fields: Callable[[statuses.Object], bool]
    is_everything: bool
    """Neither labels nor fields restrict it."""

    def matches(self, thing: statuses.Object | None) -> bool:
        """Return whether an object (None: no object) is in the selection."""
        if thing is None:
            return False
        return self.labels(thing["metadata"].get("labels") or {}) and self.fields(thing)


def selection(call: Call) -> Selection:
    """Return the selection that the query asks for.

    Raises:
        ApiError: 400, a selector cannot be understood.
    """
    labels, fields = call.query.get("labelSelector", ""), call.query.get("fieldSelector", "")
    storage = call.target.resource.storage
    return Selection(
        storage=storage,
        namespace=call.target.namespace,
        labels=selectors.parse_labels(labels),
        fields=selectors.parse_fields(fields, storage),
        is_everything=not labels and not fields,
    )


def version(query: Mapping[str, str]) -> int | None:
    """Return the ``resourceVersion`` asked for; None when none is.

    Raises:
        ApiError: 400, it is not one of ours.
    """
    text = query.get("resourceVersion", "")
    if text and not text.isdigit():
        message = f'resourceVersion: Invalid value: "{text}": strconv.ParseUint: invalid syntax'
        raise statuses.bad_request(message)
    return int(text) if text else None


def number(query: Mapping[str, str], name: str) -> int:
    """Return a parameter that is a count; 0 when it is absent.

    Raises:
        ApiError: 400, it is no number.
    """
    text = query.get(name, "") or "0"
    if not text.isdigit():
        message = f'strconv.ParseInt: parsing "{text}": invalid syntax ({name})'
        raise statuses.bad_request(message)
    return int(text)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """Where the next page of a list begins."""

    version: int
    after: tuple[str, str]
    """Namespace and name of the last object served."""

    def to_token(self) -> str:
        """Return the opaque ``continue`` token."""
        return base64.urlsafe_b64encode(json.dumps([self.version, *self.after]).encode()).decode()


def continuation(query: Mapping[str, str]) -> Continuation | None:
    """Return where to go on; None for a first page.

    Raises:
        ApiError: 400, the token is not one of ours.
    """
    token = query.get("continue", "")
    if not token:
        return None
    try:
        at, namespace, name = json.loads(base64.urlsafe_b64decode(token))
    except (binascii.Error, ValueError) as error:
        raise statuses.bad_request("continue key is not valid") from error
    return Continuation(version=at, after=(namespace, name))
