"""Pods of a busy minute on two nodes that are repartitioned to what they ask for.

Real are kube-apiserver and kube-scheduler, our agents and both replicas of our partitioner.
"""

import contextlib
import dataclasses
import random
import signal

import pytest

from mig_manager.sandbox.driver import states
from tests import waiting
from tests.cluster import clusters, device_watch, pods_of_a_day, sandbox_nodes
from tests.realnode import audit

pytestmark = pytest.mark.cluster

_PODS = 30
_PROFILES = {"1g.5gb": 12, "2g.10gb": 9, "3g.20gb": 6, "7g.40gb": 3}
_ARRIVAL_S = 14.0
_NEVER = pods_of_a_day.Job(name="never", profile="3g.40gb", at_s=1.0, run_s=1.0)
"""Of the A100 with 80 GB, which is not here."""
_TIMES = ("--quiet-s", "0.3", "--longest-wait-s", "1", "--cooldown-s", "0.5")
_OPTIONS = ("--mode", "act", "--max-unavailable", "100%", "--lease-duration-s", "5", *_TIMES)
_MOST_REQUESTS_PER_POD = 20.0


def jobs() -> list[pods_of_a_day.Job]:
    draw = random.Random(17)  # noqa: S311 - no secret
    names = [name for name, count in _PROFILES.items() for _ in range(count)]
    draw.shuffle(names)
    return [
        pods_of_a_day.Job(
            name=f"pod-{number:02}",
            profile=name,
            at_s=draw.uniform(0.0, _ARRIVAL_S),
            run_s=draw.uniform(1.0, 5.0),
        )
        for number, name in enumerate(names)
    ]


def test_every_pod_that_fits_is_placed_though_a_leader_is_killed_and_none_loses_its_device(
    real_cluster: clusters.Real,
) -> None:
    shape = sandbox_nodes.Shape(
        names=("node-a", "node-b"),
        spec="2xA100-SXM4-40GB",
        layouts=clusters.PACKAGED.read_text(encoding="utf-8"),
        latency=dataclasses.replace(states.REALISTIC, mode_with_reset_s=0.5),
        agent_options=("--custom-layouts",),
    )
    day, half_s = jobs(), _ARRIVAL_S / 2
    with contextlib.ExitStack() as exits:
        nodes = exits.enter_context(sandbox_nodes.running(real_cluster, shape))
        nodes.apply(dict.fromkeys(shape.names, "all-balanced"))
        exits.enter_context(sandbox_nodes.installed_partitioner(real_cluster))
        nodes.opt_in()
        leader = nodes.partitioner(*_OPTIONS)
        exits.callback(leader.end)
        exits.callback(nodes.partitioner(*_OPTIONS).end)
        watch = exits.enter_context(device_watch.watching(nodes))
        requests = audit.Log(real_cluster.server.audit_log)
        played = exits.enter_context(pods_of_a_day.Day(nodes.view))

        played.play([_NEVER, *(job for job in day if job.at_s < half_s)], end_s=half_s)
        leader.end(signal.SIGKILL)
        late = [job for job in day if job.at_s >= half_s]
        played.play(
            [dataclasses.replace(job, at_s=job.at_s - half_s) for job in late], end_s=half_s
        )
        waiting.until(
            lambda: played.has(lambda fate: fate.ended_s is not None or fate.job is _NEVER),
            "the end of every pod",
        )

    ends = {name: fate.end for name, fate in played.fates.items() if fate.end}
    assert ends == {}
    assert len(played.fates) == _PODS + 1
    assert played.fates[_NEVER.name].bound_s is None
    assert watch.looks > 0
    assert watch.losses == set()
    assert requests.evicted() == []
    asked = requests.requests(sandbox_nodes.PARTITIONER_USER).total() + requests.requests().total()
    assert 0 < asked <= _MOST_REQUESTS_PER_POD * _PODS
