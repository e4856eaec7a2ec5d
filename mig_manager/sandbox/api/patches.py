"""The patch formats of the Kubernetes API: JSON merge patch, strategic merge patch, JSON patch.

JSON merge patch is RFC 7386, JSON patch RFC 6902 over RFC 6901 pointers. Strategic merge patch is
described in the Kubernetes documentation, "Update API Objects in Place Using kubectl patch"; which
lists merge, and by which key, is told by ``x-kubernetes-patch-merge-key`` in the API's OpenAPI
document. A node's taints are not among them: a patch replaces them as a whole.
"""

import copy
from typing import Any

from mig_manager.sandbox.api import statuses

Object = statuses.Object

JSON_PATCH = "application/json-patch+json"
MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_PATCH = "application/strategic-merge-patch+json"
TYPES = (JSON_PATCH, MERGE_PATCH, STRATEGIC_PATCH)

_MERGE_KEYS = {
    "metadata.ownerReferences": "uid",
    "spec.containers": "name",
    "spec.initContainers": "name",
    "spec.ephemeralContainers": "name",
    "spec.volumes": "name",
    "spec.imagePullSecrets": "name",
    "spec.hostAliases": "ip",
    "spec.topologySpreadConstraints": "topologyKey",
    "status.conditions": "type",
    "status.addresses": "type",
    "status.podIPs": "ip",
    "status.hostIPs": "ip",
    "secrets": "name",
    "imagePullSecrets": "name",
}
_CONTAINER_MERGE_KEYS = {
    "env": "name",
    "ports": "containerPort",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
}
_PRIMITIVE_LISTS = frozenset({"metadata.finalizers"})
_TEMPLATE = "spec.template."
_ORDER = "$setElementOrder/"
_REMOVE = "$deleteFromPrimitiveList/"


def apply(content_type: str, thing: Object, patch: Any) -> Object:
    """Return the patched copy of an object.

    Raises:
        ApiError: 415 for an unknown patch type, 400 for a malformed patch, 422 when a JSON patch
            cannot be applied to this object.
    """
    match content_type:
        case "application/merge-patch+json":
            return _checked(merge(thing, _checked(patch)))
        case "application/strategic-merge-patch+json":
            return _strategic(copy.deepcopy(thing), _checked(patch), "")
        case "application/json-patch+json":
            return _checked(_json_patch(copy.deepcopy(thing), patch))
        case _:
            supported = ", ".join(TYPES)
            message = (
                "the body of the request was in an unknown format - accepted media types "
                f"include: {supported}"
            )
            raise statuses.ApiError(415, message)


def _checked(value: Any) -> Object:
    if not isinstance(value, dict):
        raise statuses.bad_request("json: cannot unmarshal a value that is not an object")
    return value


