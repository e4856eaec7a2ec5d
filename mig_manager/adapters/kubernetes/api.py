"""The Kubernetes API as plain JSON, over the official client's REST layer.

The official client finds the cluster, rotates credentials, and does TLS and proxies. Its
generated models are not used: they cost 20 MB and a second to import, and reject objects of newer
servers. Its retries are off: it would repeat a POST, and could not be interrupted.
"""

import contextlib
import dataclasses
import http
import math
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping
from typing import Any, Self

import kubernetes.client.configuration
import kubernetes.client.exceptions
import kubernetes.client.rest
import tenacity
import urllib3

from mig_manager import errors, reasons
from mig_manager.adapters.kubernetes import credentials, responses
from mig_manager.core import timing
from mig_manager.core.node import rights
from mig_manager.core.objects import api_values

Configuration = kubernetes.client.configuration.Configuration

LABELS = {"app.kubernetes.io/name": "mig-manager"}
"""Labels of the objects that we create; policies know our evictions by it
(``deploy/evictions``)."""
_CONNECT_TIMEOUT_S = 5.0
_CHUNK = 1 << 18
_MAX_BODY_BYTES = 64 << 20  # bytes; a page of 500 nodes with long lists of images has some 30 MiB
_MAX_ERROR_BYTES = 1 << 20
_SUCCESS = 2
_REQUESTS_PER_S = 20.0
_BURST = 60  # a whole reconfiguration takes some forty requests, and must not be slowed down
_ATTEMPTS = 4
_MAX_RETRY_AFTER_S = 10.0  # a longer delay is left to the caller to plan
_MAX_START_S = 30.0
"""How long a starting server may refuse requests, counted from its last silence."""
_RETRY_READS = frozenset({429, 500, 502, 503, 504})
_RETRY_WRITES = frozenset({429, 503})  # with these statuses a server reports that it has not acted
_UNREACHABLE = (urllib3.exceptions.NewConnectionError, urllib3.exceptions.ConnectTimeoutError)
_backoff_s = tenacity.wait_random_exponential(multiplier=0.25, max=2.0)
"""Random, because all nodes of a cluster may be waiting."""


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """A request to the API server."""

    method: str
    path: str
    body: Mapping[str, Any] | None = None
    query: Mapping[str, str] | None = None
    content: str = "json"  # the body's media type, without ``application/``
    retried: frozenset[int] = frozenset()
    """Statuses after which it is retried, as after a broken connection; empty: never."""

    def can_be_retried(self, error: BaseException) -> bool:
        """Return whether a retry may help and does no harm."""
        if not isinstance(error, responses.ApiError) or not self.retried:
            return False
        is_starting = (
            error.status == http.HTTPStatus.FORBIDDEN
            and error.reason is reasons.Reason.API_UNAVAILABLE
        )
        may_help = error.status is None or error.status in self.retried or is_starting
        return may_help and (error.retry_after_s or 0.0) <= _MAX_RETRY_AFTER_S

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


