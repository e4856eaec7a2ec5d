"""A fake kubelet: a real gRPC server on a unix socket, as kubelet serves it."""

import concurrent.futures
import contextlib
import pathlib
import tempfile
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from mig_manager.adapters import kubelet_messages

GPU = "nvidia.com/mig-1g.10gb"


def devices(resource: str, *ids: str) -> Any:
    return kubelet_messages.ContainerDevices(resource_name=resource, device_ids=ids)


def pod(name: str, *containers: Any, namespace: str = "ns") -> Any:
    resources = [
        kubelet_messages.ContainerResources(name=f"c{number}", devices=[entry])
        for number, entry in enumerate(containers)
    ]
    return kubelet_messages.PodResources(name=name, namespace=namespace, containers=resources)


class GrpcKubelet:
    """Answers List with ``pods`` and GetAllocatableResources with ``devices``."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self.pods: list[Any] = []
        self.devices: list[Any] = []
        self.refusals = 0
        self.code = grpc.StatusCode.RESOURCE_EXHAUSTED
        self.requests = 0
        self.has_allocatable = True
        self.writes: Callable[[Any], bytes] = lambda message: message.SerializeToString()
        self._server: grpc.Server | None = None

    def start(self) -> None:
        self._server = grpc.server(concurrent.futures.ThreadPoolExecutor(2))
        handlers = {"List": self._handler(self._list, kubelet_messages.ListPodResourcesRequest)}
        if self.has_allocatable:
            handlers["GetAllocatableResources"] = self._handler(
                self._allocatable, kubelet_messages.AllocatableResourcesRequest
            )
        generic = grpc.method_handlers_generic_handler(kubelet_messages.SERVICE, handlers)
        self._server.add_generic_rpc_handlers((generic,))
        self._server.add_insecure_port(f"unix:{urllib.parse.quote(str(self.path))}")
        self._server.start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop(0).wait(5)
            self._server = None

    def _handler(self, answer: Callable[[Any, Any], Any], request: Any) -> Any:
        def serve(request: Any, context: grpc.ServicerContext) -> Any:
            self.requests += 1
            if self.requests <= self.refusals:
                context.abort(self.code, "not now")
            return answer(request, context)

        return grpc.unary_unary_rpc_method_handler(
            serve, request_deserializer=request.FromString, response_serializer=self.writes
        )

    def _list(self, _request: Any, _context: Any) -> Any:
        return kubelet_messages.ListPodResourcesResponse(pod_resources=self.pods)

    def _allocatable(self, _request: Any, _context: Any) -> Any:
        return kubelet_messages.AllocatableResourcesResponse(devices=self.devices)


@contextlib.contextmanager
def a_kubelet() -> Iterator[GrpcKubelet]:
    """Have a kubelet, not yet started, for the body."""
    # pytest's tmp_path can be longer than the 107 bytes that a unix socket's path may have.
    with tempfile.TemporaryDirectory(prefix="mm") as directory:
        path = pathlib.Path(directory, "pod-resources", "kubelet.sock")
        path.parent.mkdir()
        server = GrpcKubelet(path)
        yield server
        server.stop()
