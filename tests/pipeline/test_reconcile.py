"""The pipeline over a small node in memory: wish and world in, world out."""

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
    busy_node,
    count_calls,
    device,
    fakes_error,
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


def test_a_first_layout_ends_in_success_with_every_device_offered_by_a_new_plugin() -> None:
    world = node()
    old_plugin = next(iter(world.pods))

    outcome = run(world, "all-1g.5gb")

    assert outcome.state is model.State.SUCCESS
    assert world.states == ["pending", "success"]
    assert world.labels[cluster.STATE_LABEL] == "success"
    assert world.labels[cluster.APPLIED_LABEL] == "all-1g.5gb"
    assert world.labels[cluster.PLUGIN_DEPLOY_LABEL] == "true"
    assert len(world.offered["nvidia.com/gpu"]) == 14
    assert old_plugin not in world.pods
    assert_nothing_taken(world)


def test_a_layout_already_in_force_succeeds_within_one_observation_and_touches_nobody() -> None:
    world = node(layout="all-balanced")
    pods = dict(world.pods)

    outcome = run(world, "all-balanced")

    assert outcome.reason is errors.Reason.ALREADY_APPLIED
    assert world.states == ["success"]
    assert world.log.count("gpus.observe") == 1
    assert world.pods == pods
    assert world.executed == []


def test_a_change_that_is_foreseen_is_pending_before_the_gpus_are_looked_at() -> None:
    world = node()
    ours = reconciler(world)
    ours.run("all-1g.5gb", fakes.FakeWish(world.clock, replaced=False))
    world.log.clear()

    outcome = ours.run("all-balanced", fakes.FakeWish(world.clock, replaced=False))

    assert outcome.reason is errors.Reason.APPLIED
    assert world.log.index("node.patch") < world.log.index("gpus.observe")
    assert_nothing_taken(world)


@pytest.mark.parametrize("name", ["all-1g.5gb", "too-much", "no-such-layout"])
def test_nothing_is_pending_for_what_is_in_force_or_cannot_be(name: str) -> None:
    world = node()
    ours = reconciler(world)
    ours.run("all-1g.5gb", fakes.FakeWish(world.clock, replaced=False))
    world.states.clear()

    ours.run(name, fakes.FakeWish(world.clock, replaced=False))

    assert world.states == ["success" if name == "all-1g.5gb" else "failed"]


def test_what_was_foreseen_decides_nothing() -> None:
    world = node()
    ours = reconciler(world)
    ours.run("all-1g.5gb", fakes.FakeWish(world.clock, replaced=False))
    other = node(layout="all-balanced")
    world.gpus, world.offered = other.gpus, other.offered
    world.executed.clear()

    outcome = ours.run("all-balanced", fakes.FakeWish(world.clock, replaced=False))

    assert outcome.reason is errors.Reason.ALREADY_APPLIED
    assert world.executed == []
    assert_nothing_taken(world)


def test_a_second_try_is_not_pending_before_it_has_looked() -> None:
    world = node()
    ours = reconciler(world)
    ours.run("all-1g.5gb", fakes.FakeWish(world.clock, replaced=False))
    world.log.clear()

    ours.run("all-balanced", fakes.FakeWish(world.clock, replaced=False), attempt=2)

    assert world.log.index("gpus.observe") < world.log.index("node.patch")


class Readiness(ports.Standby):
    """Notes in the world's log what it is told."""

    def __init__(self, world: fakes.World) -> None:
        self._log = world.log

    def prepare(self) -> None:
        self._log.append("prepare")

    def expect_change(self) -> None:
        self._log.append("expect change")

    def dismiss(self) -> None:
        self._log.append("dismiss")


def test_who_gets_ready_hears_of_a_look_of_a_change_and_of_the_end() -> None:
    world = node()
    ours = reconciler(world, standby=Readiness(world))

    ours.run("all-1g.5gb", fakes.FakeWish(world.clock, replaced=False))
    ours_only = {"prepare", "gpus.observe", "expect change", "gpus.execute", "dismiss"}
    assert [what for what in world.log if what in ours_only] == [
        *("prepare", "gpus.observe", "expect change", "gpus.execute", "dismiss"),
    ]
    world.log.clear()
    ours.run("all-1g.5gb", fakes.FakeWish(world.clock, replaced=False))
    assert "expect change" not in world.log
    assert world.log.count("dismiss") == 1


