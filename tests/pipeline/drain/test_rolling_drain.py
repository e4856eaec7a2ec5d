"""What PodDisruptionBudgets that grant a part of a drain's evictions make of it."""

import dataclasses

import pytest

from mig_manager import errors
from mig_manager.core.node import policies
from mig_manager.core.records import run_status
from mig_manager.reasons import Reason
from tests.pipeline.drain.deployments import (
    CONFIG,
    Deployment,
    is_closed,
    node_with,
    restart_always,
    try_once,
)
from tests.rigs.node import agents, cluster_parts, ends, moments, nodes


def test_partial_budget_drains_as_successors_get_ready() -> None:
    rig, serving = node_with(room_elsewhere=4)

    assert try_once(rig).state is run_status.State.SUCCESS

    assert serving.kills == 4
    assert serving.least_healthy == 3
    assert any(
        "evicting default/serving-1; 3 more" in each for each in rig.node_object.status_messages
    )
    ends.assert_restored(rig)


def test_drain_without_room_elsewhere_evicts_one_pod_in_all_tries() -> None:
    rig, serving = node_with(room_elsewhere=0)
    bare = rig.pods.add("bare", devices=frozenset({nodes.device(rig, 0, "1g.5gb")}))
    before = rig.gpus
    agent = agents.new_agent(rig, layouts=CONFIG)

    attempt_outcomes = [try_once(rig, agent) for _ in range(4)]

    assert serving.kills == 1
    assert bare in rig.pods
    assert rig.gpus == before
    assert {outcome.reason for outcome in attempt_outcomes} == {Reason.DRAIN_STALLED}
    assert "no node has room for default/serving-5" in attempt_outcomes[0].message
    assert "default/serving-2" in attempt_outcomes[0].message
    assert all(outcome.should_retry for outcome in attempt_outcomes)


def test_drain_does_not_stall_while_successors_start_slowly_elsewhere() -> None:
    rig, serving = node_with(room_elsewhere=4, starts=False)
    uid = rig.pods.add("ended", labels={"app": "serving"}, phase="Succeeded", is_ready=False)
    rig.pods.elsewhere[uid] = dataclasses.replace(rig.pods.pop(uid), node_name="node-b")

    outcome = try_once(rig)

    assert outcome.reason is Reason.DRAIN_TIMEOUT
    assert "not ready yet elsewhere: default/serving-5" in outcome.message
    assert "default/ended" not in outcome.message
    assert is_closed(rig)
    assert serving.kills == 1


def test_a_rolling_drain_lasts_as_long_as_successors_get_ready() -> None:
    rig, serving = node_with(room_elsewhere=0)

    def make_room() -> None:
        serving.room_elsewhere += 1

    for number in range(1, 5):
        rig.callbacks.add(moments.Time(12.0 * number), make_room)

    assert try_once(rig).state is run_status.State.SUCCESS


@pytest.mark.parametrize(
    ("kind", "budget"), [("ReplicaSet", 1), ("DaemonSet", 7), ("StatefulSet", 0)]
)
def test_pods_that_tolerate_the_taint_are_evicted_once_more(kind: str, budget: int) -> None:
    rig = nodes.node(layout="all-1g.5gb")
    devices = sorted(rig.gpus[0].mig_uuids)
    before = rig.gpus
    rig.disruptions.budgets.append(cluster_parts.Budget("web", "web", len(devices), budget))
    rig.owner.policy = policies.Policy(is_forced=not budget)
    restart_always(rig, "web", (frozenset({device}) for device in devices), kind=kind)

    outcome = try_once(rig, agents.new_agent(rig, layouts=CONFIG))

    assert outcome.reason is Reason.PODS_RETURN
    assert f"return to the node: {kind} default/web" in outcome.message
    assert not outcome.should_retry
    removed = rig.log.count("workloads.evict") + rig.log.count("workloads.delete")
    assert removed == 2 * (budget or len(devices))
    assert rig.gpus == before
    ends.assert_restored(rig)


