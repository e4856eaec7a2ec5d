"""``apply`` as a process that is killed, hangs, or is not alone; on simulated GPUs."""

import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from mig_manager.adapters import host
from mig_manager.adapters import kubelet_messages as messages
from mig_manager.adapters.host import lock_file
from mig_manager.cli.commands import gpu_access
from mig_manager.sandbox.driver import states
from testkit import nvml_faults
from tests import waiting
from tests.adapters import kubelet_rig
from tests.shell import commandline
from tests.shell.shell_node import Node


@pytest.fixture
def fresh(tmp_path: pathlib.Path) -> Node:
    return Node(tmp_path, "1xA100-SXM4-40GB")


@pytest.fixture
def node(tmp_path: pathlib.Path) -> Node:
    return Node(tmp_path, "1xA100-SXM4-40GB", active="before")


CREATE = "nvmlDeviceCreateGpuInstance*"
KILLS = [
    ("nvmlInit*", 1),
    ("nvmlInit*", 2),
    ("nvmlComputeInstanceDestroy", 1),
    ("nvmlGpuInstanceDestroy", 1),
    (CREATE, 1),
    (CREATE, 2),
    ("nvmlGpuInstanceCreateComputeInstance*", 1),
    ("nvmlGpuInstanceCreateComputeInstance*", 2),
    ("nvmlShutdown", 2),
]


@pytest.mark.slow
@pytest.mark.parametrize(("function", "first"), KILLS)
@pytest.mark.parametrize("again", ["wanted", "too-much", "no-such"])
def test_apply_after_a_kill_finishes_or_undoes_the_change(
    node: Node, function: str, first: int, again: str
) -> None:
    before = node.shape
    node.kill("apply", "wanted", function=function, first=first)
    left = node.shape, node.journal.exists()

    answer = node.run("apply", again)

    if again == "no-such":
        assert answer.status == 2
        assert (node.shape, node.journal.exists()) == left
        return
    if again == "too-much":
        assert answer.status == 1
        assert node.shape == before
    else:
        assert answer.status == 0
        assert node.run("assert", again).status == 0
    assert not node.journal.exists()


@pytest.mark.slow
def test_a_hung_driver_times_out_and_the_change_is_rolled_back(node: Node) -> None:
    before = node.shape
    node.hang_in(CREATE)

    answer = node.run_process(
        "apply", "wanted", "--gpu-timeout-s", "12", "--in-use-timeout-s", "1"
    )

    assert answer.status == 1
    assert "nvmlDeviceCreateGpuInstanceWithPlacement on GPU 0 (GPU-" in answer.err
    assert "the GPU worker was killed" in answer.err
    assert "the former instances are restored" in answer.err
    assert node.shape == before
    assert not node.journal.exists()


@pytest.mark.parametrize(
    "argv", [pytest.param(("apply", "wanted"), marks=pytest.mark.slow), ("status",)]
)
def test_an_interrupt_ends_a_command_that_waits_for_a_hung_driver(
    fresh: Node, argv: Sequence[str]
) -> None:
    fresh.hang_in("nvmlInit*")
    with fresh.started(*argv) as process:
        waiting.until(lambda: fresh.is_hung)
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 130

    assert not fresh.journal.exists()


@pytest.mark.parametrize(
    "argv",
    [
        ("status",),
        ("plan", "wanted"),
        *(
            pytest.param(argv, marks=pytest.mark.slow)
            for argv in (("assert", "wanted"), ("export",), ("validate",))
        ),
    ],
)
def test_a_command_that_reads_from_a_hung_driver_ends_at_the_deadline(
    fresh: Node, argv: Sequence[str]
) -> None:
    fresh.hang_in("nvmlDeviceGetName")

    answer = fresh.run_process(*argv, "--gpu-timeout-s", "0.5")

    assert answer.status == 1
    assert "NVML gave no answer within 0.5 s" in answer.err
    assert "remedy: The driver does not answer; read the kernel log." in answer.err


