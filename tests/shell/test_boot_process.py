"""From power-off to the layout being back: ``boot`` as a process, on simulated GPUs."""

import pathlib
import signal

import pytest

from mig_manager.core import model
from mig_manager.sandbox.driver import states
from testkit import nvml_faults
from tests.rigs import waiting
from tests.rigs.shell.shell_node import ShellNode

LAYOUTS = """
version: v1
mig-configs:
  mixed:
  - {devices: all, device-filter: ["0x20B010DE", "0x20B210DE"], mig-enabled: true,
     mig-devices: {1g.5gb: 2, 3g.20gb: 1}}
  - {devices: all, device-filter: "0x233010DE", mig-enabled: true,
     mig-devices: {1g.10gb: 3, 3g.40gb: 1}}
  - {devices: all, device-filter: "0x20B710DE", mig-enabled: true, mig-devices: {1c.2g.12gb: 2}}
  first:
  - {devices: [0], mig-enabled: true, mig-devices: {7g.40gb: 1}}
  second:
  - {devices: [1], mig-enabled: true, mig-devices: {7g.40gb: 1}}
"""
A100 = "2xA100-SXM4-40GB"
MIXED = "1xA100-SXM4-40GB+1xH100-SXM5-80GB+1xA30+1xT4"
CREATE = "nvmlDeviceCreateGpuInstance*"
IN_VM = states.Options(virtualization=model.Virtualization.PASSTHROUGH)
"""In a virtual machine a change of the mode waits for a reboot."""


def node_with_layout(folder: pathlib.Path, spec: str) -> ShellNode:
    """Return a node that has a layout by ``apply``."""
    return ShellNode(folder, spec, layouts=LAYOUTS, active="mixed")


@pytest.fixture
def a100_node(tmp_path: pathlib.Path) -> ShellNode:
    return node_with_layout(tmp_path, A100)


@pytest.mark.slow
def test_boot_restores_placements_and_a_second_run_does_nothing(tmp_path: pathlib.Path) -> None:
    node = node_with_layout(tmp_path, MIXED)
    before, exported = node.geometry, node.run("export", "--placements").out
    node.state.reboot()
    assert node.geometry != before

    first, second = node.run("boot"), node.run("boot")

    assert (first.status, first.out) == (0, "Layout mixed is restored.\n"), first.err
    assert second.status == 0
    assert second.out == "Layout mixed is already active: nothing to do.\n"
    data = node.run("boot", "-o", "json").data
    assert (data["layout"], data["isChanged"], data["problems"]) == ("mixed", False, [])
    assert (node.geometry, node.run("export", "--placements").out) == (before, exported)
    assert not node.journal.exists()


@pytest.mark.slow
def test_boot_without_a_verified_layout_applies_the_fallback(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = ShellNode(tmp_path, A100, layouts=LAYOUTS)
    monkeypatch.setenv("MIG_PARTED_CONFIG_FILE", str(node.layouts))
    monkeypatch.setenv("MIG_PARTED_SELECTED_CONFIG", "mixed")
    monkeypatch.setenv("MIG_PARTED_HOOKS_FILE", "/hooks.yaml")

    answer = node.run("boot")

    applied = "No valid layout was saved: layout mixed is applied.\n"
    assert (answer.status, answer.out) == (0, applied), answer.err
    assert "hooks.yaml is ignored: boot runs no hooks" in answer.err
    assert node.run("assert", "mixed").status == 0
    node.state.reboot()
    # What is kept goes before a fallback.
    monkeypatch.setenv("MIG_PARTED_SELECTED_CONFIG", "first")
    assert node.run("boot").out == "Layout mixed is restored.\n"


# ``nvmlDeviceGpuRecoveryAction_t``
GPU_RESET, NODE_REBOOT = 1, 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("action", "how", "remaining", "words"),
    [
        (GPU_RESET, "report", GPU_RESET, "needs a reset. End all processes that use it"),
        (GPU_RESET, "reset", 0, "0 kept; 1 GPU reset"),
        (NODE_REBOOT, "reset", NODE_REBOOT, "needs a reboot of the node"),
    ],
)
def test_boot_restores_a_gpu_with_a_fault_and_resets_it_if_allowed(
    a100_node: ShellNode,
    monkeypatch: pytest.MonkeyPatch,
    action: int,
    how: str,
    remaining: int,
    words: str,
) -> None:
    before = a100_node.geometry
    a100_node.state.reboot()
    a100_node.state.fail_gpu(0, action=action)
    # As the unit's settings file does.
    monkeypatch.setenv("MIG_MANAGER_REPAIR", how)

    answer = a100_node.run("boot")

    assert (answer.status, answer.out) == (0, "Layout mixed is restored.\n"), answer.err
    assert words in " ".join(answer.err.split())
    assert [gpu.recovery_action for gpu in a100_node.state.read().gpus] == [remaining, 0]
    assert a100_node.geometry == before
    assert not a100_node.journal.exists()


