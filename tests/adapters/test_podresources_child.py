"""The process that asks kubelet for the agent, over a real gRPC server on a unix socket."""

import os
import pathlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from mig_manager import errors
from mig_manager.adapters.kubelet import client as kubelet_client
from tests.adapters import kubelet_rig
from tests.adapters.kubelet_rig import GPU, Kubelet, claiming, devices, pod

_PATIENCE_S = 60.0


@pytest.fixture
def kubelet() -> Iterator[Kubelet]:
    with kubelet_rig.a_kubelet() as running:
        yield running


@pytest.fixture
def client(kubelet: Kubelet) -> Iterator[kubelet_client.WorkerPodResources]:
    kubelet.start()
    made = kubelet_client.WorkerPodResources(str(kubelet.path))
    yield made
    made.dismiss()


def a_client(kubelet: Kubelet, *command: str) -> kubelet_client.WorkerPodResources:
    return kubelet_client.WorkerPodResources(
        str(kubelet.path), command=command or (sys.executable, "-c", "")
    )


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        threading.Event().wait(0.02)


def workers() -> set[int]:
    """Return our children, zombies included."""
    return {
        int(number)
        for path in pathlib.Path("/proc/self/task").glob("*/children")
        for number in path.read_text().split()
    }


def open_files() -> int:
    return len(list(pathlib.Path("/proc/self/fd").iterdir()))


def test_tells_what_kubelet_does(
    kubelet: Kubelet, client: kubelet_client.WorkerPodResources
) -> None:
    kubelet.pods = [pod("train", devices(GPU, "MIG-b", "MIG-a")), claiming("gpu.nvidia.com")]
    kubelet.devices = [devices(GPU, "MIG-a"), devices("nvidia.com/gpu", "GPU-1")]
    trained, claimed = client.assigned()
    assert (trained.key, trained.device_ids) == ("ns/train", frozenset({"MIG-a", "MIG-b"}))
    assert (claimed.device_ids, claimed.claim_drivers) == (
        frozenset(),
        frozenset({"gpu.nvidia.com"}),
    )
    assert client.allocatable() == {GPU: frozenset({"MIG-a"}), "nvidia.com/gpu": {"GPU-1"}}


def test_an_answer_may_be_long(
    kubelet: Kubelet, client: kubelet_client.WorkerPodResources
) -> None:
    kubelet.pods = [pod(f"p{n}", devices(GPU, "MIG-" + "x" * 1_000_000)) for n in range(6)]
    assert len(client.assigned()) == 6


def test_questions_share_a_process_that_ends_when_it_is_dismissed(
    client: kubelet_client.WorkerPodResources,
) -> None:
    before = workers()
    client.allocatable()
    (first,) = workers() - before
    client.assigned()
    assert workers() - before == {first}
    client.dismiss()
    assert workers() == before
    client.dismiss()


def test_a_process_that_was_started_ahead_is_the_one_that_is_asked(
    client: kubelet_client.WorkerPodResources,
) -> None:
    before = workers()
    client.prepare()
    client.prepare()
    (first,) = workers() - before
    client.allocatable()
    assert workers() - before == {first}


def test_getting_ready_without_a_socket_starts_nothing(kubelet: Kubelet) -> None:
    before = workers()
    a_client(kubelet).prepare()
    assert workers() == before


def test_nothing_is_left_of_a_process_that_nobody_asks(kubelet: Kubelet) -> None:
    kubelet.start()
    command = kubelet_client.worker_command(str(kubelet.path), linger_s=0.1)
    client = a_client(kubelet, *command)
    before, files = workers(), open_files()
    client.allocatable()
    until(lambda: workers() == before and open_files() == files)
    assert client.allocatable() == {}
    client.dismiss()


def test_a_process_that_was_killed_is_replaced(
    kubelet: Kubelet, client: kubelet_client.WorkerPodResources
) -> None:
    before = workers()
    client.allocatable()
    (first,) = workers() - before
    os.kill(first, 9)
    kubelet.devices = [devices(GPU, "MIG-a")]
    assert client.allocatable() == {GPU: frozenset({"MIG-a"})}


def test_kubelets_refusal_is_told_as_by_the_client_itself(kubelet: Kubelet) -> None:
    kubelet.writes = lambda _message: b"\xff\xff\xff\xff"
    kubelet.start()
    client = kubelet_client.WorkerPodResources(str(kubelet.path))
    for question in (client.assigned, client.allocatable):
        with pytest.raises(errors.ClusterError, match="makes no sense") as caught:
            question()
        assert caught.value.reason is errors.Reason.POD_RESOURCES_UNAVAILABLE
    client.dismiss()


def test_a_missing_socket_is_told_without_starting_anything(kubelet: Kubelet) -> None:
    before = workers()
    with pytest.raises(errors.ClusterError, match=r"kubelet\.sock.*No such file"):
        a_client(kubelet).assigned()
    assert workers() == before


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("raise SystemExit('no such module')", "ended: no such module"),
        ("pass", "ended: without a word"),
        ("print('[')", "process that asks it"),
    ],
)
def test_a_process_that_is_no_good_is_an_error_that_says_why(
    kubelet: Kubelet, script: str, told: str
) -> None:
    kubelet.start()
    before = workers()
    client = a_client(kubelet, sys.executable, "-c", f"import sys\nsys.stdin.readline()\n{script}")
    with pytest.raises(errors.ClusterError, match=told) as caught:
        client.assigned()
    assert caught.value.reason is errors.Reason.POD_RESOURCES_UNAVAILABLE
    assert workers() == before


def test_a_process_that_cannot_be_started_is_an_error(kubelet: Kubelet) -> None:
    kubelet.start()
    with pytest.raises(errors.ClusterError, match="No such file"):
        a_client(kubelet, "/no/such/program").assigned()


def test_a_process_that_does_not_answer_is_ended(
    kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubelet_client, "_START_S", 0.2)
    kubelet.start()
    before = workers()
    client = kubelet_client.WorkerPodResources(
        str(kubelet.path), timeout_s=0.1, command=("sleep", "60")
    )
    with pytest.raises(errors.ClusterError, match="no answer in time"):
        client.assigned()
    assert workers() == before


def test_it_ends_with_whoever_asks(kubelet: Kubelet) -> None:
    kubelet.start()
    script = (
        "import os, sys\n"
        "from mig_manager.adapters.kubelet import client as kubelet_client\n"
        "client = kubelet_client.WorkerPodResources(sys.argv[1])\n"
        "client.assigned()\n"
        "print(client._child._process.pid, 'grpc' in sys.modules, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    ended = subprocess.run(  # noqa: S603 - our own script
        [sys.executable, "-c", script, os.fspath(kubelet.path)],
        capture_output=True,
        text=True,
        timeout=_PATIENCE_S,
        check=False,
    )
    worker, has_grpc = ended.stdout.split()
    assert (has_grpc, ended.stderr) == ("False", "")
    until(lambda: not is_running(int(worker)))


def is_running(pid: int) -> bool:
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    # Nobody may be there to reap an orphan.
    return stat.rpartition(")")[2].split()[0] != "Z"
