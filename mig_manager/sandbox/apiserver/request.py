"""Parse a request: its verb, resource and object, selectors and list options.

Paths, parameters and grammar: Kubernetes documentation, "Kubernetes API Concepts", "Labels and
Selectors" and "Field Selectors". ``!=`` and ``notin`` also select objects that lack the key.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping

from mig_manager.core.objects import selectors
from mig_manager.sandbox.apiserver import kinds

Object = kinds.Object

_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete", "GET": "get"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestTarget:
    """The resource and object of a request."""

    resource: kinds.Resource
    namespace: str = ""
    """Empty for cluster-wide resources, and for a collection over all namespaces."""
    name: str = ""  # empty for a collection
    subresource: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        """Key of the object in the store."""
        return self.resource.plural, self.namespace, self.name


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestInfo:
    """A parsed request for a resource."""

    verb: str
    target: RequestTarget
    query: Mapping[str, str]


def parse(method: str, path: str, query: Mapping[str, str]) -> RequestInfo | None:
    """Return the request; None for a path without a resource, 405 for an unsupported method."""
    target = _target([part for part in path.split("/") if part])
    if target is None:
        return None
    verb = _VERBS.get(method, "")
    if verb not in _verbs_of(target):
        message = "the server does not allow this method on the requested resource"
        raise kinds.StatusError(405, message)
    if verb == "get" and not target.name:
        verb = "watch" if query.get("watch", "") in ("1", "true") else "list"
    return RequestInfo(verb=verb, target=target, query=query)


def _target(parts: list[str]) -> RequestTarget | None:
    match parts:
        case ["api", "v1", *rest]:
            group = ""
        case ["apis", group, "v1", *rest]:
            pass
        case _:
            return None
    match rest:
        case ["namespaces", namespace, plural, *rest] if plural != "status":
            pass
        case [plural, *rest]:
            namespace = ""
        case _:
            return None
    resource = kinds.find(group, plural)
    if resource is None or (namespace and not resource.is_namespaced):
        return None
    name, subresource, *more = [*rest, "", ""]
    is_known = not subresource or subresource in resource.subresources
    if any(more) or not is_known or (name and resource.is_namespaced and not namespace):
        return None
    return RequestTarget(
        resource=resource, namespace=namespace, name=name, subresource=subresource
    )


def _verbs_of(target: RequestTarget) -> tuple[str, ...]:
    if target.subresource in ("binding", "eviction"):
        return ("create",)
    if target.name:
        verbs = ("get", "update", "patch")
        return verbs if target.subresource else (*verbs, "delete")
    is_one_collection = bool(target.namespace) or not target.resource.is_namespaced
    return ("get", "create") if is_one_collection else ("get",)


def number(query: Mapping[str, str], name: str) -> int:
    """Return a numeric parameter, by default 0; 400 if malformed."""
    text = query.get(name, "") or "0"
    if not text.isdigit():
        message = f'strconv.ParseInt: parsing "{text}": invalid syntax ({name})'
        raise kinds.bad_request(message)
    return int(text)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The objects of a collection that a list or watch selects."""

    plural: str
    namespace: str
    labels: tuple[selectors.Requirement, ...]
    fields: Callable[[Object], bool]

    def matches(self, obj: Object | None) -> bool:
        """Return whether an object is in the selection; None is not."""
        if obj is None:
            return False
        labels = obj["metadata"].get("labels") or {}
        return all(each.matches(labels) for each in self.labels) and self.fields(obj)


def selection(info: RequestInfo) -> Selection:
    """Return the selection of a list or watch; 400 for a malformed selector."""
    plural = info.target.resource.plural
    return Selection(
        plural=plural,
        namespace=info.target.namespace,
        labels=_parse_labels(info.query.get("labelSelector", "")),
        fields=_parse_fields(info.query.get("fieldSelector", ""), plural),
    )


def _parse_labels(text: str) -> tuple[selectors.Requirement, ...]:
    try:
        return selectors.parse_selector(text)
    except ValueError as error:
        message = f"unable to parse requirement: found unexpected text in {text!r}"
        raise kinds.bad_request(message) from error


_FIELDS: Mapping[str, tuple[str, ...]] = {
    "pods": ("spec.nodeName", "spec.schedulerName", "spec.serviceAccountName", "status.phase"),
    "nodes": ("spec.unschedulable",),
    "resourceslices": ("spec.driver", "spec.nodeName"),
    "namespaces": ("status.phase",),
    "events": (
        *("involvedObject.kind", "involvedObject.namespace", "involvedObject.name"),
        *("involvedObject.uid", "involvedObject.apiVersion", "involvedObject.fieldPath"),
        *("involvedObject.resourceVersion", "reason", "reportingComponent", "type"),
    ),
}
"""Fields that selectors support, by plural, besides name and namespace."""
_OPERATOR = re.compile(r"(?<!\\)(==|!=|=)")
_UNESCAPED_COMMA = re.compile(r"(?<!\\),")


def _parse_fields(text: str, plural: str) -> Callable[[Object], bool]:
    """Compile a field selector such as ``spec.nodeName=n1,status.phase!=Failed``."""
    allowed = (*_FIELDS.get(plural, ()), "metadata.name", "metadata.namespace")
    requirements: list[tuple[str, bool, str]] = []
    for part in filter(None, _UNESCAPED_COMMA.split(text)):
        pieces = _OPERATOR.split(part, maxsplit=1)
        if len(pieces) != 3:  # noqa: PLR2004 - left, operator, right
            message = f"invalid selector: '{text}'; can't understand '{part}'"
            raise kinds.bad_request(message)
        field, operator, value = pieces
        if field not in allowed:
            raise kinds.bad_request(f"field label not supported: {field}")
        requirements.append((field, operator != "!=", re.sub(r"\\(.)", r"\1", value)))

    def matches(obj: Object) -> bool:
        for field, is_equal, expected in requirements:
            value = kinds.at(obj, *field.split("."), default="")
            if field == "spec.unschedulable":
                value = "true" if value else "false"
            if (str(value) == expected) is not is_equal:
                return False
        return True

    return matches