def test_only_pods_on_destroyed_instances_are_evicted_and_the_others_keep_their_uuids() -> None:
    world = node(layout="all-balanced")
    victim = world.add_pod("victim", devices=frozenset({device(world, 0, "2g.10gb")}))
    spared = [
        world.add_pod("spared-3g", devices=frozenset({device(world, 0, "3g.20gb")})),
        world.add_pod("spared-1g", devices=frozenset({device(world, 0, "1g.5gb")})),
        world.add_pod("neighbour", devices=frozenset({device(world, 1, "2g.10gb")})),
    ]
    held = [world.held[uid] for uid in spared]

    outcome = run(world, "one-slice-changed")

    assert outcome.state is model.State.SUCCESS
    assert world.log.count("workloads.evict") == 1
    assert victim not in world.pods
    alive = {uuid for gpu in world.gpus for uuid in gpu.mig_uuids}
    for uid, devices in zip(spared, held, strict=True):
        assert uid in world.pods
        assert devices <= alive


def test_without_kubelet_every_gpu_pod_leaves_because_any_may_hold_what_goes() -> None:
    world = node(layout="all-balanced")
    gpu_pod = world.add_pod("gpu", devices=frozenset({device(world, 1, "3g.20gb")}))
    cpu_pod = world.add_pod("cpu")
    world.kubelet_is_silent = True

    outcome = run(world, "one-slice-changed")

    assert outcome.state is model.State.SUCCESS
    assert gpu_pod not in world.pods
    assert cpu_pod in world.pods


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
def test_a_wish_that_cannot_be_is_refused_before_anything_is_touched(
    layout: str, text: str, reason: errors.Reason
) -> None:
    world = node(layout="all-balanced")
    world.add_pod("busy", devices=frozenset({device(world, 0, "3g.20gb")}))
    pods, labels, gpus = dict(world.pods), dict(world.labels), world.gpus

    outcome = run(world, layout, text)

    assert outcome.state is model.State.FAILED
    assert outcome.reason is reason
    assert world.states == ["failed"]
    assert world.pods == pods
    assert world.gpus == gpus
    assert world.labels == {**labels, cluster.STATE_LABEL: "failed"}
    assert reason.remedy in json.loads(world.annotations[cluster.STATUS_ANNOTATION])["message"]
    assert_nothing_taken(world)


def test_a_drain_that_a_budget_blocks_costs_nothing_and_names_pod_and_budget() -> None:
    world = node(layout="all-balanced")
    world.add_pod("guarded", devices=frozenset({device(world, 0, "2g.10gb")}))
    world.budgets["guarded"] = "budget 'pdb-a' allows no disruption"
    pods, gpus = dict(world.pods), world.gpus

    outcome = run(world, "one-slice-changed")

    assert outcome.reason is errors.Reason.DRAIN_TIMEOUT
    assert "default/guarded" in outcome.message
    assert "pdb-a" in outcome.message
    assert world.pods == pods
    assert world.gpus == gpus
    assert_nothing_taken(world)


def test_nobody_is_evicted_while_a_budget_guards_one_who_must_leave_as_well() -> None:
    world = node(layout="all-balanced")
    world.add_pod("guarded", devices=frozenset({device(world, 0, "2g.10gb")}))
    world.add_pod("free", devices=frozenset({device(world, 1, "2g.10gb")}))
    world.budgets["guarded"] = "no"

    outcome = run(world, "all-1g.5gb")

    assert outcome.reason is errors.Reason.DRAIN_TIMEOUT
    assert "default/free (waits for the others)" in outcome.message
    assert "workloads.evict" not in world.log
    assert {"guarded", "free"} <= {pod.name for pod in world.pods.values()}


def test_a_daemonsets_pod_that_must_leave_is_kept_from_coming_back_too_early() -> None:
    world = node(layout="all-balanced")
    taken = frozenset({device(world, 0, "2g.10gb")})
    world.add_pod("monitor-1", devices=taken, owner_kind="DaemonSet")

    def replace() -> None:
        names = {pod.name for pod in world.pods.values()}
        if "monitor-1" not in names and not world.has_hold_taint:
            world.add_pod("monitor-1", owner_kind="DaemonSet")

    world.clock.on_wait.append(replace)
    outcome = run(world, "one-slice-changed")

    assert outcome.state is model.State.SUCCESS
    assert world.log.count("workloads.evict") == 1
    assert "monitor-1" in {pod.name for pod in world.pods.values()}
    assert_nothing_taken(world)


