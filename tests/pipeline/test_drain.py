"""One drain at a time, over pods in memory."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from mig_manager import errors
from mig_manager.agent import drain
from mig_manager.catalogue import hardware
from mig_manager.core import ports, timing
from mig_manager.core.node import clients, cluster
from mig_manager.core.node import policy as policies
from tests import fakes
from tests.fakes import NodeRig

DOOMED = fakes.mig_uuid("doomed")


def empty() -> NodeRig:
    return NodeRig(gpus=(hardware.template(hardware.find("A100-SXM4-40GB"), 0),))


def gpu_pod(rig: NodeRig, name: str = "train", **fields: object) -> str:
    return rig.add_pod(name, devices=frozenset({DOOMED}), **fields)


@pytest.fixture
def rig() -> NodeRig:
    """A node with the pod ``train``, whose device is destroyed."""
    node = empty()
    gpu_pod(node)
    return node


def new_drain(
    rig: NodeRig,
    *,
    policy: policies.Policy | None = None,
    affected: frozenset[str] = frozenset({DOOMED}),
    telemetry: ports.Telemetry | None = None,
    workloads: ports.Workloads | None = None,
) -> drain.Drain:
    return drain.Drain(
        workloads or rig.workloads,
        rig.allocations,
        rig.clock,
        order=drain.Order(
            affected=affected,
            policy=policy or policies.Policy(),
            extra_clients=(clients.ExtraClient(labels={"app": "watcher"}),),
            timeout_s=20,
            backoff=timing.Backoff(),
        ),
        announce=drain.Announcements(on_round=rig.statuses.append, on_force=rig.statuses.append),
        telemetry=telemetry,
    )


def run(rig: NodeRig, ours: drain.Drain) -> int:
    usage = drain.survey(rig.workloads, rig.allocations)
    return ours.run(usage, fakes.FakeRequest(rig.clock))


def drained(rig: NodeRig, **options: Any) -> int:
    return run(rig, new_drain(rig, **options))


FORCE = policies.Policy(is_forced=True)


@pytest.mark.parametrize("policy", [*policies.Drain])
def test_no_pod_is_listed_for_a_change_that_destroys_nothing(
    rig: NodeRig, policy: policies.Drain
) -> None:
    ours = new_drain(rig, policy=policies.Policy(drain=policy), affected=frozenset())
    before = drain.survey(rig.workloads, rig.allocations)
    rig.log.clear()

    ours.run(before, fakes.FakeRequest(rig.clock))

    assert ("workloads.evict" in rig.log) is (policy is policies.Drain.NODE)
    assert bool(rig.log) is (policy is policies.Drain.NODE)


def test_a_server_that_asks_for_a_pause_is_not_asked_again_before_its_end(rig: NodeRig) -> None:
    rig.budgets["train"] = "disruption budget is being computed"
    rig.retry_after_s = 6
    asked: list[float] = []

    def note() -> None:
        while len(asked) < rig.log.count("workloads.can_evict"):
            asked.append(rig.clock.now_s)

    rig.clock.on_wait.append(note)
    with pytest.raises(errors.DrainError, match="is being computed"):
        drained(rig)

    gaps = [later - sooner for sooner, later in itertools.pairwise(asked)]
    assert len(gaps) == 3
    assert min(gaps) > 5.99


def test_a_pause_longer_than_the_deadline_does_not_outlast_it(rig: NodeRig) -> None:
    rig.budgets["train"] = "later"
    rig.retry_after_s = 3600

    with pytest.raises(errors.DrainError):
        drained(rig)

    assert rig.log.count("workloads.can_evict") == 1
    assert rig.clock.now_s < 25


def test_at_the_deadline_the_message_has_the_grace_period_of_a_terminating_pod() -> None:
    rig = empty()
    uid = gpu_pod(rig, grace_s=600)
    rig.clock.on_wait.clear()

    with pytest.raises(errors.DrainError, match=r"still terminating; it may take 600 s"):
        drained(rig)

    assert rig.pods[uid].is_terminating
    assert rig.log.count("workloads.evict") == 1


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
    rig = empty()
    gpu_pod(rig, "stays", **fields)
    gpu_pod(rig, "free")

    with pytest.raises(errors.DrainError, match=rf"default/stays \(.*{why}") as caught:
        drained(rig, policy=policy)

    assert caught.value.pods == ("default/stays", "default/free")
    assert {"workloads.evict", "workloads.delete"}.isdisjoint(rig.log)
    assert rig.statuses == []


def test_a_pod_that_cannot_be_evicted_may_finish_by_itself() -> None:
    rig = empty()
    uid = gpu_pod(rig, is_kept=True)
    rig.clock.on_wait.append(
        lambda: (
            rig.pods.update({uid: dataclasses.replace(rig.pods[uid], phase="Succeeded")})
            if rig.clock.now_s > 3
            else None
        )
    )

    assert drained(rig) == 0


def test_force_waits_for_the_deadline_and_then_leaves_each_pod_its_grace_period(
    rig: NodeRig,
) -> None:
    (uid,) = rig.pods
    rig.budgets["train"] = "no"
    rig.clock.on_wait.append(
        lambda: ends.append(rig.clock.now_s) if uid not in rig.pods and not ends else None
    )
    ends: list[float] = []
    ours = new_drain(rig, policy=FORCE)

    run(rig, ours)

    assert ends[0] >= 20
    assert ours.forced == ("default/train",)
    assert rig.statuses == ["default/train"]
    assert rig.log.count("workloads.delete") == 1


def test_a_pod_that_even_force_does_not_move_in_time_fails_the_drain(rig: NodeRig) -> None:
    rig.budgets["train"] = "no"
    rig.clock.on_wait.clear()

    with pytest.raises(errors.DrainError, match="as long again by force"):
        drained(rig, policy=FORCE)

    assert 40 <= rig.clock.now_s < 45
    assert rig.log.count("workloads.delete") == 1


def test_without_force_no_pod_is_ever_deleted(rig: NodeRig) -> None:
    rig.budgets["train"] = "no"

    with pytest.raises(errors.DrainError):
        drained(rig)

    assert "workloads.delete" not in rig.log


@pytest.mark.parametrize("owner", ["RayCluster", "StatefulSet", "Job", None])
def test_a_pod_is_evicted_whatever_its_owner(owner: str | None) -> None:
    rig = empty()
    gpu_pod(rig, owner_kind=owner)

    assert drained(rig) == 1


def test_pods_that_have_ended_and_the_owners_daemons_are_not_asked() -> None:
    rig = empty()
    gpu_pod(rig, "done", phase="Succeeded")
    gpu_pod(rig, "watcher", labels={"app": "watcher"}, owner_kind="DaemonSet")

    assert drained(rig) == 0


def test_a_pod_with_the_labels_of_an_extra_client_but_no_daemonset_is_evicted() -> None:
    rig = empty()
    gpu_pod(rig, "someone", labels={"app": "watcher"})

    assert drained(rig) == 1


def test_a_pod_that_starts_during_the_drain_is_evicted_as_well(rig: NodeRig) -> None:
    late: list[str] = []

    def add_late() -> None:
        if not late:
            late.append(gpu_pod(rig, "late"))

    rig.clock.on_wait.append(add_late)

    assert drained(rig) == 2
    assert late[0] not in rig.pods


def test_a_kubelet_that_falls_silent_during_the_drain_widens_nothing(rig: NodeRig) -> None:
    other = rig.add_pod("other", devices=frozenset({fakes.mig_uuid("other")}))
    rig.clock.on_wait.append(lambda: setattr(rig, "kubelet_is_silent", True))

    assert drained(rig) == 1
    assert other in rig.pods


class Ear(ports.Telemetry):
    heard = 0

    def pod_evicted(self) -> None:
        self.heard += 1


@pytest.mark.parametrize("by_force", [True, False])
def test_each_eviction_or_deletion_by_force_is_counted(rig: NodeRig, *, by_force: bool) -> None:
    ear = Ear()
    gpu_pod(rig, "second")
    rig.budgets |= {"train": "no", "second": "no"} if by_force else {}

    assert drained(rig, policy=FORCE, telemetry=ear) == (0 if by_force else 2)

    assert ear.heard == 2


# -- an API that refuses, fails, or knows of another pod ----------------------------------------


def refused(reason: errors.Reason, status: int | None = None, **fields: float) -> Exception:
    return errors.ClusterError(f"the API said {status}", reason=reason, status=status, **fields)


FORBIDDEN = refused(errors.Reason.FORBIDDEN, 403)
SILENT = refused(errors.Reason.API_UNAVAILABLE, 503)


def at(rig: NodeRig, when_s: float, act: Callable[[], object]) -> None:
    """Call ``act`` once, at ``when_s`` of the clock."""
    pending = [act]

    def check() -> None:
        if pending and rig.clock.now_s >= when_s:
            pending.pop()()

    rig.clock.on_wait.append(check)


def goes(rig: NodeRig, uid: str) -> None:
    rig.pods.pop(uid)
    rig.assigned.pop(uid)


def test_where_evictions_are_forbidden_the_pods_are_waited_for() -> None:
    rig = empty()
    first, second = gpu_pod(rig), gpu_pod(rig, "second")
    rig.refusing = {"workloads.can_evict": FORBIDDEN}
    at(rig, 8, lambda: goes(rig, first))
    at(rig, 15, lambda: goes(rig, second))

    assert drained(rig) == 0

    assert rig.clock.now_s < 20
    assert "workloads.evict" not in rig.log


def test_where_evictions_are_forbidden_the_deadline_names_each_pod_and_the_missing_right(
    rig: NodeRig,
) -> None:
    gpu_pod(rig, "second")
    rig.refusing = {"workloads.can_evict": FORBIDDEN}

    with pytest.raises(errors.DrainError) as caught:
        drained(rig)

    why = "(the agent may not evict it (Forbidden))"
    assert caught.value.reason is errors.Reason.FORBIDDEN
    assert caught.value.pods == ("default/train", "default/second")
    assert f"default/train, default/second {why}; the API said 403" in caught.value.message
    assert caught.value.message.count("the API said 403") == 1
    assert 20 <= rig.clock.now_s < 25


def test_a_refusal_is_not_asked_about_more_often_than_every_few_seconds(rig: NodeRig) -> None:
    rig.refusing = {"workloads.can_evict": FORBIDDEN}

    with pytest.raises(errors.DrainError):
        drained(rig)

    assert 2 <= rig.log.count("workloads.can_evict") <= 5


def test_an_api_that_asks_for_a_longer_pause_gets_it(rig: NodeRig) -> None:
    busy = refused(errors.Reason.API_UNAVAILABLE, 503, retry_after_s=15)
    rig.refusing = {"workloads.can_evict": busy}

    with pytest.raises(errors.DrainError):
        drained(rig)

    assert rig.log.count("workloads.can_evict") == 2


@pytest.mark.parametrize("passing", [FORBIDDEN, SILENT])
@pytest.mark.parametrize("call", ["workloads.can_evict", "workloads.evict"])
def test_a_refusal_that_passes_costs_a_few_seconds_and_not_the_run(
    rig: NodeRig, call: str, passing: Exception
) -> None:
    rig.refusing = {call: passing}
    at(rig, 1, rig.refusing.clear)

    assert drained(rig) == 1

    assert rig.clock.now_s < 10


class Choosy(fakes.FakeWorkloads):
    """Refuses some pods and not others, at a call of its choice."""

    def __init__(
        self, rig: NodeRig, *, trial: dict[str, Exception], real: dict[str, Exception]
    ) -> None:
        super().__init__(rig)
        self._trial, self._real = trial, real

    def can_evict(self, pod: cluster.Pod) -> ports.Verdict:
        if pod.name in self._trial:
            raise self._trial[pod.name]
        return super().can_evict(pod)

    def evict(self, pod: cluster.Pod) -> ports.Verdict:
        if pod.name in self._real:
            raise self._real[pod.name]
        return super().evict(pod)


def test_a_right_that_is_taken_away_between_two_evictions_is_waited_for_as_well(
    rig: NodeRig,
) -> None:
    second = gpu_pod(rig, "second")
    ours = new_drain(rig, workloads=Choosy(rig, trial={}, real={"second": FORBIDDEN}))

    with pytest.raises(errors.DrainError, match=r"1 pod still uses .*: default/second") as caught:
        run(rig, ours)

    assert caught.value.reason is errors.Reason.FORBIDDEN
    assert list(rig.pods) == [second]
    assert not rig.pods[second].is_terminating


def test_no_pod_is_evicted_while_another_cannot_be(rig: NodeRig) -> None:
    gpu_pod(rig, "second")
    ours = new_drain(rig, workloads=Choosy(rig, trial={"second": FORBIDDEN}, real={}))

    with pytest.raises(errors.DrainError, match=r"default/train \(waits for the others\)"):
        run(rig, ours)

    assert "workloads.evict" not in rig.log


def test_a_pod_that_is_leaving_by_itself_is_not_blamed_on_a_missing_right(rig: NodeRig) -> None:
    (uid,) = rig.pods
    rig.refusing = {"workloads.can_evict": FORBIDDEN}
    rig.clock.on_wait.clear()
    leaving = dataclasses.replace(rig.pods[uid], is_terminating=True)
    at(rig, 2, lambda: rig.pods.update({uid: leaving}))

    with pytest.raises(errors.DrainError, match="still terminating") as caught:
        drained(rig)

    assert caught.value.reason is errors.Reason.DRAIN_TIMEOUT


def test_an_api_that_fails_every_eviction_until_the_deadline_is_the_reason(rig: NodeRig) -> None:
    rig.refusing = {"workloads.can_evict": SILENT}

    with pytest.raises(errors.DrainError, match="failed to evict it") as caught:
        drained(rig)

    assert caught.value.reason is errors.Reason.API_UNAVAILABLE


def test_a_missing_right_is_reported_before_an_api_that_fails(rig: NodeRig) -> None:
    gpu_pod(rig, "second")
    trial = {"train": SILENT, "second": FORBIDDEN}
    ours = new_drain(rig, workloads=Choosy(rig, trial=trial, real={}))

    with pytest.raises(errors.DrainError, match=r"; the API said 403$") as caught:
        run(rig, ours)

    assert caught.value.reason is errors.Reason.FORBIDDEN


def test_a_request_that_the_api_calls_wrong_ends_the_drain_at_once(rig: NodeRig) -> None:
    rig.refusing = {"workloads.can_evict": refused(errors.Reason.API_ERROR, 400)}

    with pytest.raises(errors.ClusterError) as caught:
        drained(rig)

    assert caught.value.reason is errors.Reason.API_ERROR
    assert rig.clock.now_s == 0


def test_where_deletions_are_forbidden_force_waits_and_names_the_missing_right(
    rig: NodeRig,
) -> None:
    rig.budgets["train"] = "no"
    rig.refusing = {"workloads.delete": FORBIDDEN}

    with pytest.raises(errors.DrainError, match="the agent may not delete it") as caught:
        drained(rig, policy=FORCE)

    assert caught.value.reason is errors.Reason.FORBIDDEN
    assert 40 <= rig.clock.now_s < 45
    assert rig.log.count("workloads.delete") <= 5


def test_force_is_used_where_only_evictions_are_forbidden(rig: NodeRig) -> None:
    rig.refusing = {"workloads.can_evict": FORBIDDEN}
    ours = new_drain(rig, policy=FORCE)

    run(rig, ours)

    assert ours.forced == ("default/train",)
    assert 20 <= rig.clock.now_s < 25


def test_a_pause_that_a_budget_asked_for_does_not_hold_up_force(rig: NodeRig) -> None:
    rig.budgets["train"] = "no"
    rig.retry_after_s = 3600

    drained(rig, policy=FORCE)

    assert rig.clock.now_s < 25


def test_an_api_that_is_silent_for_a_while_does_not_end_the_drain(rig: NodeRig) -> None:
    rig.clock.on_wait.clear()
    at(rig, 0, lambda: rig.refusing.update({"workloads.list": SILENT}))
    at(rig, 10, rig.refusing.clear)
    at(rig, 12, rig.live)

    assert drained(rig) == 1

    assert rig.log.count("workloads.evict") == 1


def test_an_api_that_stays_silent_ends_the_drain_at_the_deadline_with_its_own_words(
    rig: NodeRig,
) -> None:
    rig.clock.on_wait.clear()
    at(rig, 0, lambda: rig.refusing.update({"workloads.list": SILENT}))

    with pytest.raises(errors.ClusterError, match="the API said 503") as caught:
        drained(rig)

    assert caught.value is SILENT
    assert 20 <= rig.clock.now_s < 25


def test_a_silent_api_is_not_taken_for_an_empty_node() -> None:
    rig = empty()
    late: list[str] = []
    before = drain.survey(rig.workloads, rig.allocations)
    rig.refusing = {"workloads.list": SILENT}
    late.append(gpu_pod(rig, "late"))
    at(rig, 3, rig.refusing.clear)

    new_drain(rig).run(before, fakes.FakeRequest(rig.clock))

    assert late[0] not in rig.pods


def test_a_newer_request_ends_a_drain_while_the_api_does_not_answer(rig: NodeRig) -> None:
    before = drain.survey(rig.workloads, rig.allocations)
    rig.refusing = {"workloads.list": SILENT}

    with pytest.raises(errors.Superseded):
        new_drain(rig).run(before, fakes.FakeRequest(rig.clock, ends_at=3, replaced=True))

    assert rig.clock.now_s < 1


def test_a_pod_that_restarts_under_the_same_name_is_evicted_as_well(rig: NodeRig) -> None:
    at(rig, 0, lambda: gpu_pod(rig))

    assert drained(rig) == 2


def test_force_names_each_pod_that_restarts_under_the_same_name(rig: NodeRig) -> None:
    ear = Ear()
    rig.budgets["train"] = "no"
    back: list[str] = []
    rig.clock.on_wait.append(
        lambda: back.append(gpu_pod(rig)) if "workloads.delete" in rig.log and not back else None
    )
    ours = new_drain(rig, policy=FORCE, telemetry=ear)

    run(rig, ours)

    assert ear.heard == rig.log.count("workloads.delete") == 2
    assert ours.forced == ("default/train",)


def test_a_pod_that_had_gone_before_its_eviction_is_neither_counted_nor_asked_for_again(
    rig: NodeRig,
) -> None:
    class Late(fakes.FakeWorkloads):
        """The pod goes between the list and the eviction; kubelet is slow to let go."""

        def evict(self, pod: cluster.Pod) -> ports.Verdict:
            super().evict(pod)
            return ports.Verdict(answer=ports.Eviction.GONE)

    ear = Ear()
    ours = new_drain(rig, telemetry=ear, workloads=Late(rig))

    evicted = run(rig, ours)

    assert (evicted, ear.heard) == (0, 0)
    assert rig.log.count("workloads.evict") == 1


PASSIVE = policies.Policy(drain=policies.Drain.NONE)


def test_a_drain_that_only_waits_asks_the_api_for_no_pods() -> None:
    rig = empty()
    rig.watched = lambda: tuple(rig.pods.values())
    staying = gpu_pod(rig)
    at(rig, 15, lambda: goes(rig, staying))

    assert drained(rig, policy=PASSIVE) == 0

    # The survey, and the list that ends it.
    assert rig.log.count("workloads.list") == 2


def test_an_eviction_and_the_end_of_a_drain_rest_on_a_list() -> None:
    rig = empty()
    rig.watched = lambda: tuple(rig.pods.values())
    gpu_pod(rig)

    assert drained(rig) == 1

    # The survey, the choice, and the list that ends it.
    assert rig.log.count("workloads.list") == 3


def test_a_watch_that_misses_a_pod_ends_no_drain() -> None:
    rig = empty()
    rig.watched = lambda: ()
    staying = gpu_pod(rig)
    at(rig, 15, lambda: goes(rig, staying))

    assert drained(rig, policy=PASSIVE) == 0

    assert rig.clock.now_s >= 15


def test_a_watch_that_shows_a_pod_that_has_gone_fails_no_drain(rig: NodeRig) -> None:
    (gone,) = rig.pods
    shown = tuple(rig.pods.values())
    rig.watched = lambda: shown
    at(rig, 5, lambda: goes(rig, gone))

    assert drained(rig, policy=PASSIVE) == 0
