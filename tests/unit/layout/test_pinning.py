"""Layouts that say where instances lie."""

import collections
import itertools

import hypothesis
import pytest
from hypothesis import strategies as st

from mig_manager import errors, reasons
from mig_manager.core import model
from mig_manager.core.files import yaml_text
from mig_manager.core.layout import layout_documents, layout_parser, layouts, selection
from mig_manager.core.planner import planner
from tests.rigs.node import driver_rules, samples
from tests.rigs.planner import oracle
from tests.unit import drawn_gpus
from tests.unit.layout.rules import of_mig_devices


def after(gpu: model.Gpu, devices: dict[str, int]) -> oracle.State:
    plan = planner.plan([gpu], {gpu.uuid: samples.desired_gpu(devices)})
    return oracle.state_of(driver_rules.execute(gpu, plan.steps))


def spots(state: oracle.State) -> dict[str, list[int]]:
    """Start slices by profile."""
    starts_by_profile: dict[str, list[int]] = {}
    for profile, start in sorted(state):
        starts_by_profile.setdefault(str(profile), []).append(start)
    return starts_by_profile


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ({"1g.5gb@4": 1}, {"1g.5gb": [4]}),
        ({"1g.5gb@6": 1, "1g.5gb@0": 1}, {"1g.5gb": [0, 6]}),
        ({"1g.5gb@4": 1, "3g.20gb": 1}, {"3g.20gb": [0], "1g.5gb": [4]}),
        ({"2g.10gb@2": 1, "1g.5gb": 5}, {"2g.10gb": [2], "1g.5gb": [0, 1, 4, 5, 6]}),
        ({"3g.20gb@0": 1, "3g.20gb": 1}, {"3g.20gb": [0, 4]}),
        ({"1g.5gb+me@3": 1, "1g.5gb@5": 1}, {"1g.5gb+me": [3], "1g.5gb": [5]}),
    ],
)
def test_pinned_instances_get_their_placements_and_others_fit_around(
    devices: dict[str, int], expected: dict[str, list[int]]
) -> None:
    assert spots(after(samples.gpu(samples.A100), devices)) == expected


def test_matching_instances_stay_and_overlapping_ones_are_destroyed() -> None:
    gpu = samples.gpu(samples.A100, "1g.5gb@4", "3g.20gb@0")
    plan = planner.plan([gpu], {gpu.uuid: samples.desired_gpu({"1g.5gb@4": 1, "2g.10gb@2": 1})})
    assert [line[:3] for line in samples.step_lines(plan)] == ["-ci", "-gi", "+gi", "+ci"]
    assert [target.is_kept for target in plan.gpus[0].target] == [False, True]


def test_pinned_compute_instances_share_their_gpu_instance() -> None:
    gpu = samples.gpu(samples.A100, "3g.20gb@4")
    state = after(gpu, {"2c.3g.20gb@4": 1, "1c.3g.20gb@4": 1, "3g.20gb": 1})
    three = samples.profile("3g.20gb")
    assert state == {
        (three, 0): frozenset({(3, 0)}),
        (three, 4): frozenset({(2, 0), (1, 2)}),
    }


def test_a_pinned_gpu_instance_has_only_its_pinned_devices() -> None:
    gpu = samples.gpu(samples.A100, "3g.20gb@0[1c@0 1c@1]")
    state = after(gpu, {"1c.3g.20gb@0": 1, "1c.3g.20gb": 1})
    assert collections.Counter(len(inside) for inside in state.values()) == {1: 2}


def test_a_compute_instance_in_use_keeps_its_span() -> None:
    gpu = samples.gpu(samples.A100, "3g.20gb@0[1c@0 1c@1 1c@2]")
    desired = samples.desired_gpu({"1c.3g.20gb@0": 1})
    plan = planner.plan([gpu], {gpu.uuid: desired}, use={"MIG-0-0-1": 1})
    assert "MIG-0-0-1" not in plan.destroyed_uuids
    assert len(plan.steps) == 2


def test_placements_are_planned_with_mig_off_too() -> None:
    gpu = samples.gpu(samples.A100, mode=model.MigMode.DISABLED)
    assert spots(after(gpu, {"1g.5gb@5": 1})) == {"1g.5gb": [5]}


@pytest.mark.parametrize(
    ("devices", "why"),
    [
        ({"1g.5gb@7": 1}, "1g.5gb cannot start at memory slice 7; it can at 0-6"),
        ({"2g.10gb@1": 1}, "2g.10gb cannot start at memory slice 1; it can at 0, 2 or 4"),
        ({"7g.40gb@1": 1}, "7g.40gb cannot start at memory slice 1; it can at 0"),
        (
            {"3g.20gb@4": 1, "1g.5gb@5": 1},
            "3g.20gb@4 needs memory slices 4-7 and 1g.5gb@5 slice 5; they collide in slice 5",
        ),
        (
            {"3g.20gb@0": 1, "2g.10gb@2": 1},
            "3g.20gb@0 needs memory slices 0-3 and 2g.10gb@2 slices 2-3; they collide",
        ),
        ({"1g.5gb+me@0": 1, "1g.5gb+me@1": 1}, "2 x optical-flow engine (OFA)"),
        ({"1g.5gb+me@0": 1, "1g.5gb+me": 1}, "2 x optical-flow engine (OFA)"),
        ({"1g.5gb@4": 1, "3g.20gb": 2}, "2x 3g.20gb beside 1g.5gb at 4 does not fit"),
        ({"2c.3g.20gb@0": 1, "3g.20gb@0": 1}, "do not fit into one 3g.20gb together"),
        ({"2c.4g.20gb@0": 2, "1c.4g.20gb@0": 1}, "do not fit into one 4g.20gb together"),
    ],
)
def test_impossible_placements_are_refused_with_the_reason(
    devices: dict[str, int], why: str
) -> None:
    gpu = samples.gpu(samples.A100, "3g.20gb@4")
    with pytest.raises(errors.LayoutError) as caught:
        planner.plan([gpu], {gpu.uuid: samples.desired_gpu(devices)})
    assert caught.value.reason is reasons.Reason.DOES_NOT_FIT
    assert why in caught.value.message


