"""The pipeline over a small node in memory: request and rig in, rig out."""

import dataclasses
import json
from collections.abc import Sequence

import pytest

from mig_manager import errors
from mig_manager.core import model, ports, steps
from mig_manager.core.node import cluster
from mig_manager.core.node import policy as policies
from mig_manager.core.records import gpu_codec, status
from tests import fakes, gpu_values
from tests.scenes import (
    CONFIG,
    assert_nothing_taken,
    busy_node,
    device,
    guarded_node,
    node,
    reconciler,
    run,
    whole_node,
)


def test_a_first_layout_succeeds_with_every_device_schedulable_by_a_new_plugin() -> None:
    rig = node()
    old_plugin = next(iter(rig.pods))

    outcome = run(rig, "all-1g.5gb")

    assert outcome.state is model.State.SUCCESS
    assert rig.states == ["pending", "success"]
    assert rig.labels[cluster.STATE_LABEL] == "success"
    assert rig.labels[cluster.APPLIED_LABEL] == "all-1g.5gb"
    assert rig.labels[cluster.PLUGIN_DEPLOY_LABEL] == "true"
    assert len(rig.schedulable["nvidia.com/gpu"]) == 14
    assert old_plugin not in rig.pods
    assert_nothing_taken(rig)


def test_an_active_layout_succeeds_after_one_observation_and_touches_no_pod() -> None:
    rig = node(layout="all-balanced")
    pods = dict(rig.pods)

    outcome = run(rig, "all-balanced")

    assert outcome.reason is errors.Reason.ALREADY_APPLIED
    assert rig.states == ["success"]
    assert rig.log.count("gpus.observe") == 1
    assert rig.pods == pods
    assert rig.executed == []


def test_an_expected_change_is_pending_before_the_gpus_are_observed() -> None:
    rig = node()
    ours = reconciler(rig)
    ours.run("all-1g.5gb", fakes.FakeRequest(rig.clock))
    rig.log.clear()

    outcome = ours.run("all-balanced", fakes.FakeRequest(rig.clock))

    assert outcome.reason is errors.Reason.APPLIED
    assert rig.log.index("node.patch") < rig.log.index("gpus.observe")
    assert_nothing_taken(rig)


@pytest.mark.parametrize("name", ["all-1g.5gb", "too-much", "no-such-layout"])
def test_an_active_or_impossible_layout_is_never_pending(name: str) -> None:
    rig = node()
    ours = reconciler(rig)
    ours.run("all-1g.5gb", fakes.FakeRequest(rig.clock))
    rig.states.clear()

    ours.run(name, fakes.FakeRequest(rig.clock))

    assert rig.states == ["success" if name == "all-1g.5gb" else "failed"]


def test_what_was_foreseen_decides_nothing() -> None:
    rig = node()
    ours = reconciler(rig)
    ours.run("all-1g.5gb", fakes.FakeRequest(rig.clock))
    other = node(layout="all-balanced")
    rig.gpus, rig.schedulable = other.gpus, other.schedulable
    rig.executed.clear()

    outcome = ours.run("all-balanced", fakes.FakeRequest(rig.clock))

    assert outcome.reason is errors.Reason.ALREADY_APPLIED
    assert rig.executed == []
    assert_nothing_taken(rig)


def test_a_second_try_is_not_pending_before_it_has_looked() -> None:
    rig = node()
    ours = reconciler(rig)
    ours.run("all-1g.5gb", fakes.FakeRequest(rig.clock))
    rig.log.clear()

    ours.run("all-balanced", fakes.FakeRequest(rig.clock), attempt=2)

    assert rig.log.index("gpus.observe") < rig.log.index("node.patch")


class Readiness(ports.Standby):
    """Notes each call in the rig's log."""

    def __init__(self, rig: fakes.NodeRig) -> None:
        self._log = rig.log

    def prepare(self) -> None:
        self._log.append("prepare")

    def expect_change(self) -> None:
        self._log.append("expect change")

    def dismiss(self) -> None:
        self._log.append("dismiss")


