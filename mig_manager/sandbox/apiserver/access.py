"""Authorization: who may do what, and the reviews by which clients ask about it.

Attributes and messages: Kubernetes documentation, "Authorization". By default everybody may do
everything; tests give an authorizer.
"""

import dataclasses
from collections.abc import Callable, Iterator

from mig_manager.sandbox.apiserver import request, status

Object = status.Object

PROTOBUF = "application/vnd.kubernetes.protobuf"

_MAGIC = b"k8s\x00"
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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """The attributes of a request by which it is authorized."""

    token: str = ""
    """Bearer token; empty when there is none."""
    verb: str = ""
    group: str = ""
    resource: str = ""
    subresource: str = ""
    namespace: str = ""
    name: str = ""


Authorizer = Callable[[Access], bool]


def check(authorizer: Authorizer, info: request.RequestInfo, token: str) -> None:
    """Return if the request is allowed.

    Raises:
        ApiError: 403, with the message that the real server's RBAC gives.
    """
    target = info.target
    group, plural = target.resource.group, target.resource.plural
    access = Access(
        token=token,
        verb=info.verb,
        group=group,
        resource=plural,
        subresource=target.subresource,
        namespace=target.namespace,
        name=target.name,
    )
    if authorizer(access):
        return
    words = status.qualified(group, plural)
    what = f'{words} "{target.name}"' if target.name else words
    where = (
        f'in the namespace "{target.namespace}"' if target.namespace else "at the cluster scope"
    )
    details = ({"name": target.name} if target.name else {}) | ({"group": group} if group else {})
    raise status.ApiError(
        403,
        f'{what} is forbidden: User "{_user(token)}" cannot {info.verb} resource '
        f'"{target.resource_and_subresource}" in API group "{group}" {where}',
        details=details | {"kind": plural},
    )


def _user(token: str) -> str:
    return "system:serviceaccount:sandbox:client" if token else "system:anonymous"


def review(kind: str, body: Object, token: str, authorizer: Authorizer) -> Object:
    """Answer a ``SelfSubjectAccessReview`` or a ``SelfSubjectReview``."""
    if kind == "SelfSubjectReview":
        return body | {"kind": kind, "status": {"userInfo": {"username": _user(token)}}}
    attributes = (body.get("spec") or {}).get("resourceAttributes") or {}
    names = {field.name for field in dataclasses.fields(Access)} - {"token"}
    access = Access(token=token, **{k: v for k, v in attributes.items() if k in names})
    return body | {"kind": kind, "status": {"allowed": authorizer(access)}}


def parse_protobuf_review(body: bytes, kind: str) -> Object:
    """Return a review that ``kubectl auth`` sent, which it writes in protobuf only.

    Raises:
        ApiError: 400 for a malformed message.
    """
    if not body.startswith(_MAGIC):
        raise status.bad_request("the provided data does not appear to be a protobuf message")
    group = "authentication" if kind == "SelfSubjectReview" else "authorization"
    parsed: Object = {"apiVersion": f"{group}.k8s.io/v1", "kind": kind, "metadata": {}}
    if kind == "SelfSubjectReview":
        return parsed
    message = body.removeprefix(_MAGIC)
    try:
        for number in (_ENVELOPE_RAW, _REVIEW_SPEC, _SPEC_RESOURCE_ATTRIBUTES):
            message = dict(_fields(message)).get(number, b"")
        attributes = {
            _ATTRIBUTES[number]: value.decode()
            for number, value in _fields(message)
            if number in _ATTRIBUTES
        }
    except IndexError as error:
        raise status.bad_request("unexpected end of the protobuf message") from error
    return parsed | {"spec": {"resourceAttributes": attributes}}


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the fields of a message that has strings and messages only."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:  # noqa: PLR2004 - the high bit says that more follows
                return value

    while at < len(message):
        number = varint() >> 3
        size = varint()
        yield number, message[at : at + size]
        at += size
