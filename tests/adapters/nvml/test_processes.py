"""Who holds a GPU that is in use: what NVML lists, and what else has its device nodes open."""

import os
import pathlib

import pytest

from mig_manager import errors, reasons
from mig_manager.adapters.nvml import library, nvml_gpus, processes
from mig_manager.core import steps
from mig_manager.sandbox.driver import states
from tests.rigs.host.proc_tree import ProcTree
from tests.rigs.node import fakes
from tests.rigs.node.gpu_values import mode_step
from tests.rigs.node.nvml_rig import ON, Boot, NvmlRig, end_steps, plan_of

UID = "8a3f6c1e-0b2d-4c5e-9f70-1a2b3c4d5e6f"
CAP = "/dev/nvidia-caps/nvidia-cap"


def refusal(proc: ProcTree, plan: steps.Plan, *, driver_root: str = "") -> str:
    """Return what the message adds when a plan meets a GPU in use."""
    gpus = nvml_gpus.NvmlGpus(
        in_use_timeout_s=0.0,
        clock=fakes.FakeClock(),
        proc_root=proc.root,
        driver_roots=[driver_root] if driver_root else [],
    )
    with pytest.raises(errors.HardwareError) as caught:
        gpus.execute(plan)
    assert caught.value.reason is reasons.Reason.IN_USE
    return caught.value.message.partition("In use by another client'; ")[2]


def switching(rig: NvmlRig, index: int = 0) -> steps.Plan:
    gpu = rig.observe(index)
    return plan_of([gpu], mode_step(gpu, ON))


def test_a_monitor_that_nvml_does_not_list_is_named_by_its_open_files(
    boot: Boot, proc: ProcTree
) -> None:
    rig = boot("2xa100-sxm4-40gb")
    rig.state.add_client(rig.observe(1).uuid, name="dcgm", kind=states.ClientKind.MONITOR, pid=88)
    proc.add(
        *(88, "/dev/nvidiactl", "/dev/nvidia1"),
        name="nv-hostengine",
        cgroup="0::/system.slice/nvidia-dcgm.service",
    )
    proc.add(89, "/dev/nvidiactl", "/dev/nvidia0")
    assert refusal(proc, switching(rig, 1)) == (
        "NVML lists no process that uses it; "
        "open in nv-hostengine (pid 88, unit nvidia-dcgm.service), "
        "and maybe in others that cannot be seen from here"
    )


def test_a_process_that_nvml_lists_is_named_once_and_with_its_pod(
    rig: NvmlRig, proc: ProcTree
) -> None:
    rig.state.add_client(rig.observe().uuid, name="python3", pid=4711)
    proc.add(4711, "/dev/nvidia0", cgroup=f"0::/kubepods/burstable/pod{UID}/1f")
    assert refusal(proc, switching(rig)) == f"in use by python3 (pid 4711, pod {UID})"


def test_a_process_on_another_instance_of_the_gpu_is_not_named(
    rig: NvmlRig, proc: ProcTree
) -> None:
    gpu = rig.fill("1g.5gb", "1g.5gb")
    busy, other = gpu.gpu_instances
    (uuid,) = (ci.uuid for ci in busy.compute_instances)
    assert uuid is not None
    rig.state.add_client(uuid, name="python3", pid=4711)
    caps = {
        f"gi{busy.instance_id}/ci0": 31,
        f"gi{busy.instance_id}": 30,
        f"gi{other.instance_id}": 40,
    }
    proc.add_capabilities(0, caps)
    proc.add(50, "/dev/nvidia0", f"{CAP}30", f"{CAP}31", name="sidecar")
    proc.add(51, "/dev/nvidia0", f"{CAP}40", name="neighbour")
    proc.add(52, "/dev/nvidia0", name="nv-hostengine")
    message = refusal(proc, plan_of([gpu], *end_steps(gpu)))
    assert message == (
        f"in use by python3 (pid 4711, GPU instance {busy.instance_id}); "
        f"open in sidecar (pid 50, GPU instance {busy.instance_id}), nv-hostengine (pid 52), "
        "and maybe in others that cannot be seen from here"
    )


