"""PodResources against a real gRPC server on a unix socket, as kubelet serves it."""

import concurrent.futures
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from mig_manager import errors
from mig_manager.adapters import podresources
from mig_manager.adapters import podresources_messages as messages

_GPU = "nvidia.com/mig-1g.10gb"


def devices(resource: str, *ids: str) -> Any:
    return messages.ContainerDevices(resource_name=resource, device_ids=ids)


def pod(name: str, *containers: Any) -> Any:
    resources = [
        messages.ContainerResources(name=f"c{number}", devices=[entry])
        for number, entry in enumerate(containers)
    ]
    return messages.PodResources(name=name, namespace="ns", containers=resources)


class Kubelet:
    """Answers List with ``pods`` and GetAllocatableResources with ``devices``."""

    def __init__(self, directory: pathlib.Path) -> None:
        self.path = directory / "kubelet.sock"
        self.pods: list[Any] = []
        self.devices: list[Any] = []
        self.refusals = 0
        self.code = grpc.StatusCode.RESOURCE_EXHAUSTED
        self.asked = 0
        self.has_allocatable = True
        self.writes: Callable[[Any], bytes] = lambda message: message.SerializeToString()
        self._server: grpc.Server | None = None

    def start(self) -> None:
        self._server = grpc.server(concurrent.futures.ThreadPoolExecutor(2))
        handlers = {"List": self._handler(self._list, messages.ListPodResourcesRequest)}
        if self.has_allocatable:
            handlers["GetAllocatableResources"] = self._handler(
                self._allocatable, messages.AllocatableResourcesRequest
            )
        generic = grpc.method_handlers_generic_handler(messages.SERVICE, handlers)
        self._server.add_generic_rpc_handlers((generic,))
        self._server.add_insecure_port(f"unix:{self.path}")
        self._server.start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop(0).wait(5)
            self._server = None

    def _handler(self, answer: Callable[[Any, Any], Any], request: Any) -> Any:
        def serve(asked: Any, context: grpc.ServicerContext) -> Any:
            self.asked += 1
            if self.asked <= self.refusals:
                context.abort(self.code, "not now")
            return answer(asked, context)

        return grpc.unary_unary_rpc_method_handler(
            serve,
            request_deserializer=request.FromString,
            response_serializer=self.writes,
        )

    def _list(self, _asked: Any, _context: Any) -> Any:
        return messages.ListPodResourcesResponse(pod_resources=self.pods)

    def _allocatable(self, _asked: Any, _context: Any) -> Any:
        return messages.AllocatableResourcesResponse(devices=self.devices)


@pytest.fixture
def kubelet() -> Iterator[Kubelet]:
    # pytest's tmp_path can be longer than the 107 bytes that a unix socket's path may have.
    with tempfile.TemporaryDirectory(prefix="mm") as directory:
        server = Kubelet(pathlib.Path(directory))
        yield server
        server.stop()


def ask(kubelet: Kubelet, *, timeout_s: float = 10.0) -> podresources.PodResources:
    return podresources.PodResources(
        str(kubelet.path), timeout_s=timeout_s, sleep=lambda _seconds: None
    )


def test_tells_which_pod_holds_which_devices(kubelet: Kubelet) -> None:
    kubelet.pods = [
        pod("train", devices(_GPU, "MIG-a"), devices(_GPU, "MIG-b", "MIG-c")),
        pod("idle"),
    ]
    kubelet.start()
    found = {entry.key: entry.device_ids for entry in ask(kubelet).assigned()}
    assert found == {"ns/train": {"MIG-a", "MIG-b", "MIG-c"}, "ns/idle": frozenset()}


def test_the_replicas_of_a_shared_device_are_one_device(kubelet: Kubelet) -> None:
    kubelet.pods = [pod("train", devices(_GPU, "MIG-a::0", "MIG-a::3"))]
    kubelet.devices = [devices(f"{_GPU}.shared", "MIG-a::0", "MIG-a::1", "MIG-b::0")]
    kubelet.start()
    (entry,) = ask(kubelet).assigned()
    assert entry.device_ids == {"MIG-a"}
    assert ask(kubelet).allocatable() == {f"{_GPU}.shared": {"MIG-a", "MIG-b"}}


def claiming(*drivers: str) -> Any:
    held = [messages.ClaimResource(driver_name=driver, device_name="gpu-0") for driver in drivers]
    claim = messages.DynamicResource(claim_name="c", claim_namespace="ns", claim_resources=held)
    return messages.PodResources(
        name="p",
        namespace="ns",
        containers=[messages.ContainerResources(name="c", dynamic_resources=[claim])],
    )


@pytest.mark.parametrize(
    "drivers", [["gpu.nvidia.com"], ["nic.example.com", "gpu.nvidia.com"], []]
)
def test_the_drivers_of_a_pods_claims_are_told_although_they_name_no_device(
    kubelet: Kubelet, drivers: list[str]
) -> None:
    kubelet.pods = [claiming(*drivers)]
    kubelet.start()
    (entry,) = ask(kubelet).assigned()
    assert (entry.claim_drivers, entry.device_ids) == (frozenset(drivers), frozenset())


