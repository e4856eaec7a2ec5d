"""A plan that requires idle GPUs: refused before its first step, or executed as any other."""

import contextlib
import dataclasses
import os

import pytest

from mig_manager import errors, reasons
from mig_manager.adapters.nvml import nvml_gpus
from mig_manager.core import model, steps
from mig_manager.core.planner import planner
from mig_manager.sandbox.driver import states
from testkit import nvml_faults
from tests.rigs.host.proc_tree import ProcTree
from tests.rigs.node import fakes, samples
from tests.rigs.node.gpu_values import ci_step, gi_step, mode_step
from tests.rigs.node.nvml_rig import Boot, NvmlRig, end_steps, plan_of

UID = "8a3f6c1e-0b2d-4c5e-9f70-1a2b3c4d5e6f"
CAP = "/dev/nvidia-caps/nvidia-cap"


def execute(proc: ProcTree, gpu: model.Gpu, *ordered: steps.Step) -> None:
    """Execute steps that require idle GPUs; a driver that refuses one is asked once."""
    gpus = nvml_gpus.NvmlGpus(in_use_timeout_s=0.0, clock=fakes.FakeClock(), proc_root=proc.root)
    plan = plan_of([gpu], *ordered)
    gpus.execute(dataclasses.replace(plan, requires_idle=True), model.ObservedGpus([gpu]))


def end_first(gpu: model.Gpu, index: int = 0) -> tuple[steps.Step, ...]:
    """Return the steps that destroy the first GPU instance, or another one."""
    first = gpu.gpu_instances[index].instance_id
    return tuple(
        step
        for step in end_steps(gpu)
        if isinstance(step, steps.DestroyComputeInstance | steps.DestroyGpuInstance)
        and step.gpu_instance_id == first
    )


def test_programs_that_use_a_doomed_instance_are_named(rig: NvmlRig, proc: ProcTree) -> None:
    gpu = rig.fill("1g.5gb", "1g.5gb")
    doomed, other = (gi.instance_id for gi in gpu.gpu_instances)
    device = gpu.gpu_instances[0].compute_instances[0].uuid or ""
    client = rig.state.add_client(device, name="/opt/train", pid=87)
    proc.add(client.pid, "/dev/nvidia0", cgroup=f"0::/kubepods/burstable/pod{UID}/ab")
    # NVML does not list those that only have the instance's node open.
    proc.add_capabilities(0, {f"gi{doomed}": 30, f"gi{other}": 39})
    unit = "0::/system.slice/nvidia-dcgm.service"
    proc.add(88, "/dev/nvidia0", f"{CAP}30", name="nv-hostengine", cgroup=unit)
    proc.add(89, "/dev/nvidia0", f"{CAP}39", name="other")

    with pytest.raises(errors.GpuInUseError) as caught:
        execute(proc, gpu, *end_first(gpu))

    assert caught.value.message == (
        f"GPU 0 ({gpu.uuid}) is in use by train (pid 87, GPU instance {doomed}, pod {UID}), "
        f"nv-hostengine (pid 88, GPU instance {doomed}, unit nvidia-dcgm.service)"
    )
    assert rig.observe() == gpu


def test_a_gpu_whose_index_has_changed_is_found_by_its_address(
    rig: NvmlRig, proc: ProcTree
) -> None:
    gpu = rig.fill("1g.5gb")
    device = gpu.gpu_instances[0].compute_instances[0].uuid or ""
    rig.state.add_client(device, name="/opt/train")
    observed = dataclasses.replace(gpu, index=5)

    with pytest.raises(errors.GpuInUseError, match="train"):
        execute(proc, observed, *end_first(observed))

    assert rig.observe() == gpu


def test_a_program_that_draws_through_dev_dri_blocks_only_gfx_plans(
    boot: Boot, proc: ProcTree
) -> None:
    gpu = boot("rtx-pro-6000-blackwell-server").fill("2g.48gb+gfx", "2g.48gb")
    proc.add_drm(gpu.pci_address.removeprefix("0000"), "card0", "renderD128")
    proc.add(89, "/dev/dri/renderD129", name="other")
    proc.add(90, "/dev/dri/renderD128", name="viewer")

    with pytest.raises(errors.GpuInUseError, match=r"is in use by viewer \(pid 90\)$"):
        execute(proc, gpu, *end_first(gpu))

    execute(proc, gpu, *end_first(gpu, 1))


