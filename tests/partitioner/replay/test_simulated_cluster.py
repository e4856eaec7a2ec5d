"""The simulated cluster whose nodes the partitioner's real decision repartitions."""

import dataclasses

import hypothesis
import pytest
from hypothesis import strategies as st

from mig_manager.core.partitioning.decision import decisions
from mig_manager.partitioner.replay import simulated_cluster
from testkit import day, day_layouts

_END_S = 1200.0
_SMALL: day_layouts.Counts = (("1g.5gb", 7),)
_LARGE: day_layouts.Counts = (("7g.40gb", 1),)
_NODE = [_SMALL] * day.GPUS_EACH
_SCHEDULERS = list(simulated_cluster.Scheduler)


def job(name: str, profile: str, at_s: float, run_s: float, count: int = 1) -> day.Job:
    return day.Job(name=name, profile=profile, at_s=at_s, run_s=run_s, count=count)


def simulate(
    jobs: list[day.Job],
    layouts: list[day_layouts.Counts],
    limits: decisions.PartitionerLimits | None = None,
    scheduler: simulated_cluster.Scheduler = simulated_cluster.Scheduler.SPREAD,
) -> simulated_cluster.SimulationResult:
    cluster = day_layouts.cluster(layouts, scheduler, seed=1)
    return simulated_cluster.simulate(day_layouts.pods(jobs), cluster, end_s=_END_S, limits=limits)


def test_pods_wait_for_the_devices_of_a_fixed_layout() -> None:
    jobs = [job(f"p{n}", "7g.40gb", n, 100) for n in range(2)]
    jobs.append(job("never", "3g.20gb", 0, 1))

    result = simulate(jobs, [_LARGE, *_NODE[1:]])

    assert result.waits == {"p0": 0.0, "p1": 99.0, "never": None}
    assert result.changes == 0


def test_a_pod_gets_its_devices_by_a_change_of_the_node() -> None:
    limits = decisions.PartitionerLimits(prepare_for_s=0.0)
    result = simulate([job("p", "3g.20gb", 0, 10, 2)], _NODE, limits)

    times = simulated_cluster.SimulatedTimes()
    assert result.waits == {"p": times.quiet_s + times.begin_s + times.change_s}
    assert (result.changes, result.tainted_s, result.lost) == (1, times.change_s, 0)


def test_a_pod_that_recent_pods_resemble_finds_its_device_ready() -> None:
    jobs = [job(f"p{n}", "7g.40gb", 60 * n, 30) for n in range(1, 5)]
    jobs.append(job("last", "7g.40gb", 250, 30))
    layouts = [_LARGE, *_NODE[1:]]

    waits = [
        simulate(jobs, layouts, decisions.PartitionerLimits(prepare_for_s=seconds)).waits["last"]
        for seconds in (0.0, 60.0)
    ]

    times = simulated_cluster.SimulatedTimes()
    assert waits == [times.quiet_s + times.begin_s + times.change_s, 0.0]


@pytest.mark.parametrize("scheduler", _SCHEDULERS)
def test_schedulers_choose_the_node_that_their_score_prefers(
    scheduler: simulated_cluster.Scheduler,
) -> None:
    jobs = [job(f"p{n}", "1g.5gb", n, 1000) for n in range(56)]
    jobs.append(job("last", "1g.5gb", 60, 1, 56))

    waits = simulate(jobs, _NODE * 2, scheduler=scheduler).waits

    # All devices of one node are free only if the others were packed on the other node.
    is_packed = scheduler is simulated_cluster.Scheduler.PACKED
    assert (waits["last"] == 0.0) is is_packed


_HOUR_S = 3600.0
_LIFE_S = 600.0
_GPUS = 32
_FEW_LARGE: day.Mix = {"1g": 0.65, "2g": 0.22, "3g": 0.10, "7g": 0.03}
_LARGE_MIX: day.Mix = {"1g": 0.10, "2g": 0.15, "3g": 0.35, "7g": 0.40}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mix", "load"), [({0.0: _FEW_LARGE}, 0.9), ({0.0: _LARGE_MIX}, 0.75), (day.SHIFT, 0.75)]
)
def test_pods_wait_no_longer_than_for_the_best_fixed_layout(
    mix: dict[float, day.Mix], load: float
) -> None:
    fixed_s = ours_s = 0.0
    pods = round(load * _GPUS * _HOUR_S / _LIFE_S / day.mean_share(mix, day.PRODUCT))
    balanced: dict[day_layouts.Counts, int] = {
        (("3g.20gb", 1), ("2g.10gb", 1), ("1g.5gb", 2)): _GPUS
    }
    for seed in (1, 2, 3):
        jobs = day.jobs(seed=seed, pods=pods, day_s=_HOUR_S, gpus=_GPUS, load=load, mix=mix)
        best = day_layouts.best_fixed(jobs, gpus=_GPUS, end_s=_HOUR_S)
        mean_waits = []
        for layouts, limits in ((best, None), (balanced, decisions.PartitionerLimits())):
            cluster = day_layouts.cluster(
                day_layouts.spread(layouts), simulated_cluster.Scheduler.PACKED, seed=seed
            )
            result = simulated_cluster.simulate(
                day_layouts.pods(jobs), cluster, end_s=_HOUR_S, limits=limits
            )
            assert result.lost == 0
            mean_waits.append(day.mean(jobs, result.waits, end_s=_HOUR_S))
        fixed_s += mean_waits[0]
        ours_s += mean_waits[1]

    assert ours_s <= fixed_s


def test_no_instance_in_use_is_destroyed_in_a_busy_hour() -> None:
    jobs = day.jobs(seed=3, pods=120, day_s=_END_S, gpus=8, load=0.95)

    result = simulate(jobs, _NODE, decisions.PartitionerLimits(cooldown_s=20))

    assert result.changes > 3
    assert result.lost == 0
    assert len(result.waits) == len(jobs)


@hypothesis.given(
    pods=st.lists(
        st.tuples(
            st.sampled_from(["1g.5gb", "2g.10gb", "3g.20gb", "4g.20gb", "7g.40gb"]),
            st.integers(0, 900),
            st.integers(1, 900),
            st.integers(1, 2),
        ),
        min_size=1,
        max_size=40,
    ),
    scheduler=st.sampled_from(_SCHEDULERS),
    times=st.builds(
        simulated_cluster.SimulatedTimes,
        begin_s=st.sampled_from([0.1, 5.0, 60.0]),
        change_s=st.sampled_from([1.0, 30.0]),
        max_recheck_s=st.sampled_from([5.0, 300.0]),
    ),
)
def test_no_replay_destroys_an_instance_in_use(
    pods: list[tuple[str, int, int, int]],
    scheduler: simulated_cluster.Scheduler,
    times: simulated_cluster.SimulatedTimes,
) -> None:
    jobs = [
        job(f"p{number}", profile, at_s, run_s, count)
        for number, (profile, at_s, run_s, count) in enumerate(pods)
    ]
    cluster = dataclasses.replace(day_layouts.cluster(_NODE, scheduler, seed=1), times=times)

    result = simulated_cluster.simulate(
        day_layouts.pods(jobs),
        cluster,
        end_s=_END_S,
        limits=decisions.PartitionerLimits(cooldown_s=5),
    )

    assert result.lost == 0
    assert all(wait is None or wait >= 0 for wait in result.waits.values())


def test_layouts_are_spread_over_the_nodes() -> None:
    spread = day_layouts.spread({_SMALL: 8, _LARGE: 8})

    assert spread[:8].count(_SMALL) == spread[8:].count(_SMALL) == 4
