"""The patch formats of the API: JSON merge patch, strategic merge patch, JSON patch.

JSON merge patch is RFC 7386, JSON patch RFC 6902 over RFC 6901 pointers (without ``move`` and
``copy``). Strategic merge patch: Kubernetes documentation, "Update API Objects in Place Using
kubectl patch"; lists merge by their ``x-kubernetes-patch-merge-key`` in the API's OpenAPI
document. A node's taints have none: a patch replaces them as a whole.
"""

import copy
from typing import Any

from mig_manager.sandbox.apiserver import resources

Object = resources.Object

_MERGE_KEYS = {
    "metadata.ownerReferences": "uid",
    "spec.containers": "name",
    "spec.initContainers": "name",
    "spec.volumes": "name",
    "status.conditions": "type",
    "status.addresses": "type",
}
_CONTAINER_MERGE_KEYS = {
    "env": "name",
    "ports": "containerPort",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
}
_ORDER = "$setElementOrder/"


def apply(content_type: str, obj: Object, patch: Any) -> Object:
    """Return the patched copy of an object.

    Raises:
        ApiError: 415 for an unknown patch type, 400 for a malformed patch, 422 when a JSON patch
            cannot be applied to this object.
    """
    match content_type:
        case "application/merge-patch+json":
            return _checked(_merge(obj, _checked(patch)))
        case "application/strategic-merge-patch+json":
            return _strategic(copy.deepcopy(obj), _checked(patch), "")
        case "application/json-patch+json":
            return _checked(_json_patch(copy.deepcopy(obj), patch))
        case _:
            message = (
                "the body of the request was in an unknown format - accepted media types include: "
                "application/json-patch+json, application/merge-patch+json, "
                "application/strategic-merge-patch+json"
            )
            raise resources.ApiError(415, message)


def _checked(value: Any) -> Object:
    if not isinstance(value, dict):
        raise resources.bad_request("json: cannot unmarshal a value that is not an object")
    return value


def _merge(obj: Any, patch: Any) -> Any:
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    merged = dict(obj) if isinstance(obj, dict) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = _merge(merged.get(key), value)
    return merged


def _merge_key(path: str) -> str | None:
    path = path.removeprefix("spec.template.")
    parent, _, last = path.rpartition(".")
    if parent.endswith("ontainers[]"):
        return _CONTAINER_MERGE_KEYS.get(last)
    return _MERGE_KEYS.get(path)


def _strategic(obj: Object, patch: Object, path: str) -> Object:
    match patch.get("$patch"):
        case "replace":
            return _without_directives(patch)
        case "delete":
            return {}
        case _:
            pass
    for key, value in patch.items():
        if not key.startswith("$"):
            _merge_member(obj, key, value, f"{path}.{key}" if path else key)
    for directive, order in patch.items():
        key = directive.removeprefix(_ORDER)
        merge_key = _merge_key(f"{path}.{key}" if path else key)
        if key != directive and merge_key and isinstance(obj.get(key), list):
            obj[key] = _reordered(obj[key], [each.get(merge_key) for each in order], merge_key)
    return obj


def _merge_member(obj: Object, key: str, value: Any, path: str) -> None:
    if value is None:
        obj.pop(key, None)
    elif isinstance(value, dict):
        present = obj.get(key)
        obj[key] = _strategic(present if isinstance(present, dict) else {}, value, path)
    elif isinstance(value, list) and (merge_key := _merge_key(path)):
        obj[key] = _merge_list(obj.get(key) or [], value, path, merge_key)
    else:
        obj[key] = copy.deepcopy(value)


def _merge_list(present: list[Object], patches: list[Object], path: str, key: str) -> list[Object]:
    if any(each.get("$patch") == "replace" for each in patches):
        return [_without_directives(each) for each in patches if each != {"$patch": "replace"}]
    merged = list(present)
    for patch in patches:
        if key not in patch:
            raise resources.bad_request(f"map: {patch} does not contain declared merge key: {key}")
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


def _json_patch(obj: Any, operations: Any) -> Any:
    if not isinstance(operations, list) or not all(isinstance(each, dict) for each in operations):
        raise resources.bad_request("json: cannot unmarshal a value that is not a JSON patch")
    for operation in operations:
        try:
            obj = _operate(obj, operation)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            message = (
                "the server rejected our request due to an error in our request: "
                f"{operation.get('op')} {operation.get('path')}: {error}"
            )
            raise resources.ApiError(422, message, reason="Invalid") from error
    return obj


def _operate(obj: Any, operation: Object) -> Any:
    pointer = operation["path"]
    if pointer and not pointer.startswith("/"):
        raise ValueError(f"{pointer!r} is no JSON pointer")
    path = [part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:]]
    match operation["op"]:
        case "add" | "replace" as name:
            return _put(obj, path, operation["value"], insert=name == "add")
        case "remove":
            parent, last = _at(obj, path[:-1]), path[-1]
            del parent[int(last) if isinstance(parent, list) else last]
            return obj
        case "test":
            if _at(obj, path) != operation["value"]:
                raise ValueError("testing value failed")
            return obj
        case unknown:
            raise ValueError(f"unexpected kind {unknown!r}")


def _at(obj: Any, path: list[str]) -> Any:
    for part in path:
        obj = obj[int(part)] if isinstance(obj, list) else obj[part]
    return obj


def _put(obj: Any, path: list[str], value: Any, *, insert: bool) -> Any:
    if not path:
        return value
    parent, last = _at(obj, path[:-1]), path[-1]
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
    return obj
