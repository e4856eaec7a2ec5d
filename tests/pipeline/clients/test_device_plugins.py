"""The device plugin in a run: who waits for it, and what it must advertise."""

import math
from collections.abc import Callable

import pytest

from mig_manager.core import steps
from mig_manager.core.objects import discovery_labels, pod_object, well_known
from mig_manager.core.records import run_status
from mig_manager.reasons import Reason
from tests.rigs import layout_table
from tests.rigs.node import agents, call_errors, ends, fakes, moments, node_rig, nodes


def test_plugin_that_cannot_be_verified_is_restarted_once() -> None:
    rig = nodes.node(layout="all-balanced")
    agent = agents.new_agent(rig)

    before_waits: list[int] = []

    def stale() -> None:
        rig.kubelet.schedulable = {"nvidia.com/gpu": frozenset({"MIG-of-yesterday"})}
        before_waits.append(rig.log.count("allocations.allocatable"))

    stale()
    rig.callbacks.add(moments.Wait, stale)

    for attempt in (1, 2):
        rig.log = [call for call in rig.log if call == "workloads.delete"]
        before_waits.clear()
        ends.run_to(rig, "all-balanced", Reason.NOT_ALLOCATABLE, by=agent, attempt=attempt)
        assert rig.log.count("workloads.delete") == 1
        assert before_waits[0] == 4


def test_a_plugin_that_does_not_stop_closes_the_node_once() -> None:
    rig = nodes.busy_node()
    agent = agents.new_agent(rig)

    (plugin,) = rig.pods.plugins
    rig.kubelet.pod_ends_from_s[plugin.uid] = math.inf
    late = "did not stop within 20 s: default/nvidia-device-plugin"
    ends.run_to(rig, "one-slice-changed", Reason.IN_USE, late, by=agent)
    rig.log.clear()

    ends.run_to(
        rig,
        "one-slice-changed",
        Reason.IN_USE,
        "default/nvidia-device-plugin",
        by=agent,
        attempt=2,
    )

    assert "workloads.delete" not in rig.log
    # How it ended, and nothing before.
    assert rig.log.count("node.patch") <= 2
    rig.kubelet.pod_ends_from_s.clear()
    rig.advance()
    ends.run_to(rig, "one-slice-changed", Reason.APPLIED, by=agent, attempt=3)


@pytest.mark.parametrize("value", ["false", "paused-for-driver-upgrade"])
def test_a_plugin_that_its_label_keeps_away_is_not_waited_for(value: str) -> None:
    rig = nodes.node(layout="all-1g.5gb")
    rig.node_object.labels[well_known.PLUGIN_DEPLOY_LABEL] = value
    rig.pods.clear()

    ends.run_to(rig, "all-1g.5gb", Reason.ALREADY_APPLIED)


@pytest.mark.parametrize("before", [None, "all-1g.5gb"])
def test_a_newer_request_does_not_wait_for_a_missing_plugin(before: str | None) -> None:
    def broken() -> node_rig.NodeRig:
        rig = nodes.node(layout=before)
        rig.plugin.is_broken = True
        rig.pods.clear()
        rig.start_plugin()
        return rig

    cancel = fakes.FakeCancellation((rig := broken()).clock)
    ends.run_to(rig, "all-1g.5gb", Reason.PLUGIN_NOT_READY, cancel=cancel)

    rig = broken()
    ends.supersede(rig, "all-1g.5gb", ends_at=cancel.checks, is_replaced=True)
    ends.assert_restored(rig)
    assert rig.log.count("gpus.execute") == (0 if before else 1)


def test_change_whose_plugin_does_not_return_is_verified_later() -> None:
    rig = nodes.node(layout="all-1g.5gb")
    rig.plugin.is_broken = True
    why = "with MIG strategy single it does not start: MIG devices differ"
    for _ in range(2):
        ends.run_to(rig, "all-balanced", Reason.PLUGIN_NOT_READY, why)
        assert well_known.APPLIED_LABEL not in rig.node_object.labels

    rig.plugin.is_broken = False
    for pod in rig.pods.plugins:
        rig.pods.remove(pod.uid)
    assert agents.run(rig, "all-balanced").state is run_status.State.SUCCESS


def test_plugin_that_does_not_start_names_the_gpu_without_a_device() -> None:
    text = (
        agents.LAYOUTS_TEXT + "  bare:\n  - {devices: all, mig-enabled: true, mig-devices: {}}\n"
    )
    rig = nodes.node()
    rig.plugin.is_broken = True
    why = "no MIG device on GPU 0, GPU 1"

    ends.run_to(rig, "bare", Reason.PLUGIN_NOT_READY, why, layouts=text)