def test_process_is_assigned_to_its_instance_by_capability_files(
    tmp_path: pathlib.Path, rig: NvmlRig, proc: ProcTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The simulated library is loaded.
    monkeypatch.setattr(library, "find", lambda _roots: None)
    gpu = rig.fill("1g.5gb")
    (instance,) = gpu.gpu_instances
    rig.state.add_client(gpu.mig_uuids[0], name="dcgm", kind=states.ClientKind.MONITOR, pid=88)
    proc.add(88, f"{CAP}165", name="nv-hostengine")
    # The tmpfs of the legacy runtime hook.
    (proc.root / "driver/nvidia").mkdir(parents=True)
    (tmp_path / "host").mkdir()
    host = ProcTree(tmp_path / "host/proc")
    host.add_capabilities(0, {f"gi{instance.instance_id}": 165})
    message = refusal(proc, plan_of([gpu], *end_steps(gpu)), driver_root=str(tmp_path / "host"))
    assert f"open in nv-hostengine (pid 88, GPU instance {instance.instance_id})" in message


def test_the_agent_and_its_children_are_not_named(rig: NvmlRig, proc: ProcTree) -> None:
    rig.state.add_client(rig.observe().uuid, name="dcgm", kind=states.ClientKind.MONITOR)
    proc.add(os.getppid(), "/dev/nvidia0", name="agent")
    proc.add(os.getpid(), "/dev/nvidia0", name="worker", parent=os.getppid())
    proc.add(7_000_001, "/dev/nvidia0", name="listener", parent=os.getppid())
    assert refusal(proc, switching(rig)) == ("NVML lists no process that uses it; a monitor may")


def test_processes_that_cannot_be_inspected_are_counted_if_none_is_found(
    rig: NvmlRig, proc: ProcTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.state.add_client(rig.observe().uuid, name="dcgm", kind=states.ClientKind.MONITOR)
    proc.add(88, "/dev/nvidia0")
    scandir = os.scandir

    def refuse(path: pathlib.Path) -> object:
        if str(path).endswith("88/fd"):
            raise PermissionError
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert refusal(proc, switching(rig)) == (
        "NVML lists no process that uses it; a monitor may; "
        "not allowed to look into 1 process (CAP_SYS_PTRACE)"
    )


def test_the_module_that_can_keep_a_gpu_open_is_named_for_a_mode_change(
    boot: Boot, proc: ProcTree
) -> None:
    rig = boot("2xa100-sxm4-40gb")
    gpu = rig.fill("1g.5gb", index=1)
    for uuid in (rig.observe().uuid, *gpu.mig_uuids):
        rig.state.add_client(uuid, name="unseen", kind=states.ClientKind.MONITOR)
    proc.load_modules(nvidia=2, nvidia_drm=0)
    assert "unload nvidia_drm" in refusal(proc, switching(rig))
    assert "nvidia_drm" not in refusal(proc, plan_of([gpu], *end_steps(gpu)))


def test_without_a_device_number_only_processes_that_nvml_lists_are_named(
    rig: NvmlRig, proc: ProcTree
) -> None:
    rig.state.add_client(rig.observe().uuid, name="python3", pid=4711)
    proc.add(88, "/dev/nvidia0")
    plan = switching(rig)
    rig.fault("nvmlDeviceGetMinorNumber", code=states.Code.NOT_SUPPORTED, count=None)
    assert refusal(proc, plan) == "in use by python3 (pid 4711)"


def test_a_gpu_lost_while_its_drm_nodes_are_searched_hides_no_process(
    rig: NvmlRig, proc: ProcTree
) -> None:
    proc.add(90, "/dev/dri/renderD128", name="viewer")
    proc.add(91, "/dev/nvidia0", name="trainer")
    rig.fault("nvmlDeviceGetPciInfo_v3", code=states.Code.GPU_IS_LOST, count=None)
    inspection = processes.inspect(None, proc_root=proc.root)
    assert [[user.name for user in users] for _, users in inspection.processes] == [["trainer"]]


def test_the_device_node_is_queried_only_to_find_processes(boot: Boot, proc: ProcTree) -> None:
    rig = boot("2xa100-sxm4-40gb")
    rig.gpus.observe()
    assert rig.calls("nvmlDeviceGetMinorNumber") == 0
    nvml_gpus.NvmlGpus(clock=fakes.FakeClock(), proc_root=proc.root).observe()
    assert rig.calls("nvmlDeviceGetMinorNumber") == 2