@pytest.mark.parametrize("ends_well", [True, False])
def test_a_label_that_somebody_else_writes_during_the_change_keeps_that_value(
    *, ends_well: bool
) -> None:
    key = "nvidia.com/gpu.deploy.dcgm"
    world = node()
    world.labels[key] = "true"
    world.plugin_is_broken = not ends_well

    def upgrade_driver() -> None:
        if world.labels[key] == cluster.PAUSED_VALUE:
            world.labels[key] = "paused-for-driver-upgrade"

    world.clock.on_wait.append(upgrade_driver)
    outcome = run(world, "all-1g.5gb")

    assert (outcome.state is model.State.SUCCESS) is ends_well
    assert world.labels[key] == "paused-for-driver-upgrade"
    assert_nothing_taken(world)


def test_a_plugin_that_cannot_be_proven_is_restarted_once_and_not_at_every_retry() -> None:
    world = node(layout="all-balanced")
    world.offered = {"nvidia.com/gpu": frozenset({"MIG-of-yesterday"})}
    ours = reconciler(world)
    wish = fakes.FakeWish(world.clock, replaced=False)
    world.clock.on_wait.append(
        lambda: setattr(world, "offered", {"nvidia.com/gpu": frozenset({"MIG-of-yesterday"})})
    )

    assert ours.run("all-balanced", wish).reason is errors.Reason.NOT_ALLOCATABLE
    assert world.log.count("workloads.delete") == 1
    assert ours.run("all-balanced", wish, attempt=2).reason is errors.Reason.NOT_ALLOCATABLE

    assert world.log.count("workloads.delete") == 1


def test_a_node_that_was_cordoned_before_stays_cordoned() -> None:
    world = node()
    world.is_unschedulable = True

    assert run(world, "all-1g.5gb").state is model.State.SUCCESS

    assert world.is_unschedulable


def patches(make: Callable[[], fakes.World], layout: str) -> int:
    """Return how often a run patches its node."""
    world = make()
    run(world, layout)
    return world.log.count("node.patch")


def just_before_patch(world: fakes.World, number: int, write: Callable[[], object]) -> None:
    """Have somebody write to the node after it was read and before a patch arrives."""

    def strike() -> None:
        if world.log[-1] == "node.patch" and world.log.count("node.patch") == number + 1:
            world.on_call = lambda: None
            write()

    world.on_call = strike


def test_a_cordon_stays_whenever_it_is_set() -> None:
    for number in range(patches(busy_node, "one-slice-changed")):
        world = busy_node()
        just_before_patch(world, number, functools.partial(set_cordon, world))

        assert run(world, "one-slice-changed").state is model.State.SUCCESS, number

        assert world.is_unschedulable, number


def test_a_pod_that_is_only_called_like_the_device_plugin_is_left_alone() -> None:
    world = busy_node()
    impostor = world.add_pod(
        "impostor", labels={"app": "nvidia-device-plugin-daemonset"}, grace_s=3600
    )

    assert run(world, "one-slice-changed").state is model.State.SUCCESS

    assert not world.pods[impostor].is_terminating


def test_a_plugin_that_does_not_stop_closes_the_node_once() -> None:
    world = busy_node()
    ours = reconciler(world)
    wish = fakes.FakeWish(world.clock, replaced=False)
    # Nobody ends its pods.
    world.clock.on_wait.clear()
    world.clock.on_wait.append(lambda: leave_all_but(world, "nvidia-device-plugin"))
    first = ours.run("one-slice-changed", wish)
    world.log.clear()

    second = ours.run("one-slice-changed", wish, attempt=2)

    assert (first.reason, second.reason) == (errors.Reason.IN_USE, errors.Reason.IN_USE)
    assert "default/nvidia-device-plugin" in second.message
    assert second.should_retry
    assert "workloads.delete" not in world.log
    # How it ended, and nothing before.
    assert world.log.count("node.patch") <= 2
    world.clock.on_wait.append(world.live)
    world.live()
    assert ours.run("one-slice-changed", wish, attempt=3).state is model.State.SUCCESS


def leave_all_but(world: fakes.World, name: str) -> None:
    for uid, pod in list(world.pods.items()):
        if pod.is_terminating and pod.name != name:
            del world.pods[uid]
            world.held.pop(uid, None)


def test_a_drain_that_many_pods_hold_up_is_told_in_short() -> None:
    world = busy_node()
    taken = frozenset({device(world, 0, "2g.10gb")})
    for number in range(224):
        world.add_pod(f"a-rather-long-name-of-a-pod-{number}", devices=taken, is_kept=True)

    outcome = run(world, "one-slice-changed")

    assert "225 pods to evict: default/victim" in next(
        m for m in world.messages if "to evict" in m
    )
    assert "225 pods still use" in outcome.message
    assert outcome.message.count("do-not-evict") == 1
    assert outcome.message.endswith(outcome.reason.remedy)
    assert max(len(text) for text in (*world.messages, *world.told, outcome.message)) < 1024