def test_allocatable_devices_of_all_numa_nodes_are_put_together(kubelet: Kubelet) -> None:
    kubelet.devices = [
        devices(_GPU, "MIG-a"),
        devices("nvidia.com/gpu", "GPU-1"),
        devices(_GPU, "MIG-b"),
    ]
    kubelet.start()
    assert ask(kubelet).allocatable() == {
        _GPU: {"MIG-a", "MIG-b"},
        "nvidia.com/gpu": {"GPU-1"},
    }


def test_what_a_newer_kubelet_adds_is_skipped(kubelet: Kubelet) -> None:
    entry = devices(_GPU, "MIG-a")
    # Field 3, the NUMA topology {nodes: [{ID: 1}]}, which we do not know.
    entry.MergeFromString(b"\x1a\x04\x0a\x02\x08\x01")
    kubelet.devices = [entry]
    kubelet.start()
    assert ask(kubelet).allocatable() == {_GPU: {"MIG-a"}}


def test_an_answer_beyond_grpcs_default_limit_is_read(kubelet: Kubelet) -> None:
    kubelet.pods = [pod(f"p{n}", devices(_GPU, "MIG-" + "x" * 1_000_000)) for n in range(6)]
    kubelet.start()
    assert len(ask(kubelet).assigned()) == 6


def test_the_rate_limit_is_waited_out(kubelet: Kubelet) -> None:
    kubelet.refusals = 3
    kubelet.start()
    assert ask(kubelet).assigned() == ()
    assert kubelet.asked == 4


def test_a_rate_limit_that_stays_is_an_error(kubelet: Kubelet) -> None:
    kubelet.refusals = 1000
    kubelet.start()
    with pytest.raises(errors.ClusterError, match="RESOURCE_EXHAUSTED: not now") as caught:
        ask(kubelet).assigned()
    assert caught.value.reason is errors.Reason.POD_RESOURCES_UNAVAILABLE
    assert kubelet.asked < 10


def test_another_refusal_is_an_error_at_once(kubelet: Kubelet) -> None:
    kubelet.refusals, kubelet.code = 1, grpc.StatusCode.INTERNAL
    kubelet.start()
    with pytest.raises(errors.ClusterError, match="INTERNAL: not now"):
        ask(kubelet).assigned()
    assert kubelet.asked == 1


def test_an_answer_that_is_no_message_is_an_error_and_no_traceback(
    kubelet: Kubelet, caplog: pytest.LogCaptureFixture
) -> None:
    kubelet.writes = lambda _message: b"\xff\xff\xff\xff"
    kubelet.start()
    for question in (ask(kubelet).assigned, ask(kubelet).allocatable):
        with pytest.raises(errors.ClusterError, match="makes no sense") as caught:
            question()
        assert caught.value.reason is errors.Reason.POD_RESOURCES_UNAVAILABLE
    assert caplog.text == ""


def test_a_missing_socket_is_an_error_and_not_an_idle_node(kubelet: Kubelet) -> None:
    begun = time.monotonic()
    with pytest.raises(errors.ClusterError, match=r"kubelet\.sock.*No such file") as caught:
        ask(kubelet).assigned()
    assert caught.value.reason is errors.Reason.POD_RESOURCES_UNAVAILABLE
    assert time.monotonic() - begun < 5


def test_a_file_in_place_of_the_socket_is_an_error(kubelet: Kubelet) -> None:
    kubelet.path.touch()
    with pytest.raises(errors.ClusterError, match="not a socket"):
        ask(kubelet).allocatable()


def test_a_socket_that_nobody_serves_is_an_error_at_once(kubelet: Kubelet) -> None:
    with socket.socket(socket.AF_UNIX) as left_over:
        left_over.bind(str(kubelet.path))
        begun = time.monotonic()
        with pytest.raises(errors.ClusterError, match="UNAVAILABLE"):
            ask(kubelet).assigned()
        assert time.monotonic() - begun < 5


def test_a_kubelet_that_hangs_is_given_up_after_the_time_out(kubelet: Kubelet) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(kubelet.path))
        silent.listen()
        with pytest.raises(errors.ClusterError, match="DEADLINE_EXCEEDED"):
            ask(kubelet, timeout_s=0.2).assigned()


def test_a_kubelet_without_the_allocatable_call_is_an_error(kubelet: Kubelet) -> None:
    kubelet.has_allocatable = False
    kubelet.start()
    with pytest.raises(errors.ClusterError, match="UNIMPLEMENTED"):
        ask(kubelet).allocatable()


def test_a_kubelet_that_starts_again_is_found_again(kubelet: Kubelet) -> None:
    client = ask(kubelet)
    kubelet.start()
    assert client.assigned() == ()
    kubelet.stop()
    with pytest.raises(errors.ClusterError):
        client.assigned()
    kubelet.start()
    assert client.assigned() == ()


def test_says_nothing_on_standard_error_and_leaves_the_process_free_to_fork(
    kubelet: Kubelet,
) -> None:
    kubelet.start()
    script = (
        "import os, subprocess, sys\n"
        "from mig_manager.adapters import podresources\n"
        "assert 'grpc' not in sys.modules\n"
        "client = podresources.PodResources(sys.argv[1])\n"
        "client.assigned()\n"
        "subprocess.run(['true'], check=True)\n"
        "child = os.fork()\n"
        "child or os._exit(0)\n"
        "os.waitpid(child, 0)\n"
        "client.assigned()\n"
    )
    ended = subprocess.run(  # noqa: S603 - our own script
        [sys.executable, "-c", script, os.fspath(kubelet.path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
