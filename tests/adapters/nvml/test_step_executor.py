"""The steps of a plan, on GPUs that are in use, slow, wrong, or fine."""

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import pytest

from mig_manager import errors, reasons
from mig_manager.adapters.nvml import step_executor
from mig_manager.core import model, profile_name, steps
from mig_manager.sandbox.driver import states
from tests.rigs import layout_table
from tests.rigs.driver import nvml_codes
from tests.rigs.node.gpu_values import ci_step, gi_step, mode_step
from tests.rigs.node.nvml_rig import OFF, ON, Boot, NvmlRig, end_steps, plan_of

CREATE = "nvmlDeviceCreateGpuInstance"
CHANGES = sorted({*nvml_codes.CHANGES, CREATE})


def changes(rig: NvmlRig) -> int:
    return sum(rig.calls(function) for function in CHANGES)


# -- each step, done once only ----------------------------------------------------------------


def test_repeating_a_step_changes_nothing(rig: NvmlRig) -> None:
    idle = rig.observe()
    whole, parted = gi_step(idle, "4g.20gb", 0), gi_step(idle, "3g.20gb", 4)
    ordered = (
        mode_step(idle, ON),
        whole,
        ci_step(whole, "4g.20gb"),
        parted,
        ci_step(parted, "1c.3g.20gb", 0),
        ci_step(parted, "1c.3g.20gb", 2),
    )
    for step in ordered:
        rig.execute(step)
    made, count = rig.observe(), changes(rig)
    for step in ordered:
        rig.execute(step)
    rig.execute(*ordered)
    assert rig.observe() == made
    assert changes(rig) == count


def test_destroying_a_missing_instance_succeeds(rig: NvmlRig) -> None:
    full = rig.fill("1g.5gb", "3g.20gb")
    ends = end_steps(full)
    rig.execute(*ends)
    assert rig.observe().gpu_instances == ()
    count = changes(rig)
    rig.execute(*ends)
    rig.execute(mode_step(full, OFF))
    rig.execute(*ends)
    assert changes(rig) == count + 1


def test_an_instance_that_cannot_be_looked_up_is_not_taken_for_missing(rig: NvmlRig) -> None:
    full = rig.fill("3g.20gb")
    rig.fault("nvmlDeviceGetGpuInstanceById", code=states.Code.UNKNOWN)

    assert rig.refusal(*end_steps(full)).reason is reasons.Reason.NVML_ERROR
    assert rig.observe() == full


def test_an_instance_that_took_over_an_id_is_spared(boot: Boot) -> None:
    rig = boot("h100-sxm5-80gb")
    ends = end_steps(rig.fill("2g.20gb"))
    rig.execute(*ends)
    # The same slot, the same id, another profile.
    successor = rig.fill("1g.20gb")
    assert successor.gpu_instances[0].instance_id == ends[-1].gpu_instance_id  # type: ignore[union-attr]
    rig.execute(*ends)
    assert rig.observe() == successor


def test_an_instance_that_took_over_an_id_in_a_wait_is_spared(boot: Boot) -> None:
    rig = boot("h100-sxm5-80gb")
    full = rig.fill("2g.20gb")
    client = rig.state.add_client(full.mig_uuids[0], name="train")
    ends = end_steps(full)

    def replace() -> None:
        rig.clock.on_wait.clear()
        rig.state.remove_client(client)
        rig.execute(*ends)
        rig.fill("1g.20gb")

    rig.clock.on_wait.append(replace)
    rig.execute(*ends)

    assert layout_table.gpu_in_words(rig.observe()) == "1g.20gb@0"


def test_a_compute_instance_that_took_over_an_id_is_spared(rig: NvmlRig) -> None:
    whole = gi_step(rig.enable(), "3g.20gb", 0)
    rig.execute(whole, ci_step(whole, "3g.20gb"))
    (end, _) = end_steps(rig.observe())
    rig.execute(end, ci_step(whole, "1c.3g.20gb"))
    successor = rig.observe()
    rig.execute(end)
    assert rig.observe() == successor