def test_apply_names_the_owner_of_the_lock(fresh: Node) -> None:
    other = lock_file.LockFile(
        fresh.state.beside("manager.lock"),
        program="mig-manager agent",
        clock=host.SystemClock(),
        is_required=True,
    )
    before = fresh.shape
    with other.hold("serve all-1g.5gb"):
        answer = fresh.run("apply", "wanted", "--lock-timeout-s", "0")

    assert answer.status == 1
    assert f"mig-manager agent (pid {os.getpid()} on " in answer.err
    assert "serve all-1g.5gb, since " in answer.err
    assert "remedy: Wait for the other manager to finish" in answer.err
    assert fresh.shape == before


@pytest.mark.slow
def test_concurrent_applies_run_one_after_the_other_and_one_layout_stays(
    tmp_path: pathlib.Path,
) -> None:
    node = Node(tmp_path, "2xA100-SXM4-40GB")
    names = ["before", "wanted", "other", "small"]
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(node.started("apply", name, "--lock-timeout-s", "200"))
            for name in names
        ]
        answers = [commandline.finished(process) for process in processes]

    for each in answers:
        assert (each.status, each.out) == (0, "MIG configuration applied successfully\n"), each.err
        assert "left unfinished" not in each.err
        assert "already active" not in each.err
    # The order in which processes end is not the one in which they had the lock.
    kept = json.loads(node.state.beside("verified-layout").read_text("utf-8"))["config"]
    assert [name for name in names if node.run("assert", name).status == 0] == [kept]
    assert not node.journal.exists()


# -- beside programs that use what it must destroy ------------------------------------------------


@pytest.fixture
def pair(tmp_path: pathlib.Path) -> Node:
    """Two GPUs with 2g.10gb and 3g.20gb each."""
    return Node(tmp_path, "2xA100-SXM4-40GB", active="before")


def devices_of(node: Node, profile: str, *, gpu: int = 0) -> list[str]:
    answer = json.loads(node.run("status", "-o", "json").out)
    return [
        compute["uuid"]
        for instance in answer["gpus"][gpu]["gpu_instances"]
        for compute in instance["compute_instances"]
        if compute["profile"] == profile
    ]


def use(node: Node, profile: str) -> states.Client:
    """Have a program use the MIG device of a profile on the second GPU."""
    (device,) = devices_of(node, profile, gpu=1)
    return node.state.add_client(device, name="/usr/bin/train", pid=4242)


@pytest.mark.slow
def test_it_is_refused_before_anything_is_destroyed_and_names_the_program(pair: Node) -> None:
    use(pair, "2g.10gb")
    before = pair.shape
    pair.state.log_calls()

    done = pair.run("apply", "wanted", "--wait-for-idle", "0.1")

    assert done.status == 1
    assert "GPU 1 (GPU-" in done.err
    assert "is in use by train (pid 4242, GPU instance " in done.err
    assert "waited 0.1 s" in done.err
    assert "nothing was changed" in done.err
    assert pair.shape == before
    assert not pair.journal.exists()
    called = {call.function for call in nvml_faults.read_calls(pair.path)}
    assert called
    assert not {name for name in called if "Destroy" in name or "Create" in name}


TWO_OR_ONE = """
version: v1
mig-configs:
  two: [{devices: all, mig-enabled: true, mig-devices: {2g.10gb: 2}}]
  one: [{devices: all, mig-enabled: true, mig-devices: {2g.10gb: 1}}]
"""


