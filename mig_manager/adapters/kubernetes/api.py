"""The Kubernetes API as plain JSON over the official client.

We use none of its generated models, which cost 20 MB and a second to import and reject what a
newer server may send. Its own retries are switched off: it would repeat a POST, and could not be
interrupted.
"""

import enum
import functools
import http
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping
from typing import Any, Self

import urllib3

from mig_manager import errors
from mig_manager.adapters.kubernetes import api_errors, client, stream

_CONNECT_TIMEOUT_S = 5.0
_CHUNK = 1 << 18
_LARGEST_BODY = 64 << 20
"""Bytes; a page of 500 nodes with long lists of images has some 30 MiB."""
_LARGEST_ERROR = 1 << 20
_SUCCESS = 2
_REQUESTS_PER_S = 20.0
_BURST = 60
"""A whole reconfiguration takes some forty requests, and is not to be slowed down."""


class PatchType(enum.Enum):
    """The media types of PATCH."""

    STRATEGIC = "application/strategic-merge-patch+json"
    MERGE = "application/merge-patch+json"
    JSON = "application/json-patch+json"


class KubeApi:
    """A connection to the API server; safe to use from several threads.

    Every method raises ``errors.ClusterError`` (in fact its subclass ``api_errors.ApiError``) and
    nothing else: FORBIDDEN for 401 and 403, API_UNAVAILABLE for 429, 5xx and no answer, API_ERROR
    for all others, told apart by ``status``.
    """

    def __init__(
        self,
        configuration: client.Configuration,
        *,
        request_timeout_s: float = 10.0,
        reload: Callable[[], None] | None = None,
        sleep: Callable[[float], object] | None = None,
        limit: api_errors.Throttle | None = None,
    ) -> None:
        """Wrap a configuration; ``connect`` and ``at`` are the usual ways in.

        Args:
            configuration: Of the official client; changed to suit us.
            request_timeout_s: How long to wait for an answer, per attempt.
            reload: Reads the credentials anew, after the server has refused them.
            sleep: Waits between attempts; None waits until then or until ``close``.
            limit: How fast requests may follow each other; None: as they come.
        """
        # The annotation in the client misses that urllib3 takes False for "raise at once".
        configuration.retries = False
        # A watch through a NAT or load balancer that forgets idle connections.
        configuration.keep_alive = True
        self._configuration = configuration
        self._client = client.RESTClientObject(configuration)
        self._timeout_s = request_timeout_s
        self._reload = reload
        self._closed = threading.Event()
        self._sleep = sleep or self._closed.wait
        self._limit = limit

    @classmethod
    def connect(cls, *, kubeconfig: str | None, request_timeout_s: float = 10.0) -> Self:
        """Find the cluster; nothing is sent yet.

        Args:
            kubeconfig: Path of a kubeconfig file; None for the service account of our pod.
            request_timeout_s: How long to wait for an answer, per attempt.

        Raises:
            UsageError: There is no usable configuration; the message says why.
        """
        configuration = client.Configuration()
        load = functools.partial(_load, configuration, kubeconfig)
        load()
        limit = api_errors.Throttle(per_s=_REQUESTS_PER_S, burst=_BURST)
        return cls(configuration, request_timeout_s=request_timeout_s, reload=load, limit=limit)

    @classmethod
    def at(
        cls,
        url: str,
        *,
        token: str | None = None,
        request_timeout_s: float = 10.0,
        sleep: Callable[[float], object] | None = None,
    ) -> Self:
        """Use the API server at a URL, such as the sandbox's, never through a proxy."""
        configuration = client.Configuration()
        configuration.host = url.rstrip("/")
        configuration.proxy = None
        if token is not None:
            configuration.api_key["BearerToken"] = f"Bearer {token}"
        return cls(configuration, request_timeout_s=request_timeout_s, sleep=sleep)

    def get(self, path: str, query: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Read an object or a list."""
        return self._request("GET", _with_query(path, query), when=api_errors.When.READ)

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Create an object; never sent twice."""
        return self._request("POST", path, body=body)

    def put(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Replace an object; never sent twice."""
        return self._request("PUT", path, body=body)

    def delete(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Delete an object; a repetition after a broken connection may find it gone (404)."""
        return self._request(
            "DELETE", _with_query(path, query), body=body, when=api_errors.When.IDEMPOTENT
        )

    def patch(
        self, path: str, body: Mapping[str, Any] | list[Any], *, kind: PatchType
    ) -> dict[str, Any]:
        """Change an object.

        A merge writes absolute values and may be repeated after a broken connection; the
        operations of a JSON patch may not.
        """
        when = api_errors.When.UNSENT if kind is PatchType.JSON else api_errors.When.IDEMPOTENT
        return self._request("PATCH", path, body=body, content_type=kind.value, when=when)

    def watch(
        self, path: str, *, query: Mapping[str, str], timeout_s: float, idle_timeout_s: float
    ) -> stream.WatchStream:
        """Open a watch; the caller closes it.

        Args:
            path: The collection.
            query: Selectors and ``resourceVersion``; bookmarks are always asked for.
            timeout_s: After how long the server shall end the watch in an orderly way.
            idle_timeout_s: After how much silence the connection counts as dead.
        """
        asked = {
            **query,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(round(timeout_s)),
        }
        response = self._open("GET", _with_query(path, asked), None, None)
        # The answer's head came under the short deadline; silence within it may be longer.
        socket = getattr(response.connection, "sock", None)
        if socket is not None:
            socket.settimeout(idle_timeout_s)
        return stream.WatchStream(response, request=f"watch {path}")

    def close(self) -> None:
        """Release the connections and end the waiting of others between attempts."""
        self._closed.set()
        self._client.close()

    def _request(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, Any] | list[Any] | None = None,
        content_type: str = "application/json",
        when: api_errors.When = api_errors.When.NEVER,
    ) -> dict[str, Any]:
        retrying = api_errors.retrying(
            when,
            limit_s=2 * self._timeout_s,
            ended=self._closed,
            sleep=self._sleep,
        )
        return retrying(self._once, method, path, body, content_type)

    def _once(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | list[Any] | None,
        content_type: str,
    ) -> dict[str, Any]:
        request = _name(method, path)
        response = self._open(method, path, body, content_type)
        return api_errors.parse(request, self._read(response, request))

    def _open(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | list[Any] | None,
        content_type: str | None,
    ) -> urllib3.BaseHTTPResponse:
        """Send a request and return the answer, unread, if its status is good."""
        response = self._send(method, path, body, content_type)
        if response.status == http.HTTPStatus.UNAUTHORIZED and self._has_reloaded():
            response.close()
            response = self._send(method, path, body, content_type)
        if response.status // 100 != _SUCCESS:
            request = _name(method, path)
            text = self._read_error(response, request)
            raise api_errors.refusal(request, response.status, response.headers, text)
        return response

    def _send(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | list[Any] | None,
        content_type: str | None,
    ) -> urllib3.BaseHTTPResponse:
        request = _name(method, path)
        headers = self._headers(request, content_type if body is not None else None)
        if self._limit is not None and (pause_s := self._limit.take()) > 0:
            self._sleep(pause_s)
        try:
            answer: client.RESTResponse = self._client.request(  # type: ignore[no-untyped-call]
                method,
                self._configuration.host + path,
                headers,
                body,
                _request_timeout=(min(_CONNECT_TIMEOUT_S, self._timeout_s), self._timeout_s),
            )
        except (
            urllib3.exceptions.NewConnectionError,
            urllib3.exceptions.ConnectTimeoutError,
        ) as e:
            raise api_errors.no_answer(request, str(e), was_sent=False) from e
        except client.ApiException as err:
            # How the client reports a failed TLS handshake.
            raise api_errors.no_answer(request, str(err.reason), was_sent=False) from err
        except (urllib3.exceptions.HTTPError, OSError) as err:
            raise api_errors.no_answer(request, str(err)) from err
        response: urllib3.BaseHTTPResponse = answer.response
        return response

    def _has_reloaded(self) -> bool:
        """Read the credentials anew: the client itself does so only once a minute."""
        if self._reload is None:
            return False
        try:
            self._reload()
        except errors.UsageError:
            # The server's 401 tells more than a file that is missing while it is replaced.
            return False
        return True

    def _headers(self, request: str, content_type: str | None) -> dict[str, str]:
        headers = {"Accept": "application/json", "User-Agent": "mig-manager"}
        if content_type is not None:
            headers["Content-Type"] = content_type
        try:
            # Asking runs the client's refresh, which reads token files and may run a plugin.
            auth = self._configuration.auth_settings().get("BearerToken")
        except Exception as err:
            # Whatever a file provokes, such as OverflowError by a time in year 1.
            detail = f"the credentials cannot be read: {err}"
            raise api_errors.no_answer(request, detail, was_sent=False) from err
        if auth is not None and auth["value"]:
            # A stray line end would make http.client quote the whole token in its error.
            headers["Authorization"] = " ".join(auth["value"].split())
        return headers

    def _read_error(self, response: urllib3.BaseHTTPResponse, request: str) -> bytes:
        """Read the body of a refusal; one that is too large explains nothing."""
        try:
            return self._read(response, request, limit=_LARGEST_ERROR)
        except api_errors.ApiError as error:
            if error.status is None:
                raise
            return b"(a body that is too large)"

    def _read(
        self, response: urllib3.BaseHTTPResponse, request: str, *, limit: int = _LARGEST_BODY
    ) -> bytes:
        """Read a whole body; the deadline also ends an answer that trickles in for ever."""
        deadline = time.monotonic() + 2 * self._timeout_s
        body = bytearray()
        try:
            # As it comes: we ask for nothing packed, and what is may be small and unpack to much.
            while chunk := response.read1(_CHUNK, decode_content=False):
                body += chunk
                if len(body) > limit:
                    raise api_errors.too_large(request, response.status, limit)
                if time.monotonic() > deadline:
                    raise api_errors.no_answer(request, "the answer does not end")
        except (urllib3.exceptions.HTTPError, OSError) as err:
            raise api_errors.no_answer(request, str(err)) from err
        else:
            response.release_conn()
            return bytes(body)
        finally:
            if not response.closed:
                response.close()


def _load(configuration: client.Configuration, kubeconfig: str | None) -> None:
    try:
        if kubeconfig is None:
            client.load_incluster_config(configuration)
        else:
            client.load_kube_config(kubeconfig, configuration)
    except Exception as err:  # noqa: BLE001 - the loader lets out whatever a bad file provokes
        where = f"kubeconfig {kubeconfig}" if kubeconfig else "not in a pod of a cluster"
        raise errors.UsageError(f"no way to a Kubernetes API: {where}: {err}") from None


def _with_query(path: str, query: Mapping[str, str] | None) -> str:
    return f"{path}?{urllib.parse.urlencode(query)}" if query else path


def _name(method: str, path: str) -> str:
    return f"{method} {path.partition('?')[0]}"