def merge(thing: Any, patch: Any) -> Any:
    """Apply a JSON merge patch; the arguments are left as they are."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    merged = dict(thing) if isinstance(thing, dict) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = merge(merged.get(key), value)
    return merged


def _merge_key(path: str) -> str | None:
    path = path.removeprefix(_TEMPLATE) if path.startswith(_TEMPLATE) else path
    parent, _, last = path.rpartition(".")
    if parent.endswith("ontainers[]"):
        return _CONTAINER_MERGE_KEYS.get(last)
    return _MERGE_KEYS.get(path)


def _strategic(thing: Object, patch: Object, path: str) -> Object:
    patch = dict(patch)
    directive = patch.pop("$patch", "merge")
    if directive == "replace":
        return _without_directives(patch)
    if directive == "delete":
        return {}
    retained = patch.pop("$retainKeys", None)
    for key in set(thing) - set(retained if retained is not None else thing):
        del thing[key]
    orders = {key.removeprefix(_ORDER): patch.pop(key) for key in tuple(patch) if _ORDER in key}
    for key, value in patch.items():
        _merge_member(thing, key, value, f"{path}.{key}" if path else key)
    for key, order in orders.items():
        merge_key = _merge_key(f"{path}.{key}" if path else key)
        if merge_key and isinstance(thing.get(key), list):
            thing[key] = _reordered(thing[key], [each.get(merge_key) for each in order], merge_key)
    return thing


def _merge_member(thing: Object, key: str, value: Any, path: str) -> None:
    if key.startswith(_REMOVE):
        name = key.removeprefix(_REMOVE)
        thing[name] = [each for each in thing.get(name) or () if each not in value]
    elif value is None:
        thing.pop(key, None)
    elif isinstance(value, dict):
        present = thing.get(key)
        thing[key] = _strategic(present if isinstance(present, dict) else {}, value, path)
    elif isinstance(value, list) and path in _PRIMITIVE_LISTS:
        present = thing.get(key) or []
        thing[key] = present + [each for each in value if each not in present]
    elif isinstance(value, list) and _merge_key(path):
        thing[key] = _merge_list(thing.get(key) or [], value, path)
    else:
        thing[key] = copy.deepcopy(value)


def _merge_list(present: list[Object], patches: list[Object], path: str) -> list[Object]:
    key = _merge_key(path) or ""
    if any(each.get("$patch") == "replace" for each in patches):
        return [_without_directives(each) for each in patches if each != {"$patch": "replace"}]
    merged = list(present)
    for patch in patches:
        if key not in patch:
            raise statuses.bad_request(f"map: {patch} does not contain declared merge key: {key}")
        at = next((i for i, each in enumerate(merged) if each.get(key) == patch[key]), None)
        if patch.get("$patch") == "delete":
            merged = [each for each in merged if each.get(key) != patch[key]]
        elif at is None:
            merged.append(_strategic({}, patch, f"{path}[]"))
        else:
            merged[at] = _strategic(merged[at], patch, f"{path}[]")
    return merged


def _without_directives(patch: Object) -> Object:
    return {key: copy.deepcopy(value) for key, value in patch.items() if not key.startswith("$")}


def _reordered(present: list[Object], order: list[Any], key: str) -> list[Object]:
    rank = {value: index for index, value in enumerate(order)}
    return sorted(present, key=lambda each: rank.get(each.get(key), len(rank)))


def _json_patch(thing: Any, operations: Any) -> Any:
    if not isinstance(operations, list) or not all(isinstance(each, dict) for each in operations):
        raise statuses.bad_request("json: cannot unmarshal a value that is not a JSON patch")
    for operation in operations:
        try:
            thing = _operate(thing, operation)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            message = (
                "the server rejected our request due to an error in our request: "
                f"{operation.get('op')} {operation.get('path')}: {error}"
            )
            raise statuses.ApiError(422, message, reason="Invalid") from error
    return thing


def _operate(thing: Any, operation: Object) -> Any:
    path = _pointer(operation["path"])
    match operation["op"]:
        case "add" | "replace" as name:
            return _put(thing, path, operation["value"], insert=name == "add")
        case "remove":
            return _drop(thing, path)
        case "move":
            source = _pointer(operation["from"])
            value = _at(thing, source)
            return _put(_drop(thing, source), path, value, insert=True)
        case "copy":
            value = copy.deepcopy(_at(thing, _pointer(operation["from"])))
            return _put(thing, path, value, insert=True)
        case "test":
            if _at(thing, path) != operation["value"]:
                raise ValueError("testing value failed")
            return thing
        case unknown:
            raise ValueError(f"unexpected kind {unknown!r}")


def _pointer(text: str) -> list[str]:
    if text and not text.startswith("/"):
        raise ValueError(f"{text!r} is no JSON pointer")
    return [part.replace("~1", "/").replace("~0", "~") for part in text.split("/")[1:]]


def _at(thing: Any, path: list[str]) -> Any:
    for part in path:
        thing = thing[int(part)] if isinstance(thing, list) else thing[part]
    return thing


def _put(thing: Any, path: list[str], value: Any, *, insert: bool) -> Any:
    if not path:
        return value
    parent, last = _at(thing, path[:-1]), path[-1]
    if isinstance(parent, list) and insert:
        index = len(parent) if last == "-" else int(last)
        if not 0 <= index <= len(parent):
            raise IndexError(f"index {index} is out of range")
        parent.insert(index, value)
    elif isinstance(parent, list):
        parent[int(last)] = value
    elif insert or last in parent:
        parent[last] = value
    else:
        raise KeyError(last)
    return thing


def _drop(thing: Any, path: list[str]) -> Any:
    parent, last = _at(thing, path[:-1]), path[-1]
    del parent[int(last) if isinstance(parent, list) else last]
    return thing
