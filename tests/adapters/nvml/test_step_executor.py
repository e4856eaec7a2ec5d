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
from tests.rigs.driver import nvml_codes
from tests.rigs.node.nvml_rig import (
    OFF,
    ON,
    Boot,
    NvmlRig,
    ci_step,
    content,
    end_steps,
    gi_step,
    mode_step,
    plan_of,
)

CREATE = "nvmlDeviceCreateGpuInstance"
CHANGES = sorted({*nvml_codes.CHANGES, CREATE})


def changes(node: NvmlRig) -> int:
    return sum(node.calls(function) for function in CHANGES)


# -- each step, done once only ----------------------------------------------------------------


def test_repeating_a_step_changes_nothing(node: NvmlRig) -> None:
    idle = node.observe()
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
        node.execute(step)
    made, count = node.observe(), changes(node)
    for step in ordered:
        node.execute(step)
    node.execute(*ordered)
    assert node.observe() == made
    assert changes(node) == count


def test_destroying_a_missing_instance_succeeds(node: NvmlRig) -> None:
    full = node.fill("1g.5gb", "3g.20gb")
    ends = end_steps(full)
    node.execute(*ends)
    assert node.observe().gpu_instances == ()
    count = changes(node)
    node.execute(*ends)
    node.execute(mode_step(full, OFF))
    node.execute(*ends)
    assert changes(node) == count + 1


def test_an_instance_that_cannot_be_looked_up_is_not_taken_for_missing(node: NvmlRig) -> None:
    full = node.fill("3g.20gb")
    node.fault("nvmlDeviceGetGpuInstanceById", code=states.Code.UNKNOWN)

    assert node.refusal(*end_steps(full)).reason is reasons.Reason.NVML_ERROR
    assert node.observe() == full


def test_an_instance_that_took_over_an_id_is_spared(boot: Boot) -> None:
    node = boot("h100-sxm5-80gb")
    ends = end_steps(node.fill("2g.20gb"))
    node.execute(*ends)
    # The same slot, the same id, another profile.
    successor = node.fill("1g.20gb")
    assert successor.gpu_instances[0].instance_id == ends[-1].gpu_instance_id  # type: ignore[union-attr]
    node.execute(*ends)
    assert node.observe() == successor


def test_an_instance_that_took_over_an_id_in_a_wait_is_spared(boot: Boot) -> None:
    node = boot("h100-sxm5-80gb")
    full = node.fill("2g.20gb")
    client = node.state.add_client(full.mig_uuids[0], name="train")
    ends = end_steps(full)

    def replace() -> None:
        node.clock.on_wait.clear()
        node.state.remove_client(client)
        node.execute(*ends)
        node.fill("1g.20gb")

    node.clock.on_wait.append(replace)
    node.execute(*ends)

    assert content(node.observe()) == ["1g.20gb@0:2"]


def test_a_compute_instance_that_took_over_an_id_is_spared(node: NvmlRig) -> None:
    whole = gi_step(node.enable(), "3g.20gb", 0)
    node.execute(whole, ci_step(whole, "3g.20gb"))
    (end, _) = end_steps(node.observe())
    node.execute(end, ci_step(whole, "1c.3g.20gb"))
    successor = node.observe()
    node.execute(end)
    assert node.observe() == successor


def test_a_compute_instance_elsewhere_that_took_over_an_id_is_spared(node: NvmlRig) -> None:
    whole = gi_step(node.enable(), "3g.20gb", 4)
    node.execute(whole, ci_step(whole, "3g.20gb"))
    (end, _) = end_steps(node.observe())
    assert isinstance(end, steps.DestroyComputeInstance)
    successor = node.observe()

    node.execute(dataclasses.replace(end, within=model.Placement(0, 4)))

    assert node.observe() == successor


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


def test_instances_are_created_where_the_plan_wants_them(node: NvmlRig) -> None:
    # Left to itself the driver would take 6 and then 4.
    gpu = node.enable()
    node.execute(gi_step(gpu, "1g.5gb", 0), gi_step(gpu, "1g.5gb", 3))
    assert content(node.observe()) == ["[1g.5gb@0:1]", "[1g.5gb@3:1]"]
    assert node.calls("nvmlDeviceCreateGpuInstance") == 0