def test_a_pin_is_parsed_in_any_spelling() -> None:
    one, other, moved = (
        layout_parser.parse(of_mig_devices(f"{{{devices}}}"), source="f").layout("x")
        for devices in (
            '"1c.1g.5gb@04": 1, 2c.3g.20gb@0: 1, 1g.5gb@2: 0, 1g.5gb: 2',
            '"1g.5gb": 2, "2c.3g.20gb@0": 1, "1g.5gb@4": 1',
            '"1g.5gb": 2, "2c.3g.20gb@0": 1, "1g.5gb@5": 1',
        )
    )
    assert one == other
    assert one.content_hash == other.content_hash != moved.content_hash
    counts = {str(profile): n for profile, n in one.rules[0].desired.counts.items()}
    assert counts == {"2c.3g.20gb": 1, "1g.5gb": 3}


@pytest.mark.parametrize(
    ("devices", "complaint"),
    [
        ("{1g.5gb@: 1}", "f:4:53: '1g.5gb@': after @ write the memory slice"),
        ("{1g.5gb@x: 1}", "after @ write the memory slice"),
        ("{1g.5gb@-1: 1}", "after @ write the memory slice"),
        ("{1g.5gb@4@4: 1}", "after @ write the memory slice"),
        ('{"@4": 1}', "'' is not a MIG profile"),
        ("{1g.5gb@4: 2}", "'1g.5gb@4': only one 1g.5gb can start at memory slice 4"),
        ("{2c.3g.20gb@0: 1, 3g.20gb@0: 1}", "has 3 compute slices, not 5"),
        ("{1g.5gb@4: 0}", "all counts in mig-devices are 0"),
    ],
)
def test_an_invalid_pin_is_refused_with_its_location(devices: str, complaint: str) -> None:
    with pytest.raises(errors.ConfigError) as caught:
        layout_parser.parse(of_mig_devices(devices), source="f")
    assert complaint in caught.value.message


def test_pins_are_not_part_of_mig_parteds_format() -> None:
    read = layout_parser.parse(of_mig_devices("{1g.5gb@4: 1}"), source="f")
    assert str(read.extensions[0]).startswith("f:4:53: '1g.5gb@4' has a placement")


@pytest.mark.parametrize("product", samples.PRODUCTS)
@hypothesis.given(data=st.data())
def test_an_export_with_placements_restores_every_instance(
    product: str, data: st.DataObject
) -> None:
    before = data.draw(drawn_gpus.gpus(product, idle=False))
    now = data.draw(drawn_gpus.gpus(product))
    text = yaml_text.dump(
        layout_documents.render([layouts.export([before], name="x", has_placements=True)])
    )
    desired = selection.select(layout_parser.parse(text, source="f").layout("x"), [now])
    plan = planner.plan([now], desired)
    reached = driver_rules.execute(now, plan.steps)
    assert planner.plan([reached], desired).is_empty
    assert layouts.current(reached, has_placements=True) == layouts.current(
        before, has_placements=True
    )
    assert planner.plan([before], desired).is_empty


@pytest.mark.parametrize("product", samples.PRODUCTS)
@hypothesis.given(data=st.data())
def test_placements_are_accepted_exactly_where_possible(product: str, data: st.DataObject) -> None:
    specs = samples.PRODUCTS[product]
    by_name = {str(spec.profile): spec for spec in specs}
    names = st.sampled_from(sorted(by_name))
    pins = data.draw(st.sets(st.tuples(names, st.integers(0, 7)), max_size=3))
    free = data.draw(st.dictionaries(names, st.integers(1, 2), max_size=2))
    gpu = data.draw(drawn_gpus.gpus(product))
    desired = {gpu.uuid: samples.desired_gpu({f"{name}@{at}": 1 for name, at in pins} | free)}
    # Try every way, with sets of slices.
    free_specs = [by_name[name] for name, count in free.items() for _ in range(count)]
    menus = [[p for p in by_name[name].placements if p.start == at] for name, at in pins]
    menus += [list(spec.placements) for spec in free_specs]
    every = [spec.profile for spec in free_specs] + [by_name[name].profile for name, _ in pins]
    is_possible = driver_rules.pool_allows(gpu, every) and any(
        not any(one.overlaps(other) for one, other in itertools.combinations(way, 2))
        for way in itertools.product(*menus)
    )
    if is_possible:
        reached = driver_rules.execute(gpu, planner.plan([gpu], desired).steps)
        assert planner.plan([reached], desired).is_empty
    else:
        with pytest.raises(errors.LayoutError, match="does not fit"):
            planner.plan([gpu], desired)
