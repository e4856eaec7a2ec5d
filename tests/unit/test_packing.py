import itertools

import hypothesis
import pytest
from hypothesis import strategies as st

from mig_manager.core import model
from mig_manager.core.planner import packing, placement
from tests.unit import machine, oracle


@pytest.mark.parametrize(
    ("slices", "sizes"),
    [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (4, [1, 2, 4]), (7, [1, 2, 3, 4, 7])],
)
def test_the_sizes_that_exist_are_those_that_drivers_list(slices: int, sizes: list[int]) -> None:
    assert [s for s in range(9) if packing.exists(s, slices)] == sizes


@pytest.mark.parametrize(
    ("size", "slices", "starts"),
    [
        (1, 7, [0, 1, 2, 3, 4, 5, 6]),
        (2, 7, [0, 2, 4]),
        (3, 7, [0, 4]),
        (4, 7, [0]),
        (7, 7, [0]),
        (2, 3, [0]),
        (3, 3, [0]),
        (2, 4, [0, 2]),
        (1, 2, [0, 1]),
    ],
)
def test_spans_lie_on_the_grid_of_eight_slots(size: int, slices: int, starts: list[int]) -> None:
    assert [span.start for span in packing.spans(size, slices)] == starts
    assert starts == machine.spans(size, slices)


def test_small_compute_instances_leave_the_large_ones_room() -> None:
    assert packing.fit((1, 0, 0)) == (model.Placement(2, 1),)
    assert packing.fit((1, 0, 0, 0)) == (model.Placement(0, 1),)
    assert packing.fit((1, 0, 0, 0, 0, 0, 0)) == (model.Placement(6, 1),)


def test_occupied_slices_are_not_used_again() -> None:
    assert packing.fit((0, 1, 0), 0b001) is None
    assert packing.fit((2, 0, 0), 0b010) == (model.Placement(0, 1), model.Placement(2, 1))


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
        taken = [slot for span in placed or () for slot in range(span.start, span.end)]
        assert len(taken) == len(set(taken))


@pytest.mark.parametrize("slices", [2, 3, 4, 7])
@hypothesis.given(data=st.data())
@hypothesis.settings(deadline=None, max_examples=50)
def test_no_packing_needs_fewer_gpu_instances(slices: int, data: st.DataObject) -> None:
    fillings = [inside for inside in oracle.insides(slices) if inside]
    chosen = data.draw(st.lists(st.sampled_from(fillings), min_size=1, max_size=7 // slices or 1))
    sizes = [size for inside in chosen for size, _ in inside]
    counts = tuple(sizes.count(size + 1) for size in range(slices))
    bins = packing.bins(counts)
    assert len(bins) <= len(chosen)
    assert len(bins) >= -(-packing.total_slices(counts) // slices)
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
    tenant = packing.Occupant(size=1, span=model.Placement(at, 1), is_busy=False)
    options = packing.options([[tenant]], (1, 1, 0), most=2)
    assert {(len(o.stays), len(o.fresh)): o.cost for o in options} == prices


def test_the_price_of_an_option_counts_what_is_busy_apart() -> None:
    tenant = packing.Occupant(size=1, span=model.Placement(0, 1), is_busy=True)
    options = packing.options([[tenant]], (1, 1, 0), most=2)
    assert sorted((o.busy, o.cost) for o in options) == [(0, 2), (1, 3), (1, 5)]


def test_devices_beyond_any_gpu_have_no_options() -> None:
    assert packing.options([], (10**9,), most=7) == []
    assert packing.options([], (0, 3, 0), most=2) == []


def test_compute_instances_of_a_foreign_profile_are_never_kept() -> None:
    tenant = packing.Occupant(size=0, span=None, is_busy=False)
    (end, stay) = packing.options([[tenant]], (1,), most=7)
    assert (end.cost, end.stays) == (4, ())
    assert stay.stays == ((0, packing.Content(kept=(), added=(model.Placement(0, 1),))),)


def test_masks_count_slices_from_the_lowest_bit() -> None:
    assert placement.mask(model.Placement(2, 3)) == 0b11100
