"""The content of objects: validation and patches.

Syntax rules: Kubernetes documentation, "Object Names and IDs", "Labels and Selectors",
"Annotations", "Taints and Tolerations". Pod immutability: "Pods", section "Pod update and
replacement". Event namespaces: the API server's own validation of core/v1 events. Leases:
Kubernetes API reference, ``coordination.k8s.io/v1``, and ``metav1.MicroTime``.

JSON merge patch is RFC 7386. Strategic merge patch: Kubernetes documentation, "Update API Objects
in Place Using kubectl patch"; lists merge by their ``x-kubernetes-patch-merge-key`` in the API's
OpenAPI document. Of the directives, only ``$patch: delete`` in a list is supported. A node's
taints have no key: a patch replaces them as a whole.
"""

import copy
import re
from collections.abc import Iterator, Mapping
from typing import Any

from mig_manager.sandbox.apiserver import kinds

Object = kinds.Object

_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_DNS_SUBDOMAIN = re.compile(rf"{_LABEL}(\.{_LABEL})*\Z")
_QUALIFIED_PART = re.compile(r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]\Z")
_PERCENTAGE = re.compile(r"[0-9]+%\Z")
_RFC_3339 = re.compile(r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)")
_MICRO_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}(Z|[+-]\d\d:\d\d)\Z", re.ASCII)

_MAX_LABEL = 63
_MAX_NAME = 253
_MAX_ANNOTATIONS_BYTES = 256 * 1024
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
_MUTABLE_POD_SPEC = (
    "activeDeadlineSeconds",
    "terminationGracePeriodSeconds",
    "tolerations",
    "containers",
    "initContainers",
    "ephemeralContainers",
)


def check(resource: kinds.Resource, obj: Object, old: Object | None = None) -> None:
    """Validate an object that replaces ``old``: 400 for wrong types, 422 with every cause."""
    causes = list(_metadata(obj["metadata"]))
    if rule := _RULES.get(resource.plural):
        causes += rule(obj, obj.get("spec") or {})
    if old is not None and resource is kinds.PODS:
        causes += _pod_update(obj.get("spec") or {}, old.get("spec") or {})
    if causes:
        raise resource.invalid(obj["metadata"]["name"], causes)


def _wrong(field: str, value: object, rule: str) -> Object:
    shown = f'"{value}"' if isinstance(value, str) else str(value)
    return kinds.cause("FieldValueInvalid", f"Invalid value: {shown}: {rule}", field=field)


def _metadata(metadata: Object) -> Iterator[Object]:
    name = metadata["name"]
    if len(name) > _MAX_NAME or not _DNS_SUBDOMAIN.match(name):
        yield _wrong("metadata.name", name, "a lowercase RFC 1123 subdomain must consist of "
                     "lower case alphanumeric characters, '-' or '.'")  # fmt: skip
    for key, value in _strings(metadata, "labels").items():
        yield from _key("metadata.labels", key)
        yield from _label_value("metadata.labels", value)
    annotations = _strings(metadata, "annotations")
    for key in annotations:
        yield from _key("metadata.annotations", key.lower())
    size = sum(len(key.encode()) + len(value.encode()) for key, value in annotations.items())
    if size > _MAX_ANNOTATIONS_BYTES:
        yield kinds.cause(
            "FieldValueTooLong",
            f"Too long: may not be more than {_MAX_ANNOTATIONS_BYTES} bytes",
            field="metadata.annotations",
        )


def _strings(metadata: Object, field: str) -> Mapping[str, str]:
    values = metadata.get(field) or {}
    for key, value in values.items():
        if not isinstance(value, str):
            message = (
                f"json: cannot unmarshal {type(value).__name__} into Go struct field "
                f"ObjectMeta.metadata.{field} of type string ({key})"
            )
            raise kinds.bad_request(message)
    return values


def _key(field: str, key: str) -> Iterator[Object]:
    prefix, slash, name = key.rpartition("/")
    if slash and (len(prefix) > _MAX_NAME or not _DNS_SUBDOMAIN.match(prefix)):
        yield _wrong(field, key, "prefix part must be a lowercase RFC 1123 subdomain")
    if not name:
        yield _wrong(field, key, "name part must be non-empty")
    elif len(name) > _MAX_LABEL:
        yield _wrong(field, key, f"name part must be no more than {_MAX_LABEL} characters")
    if not _QUALIFIED_PART.match(name):
        yield _wrong(field, key, "name part must consist of alphanumeric characters, '-', '_' or "
                     "'.', and must start and end with an alphanumeric character")  # fmt: skip


def _label_value(field: str, value: str) -> Iterator[Object]:
    if len(value) > _MAX_LABEL:
        yield _wrong(field, value, f"must be no more than {_MAX_LABEL} characters")
    elif value and not _QUALIFIED_PART.match(value):
        yield _wrong(field, value, "a valid label must be an empty string or consist of "
                     "alphanumeric characters, '-', '_' or '.', and must start and end with an "
                     "alphanumeric character")  # fmt: skip


def _node(_obj: Object, spec: Object) -> Iterator[Object]:
    identities = set()
    for index, taint in enumerate(spec.get("taints") or ()):
        field = f"metadata.taints[{index}]"  # sic, as the real server has it
        yield from _key(f"{field}.key", taint.get("key", ""))
        yield from _label_value(f"{field}.value", taint.get("value", ""))
        effect = taint.get("effect", "")
        if not effect:
            yield kinds.cause("FieldValueRequired", "Required value", field=f"{field}.effect")
        elif effect not in _EFFECTS:
            supported = ", ".join(f'"{each}"' for each in _EFFECTS)
            yield kinds.cause(
                "FieldValueNotSupported",
                f'Unsupported value: "{effect}": supported values: {supported}',
                field=f"{field}.effect",
            )
        identity = (taint.get("key"), effect)
        if identity in identities:
            yield kinds.cause("FieldValueDuplicate", f"Duplicate value: {taint}", field=field)
        identities.add(identity)