def test_a_later_attempt_remembers_the_pods_that_return() -> None:
    rig = nodes.node(layout="all-1g.5gb")
    restart_always(rig, "probe", [frozenset(rig.gpus[0].mig_uuids)], kind="DaemonSet")
    rig.disruptions.refusals["probe-1"] = "not now"
    agent = agents.new_agent(rig, layouts=CONFIG)

    assert try_once(rig, agent).reason is Reason.DRAIN_TIMEOUT
    rig.disruptions.refusals.clear()

    assert try_once(rig, agent).reason is Reason.PODS_RETURN
    assert "probe-2" in rig.pods.names


def test_strategy_whole_evicts_no_pod_for_a_partial_budget() -> None:
    rig, serving = node_with(room_elsewhere=4)
    rig.owner.policy = policies.Policy(strategy=policies.DrainStrategy.WHOLE)

    outcome = try_once(rig)

    assert outcome.reason is Reason.DRAIN_TIMEOUT
    assert "PodDisruptionBudget serving allows 1 of 4 evictions" in outcome.message
    assert serving.kills == 0
    assert "workloads.can_evict" not in rig.log
    assert not is_closed(rig)


def test_strategy_whole_evicts_no_late_pod_for_a_partial_budget() -> None:
    rig = nodes.node(layout="all-1g.5gb")
    rig.owner.policy = policies.Policy(strategy=policies.DrainStrategy.WHOLE)
    first, *devices = rig.gpus[0].mig_uuids
    rig.pods.add("early", devices=frozenset({first}))
    late: list[Deployment] = []

    rig.callbacks.add(
        moments.Call,
        lambda: late.append(Deployment(rig, devices[:2], room_elsewhere=2)),
        when=lambda: rig.node_object.is_plugin_paused,
        times=1,
    )

    assert try_once(rig).reason is Reason.DRAIN_TIMEOUT
    assert "early" not in rig.pods.names
    assert late[0].kills == 0


def test_pods_that_the_budgets_grant_together_are_evicted_at_once() -> None:
    rig, serving = node_with(room_elsewhere=4)
    serving.budget.max_unavailable = 4

    assert try_once(rig).state is run_status.State.SUCCESS

    assert serving.kills == 4
    first = rig.log.index("workloads.evict")
    assert rig.log[first : first + 4] == ["workloads.evict"] * 4


@pytest.mark.parametrize("is_shared", [True, False])
def test_no_pod_is_evicted_while_another_budget_blocks_it(*, is_shared: bool) -> None:
    rig, serving = node_with(room_elsewhere=4, replicas=2)
    if is_shared:
        rig.disruptions.budgets.append(cluster_parts.Budget("second", "serving", 2, 2))
        why = "PodDisruptionBudgets second and serving both cover it"
    else:
        device = next(
            uuid for uuid in rig.gpus[0].mig_uuids if uuid not in serving.local_devices.values()
        )
        Deployment(rig, [device], room_elsewhere=1, name="guarded", max_unavailable=0)
        why = "PodDisruptionBudget guarded needs 1 healthy pods and has 1"

    outcome = try_once(rig)

    assert outcome.reason is Reason.DRAIN_TIMEOUT
    assert why in outcome.message
    assert "workloads.evict" not in rig.log
    ends.assert_restored(rig)


def test_a_pod_that_may_no_longer_be_evicted_ends_a_rolling_drain() -> None:
    rig, serving = node_with(room_elsewhere=4)

    def keep() -> None:
        if serving.kills == 1:
            rig.pods.change(list(serving.local_devices)[-1], is_kept=True)

    rig.callbacks.add(moments.Wait, keep)
    outcome = try_once(rig)

    assert outcome.reason is Reason.DRAIN_TIMEOUT
    assert "do-not-evict forbids the eviction" in outcome.message
    assert serving.kills == 1
    assert not is_closed(rig)