@pytest.mark.parametrize("used", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_of_two_instances_the_idle_one_is_destroyed(used: int, tmp_path: pathlib.Path) -> None:
    node = Node(tmp_path, "A100-SXM4-40GB", layouts=TWO_OR_ONE, active="two")
    devices = devices_of(node, "2g.10gb")
    node.state.add_client(devices[used], name="/usr/bin/train", pid=4242)

    planned = json.loads(node.run("plan", "one", "-o", "json").out)
    done = node.run("apply", "one")

    assert planned["destroyed_uuids"] == [devices[1 - used]]
    assert done.status == 0, done.err


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(None, marks=pytest.mark.slow),
        signal.SIGQUIT,
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_wait_for_idle_waits_until_the_program_has_ended_or_a_signal_comes(
    pair: Node, number: signal.Signals | None
) -> None:
    client = use(pair, "2g.10gb")
    before = pair.shape
    with pair.started("apply", "wanted", "--wait-for-idle", "600") as process:
        assert process.stderr
        waits = next(line for line in process.stderr if "waiting up to 600 s" in line)
        assert "train (pid 4242" in waits
        assert pair.shape == before
        if number:
            process.send_signal(number)
        else:
            pair.state.remove_client(client)
        assert process.wait(120) == (-number if number else 0)

    assert (pair.shape == before) is bool(number)
    assert not pair.journal.exists()


@pytest.mark.slow
def test_rollback_without_placements_restores_all_instances(tmp_path: pathlib.Path) -> None:
    node = Node(tmp_path, "2xA100-SXM4-40GB", active="small")
    absent = ("nvmlDeviceCreateGpuInstanceWithPlacement",)
    node.set_options(states.Options(absent_functions=absent))
    before = node.shape
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
    assert node.shape == before


# -- beside pods that have what it must destroy ---------------------------------------------------


@pytest.fixture
def kubelet() -> Iterator[kubelet_rig.Kubelet]:
    with kubelet_rig.a_kubelet() as kubelet:
        yield kubelet


def verified_wanted(node: Node) -> Node:
    """Have a node keep for its next boot what another one has applied, and return that one."""
    folder = node.path.parent / "wanted"
    folder.mkdir()
    wanted = Node(folder, "1xA100-SXM4-40GB", active="wanted")
    shutil.copy(*(each.state.beside("verified-layout") for each in (wanted, node)))
    return wanted


BOOT = ("boot", "--in-use-timeout-s", "0.1")
CHANGES = [("apply", "wanted"), ("restore", "-f", "FILE"), BOOT]


@pytest.mark.parametrize("argv", CHANGES)
def test_a_device_of_an_idle_pod_is_kept_and_the_pod_named(
    node: Node, kubelet: kubelet_rig.Kubelet, argv: Sequence[str]
) -> None:
    checkpoint = node.path.with_name("wanted.json")
    before = node.shape
    if argv[0] != "apply":
        verified_wanted(node).run("checkpoint", "-f", str(checkpoint))
    (device,) = devices_of(node, "2g.10gb")
    kubelet.pods = [
        kubelet_rig.pod("train", kubelet_rig.devices("nvidia.com/mig-2g.10gb", device))
    ]
    kubelet.start()
    line = [*(str(checkpoint) if word == "FILE" else word for word in argv)]
    line += ["--pod-resources-socket", str(kubelet.path)]

    refused = node.run(*line)
    shape = node.shape
    forced = node.run(*line, "--ignore-pods")

    words = " ".join(refused.err.split())
    assert refused.status == 1
    assert f"pods have devices that the change destroys or resets: ns/train ({device})" in words
    assert "nothing was changed" in words
    assert "label nvidia.com/mig.config" in words
    assert shape == before
    assert not node.journal.exists()
    assert forced.status == 0, forced.err
    assert node.shape != before


def claiming_pod(device: str) -> Any:
    """Return a pod with a GPU by a ResourceClaim; kubelet lists the name, but no UUID."""
    del device
    resource = messages.ClaimResource(driver_name="gpu.nvidia.com", device_name="gpu-0-mig-14-0-2")
    container = messages.ContainerResources(
        name="c", dynamic_resources=[messages.DynamicResource(claim_resources=[resource])]
    )
    return messages.PodResources(name="train", namespace="ns", containers=[container])


def pod_with(resource: str, name: str) -> Callable[[str], Any]:
    """Return what makes a pod with a device, whose id is this name or the device's UUID."""
    return lambda uuid: kubelet_rig.pod("train", kubelet_rig.devices(resource, name or uuid))


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (pod_with("nvidia.com/mig-2g.10gb", ""), "ns/train (MIG-"),
        (pod_with("nvidia.com/gpu", "nvidia0/gi1"), "ns/train (nvidia0/gi1)"),
        (claiming_pod, "ns/train (ResourceClaim: kubelet does not list its GPU)"),
        (pod_with("vendor.com/nic", "nvidia0/gi1"), ""),
    ],
)
def test_a_plan_says_that_apply_would_refuse(
    node: Node, kubelet: kubelet_rig.Kubelet, make: Callable[[str], Any], named: str
) -> None:
    (device,) = devices_of(node, "2g.10gb")
    kubelet.pods = [make(device)]
    kubelet.start()
    at = ("wanted", "--pod-resources-socket", str(kubelet.path))

    planned = node.run("plan", *at)
    dry = node.run("apply", "--dry-run", *at)
    applied = node.run("apply", *at)

    refusal = "pods have devices that the change destroys or resets: "
    assert (planned.status, dry.status) == (0, 0)
    assert dry == planned
    for answer, before in ((planned, "'apply' would refuse: "), (applied, "mig-manager: ")):
        assert (f"{before}{refusal}{named}" in " ".join(answer.err.split())) == bool(named)
    assert applied.status == bool(named)


