"""Where instances lie: compute instances in GPU instances, and these on the GPU."""

import dataclasses
import itertools

import hypothesis
import pytest
from hypothesis import strategies as st

from mig_manager.core import model
from mig_manager.core.planner import packing, placement
from tests.rigs.node import driver_rules, samples
from tests.rigs.planner import oracle
from tests.unit import drawn_gpus


@pytest.mark.parametrize(
    ("slices", "starts"),
    [
        (1, {1: [0]}),
        (2, {1: [0, 1], 2: [0]}),
        (3, {1: [0, 1, 2], 2: [0], 3: [0]}),
        (4, {1: [0, 1, 2, 3], 2: [0, 2], 4: [0]}),
        (7, {1: [0, 1, 2, 3, 4, 5, 6], 2: [0, 2, 4], 3: [0, 4], 4: [0], 7: [0]}),
    ],
)
def test_the_sizes_and_spans_that_exist_are_those_that_drivers_list(
    slices: int, starts: dict[int, list[int]]
) -> None:
    assert [size for size in range(9) if packing.exists(size, slices)] == list(starts)
    for size, expected in starts.items():
        assert [span.start for span in packing.spans(size, slices)] == expected
        assert driver_rules.spans(size, slices) == expected


@pytest.mark.parametrize(
    ("counts", "occupied", "starts"),
    [
        pytest.param((1, 0, 0), 0, [2], id="in a 3g, a pair of slices stays free"),
        pytest.param((1, 0, 0, 0), 0, [0], id="in a 4g"),
        pytest.param((1, 0, 0, 0, 0, 0, 0), 0, [6], id="in a 7g"),
        pytest.param((2, 0, 0), 0b010, [0, 2], id="around an occupied slice"),
        pytest.param((0, 1, 0), 0b001, None, id="no room"),
    ],
)
def test_small_compute_instances_leave_the_large_ones_room(
    counts: tuple[int, ...], occupied: int, starts: list[int] | None
) -> None:
    placed = packing.fit(counts, occupied)
    assert (placed and [span.start for span in placed]) == starts


@pytest.mark.parametrize("slices", [2, 3, 4, 7])
def test_every_possible_packing_is_found(slices: int) -> None:
    possible = {
        tuple([size for size, _ in inside].count(size) for size in range(1, slices + 1))
        for inside in oracle.insides(slices)
    }
    sizes = [packing.exists(size, slices) for size in range(1, slices + 1)]
    ranges = [range(slices // size + 1 if has else 1) for size, has in enumerate(sizes, start=1)]
    for counts in itertools.product(*ranges):
        placed = packing.fit(counts)
        assert (placed is not None) == (counts in possible)
        slots = [slot for span in placed or () for slot in range(span.start, span.end)]
        assert len(slots) == len(set(slots))


@pytest.mark.parametrize("slices", [2, 3, 4, 7])
@hypothesis.given(data=st.data())
def test_no_packing_needs_fewer_gpu_instances(slices: int, data: st.DataObject) -> None:
    fillings = [inside for inside in oracle.insides(slices) if inside]
    drawn = data.draw(st.lists(st.sampled_from(fillings), min_size=1, max_size=7 // slices or 1))
    sizes = [size for inside in drawn for size, _ in inside]
    counts = tuple(sizes.count(size + 1) for size in range(slices))
    bins = packing.bins(counts)
    assert -(-packing.total_slices(counts) // slices) <= len(bins) <= len(drawn)
    assert sorted(span.size for content in bins for span in content) == sorted(sizes)


@pytest.mark.parametrize(
    ("at", "prices"),
    [
        pytest.param(2, {(0, 1): 5, (1, 0): 1}, id="beside-it-is-free"),
        pytest.param(0, {(0, 1): 5, (1, 0): 3, (1, 1): 2}, id="it-overlaps"),
    ],
)
def test_more_new_gpu_instances_are_an_option_only_where_they_save_calls(
    at: int, prices: dict[tuple[int, int], int]
) -> None:
    tenant = packing.Occupant(size=1, span=model.Placement(at, 1), use=0)
    options = packing.options([[tenant]], (1, 1, 0), maximum=2)
    assert {(len(o.stays), len(o.fresh)): o.cost for o in options} == prices


def test_devices_beyond_any_gpu_have_no_options() -> None:
    assert packing.options([], (10**9,), maximum=7) == []
    assert packing.options([], (0, 3, 0), maximum=2) == []


def test_compute_instances_of_a_foreign_profile_are_never_kept() -> None:
    tenant = packing.Occupant(size=0, span=None, use=0)
    (end, stay) = packing.options([[tenant]], (1,), maximum=7)
    assert (end.cost, end.stays) == (4, ())
    assert stay.stays == ((0, packing.Content(kept=(), added=(model.Placement(0, 1),))),)


def test_the_first_of_two_profiles_with_one_name_is_used() -> None:
    twin = samples.A100[6]
    first = dataclasses.replace(twin, enum_index=1, profile_id=99)
    assert placement.Capacity([twin, first]).by_profile[twin.profile] == first


def test_a_profile_that_the_driver_does_not_list_has_no_room() -> None:
    capacity, other = placement.Capacity(samples.A100), samples.profile("1g.6gb")
    assert (capacity.by_profile.get(other), capacity.maximum(other)) == (None, 0)
    assert capacity.engines([other]) == model.Engines()
    assert placement.Capacity([]).memory_slices == 0
    assert placement.Capacity([]).best([], {}) is not None


@pytest.mark.parametrize("product", samples.PRODUCTS)
@hypothesis.given(data=st.data())
def test_the_room_of_any_layout_equals_exhaustive_search(
    product: str, data: st.DataObject
) -> None:
    gpu = data.draw(drawn_gpus.gpus(product, splits=False))
    capacity = placement.Capacity(gpu.profiles or ())
    occupied = packing.slices(gi.placement for gi in gpu.gpu_instances)
    drawn = capacity.engines(gi.profile for gi in gpu.gpu_instances)
    assert capacity.room(occupied, drawn) == oracle.room(gpu, oracle.state_of(gpu))