def test_every_placement_is_reached_on_a_driver_that_chooses_them(boot: Boot) -> None:
    absent = tuple(each for each in CHANGES if each.endswith("WithPlacement"))
    node = boot("2xa100-sxm4-40gb", options=states.Options(absent_functions=absent))
    whole = gi_step(node.enable(1), "3g.20gb", 0)
    node.execute(whole, ci_step(whole, "1c.3g.20gb", 2), ci_step(whole, "1c.3g.20gb", 1))
    (instance,) = node.observe(1).gpu_instances
    assert [str(compute.placement) for compute in instance.compute_instances] == ["2:1", "1:1"]

    gpu = node.enable()
    for start in (6, 0, 3):
        node.execute(gi_step(gpu, "1g.5gb", start))
    instances = ["[1g.5gb@0:1]", "[1g.5gb@3:1]", "[1g.5gb@6:1]"]
    assert content(node.observe()) == instances
    # Occupied: what was created on the way is gone again.
    error = node.refusal(gi_step(gpu, "2g.10gb", 2))
    assert "4:2 and never 2:2; undone" in error.message
    assert error.reason is reasons.Reason.NOT_SUPPORTED
    assert content(node.observe()) == instances


def test_what_such_a_driver_created_elsewhere_is_removed_once_idle(boot: Boot) -> None:
    absent = ("nvmlDeviceCreateGpuInstanceWithPlacement",)
    node = boot(options=states.Options(absent_functions=absent))
    create = gi_step(node.enable(), "1g.5gb", 0)
    node.fault("nvmlGpuInstanceDestroy", code=states.Code.IN_USE, count=2)
    node.execute(create)
    assert content(node.observe()) == ["[1g.5gb@0:1]"]


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
    node = boot(alterations={function: _without_the_second})
    whole = gi_step(node.enable(), "3g.20gb", 0)
    node.execute(whole, ci_step(whole, "1c.3g.20gb", 1))
    (instance,) = node.observe().gpu_instances
    assert len(instance.compute_instances) == 1
    assert node.calls("nvmlGpuInstanceCreateComputeInstanceWithPlacement") == 0


@pytest.mark.parametrize(
    "missing", [each for each in CHANGES if not each.endswith("WithPlacement")]
)
def test_no_step_runs_where_the_library_lacks_a_function_of_any_step(
    missing: str, node: NvmlRig
) -> None:
    full = node.fill("1g.5gb")
    off = mode_step(full, OFF)
    node.state.set_options(states.Options(absent_functions=(missing,)))
    error = node.refusal(*end_steps(full), off)
    assert f"library has no {missing}," in error.message
    assert error.reason is reasons.Reason.NOT_SUPPORTED
    assert node.observe() == full


def test_a_compute_instance_needs_its_gpu_instance(node: NvmlRig) -> None:
    never_made = gi_step(node.enable(), "3g.20gb", 0)
    with pytest.raises(errors.HardwareError, match=r"no GPU instance 3g\.20gb at 0:4") as caught:
        node.execute(ci_step(never_made, "3g.20gb"))
    assert caught.value.reason is reasons.Reason.VERIFY_FAILED


# -- several GPUs -----------------------------------------------------------------------------


def test_a_failure_on_one_gpu_does_not_stop_another(boot: Boot) -> None:
    node = boot("3xa100-sxm4-40gb")
    gpus = node.gpus.observe()
    for index in (0, 2):
        node.fault(
            "nvmlDeviceCreateGpuInstance*", gpu=index, code=states.Code.INSUFFICIENT_RESOURCES
        )
    enabling: list[steps.Step] = []
    for gpu in gpus:
        enabling += [mode_step(gpu, ON), gi_step(gpu, "7g.40gb")]
    error = node.refusal(*enabling)
    after = node.gpus.observe()
    assert [content(gpu) for gpu in after] == [[], ["[7g.40gb@0:8]"], []]
    first, second = error.message.split("; ")
    assert first.startswith(f"GPU 0 ({gpus[0].uuid}): cannot create GPU instance 7g.40gb at 0:8")
    assert second.startswith(f"GPU 2 ({gpus[2].uuid}): ")
    assert error.reason is reasons.Reason.INSUFFICIENT_RESOURCES
    assert error.gpu == f"GPU 0 ({gpus[0].uuid})"


def test_a_gpu_stops_at_its_first_failure(node: NvmlRig) -> None:
    gpu = node.enable()
    ordered = [gi_step(gpu, "1g.5gb", start) for start in range(3)]
    node.fault("nvmlDeviceCreateGpuInstance*", first=2, code=states.Code.INSUFFICIENT_RESOURCES)
    node.refusal(*ordered)
    assert content(node.observe()) == ["[1g.5gb@0:1]"]


