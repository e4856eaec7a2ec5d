import dataclasses
import itertools
import re

import pytest

from mig_manager import errors
from mig_manager.core import model, steps
from mig_manager.core.planner import planner
from tests.unit import machine, oracle, samples

OFF, ON = model.MigMode.DISABLED, model.MigMode.ENABLED
SEVEN_SMALL = tuple(f"1g.5gb@{start}" for start in range(7))


def plan_for(
    gpu: model.Gpu, devices: dict[str, int], *, busy: frozenset[str] = frozenset()
) -> steps.Plan:
    return planner.plan([gpu], {gpu.uuid: samples.want(devices)}, busy=busy)


def state_after(gpu: model.Gpu, plan: steps.Plan) -> oracle.State:
    return oracle.state_of(machine.run(gpu, plan.steps))


# Applied


@pytest.mark.parametrize(
    ("instances", "devices"),
    [
        pytest.param(["3g.20gb@4", "1g.5gb@1"], {"1g.5gb": 1, "3g.20gb": 1}, id="elsewhere"),
        pytest.param(
            ["3g.20gb@0[1c@0]", "3g.20gb@4[1c@2]"], {"1c.3g.20gb": 2}, id="grouped-otherwise"
        ),
        pytest.param(["3g.20gb@0[1c 1c]"], {"1c.3g.20gb": 2}, id="spans-unknown"),
        pytest.param([], {}, id="nothing"),
    ],
)
def test_a_gpu_that_matches_is_not_in_the_plan(
    instances: list[str], devices: dict[str, int]
) -> None:
    plan = plan_for(samples.gpu(samples.A100, *instances), devices)
    assert plan.gpus == ()
    assert plan.is_empty


def test_an_idle_gpu_instance_is_removed_although_no_device_shows_it() -> None:
    assert samples.words(plan_for(samples.gpu(samples.A100, "3g.20gb@4[]"), {})) == [
        "-gi 3g.20gb 4:4"
    ]


def test_a_usable_empty_gpu_instance_gets_its_compute_instance() -> None:
    plan = plan_for(samples.gpu(samples.A100, "3g.20gb@4[]"), {"3g.20gb": 1})
    assert samples.words(plan) == ["+ci 3g.20gb 0:3 in 4:4"]


def test_gpus_that_the_layout_does_not_mention_are_not_touched() -> None:
    gpus = [samples.gpu(samples.A100, *SEVEN_SMALL, index=i) for i in range(2)]
    plan = planner.plan(gpus, {"GPU-1": samples.want({})})
    assert [gpu.gpu_uuid for gpu in plan.gpus] == ["GPU-1"]


# What changes


def test_matching_instances_stay() -> None:
    plan = plan_for(samples.gpu(samples.A100, *SEVEN_SMALL), {"1g.5gb": 6})
    assert [line[:3] for line in samples.words(plan)] == ["-ci", "-gi"]


def test_every_creation_has_a_placement() -> None:
    plan = plan_for(samples.gpu(samples.A100), {"1g.5gb": 2, "2g.10gb": 1, "3g.20gb": 1})
    assert samples.words(plan) == [
        "+gi 3g.20gb 4:4",
        "+ci 3g.20gb 0:3 in 4:4",
        "+gi 2g.10gb 0:2",
        "+ci 2g.10gb 0:2 in 0:2",
        "+gi 1g.5gb 2:1",
        "+ci 1g.5gb 0:1 in 2:1",
        "+gi 1g.5gb 3:1",
        "+ci 1g.5gb 0:1 in 3:1",
    ]


def test_all_destructions_precede_all_creations() -> None:
    gpu = samples.gpu(samples.A100, "2g.10gb@2[1c@0 1c@1]", "1g.5gb@6")
    assert samples.words(plan_for(gpu, {"1g.5gb": 1, "4g.20gb": 1})) == [
        "-ci 1c.2g.10gb 0/0",
        "-ci 1c.2g.10gb 0/1",
        "-gi 2g.10gb 2:2",
        "+gi 4g.20gb 0:4",
        "+ci 4g.20gb 0:4 in 0:4",
    ]


def test_the_target_lists_all_gpu_instances_and_which_of_them_stay() -> None:
    gpu = samples.gpu(samples.A100, "1g.5gb@6", "3g.20gb@0[1c@1]")
    (plan,) = plan_for(gpu, {"1g.5gb": 1, "1c.3g.20gb": 1, "2g.10gb": 1}).gpus
    assert [(str(t.profile), t.placement.start, t.kept) for t in plan.target] == [
        ("3g.20gb", 0, True),
        ("2g.10gb", 4, False),
        ("1g.5gb", 6, True),
    ]
    assert plan.target[0].compute_instances[0].placement == model.Placement(1, 1)


