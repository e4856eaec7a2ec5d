"""Kubelet's PodResources v1 service on a unix socket, fed by the device manager."""

import concurrent.futures
import contextlib
import pathlib
import urllib.parse
from collections.abc import Callable, Iterable
from typing import Any, Self

import grpc

from mig_manager import errors
from mig_manager.adapters.kubelet import messages
from mig_manager.sandbox.cluster import deviceplugin

_LONGEST_PATH = 107
"""Bytes of ``sun_path`` on Linux, less the closing zero."""
_STOP_S = 5.0


class PodResourcesServer:
    """Serves List and GetAllocatableResources from ``with`` to its end.

    Args:
        path: Of the socket; its directory is created, an old socket replaced.
        manager: Whose devices to show.

    Raises:
        UsageError: The path is too long for a unix socket.
    """

    def __init__(self, path: pathlib.Path, manager: deviceplugin.DeviceManager) -> None:
        if len(str(path.absolute()).encode()) > _LONGEST_PATH:
            raise errors.UsageError(
                f"the path of a unix socket has at most {_LONGEST_PATH} bytes: {path}"
            )
        self._path = path.absolute()
        self._manager = manager
        self._exits = contextlib.ExitStack()

    def __enter__(self) -> Self:
        """Start to serve."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.unlink(missing_ok=True)
        with contextlib.ExitStack() as undo:
            pool = undo.enter_context(
                concurrent.futures.ThreadPoolExecutor(
                    max_workers=1, thread_name_prefix="sandbox-podresources"
                )
            )
            server = grpc.server(pool)
            server.add_generic_rpc_handlers((_handlers(self._manager),))
            server.add_insecure_port(f"unix:{urllib.parse.quote(str(self._path))}")
            undo.callback(self._path.unlink, missing_ok=True)
            undo.callback(lambda: server.stop(grace=0).wait(_STOP_S))
            server.start()
            self._exits = undo.pop_all()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._exits.close()


def _handlers(manager: deviceplugin.DeviceManager) -> grpc.GenericRpcHandler:
    def list_pods(_request: Any, _context: grpc.ServicerContext) -> Any:
        return messages.ListPodResourcesResponse(
            pod_resources=[_pod(allocation) for allocation in manager.assigned()]
        )

    def list_allocatable(_request: Any, _context: grpc.ServicerContext) -> Any:
        return messages.AllocatableResourcesResponse(
            devices=[_devices(name, ids) for name, ids in sorted(manager.allocatable().items())]
        )

    return grpc.method_handlers_generic_handler(
        messages.SERVICE,
        {
            "List": _method(list_pods, messages.ListPodResourcesRequest),
            "GetAllocatableResources": _method(
                list_allocatable, messages.AllocatableResourcesRequest
            ),
        },
    )


def _method(
    behaviour: Callable[[Any, grpc.ServicerContext], Any], request: Any
) -> "grpc.RpcMethodHandler[Any, Any]":
    return grpc.unary_unary_rpc_method_handler(
        behaviour,
        request_deserializer=request.FromString,
        response_serializer=lambda answer: answer.SerializeToString(),
    )


def _pod(allocation: deviceplugin.Allocation) -> Any:
    """Show one pod; containers without devices are listed too, as kubelet does."""
    return messages.PodResources(
        name=allocation.name,
        namespace=allocation.namespace,
        containers=[
            messages.ContainerResources(
                name=container,
                devices=[
                    _devices(grant.resource, grant.device_ids)
                    for grant in allocation.grants
                    if grant.is_listed and grant.container == container
                ],
            )
            for container in allocation.containers
        ],
    )


def _devices(resource: str, device_ids: Iterable[str]) -> Any:
    return messages.ContainerDevices(resource_name=resource, device_ids=device_ids)
