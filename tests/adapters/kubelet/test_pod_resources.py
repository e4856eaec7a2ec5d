"""PodResources against a real gRPC server on a unix socket, as kubelet serves it."""

import json
import os
import pathlib
import socket
import time
from collections.abc import Callable

import grpc
import pytest

from mig_manager import errors, reasons
from mig_manager.adapters import pod_resources
from mig_manager.core.objects import pod_object
from tests.rigs import programs
from tests.rigs.cluster.kubelet_rig import GPU, GrpcKubelet, devices, pod
from tests.rigs.driver import c_library
from tests.rigs.host import processes

WRITTEN = pathlib.Path(__file__).parent / "kubelet_messages"
"""Kubelet's messages, made by Kubernetes' Go types and not by our table."""


def ask(kubelet: GrpcKubelet, *, timeout_s: float = 60.0) -> pod_resources.PodResources:
    return pod_resources.PodResources(
        str(kubelet.path), timeout_s=timeout_s, sleep=lambda _seconds: None
    )


def test_replicas_are_devices_to_schedule_and_one_device_in_use(kubelet: GrpcKubelet) -> None:
    kubelet.pods = [pod("train", devices(GPU, "MIG-a::0", "MIG-a::3"))]
    kubelet.devices = [devices(f"{GPU}.shared", "MIG-a::0", "MIG-a::1", "MIG-b::0")]
    kubelet.start()
    (entry,) = ask(kubelet).assigned_devices()
    assert entry.device_ids == {"MIG-a"}
    assert ask(kubelet).allocatable() == {f"{GPU}.shared": {"MIG-a::0", "MIG-a::1", "MIG-b::0"}}


def test_the_rate_limit_is_waited_out(kubelet: GrpcKubelet) -> None:
    kubelet.refusals = 3
    kubelet.start()
    assert ask(kubelet).assigned_devices() == ()
    assert kubelet.requests == 4


def bound_elsewhere(kubelet: GrpcKubelet) -> None:
    """Have kubelet's socket for device plugins, as of a kubelet with another --root-dir."""
    plugins = kubelet.path.parent.with_name("device-plugins")
    plugins.mkdir()
    (plugins / "kubelet.sock").touch()


def no_message(kubelet: GrpcKubelet) -> None:
    kubelet.writes = lambda _message: b"\xff\xff\xff\xff"
    kubelet.start()


def refusing(code: grpc.StatusCode) -> Callable[[GrpcKubelet], None]:
    def start(kubelet: GrpcKubelet) -> None:
        kubelet.refusals, kubelet.code = 1000, code
        kubelet.start()

    return start


def without_the_call(kubelet: GrpcKubelet) -> None:
    kubelet.has_allocatable = False
    kubelet.start()


def bound(kubelet: GrpcKubelet, *, listens: bool) -> socket.socket:
    """Return a socket in kubelet's place, which accepts connections or refuses them."""
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(kubelet.path))
    if listens:
        listening.listen()
    return listening


FAILURES: dict[str, tuple[Callable[[GrpcKubelet], object], str, int]] = {
    "a missing socket": (lambda _: None, r"kubelet\.sock.*No such file", 0),
    "another file": (lambda kubelet: kubelet.path.touch(), "not a socket", 0),
    "a socket without a server": (lambda it: bound(it, listens=False), "UNAVAILABLE", 0),
    "a kubelet that hangs": (lambda it: bound(it, listens=True), "DEADLINE_EXCEEDED", 0),
    "an answer that is no message": (no_message, "is malformed", 1),
    "a rate limit that stays": (
        *(refusing(grpc.StatusCode.RESOURCE_EXHAUSTED), "RESOURCE_EXHAUSTED: not now"),
        5,
    ),
    "another refusal, at once": (refusing(grpc.StatusCode.INTERNAL), "INTERNAL: not now", 1),
    "a kubelet without the call": (without_the_call, "UNIMPLEMENTED", 0),
}


@pytest.mark.parametrize(("arrange", "why", "requests"), FAILURES.values(), ids=FAILURES)
def test_an_unanswered_request_is_an_error_soon_and_no_traceback(
    arrange: Callable[[GrpcKubelet], object],
    why: str,
    requests: int,
    kubelet: GrpcKubelet,
    caplog: pytest.LogCaptureFixture,
) -> None:
    arranged = arrange(kubelet)
    with pytest.raises(errors.KubeletError, match=why) as caught:
        ask(kubelet, timeout_s=0.2 if "DEADLINE" in why else 100.0).allocatable()
    assert caught.value.reason is reasons.Reason.POD_RESOURCES_UNAVAILABLE
    assert kubelet.requests == requests
    assert caplog.text == ""
    if isinstance(arranged, socket.socket):
        arranged.close()


