"""One HTTP request to the embedded Kubernetes API, and the ways to answer it."""

import dataclasses
import json
from typing import Any

from starlette import requests, responses, types

from mig_manager.sandbox.api import calls, renderers, statuses

Object = statuses.Object


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One request, and the way back."""

    request: requests.Request
    body: bytes
    call: calls.Call | None
    receive: types.Receive
    send: types.Send

    @property
    def token(self) -> str:
        """The bearer token; empty when there is none."""
        scheme, _, token = self.request.headers.get("authorization", "").partition(" ")
        return token if scheme.lower() == "bearer" else ""

    @property
    def content_type(self) -> str:
        """Media type of the body, without parameters."""
        return self.request.headers.get("content-type", "").partition(";")[0].strip()

    def renderer(self, call: calls.Call) -> renderers.Renderer:
        """Return what renders the answer in the form that the client accepts."""
        return renderers.Renderer(
            resource=call.target.resource,
            form=renderers.choose_form(self.request.headers.get("accept", "")),
            include=call.query.get("includeObject", "Metadata"),
        )

    def json(self) -> Any:
        """Return the body's content; an empty body is an empty object.

        Raises:
            ApiError: 400 for what is no JSON, 415 for another format.
        """
        if self.content_type not in ("", "application/json") and self.call_verb != "patch":
            message = "the body of the request was in an unknown format - accepted media types "
            raise statuses.ApiError(415, f"{message}include: application/json")
        try:
            return json.loads(self.body or b"{}")
        except ValueError as error:
            raise statuses.bad_request(f"unable to decode the body: {error}") from error

    @property
    def call_verb(self) -> str:
        """The Kubernetes verb; empty when no resource is concerned."""
        return self.call.verb if self.call else ""

    async def respond(self, response: responses.Response) -> None:
        """Send a whole answer."""
        await response(self.request.scope, self.receive, self.send)

    async def begin(self, *, length: int | None = None) -> None:
        """Send the headers of an answer that comes in chunks.

        Args:
            length: Size of the body in bytes; None when its end is not known yet.
        """
        headers = [(b"content-type", b"application/json")]
        if length is not None:
            headers.append((b"content-length", str(length).encode()))
        await self.send({"type": "http.response.start", "status": 200, "headers": headers})

    async def write(self, chunk: bytes, *, is_last: bool = False) -> None:
        """Send a chunk of the answer."""
        await self.send({"type": "http.response.body", "body": chunk, "more_body": not is_last})


def json_response(content: Object, code: int = 200) -> responses.Response:
    """Return an answer with a JSON body."""
    body = json.dumps(content, separators=(",", ":")).encode() + b"\n"
    return responses.Response(body, code, media_type="application/json")


def status_response(error: statuses.ApiError) -> responses.Response:
    """Return the answer that tells of a failure."""
    response = json_response(error.to_status(), error.code)
    if error.retry_after_s:
        response.headers["Retry-After"] = str(error.retry_after_s)
    return response
