"""The day that the partitioner's bench plays, and what it is compared with."""

import collections

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testkit import bounds, day, day_layouts, traces

GPUS = 2
DAY_S = 240.0

small_days = st.builds(
    lambda seed, pods, load: day.jobs(seed=seed, pods=pods, day_s=DAY_S, gpus=GPUS, load=load),
    st.integers(0, 1000),
    st.integers(1, 20),
    st.sampled_from([0.3, 0.8, 1.5]),
)


def job(name: str, profile: str, at_s: float, run_s: float) -> day.Job:
    return day.Job(name=name, profile=profile, at_s=at_s, run_s=run_s)


def test_a_day_is_reproducible_and_scales_with_its_length() -> None:
    short, long = (
        day.jobs(seed=1, pods=50, day_s=seconds, gpus=8, load=0.7) for seconds in (60.0, 600.0)
    )

    assert [each.profile for each in short] == [each.profile for each in long]
    assert [each.run_s * 10 for each in short] == pytest.approx([each.run_s for each in long])
    assert day.jobs(seed=2, pods=50, day_s=60.0, gpus=8, load=0.7) != short


def test_the_pods_of_a_day_keep_the_requested_share_of_the_gpus() -> None:
    jobs = day.jobs(seed=1, pods=400, day_s=DAY_S, gpus=32, load=0.7)

    sizes = day.sizes()
    kept = sum(min(j.run_s, DAY_S - j.at_s) / sizes[j.profile].most for j in jobs)
    assert kept / (32 * DAY_S) == pytest.approx(0.7, abs=0.01)


def test_endless_pods_request_their_share_and_come_at_equal_gaps() -> None:
    jobs = day.endless(["7g", "2x3g"] * 9, day_s=24, gpus=4, load=1, product=day.PRODUCT)

    assert [(each.profile, each.count) for each in jobs[:2]] == [("7g.40gb", 1), ("3g.20gb", 2)]
    assert [each.at_s for each in jobs] == pytest.approx([0, 5.75, 11.5, 17.25])


def test_a_fixed_layout_serves_each_profile_in_the_order_of_the_pods() -> None:
    jobs = [job("a", "1g.5gb", 0, 10), job("b", "1g.5gb", 1, 5), job("c", "7g.40gb", 2, 1)]

    waits = day_layouts.fixed_waits(jobs, {"1g.5gb": 1}, end_s=100)

    assert waits == {"a": 0.0, "b": 9.0, "c": None}
    assert day.mean(jobs, waits, end_s=101) == pytest.approx((0.0 + 9.0 + 99.0) / 3)


def test_instant_repartitioning_waits_only_for_devices_in_use() -> None:
    jobs = [job("a", "1g.5gb", 0, 10), job("b", "7g.40gb", 1, 5), job("c", "3g.20gb", 2, 1)]

    waits = bounds.instant(jobs, gpus=1, end_s=100)

    assert waits == {"a": 0.0, "b": 9.0, "c": 0.0}


def test_least_wait_is_zero_if_all_pods_fit() -> None:
    jobs = [job(str(n), "7g.40gb", 0, 10) for n in range(3)]

    assert bounds.least_wait(jobs, 1.0, gpus=3, end_s=100) == 0.0
    assert bounds.least_wait(jobs, 1.0, gpus=2, end_s=100) == pytest.approx(10.0, abs=0.01)
    assert bounds.least_wait(jobs, 0.6, gpus=2, end_s=100) == 0.0


@settings(deadline=None, max_examples=50)
@given(small_days)
def test_nothing_that_is_computed_beats_the_bound(jobs: list[day.Job]) -> None:
    best = day_layouts.devices_of(day_layouts.best_fixed(jobs, gpus=GPUS, end_s=DAY_S))
    computed = (
        bounds.instant(jobs, gpus=GPUS, end_s=DAY_S),
        day_layouts.fixed_waits(jobs, best, end_s=DAY_S),
    )
    for share in (0.5, 0.9, 1.0):
        bound = bounds.least_wait(jobs, share, gpus=GPUS, end_s=DAY_S)
        assert all(bound <= day.quantile(waits, share) + 1e-6 for waits in computed)


@settings(deadline=None, max_examples=25)
@given(small_days)
def test_the_best_fixed_layout_is_at_least_as_good_as_one_for_all_gpus(
    jobs: list[day.Job],
) -> None:
    def count_unplaced(layout: collections.Counter[day_layouts.Counts]) -> int:
        waits = day_layouts.fixed_waits(jobs, day_layouts.devices_of(layout), end_s=DAY_S)
        return sum(wait is None for wait in waits.values())

    best = count_unplaced(
        collections.Counter(day_layouts.best_fixed(jobs, gpus=GPUS, end_s=DAY_S))
    )
    same = [
        count_unplaced(collections.Counter({counts: GPUS})) for counts in day_layouts.layouts_of()
    ]
    assert best <= min(same)


def test_a_trace_is_mapped_by_compute_or_by_memory() -> None:
    text = """name,num_gpu,gpu_milli,creation_time,deletion_time,scheduled_time
a,0,0,1,2,1
b,1,150,5,25,10
c,1,500,3,9,
d,2,1000,4,104,4
"""
    by_compute, by_memory = (traces.parse_trace(text, mapped) for mapped in traces.Mapped)

    assert [row.request for row in by_compute] == ["4g", "2x7g", "2g"]
    assert [row.request for row in by_memory] == ["3g", "2x7g", "2g"]
    assert [(row.at, row.life) for row in by_compute] == [(3.0, 6.0), (4.0, 100.0), (5.0, 15.0)]


def test_the_synthetic_trace_has_the_marginals_of_the_real_one() -> None:
    rows = traces.parse_trace(traces.synthetic_trace(1, 4000), traces.Mapped.COMPUTE)

    whole = sum(row.request == "7g" for row in rows) / len(rows)
    assert whole == pytest.approx((3986 + 1406) / 7064, abs=0.03)
    assert sorted(row.life for row in rows)[2000] == pytest.approx(539, rel=0.15)


def test_no_choice_of_placement_beats_the_bound_of_the_mean() -> None:
    jobs = day.jobs(seed=1, pods=60, day_s=DAY_S, gpus=GPUS, load=1.2)

    bound = bounds.least_mean(jobs, gpus=GPUS, end_s=DAY_S)
    assert bound > 0
    for choice in bounds.Choice:
        waits = bounds.instant(jobs, gpus=GPUS, end_s=DAY_S, choice=choice)
        assert day.mean(jobs, waits, end_s=DAY_S) >= bound


def test_least_fragmentation_keeps_room_for_large_devices() -> None:
    jobs = [job("a", "2g.10gb", 0, 50), job("b", "3g.20gb", 1, 50), job("c", "1g.5gb", 2, 50)]

    waits = bounds.instant(jobs, gpus=1, end_s=100, choice=bounds.Choice.LEAST_FRAGMENTED)

    assert waits == {"a": 0.0, "b": 0.0, "c": 0.0}


def test_all_devices_of_a_pod_are_on_one_node() -> None:
    pair = day.Job(name="pair", profile="7g.40gb", at_s=1, run_s=1, count=8)
    jobs = [job("one", "7g.40gb", 0, 10), pair]

    assert bounds.instant(jobs, gpus=8, end_s=100)["pair"] == 9.0
    assert bounds.instant(jobs, gpus=16, end_s=100)["pair"] == 0.0