@pytest.mark.parametrize(
    ("arrange", "created_s", "is_booting", "has_started"),
    [
        (lambda _: None, None, False, False),
        (bound_elsewhere, None, False, True),
        (bound_elsewhere, None, True, False),
        (lambda it: bound(it, listens=False), None, False, True),
        (lambda it: bound(it, listens=False), 0, False, False),
        (lambda it: bound(it, listens=True), 0, False, True),
        (lambda it: bound(it, listens=False), time.time() + 3600, True, False),
        (lambda it: bound(it, listens=True), time.time() + 3600, True, True),
        (lambda it: bound(it, listens=False), time.time() + 3600, False, True),
    ],
    ids=[
        "missing",
        "in another root",
        "in another root, perhaps of an earlier boot",
        "stopped",
        "of the boot before",
        "of a clock that was set since",
        "of the boot before, while the clock is behind",
        "of this boot, before the clock was set back",
        "stopped before the clock was set back",
    ],
)
def test_kubelet_has_started_if_its_socket_is_of_this_boot_or_answers(
    kubelet: GrpcKubelet,
    arrange: Callable[[GrpcKubelet], object],
    created_s: float | None,
    *,
    is_booting: bool,
    has_started: bool,
) -> None:
    arranged = arrange(kubelet)
    if created_s is not None:
        os.utime(kubelet.path, (created_s, created_s))

    assert ask(kubelet).has_started(is_booting=is_booting) == has_started
    if isinstance(arranged, socket.socket):
        arranged.close()


def test_a_kubelet_that_starts_again_is_found_again(kubelet: GrpcKubelet) -> None:
    client = ask(kubelet)
    kubelet.start()
    assert client.assigned_devices() == ()
    kubelet.stop()
    with pytest.raises(errors.KubeletError):
        client.assigned_devices()
    kubelet.start()
    assert client.assigned_devices() == ()


def test_grpc_is_silent_and_leaves_the_process_free_to_fork(kubelet: GrpcKubelet) -> None:
    kubelet.start()
    # From Python 3.12 on any thread beside, be it about to end, is worth a warning to os.fork.
    script = (
        "import os, subprocess, sys, warnings\n"
        "warnings.filterwarnings('ignore', 'This process', DeprecationWarning)\n"
        "from mig_manager.adapters import pod_resources\n"
        "assert 'grpc' not in sys.modules\n"
        f"client = pod_resources.PodResources({str(kubelet.path)!r})\n"
        "client.assigned_devices()\n"
        "subprocess.run(['true'], check=True)\n"
        "child = os.fork()\n"
        "child or os._exit(0)\n"
        "os.waitpid(child, 0)\n"
        "client.assigned_devices()\n"
    )
    assert processes.run_python(script).stderr == ""


def written(name: str) -> bytes:
    """Return a message of kubelet_messages/main.go, which says what is in it."""
    return bytes.fromhex(json.loads((WRITTEN / "messages.json").read_text("utf-8"))[name])


def resources_from(kubelet: GrpcKubelet, name: str) -> pod_resources.PodResources:
    kubelet.writes = lambda _message: written(name)
    kubelet.start()
    return ask(kubelet)


def test_devices_and_claims_of_pods_are_read_from_what_kubelet_writes(
    kubelet: GrpcKubelet,
) -> None:
    pods = resources_from(kubelet, "list").assigned_devices()

    assert pods == (
        pod_object.PodDevices(
            namespace="team-a",
            name="train-0",
            device_ids=frozenset({"MIG-1", "MIG-2"}),
            gpu_resources=frozenset({"nvidia.com/mig-1g.5gb"}),
        ),
        pod_object.PodDevices(
            namespace="team-b",
            name="claims-0",
            device_ids=frozenset(),
            claim_drivers=frozenset({"gpu.nvidia.com"}),
        ),
        pod_object.PodDevices(namespace="default", name="plain", device_ids=frozenset()),
    )


def test_allocatable_devices_are_read_from_what_kubelet_writes(kubelet: GrpcKubelet) -> None:
    allocatable = resources_from(kubelet, "allocatable").allocatable()

    assert allocatable == {
        "nvidia.com/mig-1g.5gb": {"MIG-1", "MIG-2"},
        "nvidia.com/gpu": {"GPU-1"},
    }


@pytest.mark.slow
def test_the_kept_messages_are_what_kubernetes_types_write() -> None:
    printed = c_library.run(programs.path_or_skip("go"), "run", ".", folder=WRITTEN)

    assert json.loads(printed) == json.loads((WRITTEN / "messages.json").read_text("utf-8"))