def test_small_instances_are_kept_where_they_leave_room_for_large_ones() -> None:
    gpu = samples.gpu(samples.A100, *SEVEN_SMALL)
    plan = plan_for(gpu, {"1g.5gb": 3})
    assert {start for _, start in state_after(gpu, plan)} == {4, 5, 6}


def test_a_small_instance_goes_where_nothing_larger_could_be() -> None:
    gpu = samples.gpu(samples.A100)
    assert set(state_after(gpu, plan_for(gpu, {"1g.5gb": 1}))) == {(samples.profile("1g.5gb"), 6)}


# Busy devices


def test_busy_devices_are_spared_even_if_that_costs_calls() -> None:
    gpu = samples.gpu(samples.A100, "3g.20gb@0[1c@0]", "3g.20gb@4[1c@0 1c@1 1c@2]")
    wanted = {"1c.3g.20gb": 3, "2g.10gb": 1}
    busy = frozenset({"MIG-0-0-0"})
    free, sparing = plan_for(gpu, wanted), plan_for(gpu, wanted, busy=busy)
    assert free.destroyed_uuids == busy
    assert not sparing.destroyed_uuids & busy
    assert len(free.steps) < len(sparing.steps)


@pytest.mark.parametrize("at", [0, 4])
def test_of_two_divided_gpu_instances_the_one_in_use_stays_whole(at: int) -> None:
    gpu = samples.gpu(samples.A100, "3g.20gb@0[1c@0 1c@1]", "3g.20gb@4[1c@0 1c@1]")
    busy = frozenset({f"MIG-0-{at}-0", f"MIG-0-{at}-1"})
    plan = plan_for(gpu, {"1c.3g.20gb": 3}, busy=busy)
    assert len(plan.steps) == 1
    assert not plan.destroyed_uuids & busy


def test_of_equal_devices_the_idle_ones_go() -> None:
    gpu = samples.gpu(samples.A100, *SEVEN_SMALL)
    busy = frozenset(f"MIG-0-{start}-0" for start in (0, 2, 5))
    plan = plan_for(gpu, {"1g.5gb": 3}, busy=busy)
    assert not plan.destroyed_uuids & busy
    assert len(plan.destroyed_uuids) == 4


def test_a_busy_compute_instance_keeps_its_place_while_its_neighbours_change() -> None:
    gpu = samples.gpu(samples.A100, "3g.20gb@0[1c@2 1c@0 1c@1]")
    plan = plan_for(gpu, {"1c.3g.20gb": 1, "2c.3g.20gb": 1}, busy=frozenset({"MIG-0-0-2"}))
    assert plan.destroyed_uuids == {"MIG-0-0-0", "MIG-0-0-1"}
    assert samples.words(plan)[-1] == "+ci 2c.3g.20gb 0:2 in 0:4"


# Compute instances


def test_one_slice_leaves_the_two_slices_of_a_3g_their_place() -> None:
    gpu = samples.gpu(samples.A100)
    plan = plan_for(gpu, {"1c.3g.20gb": 1, "2c.3g.20gb": 1})
    assert samples.words(plan)[1:] == ["+ci 2c.3g.20gb 0:2 in 4:4", "+ci 1c.3g.20gb 2:1 in 4:4"]


@pytest.mark.parametrize(
    ("devices", "gpu_instances"),
    [
        ({"1c.3g.20gb": 6}, 2),
        ({"1c.3g.20gb": 2}, 1),
        ({"2c.3g.20gb": 1, "1c.3g.20gb": 4}, 2),
        ({"1c.2g.10gb": 5}, 3),
        ({"1c.7g.40gb": 7}, 1),
        ({"4c.7g.40gb": 1, "3c.7g.40gb": 1}, 1),
        ({"2c.7g.40gb": 3, "1c.7g.40gb": 1}, 1),
        ({"1c.4g.20gb": 4, "3g.20gb": 1}, 2),
    ],
)
def test_compute_instances_share_as_few_gpu_instances_as_they_can(
    devices: dict[str, int], gpu_instances: int
) -> None:
    gpu = samples.gpu(samples.A100)
    assert len(state_after(gpu, plan_for(gpu, devices))) == gpu_instances