def test_standby_is_called_before_a_check_before_a_change_and_at_the_end() -> None:
    rig = node()
    ours = reconciler(rig, standby=Readiness(rig))

    ours.run("all-1g.5gb", fakes.FakeRequest(rig.clock))
    ours_only = {"prepare", "gpus.observe", "expect change", "gpus.execute", "dismiss"}
    assert [what for what in rig.log if what in ours_only] == [
        *("prepare", "gpus.observe", "expect change", "gpus.execute", "dismiss"),
    ]
    rig.log.clear()
    ours.run("all-1g.5gb", fakes.FakeRequest(rig.clock))
    assert "expect change" not in rig.log
    assert rig.log.count("dismiss") == 1


def test_only_pods_on_destroyed_instances_are_evicted_and_the_others_keep_their_uuids() -> None:
    rig = node(layout="all-balanced")
    affected = rig.add_pod("affected", devices=frozenset({device(rig, 0, "2g.10gb")}))
    spared = [
        rig.add_pod("spared-3g", devices=frozenset({device(rig, 0, "3g.20gb")})),
        rig.add_pod("spared-1g", devices=frozenset({device(rig, 0, "1g.5gb")})),
        rig.add_pod("neighbour", devices=frozenset({device(rig, 1, "2g.10gb")})),
    ]
    used = [rig.assigned[uid] for uid in spared]

    outcome = run(rig, "one-slice-changed")

    assert outcome.state is model.State.SUCCESS
    assert rig.log.count("workloads.evict") == 1
    assert affected not in rig.pods
    alive = {uuid for gpu in rig.gpus for uuid in gpu.mig_uuids}
    for uid, devices in zip(spared, used, strict=True):
        assert uid in rig.pods
        assert devices <= alive


def test_without_kubelet_every_gpu_pod_leaves_because_any_may_hold_what_goes() -> None:
    rig = node(layout="all-balanced")
    gpu_pod = rig.add_pod("gpu", devices=frozenset({device(rig, 1, "3g.20gb")}))
    cpu_pod = rig.add_pod("cpu")
    rig.kubelet_is_silent = True

    outcome = run(rig, "one-slice-changed")

    assert outcome.state is model.State.SUCCESS
    assert gpu_pod not in rig.pods
    assert cpu_pod in rig.pods


@pytest.mark.parametrize(
    ("layout", "text", "reason"),
    [
        ("all-9g", CONFIG, errors.Reason.UNKNOWN_CONFIG),
        ("all-1g.5gb", "version: v1\nmig-configs: [", errors.Reason.INVALID_CONFIG),
        ("all-1g.5gb", CONFIG.replace("7}", "seven}"), errors.Reason.INVALID_CONFIG),
        ("no-such-profile", CONFIG, errors.Reason.UNKNOWN_PROFILE),
        ("too-much", CONFIG, errors.Reason.DOES_NOT_FIT),
        ("other-gpu", CONFIG, errors.Reason.NO_GPU_MATCHES),
    ],
)
def test_an_impossible_layout_fails_before_anything_is_touched(
    layout: str, text: str, reason: errors.Reason
) -> None:
    rig = node(layout="all-balanced")
    rig.add_pod("busy", devices=frozenset({device(rig, 0, "3g.20gb")}))
    pods, labels, gpus = dict(rig.pods), dict(rig.labels), rig.gpus

    outcome = run(rig, layout, text)

    assert outcome.state is model.State.FAILED
    assert outcome.reason is reason
    assert rig.states == ["failed"]
    assert rig.pods == pods
    assert rig.gpus == gpus
    assert rig.labels == {**labels, cluster.STATE_LABEL: "failed"}
    assert reason.remedy in json.loads(rig.annotations[cluster.STATUS_ANNOTATION])["message"]
    assert_nothing_taken(rig)


def test_a_drain_that_a_budget_blocks_costs_nothing_and_names_pod_and_budget() -> None:
    rig = node(layout="all-balanced")
    rig.add_pod("guarded", devices=frozenset({device(rig, 0, "2g.10gb")}))
    rig.add_pod("free", devices=frozenset({device(rig, 1, "2g.10gb")}))
    rig.budgets["guarded"] = "budget 'pdb-a' allows no disruption"
    pods, gpus = dict(rig.pods), rig.gpus

    outcome = run(rig, "all-1g.5gb")

    assert outcome.reason is errors.Reason.DRAIN_TIMEOUT
    assert "default/guarded (budget 'pdb-a'" in outcome.message
    assert "default/free (waits for the others)" in outcome.message
    assert "workloads.evict" not in rig.log
    assert (rig.pods, rig.gpus) == (pods, gpus)
    assert_nothing_taken(rig)


