"""The form in which objects leave the server: whole, metadata only, or as a table for people.

Forms: Kubernetes documentation, "Kubernetes API Concepts", sections on Tables and on
metadata-only fetches.
"""

import dataclasses
import enum
from collections.abc import Mapping, Sequence

from mig_manager.sandbox.api import calls, events, resources, statuses, stores, tables

Object = statuses.Object

MEDIA_TYPE = "application/vnd.kubernetes.protobuf"

_MAGIC = b"k8s\x00"
_LENGTH_DELIMITED = 2
_ENVELOPE_RAW = 2
_REVIEW_SPEC = 2
_SPEC_RESOURCE_ATTRIBUTES = 1
_ATTRIBUTES = {
    1: "namespace",
    2: "verb",
    3: "group",
    4: "version",
    5: "resource",
    6: "subresource",
    7: "name",
}


def read_review(body: bytes, kind: str) -> Object:
    """Return a ``SelfSubjectAccessReview``, or a review of another kind without its content.

    Raises:
        ApiError: 400, the body is not what it says it is.
    """
    if not body.startswith(_MAGIC):
        raise statuses.bad_request("the provided data does not appear to be a protobuf message")
    review: Object = {"apiVersion": "authorization.k8s.io/v1", "kind": kind, "metadata": {}}
    if kind == "SelfSubjectReview":
        return review | {"apiVersion": "authentication.k8s.io/v1"}
    message = body.removeprefix(_MAGIC)
    for number in (_ENVELOPE_RAW, _REVIEW_SPEC, _SPEC_RESOURCE_ATTRIBUTES):
        message = _fields(message).get(number, b"")
    values = _fields(message).items()
    attributes = {
        _ATTRIBUTES[number]: value.decode() for number, value in values if number in _ATTRIBUTES
    }
    return review | {"spec": {"resourceAttributes": attributes}}


def _fields(message: bytes) -> dict[int, bytes]:
    """Return the last value of each field of a message that has strings and messages only."""
    fields = {}
    at = 0
    try:
        while at < len(message):
            tag, at = _varint(message, at)
            if tag & 7 != _LENGTH_DELIMITED:
                raise statuses.bad_request(f"unexpected protobuf wire type {tag & 7}")
            size, at = _varint(message, at)
            fields[tag >> 3] = message[at : at + size]
            at += size
    except IndexError as error:
        raise statuses.bad_request("unexpected end of the protobuf message") from error
    return fields


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:  # noqa: PLR2004 - the high bit says that more follows
            return value, at
        shift += 7


_META_VERSION = "meta.k8s.io/v1"


class Form(enum.Enum):
    """What the client's ``Accept`` asks for; the values are those of its ``as`` parameter."""

    WHOLE = ""
    METADATA = "PartialObjectMetadata"
    TABLE = "Table"


