"""Plans by example: order of steps, modes, refusals, and what the properties do not generate.

``test_optimum`` and ``test_bruteforce`` compare the planner with exhaustive searches.
"""

import dataclasses
import re
from collections.abc import Collection

import pytest

from mig_manager import errors, reasons
from mig_manager.core import model, steps
from mig_manager.core.planner import planner, vgpus
from tests.rigs.node import driver_rules, samples
from tests.rigs.node.samples import step_lines

OFF, ON = model.MigMode.DISABLED, model.MigMode.ENABLED
VGPU = model.Virtualization.VGPU
SEVEN_SMALL = tuple(f"1g.5gb@{start}" for start in range(7))
WITHOUT_MIG = samples.gpu(None, mode=None)


def plan_to(
    gpu: model.Gpu, desired: dict[str, int] | model.DesiredGpu, *, busy: Collection[str] = ()
) -> steps.Plan:
    desired_gpu = samples.desired_gpu(desired) if isinstance(desired, dict) else desired
    return planner.plan([gpu], {gpu.uuid: desired_gpu}, use=dict.fromkeys(busy, 1))


# -- steps ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpu", "desired", "lines"),
    [
        pytest.param(
            samples.gpu(samples.A100, "2g.10gb@2[1c@0 1c@1]", "1g.5gb@6"),
            samples.desired_gpu({"1g.5gb": 2, "4g.20gb": 1}),
            [
                "-ci 1c.2g.10gb 0/0",
                "-ci 1c.2g.10gb 0/1",
                "-gi 2g.10gb 2:2",
                "+gi 4g.20gb 0:4",
                "+ci 4g.20gb 0:4 in 0:4",
                "+gi 1g.5gb 4:1",
                "+ci 1g.5gb 0:1 in 4:1",
            ],
            id="all destructions before all creations",
        ),
        pytest.param(
            samples.gpu(
                tuple(spec for spec in samples.A100 if spec.enum_index != 7),
                *("1g.5gb+me@6", "3g.20gb@0"),
            ),
            samples.desired_gpu({"3g.20gb": 1}),
            ["-ci 1g.5gb+me 0/0", "-gi 1g.5gb+me 6:1"],
            id="an instance of an unlisted profile",
        ),
        pytest.param(
            samples.gpu(samples.A100, mode=OFF, pending=ON),
            samples.desired_gpu({}),
            ["mode enabled"],
            id="a desired pending mode",
        ),
    ],
)
def test_a_plan_has_the_steps_in_their_order(
    gpu: model.Gpu, desired: model.DesiredGpu, lines: list[str]
) -> None:
    assert step_lines(plan_to(gpu, desired)) == lines


@pytest.mark.parametrize(
    ("gpu", "desired"),
    [
        (samples.gpu(samples.A100, "7g.40gb@0", pending=OFF), samples.desired_gpu({"7g.40gb": 1})),
        (samples.gpu(samples.A100, mode=OFF, pending=ON), samples.desired_gpu(mode=OFF)),
    ],
)
def test_an_undesired_pending_mode_is_cancelled_without_a_reset(
    gpu: model.Gpu, desired: model.DesiredGpu
) -> None:
    plan = plan_to(gpu, desired)
    assert step_lines(plan) == ["mode enabled" if gpu.current_mode is ON else "mode disabled"]
    assert not plan.gpus[0].resets_gpu


def test_every_gpu_gets_a_plan_of_its_own_and_others_are_not_touched() -> None:
    gpus = [samples.gpu(samples.A100, *SEVEN_SMALL, index=i) for i in range(8)]
    plan = planner.plan(gpus, {gpu.uuid: samples.desired_gpu({"1g.5gb": 6}) for gpu in gpus[1:]})
    assert [p.gpu_index for p in plan.gpus] == list(range(1, 8))
    for gpu, gpu_plan in zip(gpus[1:], plan.gpus, strict=True):
        assert len(driver_rules.execute(gpu, gpu_plan.steps).gpu_instances) == 6


