import hypothesis
import pytest
from hypothesis import strategies as st

from mig_manager.core import model
from mig_manager.core.planner import placement
from tests.unit import layouts, oracle, samples


def counts(devices: dict[str, int]) -> dict[model.Profile, int]:
    return {samples.profile(name): count for name, count in devices.items()}


def starts(arrangement: placement.Arrangement | None) -> list[tuple[str, int]]:
    assert arrangement
    return [(str(profile), place.start) for profile, place in arrangement.placed]


@pytest.mark.parametrize(
    ("product", "most"),
    [
        ("A100", {"7g.40gb": 1, "4g.20gb": 1, "3g.20gb": 2, "2g.10gb": 3, "1g.10gb": 4}),
        ("A100", {"1g.5gb": 7, "1g.5gb+me": 1}),
        ("H100", {"7g.80gb": 1, "4g.40gb": 1, "3g.40gb": 2, "2g.20gb": 3, "1g.20gb": 4}),
        ("H100", {"1g.10gb": 7, "1g.10gb+me": 1}),
        ("A30", {"4g.24gb": 1, "2g.12gb": 2, "2g.12gb+me": 1, "1g.6gb": 4, "1g.6gb+me": 1}),
        ("RTX6000", {"1g.24gb": 4, "1g.24gb+me": 1, "1g.24gb+gfx": 4, "1g.24gb-me": 4}),
        ("RTX6000", {"1g.24gb+me.all": 1, "2g.48gb+me.all": 1, "2g.48gb-me": 2}),
        ("RTX6000", {"2g.48gb": 2, "2g.48gb+gfx": 2, "4g.96gb": 1, "4g.96gb+gfx": 1}),
    ],
)
def test_the_published_maximum_of_each_profile_follows_from_slices_and_engines(
    product: str, most: dict[str, int]
) -> None:
    known = placement.Capacity(samples.PRODUCTS[product])
    assert {name: known.most(samples.profile(name)) for name in most} == most


def test_profiles_are_ranked_by_memory_slices_and_then_by_gpu_slices() -> None:
    names = [str(spec.profile) for spec in placement.Capacity(reversed(samples.A100)).specs]
    assert names == ["7g.40gb", "4g.20gb", "3g.20gb", "2g.10gb", "1g.10gb", "1g.5gb+me", "1g.5gb"]


def test_the_first_of_two_profiles_with_one_name_is_used() -> None:
    twin = samples.A100[6]
    other = type(twin)(
        profile=twin.profile,
        enum_index=1,
        profile_id=99,
        memory_mib=twin.memory_mib,
        multiprocessors=twin.multiprocessors,
        max_instances=1,
        engines=twin.engines,
        placements=twin.placements,
    )
    found = placement.Capacity([twin, other]).find(twin.profile)
    assert found
    assert found.profile_id == 99


def test_an_unknown_profile_has_no_room_and_needs_no_engines() -> None:
    capacity = placement.Capacity(samples.A100)
    other = samples.profile("1g.6gb")
    assert capacity.find(other) is None
    assert capacity.most(other) == 0
    assert capacity.drawn([other]) == model.Engines()


@pytest.mark.parametrize(
    ("new", "expected"),
    [
        ({"1g.5gb": 1}, [("1g.5gb", 6)]),
        ({"2g.10gb": 1}, [("2g.10gb", 4)]),
        ({"3g.20gb": 1}, [("3g.20gb", 4)]),
        ({"1g.10gb": 1}, [("1g.10gb", 6)]),
        ({"1g.5gb": 2, "3g.20gb": 1}, [("3g.20gb", 4), ("1g.5gb", 0), ("1g.5gb", 1)]),
        (
            {"1g.5gb": 1, "1g.5gb+me": 1, "1g.10gb": 1},
            [("1g.10gb", 6), ("1g.5gb+me", 4), ("1g.5gb", 5)],
        ),
    ],
)
def test_new_instances_go_where_the_largest_profiles_lose_least(
    new: dict[str, int], expected: list[tuple[str, int]]
) -> None:
    assert starts(placement.Capacity(samples.A100).best([], counts(new))) == expected


def test_no_arrangement_exists_without_enough_engines() -> None:
    capacity = placement.Capacity(samples.A100)
    fixed = [(samples.profile("1g.5gb+me"), model.Placement(0, 1))]
    assert capacity.best(fixed, counts({"1g.5gb+me": 1})) is None
    assert capacity.best(fixed, counts({"1g.5gb": 6})) is not None


def test_no_arrangement_exists_beside_overlapping_instances() -> None:
    capacity = placement.Capacity(samples.A100)
    fixed = [(samples.profile("1g.5gb"), model.Placement(start, 1)) for start in (1, 5)]
    assert capacity.best(fixed, counts({"3g.20gb": 1})) is None


def test_a_gpu_without_listed_placements_has_room_for_nothing() -> None:
    capacity = placement.Capacity([])
    assert capacity.memory_slices == 0
    assert capacity.best([], {}) is not None


@pytest.mark.parametrize("product", samples.PRODUCTS)
@hypothesis.given(data=st.data())
@hypothesis.settings(deadline=None, max_examples=40)
def test_the_room_of_any_layout_equals_exhaustive_search(
    product: str, data: st.DataObject
) -> None:
    gpu = data.draw(layouts.gpus(product, splits=False))
    known = placement.Capacity(gpu.profiles or ())
    occupied = placement.slices(gi.placement for gi in gpu.gpu_instances)
    drawn = known.drawn(gi.profile for gi in gpu.gpu_instances)
    assert known.room(occupied, drawn) == oracle.room(gpu, oracle.state_of(gpu))


@pytest.mark.parametrize("product", samples.PRODUCTS)
@hypothesis.given(data=st.data())
@hypothesis.settings(deadline=None, max_examples=60)
def test_instances_that_stay_and_new_ones_share_no_slice(
    product: str, data: st.DataObject
) -> None:
    there = data.draw(layouts.gpus(product, splits=False))
    known = placement.Capacity(there.profiles or ())
    placed = [(gi.profile, gi.placement) for gi in there.gpu_instances]
    cut = data.draw(st.integers(0, len(placed)))
    fixed, moved = placed[:cut], placed[cut:]
    new: dict[model.Profile, int] = {}
    for profile, _ in moved:
        new[profile] = new.get(profile, 0) + 1
    arrangement = known.best(fixed, new)
    assert arrangement
    assert len(arrangement.placed) == len(moved)
    used = [
        slot
        for _, place in (*fixed, *arrangement.placed)
        for slot in range(place.start, place.end)
    ]
    assert len(used) == len(set(used))