def choose_form(accept: str) -> Form:
    """Return the first form in an ``Accept`` header that this server has.

    Raises:
        ApiError: 406, there is none.
    """
    for media_range in (accept or "*/*").split(","):
        media_type, *parameters = (part.strip() for part in media_range.split(";"))
        if media_type not in ("application/json", "application/*", "*/*"):
            continue
        values = dict(part.split("=", 1) for part in parameters if "=" in part)
        name = values.get("as", "").removesuffix("List")
        if not name:
            return Form.WHOLE
        if values.get("v", "v1") == "v1" and name in ("PartialObjectMetadata", "Table"):
            return Form(name)
    message = "only the following media types are accepted: application/json"
    raise statuses.ApiError(406, message)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Renderer:
    """Renders the objects of one resource in one form."""

    resource: resources.Resource
    form: Form
    include: str = "Metadata"
    """What a table's rows carry of their object: ``None``, ``Metadata`` or ``Object``."""

    def item(self, thing: Object) -> Object:
        """Return one object; a Status passes as it is."""
        if thing["kind"] == "Status":
            return thing
        match self.form:
            case Form.WHOLE:
                return events.from_core(self.resource, thing)
            case Form.METADATA:
                return _metadata_only(thing)
            case Form.TABLE:
                version = thing["metadata"]["resourceVersion"]
                return self._table([thing], {"resourceVersion": version})

    def collection(self, things: Sequence[Object], metadata: Object) -> Object:
        """Return a list of objects with its list metadata."""
        if self.form is Form.TABLE:
            return self._table(things, metadata)
        if self.form is Form.METADATA:
            kind, version = "PartialObjectMetadataList", _META_VERSION
            items = [_metadata_only(each) for each in things]
        else:
            kind, version = f"{self.resource.kind}List", self.resource.api_version
            items = [_untyped(events.from_core(self.resource, each)) for each in things]
        return {"kind": kind, "apiVersion": version, "metadata": metadata, "items": items}

    def bookmark(self, version: int, *, ends_initial: bool = False) -> Object:
        """Return the object of a BOOKMARK event: nothing but a resourceVersion.

        Args:
            version: The version up to which the client has seen everything.
            ends_initial: Whether it says that all initial objects have been sent.
        """
        metadata: Object = {"creationTimestamp": None, "resourceVersion": str(version)}
        if ends_initial:
            metadata["annotations"] = {"k8s.io/initial-events-end": "true"}
        if self.form is Form.TABLE:
            return self._table([], {"resourceVersion": str(version)})
        kind, api_version = self.resource.kind, self.resource.api_version
        if self.form is Form.METADATA:
            kind, api_version = "PartialObjectMetadata", _META_VERSION
        return {"kind": kind, "apiVersion": api_version, "metadata": metadata}

    def _table(self, things: Sequence[Object], metadata: Object) -> Object:
        rows = [
            {"cells": tables.cells(self.resource, each), "object": self._row_object(each)}
            for each in things
        ]
        return {
            "kind": "Table",
            "apiVersion": _META_VERSION,
            "metadata": metadata,
            "columnDefinitions": tables.definitions(self.resource),
            "rows": rows,
        }

    def _row_object(self, thing: Object) -> Object | None:
        match self.include:
            case "None":
                return None
            case "Object":
                return events.from_core(self.resource, thing)
            case _:
                return _metadata_only(thing)


def _metadata_only(thing: Object) -> Object:
    return {
        "kind": "PartialObjectMetadata",
        "apiVersion": _META_VERSION,
        "metadata": thing["metadata"],
    }


def _untyped(thing: Object) -> Object:
    """Return a list's item: the real server leaves out what the list's kind implies."""
    return {key: value for key, value in thing.items() if key not in ("apiVersion", "kind")}


def list_collection(store: stores.Store, call: calls.Call, renderer: Renderer) -> Object:
    """Return the answer to a list, one page of it when ``limit`` is given.

    Raises:
        ApiError: 400 for bad parameters, 410 when the version asked for has been forgotten, 504
            when it has not happened yet.
    """
    selection = calls.selection(call)
    page = calls.continuation(call.query)
    limit = calls.number(call.query, "limit")
    with store.lock:
        at = page.version if page else _list_version(store, call.query, limit)
        things = store.select(selection.storage, namespace=selection.namespace, at=at)
        version = store.version if at is None else at
    things = [each for each in things if selection.matches(each)]
    if page:
        things = [each for each in things if _place(each) > page.after]
    metadata: Object = {"resourceVersion": str(version)}
    if limit and len(things) > limit:
        following = calls.Continuation(version=version, after=_place(things[limit - 1]))
        metadata["continue"] = following.to_token()
        if selection.is_everything:
            metadata["remainingItemCount"] = len(things) - limit
        things = things[:limit]
    return renderer.collection(things, metadata)


def _place(thing: Object) -> tuple[str, str]:
    metadata = thing["metadata"]
    return metadata.get("namespace", ""), metadata["name"]


def _list_version(store: stores.Store, query: Mapping[str, str], limit: int) -> int | None:
    """Return the version that must be shown exactly; None when the present will do."""
    version, match = calls.version(query), query.get("resourceVersionMatch", "")
    if match and version is None:
        message = "resourceVersionMatch is forbidden unless resourceVersion is provided"
        raise statuses.bad_request(message)
    if not version:
        return None
    if version > store.version:
        cause = statuses.Cause(
            reason="ResourceVersionTooLarge", message="Too large resource version"
        )
        message = f"Too large resource version: {version}, current: {store.version}"
        details = {"causes": [cause.to_json()]}
        raise statuses.ApiError(504, f"Timeout: {message}", details=details, retry_after_s=1)
    is_exact = match == "Exact" or (limit and not match)
    return version if is_exact else None
