"""The little protobuf that the embedded Kubernetes API reads: access reviews.

Everything else is JSON. Envelope: Kubernetes documentation, "Kubernetes API Concepts", section
"Kubernetes Protobuf encoding". Field numbers: ``k8s.io/api/authorization/v1/generated.proto``.
"""

from mig_manager.sandbox.api import statuses

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
