"""PodResources against a real gRPC server on a unix socket, as kubelet serves it."""

import json
import os
import pathlib
import socket
import subprocess
import sys
import time

import grpc
import pytest

from mig_manager import errors
from mig_manager.adapters import pod_resources
from mig_manager.core.node import cluster
from tests import programs
from tests.adapters.kubelet_rig import GPU, Kubelet, devices, pod
from tests.sandbox import library

WRITTEN = pathlib.Path(__file__).parent / "kubelet_messages"
"""Kubelet's messages, made by Kubernetes' Go types and not by our table."""


def ask(kubelet: Kubelet, *, timeout_s: float = 10.0) -> pod_resources.PodResources:
    return pod_resources.PodResources(
        str(kubelet.path), timeout_s=timeout_s, sleep=lambda _seconds: None
    )


def test_the_replicas_of_a_shared_device_are_one_device(kubelet: Kubelet) -> None:
    kubelet.pods = [pod("train", devices(GPU, "MIG-a::0", "MIG-a::3"))]
    kubelet.devices = [devices(f"{GPU}.shared", "MIG-a::0", "MIG-a::1", "MIG-b::0")]
    kubelet.start()
    (entry,) = ask(kubelet).assigned()
    assert entry.device_ids == {"MIG-a"}
    assert ask(kubelet).allocatable() == {f"{GPU}.shared": {"MIG-a", "MIG-b"}}


def test_the_rate_limit_is_waited_out(kubelet: Kubelet) -> None:
    kubelet.refusals = 3
    kubelet.start()
    assert ask(kubelet).assigned() == ()
    assert kubelet.asked == 4


@pytest.mark.parametrize(
    ("code", "asked"),
    [(grpc.StatusCode.RESOURCE_EXHAUSTED, 5), (grpc.StatusCode.INTERNAL, 1)],
    ids=["a rate limit that stays", "another refusal, at once"],
)
def test_a_refusal_is_an_error(code: grpc.StatusCode, asked: int, kubelet: Kubelet) -> None:
    kubelet.refusals, kubelet.code = 1000, code
    kubelet.start()
    with pytest.raises(errors.ClusterError, match=f"{code.name}: not now") as caught:
        ask(kubelet).assigned()
    assert caught.value.reason is errors.Reason.POD_RESOURCES_UNAVAILABLE
    assert kubelet.asked == asked


def test_an_answer_that_is_no_message_is_an_error_and_no_traceback(
    kubelet: Kubelet, caplog: pytest.LogCaptureFixture
) -> None:
    kubelet.writes = lambda _message: b"\xff\xff\xff\xff"
    kubelet.start()
    for question in (ask(kubelet).assigned, ask(kubelet).allocatable):
        with pytest.raises(errors.ClusterError, match="is malformed") as caught:
            question()
        assert caught.value.reason is errors.Reason.POD_RESOURCES_UNAVAILABLE
    assert caplog.text == ""


def test_a_file_in_place_of_the_socket_is_an_error(kubelet: Kubelet) -> None:
    kubelet.path.touch()
    with pytest.raises(errors.ClusterError, match="not a socket"):
        ask(kubelet).allocatable()


def test_a_socket_without_a_server_is_an_error_at_once(kubelet: Kubelet) -> None:
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


def test_loads_no_coroutines_of_grpc_and_leaves_them_importable() -> None:
    script = (
        "import sys\n"
        "from mig_manager.adapters import pod_resources\n"
        "pod_resources.load()\n"
        "assert 'grpc' in sys.modules and 'tenacity' not in sys.modules\n"
        "assert not sys.modules.get('asyncio') and 'grpc.aio' not in sys.modules\n"
        "import grpc.aio\n"
        "assert grpc.aio.insecure_channel\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)  # noqa: S603 - our own script


def test_says_nothing_on_standard_error_and_leaves_the_process_free_to_fork(
    kubelet: Kubelet,
) -> None:
    kubelet.start()
    script = (
        "import os, subprocess, sys\n"
        "from mig_manager.adapters import pod_resources\n"
        "assert 'grpc' not in sys.modules\n"
        "client = pod_resources.PodResources(sys.argv[1])\n"
        "client.assigned()\n"
        "subprocess.run(['true'], check=True)\n"
        "child = os.fork()\n"
        "child or os._exit(0)\n"
        "os.waitpid(child, 0)\n"
        "client.assigned()\n"
    )
    # From Python 3.12 on any thread beside, be it about to end, is worth a warning to os.fork.
    options = ("-W", "ignore:This process:DeprecationWarning")
    ended = subprocess.run(  # noqa: S603 - our own script
        [sys.executable, *options, "-c", script, os.fspath(kubelet.path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def written(name: str) -> bytes:
    """Return a message of kubelet_messages/main.go, which says what is in it."""
    return bytes.fromhex(json.loads((WRITTEN / "messages.json").read_text("utf-8"))[name])


def served(kubelet: Kubelet, name: str) -> pod_resources.PodResources:
    kubelet.writes = lambda _message: written(name)
    kubelet.start()
    return ask(kubelet)


def test_devices_and_claims_of_pods_are_read_from_what_kubelet_writes(kubelet: Kubelet) -> None:
    pods = served(kubelet, "list").assigned()

    assert pods == (
        cluster.PodDevices(
            namespace="team-a", name="train-0", device_ids=frozenset({"MIG-1", "MIG-2"})
        ),
        cluster.PodDevices(
            namespace="team-b",
            name="claims-0",
            device_ids=frozenset(),
            claim_drivers=frozenset({"gpu.nvidia.com"}),
        ),
        cluster.PodDevices(namespace="default", name="plain", device_ids=frozenset()),
    )


def test_allocatable_devices_are_read_from_what_kubelet_writes(kubelet: Kubelet) -> None:
    devices = served(kubelet, "allocatable").allocatable()

    assert devices == {"nvidia.com/mig-1g.5gb": {"MIG-1", "MIG-2"}, "nvidia.com/gpu": {"GPU-1"}}


@pytest.mark.slow
def test_the_kept_messages_are_what_kubernetes_types_write() -> None:
    printed = library.run(programs.needed("go"), "run", ".", folder=WRITTEN)

    assert json.loads(printed) == json.loads((WRITTEN / "messages.json").read_text("utf-8"))
