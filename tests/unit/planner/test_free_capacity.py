"""What could still be created on a GPU, against everything that could be put there."""

import hypothesis
import pytest
from hypothesis import strategies as st

from mig_manager.core import model
from mig_manager.core.planner import free_capacity, planner
from tests.rigs.node import driver_rules, samples
from tests.rigs.planner import oracle
from tests.unit import drawn_gpus


def placements(*texts: str) -> frozenset[model.Placement]:
    return frozenset(model.Placement(*map(int, text.split(":"))) for text in texts)


def free_of(gpu: model.Gpu, *in_use: str) -> free_capacity.FreeCapacity:
    free = free_capacity.measure(gpu, placements(*in_use))
    assert free is not None
    return free


def counts_by_name(free: free_capacity.FreeCapacity) -> dict[str, int]:
    return {str(profile): count for profile, count in free.room.items() if count}


def some_in_use(data: st.DataObject, gpu: model.Gpu) -> frozenset[model.Placement]:
    return frozenset(gi.placement for gi in gpu.gpu_instances if data.draw(st.booleans()))


@pytest.mark.parametrize("product", samples.PRODUCTS)
@hypothesis.given(data=st.data())
def test_free_devices_of_every_product_equal_exhaustive_search(
    product: str, data: st.DataObject
) -> None:
    gpu = data.draw(drawn_gpus.gpus(product, splits=False))
    in_use = some_in_use(data, gpu)
    kept = {
        (gi.profile, gi.placement.start): frozenset[tuple[int, int]]()
        for gi in gpu.gpu_instances
        if gi.placement in in_use
    }
    occupied = {each for place in in_use for each in range(place.start, place.end)}
    every = {
        each
        for spec in gpu.profiles or ()
        for place in spec.placements
        for each in range(place.start, place.end)
    }
    possible = [
        set(range(place.start, place.end))
        for spec in gpu.profiles or ()
        for place in spec.placements
        if not occupied.intersection(range(place.start, place.end))
        and driver_rules.pool_allows(gpu, [spec.profile, *(profile for profile, _ in kept)])
    ]

    free = free_capacity.measure(gpu, in_use)

    assert free is not None
    expected = dict(
        zip((s.profile for s in oracle.by_size(gpu)), oracle.room(gpu, kept), strict=True)
    )
    assert free.room == expected
    assert free.free_slices == len(every - occupied)
    assert free.stranded_slices == len(every - occupied - set[int]().union(*possible))
    assert free.largest_slices == max(map(len, possible), default=0)
    assert 0 <= free.fragmentation <= 1


@pytest.mark.parametrize("product", samples.PRODUCTS)
@hypothesis.given(data=st.data())
def test_the_planner_creates_every_device_that_the_room_promises(
    product: str, data: st.DataObject
) -> None:
    # Only an instance with a compute instance can be desired, and so be kept.
    gpu = data.draw(drawn_gpus.gpus(product, splits=False, idle=False))
    in_use = some_in_use(data, gpu)
    kept = [gi for gi in gpu.gpu_instances if gi.placement in in_use]
    pins = {model.Pin(profile=gi.profile, start=gi.placement.start): 1 for gi in kept}
    free = free_capacity.measure(gpu, in_use)

    assert free is not None
    for profile, count in free.room.items():
        desired = model.DesiredGpu.of(model.MigMode.ENABLED, {profile: count}, pins)
        plan = planner.plan([gpu], {gpu.uuid: desired})
        assert plan.destroyed_uuids.isdisjoint(
            ci.uuid for gi in kept for ci in gi.compute_instances
        )


@pytest.mark.parametrize(
    ("instances", "in_use", "profiles", "numbers"),
    [
        pytest.param(
            ("3g.20gb@0", "2g.10gb@4", "1g.5gb@6"),
            ("4:2",),
            {"4g.20gb": 1, "3g.20gb": 1, "2g.10gb": 2, "1g.10gb": 3, "1g.5gb+me": 1, "1g.5gb": 5},
            (6, 0, 4, 0.33),
            id="only instances in use keep their slices",
        ),
        pytest.param(
            tuple(f"1g.5gb@{start}" for start in range(7)),
            tuple(f"{start}:1" for start in range(7)),
            {},
            (1, 1, 0, 1.0),
            id="a slice that no profile can use is stranded",
        ),
        pytest.param(
            ("1g.5gb+me@0",),
            ("0:1",),
            {"3g.20gb": 1, "2g.10gb": 2, "1g.10gb": 3, "1g.5gb": 6},
            (7, 0, 4, 0.43),
            id="media engines in use leave no room for another such instance",
        ),
        pytest.param(("7g.40gb@0",), ("0:8",), {}, (0, 0, 0, 0.0), id="full"),
    ],
)
def test_the_room_is_the_rest_beside_instances_in_use(
    instances: tuple[str, ...],
    in_use: tuple[str, ...],
    profiles: dict[str, int],
    numbers: tuple[int, int, int, float],
) -> None:
    free = free_of(samples.gpu(samples.A100, *instances), *in_use)

    assert counts_by_name(free) == profiles
    fragmentation = round(free.fragmentation, 2)
    assert (free.free_slices, free.stranded_slices, free.largest_slices, fragmentation) == numbers


def test_an_empty_gpu_is_not_fragmented() -> None:
    assert free_of(samples.gpu(samples.A100)).fragmentation == 0


def test_the_room_is_unknown_if_a_missing_instance_is_in_use() -> None:
    assert free_capacity.measure(samples.gpu(samples.A100, "2g.10gb@0"), placements("0:1")) is None
    assert free_capacity.measure(samples.gpu(samples.A100), placements("0:8")) is None


@pytest.mark.parametrize(
    "gpu",
    [
        samples.gpu(samples.A100, mode=model.MigMode.DISABLED),
        samples.gpu(samples.A100, pending=model.MigMode.DISABLED),
        samples.gpu(None),
    ],
    ids=["disabled", "pending", "unknown profiles"],
)
def test_a_gpu_without_mig_mode_or_known_profiles_has_no_room(gpu: model.Gpu) -> None:
    assert free_of(gpu) == free_capacity.NONE
