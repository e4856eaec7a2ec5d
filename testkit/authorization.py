"""Authorization in front of the embedded API server, as ASGI middleware: who may do what.

Attributes and messages: Kubernetes documentation, "Authorization".
"""

import dataclasses
from collections.abc import Callable

from starlette import requests, responses, types

from mig_manager.sandbox.apiserver import request, resources, server


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

    @property
    def full_resource(self) -> str:
        """``pods`` or ``pods/eviction``, as RBAC rules name it."""
        return full_resource(self.resource, self.subresource)


Authorizer = Callable[[Access], bool]


class Authorized:
    """Answers what is forbidden, and reviews of access; passes on everything else."""

    def __init__(self, app: types.ASGIApp, authorizer: Authorizer) -> None:
        self._app = app
        self._authorizer = authorizer

    async def __call__(self, scope: types.Scope, receive: types.Receive, send: types.Send) -> None:
        """Answer one request, or have the server answer it."""
        http = requests.Request(scope, receive)
        token = bearer_token(http)
        if http.url.path == f"/apis/{resources.REVIEW[0]}/v1/{resources.REVIEW[1]}":
            review = await http.json()
            asked = (review.get("spec") or {}).get("resourceAttributes") or {}
            names = {field.name for field in dataclasses.fields(Access)} - {"token"}
            access = Access(token=token, **{k: v for k, v in asked.items() if k in names})
            allowed = {"status": {"allowed": self._authorizer(access)}}
            await responses.JSONResponse(review | allowed, 201)(scope, receive, send)
            return
        error = self._refusal(http, token)
        app = self._app if error is None else server.status_response(error)
        await app(scope, receive, send)

    def _refusal(self, http: requests.Request, token: str) -> resources.ApiError | None:
        """Return 403 in the words of the real server's RBAC, None if a request is allowed."""
        try:
            info = request.parse(http.method, http.url.path, http.query_params)
        except resources.ApiError:
            return None
        if info is None:
            return None
        target = info.target
        group, plural, name = target.resource.group, target.resource.plural, target.name
        access = Access(
            token=token,
            verb=info.verb,
            group=group,
            resource=plural,
            subresource=target.subresource,
            namespace=target.namespace,
            name=name,
        )
        if self._authorizer(access):
            return None
        what = f'{target.resource.qualified} "{name}"' if name else target.resource.qualified
        user = "system:serviceaccount:sandbox:client" if token else "system:anonymous"
        where = (
            f'in the namespace "{target.namespace}"'
            if target.namespace
            else "at the cluster scope"
        )
        return resources.ApiError(
            403,
            f'{what} is forbidden: User "{user}" cannot {info.verb} resource '
            f'"{access.full_resource}" in API group "{group}" {where}',
            details=target.resource.details(name),
        )


def full_resource(plural: str, subresource: str) -> str:
    """Return ``pods`` or ``pods/eviction``, as RBAC rules name it."""
    return f"{plural}/{subresource}" if subresource else plural


def bearer_token(http: requests.Request) -> str:
    """Return the bearer token of a request; empty when there is none."""
    scheme, _, token = http.headers.get("authorization", "").partition(" ")
    return token if scheme.lower() == "bearer" else ""
