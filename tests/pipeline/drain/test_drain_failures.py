"""A drain over an API that refuses, fails, or is behind."""

import math

import pytest

from mig_manager import errors
from mig_manager.core.node import policies
from mig_manager.reasons import Reason
from tests.pipeline.drain.deployments import restart_always
from tests.pipeline.drain.drains import (
    DOOMED,
    FORBIDDEN,
    FORCE,
    PASSIVE,
    SILENT,
    api_error,
    drain_to_failure,
    empty,
    evicted_by,
    gpu_pod,
    new_drain,
    run_drain,
    usage_of,
)
from tests.rigs.node import fakes, moments
from tests.rigs.node.node_rig import NodeRig


def test_where_evictions_are_forbidden_the_pods_are_waited_for() -> None:
    rig = empty()
    first, second = gpu_pod(rig), gpu_pod(rig, "second")
    rig.failures.add("workloads.can_evict", FORBIDDEN)
    rig.callbacks.add(moments.Time(8), lambda: rig.pods.remove(first))
    rig.callbacks.add(moments.Time(15), lambda: rig.pods.remove(second))

    assert run_drain(rig) == 0

    assert rig.clock.now_s < 20
    assert "workloads.evict" not in rig.log


def test_forbidden_evictions_name_the_pods_and_the_missing_right(rig: NodeRig) -> None:
    gpu_pod(rig, "second")
    rig.failures.add("workloads.can_evict", FORBIDDEN)

    error = drain_to_failure(
        rig,
        Reason.FORBIDDEN,
        "default/train, default/second (the agent may not evict it (Forbidden)); the API said 403",
    )

    assert isinstance(error, errors.DrainError)
    assert error.message.count("the API said 403") == 1


@pytest.mark.parametrize("passing", [FORBIDDEN, SILENT])
@pytest.mark.parametrize("call", ["workloads.can_evict", "workloads.evict"])
def test_a_transient_refusal_delays_the_run_by_seconds(
    rig: NodeRig, call: str, passing: Exception
) -> None:
    rig.failures.add(call, passing)
    rig.callbacks.add(moments.Time(1), rig.failures.clear)

    assert run_drain(rig) == 1

    assert rig.clock.now_s < 10


def test_right_that_is_revoked_between_two_evictions_is_waited_for(rig: NodeRig) -> None:
    second = gpu_pod(rig, "second")
    rig.failures.add(
        "workloads.evict", FORBIDDEN, when=lambda: rig.log.count("workloads.evict") > 1
    )

    error = drain_to_failure(rig, Reason.FORBIDDEN, "1 pod still uses")

    assert ": default/second" in error.message
    assert list(rig.pods) == [second]
    assert not rig.pods[second].is_terminating


@pytest.mark.parametrize(
    ("of_first", "text"),
    [(None, "default/train (waits for the others)"), (SILENT, "; the API said 403")],
    ids=["forbidden", "forbidden comes before silent"],
)
def test_no_pod_is_evicted_while_another_cannot_be(
    rig: NodeRig, of_first: Exception | None, text: str
) -> None:
    gpu_pod(rig, "second")
    call = "workloads.can_evict"  # for the two pods in turn
    rig.failures.add(call, FORBIDDEN, when=lambda: rig.log.count(call) % 2 == 0)
    if of_first:
        rig.failures.add(call, of_first, when=lambda: rig.log.count(call) % 2 == 1)

    drain_to_failure(rig, Reason.FORBIDDEN, text)

    assert "workloads.evict" not in rig.log


def test_a_pod_that_is_leaving_by_itself_is_not_blamed_on_a_missing_right(rig: NodeRig) -> None:
    (uid,) = rig.pods
    rig.failures.add("workloads.can_evict", FORBIDDEN)
    rig.kubelet.all_end_from_s = math.inf
    rig.callbacks.add(moments.Time(2), lambda: rig.pods.change(uid, is_terminating=True))

    drain_to_failure(rig, Reason.DRAIN_TIMEOUT, "still terminating")


def test_a_request_that_the_api_calls_wrong_ends_the_drain_at_once(rig: NodeRig) -> None:
    rig.failures.add("workloads.can_evict", api_error(Reason.API_ERROR, 400))

    with pytest.raises(errors.ClusterError) as caught:
        run_drain(rig)

    assert caught.value.reason is Reason.API_ERROR
    assert rig.clock.now_s == 0