def test_the_first_gpu_instances_are_filled_first() -> None:
    gpu = samples.gpu(samples.A100)
    plan = plan_for(gpu, {"2c.3g.20gb": 1, "1c.3g.20gb": 3})
    assert list(map(len, state_after(gpu, plan).values())) == [2, 2]


def test_a_free_span_of_a_live_gpu_instance_is_used_before_a_new_one_is_made() -> None:
    plan = plan_for(samples.gpu(samples.A100, "3g.20gb@4[1c@2]"), {"1c.3g.20gb": 2})
    assert samples.words(plan) == ["+ci 1c.3g.20gb 0:1 in 4:4"]


def test_a_gpu_instance_is_divided_where_it_lies() -> None:
    plan = plan_for(samples.gpu(samples.A100, "3g.20gb@4"), {"1c.3g.20gb": 3})
    assert samples.words(plan)[0] == "-ci 3g.20gb 0/0"
    assert [type(step) for step in plan.steps[1:]] == [steps.CreateComputeInstance] * 3


def test_beside_unknown_spans_nothing_is_added() -> None:
    plan = plan_for(samples.gpu(samples.A100, "4g.20gb@0[1c]"), {"1c.4g.20gb": 2})
    assert samples.words(plan)[0] == "-ci 1c.4g.20gb 0/0"
    assert len(plan.steps) == 3


def test_beside_unknown_spans_a_new_gpu_instance_can_be_the_cheaper_way() -> None:
    plan = plan_for(samples.gpu(samples.A100, "3g.20gb@4[1c]"), {"1c.3g.20gb": 2})
    assert [line[:3] for line in samples.words(plan)] == ["+gi", "+ci"]


def test_compute_instances_with_unknown_spans_can_stay_when_others_go() -> None:
    gpu = samples.gpu(samples.A100, "3g.20gb@4[1c 1c 1c]")
    plan = plan_for(gpu, {"1c.3g.20gb": 2}, busy=frozenset({"MIG-0-4-0", "MIG-0-4-2"}))
    assert samples.words(plan) == ["-ci 1c.3g.20gb 0/1"]
    spans = [ci.placement for ci in plan.gpus[0].target[0].compute_instances]
    assert spans == [model.Placement(0, 1), model.Placement(1, 1)]


# Mode


def test_enabling_changes_the_mode_before_it_creates() -> None:
    gpu = samples.gpu(samples.A100, mode=OFF)
    plan = plan_for(gpu, {"7g.40gb": 1})
    assert samples.words(plan) == ["mode enabled", "+gi 7g.40gb 0:8", "+ci 7g.40gb 0:7 in 0:8"]
    assert plan.gpus[0].needs_reset
    assert not plan.is_provisional


def test_a_gpu_that_needs_no_reset_gets_none() -> None:
    plan = plan_for(samples.gpu(samples.H100, mode=OFF, needs_reset=False), {"7g.80gb": 1})
    assert not plan.gpus[0].needs_reset


def test_a_plan_without_listed_profiles_is_provisional() -> None:
    gpu = samples.gpu(None, mode=OFF)
    plan = plan_for(gpu, {"7g.40gb": 1})
    assert samples.words(plan) == ["mode enabled"]
    assert plan.is_provisional
    assert not plan_for(gpu, {}).is_provisional


def test_disabling_destroys_all_instances_first() -> None:
    gpu = samples.gpu(samples.A100, "3g.20gb@4[1c@0 1c@1]", "1g.5gb@0[]")
    plan = planner.plan([gpu], {gpu.uuid: samples.want(mode=OFF)})
    assert samples.words(plan) == [
        "-ci 1c.3g.20gb 0/0",
        "-ci 1c.3g.20gb 0/1",
        "-gi 1g.5gb 0:1",
        "-gi 3g.20gb 4:4",
        "mode disabled",
    ]
    after = machine.run(gpu, plan.steps)
    assert planner.plan([after], {gpu.uuid: samples.want(mode=OFF)}).is_empty


@pytest.mark.parametrize(("mode", "pending"), [(ON, OFF), (OFF, ON)])
def test_an_undesired_pending_mode_is_cancelled_without_a_reset(
    mode: model.MigMode, pending: model.MigMode
) -> None:
    gpu = samples.gpu(samples.A100, *(["7g.40gb@0"] if mode is ON else []))
    gpu = dataclasses.replace(gpu, current_mode=mode, pending_mode=pending)
    desired = samples.want({"7g.40gb": 1} if mode is ON else {}, mode=mode)
    plan = planner.plan([gpu], {gpu.uuid: desired})
    assert samples.words(plan) == [f"mode {mode.value}"]
    assert not plan.gpus[0].needs_reset


