"""The pipeline over a small node in memory: request and rig in, rig out."""

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Sequence

import pytest

from mig_manager import errors
from mig_manager.core import model, ports, steps
from mig_manager.core.node import clients, cluster
from mig_manager.core.node import policy as policies
from mig_manager.core.planner import planner
from mig_manager.core.records import gpu_codec, status
from tests import fakes
from tests.scenes import (
    BROKEN,
    CONFIG,
    DCGM,
    EXPORTER,
    GFD,
    SAMPLER,
    SCENARIOS,
    SWEPT,
    assert_nothing_taken,
    broken,
    busy_node,
    calls,
    device,
    guarded_node,
    monitored_node,
    node,
    reconciler,
    refuse,
    run,
    sharing_node,
    watched_node,
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
    rig.budgets["guarded"] = "budget 'pdb-a' allows no disruption"
    pods, gpus = dict(rig.pods), rig.gpus

    outcome = run(rig, "one-slice-changed")

    assert outcome.reason is errors.Reason.DRAIN_TIMEOUT
    assert "default/guarded" in outcome.message
    assert "pdb-a" in outcome.message
    assert rig.pods == pods
    assert rig.gpus == gpus
    assert_nothing_taken(rig)


def test_no_pod_is_evicted_while_a_budget_guards_another_affected_pod() -> None:
    rig = node(layout="all-balanced")
    rig.add_pod("guarded", devices=frozenset({device(rig, 0, "2g.10gb")}))
    rig.add_pod("free", devices=frozenset({device(rig, 1, "2g.10gb")}))
    rig.budgets["guarded"] = "no"

    outcome = run(rig, "all-1g.5gb")

    assert outcome.reason is errors.Reason.DRAIN_TIMEOUT
    assert "default/free (waits for the others)" in outcome.message
    assert "workloads.evict" not in rig.log
    assert {"guarded", "free"} <= {pod.name for pod in rig.pods.values()}


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


@pytest.mark.parametrize("ends_well", [True, False])
def test_a_label_that_another_program_writes_during_the_change_keeps_that_value(
    *, ends_well: bool
) -> None:
    key = "nvidia.com/gpu.deploy.dcgm"
    rig = node()
    rig.labels[key] = "true"
    rig.plugin_is_broken = not ends_well

    def upgrade_driver() -> None:
        if rig.labels[key] == cluster.PAUSED_VALUE:
            rig.labels[key] = "paused-for-driver-upgrade"

    rig.clock.on_wait.append(upgrade_driver)
    outcome = run(rig, "all-1g.5gb")

    assert (outcome.state is model.State.SUCCESS) is ends_well
    assert rig.labels[key] == "paused-for-driver-upgrade"
    assert_nothing_taken(rig)


def test_a_plugin_that_cannot_be_verified_is_restarted_once_and_not_at_every_retry() -> None:
    rig = node(layout="all-balanced")
    rig.schedulable = {"nvidia.com/gpu": frozenset({"MIG-of-yesterday"})}
    ours = reconciler(rig)
    request = fakes.FakeRequest(rig.clock)
    rig.clock.on_wait.append(
        lambda: setattr(rig, "schedulable", {"nvidia.com/gpu": frozenset({"MIG-of-yesterday"})})
    )

    assert ours.run("all-balanced", request).reason is errors.Reason.NOT_ALLOCATABLE
    assert rig.log.count("workloads.delete") == 1
    assert ours.run("all-balanced", request, attempt=2).reason is errors.Reason.NOT_ALLOCATABLE

    assert rig.log.count("workloads.delete") == 1


def test_a_node_that_was_cordoned_before_stays_cordoned() -> None:
    rig = node()
    rig.is_unschedulable = True

    assert run(rig, "all-1g.5gb").state is model.State.SUCCESS

    assert rig.is_unschedulable


def patches(make: Callable[[], fakes.NodeRig], layout: str) -> int:
    """Return how often a run patches its node."""
    rig = make()
    run(rig, layout)
    return rig.log.count("node.patch")


def just_before_patch(rig: fakes.NodeRig, number: int, write: Callable[[], object]) -> None:
    """Have another program write to the node after it was read and before a patch arrives."""

    def strike() -> None:
        if rig.log[-1] == "node.patch" and rig.log.count("node.patch") == number + 1:
            rig.on_call = lambda: None
            write()

    rig.on_call = strike


def test_a_cordon_stays_whenever_it_is_set() -> None:
    for number in range(patches(busy_node, "one-slice-changed")):
        rig = busy_node()
        just_before_patch(rig, number, functools.partial(set_cordon, rig))

        assert run(rig, "one-slice-changed").state is model.State.SUCCESS, number

        assert rig.is_unschedulable, number


def test_a_pod_that_is_only_called_like_the_device_plugin_is_left_alone() -> None:
    rig = busy_node()
    impostor = rig.add_pod(
        "impostor", labels={"app": "nvidia-device-plugin-daemonset"}, grace_s=3600
    )

    assert run(rig, "one-slice-changed").state is model.State.SUCCESS

    assert not rig.pods[impostor].is_terminating


def test_a_plugin_that_does_not_stop_closes_the_node_once() -> None:
    rig = busy_node()
    ours = reconciler(rig)
    request = fakes.FakeRequest(rig.clock)
    # No kubelet ends its pods.
    rig.clock.on_wait.clear()
    rig.clock.on_wait.append(lambda: leave_all_but(rig, "nvidia-device-plugin"))
    first = ours.run("one-slice-changed", request)
    rig.log.clear()

    second = ours.run("one-slice-changed", request, attempt=2)

    assert (first.reason, second.reason) == (errors.Reason.IN_USE, errors.Reason.IN_USE)
    assert "default/nvidia-device-plugin" in second.message
    assert second.should_retry
    assert "workloads.delete" not in rig.log
    # How it ended, and nothing before.
    assert rig.log.count("node.patch") <= 2
    rig.clock.on_wait.append(rig.live)
    rig.live()
    assert ours.run("one-slice-changed", request, attempt=3).state is model.State.SUCCESS


def leave_all_but(rig: fakes.NodeRig, name: str) -> None:
    for uid, pod in list(rig.pods.items()):
        if pod.is_terminating and pod.name != name:
            del rig.pods[uid]
            rig.assigned.pop(uid, None)


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


def set_cordon(rig: fakes.NodeRig) -> None:
    rig.is_unschedulable = True


@pytest.mark.parametrize("value", ["false", None])
def test_a_deploy_label_that_its_owner_writes_just_before_a_patch_stays(value: str | None) -> None:
    for number in range(patches(monitored_node, "one-slice-changed")):
        rig = monitored_node()

        def write(rig: fakes.NodeRig = rig) -> None:
            fakes._merge(rig.labels, {DCGM: value})

        just_before_patch(rig, number, write)

        assert run(rig, "one-slice-changed").state is model.State.SUCCESS, number

        assert rig.labels.get(DCGM) == value, number


def test_a_drain_by_a_person_during_a_change_is_not_undone() -> None:
    """As kubectl drain does it: what is cordoned already is not written."""
    rig = busy_node()
    closed: list[bool] = []

    def drain() -> None:
        if rig.log[-1] == "gpus.execute":
            closed.append(rig.has_hold_taint)
            if not rig.is_unschedulable:
                rig.is_unschedulable = True

    rig.on_call = drain
    assert run(rig, "one-slice-changed").state is model.State.SUCCESS

    assert closed == [True]
    assert rig.is_unschedulable
    assert not rig.has_hold_taint


def test_an_agent_never_cordons() -> None:
    rig = busy_node()
    seen: set[bool] = set()
    rig.clock.on_wait.append(lambda: seen.add(rig.is_unschedulable))
    run(rig, "one-slice-changed")
    assert seen == {False}


@pytest.mark.parametrize("value", ["false", "paused-for-driver-upgrade"])
def test_deploy_labels_of_others_are_left_as_they_are(value: str) -> None:
    rig = node()
    rig.labels["nvidia.com/gpu.deploy.dcgm"] = value
    rig.labels["nvidia.com/gpu.deploy.dcgm-exporter"] = "true"

    assert run(rig, "all-1g.5gb").state is model.State.SUCCESS

    assert rig.labels["nvidia.com/gpu.deploy.dcgm"] == value
    assert rig.labels["nvidia.com/gpu.deploy.dcgm-exporter"] == "true"
    assert "nvidia.com/gpu.deploy.nvsm" not in rig.labels


@pytest.mark.parametrize("value", ["false", "paused-for-driver-upgrade"])
def test_a_node_that_shall_have_no_plugin_is_not_waited_for(value: str) -> None:
    rig = node()
    run(rig, "all-1g.5gb")
    rig.labels[cluster.PLUGIN_DEPLOY_LABEL] = value
    rig.pods.clear()

    assert run(rig, "all-1g.5gb").reason is errors.Reason.ALREADY_APPLIED


@pytest.mark.parametrize("before", [None, "all-1g.5gb"])
def test_a_newer_request_need_not_wait_for_a_plugin_that_does_not_come(before: str | None) -> None:
    def broken() -> fakes.NodeRig:
        rig = node(layout=before)
        rig.plugin_is_broken = True
        rig.pods.clear()
        rig.start_plugin()
        return rig

    rig = broken()
    patient = fakes.FakeRequest(rig.clock, replaced=True)
    outcome = reconciler(rig).run("all-1g.5gb", patient)
    assert outcome.reason is errors.Reason.PLUGIN_NOT_READY

    rig = broken()
    hasty = fakes.FakeRequest(rig.clock, ends_at=patient.asked, replaced=True)
    with pytest.raises(errors.Superseded):
        reconciler(rig).run("all-1g.5gb", hasty)
    assert rig.log.count("gpus.execute") == (0 if before else 1)
    assert_nothing_taken(rig)


def test_a_plugin_without_a_deploy_label_is_kept_off_by_a_taint_and_comes_back_new() -> None:
    rig = node(gated=False)
    old_plugin = next(iter(rig.pods))

    outcome = run(rig, "all-1g.5gb")

    assert outcome.state is model.State.SUCCESS
    assert old_plugin not in rig.pods
    assert len(rig.schedulable["nvidia.com/gpu"]) == 14
    assert_nothing_taken(rig)


def test_a_plugin_that_does_not_come_back_fails_the_run_with_the_layout_in_place() -> None:
    rig = node()
    rig.plugin_is_broken = True

    outcome = run(rig, "all-1g.5gb")

    assert outcome.reason is errors.Reason.PLUGIN_NOT_READY
    assert cluster.APPLIED_LABEL not in rig.labels
    assert_nothing_taken(rig)


def test_the_next_run_after_an_unverified_change_verifies_it() -> None:
    rig = node()
    rig.plugin_is_broken = True
    run(rig, "all-1g.5gb")

    assert run(rig, "all-1g.5gb").reason is errors.Reason.PLUGIN_NOT_READY

    rig.plugin_is_broken = False
    for uid in [pod.uid for pod in rig.pods.values() if clients.is_device_plugin(pod)]:
        del rig.pods[uid]
    assert run(rig, "all-1g.5gb").state is model.State.SUCCESS


@pytest.mark.parametrize("step", [steps.CreateGpuInstance, steps.CreateComputeInstance])
def test_a_step_that_fails_brings_the_former_instances_back(step: type) -> None:
    rig = busy_node()
    before = rig.gpus
    rig.step_error = refuse(step, times=1)

    outcome = run(rig, "one-slice-changed")

    assert outcome.reason is errors.Reason.INSUFFICIENT_RESOURCES
    assert "the instances from before are back" in outcome.message
    assert rig.executed
    assert planner.restore(rig.gpus, [gpu.snapshot for gpu in before]).is_empty
    assert "spared" in {pod.name for pod in rig.pods.values()}
    assert_nothing_taken(rig)


def test_an_api_that_fails_during_the_rollback_does_not_keep_the_gpus_from_it() -> None:
    def failing_node() -> fakes.NodeRig:
        rig = busy_node()
        rig.step_error = refuse(steps.CreateGpuInstance, times=1)
        return rig

    rig = failing_node()
    run(rig, "one-slice-changed")
    executes_at = rig.log.index("gpus.execute")
    asked = [i for i, call in enumerate(rig.log) if call.startswith("node.") and i > executes_at]
    assert len(asked) > 2

    for index in asked:
        rig = failing_node()
        before = [gpu.snapshot for gpu in rig.gpus]
        rig.failing = {index: BROKEN["node"]}

        with contextlib.suppress(errors.ClusterError):
            outcome = run(rig, "one-slice-changed")
            assert outcome.reason is errors.Reason.INSUFFICIENT_RESOURCES
        assert planner.restore(rig.gpus, before).is_empty, index


def test_a_layout_that_steps_do_not_bring_about_is_never_called_a_success() -> None:
    rig = node()
    hardware_port = rig.hardware

    class Liar:
        observe = hardware_port.observe

        def execute(self, plan: steps.Plan, seen: Sequence[model.Gpu] = ()) -> model.ObservedGpus:
            rig.called("gpus.execute")
            return fakes.of_plan(rig.gpus, plan)

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
            return fakes.of_plan(self.observe(), plan)

    ours = reconciler(rig, gpus=OldDriver())

    outcome = ours.run("all-1g.5gb", fakes.FakeRequest(rig.clock))

    assert outcome.state is model.State.SUCCESS
    assert all(len(gpu.mig_uuids) == 7 for gpu in rig.gpus)


# -- whom the owner lets go ---------------------------------------------------------------------


def test_a_pod_that_kubelet_admits_before_the_plugin_stops_leaves_before_the_change() -> None:
    rig = busy_node()
    doomed = frozenset({device(rig, 0, "2g.10gb")})

    def slip_in() -> None:
        # A pod that is bound to the node by its author passes the scheduler and its cordon.
        if rig.labels[cluster.PLUGIN_DEPLOY_LABEL] == cluster.PAUSED_VALUE and not late:
            late.append(rig.add_pod("late", devices=doomed))

    late: list[str] = []
    rig.clock.on_wait.append(slip_in)
    outcome = run(rig, "one-slice-changed")

    assert outcome.state is model.State.SUCCESS
    assert late
    assert late[0] not in rig.pods
    assert rig.log.count("workloads.evict") == 2
    last_eviction = len(rig.log) - rig.log[::-1].index("workloads.evict")
    assert last_eviction < rig.log.index("gpus.execute")


def test_a_pod_that_slips_in_and_may_not_be_evicted_ends_the_run_before_the_change() -> None:
    rig = busy_node()
    before = rig.gpus
    doomed = frozenset({device(rig, 0, "2g.10gb")})

    def slip_in() -> None:
        if rig.labels[cluster.PLUGIN_DEPLOY_LABEL] == cluster.PAUSED_VALUE and not late:
            late.append(rig.add_pod("late", devices=doomed, is_kept=True))

    late: list[str] = []
    rig.clock.on_wait.append(slip_in)
    outcome = run(rig, "one-slice-changed")

    assert outcome.reason is errors.Reason.DRAIN_TIMEOUT
    assert "default/late (its annotation mig-manager.io/do-not-evict" in outcome.message
    assert rig.gpus == before
    assert_nothing_taken(rig)


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

    outcome = run(rig, "one-slice-changed")

    assert outcome.state is model.State.SUCCESS
    assert {"affected", "spared"}.isdisjoint(pod.name for pod in rig.pods.values())
    assert cpu_pod in rig.pods


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


# -- monitors, other daemons, and the plugin's config -------------------------------------------


def resume_messages(rig: fakes.NodeRig) -> list[str]:
    """Return the phases' messages of a run's resume, in order."""
    return [message for message in rig.statuses if message.startswith("resuming ")]


def test_monitors_resume_one_by_one_after_the_change_is_verified() -> None:
    rig = monitored_node()

    outcome = run(rig, "one-slice-changed")

    assert outcome.state is model.State.SUCCESS
    assert resume_messages(rig) == [
        "resuming gpu-feature-discovery, dcgm",
        "resuming dcgm-exporter",
    ]
    assert rig.statuses.index("resuming dcgm-exporter") > rig.statuses.index(
        "waiting for the new devices to be schedulable"
    )
    assert {rig.labels[key] for key in (GFD, DCGM, EXPORTER)} == {"true"}
    assert "MonitorNotReady" not in rig.events


def test_a_monitor_that_does_not_come_back_is_a_warning_and_no_failure() -> None:
    rig = monitored_node()
    rig.deploy_daemons[GFD] = False

    outcome = run(rig, "one-slice-changed")

    assert outcome.state is model.State.SUCCESS
    assert rig.events[-2:] == ["MonitorNotReady", "Applied"]
    assert GFD in rig.messages[-2]
    assert rig.labels[EXPORTER] == "true"


def test_workloads_may_come_back_while_monitors_are_still_waited_for() -> None:
    rig = monitored_node()
    rig.deploy_daemons[EXPORTER] = False
    closed: list[bool] = []
    rig.clock.on_wait.append(lambda: closed.append(rig.has_hold_taint))

    run(rig, "one-slice-changed")

    assert closed[-1] is False


def test_the_operators_validator_validates_a_changed_node_again() -> None:
    rig = monitored_node()
    before = {pod.uid for pod in rig.pods.values() if clients.is_validator(pod)}

    run(rig, "one-slice-changed")

    assert before
    assert all(rig.pods[uid].is_terminating for uid in before)


def test_a_validator_that_cannot_be_deleted_does_not_fail_the_run() -> None:
    rig = monitored_node()
    assert run(rig, "one-slice-changed").state is model.State.SUCCESS
    last_delete = len(rig.log) - 1 - rig.log[::-1].index("workloads.delete")
    rig = monitored_node()
    rig.failing = {last_delete: BROKEN["workloads"]}

    assert run(rig, "one-slice-changed").state is model.State.SUCCESS


def test_a_feature_discovery_without_a_deploy_label_is_restarted() -> None:
    rig = busy_node()
    uid = rig.add_pod("gfd", container_names=("gpu-feature-discovery-ctr",))

    assert run(rig, "one-slice-changed").state is model.State.SUCCESS

    assert uid not in rig.pods or rig.pods[uid].is_terminating


def test_the_owners_daemons_are_away_during_the_change_and_back_after_it() -> None:
    rig = watched_node()
    here: list[set[str]] = []
    execute = rig.step_error

    def note_pods(step: steps.Step) -> Exception | None:
        here.append({pod.name for pod in rig.pods.values()})
        return execute(step)

    rig.step_error = note_pods
    outcome = run(rig, "one-slice-changed")
    rig.live()

    assert outcome.state is model.State.SUCCESS
    assert here
    assert all({"watcher", "sampler"}.isdisjoint(names) for names in here)
    assert {"watcher", "sampler"} <= {pod.name for pod in rig.pods.values()}
    assert "workloads.evict" in rig.log
    assert rig.labels[SAMPLER] == "true"


def test_a_table_of_daemons_that_is_wrong_is_refused_before_anything_is_touched() -> None:
    rig = busy_node()
    rig.extra_clients = "version: v1\nclients:\n- labels: {}\n"

    outcome = run(rig, "one-slice-changed")

    assert outcome.reason is errors.Reason.INVALID_CONFIG
    assert "test.yaml:3:11: labels must be" in outcome.message
    assert rig.states == ["failed"]


def test_the_plugin_starts_with_the_config_that_goes_with_the_layout() -> None:
    rig = sharing_node()
    seen: list[str | None] = []
    rig.clock.on_wait.append(
        lambda: seen.extend(
            rig.labels.get(cluster.PLUGIN_CONFIG_LABEL)
            for pod in rig.pods.values()
            if clients.is_device_plugin(pod) and "gpus.execute" in rig.log
        )
    )

    assert run(rig, "one-slice-changed").state is model.State.SUCCESS

    assert set(seen) == {"sliced"}
    assert rig.labels[cluster.PLUGIN_CONFIG_LABEL] == "sliced"


def test_a_change_that_is_rolled_back_leaves_the_plugins_config_as_it_was() -> None:
    rig = sharing_node()
    rig.step_error = refuse(steps.CreateGpuInstance, times=1)

    assert run(rig, "one-slice-changed").state is model.State.FAILED

    assert rig.labels[cluster.PLUGIN_CONFIG_LABEL] == "whole"


def test_a_plugin_config_that_crashes_the_plugin_is_rolled_back() -> None:
    rig = sharing_node()
    rig.plugin_is_broken = True

    assert run(rig, "one-slice-changed").reason is errors.Reason.PLUGIN_NOT_READY

    assert rig.labels[cluster.PLUGIN_CONFIG_LABEL] == "whole"
    assert_nothing_taken(rig)


def test_a_plugins_config_that_another_program_chose_meanwhile_is_not_written_over() -> None:
    rig = sharing_node()
    rig.plugin_is_broken = True

    def choose() -> None:
        if rig.labels[cluster.PLUGIN_CONFIG_LABEL] == "sliced":
            rig.labels[cluster.PLUGIN_CONFIG_LABEL] = "mine"

    rig.clock.on_wait.append(choose)
    run(rig, "one-slice-changed")

    assert rig.labels[cluster.PLUGIN_CONFIG_LABEL] == "mine"


def test_an_active_layout_gets_its_plugin_config_without_a_change_of_the_gpus() -> None:
    rig = node(layout="one-slice-changed")
    rig.policy = policies.Policy(plugin_configs={"*": "sliced"})
    old_plugin = next(uid for uid, pod in rig.pods.items() if clients.is_device_plugin(pod))

    outcome = run(rig, "one-slice-changed")

    assert outcome.reason is errors.Reason.ALREADY_APPLIED
    assert rig.labels[cluster.PLUGIN_CONFIG_LABEL] == "sliced"
    assert old_plugin not in rig.pods
    assert "gpus.execute" not in rig.log


# -- every port call fails once -----------------------------------------------------------------


@pytest.mark.parametrize("scenario", SWEPT)
def test_after_any_call_fails_once_the_node_is_restored_and_the_retry_succeeds(
    scenario: str,
) -> None:
    make, layout = SCENARIOS[scenario]
    undisturbed = calls(make, layout)
    assert len(undisturbed) > 8
    for index, call in enumerate(undisturbed):
        rig = make()
        ours = reconciler(rig)
        request = fakes.FakeRequest(rig.clock)
        rig.failing = {index: broken(call)}
        try:
            ours.run(layout, request)
        except errors.ClusterError:
            rig.failing = {}
            ours.recover(layout)
        else:
            assert rig.labels[cluster.STATE_LABEL] in ("success", "failed"), index
            assert_nothing_taken(rig)

        rig.failing = {}
        assert ours.run(layout, request).state is model.State.SUCCESS, index
        assert_nothing_taken(rig)
        is_gated = rig.plugin_is_gated
        assert rig.labels.get(cluster.PLUGIN_DEPLOY_LABEL) == ("true" if is_gated else None)
        assert any(clients.is_device_plugin(pod) for pod in rig.pods.values()), index


@pytest.mark.parametrize("scenario", ["first-layout-ungated", "monitors", "plugin-config"])
def test_a_patch_that_is_carried_out_and_answered_with_an_error_leaves_nothing_taken(
    scenario: str,
) -> None:
    make, layout = SCENARIOS[scenario]
    rig = make()
    run(rig, layout)
    patches = [index for index, call in enumerate(rig.log) if call == "node.patch"]
    assert len(patches) > 4
    for index in patches:
        rig = make()
        ours = reconciler(rig)
        rig.losing = {
            index: errors.ClusterError("lost", reason=errors.Reason.API_ERROR, status=500)
        }
        try:
            ours.run(layout, fakes.FakeRequest(rig.clock))
        except errors.ClusterError:
            ours.recover(None)
        assert_nothing_taken(rig)


@pytest.mark.parametrize("scenario", SWEPT)
@pytest.mark.parametrize("replaced", [True, False])
def test_the_node_is_restored_whenever_a_request_is_superseded(
    scenario: str, *, replaced: bool
) -> None:
    make, layout = SCENARIOS[scenario]
    rig = make()
    patient = fakes.FakeRequest(rig.clock, replaced=replaced)
    reconciler(rig).run(layout, patient)
    assert patient.asked > 0
    after = rig.gpus
    for ends_at in range(1, patient.asked + 1):
        rig = make()
        before = rig.gpus
        request = fakes.FakeRequest(rig.clock, ends_at=ends_at, replaced=replaced)

        try:
            outcome = reconciler(rig).run(layout, request)
        except errors.Superseded:
            # The run for the next request says how that ends.
            is_failed = rig.labels.get(cluster.STATE_LABEL) == "failed"
            assert is_failed is not replaced
        else:
            # It is verified; only the monitors were still pending.
            assert outcome.reason is errors.Reason.APPLIED
            assert rig.deploy_daemons

        # Between the mode and the instances there are hooks, and a newer request ends them.
        is_undone = "restoring the instances from before" in rig.statuses
        is_executed = "gpus.execute" in rig.log and not is_undone
        assert rig.gpus == (after if is_executed else before)
        assert_nothing_taken(rig)


def test_a_run_publishes_the_gpus_as_they_are_afterwards() -> None:
    rig = node(layout="all-balanced")

    assert run(rig, "all-1g.5gb").state is model.State.SUCCESS

    published = gpu_codec.from_json(rig.annotations[cluster.GPUS_ANNOTATION])
    assert [gpu.uuid for gpu in published] == [gpu.uuid for gpu in rig.gpus]
    assert [status.device_counts(gpu) for gpu in published] == [
        status.device_counts(gpu) for gpu in rig.gpus
    ]
    assert [gpu.profiles for gpu in published] == [gpu.profiles for gpu in rig.gpus]


def test_a_run_that_sees_no_gpu_leaves_what_an_earlier_one_published() -> None:
    rig = node(layout="all-balanced")
    run(rig, "all-1g.5gb")
    before = rig.annotations[cluster.GPUS_ANNOTATION]

    assert run(rig, "all-9g").state is model.State.FAILED

    assert rig.annotations[cluster.GPUS_ANNOTATION] == before