@pytest.mark.parametrize(
    ("call", "error", "why", "most_calls"),
    [
        ("can_evict", FORBIDDEN, "the agent may not evict it", 5),
        ("can_evict", SILENT, "failed to evict it", 5),
        ("can_evict", api_error(Reason.API_UNAVAILABLE, retry_after_s=15), "failed to", 2),
        ("delete", FORBIDDEN, "the agent may not delete it", 5),
    ],
    ids=["forbidden", "silent", "longer pause", "forbidden by force"],
)
def test_lasting_refusal_is_the_reason_and_is_retried_every_few_seconds(
    rig: NodeRig, call: str, error: errors.ClusterError, why: str, most_calls: int
) -> None:
    by_force = call == "delete"
    if by_force:
        rig.disruptions.refusals["train"] = "no"
    rig.failures.add(f"workloads.{call}", error)

    drain_to_failure(rig, error.reason, why, policy=FORCE if by_force else None)

    assert 2 <= rig.log.count(f"workloads.{call}") <= most_calls


def test_force_is_used_where_only_evictions_are_forbidden(rig: NodeRig) -> None:
    rig.failures.add("workloads.can_evict", FORBIDDEN)
    draining = new_drain(rig, policy=FORCE)

    evicted_by(draining)

    assert draining.evictions.removals.forced == ("default/train",)
    assert 20 <= rig.clock.now_s < 25


@pytest.mark.parametrize("error", [FORBIDDEN, SILENT])
def test_force_that_fails_does_not_give_the_reason_of_the_budgets(
    rig: NodeRig, error: errors.ClusterError
) -> None:
    rig.disruptions.refusals["train"] = "no"
    rig.failures.add("workloads.budgets", error)
    # Its grace period is longer.
    rig.kubelet.all_end_from_s = math.inf

    failure = drain_to_failure(rig, Reason.DRAIN_TIMEOUT, "still terminating", policy=FORCE)

    assert "udget" not in failure.message
    assert str(error.status) not in failure.message


def test_a_briefly_silent_api_does_not_end_the_drain(rig: NodeRig) -> None:
    rig.kubelet.all_end_from_s = 12
    rig.failures.add("workloads.list", SILENT, when=lambda: 0 < rig.clock.now_s < 10)

    assert run_drain(rig) == 1

    assert rig.log.count("workloads.evict") == 1


@pytest.mark.parametrize("is_done", [True, False])
def test_a_pod_whose_eviction_is_not_answered_counts_once(*, is_done: bool) -> None:
    rig = empty()
    restart_always(rig, "daemon", [frozenset({DOOMED})], kind="ReplicaSet")
    unanswered = rig.lost_answers if is_done else rig.failures
    unanswered.add("workloads.evict", SILENT, when=lambda: is_done or 0 < rig.clock.now_s < 10)

    with pytest.raises(errors.DrainError) as caught:
        run_drain(rig)

    assert caught.value.reason is Reason.PODS_RETURN
    assert rig.pods.names == {"daemon-2"}


def test_silent_api_ends_the_drain_at_the_deadline(rig: NodeRig) -> None:
    rig.kubelet.all_end_from_s = math.inf
    rig.failures.add("workloads.list", SILENT, when=lambda: rig.clock.now_s > 0)

    assert str(drain_to_failure(rig, Reason.API_UNAVAILABLE)) == str(SILENT)


def test_a_silent_api_is_not_taken_for_an_empty_node() -> None:
    rig = empty()
    before = usage_of(rig)
    rig.failures.add("workloads.list", SILENT)
    late = gpu_pod(rig, "late")
    rig.callbacks.add(moments.Time(3), rig.failures.clear)

    new_drain(rig, usage=before).run()

    assert late not in rig.pods


def test_a_newer_request_ends_a_drain_while_the_api_does_not_answer(rig: NodeRig) -> None:
    before = usage_of(rig)
    rig.failures.add("workloads.list", SILENT)

    cancel = fakes.FakeCancellation(rig.clock, ends_at=3, is_replaced=True)

    with pytest.raises(errors.Superseded):
        new_drain(rig, cancel=cancel, usage=before).run()

    assert rig.clock.now_s < 1


@pytest.mark.parametrize("policy", [PASSIVE, None], ids=["waits", "evicts"])
def test_drain_lists_pods_twice_and_waits_on_the_watch(
    rig: NodeRig, policy: policies.Policy | None
) -> None:
    (staying,) = rig.pods
    rig.pods.watched = lambda: tuple(rig.pods.values())
    if policy:
        rig.callbacks.add(moments.Time(15), lambda: rig.pods.remove(staying))

    run_drain(rig, policy=policy)

    # The list that shows whom to evict, and the list that ends it.
    assert rig.log.count("workloads.list") == 2


@pytest.mark.parametrize("shows_all", [True, False])
def test_outdated_watch_neither_ends_nor_fails_a_drain(rig: NodeRig, *, shows_all: bool) -> None:
    (staying,) = rig.pods
    shown = tuple(rig.pods.values()) if shows_all else ()
    rig.pods.watched = lambda: shown
    rig.callbacks.add(moments.Time(15), lambda: rig.pods.remove(staying))

    assert run_drain(rig, policy=PASSIVE) == 0

    assert rig.clock.now_s >= 15