def test_a_desired_pending_mode_still_needs_its_step() -> None:
    gpu = dataclasses.replace(samples.gpu(samples.A100, mode=OFF), pending_mode=ON)
    assert samples.words(plan_for(gpu, {})) == ["mode enabled"]


def test_a_gpu_without_mig_satisfies_mig_disabled() -> None:
    gpu = dataclasses.replace(samples.gpu(None), current_mode=None, pending_mode=None)
    assert planner.plan([gpu], {gpu.uuid: samples.want(mode=OFF)}).is_empty


# Refusals


def refusal(gpu: model.Gpu, devices: dict[str, int]) -> errors.LayoutError:
    with pytest.raises(errors.LayoutError) as caught:
        plan_for(gpu, devices)
    return caught.value


def test_a_gpu_without_mig_cannot_have_it_enabled() -> None:
    gpu = dataclasses.replace(samples.gpu(None), current_mode=None, pending_mode=None)
    assert refusal(gpu, {}).reason is errors.Reason.NOT_MIG_CAPABLE


def test_a_missing_gpu_is_an_error() -> None:
    with pytest.raises(errors.LayoutError, match="GPU-9") as caught:
        planner.plan([samples.gpu(samples.A100)], {"GPU-9": samples.want({})})
    assert caught.value.reason is errors.Reason.NO_GPU_MATCHES


@pytest.mark.parametrize(
    ("devices", "says"),
    [
        ({"1g.6gb": 1}, "no profile 1g.6gb: did you mean 1g.5gb?"),
        ({"1g.5gb": 7, "99g.999gb": 1}, "it has 7g.40gb, 4g.20gb, 3g.20gb"),
        ({"3c.4g.20gb": 1}, "4g.20gb has compute instances of 4, 2, 1 slices"),
        ({"9c.1g.5gb": 1}, "1g.5gb has compute instances of 1 slices"),
    ],
)
def test_an_unknown_profile_is_refused_with_the_gpus_profiles(
    devices: dict[str, int], says: str
) -> None:
    error = refusal(samples.gpu(samples.A100), devices)
    assert error.reason is errors.Reason.UNKNOWN_PROFILE
    assert says in error.message
    assert "GPU 0" in error.message


def test_a_profile_name_is_resolved_for_each_gpu() -> None:
    a100, h100 = samples.gpu(samples.A100, index=0), samples.gpu(samples.H100, index=1)
    desired = samples.want({"1g.10gb": 4})
    plan = planner.plan([a100, h100], {"GPU-0": desired, "GPU-1": desired})
    ids = {
        step.gpu_uuid: step.profile_id
        for step in plan.steps
        if isinstance(step, steps.CreateGpuInstance)
    }
    assert ids == {"GPU-0": 15, "GPU-1": 19}