def test_an_evicted_daemonset_pod_cannot_restart_before_the_change_ends() -> None:
    rig = node(layout="all-balanced")
    taken = frozenset({device(rig, 0, "2g.10gb")})
    rig.add_pod("monitor-1", devices=taken, owner_kind="DaemonSet")

    def replace() -> None:
        names = {pod.name for pod in rig.pods.values()}
        if "monitor-1" not in names and not rig.has_hold_taint:
            rig.add_pod("monitor-1", owner_kind="DaemonSet")

    rig.clock.on_wait.append(replace)
    outcome = run(rig, "one-slice-changed")

    assert outcome.state is model.State.SUCCESS
    assert rig.log.count("workloads.evict") == 1
    assert "monitor-1" in {pod.name for pod in rig.pods.values()}
    assert_nothing_taken(rig)


def test_a_drain_blocked_by_many_pods_has_a_short_message() -> None:
    rig = busy_node()
    taken = frozenset({device(rig, 0, "2g.10gb")})
    for number in range(224):
        rig.add_pod(f"a-rather-long-name-of-a-pod-{number}", devices=taken, is_kept=True)

    outcome = run(rig, "one-slice-changed")

    assert "225 pods to evict: default/affected" in next(
        m for m in rig.messages if "to evict" in m
    )
    assert "225 pods still use" in outcome.message
    assert outcome.message.count("do-not-evict") == 1
    assert outcome.message.endswith(outcome.reason.remedy)
    assert max(len(text) for text in (*rig.messages, *rig.statuses, outcome.message)) < 1024


def test_an_agent_never_cordons() -> None:
    rig = busy_node()
    seen: set[bool] = set()
    rig.clock.on_wait.append(lambda: seen.add(rig.is_unschedulable))
    run(rig, "one-slice-changed")
    assert seen == {False}


def test_a_layout_that_steps_do_not_bring_about_is_never_called_a_success() -> None:
    rig = node()
    hardware_port = rig.hardware

    class Liar:
        observe = hardware_port.observe

        def execute(self, plan: steps.Plan, seen: Sequence[model.Gpu] = ()) -> model.ObservedGpus:
            rig.called("gpus.execute")
            return gpu_values.of_plan(rig.gpus, plan)

    ours = reconciler(rig, gpus=Liar())

    outcome = ours.run("all-1g.5gb", fakes.FakeRequest(rig.clock))

    assert outcome.reason is errors.Reason.VERIFY_FAILED
    assert_nothing_taken(rig)


def test_an_old_driver_that_reports_profiles_only_with_mig_on_is_planned_twice() -> None:
    rig = node()
    full = {gpu.uuid: gpu.profiles for gpu in rig.gpus}
    rig.gpus = tuple(dataclasses.replace(gpu, profiles=None) for gpu in rig.gpus)
    hardware_port = rig.hardware

    class OldDriver:
        def observe(self) -> model.ObservedGpus:
            return model.ObservedGpus(
                dataclasses.replace(gpu, profiles=full[gpu.uuid])
                if gpu.current_mode is model.MigMode.ENABLED
                else gpu
                for gpu in hardware_port.observe()
            )

        def execute(self, plan: steps.Plan, seen: Sequence[model.Gpu] = ()) -> model.ObservedGpus:
            hardware_port.execute(plan, seen)
            return gpu_values.of_plan(self.observe(), plan)

    ours = reconciler(rig, gpus=OldDriver())

    outcome = ours.run("all-1g.5gb", fakes.FakeRequest(rig.clock))

    assert outcome.state is model.State.SUCCESS
    assert all(len(gpu.mig_uuids) == 7 for gpu in rig.gpus)


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_pod_that_kubelet_admits_before_the_plugin_stops_leaves_before_any_change(
    *, is_kept: bool
) -> None:
    rig = busy_node()
    before = rig.gpus
    doomed = frozenset({device(rig, 0, "2g.10gb")})
    late: list[str] = []

    def slip_in() -> None:
        # A pod that is bound to the node by its author passes the scheduler and its cordon.
        if rig.labels[cluster.PLUGIN_DEPLOY_LABEL] == cluster.PAUSED_VALUE and not late:
            late.append(rig.add_pod("late", devices=doomed, is_kept=is_kept))

    rig.clock.on_wait.append(slip_in)
    outcome = run(rig, "one-slice-changed")

    assert late
    assert_nothing_taken(rig)
    if is_kept:
        assert outcome.reason is errors.Reason.DRAIN_TIMEOUT
        assert "default/late (its annotation mig-manager.io/do-not-evict" in outcome.message
        assert rig.gpus == before
        return
    assert outcome.state is model.State.SUCCESS
    assert late[0] not in rig.pods
    assert rig.log.count("workloads.evict") == 2
    last_eviction = len(rig.log) - rig.log[::-1].index("workloads.evict")
    assert last_eviction < rig.log.index("gpus.execute")