@pytest.mark.slow
def test_boot_resets_only_the_faulty_gpu_of_a_running_machine(a100_node: ShellNode) -> None:
    before, kept = a100_node.geometry, a100_node.state.read().gpus[1].instances
    a100_node.state.fail_gpu(0, action=GPU_RESET)

    answer = a100_node.run("boot", "--repair", "reset", "-o", "json")

    assert answer.data["faults"] == []
    assert answer.data["isChanged"]
    assert a100_node.state.read().gpus[0].recovery_action == 0
    assert a100_node.geometry == before
    assert a100_node.state.read().gpus[1].instances == kept


@pytest.mark.slow
def test_a_repair_at_boot_that_fails_is_a_problem_and_keeps_the_layout(
    a100_node: ShellNode,
) -> None:
    before = a100_node.geometry
    a100_node.state.add_client(
        a100_node.state.boards[0].uuid, name="dcgm", kind=states.ClientKind.MONITOR
    )
    a100_node.state.fail_gpu(0, action=GPU_RESET)

    answer = a100_node.run("boot", "--repair", "reset", "-o", "json")

    assert answer.status == 1
    (problem,) = answer.data["problems"]
    assert "in use by dcgm" in problem
    assert [fault.partition(" needs ")[2] for fault in answer.data["faults"]]
    assert a100_node.geometry == before
    assert not a100_node.journal.exists()


def test_apply_names_a_gpu_with_a_fault(a100_node: ShellNode) -> None:
    a100_node.state.fail_gpu(1, action=NODE_REBOOT)

    answer = a100_node.run("apply", "first")

    assert answer.status == 0
    assert "needs a reboot of the node" in " ".join(answer.err.split())


def test_the_wait_for_the_driver_can_be_ended_at_once(a100_node: ShellNode) -> None:
    a100_node.state.reboot()
    a100_node.state.add_fault(
        nvml_faults.Fault(function="nvmlInit*", count=None, code=states.Code.DRIVER_NOT_LOADED)
    )
    with a100_node.start("boot", "--driver-timeout-s", "500") as process:
        waiting.until(lambda: a100_node.is_hung, "the hanging call")
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == -signal.SIGTERM


@pytest.mark.slow
def test_boot_completes_its_change_before_a_signal_ends_it(a100_node: ShellNode) -> None:
    before = a100_node.geometry
    a100_node.state.reboot()
    a100_node.state.add_fault(nvml_faults.Fault(function=CREATE, first=2, hang_s=1.5))
    with a100_node.start("boot") as process:
        waiting.until(lambda: a100_node.is_hung, "the hanging call")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == -signal.SIGTERM

    assert a100_node.geometry == before
    assert not a100_node.journal.exists()


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--mode-only", "--skip-reset"]])
def test_boot_keeps_a_mode_that_apply_left_to_the_reboot(
    options: list[str], tmp_path: pathlib.Path
) -> None:
    node = ShellNode(tmp_path, A100, options=IN_VM, active="off")
    status = 0 if options else 1
    assert node.run("apply", "small", *options).status == status
    node.state.reboot()

    answer = node.run("boot")

    assert answer.status == 1
    assert "its MIG mode waited for this boot" in answer.err
    assert all(gpu.is_enabled and gpu.is_pending for gpu in node.state.read().gpus)
    assert node.run("apply", "small").status == 0
    before = node.geometry
    node.state.reboot()
    assert node.run("boot").status == 0
    assert node.geometry == before


@pytest.mark.slow
def test_boot_keeps_a_pending_mode_through_a_later_apply_for_another_gpu(
    tmp_path: pathlib.Path,
) -> None:
    node = ShellNode(tmp_path, A100, layouts=LAYOUTS, options=IN_VM)
    assert node.run("apply", "second", "-ms").status == 0
    node.state.reboot()
    assert node.run("apply", "second").status == 0
    assert node.run("apply", "first", "-ms").status == 0
    assert node.run("apply", "second").status == 0
    second = node.geometry[1]
    node.state.reboot()

    answer = node.run("boot")

    assert "its MIG mode waited for this boot" in answer.err
    assert [gpu.is_enabled and gpu.is_pending for gpu in node.state.read().gpus] == [True, True]
    assert node.geometry[1] == second


@pytest.mark.slow
def test_boot_restores_the_mode_of_a_gpu_beside_one_whose_mode_was_pending(
    tmp_path: pathlib.Path,
) -> None:
    node = ShellNode(tmp_path, "1xA100-SXM4-40GB+1xH100-SXM5-80GB", layouts=LAYOUTS, options=IN_VM)
    assert node.run("apply", "mixed", "-ms").status == 0
    node.state.reboot()
    assert [gpu.is_enabled for gpu in node.state.read().gpus] == [True, False]

    node.run("boot")

    assert [gpu.is_enabled for gpu in node.state.read().gpus] == [True, True]