def set_cordon(world: fakes.World) -> None:
    world.is_unschedulable = True


@pytest.mark.parametrize("value", ["false", None])
def test_a_deploy_label_that_its_owner_writes_just_before_a_patch_stays(value: str | None) -> None:
    for number in range(patches(monitored_node, "one-slice-changed")):
        world = monitored_node()

        def write(world: fakes.World = world) -> None:
            fakes._merge(world.labels, {DCGM: value})

        just_before_patch(world, number, write)

        assert run(world, "one-slice-changed").state is model.State.SUCCESS, number

        assert world.labels.get(DCGM) == value, number


def test_a_drain_by_a_person_during_a_change_is_not_undone() -> None:
    """As kubectl drain does it: what is cordoned already is not written."""
    world = busy_node()
    closed: list[bool] = []

    def drain() -> None:
        if world.log[-1] == "gpus.execute":
            closed.append(world.has_hold_taint)
            if not world.is_unschedulable:
                world.is_unschedulable = True

    world.on_call = drain
    assert run(world, "one-slice-changed").state is model.State.SUCCESS

    assert closed == [True]
    assert world.is_unschedulable
    assert not world.has_hold_taint


def test_an_agent_never_cordons() -> None:
    world = busy_node()
    seen: set[bool] = set()
    world.clock.on_wait.append(lambda: seen.add(world.is_unschedulable))
    run(world, "one-slice-changed")
    assert seen == {False}


@pytest.mark.parametrize("value", ["false", "paused-for-driver-upgrade"])
def test_deploy_labels_of_others_are_left_as_they_are(value: str) -> None:
    world = node()
    world.labels["nvidia.com/gpu.deploy.dcgm"] = value
    world.labels["nvidia.com/gpu.deploy.dcgm-exporter"] = "true"

    assert run(world, "all-1g.5gb").state is model.State.SUCCESS

    assert world.labels["nvidia.com/gpu.deploy.dcgm"] == value
    assert world.labels["nvidia.com/gpu.deploy.dcgm-exporter"] == "true"
    assert "nvidia.com/gpu.deploy.nvsm" not in world.labels


@pytest.mark.parametrize("value", ["false", "paused-for-driver-upgrade"])
def test_a_node_that_shall_have_no_plugin_is_not_waited_for(value: str) -> None:
    world = node()
    run(world, "all-1g.5gb")
    world.labels[cluster.PLUGIN_DEPLOY_LABEL] = value
    world.pods.clear()

    assert run(world, "all-1g.5gb").reason is errors.Reason.ALREADY_APPLIED


@pytest.mark.parametrize("before", [None, "all-1g.5gb"])
def test_a_newer_wish_need_not_wait_for_a_plugin_that_does_not_come(before: str | None) -> None:
    def broken() -> fakes.World:
        world = node(layout=before)
        world.plugin_is_broken = True
        world.pods.clear()
        world.start_plugin()
        return world

    world = broken()
    patient = fakes.FakeWish(world.clock, replaced=True)
    outcome = reconciler(world).run("all-1g.5gb", patient)
    assert outcome.reason is errors.Reason.PLUGIN_NOT_READY

    world = broken()
    hasty = fakes.FakeWish(world.clock, ends_at=patient.asked, replaced=True)
    with pytest.raises(errors.Superseded):
        reconciler(world).run("all-1g.5gb", hasty)
    assert world.log.count("gpus.execute") == (0 if before else 1)
    assert_nothing_taken(world)


def test_a_plugin_that_no_label_gates_is_held_off_by_a_taint_and_comes_back_new() -> None:
    world = node(gated=False)
    old_plugin = next(iter(world.pods))

    outcome = run(world, "all-1g.5gb")

    assert outcome.state is model.State.SUCCESS
    assert old_plugin not in world.pods
    assert len(world.offered["nvidia.com/gpu"]) == 14
    assert_nothing_taken(world)


def test_a_plugin_that_does_not_come_back_fails_the_run_with_the_layout_in_place() -> None:
    world = node()
    world.plugin_is_broken = True

    outcome = run(world, "all-1g.5gb")

    assert outcome.reason is errors.Reason.PLUGIN_NOT_READY
    assert cluster.APPLIED_LABEL not in world.labels
    assert_nothing_taken(world)


