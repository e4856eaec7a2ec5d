"""Pods of a busy minute on two nodes that are repartitioned to what they ask for.

Real are kube-apiserver and kube-scheduler, our agents and both replicas of our partitioner.
"""

import contextlib
import dataclasses
import random
import signal
from collections.abc import Mapping

import pytest

from mig_manager.sandbox.driver import states
from mig_manager.sandbox.node import objects
from testkit import day
from tests.rigs import waiting
from tests.rigs.cluster import api_servers, audit
from tests.rigs.stage import agent_stage, device_watch, pods_of_a_day, sandbox_nodes

pytestmark = pytest.mark.cluster

_HALF_S = 7.0
_MORNING = {"1g.5gb": 15}  # more at once than the first layout has
_EVENING = {"2g.10gb": 9, "3g.20gb": 4, "7g.40gb": 2}
_NEVER = day.Job(name="never", profile="3g.40gb", at_s=1.0, run_s=1.0)
"""Of the A100 with 80 GB, which is not here."""
_TIMES = ("--quiet-s", "0.3", "--longest-wait-s", "1", "--cooldown-s", "0.5")
_OPTIONS = ("--mode", "act", "--max-unavailable", "100%", *_TIMES)
_MAX_REQUESTS = {"partitioner": 2.0, "agents": 15.0}  # for each pod


def jobs(profiles: Mapping[str, int]) -> list[day.Job]:
    draw = random.Random(17)  # noqa: S311 - no secret
    return [
        day.Job(
            name=f"pod-{profile}-{number}",
            profile=profile,
            at_s=draw.uniform(0.0, _HALF_S),
            run_s=draw.uniform(3.0, 6.0),
        )
        for profile, count in profiles.items()
        for number in range(count)
    ]


def test_pods_that_fit_are_placed_and_keep_devices_though_a_leader_dies(
    real_cluster: api_servers.EnvtestCluster,
) -> None:
    shape = sandbox_nodes.NodeShape(
        names=("node-a", "node-b"),
        spec="2xA100-SXM4-40GB",
        layouts=agent_stage.PACKAGED.read_text(encoding="utf-8"),
        latency=dataclasses.replace(states.REALISTIC, mode_with_reset_s=0.5),
        agent_options=("--custom-layouts",),
    )
    with contextlib.ExitStack() as exits:
        nodes = exits.enter_context(sandbox_nodes.running(real_cluster, shape))
        nodes.apply(dict.fromkeys(shape.names, "all-balanced"))
        exits.enter_context(sandbox_nodes.installed_partitioner(real_cluster))
        nodes.opt_in()
        leader = nodes.partitioner(*_OPTIONS)
        exits.callback(leader.end)
        waiting.until(lambda: leases(real_cluster) != [], "a leader")
        other = nodes.partitioner(*_OPTIONS)
        exits.callback(other.end)
        watch = exits.enter_context(device_watch.watching(nodes.watched_nodes()))
        requests = audit.Log(real_cluster.server.audit_log)
        played = exits.enter_context(pods_of_a_day.Day(nodes.cluster))

        played.create_on_time([_NEVER, *jobs(_MORNING)], end_s=_HALF_S)
        leader.end(signal.SIGKILL)
        # Its Lease keeps the other one waiting for most of a minute, which is tested elsewhere.
        real_cluster.kube.delete(f"{api_servers.LEASES}/{leases(real_cluster)[0]}")
        played.create_on_time(jobs(_EVENING), end_s=_HALF_S)
        waiting.until(
            lambda: played.has(lambda fate: fate.ended_s is not None or fate.job is _NEVER),
            "the end of every pod",
        )
        events = real_cluster.kube.get(api_servers.EVENTS)["items"]
        assert not other.has_ended
        counts = requests.requests(sandbox_nodes.PARTITIONER_USER)
        asked_by_agents = requests.requests()

    assert {name: fate.end for name, fate in played.fates.items() if fate.end} == {}
    assert played.fates[_NEVER.name].bound_s is None
    assert watch.checks > 0
    assert watch.losses == set()
    assert requests.evicted_pods() == []
    assert counts["patch nodes"] > 0
    placed = len(played.fates) - 1
    assert counts.total() <= _MAX_REQUESTS["partitioner"] * placed
    assert asked_by_agents.total() <= _MAX_REQUESTS["agents"] * placed
    impossible = [each for each in events if each["reason"] == "NoRoomPossible"]
    assert {each["involvedObject"]["name"] for each in impossible} == {_NEVER.name}
    # Each leader says it once.
    assert len(impossible) <= 2


def leases(real: api_servers.EnvtestCluster) -> list[str]:
    return [objects.name(each) for each in real.kube.get(api_servers.LEASES)["items"]]