def test_programs_on_the_gpu_itself_and_on_other_instances_block_no_plan(
    rig: NvmlRig, proc: ProcTree
) -> None:
    gpu = rig.fill("1g.5gb", "1g.5gb")
    device = gpu.gpu_instances[1].compute_instances[0].uuid or ""
    rig.state.add_client(device, name="/opt/train")
    proc.add(88, "/dev/nvidiactl", "/dev/nvidia0", name="nv-hostengine")

    execute(proc, gpu, *end_first(gpu))

    assert len(rig.observe().gpu_instances) == 1


@pytest.mark.parametrize("kind", [states.ClientKind.COMPUTE, states.ClientKind.MONITOR])
def test_a_gpu_is_not_emptied_beside_a_process_on_the_gpu_itself(
    rig: NvmlRig, proc: ProcTree, kind: states.ClientKind
) -> None:
    gpu = rig.fill("3g.20gb")
    rig.state.add_client(gpu.uuid, name="/opt/train", pid=87, kind=kind)
    proc.add(87, "/dev/nvidia0", name="train")
    plan = planner.plan([gpu], {gpu.uuid: samples.desired_gpu({"7g.40gb": 1})})

    if kind is states.ClientKind.COMPUTE:
        with pytest.raises(errors.GpuInUseError, match=r"train \(pid 87\)"):
            execute(proc, gpu, *plan.steps)
        assert rig.observe() == gpu
    else:
        execute(proc, gpu, *plan.steps)
        assert [str(gi.profile) for gi in rig.observe().gpu_instances] == ["7g.40gb"]


def test_instances_that_cannot_be_listed_are_a_typed_error(rig: NvmlRig, proc: ProcTree) -> None:
    gpu = rig.enable()
    rig.fault("nvmlDeviceGetGpuInstances", code=states.Code.NO_PERMISSION)
    with pytest.raises(errors.HardwareError, match="cannot list its GPU instances") as caught:
        execute(proc, gpu, gi_step(gpu, "1g.5gb"))
    assert caught.value.reason is reasons.Reason.NO_PERMISSION
    assert rig.observe() == gpu


@pytest.mark.parametrize(
    ("used", "expectation", "remaining"),
    [
        (0, pytest.raises(errors.GpuInUseError, match="train"), 2),
        (1, contextlib.nullcontext(), 1),
    ],
    ids=["doomed", "other"],
)
def test_only_the_doomed_compute_instance_of_a_kept_one_counts(
    rig: NvmlRig,
    proc: ProcTree,
    used: int,
    expectation: contextlib.AbstractContextManager[object],
    remaining: int,
) -> None:
    create = gi_step(rig.enable(), "3g.20gb")
    parts = (ci_step(create, "1c.3g.20gb", start) for start in (0, 1))
    rig.execute(create, *parts)
    gpu = rig.observe()
    (instance,) = gpu.gpu_instances
    device = instance.compute_instances[used].uuid or ""
    rig.state.add_client(device, name="/opt/train")
    step = next(
        step
        for step in end_steps(gpu)
        if isinstance(step, steps.DestroyComputeInstance)
        and step.compute_instance_id == instance.compute_instances[0].instance_id
    )

    with expectation:
        execute(proc, gpu, step)

    assert len(rig.observe().gpu_instances[0].compute_instances) == remaining


def test_program_in_an_unknown_compute_instance_blocks_each_of_them(
    rig: NvmlRig, proc: ProcTree
) -> None:
    create = gi_step(rig.enable(), "3g.20gb")
    rig.execute(create, *(ci_step(create, "1c.3g.20gb", start) for start in (0, 1)))
    gpu = rig.observe()
    proc.add_capabilities(0, {f"gi{gpu.gpu_instances[0].instance_id}": 30})
    proc.add(88, "/dev/nvidia0", f"{CAP}30", name="train")

    for step in end_steps(gpu)[:2]:
        with pytest.raises(errors.GpuInUseError, match=r"train \(pid 88"):
            execute(proc, gpu, step)

    assert rig.observe() == gpu