def test_the_next_run_after_an_unproven_change_proves_it_instead_of_believing_it() -> None:
    world = node()
    world.plugin_is_broken = True
    run(world, "all-1g.5gb")

    assert run(world, "all-1g.5gb").reason is errors.Reason.PLUGIN_NOT_READY

    world.plugin_is_broken = False
    for uid in [pod.uid for pod in world.pods.values() if clients.is_device_plugin(pod)]:
        del world.pods[uid]
    assert run(world, "all-1g.5gb").state is model.State.SUCCESS


@pytest.mark.parametrize("step", [steps.CreateGpuInstance, steps.CreateComputeInstance])
def test_a_step_that_fails_brings_the_former_instances_back(step: type) -> None:
    world = busy_node()
    before = world.gpus
    world.step_error = refuse(step, times=1)

    outcome = run(world, "one-slice-changed")

    assert outcome.reason is errors.Reason.INSUFFICIENT_RESOURCES
    assert "the instances from before are back" in outcome.message
    assert world.executed
    assert planner.restore(world.gpus, [gpu.snapshot for gpu in before]).is_empty
    assert "spared" in {pod.name for pod in world.pods.values()}
    assert_nothing_taken(world)


def test_an_api_that_fails_during_the_way_back_does_not_keep_the_gpus_from_it() -> None:
    def failing_node() -> fakes.World:
        world = busy_node()
        world.step_error = refuse(steps.CreateGpuInstance, times=1)
        return world

    world = failing_node()
    run(world, "one-slice-changed")
    executes_at = world.log.index("gpus.execute")
    asked = [i for i, call in enumerate(world.log) if call.startswith("node.") and i > executes_at]
    assert len(asked) > 2

    for index in asked:
        world = failing_node()
        before = [gpu.snapshot for gpu in world.gpus]
        world.failing = {index: BROKEN["node"]}

        with contextlib.suppress(errors.ClusterError):
            outcome = run(world, "one-slice-changed")
            assert outcome.reason is errors.Reason.INSUFFICIENT_RESOURCES
        assert planner.restore(world.gpus, before).is_empty, index


def test_a_layout_that_steps_do_not_bring_about_is_never_called_a_success() -> None:
    world = node()
    hardware_port = world.hardware

    class Liar:
        observe = hardware_port.observe

        def execute(self, plan: steps.Plan, seen: Sequence[model.Gpu] = ()) -> model.ObservedGpus:
            world.called("gpus.execute")
            return fakes.of_plan(world.gpus, plan)

    ours = reconciler(world, gpus=Liar())

    outcome = ours.run("all-1g.5gb", fakes.FakeWish(world.clock, replaced=False))

    assert outcome.reason is errors.Reason.VERIFY_FAILED
    assert_nothing_taken(world)


def test_an_old_driver_that_tells_profiles_only_with_mig_on_is_planned_twice() -> None:
    world = node()
    full = {gpu.uuid: gpu.profiles for gpu in world.gpus}
    world.gpus = tuple(dataclasses.replace(gpu, profiles=None) for gpu in world.gpus)
    hardware_port = world.hardware

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

    ours = reconciler(world, gpus=OldDriver())

    outcome = ours.run("all-1g.5gb", fakes.FakeWish(world.clock, replaced=False))

    assert outcome.state is model.State.SUCCESS
    assert all(len(gpu.mig_uuids) == 7 for gpu in world.gpus)


# -- whom the owner lets go ---------------------------------------------------------------------


def test_a_pod_that_kubelet_admits_before_the_plugin_stops_leaves_before_the_change() -> None:
    world = busy_node()
    doomed = frozenset({device(world, 0, "2g.10gb")})

    def slip_in() -> None:
        # A pod that is bound to the node by its author passes the scheduler and its cordon.
        if world.labels[cluster.PLUGIN_DEPLOY_LABEL] == cluster.PAUSED_VALUE and not late:
            late.append(world.add_pod("late", devices=doomed))

    late: list[str] = []
    world.clock.on_wait.append(slip_in)
    outcome = run(world, "one-slice-changed")

    assert outcome.state is model.State.SUCCESS
    assert late
    assert late[0] not in world.pods
    assert world.log.count("workloads.evict") == 2
    last_eviction = len(world.log) - world.log[::-1].index("workloads.evict")
    assert last_eviction < world.log.index("gpus.execute")


