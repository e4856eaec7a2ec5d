"""Authorize the requests of the embedded API server, as ASGI middleware.

Attributes and messages: Kubernetes documentation, "Authorization".
"""

import dataclasses
from collections.abc import Callable

from starlette import requests, responses, types

from mig_manager.sandbox.apiserver import kinds, request, server


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """The attributes of a request that decide its authorization."""

    token: str = ""  # bearer token; empty without one
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


class AuthorizedApp:
    """Answers forbidden requests and reviews of access; forwards all others."""

    def __init__(self, app: types.ASGIApp, authorizer: Authorizer) -> None:
        self._app = app
        self._authorizer = authorizer

    async def __call__(self, scope: types.Scope, receive: types.Receive, send: types.Send) -> None:
        """Answer or forward a request."""
        http = requests.Request(scope, receive)
        token = bearer_token(http)
        if http.url.path == f"/apis/{kinds.REVIEW[0]}/v1/{kinds.REVIEW[1]}":
            review = await http.json()
            attributes = (review.get("spec") or {}).get("resourceAttributes") or {}
            names = {field.name for field in dataclasses.fields(Access)} - {"token"}
            access = Access(token=token, **{k: v for k, v in attributes.items() if k in names})
            allowed = {"status": {"allowed": self._authorizer(access)}}
            await responses.JSONResponse(review | allowed, 201)(scope, receive, send)
            return
        error = self._refusal(http, token)
        app = self._app if error is None else server.status_response(error)
        await app(scope, receive, send)

    def _refusal(self, http: requests.Request, token: str) -> kinds.StatusError | None:
        """Return 403 with the message of the real server's RBAC; None for an allowed request."""
        try:
            info = request.parse(http.method, http.url.path, http.query_params)
        except kinds.StatusError:
            return None
        if info is None:
            return None
        target = info.target
        kind, name, namespace = target.resource, target.name, target.namespace
        access = Access(
            token=token,
            verb=info.verb,
            group=kind.group,
            resource=kind.plural,
            subresource=target.subresource,
            namespace=namespace,
            name=name,
        )
        if self._authorizer(access):
            return None
        what = f'{kind.qualified} "{name}"' if name else kind.qualified
        user = "system:serviceaccount:sandbox:client" if token else "system:anonymous"
        where = f'in the namespace "{namespace}"' if namespace else "at the cluster scope"
        return kinds.StatusError(
            403,
            f'{what} is forbidden: User "{user}" cannot {info.verb} resource '
            f'"{access.full_resource}" in API group "{kind.group}" {where}',
            details=kind.details(name),
        )


def full_resource(plural: str, subresource: str) -> str:
    """Return ``pods`` or ``pods/eviction``, as RBAC rules name it."""
    return f"{plural}/{subresource}" if subresource else plural


def bearer_token(http: requests.Request) -> str:
    """Return the bearer token of a request; empty without one."""
    scheme, _, token = http.headers.get("authorization", "").partition(" ")
    return token if scheme.lower() == "bearer" else ""