def test_an_instance_elsewhere_that_took_over_an_id_is_spared(rig: NvmlRig) -> None:
    whole = gi_step(rig.enable(), "3g.20gb", 4)
    rig.execute(whole, ci_step(whole, "3g.20gb"))
    end, end_whole = end_steps(rig.observe())
    assert isinstance(end, steps.DestroyComputeInstance)
    assert isinstance(end_whole, steps.DestroyGpuInstance)
    successor = rig.observe()

    rig.execute(dataclasses.replace(end, within=model.Placement(0, 4)))
    assert rig.observe() == successor

    rig.execute(end, dataclasses.replace(end_whole, placement=model.Placement(0, 4)))
    assert layout_table.gpu_in_words(rig.observe()) == "(3g.20gb)@4"


def compute_profile(
    profile_id: int, multiprocessors: int, *, slices: int = 1
) -> model.ComputeInstanceProfile:
    return model.ComputeInstanceProfile(
        profile_id=profile_id, slices=slices, multiprocessors=multiprocessors, max_instances=1
    )


ONE_SLICE = (compute_profile(0, 16), compute_profile(7, 26))
SEVEN_SLICES = (compute_profile(4, 98, slices=7), compute_profile(8, 98, slices=7))


@pytest.mark.parametrize(
    ("rows", "name", "profile_id"),
    [
        pytest.param(ONE_SLICE, "1g.20gb", 7, id="the biggest spans the instance"),
        pytest.param(ONE_SLICE, "1c.2g.20gb", 0, id="the plain one is a part"),
        pytest.param(SEVEN_SLICES, "7g.40gb", 4, id="the plain one of two named 7g"),
    ],
)
def test_one_of_several_compute_profiles_of_a_size_is_chosen(
    rows: tuple[model.ComputeInstanceProfile, ...], name: str, profile_id: int
) -> None:
    assert step_executor._compute_profile(rows, profile_name.parse(name)).profile_id == profile_id


def test_instances_are_created_where_the_plan_wants_them(rig: NvmlRig) -> None:
    # Left to itself the driver would take 6 and then 4.
    gpu = rig.enable()
    rig.execute(gi_step(gpu, "1g.5gb", 0), gi_step(gpu, "1g.5gb", 3))
    assert layout_table.gpu_in_words(rig.observe()) == "(1g.5gb)@0 (1g.5gb)@3"
    assert rig.calls("nvmlDeviceCreateGpuInstance") == 0


def test_every_placement_is_reached_on_a_driver_that_chooses_them(boot: Boot) -> None:
    absent = tuple(each for each in CHANGES if each.endswith("WithPlacement"))
    rig = boot("2xa100-sxm4-40gb", options=states.Options(absent_functions=absent))
    whole = gi_step(rig.enable(1), "3g.20gb", 0)
    rig.execute(whole, ci_step(whole, "1c.3g.20gb", 2), ci_step(whole, "1c.3g.20gb", 1))
    (instance,) = rig.observe(1).gpu_instances
    assert [str(compute.placement) for compute in instance.compute_instances] == ["2:1", "1:1"]

    gpu = rig.enable()
    for start in (6, 0, 3):
        rig.execute(gi_step(gpu, "1g.5gb", start))
    instances = "(1g.5gb)@0 (1g.5gb)@3 (1g.5gb)@6"
    assert layout_table.gpu_in_words(rig.observe()) == instances
    # Occupied: what was created on the way is gone again.
    error = rig.refusal(gi_step(gpu, "2g.10gb", 2))
    assert "4:2 and never 2:2; undone" in error.message
    assert error.reason is reasons.Reason.NOT_SUPPORTED
    assert layout_table.gpu_in_words(rig.observe()) == instances


def test_instances_that_a_driver_created_elsewhere_are_removed_once_idle(boot: Boot) -> None:
    absent = ("nvmlDeviceCreateGpuInstanceWithPlacement",)
    rig = boot(options=states.Options(absent_functions=absent))
    create = gi_step(rig.enable(), "1g.5gb", 0)
    rig.fault("nvmlGpuInstanceDestroy", code=states.Code.IN_USE, count=2)
    rig.execute(create)
    assert layout_table.gpu_in_words(rig.observe()) == "(1g.5gb)@0"