def test_a_profile_name_is_resolved_for_each_gpu() -> None:
    a100, h100 = samples.gpu(samples.A100, index=0), samples.gpu(samples.H100, index=1)
    desired = samples.desired_gpu({"1g.10gb": 4})
    plan = planner.plan([a100, h100], {"GPU-0": desired, "GPU-1": desired})
    created = [step for step in plan.steps if isinstance(step, steps.CreateGpuInstance)]
    ids = {step.gpu_uuid: step.profile_id for step in created}
    assert ids == {"GPU-0": 15, "GPU-1": 19}


def test_busy_devices_are_kept_even_if_that_takes_more_calls() -> None:
    gpu = samples.gpu(samples.A100, "3g.20gb@0[1c@0]", "3g.20gb@4[1c@0 1c@1 1c@2]")
    desired, busy = {"1c.3g.20gb": 3, "2g.10gb": 1}, frozenset({"MIG-0-0-0"})
    free, sparing = plan_to(gpu, desired), plan_to(gpu, desired, busy=busy)
    assert free.destroyed_uuids == busy
    assert not sparing.destroyed_uuids & busy
    assert len(free.steps) < len(sparing.steps)


@pytest.mark.parametrize("at", [0, 4])
def test_of_two_divided_gpu_instances_the_one_in_use_stays_whole(at: int) -> None:
    gpu = samples.gpu(samples.A100, "3g.20gb@0[1c@0 1c@1]", "3g.20gb@4[1c@0 1c@1]")
    busy = {f"MIG-0-{at}-0", f"MIG-0-{at}-1"}
    plan = plan_to(gpu, {"1c.3g.20gb": 3}, busy=busy)
    assert len(plan.steps) == 1
    assert not plan.destroyed_uuids & busy


def test_the_first_gpu_instances_are_filled_first() -> None:
    gpu = samples.gpu(samples.A100)
    after = driver_rules.execute(gpu, plan_to(gpu, {"2c.3g.20gb": 1, "1c.3g.20gb": 3}).steps)
    assert [len(gi.compute_instances) for gi in after.gpu_instances] == [2, 2]


# -- what a driver may have and the properties do not generate --------------------------------


def test_compute_instances_with_unknown_spans_stay_if_none_is_added() -> None:
    with_spans = samples.gpu(samples.A100, "3g.20gb@0[1c 1c]")
    assert plan_to(with_spans, {"1c.3g.20gb": 2}).is_empty
    four, three = (samples.gpu(samples.A100, f"{name}[1c]") for name in ("4g.20gb@0", "3g.20gb@4"))
    again = step_lines(plan_to(four, {"1c.4g.20gb": 2}))
    assert [line[:3] for line in again] == ["-ci", "+ci", "+ci"]
    another = step_lines(plan_to(three, {"1c.3g.20gb": 2}))
    assert [line[:3] for line in another] == ["+gi", "+ci"]


def test_compute_instances_with_unknown_spans_can_stay_when_others_go() -> None:
    gpu = samples.gpu(samples.A100, "3g.20gb@4[1c 1c 1c]")
    plan = plan_to(gpu, {"1c.3g.20gb": 2}, busy={"MIG-0-4-0", "MIG-0-4-2"})
    assert step_lines(plan) == ["-ci 1c.3g.20gb 0/1"]
    spans = [ci.placement for ci in plan.gpus[0].target[0].compute_instances]
    assert spans == [model.Placement(0, 1), model.Placement(1, 1)]


def test_engines_that_the_driver_has_granted_are_not_disputed() -> None:
    gpu = samples.gpu(samples.A100, "1g.5gb+me@0", "1g.5gb+me@1", "1g.5gb@2")
    assert len(plan_to(gpu, {"1g.5gb+me": 2}).steps) == 2
    assert len(plan_to(gpu, {"1g.5gb+me": 2, "1g.5gb": 2}).steps) == 2


# -- mode -------------------------------------------------------------------------------------


def test_enabling_changes_the_mode_before_it_creates() -> None:
    plan = plan_to(samples.gpu(samples.A100, mode=OFF), {"7g.40gb": 1})
    assert step_lines(plan) == ["mode enabled", "+gi 7g.40gb 0:8", "+ci 7g.40gb 0:7 in 0:8"]
    assert plan.gpus[0].resets_gpu
    assert not plan.is_provisional
    hopper = samples.gpu(samples.H100, mode=OFF, needs_reset=False)
    assert not plan_to(hopper, {"7g.80gb": 1}).gpus[0].resets_gpu


