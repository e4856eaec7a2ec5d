"""Who may do what, when a test wants to know how a client does with fewer rights.

Attributes: Kubernetes documentation, "Authorization", section on request attributes.
"""

import dataclasses
from collections.abc import Callable

from mig_manager.sandbox.api import calls, statuses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """What somebody wants to do."""

    token: str
    """Bearer token; empty when there is none."""
    verb: str
    group: str
    resource: str
    subresource: str
    namespace: str
    name: str


Authorizer = Callable[[Access], bool]


def access_of(call: calls.Call, token: str) -> Access:
    """Return what a request wants to do."""
    target = call.target
    return Access(
        token=token,
        verb=call.verb,
        group=target.resource.group,
        resource=target.resource.plural,
        subresource=target.subresource,
        namespace=target.namespace,
        name=target.name,
    )


def check(authorizer: Authorizer, access: Access) -> None:
    """Return if the access is allowed.

    Raises:
        ApiError: 403, with the message that the real server's RBAC gives.
    """
    if authorizer(access):
        return
    plural = statuses.qualified(access.group, access.resource)
    what = f'{plural} "{access.name}"' if access.name else plural
    where = (
        f'in the namespace "{access.namespace}"' if access.namespace else "at the cluster scope"
    )
    asked = access.resource + (f"/{access.subresource}" if access.subresource else "")
    details = {"name": access.name} if access.name else {}
    if access.group:
        details["group"] = access.group
    raise statuses.ApiError(
        403,
        f'{what} is forbidden: User "{user(access.token)}" cannot {access.verb} resource '
        f'"{asked}" in API group "{access.group}" {where}',
        details=details | {"kind": access.resource},
    )


def user(token: str) -> str:
    """Return the name of the user that a token stands for; every token is accepted."""
    return "system:serviceaccount:sandbox:client" if token else "system:anonymous"


def review(kind: str, body: statuses.Object, token: str, authorizer: Authorizer) -> (
    statuses.Object
):  # fmt: skip
    """Answer a ``SelfSubjectAccessReview`` or a ``SelfSubjectReview``."""
    if kind == "SelfSubjectReview":
        return body | {"kind": kind, "status": {"userInfo": {"username": user(token)}}}
    asked = (body.get("spec") or {}).get("resourceAttributes") or {}
    access = Access(
        token=token,
        verb=asked.get("verb", ""),
        group=asked.get("group", ""),
        resource=asked.get("resource", ""),
        subresource=asked.get("subresource", ""),
        namespace=asked.get("namespace", ""),
        name=asked.get("name", ""),
    )
    return body | {"kind": kind, "status": {"allowed": authorizer(access)}}