def _without_the_second(
    call: Callable[..., int], instance: Any, profile_id: Any, placements: Any, count: Any
) -> int:
    """Report the first placement of a compute profile in place of the second."""
    code = call(instance, profile_id, placements, count)
    if placements is not None:
        placements[1] = placements[0]
    return code


def test_a_span_that_the_driver_does_not_offer_is_left_to_the_driver(boot: Boot) -> None:
    function = "nvmlGpuInstanceGetComputeInstancePossiblePlacements"
    rig = boot(alterations={function: _without_the_second})
    whole = gi_step(rig.enable(), "3g.20gb", 0)
    rig.execute(whole, ci_step(whole, "1c.3g.20gb", 1))
    (instance,) = rig.observe().gpu_instances
    assert len(instance.compute_instances) == 1
    assert rig.calls("nvmlGpuInstanceCreateComputeInstanceWithPlacement") == 0


@pytest.mark.parametrize(
    "missing", [each for each in CHANGES if not each.endswith("WithPlacement")]
)
def test_no_step_runs_where_the_library_lacks_a_function_of_any_step(
    missing: str, rig: NvmlRig
) -> None:
    full = rig.fill("1g.5gb")
    off = mode_step(full, OFF)
    rig.state.set_options(states.Options(absent_functions=(missing,)))
    error = rig.refusal(*end_steps(full), off)
    assert f"library has no {missing}," in error.message
    assert error.reason is reasons.Reason.NOT_SUPPORTED
    assert rig.observe() == full


def test_a_compute_instance_needs_its_gpu_instance(rig: NvmlRig) -> None:
    never_made = gi_step(rig.enable(), "3g.20gb", 0)
    with pytest.raises(errors.HardwareError, match=r"no GPU instance 3g\.20gb at 0:4") as caught:
        rig.execute(ci_step(never_made, "3g.20gb"))
    assert caught.value.reason is reasons.Reason.VERIFY_FAILED


# -- several GPUs -----------------------------------------------------------------------------


def test_a_failure_on_one_gpu_does_not_stop_another(boot: Boot) -> None:
    rig = boot("3xa100-sxm4-40gb")
    gpus = rig.gpus.observe()
    for index in (0, 2):
        rig.fault(
            "nvmlDeviceCreateGpuInstance*", gpu=index, code=states.Code.INSUFFICIENT_RESOURCES
        )
    enabling: list[steps.Step] = []
    for gpu in gpus:
        enabling += [mode_step(gpu, ON), gi_step(gpu, "7g.40gb")]
    error = rig.refusal(*enabling)
    after = rig.gpus.observe()
    assert layout_table.devices_in_words(after) == ("", "(7g.40gb)@0", "")
    first, second = error.message.split("; ")
    assert first.startswith(f"GPU 0 ({gpus[0].uuid}): cannot create GPU instance 7g.40gb at 0:8")
    assert second.startswith(f"GPU 2 ({gpus[2].uuid}): ")
    assert error.reason is reasons.Reason.INSUFFICIENT_RESOURCES
    assert error.gpu == f"GPU 0 ({gpus[0].uuid})"


def test_a_gpu_stops_at_its_first_failure(rig: NvmlRig) -> None:
    gpu = rig.enable()
    ordered = [gi_step(gpu, "1g.5gb", start) for start in range(3)]
    rig.fault("nvmlDeviceCreateGpuInstance*", first=2, code=states.Code.INSUFFICIENT_RESOURCES)
    rig.refusal(*ordered)
    assert layout_table.gpu_in_words(rig.observe()) == "(1g.5gb)@0"