def test_a_plan_without_listed_profiles_is_provisional() -> None:
    gpu = samples.gpu(None, mode=OFF)
    for desired in ({"7g.40gb": 1}, {"1g.5gb@5": 1}):
        plan = plan_to(gpu, desired)
        assert step_lines(plan) == ["mode enabled"]
        assert plan.is_provisional
    assert not plan_to(gpu, {}).is_provisional


def test_disabling_destroys_all_instances_first() -> None:
    gpu = samples.gpu(samples.A100, "3g.20gb@4[1c@0 1c@1]", "1g.5gb@0[]")
    plan = plan_to(gpu, samples.desired_gpu(mode=OFF))
    assert step_lines(plan) == [
        "-ci 1c.3g.20gb 0/0",
        "-ci 1c.3g.20gb 0/1",
        "-gi 1g.5gb 0:1",
        "-gi 3g.20gb 4:4",
        "mode disabled",
    ]
    assert plan_to(driver_rules.execute(gpu, plan.steps), samples.desired_gpu(mode=OFF)).is_empty


def test_a_gpu_without_mig_satisfies_mig_disabled() -> None:
    assert plan_to(WITHOUT_MIG, samples.desired_gpu(mode=OFF)).is_empty


# -- virtual machines, where only the host may do some of it ----------------------------------


def guest(*instances: str, mode: model.MigMode = ON) -> model.Gpu:
    gpu = samples.gpu(samples.A100, *instances, mode=mode)
    return dataclasses.replace(gpu, virtualization=VGPU)


@pytest.mark.parametrize(
    ("gpu", "desired"),
    [
        (guest(mode=OFF), model.DesiredGpu(mode=ON)),
        (guest(), model.DesiredGpu(mode=OFF)),
        (guest("3g.20gb@0"), samples.desired_gpu({"3g.20gb": 2})),
        (guest("3g.20gb@0"), samples.desired_gpu({})),
    ],
)
def test_a_vgpu_that_only_its_host_can_partition_is_refused(
    gpu: model.Gpu, desired: model.DesiredGpu
) -> None:
    with pytest.raises(errors.LayoutError, match="only its host can partition it") as caught:
        plan_to(gpu, desired)
    assert caught.value.reason is reasons.Reason.NOT_SUPPORTED


def test_vgpu_that_matches_or_needs_only_compute_instances_is_accepted() -> None:
    gpu, other = guest("3g.20gb@0"), samples.gpu(samples.A100, index=1)
    assert plan_to(gpu, {"3g.20gb": 1}).is_empty
    assert {line[:3] for line in step_lines(plan_to(gpu, {"1c.3g.20gb": 3}))} == {"-ci", "+ci"}
    plan = planner.plan(
        [guest(mode=OFF), other], {other.uuid: samples.desired_gpu({"7g.40gb": 1})}
    )
    assert [each.gpu_index for each in plan.gpus] == [1]


@pytest.mark.parametrize(
    "virtualization", [each for each in model.Virtualization if each is not VGPU]
)
def test_whole_gpus_are_planned_with_any_virtualization(
    virtualization: model.Virtualization,
) -> None:
    gpu = dataclasses.replace(samples.gpu(samples.A100, mode=OFF), virtualization=virtualization)
    assert plan_to(gpu, {"7g.40gb": 1}).gpus[0].takes_whole_gpu


