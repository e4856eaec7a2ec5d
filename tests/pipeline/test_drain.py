"""One drain at a time, over pods in memory."""

import dataclasses
import itertools
from collections.abc import Callable

import pytest

from mig_manager import errors
from mig_manager.agent import drain
from mig_manager.catalogue import hardware
from mig_manager.change import instrumentation
from mig_manager.core import ports, timing
from mig_manager.core.node import clients, cluster
from mig_manager.core.node import policy as policies
from tests import fakes

DOOMED = fakes.mig_uuid("doomed")


def empty() -> fakes.World:
    return fakes.World(gpus=(hardware.template(hardware.find("A100-SXM4-40GB"), 0),))


def holder(world: fakes.World, name: str = "train", **fields: object) -> str:
    return world.add_pod(name, devices=frozenset({DOOMED}), **fields)


def drained(
    world: fakes.World,
    *,
    policy: policies.Policy | None = None,
    affected: frozenset[str] = frozenset({DOOMED}),
    telemetry: instrumentation.Telemetry | None = None,
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
    telemetry: instrumentation.Telemetry | None = None,
    workloads: ports.Workloads | None = None,
) -> drain.Drain:
    return drain.Drain(
        workloads or world.workloads,
        world.allocations,
        world.clock,
        order=drain.Order(
            affected=affected,
            policy=policy or policies.Policy(),
            extra_clients=(clients.ExtraClient(labels={"app": "watcher"}),),
            timeout_s=20,
            backoff=timing.Backoff(),
        ),
        announce=drain.Announcements(on_round=world.told.append, on_force=world.told.append),
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
        while len(asked) < world.log.count("workloads.can_evict"):
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

    assert world.log.count("workloads.can_evict") == 1
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


def test_a_pod_that_nobody_can_evict_can_still_end_by_itself() -> None:
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
    assert ours.forced == ("default/train",)
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
    holder(world, "watcher", labels={"app": "watcher"}, owner_kind="DaemonSet")

    assert drained(world) == 0


def test_a_pod_that_only_has_the_labels_of_an_owners_daemon_must_leave() -> None:
    world = empty()
    holder(world, "someone", labels={"app": "watcher"})

    assert drained(world) == 1


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
    other = world.add_pod("other", devices=frozenset({fakes.mig_uuid("other")}))
    world.clock.on_wait.append(lambda: setattr(world, "kubelet_is_silent", True))

    assert drained(world) == 1
    assert other in world.pods


class Ear(instrumentation.Telemetry):
    heard = 0

    def pod_evicted(self) -> None:
        self.heard += 1


def test_each_eviction_is_told_to_whoever_listens() -> None:
    world, ear = empty(), Ear()
    holder(world)
    holder(world, "second")

    drained(world, telemetry=ear)

    assert ear.heard == 2


def test_each_deletion_by_force_is_told_to_whoever_listens() -> None:
    world, ear = empty(), Ear()
    holder(world)
    holder(world, "second")
    world.budgets |= {"train": "no", "second": "no"}

    assert drained(world, policy=FORCE, telemetry=ear) == 0

    assert ear.heard == 2


# -- an API that refuses, fails, or knows of another pod ----------------------------------------


def refused(reason: errors.Reason, status: int | None = None, **fields: float) -> Exception:
    return errors.ClusterError(f"the API said {status}", reason=reason, status=status, **fields)


FORBIDDEN = refused(errors.Reason.FORBIDDEN, 403)
SILENT = refused(errors.Reason.API_UNAVAILABLE, 503)


def at(world: fakes.World, when_s: float, act: Callable[[], object]) -> None:
    """Have something happen once, when so much time has passed."""
    due = [act]

    def look() -> None:
        if due and world.clock.now_s >= when_s:
            due.pop()()

    world.clock.on_wait.append(look)


def goes(world: fakes.World, uid: str) -> None:
    world.pods.pop(uid)
    world.held.pop(uid)


def test_where_evictions_are_forbidden_the_pods_are_waited_for() -> None:
    world = empty()
    first, second = holder(world), holder(world, "second")
    world.refusing = {"workloads.can_evict": FORBIDDEN}
    at(world, 8, lambda: goes(world, first))
    at(world, 15, lambda: goes(world, second))

    assert drained(world) == 0

    assert world.clock.now_s < 20
    assert "workloads.evict" not in world.log


def test_where_evictions_are_forbidden_the_deadline_names_each_pod_and_the_missing_right() -> None:
    world = empty()
    holder(world)
    holder(world, "second")
    world.refusing = {"workloads.can_evict": FORBIDDEN}

    with pytest.raises(errors.DrainError) as caught:
        drained(world)

    why = "(the agent may not evict it (Forbidden))"
    assert caught.value.reason is errors.Reason.FORBIDDEN
    assert caught.value.pods == ("default/train", "default/second")
    assert f"default/train, default/second {why}; the API said 403" in caught.value.message
    assert caught.value.message.count("the API said 403") == 1
    assert 20 <= world.clock.now_s < 25


def test_a_refusal_is_not_asked_about_more_often_than_every_few_seconds() -> None:
    world = empty()
    holder(world)
    world.refusing = {"workloads.can_evict": FORBIDDEN}

    with pytest.raises(errors.DrainError):
        drained(world)

    assert 2 <= world.log.count("workloads.can_evict") <= 5


def test_an_api_that_asks_for_a_longer_pause_gets_it() -> None:
    world = empty()
    holder(world)
    busy = refused(errors.Reason.API_UNAVAILABLE, 503, retry_after_s=15)
    world.refusing = {"workloads.can_evict": busy}

    with pytest.raises(errors.DrainError):
        drained(world)

    assert world.log.count("workloads.can_evict") == 2


@pytest.mark.parametrize("passing", [FORBIDDEN, SILENT])
@pytest.mark.parametrize("call", ["workloads.can_evict", "workloads.evict"])
def test_a_refusal_that_passes_costs_a_few_seconds_and_not_the_run(
    call: str, passing: Exception
) -> None:
    world = empty()
    holder(world)
    world.refusing = {call: passing}
    at(world, 1, world.refusing.clear)

    assert drained(world) == 1

    assert world.clock.now_s < 10


class Choosy(fakes.FakeWorkloads):
    """Refuses some pods and not others, at a call of its choice."""

    def __init__(
        self, world: fakes.World, *, trial: dict[str, Exception], real: dict[str, Exception]
    ) -> None:
        super().__init__(world)
        self._trial, self._real = trial, real

    def can_evict(self, pod: cluster.Pod) -> ports.Verdict:
        if pod.name in self._trial:
            raise self._trial[pod.name]
        return super().can_evict(pod)

    def evict(self, pod: cluster.Pod) -> ports.Verdict:
        if pod.name in self._real:
            raise self._real[pod.name]
        return super().evict(pod)


def test_a_right_that_is_taken_away_between_two_evictions_is_waited_for_as_well() -> None:
    world = empty()
    holder(world)
    second = holder(world, "second")
    ours = prepared(world, workloads=Choosy(world, trial={}, real={"second": FORBIDDEN}))

    with pytest.raises(errors.DrainError, match=r"1 pod still uses .*: default/second") as caught:
        ours.run(
            drain.survey(world.workloads, world.allocations),
            fakes.FakeWish(world.clock, replaced=False),
        )

    assert caught.value.reason is errors.Reason.FORBIDDEN
    assert list(world.pods) == [second]
    assert not world.pods[second].is_terminating


def test_nobody_is_evicted_while_there_is_a_pod_that_may_not_be() -> None:
    world = empty()
    holder(world)
    holder(world, "second")
    ours = prepared(world, workloads=Choosy(world, trial={"second": FORBIDDEN}, real={}))

    with pytest.raises(errors.DrainError, match=r"default/train \(waits for the others\)"):
        ours.run(
            drain.survey(world.workloads, world.allocations),
            fakes.FakeWish(world.clock, replaced=False),
        )

    assert "workloads.evict" not in world.log


def test_a_pod_that_is_leaving_by_itself_is_not_blamed_on_a_missing_right() -> None:
    world = empty()
    uid = holder(world)
    world.refusing = {"workloads.can_evict": FORBIDDEN}
    world.clock.on_wait.clear()
    leaving = dataclasses.replace(world.pods[uid], is_terminating=True)
    at(world, 2, lambda: world.pods.update({uid: leaving}))

    with pytest.raises(errors.DrainError, match="still terminating") as caught:
        drained(world)

    assert caught.value.reason is errors.Reason.DRAIN_TIMEOUT


def test_an_api_that_fails_every_eviction_until_the_deadline_is_the_reason() -> None:
    world = empty()
    holder(world)
    world.refusing = {"workloads.can_evict": SILENT}

    with pytest.raises(errors.DrainError, match="failed to evict it") as caught:
        drained(world)

    assert caught.value.reason is errors.Reason.API_UNAVAILABLE


def test_a_missing_right_is_told_before_an_api_that_fails() -> None:
    world = empty()
    holder(world)
    holder(world, "second")
    trial = {"train": SILENT, "second": FORBIDDEN}
    ours = prepared(world, workloads=Choosy(world, trial=trial, real={}))

    with pytest.raises(errors.DrainError, match=r"; the API said 403$") as caught:
        ours.run(
            drain.survey(world.workloads, world.allocations),
            fakes.FakeWish(world.clock, replaced=False),
        )

    assert caught.value.reason is errors.Reason.FORBIDDEN


def test_a_request_that_the_api_calls_wrong_ends_the_drain_at_once() -> None:
    world = empty()
    holder(world)
    world.refusing = {"workloads.can_evict": refused(errors.Reason.API_ERROR, 400)}

    with pytest.raises(errors.ClusterError) as caught:
        drained(world)

    assert caught.value.reason is errors.Reason.API_ERROR
    assert world.clock.now_s == 0


def test_where_deletions_are_forbidden_force_waits_and_names_the_missing_right() -> None:
    world = empty()
    holder(world)
    world.budgets["train"] = "no"
    world.refusing = {"workloads.delete": FORBIDDEN}

    with pytest.raises(errors.DrainError, match="the agent may not delete it") as caught:
        drained(world, policy=FORCE)

    assert caught.value.reason is errors.Reason.FORBIDDEN
    assert 40 <= world.clock.now_s < 45
    assert world.log.count("workloads.delete") <= 5


def test_force_is_used_where_only_evictions_are_forbidden() -> None:
    world = empty()
    holder(world)
    world.refusing = {"workloads.can_evict": FORBIDDEN}
    ours = prepared(world, policy=FORCE)

    ours.run(
        drain.survey(world.workloads, world.allocations),
        fakes.FakeWish(world.clock, replaced=False),
    )

    assert ours.forced == ("default/train",)
    assert 20 <= world.clock.now_s < 25


def test_a_pause_that_a_budget_asked_for_does_not_hold_up_force() -> None:
    world = empty()
    holder(world)
    world.budgets["train"] = "no"
    world.retry_after_s = 3600

    drained(world, policy=FORCE)

    assert world.clock.now_s < 25


def test_an_api_that_is_silent_for_a_while_does_not_end_the_drain() -> None:
    world = empty()
    holder(world)
    world.clock.on_wait.clear()
    at(world, 0, lambda: world.refusing.update({"workloads.list": SILENT}))
    at(world, 10, world.refusing.clear)
    at(world, 12, world.live)

    assert drained(world) == 1

    assert world.log.count("workloads.evict") == 1


def test_an_api_that_stays_silent_ends_the_drain_at_the_deadline_with_its_own_words() -> None:
    world = empty()
    holder(world)
    world.clock.on_wait.clear()
    at(world, 0, lambda: world.refusing.update({"workloads.list": SILENT}))

    with pytest.raises(errors.ClusterError, match="the API said 503") as caught:
        drained(world)

    assert caught.value is SILENT
    assert 20 <= world.clock.now_s < 25


def test_a_silent_api_is_not_taken_for_an_empty_node() -> None:
    world = empty()
    late: list[str] = []
    before = drain.survey(world.workloads, world.allocations)
    world.refusing = {"workloads.list": SILENT}
    late.append(holder(world, "late"))
    at(world, 3, world.refusing.clear)

    prepared(world).run(before, fakes.FakeWish(world.clock, replaced=False))

    assert late[0] not in world.pods


def test_a_drain_is_given_up_for_a_newer_wish_also_while_the_api_is_silent() -> None:
    world = empty()
    holder(world)
    before = drain.survey(world.workloads, world.allocations)
    world.refusing = {"workloads.list": SILENT}

    with pytest.raises(errors.Superseded):
        prepared(world).run(before, fakes.FakeWish(world.clock, ends_at=3, replaced=True))

    assert world.clock.now_s < 1


def test_a_pod_that_comes_back_under_the_same_name_must_leave_as_well() -> None:
    world = empty()
    holder(world)
    at(world, 0, lambda: holder(world))

    assert drained(world) == 2


def test_force_tells_of_each_pod_that_comes_back_under_the_same_name() -> None:
    world, ear = empty(), Ear()
    holder(world)
    world.budgets["train"] = "no"
    back: list[str] = []
    world.clock.on_wait.append(
        lambda: (
            back.append(holder(world)) if "workloads.delete" in world.log and not back else None
        )
    )
    ours = prepared(world, policy=FORCE, telemetry=ear)

    ours.run(
        drain.survey(world.workloads, world.allocations),
        fakes.FakeWish(world.clock, replaced=False),
    )

    assert ear.heard == world.log.count("workloads.delete") == 2
    assert ours.forced == ("default/train",)


def test_a_pod_that_had_gone_before_its_eviction_is_neither_counted_nor_asked_for_again() -> None:
    class Late(fakes.FakeWorkloads):
        """The pod goes between the list and the eviction; kubelet is slow to let go."""

        def evict(self, pod: cluster.Pod) -> ports.Verdict:
            super().evict(pod)
            return ports.Verdict(answer=ports.Eviction.GONE)

    world, ear = empty(), Ear()
    holder(world)
    ours = prepared(world, telemetry=ear, workloads=Late(world))

    evicted = ours.run(
        drain.survey(world.workloads, world.allocations),
        fakes.FakeWish(world.clock, replaced=False),
    )

    assert (evicted, ear.heard) == (0, 0)
    assert world.log.count("workloads.evict") == 1


def test_every_gpu_pod_leaves_a_whole_node_whatever_it_holds() -> None:
    world = empty()
    world.add_pod("a", devices=frozenset({fakes.mig_uuid("a")}))
    claimant = world.add_pod("claimant")
    world.claims.add(claimant)
    nic = world.add_pod("nic", gpu_resources={"nvidia.com/hostdev": 1})

    whole_node = policies.Policy(drain=policies.Drain.NODE)
    assert drained(world, policy=whole_node, affected=frozenset()) == 2

    assert list(world.pods) == [nic]
    assert cluster.RESOURCE_PREFIX + "hostdev" in world.pods[nic].gpu_resources


PASSIVE = policies.Policy(drain=policies.Drain.NONE)


def test_a_drain_that_only_waits_asks_the_api_for_no_pods() -> None:
    world = empty()
    world.watched = lambda: tuple(world.pods.values())
    staying = holder(world)
    at(world, 15, lambda: goes(world, staying))

    assert drained(world, policy=PASSIVE) == 0

    # The survey, and the look that ends it.
    assert world.log.count("workloads.list") == 2


def test_an_eviction_and_the_end_of_a_drain_rest_on_a_list() -> None:
    world = empty()
    world.watched = lambda: tuple(world.pods.values())
    holder(world)

    assert drained(world) == 1

    # The survey, the choice, and the look that ends it.
    assert world.log.count("workloads.list") == 3


def test_a_watch_that_misses_a_pod_ends_no_drain() -> None:
    world = empty()
    world.watched = lambda: ()
    staying = holder(world)
    at(world, 15, lambda: goes(world, staying))

    assert drained(world, policy=PASSIVE) == 0

    assert world.clock.now_s >= 15


def test_a_watch_that_shows_a_pod_that_has_gone_fails_no_drain() -> None:
    world = empty()
    gone = holder(world)
    shown = tuple(world.pods.values())
    world.watched = lambda: shown
    at(world, 5, lambda: goes(world, gone))

    assert drained(world, policy=PASSIVE) == 0