def test_a_plugin_that_kubelet_cannot_start_is_named_while_it_is_awaited() -> None:
    rig = nodes.node()
    rig.plugin.is_broken = True
    rig.plugin.waiting = pod_object.ContainerWaiting(
        reason="ErrImagePull", message="plugin:9: not found"
    )
    why = "nvidia-device-plugin (ErrImagePull: plugin:9: not found)"

    ends.run_to(rig, "all-1g.5gb", Reason.PLUGIN_NOT_READY, why)

    assert [why in message for message in rig.node_object.status_messages].count(True) == 2


def node_with_plugin_service(layout: str | None = "all-1g.5gb") -> node_rig.NodeRig:
    """A node whose device plugin is a service of the host."""
    rig = nodes.node(layout=layout)
    del rig.node_object.labels[well_known.PLUGIN_DEPLOY_LABEL]
    rig.pods.clear()
    return rig


def node_between_plugins() -> node_rig.NodeRig:
    """A node with what kubelet keeps of a plugin whose socket is gone."""
    rig = nodes.node(layout="all-balanced")
    rig.plugin.is_label_managed = False
    rig.node_object.labels.pop(well_known.PLUGIN_DEPLOY_LABEL, None)
    rig.pods.clear()
    rig.plugin.unhealthy, rig.kubelet.schedulable = (
        rig.kubelet.schedulable,
        dict.fromkeys(rig.kubelet.schedulable, frozenset()),
    )
    return rig


def test_a_plugin_outside_pods_may_restart_during_the_wait() -> None:
    rig = node_with_plugin_service()
    rig.callbacks.add(moments.Wait, rig.register_devices)

    ends.run_to(rig, "all-balanced", Reason.APPLIED)


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        pytest.param(node_rig.NodeRig.register_devices, Reason.ALREADY_APPLIED, id="restarts"),
        pytest.param(lambda _rig: None, Reason.NOT_ALLOCATABLE, id="stays"),
    ],
)
def test_a_plugin_outside_pods_must_not_advertise_missing_devices(
    act: Callable[[node_rig.NodeRig], None], reason: Reason
) -> None:
    rig, agent = (rig := node_with_plugin_service()), agents.new_agent(rig)
    why = "kubelet has 10 allocatable devices that no GPU has"
    ends.run_to(rig, "all-balanced", Reason.NOT_ALLOCATABLE, why, by=agent)

    act(rig)

    ends.run_to(rig, "all-balanced", reason, by=agent, attempt=2)


def test_a_plugin_outside_pods_may_allocate_a_device_during_a_hook() -> None:
    rig = node_with_plugin_service()
    rig.hooks.text = nodes.HOOKS
    device = rig.gpus[0].mig_uuids[0]
    rig.callbacks.add(
        "hooks.run",
        lambda: rig.pods.add("late", devices=frozenset({device})),
        when=lambda: rig.node_object.has_reconfiguring_taint,
        times=1,
    )
    agent = agents.new_agent(rig)
    ends.run_to(rig, "all-balanced", Reason.IN_USE, "default/late", by=agent)
    assert device in rig.gpus[0].mig_uuids

    rig.callbacks.add(moments.Wait, rig.register_devices)
    ends.run_to(rig, "all-balanced", Reason.APPLIED, by=agent, attempt=2)
    assert device in rig.gpus[0].mig_uuids
    assert "workloads.evict" not in rig.log


@pytest.mark.parametrize(
    ("strategy", "reason"),
    [
        ("", Reason.APPLIED),
        ("none", Reason.APPLIED),
        ("single", Reason.NOT_ALLOCATABLE),
        ("mixed", Reason.NOT_ALLOCATABLE),
    ],
)
def test_a_plugin_outside_pods_has_whole_gpus_only_with_strategy_none(
    strategy: str, reason: Reason
) -> None:
    rig = node_with_plugin_service(None)
    if strategy:
        rig.node_object.labels[discovery_labels.STRATEGY] = strategy

    ends.run_to(rig, "all-1g.5gb", reason)


@pytest.mark.parametrize("device", ["nvidia0/gi7", "GPU-00000000-0000-0000-0000-000000000009-0"])
def test_devices_of_other_plugins_need_not_be_of_a_gpu(device: str) -> None:
    rig = node_with_plugin_service()
    rig.kubelet.schedulable = {"nvidia.com/gpu": frozenset({device})}

    ends.run_to(rig, "all-balanced", Reason.APPLIED)


def test_advertising_agent_waits_for_no_plugin() -> None:
    rig = node_between_plugins()
    rig.daemons.controller_away_until_s = math.inf

    ends.run_to(
        rig,
        "one-slice-changed",
        Reason.APPLIED,
        by=agents.new_agent(rig, advertises_simulated=True),
    )