def test_a_pod_that_slips_in_and_may_not_be_evicted_ends_the_run_before_the_change() -> None:
    world = busy_node()
    before = world.gpus
    doomed = frozenset({device(world, 0, "2g.10gb")})

    def slip_in() -> None:
        if world.labels[cluster.PLUGIN_DEPLOY_LABEL] == cluster.PAUSED_VALUE and not late:
            late.append(world.add_pod("late", devices=doomed, is_kept=True))

    late: list[str] = []
    world.clock.on_wait.append(slip_in)
    outcome = run(world, "one-slice-changed")

    assert outcome.reason is errors.Reason.DRAIN_TIMEOUT
    assert "default/late (its annotation mig-manager.io/do-not-evict" in outcome.message
    assert world.gpus == before
    assert_nothing_taken(world)


def test_the_node_is_closed_to_newcomers_before_anybody_is_asked_to_leave() -> None:
    world = busy_node()
    closed: list[bool] = []
    world.clock.on_wait.append(lambda: closed.append(world.has_hold_taint))

    run(world, "one-slice-changed")

    assert world.log.index("node.patch") < world.log.index("workloads.can_evict")
    executes_at = world.log.index("gpus.execute")
    assert world.log.index("workloads.can_evict") < executes_at
    assert closed[0]


def test_with_policy_node_every_gpu_pod_leaves_even_when_nothing_is_destroyed() -> None:
    world = whole_node()
    cpu_pod = world.add_pod("cpu")

    outcome = run(world, "one-slice-changed")

    assert outcome.state is model.State.SUCCESS
    assert {"victim", "spared"}.isdisjoint(pod.name for pod in world.pods.values())
    assert cpu_pod in world.pods


def test_with_policy_none_nobody_is_evicted_and_the_deadline_names_who_stayed() -> None:
    world = busy_node()
    world.policy = policies.Policy(drain=policies.Drain.NONE)

    outcome = run(world, "one-slice-changed")

    assert outcome.reason is errors.Reason.DRAIN_TIMEOUT
    assert "default/victim (--drain-policy none evicts no pod)" in outcome.message
    assert {"workloads.evict", "workloads.can_evict", "workloads.delete"}.isdisjoint(world.log)
    assert_nothing_taken(world)


def test_force_is_told_in_an_event_and_in_the_message() -> None:
    world = guarded_node()

    outcome = run(world, "one-slice-changed")

    assert outcome.state is model.State.SUCCESS
    assert "Deleted by force: default/victim" in outcome.message
    assert "ForcedDrain" in world.events
    assert "workloads.evict" not in world.log


def test_a_claim_on_a_gpu_makes_a_pod_leave_and_the_event_says_why() -> None:
    world = busy_node()
    uid = world.add_pod("claimant")
    world.claims.add(uid)

    run(world, "one-slice-changed")

    assert uid not in world.pods
    drained = world.messages[world.events.index("Draining")]
    assert "default/claimant [its ResourceClaim may stand for any GPU]" in drained


# -- monitors, other daemons, and the plugin's config -------------------------------------------


def given_back(world: fakes.World) -> list[str]:
    """Return the phases' messages of a run's resume, in order."""
    return [message for message in world.told if message.startswith("resuming ")]


def test_monitors_come_back_after_the_proof_one_after_the_other() -> None:
    world = monitored_node()

    outcome = run(world, "one-slice-changed")

    assert outcome.state is model.State.SUCCESS
    assert given_back(world) == [
        "resuming gpu-feature-discovery, dcgm",
        "resuming dcgm-exporter",
    ]
    assert world.told.index("resuming dcgm-exporter") > world.told.index(
        "waiting for the new devices to be schedulable"
    )
    assert {world.labels[key] for key in (GFD, DCGM, EXPORTER)} == {"true"}
    assert "MonitorNotReady" not in world.events


def test_a_monitor_that_does_not_come_back_is_a_warning_and_no_failure() -> None:
    world = monitored_node()
    world.deploy_daemons[GFD] = False

    outcome = run(world, "one-slice-changed")

    assert outcome.state is model.State.SUCCESS
    assert world.events[-2:] == ["MonitorNotReady", "Applied"]
    assert GFD in world.messages[-2]
    assert world.labels[EXPORTER] == "true"


def test_workloads_may_come_back_while_monitors_are_still_waited_for() -> None:
    world = monitored_node()
    world.deploy_daemons[EXPORTER] = False
    closed: list[bool] = []
    world.clock.on_wait.append(lambda: closed.append(world.has_hold_taint))

    run(world, "one-slice-changed")

    assert closed[-1] is False


