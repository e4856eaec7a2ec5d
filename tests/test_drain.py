"""One drain at a time, over pods in memory."""

import dataclasses
import itertools

import pytest

from mig_manager import drain, errors, ports
from mig_manager.core import cluster, extras
from mig_manager.core import pace as pacing
from mig_manager.core import policy as policies
from mig_manager.sandbox import hardware
from tests import fakes

DOOMED = "MIG-doomed"


def empty() -> fakes.World:
    return fakes.World(gpus=(hardware.template(hardware.find("A100-SXM4-40GB"), 0),))


def holder(world: fakes.World, name: str = "train", **fields: object) -> str:
    return world.add_pod(name, devices=frozenset({DOOMED}), **fields)


def drained(
    world: fakes.World,
    *,
    policy: policies.Policy | None = None,
    affected: frozenset[str] = frozenset({DOOMED}),
    telemetry: ports.Telemetry | None = None,
) -> int:
    return prepared(world, policy=policy, affected=affected, telemetry=telemetry).run(
        drain.survey(world.workloads, world.allocations),
        fakes.FakeWish(world.clock, replaced=False),
    )


def prepared(
    world: fakes.World,
    *,
    policy: policies.Policy | None = None,
    affected: frozenset[str] = frozenset({DOOMED}),
    telemetry: ports.Telemetry | None = None,
) -> drain.Drain:
    return drain.Drain(
        world.workloads,
        world.allocations,
        world.clock,
        order=drain.Order(
            affected=affected,
            policy=policy or policies.Policy(),
            daemons=(extras.ExtraClient(labels={"app": "watcher"}),),
            timeout_s=20,
            pace=pacing.Pace(),
        ),
        on_force=world.told.append,
        telemetry=telemetry,
    )


FORCE = policies.Policy(is_forced=True)


@pytest.mark.parametrize("policy", [*policies.Drain])
def test_nobody_is_looked_at_for_a_change_that_takes_nothing_away(policy: policies.Drain) -> None:
    world = empty()
    holder(world)
    ours = prepared(world, policy=policies.Policy(drain=policy), affected=frozenset())
    before = drain.survey(world.workloads, world.allocations)
    world.log.clear()

    ours.run(before, fakes.FakeWish(world.clock, replaced=False))

    assert ("workloads.evict" in world.log) is (policy is policies.Drain.NODE)
    assert bool(world.log) is (policy is policies.Drain.NODE)


def test_a_server_that_asks_for_a_pause_is_not_asked_again_before_its_end() -> None:
    world = empty()
    holder(world)
    world.budgets["train"] = "disruption budget is being computed"
    world.retry_after_s = 6
    asked: list[float] = []

    def note() -> None:
        while len(asked) < world.log.count("workloads.may_evict"):
            asked.append(world.clock.now_s)

    world.clock.on_wait.append(note)
    with pytest.raises(errors.DrainError, match="is being computed"):
        drained(world)

    gaps = [later - sooner for sooner, later in itertools.pairwise(asked)]
    assert len(gaps) == 3
    assert min(gaps) > 5.99


def test_a_pause_longer_than_the_deadline_does_not_outlast_it() -> None:
    world = empty()
    holder(world)
    world.budgets["train"] = "later"
    world.retry_after_s = 3600

    with pytest.raises(errors.DrainError):
        drained(world)

    assert world.log.count("workloads.may_evict") == 1
    assert world.clock.now_s < 25


def test_the_deadline_tells_how_long_a_pod_that_is_ending_may_still_take() -> None:
    world = empty()
    uid = holder(world, grace_s=600)
    world.clock.on_wait.clear()

    with pytest.raises(errors.DrainError, match=r"still terminating; it may take 600 s"):
        drained(world)

    assert world.pods[uid].is_terminating
    assert world.log.count("workloads.evict") == 1


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"is_mirror": True}, "a static pod cannot be evicted"),
        ({"is_kept": True}, "annotation mig-manager.io/do-not-evict forbids"),
    ],
)
@pytest.mark.parametrize("policy", [policies.Policy(), FORCE])
def test_a_pod_that_nothing_moves_is_named_and_keeps_the_others_from_leaving_in_vain(
    fields: dict[str, object], why: str, policy: policies.Policy
) -> None:
    world = empty()
    holder(world, "stays", **fields)
    holder(world, "free")

    with pytest.raises(errors.DrainError, match=rf"default/stays \(.*{why}") as caught:
        drained(world, policy=policy)

    assert caught.value.pods == ("default/stays", "default/free")
    assert {"workloads.evict", "workloads.delete"}.isdisjoint(world.log)
    assert world.told == []