@pytest.mark.parametrize(
    ("product", "devices", "why", "part"),
    [
        ("A100", {"1g.5gb": 8}, "8 x 1g.5gb and the memory slices have room for 7", "7 x 1g.5gb"),
        ("A100", {"1g.5gb": 4, "2g.10gb": 2}, "overlap", "2 x 2g.10gb + 3 x 1g.5gb"),
        ("A100", {"3g.20gb": 2, "1g.5gb": 1}, "9 memory slices and the GPU has 8", "2 x 3g.20gb"),
        ("A100", {"1g.5gb+me": 2}, "2 x optical-flow engine (OFA)", "1 x 1g.5gb+me"),
        (
            "A100",
            {"1c.3g.20gb": 7},
            "3 x 3g.20gb and the memory slices have room for 2",
            "6 x 1c.3g.20gb",
        ),
        ("A100", {"7g.40gb": 10**12}, "memory slices have room for 1", "1 x 7g.40gb"),
        ("A30", {"1g.6gb+me": 1, "2g.12gb+me": 1}, "JPEG", "1 x 2g.12gb+me"),
        ("RTX6000", {"1g.24gb+me.all": 1, "1g.24gb": 1}, "5 x decoder", "1 x 1g.24gb+me.all"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_with_what_is_exceeded(
    product: str, devices: dict[str, int], why: str, part: str
) -> None:
    error = refusal(samples.gpu(samples.PRODUCTS[product]), devices)
    assert error.reason is errors.Reason.DOES_NOT_FIT
    assert why in error.message
    assert re.search(rf"; the largest part that fits is {re.escape(part)}($| \()", error.message)


def test_engines_that_the_driver_has_granted_are_not_disputed() -> None:
    gpu = samples.gpu(samples.A100, "1g.5gb+me@0", "1g.5gb+me@1", "1g.5gb@2")
    assert len(plan_for(gpu, {"1g.5gb+me": 2}).steps) == 2
    assert len(plan_for(gpu, {"1g.5gb+me": 2, "1g.5gb": 2}).steps) == 2


def test_instances_of_an_unlisted_profile_can_be_destroyed() -> None:
    specs = tuple(spec for spec in samples.A100 if spec.enum_index != 7)
    gpu = samples.gpu(specs, "1g.5gb+me@6", "3g.20gb@0")
    assert samples.words(plan_for(gpu, {"3g.20gb": 1})) == [
        "-ci 1g.5gb+me 0/0",
        "-gi 1g.5gb+me 6:1",
    ]


# Tables


FITS: dict[str, list[dict[str, int]]] = {
    "A100": [
        {}, {"1g.5gb": 7}, {"1g.5gb": 6}, {"1g.5gb": 3, "2g.10gb": 2}, {"1g.5gb": 2, "2g.10gb": 2},
        {"1g.5gb": 2, "2g.10gb": 1}, {"4g.20gb": 1, "3g.20gb": 1}, {"1g.5gb+me": 1, "1g.5gb": 6},
        {"1g.5gb+me": 1, "2g.10gb": 3}, {"1g.10gb": 4}, {"1g.10gb": 1, "2g.10gb": 3},
        {"1g.10gb": 2, "3g.20gb": 1}, {"7g.40gb": 1}, {"2g.10gb": 3, "1g.5gb": 1},
        {"3g.20gb": 1, "2g.10gb": 1, "1g.5gb": 2},
    ],
    "RTX6000": [
        {"1g.24gb+me.all": 1, "1g.24gb-me": 3},
        {"1g.24gb+me.all": 1, "2g.48gb-me": 1, "1g.24gb-me": 1},
        {"2g.48gb+me.all": 1, "2g.48gb-me": 1}, {"1g.24gb+me": 1, "1g.24gb+gfx": 2, "1g.24gb": 1},
        {"1g.24gb+gfx": 4}, {"2g.48gb+gfx": 1, "2g.48gb": 1},
        {"2g.48gb+gfx": 1, "1g.24gb": 1, "1g.24gb+me": 1}, {"4g.96gb+gfx": 1}, {"1g.24gb-me": 4},
    ],
}  # fmt: skip
DOES_NOT_FIT: dict[str, list[dict[str, int]]] = {
    "A100": [
        {"1g.5gb": 8}, {"1g.5gb": 4, "2g.10gb": 2}, {"3g.20gb": 2, "1g.5gb": 1}, {"4g.20gb": 2},
        {"1g.5gb+me": 2}, {"1g.10gb": 4, "1g.5gb": 1}, {"7g.40gb": 1, "1g.5gb": 1},
        {"2g.10gb": 4},
    ],
    "RTX6000": [
        {"1g.24gb+me.all": 1, "1g.24gb": 1}, {"1g.24gb+me.all": 2}, {"1g.24gb+me": 2},
        {"2g.48gb+me.all": 1, "1g.24gb+gfx": 1}, {"4g.96gb+gfx": 1, "1g.24gb-me": 1},
        {"1g.24gb-me": 5},
    ],
}  # fmt: skip


@pytest.mark.parametrize("product", FITS)
def test_a_product_holds_what_is_known_to_fit_and_nothing_else(product: str) -> None:
    there = ["2g.48gb@0", "1g.24gb+gfx@9"] if product == "RTX6000" else []
    gpu = samples.gpu(samples.PRODUCTS[product], *there)
    for devices in FITS[product]:
        after = state_after(gpu, plan_for(gpu, devices))
        assert oracle.devices_in(after) == dict(samples.want(devices).devices)
    for devices in DOES_NOT_FIT[product]:
        assert refusal(gpu, devices).reason is errors.Reason.DOES_NOT_FIT


def test_alike_gpus_of_a_node_get_plans_of_their_own() -> None:
    gpus = [samples.gpu(samples.A100, *SEVEN_SMALL, index=i) for i in range(8)]
    plan = planner.plan(gpus, {gpu.uuid: samples.want({"1g.5gb": 6}) for gpu in gpus})
    assert [p.gpu_index for p in plan.gpus] == list(range(8))
    for gpu, gpu_plan in itertools.zip_longest(gpus, plan.gpus):
        assert samples.devices_of(machine.run(gpu, gpu_plan.steps)) == {
            samples.profile("1g.5gb"): 6
        }