def test_gpus_are_changed_at_the_same_time_by_threads_that_end(boot: Boot) -> None:
    function = "nvmlDeviceCreateGpuInstanceWithPlacement"
    all_called = threading.Barrier(4, timeout=60.0)

    def create(call: Callable[..., int], *arguments: Any) -> int:
        all_called.wait()
        return call(*arguments)

    rig = boot("4xa100-sxm4-40gb", alterations={function: create})
    gpus = rig.gpus.observe()
    rig.execute(*[mode_step(gpu, ON) for gpu in gpus])
    before = threading.active_count()
    rig.execute(*[gi_step(gpu, "7g.40gb") for gpu in gpus])
    assert threading.active_count() == before
    assert layout_table.devices_in_words(rig.gpus.observe()) == 4 * ("(7g.40gb)@0",)


@pytest.mark.parametrize("index", [0, 7], ids=["another in its place", "none in its place"])
def test_a_gpu_that_left_the_node_is_unreachable_and_no_other_is_changed(
    index: int, rig: NvmlRig
) -> None:
    before = rig.observe()
    step = steps.SetMode(gpu_uuid="GPU-gone", mode=ON, needs_reset=False)
    plan = steps.GpuPlan(gpu_uuid="GPU-gone", gpu_index=index, steps=(step,), target=())
    after = rig.gpus.execute(steps.Plan(gpus=(plan,)))
    (gone,) = after.unreachable
    assert not after
    assert (gone.index, gone.uuid) == (index, "GPU-gone")
    assert ("nvmlDeviceGetHandleByIndex" if index else before.uuid) in gone.message
    assert rig.observe() == before


def test_gpu_lost_in_mid_change_is_named_and_the_others_go_on(boot: Boot) -> None:
    rig = boot("2xa100-sxm4-40gb")
    before = rig.gpus.observe()
    rig.fault("nvmlDeviceSetMigMode", gpu=0, loses_gpu=True)
    ordered = [mode_step(gpu, ON) for gpu in before]
    after = rig.gpus.execute(plan_of(before, *ordered), before)
    (lost,) = after.unreachable
    assert [(gpu.index, gpu.current_mode) for gpu in after] == [(1, ON)]
    assert (lost.uuid, lost.pci_address) == (before[0].uuid, before[0].pci_address)
    assert "cannot change MIG mode to enabled" in lost.message


def test_where_one_gpu_is_lost_and_another_fails_the_error_names_both(boot: Boot) -> None:
    rig = boot("3xa100-sxm4-40gb")
    before = rig.gpus.observe()
    switch = "nvmlDeviceSetMigMode"
    rig.fault(switch, gpu=0, loses_gpu=True)
    rig.fault(switch, gpu=2, code=states.Code.NO_PERMISSION, count=None)
    error = rig.refusal(*[mode_step(gpu, ON) for gpu in before])
    assert error.reason is reasons.Reason.NO_PERMISSION
    assert f"GPU 0 ({before[0].uuid}" in error.message
    assert "(NoPermission)" in error.message
    assert "(GpuLost)" in error.message
    assert f"GPU 2 ({before[2].uuid}" in error.message
    assert before[1].uuid not in error.message


@pytest.mark.parametrize("product", ["A30", "H100-80GB-HBM3"])
def test_a_change_returns_the_recovery_action_after_it(product: str, boot: Boot) -> None:
    rig = boot(product)
    idle = rig.enable()
    rig.state.fail_gpu(0, action=1)
    (before,) = rig.gpus.observe()
    rig.state.fail_gpu(0)
    step = gi_step(idle, str(idle.profiles[0].profile) if idle.profiles else "")

    (after,) = rig.gpus.execute(plan_of([before], step), [before])

    assert before.recovery_action is model.RecoveryAction.GPU_RESET
    assert after.recovery_action is model.RecoveryAction.NONE


def test_a_mode_change_with_a_reset_clears_the_recovery_action(boot: Boot) -> None:
    rig = boot("A30")
    rig.state.fail_gpu(0, action=1)
    (before,) = rig.gpus.observe()

    (after,) = rig.gpus.execute(plan_of([before], mode_step(before, ON)), [before])

    assert before.recovery_action is model.RecoveryAction.GPU_RESET
    assert after.recovery_action is model.RecoveryAction.NONE