def test_a_pod_that_nobody_may_evict_can_still_end_by_itself() -> None:
    world = empty()
    uid = holder(world, is_kept=True)
    world.clock.on_wait.append(
        lambda: (
            world.pods.update({uid: dataclasses.replace(world.pods[uid], phase="Succeeded")})
            if world.clock.now_s > 3
            else None
        )
    )

    assert drained(world) == 0


def test_force_waits_for_the_deadline_and_then_leaves_each_pod_its_grace_period() -> None:
    world = empty()
    uid = holder(world)
    world.budgets["train"] = "no"
    world.clock.on_wait.append(
        lambda: ends.append(world.clock.now_s) if uid not in world.pods and not ends else None
    )
    ends: list[float] = []
    ours = prepared(world, policy=FORCE)

    ours.run(
        drain.survey(world.workloads, world.allocations),
        fakes.FakeWish(world.clock, replaced=False),
    )

    assert ends[0] >= 20
    assert ours.forced == ["default/train"]
    assert world.told == ["default/train"]
    assert world.log.count("workloads.delete") == 1


def test_a_pod_that_even_force_does_not_move_in_time_fails_the_drain() -> None:
    world = empty()
    holder(world)
    world.budgets["train"] = "no"
    world.clock.on_wait.clear()

    with pytest.raises(errors.DrainError, match="as long again by force"):
        drained(world, policy=FORCE)

    assert 40 <= world.clock.now_s < 45
    assert world.log.count("workloads.delete") == 1


def test_without_force_no_pod_is_ever_deleted() -> None:
    world = empty()
    holder(world)
    world.budgets["train"] = "no"

    with pytest.raises(errors.DrainError):
        drained(world)

    assert "workloads.delete" not in world.log


@pytest.mark.parametrize("owner", ["RayCluster", "StatefulSet", "Job", None])
def test_a_pod_is_evicted_whoever_made_it(owner: str | None) -> None:
    world = empty()
    holder(world, owner_kind=owner)

    assert drained(world) == 1


def test_pods_that_have_ended_and_the_owners_daemons_are_not_asked() -> None:
    world = empty()
    holder(world, "done", phase="Succeeded")
    holder(world, "watcher", labels={"app": "watcher"})

    assert drained(world) == 0


def test_a_pod_that_turns_up_during_the_drain_must_leave_as_well() -> None:
    world = empty()
    holder(world)
    late: list[str] = []

    def turn_up() -> None:
        if not late:
            late.append(holder(world, "late"))

    world.clock.on_wait.append(turn_up)

    assert drained(world) == 2
    assert late[0] not in world.pods


def test_a_kubelet_that_falls_silent_during_the_drain_widens_nothing() -> None:
    world = empty()
    holder(world)
    other = world.add_pod("other", devices=frozenset({"MIG-other"}))
    world.clock.on_wait.append(lambda: setattr(world, "kubelet_is_silent", True))

    assert drained(world) == 1
    assert other in world.pods


def test_each_eviction_is_told_to_whoever_listens() -> None:
    class Ear(ports.Telemetry):
        heard = 0

        def pod_evicted(self) -> None:
            self.heard += 1

    world, ear = empty(), Ear()
    holder(world)
    holder(world, "second")

    drained(world, telemetry=ear)

    assert ear.heard == 2


def test_an_eviction_that_is_forbidden_is_an_error_at_once() -> None:
    world = empty()
    holder(world)
    refusal = errors.ClusterError("no", reason=errors.Reason.FORBIDDEN, status=403)
    world.failing = {4: refusal}

    with pytest.raises(errors.ClusterError) as caught:
        drained(world)

    assert world.log[4] == "workloads.may_evict"
    assert caught.value.reason is errors.Reason.FORBIDDEN


def test_every_gpu_pod_leaves_a_whole_node_whatever_it_holds() -> None:
    world = empty()
    world.add_pod("a", devices=frozenset({"MIG-a"}))
    claimant = world.add_pod("claimant")
    world.claims.add(claimant)
    nic = world.add_pod("nic", gpu_resources={"nvidia.com/hostdev": 1})

    whole_node = policies.Policy(drain=policies.Drain.NODE)
    assert drained(world, policy=whole_node, affected=frozenset()) == 2

    assert list(world.pods) == [nic]
    assert cluster.RESOURCE_PREFIX + "hostdev" in world.pods[nic].gpu_resources
