"""``apply`` beside programs and pods that use what it must destroy, and a rollback."""

import os
import pathlib
import shutil
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from mig_manager.cli import gpu_access
from mig_manager.sandbox.driver import states
from testkit import nvml_faults
from tests.rigs.cluster import kubelet_rig
from tests.rigs.shell.shell_node import ShellNode


@pytest.mark.slow
def test_apply_refuses_instances_in_use_and_names_the_program(pair: ShellNode) -> None:
    pair.use("2g.10gb", gpu=1)
    before = pair.geometry
    pair.state.log_calls()

    done = pair.run("apply", "requested", "--wait-for-idle", "0.1")

    assert done.status == 1
    assert "GPU 1 (GPU-" in done.err
    assert "is in use by train (pid 4242, GPU instance " in done.err
    assert "waited 0.1 s" in done.err
    assert "nothing was changed" in done.err
    assert pair.geometry == before
    assert not pair.journal.exists()
    called = {call.function for call in nvml_faults.read_calls(pair.path)}
    assert called
    assert not {name for name in called if "Destroy" in name or "Create" in name}


@pytest.fixture
def kubelet() -> Iterator[kubelet_rig.GrpcKubelet]:
    with kubelet_rig.a_kubelet() as kubelet:
        yield kubelet


def node_with_another_layout(node: ShellNode) -> ShellNode:
    """Have a node keep for its next boot what another one has applied, and return that one."""
    folder = node.path.parent / "requested"
    folder.mkdir()
    source = ShellNode(folder, "1xA100-SXM4-40GB", active="requested")
    shutil.copy(*(each.state.beside("verified-layout") for each in (source, node)))
    return source


def pod_with(device: str, *others: Any) -> Any:
    devices = kubelet_rig.devices("nvidia.com/mig-2g.10gb", device)
    return kubelet_rig.pod("train", devices, *others)


TWO_OR_ONE = """
version: v1
mig-configs:
  two: [{devices: all, mig-enabled: true, mig-devices: {2g.10gb: 2}}]
  one: [{devices: all, mig-enabled: true, mig-devices: {2g.10gb: 1}}]
"""


@pytest.mark.parametrize("used", [0, 1])
@pytest.mark.parametrize("has_pod", [False, True])
def test_of_two_instances_the_idle_one_is_destroyed(
    tmp_path: pathlib.Path, kubelet: kubelet_rig.GrpcKubelet, used: int, *, has_pod: bool
) -> None:
    node = ShellNode(tmp_path, "A100-SXM4-40GB", layouts=TWO_OR_ONE, active="two")
    name = node.devices_of("2g.10gb")[used]
    if has_pod:
        kubelet.pods = [pod_with(name)]
    else:
        node.state.add_client(name, name="/usr/bin/train", pid=4242)
    kubelet.start()

    answer = node.run("apply", "one", "--pod-resources-socket", str(kubelet.path))

    assert answer.status == 0, answer.err
    assert node.devices_of("2g.10gb") == [name]


BOOT = ("boot", "--in-use-timeout-s", "0.1")
CHANGES = [("apply", "requested"), ("restore", "-f", "FILE"), BOOT]


@pytest.mark.parametrize("argv", CHANGES)
def test_a_device_of_an_idle_pod_is_kept_and_the_pod_named(
    node: ShellNode, kubelet: kubelet_rig.GrpcKubelet, argv: Sequence[str]
) -> None:
    checkpoint = node.path.with_name("requested.json")
    before = node.geometry
    if argv[0] != "apply":
        node_with_another_layout(node).run("checkpoint", "-f", str(checkpoint))
    (device,) = node.devices_of("2g.10gb")
    kubelet.pods = [pod_with(device)]
    kubelet.start()
    line = [*(str(checkpoint) if word == "FILE" else word for word in argv)]
    line += ["--pod-resources-socket", str(kubelet.path)]

    refused = node.run(*line)
    geometry = node.geometry
    forced = node.run(*line, "--ignore-pods")

    words = " ".join(refused.err.split())
    assert refused.status == 1
    assert (
        "pods have devices that the change destroys or resets: ns/train (2g.10gb at 0:2 of GPU 0);"
        in words
    )
    assert "nothing was changed" in words
    assert "label nvidia.com/mig.config" in words
    assert geometry == before
    assert not node.journal.exists()
    assert forced.status == 0, forced.err
    assert node.geometry != before


def test_a_plan_warns_that_apply_would_refuse(
    node: ShellNode, kubelet: kubelet_rig.GrpcKubelet
) -> None:
    (device,), kept = node.devices_of("2g.10gb"), node.devices_of("3g.20gb")
    kubelet.pods = [pod_with(device, kubelet_rig.devices("nvidia.com/mig-3g.20gb", *kept))]
    kubelet.start()
    at = ("requested", "--pod-resources-socket", str(kubelet.path))

    planned = node.run("plan", *at)
    dry = node.run("apply", "--dry-run", *at)

    assert planned.status == 0
    assert dry == planned
    refusal = (
        "'apply' would refuse: pods have devices that the change destroys or resets: ns/train "
        "(2g.10gb at 0:2 of GPU 0)"
    )
    assert refusal in " ".join(planned.err.split())


def silent(listener: socket.socket, path: str) -> None:
    listener.bind(path)
    listener.listen()


def absent(_listener: socket.socket, _path: str) -> None:
    pass


def of_earlier_boot(listener: socket.socket, path: str) -> None:
    listener.bind(path)
    os.utime(path, (0, 0))


@pytest.mark.parametrize(
    ("argv", "arrange", "is_refused"),
    [
        (("apply", "requested"), silent, True),
        (("apply", "requested"), absent, True),
        (BOOT, silent, True),
        (BOOT, of_earlier_boot, False),
    ],
)
def test_a_silent_kubelet_is_a_refusal_and_a_missing_one_none_at_boot(
    node: ShellNode,
    kubelet: kubelet_rig.GrpcKubelet,
    argv: Sequence[str],
    arrange: Callable[[socket.socket, str], None],
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_refused: bool,
) -> None:
    monkeypatch.setattr(gpu_access, "_KUBELET_TIMEOUT_S", 0.2)
    node_with_another_layout(node)
    before = node.geometry
    with socket.socket(socket.AF_UNIX) as listener:
        arrange(listener, str(kubelet.path))
        refused = node.run(*argv, "--pod-resources-socket", str(kubelet.path))

    words = " ".join(refused.err.split())
    assert refused.status == is_refused, refused.err
    assert (node.geometry == before) == is_refused
    assert ("kubelet does not report which pods" in words) == is_refused
    assert ("remedy: Start kubelet, or name its socket" in words) == is_refused


@pytest.mark.slow
def test_rollback_without_placements_restores_all_instances(tmp_path: pathlib.Path) -> None:
    node = ShellNode(tmp_path, "2xA100-SXM4-40GB", active="small")
    missing = ("nvmlDeviceCreateGpuInstanceWithPlacement",)
    node.set_options(states.Options(absent_functions=missing))
    before = node.geometry
    node.state.add_fault(
        nvml_faults.Fault(
            function="nvmlGpuInstanceCreateComputeInstance*",
            gpu=1,
            code=states.Code.INSUFFICIENT_RESOURCES,
        )
    )

    answer = node.run("apply", "before")

    assert answer.status == 1
    assert "the former instances are restored" in answer.err
    assert node.geometry == before