def test_gpus_are_changed_at_the_same_time_by_threads_that_end(boot: Boot) -> None:
    function = "nvmlDeviceCreateGpuInstanceWithPlacement"
    all_called = threading.Barrier(4, timeout=60.0)

    def create(call: Callable[..., int], *arguments: Any) -> int:
        all_called.wait()
        return call(*arguments)

    node = boot("4xa100-sxm4-40gb", alterations={function: create})
    gpus = node.gpus.observe()
    node.execute(*[mode_step(gpu, ON) for gpu in gpus])
    before = threading.active_count()
    node.execute(*[gi_step(gpu, "7g.40gb") for gpu in gpus])
    assert threading.active_count() == before
    assert [content(gpu) for gpu in node.gpus.observe()] == 4 * [["[7g.40gb@0:8]"]]


@pytest.mark.parametrize("index", [0, 7], ids=["another in its place", "none in its place"])
def test_a_gpu_that_left_the_node_is_unreachable_and_no_other_is_changed(
    index: int, node: NvmlRig
) -> None:
    before = node.observe()
    step = steps.SetMode(gpu_uuid="GPU-gone", mode=ON, needs_reset=False)
    plan = steps.GpuPlan(gpu_uuid="GPU-gone", gpu_index=index, steps=(step,), target=())
    after = node.gpus.execute(steps.Plan(gpus=(plan,)))
    (gone,) = after.unreachable
    assert not after
    assert (gone.index, gone.uuid) == (index, "GPU-gone")
    assert ("nvmlDeviceGetHandleByIndex" if index else before.uuid) in gone.message
    assert node.observe() == before


def test_gpu_lost_in_mid_change_is_named_and_the_others_go_on(boot: Boot) -> None:
    node = boot("2xa100-sxm4-40gb")
    before = node.gpus.observe()
    node.fault("nvmlDeviceSetMigMode", gpu=0, loses_gpu=True)
    ordered = [mode_step(gpu, ON) for gpu in before]
    after = node.gpus.execute(plan_of(before, *ordered), before)
    (lost,) = after.unreachable
    assert [(gpu.index, gpu.current_mode) for gpu in after] == [(1, ON)]
    assert (lost.uuid, lost.pci_address) == (before[0].uuid, before[0].pci_address)
    assert "cannot switch MIG mode to enabled" in lost.message


def test_where_one_gpu_is_lost_and_another_fails_the_error_names_both(boot: Boot) -> None:
    node = boot("3xa100-sxm4-40gb")
    before = node.gpus.observe()
    switch = "nvmlDeviceSetMigMode"
    node.fault(switch, gpu=0, loses_gpu=True)
    node.fault(switch, gpu=2, code=states.Code.NO_PERMISSION, count=None)
    error = node.refusal(*[mode_step(gpu, ON) for gpu in before])
    assert error.reason is reasons.Reason.NO_PERMISSION
    assert f"GPU 0 ({before[0].uuid}" in error.message
    assert "(NoPermission)" in error.message
    assert "(GpuLost)" in error.message
    assert f"GPU 2 ({before[2].uuid}" in error.message
    assert before[1].uuid not in error.message


@pytest.mark.parametrize("product", ["A30", "H100-80GB-HBM3"])
def test_a_change_returns_the_recovery_action_after_it(product: str, boot: Boot) -> None:
    node = boot(product)
    idle = node.enable()
    node.state.fail_gpu(0, action=1)
    (before,) = node.gpus.observe()
    node.state.fail_gpu(0)
    step = gi_step(idle, str(idle.profiles[0].profile) if idle.profiles else "")

    (after,) = node.gpus.execute(plan_of([before], step), [before])

    assert before.recovery_action is model.RecoveryAction.GPU_RESET
    assert after.recovery_action is model.RecoveryAction.NONE


def test_a_mode_change_with_a_reset_clears_the_recovery_action(boot: Boot) -> None:
    node = boot("A30")
    node.state.fail_gpu(0, action=1)
    (before,) = node.gpus.observe()

    (after,) = node.gpus.execute(plan_of([before], mode_step(before, ON)), [before])

    assert before.recovery_action is model.RecoveryAction.GPU_RESET
    assert after.recovery_action is model.RecoveryAction.NONE