@pytest.mark.parametrize(
    ("argv", "state"),
    [
        (("apply", "wanted"), "silent"),
        (("apply", "wanted"), "absent"),
        (BOOT, "silent"),
        (BOOT, "older"),
    ],
)
def test_a_silent_kubelet_is_a_refusal_and_a_missing_one_none_at_boot(
    node: Node,
    kubelet: kubelet_rig.Kubelet,
    argv: Sequence[str],
    state: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu_access, "_KUBELET_TIMEOUT_S", 0.2)
    verified_wanted(node)
    before = node.shape
    with socket.socket(socket.AF_UNIX) as listener:
        if state != "absent":
            listener.bind(str(kubelet.path))
        if state == "silent":
            listener.listen()
        if state == "older":
            os.utime(kubelet.path, (0, 0))  # of a kubelet before this boot
        refused = node.run(*argv, "--pod-resources-socket", str(kubelet.path))

    words = " ".join(refused.err.split())
    is_refused = argv != BOOT or state == "silent"
    assert refused.status == is_refused, refused.err
    assert (node.shape == before) == is_refused
    assert ("kubelet does not report which pods" in words) == is_refused
    assert ("remedy: Start kubelet, or name its socket" in words) == is_refused


def test_a_killed_change_of_other_gpus_is_named_before_it_is_undone(
    tmp_path: pathlib.Path,
) -> None:
    layouts = """
version: v1
mig-configs:
  first: [{devices: [0], mig-enabled: true, mig-devices: {3g.20gb: 2}}]
  second: [{devices: [1], mig-enabled: true, mig-devices: {1g.5gb: 7}}]
"""
    node = Node(tmp_path, "2xA100-SXM4-40GB", layouts=layouts, active="first")
    node.kill("apply", "second", function="nvmlDeviceCreateGpuInstance*", first=2)
    for argv in (("plan",), ("apply", "--dry-run"), ("assert",), ("apply",)):
        answer = node.run(*argv, "first")

        words = " ".join(answer.err.split())
        assert answer.status == 0, answer.err
        assert "the change to layout 'second' was left unfinished" in words
        assert re.search(r"restores GPU 1 \([^)]*\),? outside its layout", words)
        assert node.journal.exists() == (argv != ("apply",))


@pytest.mark.parametrize("used", [0, 1])
def test_a_pod_of_other_devices_keeps_no_change_from_beginning(
    tmp_path: pathlib.Path, kubelet: kubelet_rig.Kubelet, used: int
) -> None:
    node = Node(tmp_path, "A100-SXM4-40GB", layouts=TWO_OR_ONE, active="two")
    name = devices_of(node, "2g.10gb")[used]
    kubelet.pods = [kubelet_rig.pod("a", kubelet_rig.devices("nvidia.com/mig-2g.10gb", name))]
    kubelet.start()

    answer = node.run("apply", "one", "--pod-resources-socket", str(kubelet.path))

    assert answer.status == 0, answer.err
    assert devices_of(node, "2g.10gb") == [name]