def test_the_operators_validator_looks_again_at_a_changed_node() -> None:
    world = monitored_node()
    before = {pod.uid for pod in world.pods.values() if clients.is_validator(pod)}

    run(world, "one-slice-changed")

    assert before
    assert all(world.pods[uid].is_terminating for uid in before)


def test_an_operator_that_lets_nobody_delete_its_validator_gets_its_layout_all_the_same() -> None:
    world = monitored_node()
    assert run(world, "one-slice-changed").state is model.State.SUCCESS
    last_delete = len(world.log) - 1 - world.log[::-1].index("workloads.delete")
    world = monitored_node()
    world.failing = {last_delete: BROKEN["workloads"]}

    assert run(world, "one-slice-changed").state is model.State.SUCCESS


def test_a_feature_discovery_that_no_label_places_is_started_anew() -> None:
    world = busy_node()
    uid = world.add_pod("gfd", container_names=("gpu-feature-discovery-ctr",))

    assert run(world, "one-slice-changed").state is model.State.SUCCESS

    assert uid not in world.pods or world.pods[uid].is_terminating


def test_the_owners_daemons_are_away_during_the_change_and_back_after_it() -> None:
    world = watched_node()
    here: list[set[str]] = []
    execute = world.step_error

    def look(step: steps.Step) -> Exception | None:
        here.append({pod.name for pod in world.pods.values()})
        return execute(step)

    world.step_error = look
    outcome = run(world, "one-slice-changed")
    world.live()

    assert outcome.state is model.State.SUCCESS
    assert here
    assert all({"watcher", "sampler"}.isdisjoint(names) for names in here)
    assert {"watcher", "sampler"} <= {pod.name for pod in world.pods.values()}
    assert "workloads.evict" in world.log
    assert world.labels[SAMPLER] == "true"


def test_a_table_of_daemons_that_is_wrong_is_refused_before_anything_is_touched() -> None:
    world = busy_node()
    world.extra_clients = "version: v1\nclients:\n- labels: {}\n"

    outcome = run(world, "one-slice-changed")

    assert outcome.reason is errors.Reason.INVALID_CONFIG
    assert "test.yaml:3:11: labels must be" in outcome.message
    assert world.states == ["failed"]


def test_the_plugin_starts_with_the_config_that_goes_with_the_layout() -> None:
    world = sharing_node()
    seen: list[str | None] = []
    world.clock.on_wait.append(
        lambda: seen.extend(
            world.labels.get(cluster.PLUGIN_CONFIG_LABEL)
            for pod in world.pods.values()
            if clients.is_device_plugin(pod) and "gpus.execute" in world.log
        )
    )

    assert run(world, "one-slice-changed").state is model.State.SUCCESS

    assert set(seen) == {"sliced"}
    assert world.labels[cluster.PLUGIN_CONFIG_LABEL] == "sliced"


def test_a_change_that_is_rolled_back_leaves_the_plugins_config_as_it_was() -> None:
    world = sharing_node()
    world.step_error = refuse(steps.CreateGpuInstance, times=1)

    assert run(world, "one-slice-changed").state is model.State.FAILED

    assert world.labels[cluster.PLUGIN_CONFIG_LABEL] == "whole"


def test_a_config_that_the_plugin_does_not_survive_is_taken_back() -> None:
    world = sharing_node()
    world.plugin_is_broken = True

    assert run(world, "one-slice-changed").reason is errors.Reason.PLUGIN_NOT_READY

    assert world.labels[cluster.PLUGIN_CONFIG_LABEL] == "whole"
    assert_nothing_taken(world)


def test_a_plugins_config_that_somebody_else_chose_meanwhile_is_not_written_over() -> None:
    world = sharing_node()
    world.plugin_is_broken = True

    def choose() -> None:
        if world.labels[cluster.PLUGIN_CONFIG_LABEL] == "sliced":
            world.labels[cluster.PLUGIN_CONFIG_LABEL] = "mine"

    world.clock.on_wait.append(choose)
    run(world, "one-slice-changed")

    assert world.labels[cluster.PLUGIN_CONFIG_LABEL] == "mine"


def test_a_layout_in_force_gets_its_plugin_config_without_a_change_of_the_gpus() -> None:
    world = node(layout="one-slice-changed")
    world.policy = policies.Policy(plugin_configs={"*": "sliced"})
    old_plugin = next(uid for uid, pod in world.pods.items() if clients.is_device_plugin(pod))

    outcome = run(world, "one-slice-changed")

    assert outcome.reason is errors.Reason.ALREADY_APPLIED
    assert world.labels[cluster.PLUGIN_CONFIG_LABEL] == "sliced"
    assert old_plugin not in world.pods
    assert "gpus.execute" not in world.log


