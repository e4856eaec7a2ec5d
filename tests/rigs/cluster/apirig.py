"""An HTTP client for the embedded Kubernetes API, and objects to put into it."""

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import urllib3

from mig_manager.adapters.kubernetes import api
from testkit import apiserver
from tests.rigs.api_objects import Object

MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
NODES = "/api/v1/nodes"
PODS = "/api/v1/namespaces/default/pods"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/default/leases"
TABLE = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json"


@dataclasses.dataclass(frozen=True, slots=True)
class ApiAnswer:
    code: int
    body: Any
    headers: urllib3.HTTPHeaderDict


class Client:
    """The shortest way to send a request and see all of the answer."""

    def __init__(self, server: apiserver.ApiServer) -> None:
        self.server = server
        self.http = urllib3.PoolManager(retries=False, timeout=60)

    def __call__(
        self, method: str, path: str, body: object = None, /, **headers: str
    ) -> ApiAnswer:
        response = self.http.request(
            method,
            self.server.url + path,
            body=None if body is None else json.dumps(body),
            headers={key.replace("_", "-"): value for key, value in headers.items()},
        )
        return ApiAnswer(response.status, response.json(), response.headers)

    def merge(self, path: str, patch: object) -> ApiAnswer:
        return self("PATCH", path, patch, content_type=MERGE)

    def strategic(self, path: str, patch: object) -> ApiAnswer:
        return self("PATCH", path, patch, content_type=STRATEGIC)

    def evict(self, name: str, /, **options: object) -> ApiAnswer:
        return self("POST", f"{PODS}/{name}/eviction", an_eviction(name, **options))


def an_eviction(name: str = "p1", **options: object) -> Object:
    return {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": name, "namespace": "default"},
        "deleteOptions": options,
    }


@contextlib.contextmanager
def serving(server: apiserver.ApiServer | None = None) -> Iterator[Client]:
    with apiserver.serve(server) as running:
        client = Client(running)
        yield client
        client.http.clear()


def quick_client(server: apiserver.ApiServer) -> contextlib.closing[api.KubeApi]:
    """Return a client of the server that repeats requests at once."""
    return contextlib.closing(api.KubeApi.at(server.url, sleep=lambda _seconds: None))