def test_plan_for_a_vgpu_host_says_how_to_restore_the_vgpus() -> None:
    host = dataclasses.replace(guest("3g.20gb@0"), virtualization=model.Virtualization.HOST)
    off = dataclasses.replace(guest(mode=OFF), virtualization=model.Virtualization.HOST)

    (new_instances,) = vgpus.host_warnings([host], plan_to(host, {"7g.40gb": 1}))
    (new_mode,) = vgpus.host_warnings([off], plan_to(off, {"7g.40gb": 1}))

    assert "create the vGPUs of the new instances" in new_instances
    assert "sriov-manage" not in new_instances
    assert f"'sriov-manage -e ADDRESS' for {off.pci_address[4:]}" in new_mode
    assert "create their vGPUs" in new_mode
    assert vgpus.host_warnings([host], plan_to(host, {"3g.20gb": 1})) == ()
    other = dataclasses.replace(host, index=5, uuid="GPU-5")
    (alone,) = vgpus.host_warnings([host, other], plan_to(host, {"7g.40gb": 1}))
    assert alone == new_instances
    plain = dataclasses.replace(host, virtualization=model.Virtualization.NONE)
    assert vgpus.host_warnings([plain], plan_to(plain, {"7g.40gb": 1})) == ()


# -- refusals ---------------------------------------------------------------------------------


def refusal(gpu: model.Gpu, devices: dict[str, int]) -> errors.LayoutError:
    with pytest.raises(errors.LayoutError) as caught:
        plan_to(gpu, devices)
    return caught.value


def test_a_missing_gpu_and_one_without_mig_are_errors() -> None:
    assert refusal(WITHOUT_MIG, {}).reason is reasons.Reason.NOT_MIG_CAPABLE
    with pytest.raises(errors.LayoutError, match="GPU-9") as caught:
        planner.plan([samples.gpu(samples.A100)], {"GPU-9": samples.desired_gpu({})})
    assert caught.value.reason is reasons.Reason.NO_GPU_MATCHES


@pytest.mark.parametrize(
    ("devices", "says"),
    [
        ({"1g.6gb": 1}, "no profile 1g.6gb; did you mean 1g.5gb? Its profiles: 1g.5gb, "),
        ({"1g.5gb": 7, "99g.999gb": 1}, "no profile 99g.999gb; its profiles: 1g.5gb, 1g.5gb+me, "),
        ({"3c.4g.20gb": 1}, "4g.20gb has compute instances of 4, 2, 1 slices"),
        ({"9c.1g.5gb": 1}, "1g.5gb has compute instances of 1 slices"),
        ({"1g.6gb@0": 1}, ""),
        ({"3c.4g.20gb@0": 1}, ""),
        ({"0c.1g.5gb@0": 1}, ""),
    ],
)
def test_an_unknown_profile_is_refused_with_the_gpus_profiles(
    devices: dict[str, int], says: str
) -> None:
    error = refusal(samples.gpu(samples.A100), devices)
    assert error.reason is reasons.Reason.UNKNOWN_PROFILE
    assert says in error.message
    assert "GPU 0" in error.message


@pytest.mark.parametrize(
    ("product", "devices", "why", "part"),
    [
        ("A100", {"1g.5gb": 8}, "8x 1g.5gb and the memory slices have room for 7", "7x 1g.5gb"),
        ("A100", {"1g.5gb": 4, "2g.10gb": 2}, "overlap", "2x 2g.10gb, 3x 1g.5gb"),
        ("A100", {"3g.20gb": 2, "1g.5gb": 1}, "9 memory slices and the GPU has 8", "2x 3g.20gb"),
        ("A100", {"1g.5gb+me": 2}, "2 x optical-flow engine (OFA)", "1x 1g.5gb+me"),
        (
            "A100",
            {"1c.3g.20gb": 7},
            "3x 3g.20gb and the memory slices have room for 2",
            "6x 1c.3g.20gb",
        ),
        ("A100", {"7g.40gb": 10**12}, "memory slices have room for 1", "1x 7g.40gb"),
        ("A30", {"1g.6gb+me": 1, "2g.12gb+me": 1}, "JPEG", "1x 2g.12gb+me"),
        ("RTX6000", {"1g.24gb+me.all": 1, "1g.24gb": 1}, "5 x decoder", "1x 1g.24gb+me.all"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_with_the_exceeded_limit(
    product: str, devices: dict[str, int], why: str, part: str
) -> None:
    error = refusal(samples.gpu(samples.PRODUCTS[product]), devices)
    assert error.reason is reasons.Reason.DOES_NOT_FIT
    assert why in error.message
    assert re.search(rf"; the largest part that fits is {re.escape(part)}($| \()", error.message)