# -- every port call fails once -----------------------------------------------------------------


@pytest.mark.parametrize("scenario", SWEPT)
def test_whatever_call_fails_once_all_is_given_back_and_the_next_try_succeeds(
    scenario: str,
) -> None:
    make, layout = SCENARIOS[scenario]
    number = count_calls(make, layout)
    assert number > 8
    for index in range(number):
        world = make()
        ours = reconciler(world)
        wish = fakes.FakeWish(world.clock, replaced=False)
        world.failing = {index: fakes_error(make, layout, index)}
        try:
            ours.run(layout, wish)
        except errors.ClusterError:
            world.failing = {}
            ours.recover(layout)
        else:
            assert world.labels[cluster.STATE_LABEL] in ("success", "failed"), index
            assert_nothing_taken(world)

        world.failing = {}
        assert ours.run(layout, wish).state is model.State.SUCCESS, index
        assert_nothing_taken(world)
        is_gated = world.plugin_is_gated
        assert world.labels.get(cluster.PLUGIN_DEPLOY_LABEL) == ("true" if is_gated else None)
        assert any(clients.is_device_plugin(pod) for pod in world.pods.values()), index


@pytest.mark.parametrize("scenario", ["first-layout-ungated", "monitors", "plugin-config"])
def test_a_patch_that_is_carried_out_and_answered_with_an_error_leaves_nothing_taken(
    scenario: str,
) -> None:
    make, layout = SCENARIOS[scenario]
    world = make()
    run(world, layout)
    patches = [index for index, call in enumerate(world.log) if call == "node.patch"]
    assert len(patches) > 4
    for index in patches:
        world = make()
        ours = reconciler(world)
        world.losing = {
            index: errors.ClusterError("lost", reason=errors.Reason.API_ERROR, status=500)
        }
        try:
            ours.run(layout, fakes.FakeWish(world.clock, replaced=False))
        except errors.ClusterError:
            ours.recover(None)
        assert_nothing_taken(world)


@pytest.mark.parametrize("scenario", SWEPT)
@pytest.mark.parametrize("replaced", [True, False])
def test_whenever_a_wish_ends_all_is_given_back(scenario: str, *, replaced: bool) -> None:
    make, layout = SCENARIOS[scenario]
    world = make()
    patient = fakes.FakeWish(world.clock, replaced=replaced)
    reconciler(world).run(layout, patient)
    assert patient.asked > 0
    after = world.gpus
    for ends_at in range(1, patient.asked + 1):
        world = make()
        before = world.gpus
        wish = fakes.FakeWish(world.clock, ends_at=ends_at, replaced=replaced)

        try:
            outcome = reconciler(world).run(layout, wish)
        except errors.Superseded:
            # The run for the next wish says how that ends.
            is_failed = world.labels.get(cluster.STATE_LABEL) == "failed"
            assert is_failed is not replaced
        else:
            # It was proven; only monitors were still waited for.
            assert outcome.reason is errors.Reason.APPLIED
            assert world.deploy_daemons

        # Between the mode and the instances there are hooks, and they may be ended early.
        is_undone = "restoring the instances from before" in world.told
        is_executed = "gpus.execute" in world.log and not is_undone
        assert world.gpus == (after if is_executed else before)
        assert_nothing_taken(world)


def test_a_run_publishes_the_gpus_as_they_are_afterwards() -> None:
    world = node(layout="all-balanced")

    assert run(world, "all-1g.5gb").state is model.State.SUCCESS

    told = gpu_codec.from_json(world.annotations[cluster.GPUS_ANNOTATION])
    assert [gpu.uuid for gpu in told] == [gpu.uuid for gpu in world.gpus]
    assert [status.device_counts(gpu) for gpu in told] == [
        status.device_counts(gpu) for gpu in world.gpus
    ]
    assert [gpu.profiles for gpu in told] == [gpu.profiles for gpu in world.gpus]


def test_a_run_that_sees_no_gpu_leaves_what_an_earlier_one_published() -> None:
    world = node(layout="all-balanced")
    run(world, "all-1g.5gb")
    before = world.annotations[cluster.GPUS_ANNOTATION]

    assert run(world, "all-9g").state is model.State.FAILED

    assert world.annotations[cluster.GPUS_ANNOTATION] == before