def test_a_rolling_drain_goes_on_while_a_pod_deleted_by_force_ends() -> None:
    rig, serving = node_with(room_elsewhere=4)
    device = next(
        uuid for uuid in rig.gpus[0].mig_uuids if uuid not in serving.local_devices.values()
    )
    uid = rig.pods.add("forced", devices=frozenset({device}))

    def delete() -> None:
        if serving.kills == 1 and uid in rig.pods:
            rig.pods.remove(uid)
            rig.kubelet.devices_of_unlisted_pods["forced"] = frozenset({device})
        elif serving.kills == 4:
            rig.kubelet.devices_of_unlisted_pods.clear()

    rig.callbacks.add(moments.Wait, delete)

    assert try_once(rig).state is run_status.State.SUCCESS


@pytest.mark.parametrize("labels", [{}, {"app": "serving"}], ids=["without budget", "with"])
def test_pods_without_a_controller_go_last(labels: dict[str, str]) -> None:
    rig = nodes.node(layout="all-1g.5gb")
    first, *others = list(rig.gpus[0].mig_uuids)[:3]
    bare = rig.pods.add("bare", devices=frozenset({first}), labels=labels)
    Deployment(rig, others, room_elsewhere=4)
    stays = rig.note(lambda: not rig.pods[bare].is_terminating, at="workloads.evict")

    assert try_once(rig).state is run_status.State.SUCCESS

    assert stays == [True] * 3
    assert bare not in rig.pods


def test_pods_without_a_controller_stay_if_another_eviction_is_refused() -> None:
    rig = nodes.node(layout="all-1g.5gb")
    first, second = (frozenset({uuid}) for uuid in list(rig.gpus[0].mig_uuids)[:2])
    bare = rig.pods.add("bare", devices=first)
    rig.pods.add("serving", devices=second, owner_kind="ReplicaSet")
    rig.callbacks.add(
        "workloads.evict", lambda: rig.disruptions.refusals.update(serving="not now"), times=1
    )

    assert try_once(rig).reason is Reason.DRAIN_TIMEOUT

    assert not rig.pods[bare].is_terminating


def test_pods_without_owner_stay_if_a_budget_never_grants_all() -> None:
    rig = nodes.node(layout="all-1g.5gb")
    notebooks = {
        rig.pods.add(f"notebook-{n}", devices=frozenset({device}), labels={"app": "notebooks"})
        for n, device in enumerate(list(rig.gpus[0].mig_uuids)[:3])
    }
    rig.disruptions.budgets.append(cluster_parts.Budget("notebooks", "notebooks", 3, 1))

    outcome = try_once(rig)

    assert outcome.reason is Reason.DRAIN_TIMEOUT
    assert "allows 1 of 3 evictions, and nothing replaces 3 of the pods" in outcome.message
    assert notebooks <= rig.pods.keys()
    assert not rig.node_object.has_reconfiguring_taint


def test_a_blocked_drain_lists_budgets_and_checks_no_single_pod() -> None:
    rig, serving = node_with(room_elsewhere=0)
    serving.budget.max_unavailable = 0

    try_once(rig)

    assert "workloads.can_evict" not in rig.log
    assert rig.log.count("workloads.budgets") <= 6


def test_agent_without_the_right_to_list_budgets_drains_and_reports_it() -> None:
    rig, serving = node_with(room_elsewhere=0)
    forbidden = errors.ClusterError("no", reason=Reason.FORBIDDEN, status=403)
    rig.failures.add("workloads.budgets", forbidden)
    agent = agents.new_agent(rig, layouts=CONFIG)

    attempt_outcomes = [try_once(rig, agent) for _ in range(3)]

    assert serving.kills == 1
    assert "may not list PodDisruptionBudgets" in attempt_outcomes[0].message
    assert rig.log.count("workloads.budgets") == 3


def test_api_that_never_lists_budgets_is_the_reason() -> None:
    rig, serving = node_with(room_elsewhere=4)
    away = errors.ClusterError("away", reason=Reason.API_UNAVAILABLE, status=503)
    rig.failures.add("workloads.budgets", away)

    assert try_once(rig).reason is Reason.API_UNAVAILABLE
    assert serving.kills == 0