@pytest.mark.parametrize(
    ("name", "is_blocking"),
    [("nv-hostengine", True), ("nvidia-persiste", False), ("nv-fabricmanage", False)],
)
def test_process_with_an_open_gpu_blocks_a_mode_change_unless_ours(
    rig: NvmlRig, proc: ProcTree, name: str, *, is_blocking: bool
) -> None:
    gpu = rig.fill("1g.5gb", "1g.5gb")
    proc.add(88, "/dev/nvidiactl", "/dev/nvidia0", name=name)
    proc.add(os.getpid(), "/dev/nvidia0", parent=os.getppid())
    proc.add(90, "/dev/nvidia0", parent=os.getppid())
    off = mode_step(gpu, model.MigMode.DISABLED)

    if is_blocking:
        with pytest.raises(errors.GpuInUseError, match=rf" in use by {name} \(pid 88\)$"):
            execute(proc, gpu, *end_steps(gpu), off)
        assert rig.observe() == gpu
    else:
        execute(proc, gpu, *end_steps(gpu), off)
        assert rig.observe().current_mode is model.MigMode.DISABLED


def test_a_gpu_that_does_not_list_its_processes_is_left_to_the_driver(
    rig: NvmlRig, proc: ProcTree
) -> None:
    gpu = rig.fill("1g.5gb", "1g.5gb")
    for function in ("nvmlDeviceGetComputeRunningProcesses*", "nvmlDeviceGetMinorNumber"):
        fault = nvml_faults.Fault(function=function, code=states.Code.UNKNOWN, count=None)
        rig.state.add_fault(fault)

    execute(proc, gpu, *end_first(gpu))

    assert len(rig.observe().gpu_instances) == 1


def test_instance_created_after_the_plan_is_not_taken_for_its_own(
    rig: NvmlRig, proc: ProcTree
) -> None:
    create = gi_step(rig.enable(), "3g.20gb")
    before = rig.observe()
    rig.execute(create)
    now = rig.observe()

    with pytest.raises(errors.OutdatedPlanError) as caught:
        execute(proc, before, create, ci_step(create, "3g.20gb", 0))

    assert caught.value.message == (
        f"GPU 0 ({before.uuid}) has 3g.20gb at {create.placement} already"
    )
    assert caught.value.reason is reasons.Reason.VERIFY_FAILED
    assert rig.observe() == now


@pytest.mark.parametrize("name", ["1c.3g.20gb", "3g.20gb"])
def test_compute_instance_created_after_the_plan_makes_it_stale(
    rig: NvmlRig, proc: ProcTree, name: str
) -> None:
    within = gi_step(rig.enable(), "3g.20gb")
    rig.execute(within)
    before = rig.observe()
    create = ci_step(within, name)
    rig.execute(create)
    now = rig.observe()

    with pytest.raises(errors.OutdatedPlanError) as caught:
        execute(proc, before, create)

    assert caught.value.message == (
        f"GPU 0 ({before.uuid}) has {name} at {create.placement} "
        f"in the GPU instance at {within.placement} already"
    )
    assert rig.observe() == now


def test_compute_instance_beside_the_planned_one_keeps_the_plan_fresh(
    rig: NvmlRig, proc: ProcTree
) -> None:
    within = gi_step(rig.enable(), "3g.20gb")
    rig.execute(within, ci_step(within, "2c.3g.20gb", 0))

    execute(proc, rig.observe(), ci_step(within, "1c.3g.20gb", 2))

    (gi,) = rig.observe().gpu_instances
    assert len(gi.compute_instances) == 2


@pytest.mark.parametrize("is_inside", [False, True], ids=["gpu-instance", "compute-instance"])
def test_instance_that_took_over_a_destroyed_id_makes_the_plan_stale(
    rig: NvmlRig, proc: ProcTree, *, is_inside: bool
) -> None:
    gpu = rig.enable()
    within = gi_step(gpu, "3g.20gb", 0)
    old: steps.Step
    new: steps.Step
    if is_inside:
        rig.execute(within)
        old, new = (ci_step(within, name) for name in ("1c.3g.20gb", "2c.3g.20gb"))
    else:
        old, new = (gi_step(gpu, name, 0) for name in ("1g.5gb", "1g.5gb+me"))
    rig.execute(old)
    before = rig.observe()
    destroy = end_steps(before)[0]
    rig.execute(destroy, new)
    now = rig.observe()

    with pytest.raises(errors.OutdatedPlanError):
        execute(proc, before, destroy, new)

    assert rig.observe() == now