@pytest.mark.parametrize("comes_during_change", [True, False])
def test_a_plugin_between_two_pods_of_its_daemonset_is_waited_for(
    *, comes_during_change: bool
) -> None:
    rig = node_between_plugins()

    def start() -> None:
        if not rig.pods.plugins and "gpus.execute" in rig.log:
            rig.plugin.unhealthy = {}
            rig.start_plugin()

    if comes_during_change:
        rig.callbacks.add(steps.Step, start)
    else:
        rig.daemons.controller_away_until_s = math.inf
        rig.callbacks.add(moments.Wait, start)

    ends.run_to(rig, "one-slice-changed", Reason.APPLIED)
    assert rig.kubelet.schedulable == rig.plugin_devices


def test_the_wait_ends_when_the_daemonset_no_longer_starts_the_plugin() -> None:
    rig = node_between_plugins()
    rig.daemons.controller_away_until_s = math.inf

    ends.run_to(rig, "one-slice-changed", Reason.PLUGIN_NOT_READY)


@pytest.mark.parametrize(
    ("shows_old", "reason"), [(True, Reason.PLUGIN_NOT_READY), (False, Reason.APPLIED)]
)
def test_outdated_watch_does_not_end_the_wait_for_the_plugin(
    reason: Reason, *, shows_old: bool
) -> None:
    rig = nodes.node(layout="all-1g.5gb")
    shown = tuple(rig.pods.values()) if shows_old else ()
    rig.pods.watched = lambda: shown
    plugins_at_steps = rig.note(lambda: rig.pods.plugins, at=steps.Step)
    rig.plugin.is_broken = shows_old

    ends.run_to(rig, "all-balanced", reason)

    assert plugins_at_steps
    assert not any(plugins_at_steps)


def test_a_watch_that_shows_the_old_plugin_is_not_confirmed_by_lists() -> None:
    rig = nodes.node(layout="all-1g.5gb")
    shown = tuple(rig.pods.values())
    rig.pods.watched = lambda: shown
    rig.plugin.is_broken = True
    # The devices alone do not show that a new plugin is there.
    rig.callbacks.add(moments.Wait, rig.register_devices)

    ends.run_to(rig, "all-balanced", Reason.PLUGIN_NOT_READY)

    assert rig.log.count("workloads.list") < 10


def test_a_patch_that_failed_does_not_lose_the_gpus() -> None:
    rig = nodes.node()
    rig.failures.add("node.patch", call_errors.broken("node"), times=1)

    ends.run_to(rig, "all-1g.5gb", Reason.API_UNAVAILABLE)

    assert well_known.GPUS_ANNOTATION in rig.node_object.annotations


def test_the_strategy_mixed_serves_layouts_that_single_refuses() -> None:
    rig = nodes.node()
    rig.node_object.labels[discovery_labels.STRATEGY] = "mixed"

    ends.run_to(rig, "all-balanced", Reason.APPLIED)


def test_a_plugin_that_missed_a_gpu_restarts_beside_a_former_capacity() -> None:
    text = layout_table.render({"whole": [layout_table.rule_line("all", {"7g.40gb": 1})]})
    rig = nodes.node()
    agents.run(rig, "whole", layouts=text)
    # It began while GPU 1 did not answer. Kubelet keeps the GPUs of the plugin before it.
    rig.kubelet.schedulable = {
        "nvidia.com/mig-7g.40gb": frozenset(rig.gpus[0].mig_uuids),
        "nvidia.com/gpu": frozenset(),
    }
    rig.plugin.unhealthy = {"nvidia.com/gpu": frozenset(gpu.uuid for gpu in rig.gpus)}

    ends.run_to(rig, "whole", Reason.ALREADY_APPLIED, layouts=text)

    devices = frozenset(uuid for gpu in rig.gpus for uuid in gpu.mig_uuids)
    assert rig.kubelet.schedulable == {"nvidia.com/gpu": devices}


def test_a_plugin_that_missed_a_gpu_restarts_once_the_gpu_is_back() -> None:
    text = layout_table.render({"first": [layout_table.rule_line("[0]", {"7g.40gb": 1})]})
    rig, agent = (rig := nodes.node()), agents.new_agent(rig, layouts=text)
    rig.driver.lost.add(rig.gpus[1].uuid)
    agents.run(rig, "first", by=agent)
    rig.driver.lost.clear()
    served = frozenset(rig.gpus[0].mig_uuids)
    # The only device of this resource was registered by the plugin before the change.
    rig.kubelet.schedulable = {"nvidia.com/mig-7g.40gb": served, "nvidia.com/gpu": frozenset()}
    rig.plugin.unhealthy = {"nvidia.com/gpu": frozenset({rig.gpus[1].uuid})}

    ends.run_to(rig, "first", Reason.ALREADY_APPLIED, by=agent, is_heal=True)

    assert rig.kubelet.schedulable == {"nvidia.com/gpu": served | {rig.gpus[1].uuid}}