def _pod_update(spec: Object, old: Object) -> Iterator[Object]:
    frozen = []
    for each in (spec, old):
        fixed = {key: value for key, value in each.items() if key not in _MUTABLE_POD_SPEC}
        for field in ("containers", "initContainers"):
            fixed[field] = [container | {"image": ""} for container in each.get(field) or ()]
        frozen.append(fixed)
    if frozen[0] != frozen[1]:
        message = (
            "Forbidden: pod updates may not change fields other than "
            "`spec.containers[*].image`,`spec.initContainers[*].image`,"
            "`spec.activeDeadlineSeconds`,`spec.tolerations` (only additions to existing "
            "tolerations),`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if "
            "it was previously negative)"
        )
        yield kinds.cause("FieldValueForbidden", message, field="spec")


def _event(event: Object, _spec: Object) -> Iterator[Object]:
    for field in ("firstTimestamp", "lastTimestamp", "eventTime"):
        value = event.get(field)
        if value is not None and not _RFC_3339.fullmatch(str(value)):
            message = f'parsing time "{value}"'
            raise kinds.bad_request(
                f'Event in version "v1" cannot be handled as a Event: {message}'
            )
    involved = (event.get("involvedObject") or {}).get("namespace", "")
    namespace = event["metadata"].get("namespace", "")
    # Events of cluster-wide objects, such as a Node, are in "default".
    if namespace != (involved or "default"):
        yield _wrong("involvedObject.namespace", involved, "does not match event.namespace")


def _lease(_obj: Object, spec: Object) -> Iterator[Object]:
    for field in ("acquireTime", "renewTime"):
        # Go's MicroTime takes exactly six digits of a second.
        if spec.get(field) is not None and not _MICRO_TIME.match(str(spec[field])):
            message = f'parsing time "{spec[field]}" as "2006-01-02T15:04:05.000000Z07:00"'
            raise kinds.bad_request(f"Lease cannot be handled as a Lease: {message}")
    for field, least in (("leaseDurationSeconds", 1), ("leaseTransitions", 0)):
        amount = spec.get(field)
        if amount is not None and not isinstance(amount, int):
            raise kinds.bad_request(f"json: cannot unmarshal {field}: not a whole number")
        if amount is not None and amount < least:
            bound = "greater than 0" if least else "greater than or equal to 0"
            yield _wrong(f"spec.{field}", amount, f"must be {bound}")


def _budget(_obj: Object, spec: Object) -> Iterator[Object]:
    for field in ("minAvailable", "maxUnavailable"):
        amount = spec.get(field) or 0
        is_amount = isinstance(amount, int) and amount >= 0
        if not is_amount and not _PERCENTAGE.match(str(amount)):
            yield _wrong(f"spec.{field}", amount, "must be a count or a percentage")
    for index, each in enumerate((spec.get("selector") or {}).get("matchExpressions") or ()):
        if each.get("operator") not in ("In", "NotIn", "Exists", "DoesNotExist"):
            field = f"spec.selector.matchExpressions[{index}].operator"
            yield _wrong(field, each.get("operator"), "not a valid selector operator")
    if spec.get("minAvailable") is not None and spec.get("maxUnavailable") is not None:
        yield _wrong("spec", spec, "minAvailable and maxUnavailable cannot be both set")


_RULES = {
    "nodes": _node,
    "events": _event,
    "leases": _lease,
    "poddisruptionbudgets": _budget,
}
"""By plural: a function of an object and its spec."""


# -- patches ----------------------------------------------------------------------------------

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


def apply_patch(content_type: str, obj: Object, patch: Any) -> Object:
    """Return a patched copy of an object; 415 or 400 for an invalid patch."""
    paths = {
        "application/merge-patch+json": None,
        "application/strategic-merge-patch+json": "",
    }
    if content_type not in paths:
        message = (
            "the body of the request was in an unknown format - accepted media types include: "
        )
        raise kinds.StatusError(415, message + ", ".join(paths))
    if not isinstance(patch, dict):
        raise kinds.bad_request("json: cannot unmarshal a value that is not an object")
    merged: Object = _merge(obj, patch, paths[content_type])
    return merged


def _merge(obj: Any, patch: Any, path: str | None) -> Any:
    """Merge a patch; with a path it is a strategic one, whose lists merge by key."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    merged = dict(obj) if isinstance(obj, dict) else {}
    for key, value in patch.items():
        inner = f"{path}.{key}".removeprefix(".") if path is not None else None
        if value is None:
            merged.pop(key, None)
        elif inner and isinstance(value, list) and (merge_key := _merge_key(inner)):
            merged[key] = _merge_list(merged.get(key) or [], value, inner, merge_key)
        elif not (inner and key.startswith("$")):
            merged[key] = _merge(merged.get(key), value, inner)
    return merged


def _merge_key(path: str) -> str | None:
    path = path.removeprefix("spec.template.")
    parent, _, last = path.rpartition(".")
    if parent.endswith("ontainers[]"):
        return _CONTAINER_MERGE_KEYS.get(last)
    return _MERGE_KEYS.get(path)


def _merge_list(present: list[Object], patches: list[Object], path: str, key: str) -> list[Object]:
    merged = {each.get(key): each for each in present}
    for patch in patches:
        if key not in patch:
            raise kinds.bad_request(f"map: {patch} does not contain declared merge key: {key}")
        if patch.get("$patch") == "delete":
            merged.pop(patch[key], None)
        else:
            merged[patch[key]] = _merge(merged.get(patch[key]), patch, f"{path}[]")
    return list(merged.values())
