"""The process that asks kubelet for the agent, over a real gRPC server on a unix socket."""

import os
import signal
import sys
from collections.abc import Iterator

import grpc
import pytest

from mig_manager import errors, reasons
from mig_manager.adapters import pod_resources
from tests.rigs import waiting
from tests.rigs.cluster.kubelet_rig import GPU, GrpcKubelet, devices
from tests.rigs.host.processes import children, descriptors


@pytest.fixture
def client(kubelet: GrpcKubelet) -> Iterator[pod_resources.WorkerPodResources]:
    kubelet.start()
    before = children()
    yield pod_resources.WorkerPodResources(str(kubelet.path))
    for worker in children() - before:
        os.kill(worker, signal.SIGKILL)


def a_client(kubelet: GrpcKubelet, *command: str) -> pod_resources.WorkerPodResources:
    return pod_resources.WorkerPodResources(
        str(kubelet.path), command=command or (sys.executable, "-c", "")
    )


def test_requests_share_a_process_started_ahead(
    client: pod_resources.WorkerPodResources,
) -> None:
    before = children()
    client.start_ahead()
    client.start_ahead()
    (first,) = children() - before
    client.allocatable()
    client.assigned_devices()
    assert children() - before == {first}


def test_an_idle_worker_ends_with_its_process_and_descriptors(kubelet: GrpcKubelet) -> None:
    kubelet.start()
    command = pod_resources.worker_command(str(kubelet.path), linger_s=0.1)
    client = a_client(kubelet, *command)
    before, files = children(), descriptors()
    client.allocatable()
    waiting.until(
        lambda: children() <= before and descriptors() <= files, "the end of the client's process"
    )
    assert client.allocatable() == {}


def test_a_request_does_not_signal_a_reaped_process(
    kubelet: GrpcKubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killpg(group: int, number: int) -> None:
        signalled.append(group)
        kill(group, number)

    kill, signalled = os.killpg, list[int]()
    kubelet.start()
    command = pod_resources.worker_command(str(kubelet.path), linger_s=0.1)
    client, before, files = a_client(kubelet, *command), children(), descriptors()
    client.start_ahead()
    waiting.until(
        lambda: children() <= before and descriptors() <= files, "the end of the client's process"
    )
    monkeypatch.setattr(os, "killpg", killpg)
    assert client.allocatable() == {}
    assert signalled == []


def test_a_process_that_was_killed_is_replaced(
    kubelet: GrpcKubelet, client: pod_resources.WorkerPodResources
) -> None:
    before = children()
    client.allocatable()
    (first,) = children() - before
    os.kill(first, signal.SIGKILL)
    kubelet.devices = [devices(GPU, "MIG-a")]
    assert client.allocatable() == {GPU: frozenset({"MIG-a"})}


def test_kubelets_refusal_is_raised_as_without_a_worker(
    kubelet: GrpcKubelet, client: pod_resources.WorkerPodResources
) -> None:
    kubelet.refusals, kubelet.code = 1, grpc.StatusCode.INTERNAL
    with pytest.raises(errors.KubeletError, match="INTERNAL: not now"):
        client.assigned_devices()


def test_a_missing_socket_is_an_error_and_starts_nothing(kubelet: GrpcKubelet) -> None:
    before = children()
    client = a_client(kubelet)
    client.start_ahead()
    with pytest.raises(errors.KubeletError, match="No such file"):
        client.assigned_devices()
    assert children() <= before


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("raise SystemExit('no such module')", "ended: no such module"),
        ("pass", "ended: without a message"),
        ("print('[' * 99)", "process that asks it"),
        ("", "No such file"),
    ],
)
def test_a_broken_worker_is_an_error_with_its_cause(
    kubelet: GrpcKubelet, script: str, message: str
) -> None:
    kubelet.start()
    before = children()
    program = sys.executable if script else "/no/such/program"
    client = a_client(kubelet, program, "-c", f"import os, sys\nos.read(0, 99)\n{script}")
    with pytest.raises(errors.KubeletError, match=message) as caught:
        client.assigned_devices()
    assert caught.value.reason is reasons.Reason.POD_RESOURCES_UNAVAILABLE
    assert children() <= before
