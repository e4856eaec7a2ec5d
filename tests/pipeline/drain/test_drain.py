"""One drain at a time, over pods in memory."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable

import pytest
import structlog.testing

from mig_manager import errors
from mig_manager.agent.pods import drain, drain_scope
from mig_manager.core.node import eviction_rules, policies
from mig_manager.core.objects import pod_object
from mig_manager.reasons import Reason
from tests.pipeline.drain.drains import (
    DOOMED,
    FORCE,
    SILENT,
    drain_to_failure,
    empty,
    evicted_by,
    gpu_pod,
    new_drain,
    run_drain,
)
from tests.rigs.node import driver_rules, fake_cluster, fakes, moments
from tests.rigs.node.node_rig import NodeRig


@pytest.mark.parametrize("policy", [*policies.DrainPolicy])
def test_no_pod_is_listed_for_a_change_that_destroys_nothing(
    rig: NodeRig, policy: policies.DrainPolicy
) -> None:
    draining = new_drain(rig, policy=policies.Policy(drain=policy), affected=frozenset())
    rig.log.clear()

    draining.run()

    assert ("workloads.evict" in rig.log) is (policy is policies.DrainPolicy.NODE)
    assert bool(rig.log) is (policy is policies.DrainPolicy.NODE)


def test_the_pause_that_a_server_requests_is_kept(rig: NodeRig) -> None:
    rig.disruptions.refusals["train"] = "disruption budget is being computed"
    rig.disruptions.retry_after_s = 6
    asked_at_s = rig.note(lambda: rig.clock.now_s, at="workloads.can_evict")
    drain_to_failure(rig, Reason.DRAIN_TIMEOUT, "is being computed")

    gaps = [later - sooner for sooner, later in itertools.pairwise(asked_at_s)]
    assert len(gaps) == 3
    assert min(gaps) > 5.99


@pytest.mark.parametrize(
    ("drain_it", "deletions"),
    [
        pytest.param(functools.partial(run_drain, policy=FORCE), 1, id="by force"),
        pytest.param(
            functools.partial(drain_to_failure, reason=Reason.DRAIN_TIMEOUT), 0, id="not"
        ),
    ],
)
def test_pause_longer_than_the_deadline_ends_with_it(
    rig: NodeRig, drain_it: Callable[[NodeRig], object], deletions: int
) -> None:
    rig.disruptions.refusals["train"] = "later"
    rig.disruptions.retry_after_s = 3600

    drain_it(rig)

    assert rig.log.count("workloads.can_evict") == 1
    assert rig.log.count("workloads.delete") == deletions
    assert rig.clock.now_s < 25


def test_message_has_the_grace_period_of_a_terminating_pod() -> None:
    rig = empty()
    uid = gpu_pod(rig, grace_s=600)
    rig.kubelet.all_end_from_s = math.inf

    drain_to_failure(rig, Reason.DRAIN_TIMEOUT, "still terminating, which may take 600 s")

    assert rig.pods[uid].is_terminating
    assert rig.log.count("workloads.evict") == 1


def test_pod_that_stays_after_its_eviction_was_accepted_is_named_as_such() -> None:
    rig = empty()
    uid = gpu_pod(rig)

    def keep() -> None:
        """Do as an admission webhook that answers for the API server, and forgets the pod."""
        rig.pods.change(uid, is_terminating=False)

    rig.kubelet.all_end_from_s = math.inf
    rig.callbacks.add(moments.Wait, keep)

    drain_to_failure(rig, Reason.DRAIN_TIMEOUT, "accepted its eviction, and it is not terminating")


def test_pod_that_is_evicted_at_the_deadline_is_named_as_such() -> None:
    rig = empty()
    gpu_pod(rig)
    rig.disruptions.refusals["train"] = "budget"
    rig.callbacks.add(moments.Time(20), rig.disruptions.refusals.clear)

    drain_to_failure(rig, Reason.DRAIN_TIMEOUT, "default/train (was evicted just now)")


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"is_mirror": True}, "a static pod cannot be evicted"),
        ({"is_kept": True}, "annotation mig-manager.io/do-not-evict forbids"),
    ],
)
@pytest.mark.parametrize("policy", [policies.Policy(), FORCE])
def test_pod_that_cannot_leave_is_named_and_no_other_is_evicted(
    fields: dict[str, object], why: str, policy: policies.Policy
) -> None:
    rig = empty()
    gpu_pod(rig, "stays", **fields)
    gpu_pod(rig, "free")

    with pytest.raises(errors.DrainError, match=rf"default/stays \(.*{why}.*default/free"):
        run_drain(rig, policy=policy)

    assert {"workloads.evict", "workloads.delete"}.isdisjoint(rig.log)
    assert rig.node_object.status_messages == []


@pytest.mark.parametrize("call", ["evict", "delete"])
@pytest.mark.parametrize(
    ("has_watch", "eviction_s", "evicted"), [(True, 0, 1), (False, 6, 2)], ids=["watch", "slow"]
)
def test_no_pod_is_evicted_once_the_annotation_is_set_on_another(
    call: str, eviction_s: int, evicted: int, *, has_watch: bool
) -> None:
    rig = empty()
    for number in range(4):
        gpu_pod(rig, f"pod-{number}")
        if call == "delete":
            rig.disruptions.refusals[f"pod-{number}"] = "budget"
    if has_watch:
        rig.pods.watched = lambda: tuple(rig.pods.values())

    def keep() -> None:
        rig.clock.now_s += eviction_s
        rig.pods.change(rig.pods.uid_of("pod-3"), is_kept=True)

    rig.callbacks.add(f"workloads.{call}", keep)

    with pytest.raises(errors.DrainError, match=r"default/pod-3 \(its annotation"):
        run_drain(rig, policy=FORCE)

    assert rig.log.count(f"workloads.{call}") == evicted


def test_a_pod_that_finishes_during_the_evictions_is_not_deleted() -> None:
    rig = empty()
    gpu_pod(rig)
    uid = gpu_pod(rig, "job")
    rig.pods.watched = lambda: tuple(rig.pods.values())

    rig.callbacks.add("workloads.evict", lambda: rig.pods.change(uid, phase="Succeeded"))

    assert run_drain(rig) == 1
    assert uid in rig.pods


def test_a_pod_that_cannot_be_evicted_may_still_finish() -> None:
    rig = empty()
    uid = gpu_pod(rig, is_kept=True)
    finished = dataclasses.replace(rig.pods[uid], phase="Succeeded")
    rig.callbacks.add(moments.Time(3), lambda: rig.pods.update({uid: finished}))

    assert run_drain(rig) == 0


def test_force_waits_for_the_deadline_and_deletes_once(rig: NodeRig) -> None:
    rig.disruptions.refusals["train"] = "no"
    draining = new_drain(rig, policy=FORCE)

    evicted_by(draining)

    assert rig.clock.now_s >= 20
    assert draining.evictions.removals.forced == ("default/train",)
    assert rig.node_object.status_messages == ["deleting by force default/train"]
    assert rig.log.count("workloads.delete") == 1


def test_force_deletes_and_announces_nothing_while_kubelet_is_silent(rig: NodeRig) -> None:
    rig.disruptions.refusals["train"] = "budget"

    def bind() -> None:
        rig.kubelet.is_silent = True
        rig.pods.add("starting", phase="Pending", gpu_resources={"nvidia.com/gpu": 1})

    rig.callbacks.add(moments.Time(5), bind)

    drain_to_failure(rig, Reason.DRAIN_TIMEOUT, "kubelet does not answer", policy=FORCE)
    assert not rig.node_object.status_messages
    assert "workloads.delete" not in rig.log


def new_refusing_drain(rig: NodeRig, policy: policies.Policy | None = None) -> drain.Drain:
    """Return the drain of a change that may affect no pod."""
    draining = new_drain(rig, policy=policy)
    rights = drain_scope.Refuse(Reason.IN_USE, "in use by {}".format)
    scope = dataclasses.replace(draining.scope, rights=rights)
    return dataclasses.replace(draining, scope=scope)


def test_a_change_that_may_affect_no_pod_evicts_none_that_gets_a_device() -> None:
    rig = empty()
    gpu_pod(rig, "train")
    refusing = new_refusing_drain(rig)

    with pytest.raises(errors.MigManagerError, match="in use by default/train"):
        refusing.run()

    assert "workloads.evict" not in rig.log


def test_force_deletes_no_pod_of_a_change_that_may_affect_none() -> None:
    rig = empty()
    uid = rig.pods.add("starting", phase="Pending", gpu_resources={"nvidia.com/gpu": 1})
    refusing = new_refusing_drain(rig, policy=FORCE)
    rig.kubelet.is_silent = True

    def bind() -> None:
        rig.kubelet.is_silent = False
        rig.kubelet.devices_by_pod[uid] = frozenset({DOOMED})

    rig.callbacks.add(moments.Time(21), bind)

    with pytest.raises(errors.DrainError, match="not evicted before its devices are known"):
        refusing.run()

    assert "workloads.delete" not in rig.log


def test_the_many_pods_that_force_deletes_are_counted() -> None:
    rig = empty()
    for number in range(7):
        rig.disruptions.refusals[f"p{number}"] = "no"
        gpu_pod(rig, f"p{number}")

    run_drain(rig, policy=FORCE)

    names = "default/p0, default/p1, default/p2, default/p3, default/p4 and 2 more"
    assert rig.node_object.status_messages == [f"deleting by force {names}"]


def test_a_pod_that_even_force_does_not_move_in_time_fails_the_drain(rig: NodeRig) -> None:
    rig.disruptions.refusals["train"] = "no"
    rig.kubelet.all_end_from_s = math.inf

    error = drain_to_failure(rig, Reason.DRAIN_TIMEOUT, "as long again by force", policy=FORCE)

    assert isinstance(error, errors.DrainError)
    assert error.keeps_taint
    assert rig.log.count("workloads.delete") == 1


def test_force_deletes_no_pod_once_another_may_not_be_removed(rig: NodeRig) -> None:
    kept = gpu_pod(rig, "kept")
    rig.disruptions.refusals |= {"train": "no", "kept": "no"}

    lists: list[float] = []

    def keep() -> None:
        if rig.clock.now_s >= 20:
            lists.append(rig.clock.now_s)
            # The second one is after the deadline.
            rig.pods.change(kept, is_kept=len(lists) > 1)

    rig.callbacks.add("workloads.list", keep)

    why = "default/train (waits for the others); default/kept (its annotation"
    drain_to_failure(rig, Reason.DRAIN_TIMEOUT, why, policy=FORCE)

    assert "workloads.delete" not in rig.log
    assert rig.node_object.status_messages == []


@pytest.mark.parametrize(
    ("fields", "evicted"),
    [
        *(({"owner_kind": kind}, 1) for kind in ("RayCluster", "StatefulSet", "Job", None)),
        ({"labels": {"app": "watcher"}}, 1),
        ({"labels": {"app": "watcher"}, "owner_kind": "DaemonSet"}, 0),
        ({"phase": "Succeeded"}, 0),
    ],
)
def test_own_daemons_and_finished_pods_are_not_evicted(
    fields: dict[str, object], evicted: int
) -> None:
    rig = empty()
    gpu_pod(rig, "train", **fields)

    assert run_drain(rig) == evicted


@pytest.mark.parametrize("name", ["late", "train"])
def test_pod_that_starts_during_the_drain_is_evicted_too(rig: NodeRig, name: str) -> None:
    rig.callbacks.add(moments.Time(0), lambda: gpu_pod(rig, name))

    assert run_drain(rig) == 2
    assert rig.pods == {}


def test_kubelet_falling_silent_in_a_drain_affects_no_further_pod(rig: NodeRig) -> None:
    other = rig.pods.add("other", devices=frozenset({driver_rules.mig_uuid("other")}))
    rig.set_at(moments.Wait, rig.kubelet, is_silent=True)

    assert run_drain(rig) == 1
    assert other in rig.pods


def test_a_silent_kubelets_last_answer_is_not_about_a_successor(rig: NodeRig) -> None:
    other = frozenset({driver_rules.mig_uuid("other")})

    def succeed() -> None:
        if not rig.pods:
            rig.pods.add("train", devices=other)

    rig.callbacks.add(moments.Wait, succeed)
    rig.set_at(moments.Time(0), rig.kubelet, is_silent=True)
    rig.set_at(moments.Time(9), rig.kubelet, is_silent=False)

    assert run_drain(rig) == 1
    assert [pod.name for pod in rig.pods.values()] == ["train"]


def test_a_starting_kubelet_without_pods_affects_no_further_pod(rig: NodeRig) -> None:
    other = rig.pods.add("other", devices=frozenset({driver_rules.mig_uuid("other")}))
    rig.callbacks.add(moments.Wait, rig.kubelet.devices_by_pod.clear)

    assert run_drain(rig) == 1
    assert other in rig.pods


@pytest.mark.parametrize("is_answered", [True, False])
@pytest.mark.parametrize("refused", [{"train", "second"}, set()], ids=["by force", "evicted"])
def test_each_eviction_or_deletion_by_force_is_counted(
    rig: NodeRig, refused: set[str], *, is_answered: bool
) -> None:
    telemetry = fakes.FakeTelemetry()
    gpu_pod(rig, "second")
    rig.disruptions.refusals |= dict.fromkeys(refused, "no")
    if not is_answered:
        rig.lost_answers.add_all({"workloads.evict": SILENT, "workloads.delete": SILENT})
    draining = new_drain(rig, policy=FORCE, telemetry=telemetry)

    assert evicted_by(draining) == len(telemetry.events["pod_evicted"]) == 2

    assert len(draining.evictions.removals.forced) == len(refused)


def test_an_accepted_eviction_is_logged(rig: NodeRig) -> None:
    with structlog.testing.capture_logs() as lines:
        assert run_drain(rig) == 1

    evicted = [line for line in lines if line["event"] == "pod_evicted"]
    assert [(line["pod"], line["answer"]) for line in evicted] == [("default/train", "accepted")]


def test_force_names_each_pod_that_restarts_under_the_same_name(rig: NodeRig) -> None:
    telemetry = fakes.FakeTelemetry()
    rig.disruptions.refusals["train"] = "no"
    rig.callbacks.add(
        moments.Wait, lambda: gpu_pod(rig), when=lambda: "workloads.delete" in rig.log, times=1
    )
    draining = new_drain(rig, policy=FORCE, telemetry=telemetry)

    evicted_by(draining)

    assert len(telemetry.events["pod_evicted"]) == rig.log.count("workloads.delete") == 2
    assert draining.evictions.removals.forced == ("default/train",)


def test_pod_that_is_gone_before_its_eviction_is_not_counted(rig: NodeRig) -> None:
    class Late(fake_cluster.FakeWorkloads):
        """The pod goes between the list and the eviction; kubelet is slow to let go."""

        def evict(self, pod: pod_object.Pod) -> eviction_rules.EvictionResponse:
            super().evict(pod)
            return eviction_rules.EvictionResponse(answer=eviction_rules.EvictionAnswer.GONE)

    telemetry = fakes.FakeTelemetry()
    draining = new_drain(rig, telemetry=telemetry, workloads=Late(rig))

    assert (evicted_by(draining), telemetry.events["pod_evicted"]) == (0, [])
    assert rig.log.count("workloads.evict") == 1