def test_the_node_is_tainted_before_any_pod_is_evicted() -> None:
    rig = busy_node()
    closed: list[bool] = []
    rig.clock.on_wait.append(lambda: closed.append(rig.has_hold_taint))

    run(rig, "one-slice-changed")

    assert rig.log.index("node.patch") < rig.log.index("workloads.can_evict")
    executes_at = rig.log.index("gpus.execute")
    assert rig.log.index("workloads.can_evict") < executes_at
    assert closed[0]


def test_with_policy_node_every_gpu_pod_leaves_even_when_nothing_is_destroyed() -> None:
    rig = whole_node()
    cpu_pod = rig.add_pod("cpu")
    nic = rig.add_pod("nic", gpu_resources={"nvidia.com/hostdev": 1})
    claimant = rig.add_pod("claimant")
    rig.claims.add(claimant)

    outcome = run(rig, "one-slice-changed")

    assert outcome.state is model.State.SUCCESS
    names = {pod.name for pod in rig.pods.values()}
    assert {"affected", "spared", "claimant"}.isdisjoint(names)
    assert {cpu_pod, nic} <= rig.pods.keys()


def test_with_policy_none_no_pod_is_evicted_and_the_deadline_names_the_remaining_pods() -> None:
    rig = busy_node()
    rig.policy = policies.Policy(drain=policies.Drain.NONE)

    outcome = run(rig, "one-slice-changed")

    assert outcome.reason is errors.Reason.DRAIN_TIMEOUT
    assert "default/affected (--drain-policy none evicts no pod)" in outcome.message
    assert {"workloads.evict", "workloads.can_evict", "workloads.delete"}.isdisjoint(rig.log)
    assert_nothing_taken(rig)


def test_force_is_reported_in_an_event_and_in_the_message() -> None:
    rig = guarded_node()

    outcome = run(rig, "one-slice-changed")

    assert outcome.state is model.State.SUCCESS
    assert "Deleted by force: default/affected" in outcome.message
    assert "ForcedDrain" in rig.events
    assert "workloads.evict" not in rig.log


def test_a_claim_on_a_gpu_makes_a_pod_leave_and_the_event_says_why() -> None:
    rig = busy_node()
    uid = rig.add_pod("claimant")
    rig.claims.add(uid)

    run(rig, "one-slice-changed")

    assert uid not in rig.pods
    drained = rig.messages[rig.events.index("Draining")]
    assert "default/claimant [its ResourceClaim may stand for any GPU]" in drained


def test_a_run_publishes_the_gpus_and_one_that_sees_none_leaves_what_is_published() -> None:
    rig = node(layout="all-balanced")

    assert run(rig, "all-1g.5gb").state is model.State.SUCCESS

    text = rig.annotations[cluster.GPUS_ANNOTATION]
    published = gpu_codec.from_json(text)
    assert [(gpu.uuid, gpu.profiles, status.device_counts(gpu)) for gpu in published] == [
        (gpu.uuid, gpu.profiles, status.device_counts(gpu)) for gpu in rig.gpus
    ]
    assert run(rig, "all-9g").state is model.State.FAILED
    assert rig.annotations[cluster.GPUS_ANNOTATION] == text