class KubeApi:
    """A client of the API server; safe to use from several threads.

    Methods raise ``errors.ClusterError`` (its subclass ``ApiError``) and nothing else: FORBIDDEN
    for 403, API_UNAVAILABLE for 401, 429, 5xx and no answer, API_ERROR for all others, which
    ``status`` distinguishes. A 403 of a server that may have just started is API_UNAVAILABLE.
    """

    def __init__(
        self,
        configuration: Configuration,
        *,
        request_timeout_s: float = 10.0,
        loader: credentials.Loader | None = None,
        sleep: Callable[[float], Any] | None = None,
        limit: timing.TokenBucket | None = None,
    ) -> None:
        """Wrap and modify a configuration; ``connect`` and ``at`` are the usual constructors.

        ``request_timeout_s`` bounds each attempt. ``loader`` loads the credentials again after
        the server has refused them, after a failed TLS handshake, and if they have changed and
        the server cannot be reached. ``sleep`` waits between attempts, by default until
        ``close``.
        """
        # The annotation in the client misses that urllib3 takes False for "raise at once".
        configuration.retries = False
        # A watch through a NAT or load balancer that forgets idle connections.
        configuration.keep_alive = True
        self._configuration = configuration
        self._client = kubernetes.client.rest.RESTClientObject(configuration)
        self._timeout_s = request_timeout_s
        self._loader = loader
        self._closed = threading.Event()
        self._sleep: Callable[[float], Any] = sleep or self._closed.wait
        self._limit = limit
        self._limit_lock = threading.Lock()
        self._silent_s = -math.inf
        """When a request last got no answer; -inf after a request that was granted."""

    @classmethod
    def connect(
        cls,
        *,
        kubeconfig: str | None,
        context: str | None = None,
        request_timeout_s: float = 10.0,
    ) -> Self:
        """Find the cluster by a kubeconfig file or our pod's service account, without a request.

        Without ``context`` it is the kubeconfig's current one.

        Raises:
            UsageError: There is no usable configuration.
        """
        configuration = Configuration()
        loader = credentials.Loader(configuration, kubeconfig, context)
        loader.load()
        limit = timing.TokenBucket(burst=_BURST, pause_s=1 / _REQUESTS_PER_S)
        return cls(configuration, request_timeout_s=request_timeout_s, loader=loader, limit=limit)

    @classmethod
    def at(
        cls,
        url: str,
        *,
        token: str | None = None,
        request_timeout_s: float = 10.0,
        sleep: Callable[[float], Any] | None = None,
    ) -> Self:
        """Use the API server at a URL, such as the sandbox's, never through a proxy."""
        configuration = Configuration()
        configuration.host = url.rstrip("/")
        configuration.proxy = None
        if token is not None:
            configuration.api_key["BearerToken"] = f"Bearer {token}"
        return cls(configuration, request_timeout_s=request_timeout_s, sleep=sleep)

    def get(self, path: str, query: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Get an object or a list."""
        return self._object(Request("GET", path, query=query, retried=_RETRY_READS))

    def text(self, path: str, query: Mapping[str, str]) -> str:
        """Get a text, such as a container's log; never sent twice."""
        return self._body(Request("GET", path, query=query)).decode(errors="replace")

    def post(
        self, path: str, body: Mapping[str, Any], query: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Create an object; never sent twice."""
        return self._object(Request("POST", path, body, query=query))

    def put(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Replace an object; never sent twice."""
        return self._object(Request("PUT", path, body))

    def delete(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Delete an object; a retry after a broken connection may find it gone (404)."""
        return self._object(Request("DELETE", path, body, retried=_RETRY_WRITES))

    def patch(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Merge a change into an object (RFC 7386); its absolute values make a retry safe."""
        content = "merge-patch+json"
        return self._object(Request("PATCH", path, body, content=content, retried=_RETRY_WRITES))

    def patch_lists(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Merge as ``patch``, and merge lists by the keys that the API declares for them."""
        content = "strategic-merge-patch+json"
        return self._object(Request("PATCH", path, body, content=content, retried=_RETRY_WRITES))

    def watch(
        self, path: str, *, query: Mapping[str, str], timeout_s: float, idle_timeout_s: float
    ) -> responses.WatchStream:
        """Open a watch with bookmarks; the caller closes it.

        The server ends it after ``timeout_s``; after ``idle_timeout_s`` of silence the connection
        counts as dead.
        """
        options = {
            **query,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(round(timeout_s)),
        }
        response = self._open(Request("GET", path, query=options))
        # The head of the response came under the short deadline; silence within it may be longer.
        socket = getattr(response.connection, "sock", None)
        if socket is not None:
            socket.settimeout(idle_timeout_s)
        return responses.WatchStream(response, request=f"watch {path}")

    def is_allowed(self, right: rights.Right, *, name: str = "") -> bool:
        """Review whether we have a right on the named objects, or on all, in all namespaces."""
        attributes = {
            "group": right.group,
            "resource": right.resource,
            "subresource": right.subresource,
            "verb": right.verb,
        }
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes | ({"name": name} if name else {})},
        }
        answer = self.post("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", review)
        with api_values.as_cluster_error("the review of our rights"):
            return answer["status"]["allowed"] is True

    def user(self) -> str:
        """Return the name of our user, by a SelfSubjectReview."""
        review = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
        answer = self.post("/apis/authentication.k8s.io/v1/selfsubjectreviews", review)
        with api_values.as_cluster_error("the review of our user"):
            return str(answer["status"]["userInfo"]["username"])

    def close(self) -> None:
        """Close the connections and end every wait between attempts."""
        self._closed.set()
        self._client.close()

    def _object(self, request: Request) -> dict[str, Any]:
        """Send a request, with retries where they may help, and parse the answer."""
        return tenacity.Retrying(
            retry=tenacity.retry_if_exception(request.can_be_retried),
            stop=tenacity.stop_any(
                tenacity.stop_after_attempt(_ATTEMPTS),
                tenacity.stop_after_delay(2 * self._timeout_s),
                tenacity.stop_when_event_set(self._closed),
            ),
            wait=_pause_s,
            sleep=self._sleep,
            reraise=True,
        )(self.answer, request)

    def answer(self, request: Request) -> dict[str, Any]:
        """Send a request once, and parse the answer."""
        return responses.parse(str(request), self._body(request))

    def _body(self, request: Request) -> bytes:
        """Send a request once, and return the body of the answer."""
        response = self._open(request)
        text = self._read(response, request)
        if len(text) > _MAX_BODY_BYTES:
            raise responses.ApiError(
                f"the Kubernetes API's answer to {request} has more than"
                f" {_MAX_BODY_BYTES >> 20} MiB",
                reason=reasons.Reason.API_ERROR,
                status=response.status,
            )
        return text

    def _open(self, request: Request) -> urllib3.BaseHTTPResponse:
        """Send a request and return the response, unread, if its status is 2xx."""
        try:
            response = self._send(request)
        except responses.ApiError as error:
            # The kubeconfig may name another authority or server since. Nothing was sent.
            is_of_tls = isinstance(error.__cause__, kubernetes.client.exceptions.ApiException)
            is_unreachable = isinstance(error.__cause__, _UNREACHABLE)
            is_moved = is_unreachable and self._loader is not None and self._loader.is_outdated
            if not ((is_of_tls or is_moved) and self._load_again()):
                raise
            response = self._send(request)
        if response.status == http.HTTPStatus.UNAUTHORIZED and self._load_again():
            response.close()
            response = self._send(request)
        if response.status // 100 != _SUCCESS:
            text = self._read(response, request, limit=_MAX_ERROR_BYTES)
            if len(text) > _MAX_ERROR_BYTES:
                text = b"(a body that is too large)"
            is_starting = time.monotonic() - self._silent_s < _MAX_START_S
            raise responses.refusal(
                str(request), response.status, response.headers, text, is_starting=is_starting
            )
        self._silent_s = -math.inf
        return response

    def _load_again(self) -> bool:
        """Load the credentials again; return whether to send a refused request once more.

        The client itself reloads credentials once a minute. If their file is missing while it is
        replaced, the refusal stays, which explains more.
        """
        if self._loader is None:
            return False
        with contextlib.suppress(errors.UsageError):
            self._loader.load()
            # The old client has the old certificates, and connections that began with them.
            # Other threads may be using it: it is closed with the last of them.
            self._client = kubernetes.client.rest.RESTClientObject(self._configuration)
            return True
        return False

    def _send(self, request: Request) -> urllib3.BaseHTTPResponse:
        headers = {"Accept": "application/json", "User-Agent": "mig-manager"}
        if request.body is not None:
            headers["Content-Type"] = f"application/{request.content}"
        try:
            # This runs the client's refresh, which reads token files and may run a plugin.
            may_run_plugin = self._loader is not None and self._loader.has_kubeconfig
            with credentials.logged_if_slow() if may_run_plugin else contextlib.nullcontext():
                auth = self._configuration.auth_settings().get("BearerToken")
        except Exception as error:
            # A bad file causes any error, such as OverflowError by a time in year 1.
            detail = f"the credentials cannot be read: {error}"
            raise responses.no_answer(str(request), detail) from error
        if auth is not None and auth["value"]:
            # A stray line end would make http.client quote the whole token in its error.
            headers["Authorization"] = " ".join(auth["value"].split())
        if self._limit is not None:
            with self._limit_lock:
                pause_s = self._limit.reserve(time.monotonic())
            if pause_s:
                self._sleep(pause_s)
        query = f"?{urllib.parse.urlencode(request.query)}" if request.query else ""
        try:
            response: urllib3.BaseHTTPResponse = self._client.request(  # type: ignore[no-untyped-call]
                request.method,
                self._configuration.host + request.path + query,
                headers,
                request.body,
                _request_timeout=(min(_CONNECT_TIMEOUT_S, self._timeout_s), self._timeout_s),
            ).response
        except kubernetes.client.exceptions.ApiException as error:
            # How the client reports a failed TLS handshake.
            raise self._no_answer(request, str(error.reason)) from error
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise self._no_answer(request, str(error)) from error
        return response

    def _no_answer(self, request: Request, detail: str) -> responses.ApiError:
        self._silent_s = time.monotonic()
        return responses.no_answer(str(request), detail)

    def _read(
        self,
        response: urllib3.BaseHTTPResponse,
        request: Request,
        *,
        limit: int = _MAX_BODY_BYTES,
    ) -> bytes:
        """Read a body up to a limit and close it; a longer result means that it is too long.

        The deadline also ends a response that trickles in for ever.
        """
        deadline_s = time.monotonic() + 2 * self._timeout_s
        body = bytearray()
        try:
            # Not decoded: we ask for no compression, and a small packed body may unpack to much.
            while len(body) <= limit and (chunk := response.read1(_CHUNK, decode_content=False)):
                body += chunk
                if time.monotonic() > deadline_s:
                    raise self._no_answer(request, "the answer does not end")
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise self._no_answer(request, str(error)) from error
        else:
            if len(body) <= limit:
                response.release_conn()
            return bytes(body)
        finally:
            if not response.closed:
                response.close()


def _pause_s(state: tenacity.RetryCallState) -> float:
    """Wait as long as the server asks, else with backoff."""
    error = state.outcome.exception() if state.outcome else None
    requested_s = error.retry_after_s if isinstance(error, responses.ApiError) else None
    return _backoff_s(state) if requested_s is None else requested_s
