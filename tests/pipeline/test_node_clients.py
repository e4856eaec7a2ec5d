"""The device plugin, the monitors and the owner's daemons in a run."""

import dataclasses

import pytest

from mig_manager import errors
from mig_manager.core import model, steps
from mig_manager.core.node import clients, cluster, resources
from mig_manager.core.node import policy as policies
from tests import fakes
from tests.scenes import (
    BROKEN,
    DCGM,
    EXPORTER,
    GFD,
    SAMPLER,
    assert_nothing_taken,
    busy_node,
    device,
    monitored_node,
    node,
    reconciler,
    refuse,
    run,
    sharing_node,
    watched_node,
)


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
    assert "did not stop within 20 s: default/nvidia-device-plugin" in first.message
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


def test_a_change_whose_plugin_does_not_come_back_fails_and_is_verified_by_a_later_run() -> None:
    rig = node()
    rig.plugin_is_broken = True
    for _ in range(2):
        assert run(rig, "all-1g.5gb").reason is errors.Reason.PLUGIN_NOT_READY
        assert cluster.APPLIED_LABEL not in rig.labels
        assert_nothing_taken(rig)

    rig.plugin_is_broken = False
    for uid in [pod.uid for pod in rig.pods.values() if clients.is_device_plugin(pod)]:
        del rig.pods[uid]
    assert run(rig, "all-1g.5gb").state is model.State.SUCCESS


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


def test_a_monitor_that_does_not_come_back_is_a_warning_and_keeps_no_workload_away() -> None:
    rig = monitored_node()
    rig.deploy_daemons[GFD] = False
    closed: list[bool] = []
    rig.clock.on_wait.append(lambda: closed.append(rig.has_hold_taint))

    outcome = run(rig, "one-slice-changed")

    assert outcome.state is model.State.SUCCESS
    assert rig.events[-2:] == ["MonitorNotReady", "Applied"]
    assert GFD in rig.messages[-2]
    assert rig.labels[EXPORTER] == "true"
    assert closed[-1] is False


def test_the_validator_and_a_feature_discovery_without_a_deploy_label_are_restarted() -> None:
    rig = busy_node()
    rig.loose_daemons.add("nvidia-operator-validator")
    rig.live()
    before = {pod.uid for pod in rig.pods.values() if clients.is_validator(pod)}
    before.add(rig.add_pod("gfd", container_names=("gpu-feature-discovery-ctr",)))
    assert len(before) == 2

    assert run(rig, "one-slice-changed").state is model.State.SUCCESS

    assert all(uid not in rig.pods or rig.pods[uid].is_terminating for uid in before)


def test_a_validator_that_cannot_be_deleted_does_not_fail_the_run() -> None:
    rig = monitored_node()
    assert run(rig, "one-slice-changed").state is model.State.SUCCESS
    last_delete = len(rig.log) - 1 - rig.log[::-1].index("workloads.delete")
    rig = monitored_node()
    rig.failing = {last_delete: BROKEN["workloads"]}

    assert run(rig, "one-slice-changed").state is model.State.SUCCESS


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


@pytest.mark.parametrize("is_plugin_broken", [True, False])
def test_a_plugin_config_is_restored_where_the_change_or_the_plugin_fails(
    *, is_plugin_broken: bool
) -> None:
    rig = sharing_node()
    rig.plugin_is_broken = is_plugin_broken
    if not is_plugin_broken:
        rig.step_error = refuse(steps.CreateGpuInstance, times=1)

    assert run(rig, "one-slice-changed").state is model.State.FAILED

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


def with_strategy(strategy: str, *, by_label: bool) -> fakes.NodeRig:
    rig = node(layout="all-1g.5gb")
    if by_label:
        rig.labels[resources.STRATEGY_LABEL] = strategy
        return rig
    for uid, pod in rig.pods.items():
        rig.pods[uid] = dataclasses.replace(pod, mig_strategy=strategy)
    return rig


@pytest.mark.parametrize("by_label", [True, False])
def test_a_mixed_layout_with_strategy_single_fails_before_anything_is_touched(
    *, by_label: bool
) -> None:
    rig = with_strategy("single", by_label=by_label)
    rig.add_pod("train", devices=frozenset({device(rig, 0, "1g.5gb")}))
    gpus, pods = rig.gpus, dict(rig.pods)

    outcome = run(rig, "all-balanced")

    assert outcome.reason is errors.Reason.STRATEGY_MISMATCH
    assert "MIG strategy single" in outcome.message
    assert "MIG devices differ: 1g.5gb, 2g.10gb, 3g.20gb" in outcome.message
    assert (rig.gpus, rig.pods) == (gpus, pods)
    assert rig.states == ["failed"]
    assert outcome.should_retry


@pytest.mark.parametrize("why", ["uniform layout", "other plugin config", "no plugin"])
def test_strategy_single_fails_no_uniform_layout_no_other_plugin_config_and_no_node_without_plugin(
    why: str,
) -> None:
    rig = with_strategy("single", by_label=True)
    if why == "other plugin config":
        rig.policy = policies.Policy(plugin_configs={"all-balanced": "mixed"})
    if why == "no plugin":
        rig.pods.clear()
        rig.labels[cluster.PLUGIN_DEPLOY_LABEL] = "false"
    layout = "all-disabled" if why == "uniform layout" else "all-balanced"

    assert run(rig, layout).state is model.State.SUCCESS


def test_a_plugin_that_does_not_start_is_reported_with_possible_causes() -> None:
    rig = node(layout="all-1g.5gb")
    rig.plugin_is_broken = True

    outcome = run(rig, "all-balanced")

    assert outcome.reason is errors.Reason.PLUGIN_NOT_READY
    assert "with MIG strategy single it does not start: MIG devices differ" in outcome.message
