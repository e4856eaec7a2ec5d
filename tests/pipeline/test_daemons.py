"""Daemons taken off the GPUs, and brought back."""

import dataclasses

import pytest

from mig_manager import errors
from mig_manager.agent import dependencies, device_plugin, gpu_clients, outcomes, record
from mig_manager.catalogue import hardware
from mig_manager.core import model, steps
from mig_manager.core.node import clients, cluster
from mig_manager.core.planner import planner
from mig_manager.core.records import status
from tests import fakes

DCGM, EXPORTER, CLIENT = (
    cluster.DEPLOY_LABEL_PREFIX + name for name in ("dcgm", "dcgm-exporter", "client")
)
WATCHER = clients.ExtraClient(labels={"app": "watcher"})


def sliced_node() -> fakes.World:
    """One GPU with instances, and a device plugin that a label places."""
    product = hardware.find("A100-SXM4-40GB")
    gpu = hardware.template(product, 0)
    profiles = {str(known.profile): known.profile for known in gpu.profiles or ()}
    wanted = model.DesiredGpu.of(model.MigMode.ENABLED, {profiles["1g.5gb"]: 7})
    world = fakes.World(gpus=fakes.brought_to((gpu,), wanted))
    world.labels[cluster.PLUGIN_DEPLOY_LABEL] = "true"
    world.start_plugin()
    return world


def emptying(world: fakes.World) -> steps.Plan:
    nothing = model.DesiredGpu(mode=model.MigMode.DISABLED)
    return planner.plan(world.gpus, {world.gpus[0].uuid: nothing})


def gpu_clients_of(world: fakes.World) -> gpu_clients.GpuClients:
    deps = dependencies.Dependencies(
        gpus=world.hardware,
        node=world.node,
        workloads=world.workloads,
        allocations=world.allocations,
        configs=fakes.FakeConfig(""),
        clock=world.clock,
    )
    limits = dependencies.Limits(plugin_timeout_s=10, monitor_timeout_s=5)
    return gpu_clients.GpuClients(deps, limits)


def journal(world: fakes.World) -> record.Record:
    return record.Record(world.node, world.clock, journal=status.Journal(config="a"))


def wish(world: fakes.World, *, ends_at: int | None = None) -> fakes.FakeWish:
    return fakes.FakeWish(world.clock, ends_at=ends_at, replaced=True)


def paused(world: fakes.World, taken: record.Record) -> device_plugin.Paused:
    return gpu_clients_of(world).pause(emptying(world), taken, wish(world), (WATCHER,))


def names(world: fakes.World) -> set[str]:
    return {pod.name for pod in world.pods.values()}


def test_a_pause_takes_away_what_labels_place_and_what_the_owner_lists() -> None:
    world = sliced_node()
    world.labels |= {CLIENT: "true", DCGM: "true"}
    world.deploy_daemons[CLIENT] = True
    world.loose_daemons.add("watcher")
    world.live()
    taken = journal(world)

    found = paused(world, taken)

    assert names(world) == set()
    assert found.labels_with_pods == {cluster.PLUGIN_DEPLOY_LABEL, CLIENT}
    assert set(taken.journal.paused_labels) == {cluster.PLUGIN_DEPLOY_LABEL, CLIENT, DCGM}
    assert taken.journal.hold_taint
    assert status.Journal.from_json(world.annotations[cluster.JOURNAL_ANNOTATION]) == taken.journal


def test_a_daemon_that_does_not_stop_is_named() -> None:
    world = sliced_node()
    world.clock.on_wait.clear()

    with pytest.raises(errors.NotReadyError, match="default/nvidia-device-plugin"):
        paused(world, journal(world))


def test_a_daemon_that_tolerates_every_taint_starts_once_more_after_the_change() -> None:
    world = sliced_node()
    world.loose_daemons.add("watcher")
    world.live()
    taken = journal(world)
    found = paused(world, taken)
    early = world.add_pod("watcher", labels={"app": "watcher"}, owner_kind="DaemonSet")

    gpu_clients_of(world).resume_plugin(found, taken)

    assert world.pods[early].is_terminating


def test_the_plugins_config_and_its_release_are_written_in_one_patch() -> None:
    world = sliced_node()
    taken = journal(world)
    found = paused(world, taken)
    world.log.clear()

    gpu_clients_of(world).resume_plugin(found, taken, plugin_config="sliced")

    assert world.log.count("node.patch") == 1
    assert world.labels[cluster.PLUGIN_CONFIG_LABEL] == "sliced"
    assert world.labels[cluster.PLUGIN_DEPLOY_LABEL] == "true"
    assert taken.journal.plugin_config == status.PluginConfig(before=None, now="sliced")


def test_a_config_that_was_there_already_is_not_the_runs_to_take_back() -> None:
    world = sliced_node()
    world.labels[cluster.PLUGIN_CONFIG_LABEL] = "sliced"
    taken = journal(world)

    gpu_clients_of(world).resume_plugin(paused(world, taken), taken, plugin_config="sliced")

    assert taken.journal.plugin_config is None
    assert gpu_clients_of(world).plugin.has_config("sliced")
    assert not gpu_clients_of(world).plugin.has_config("whole")


def monitored_node() -> tuple[fakes.World, record.Record, device_plugin.Paused]:
    """The plugin is back already; two monitors are still away."""
    world = sliced_node()
    world.labels |= {EXPORTER: "true", DCGM: "true"}
    world.deploy_daemons |= {EXPORTER: True, DCGM: True}
    world.live()
    taken = journal(world)
    found = paused(world, taken)
    found = gpu_clients_of(world).resume_plugin(found, taken)
    return world, taken, found


def test_each_monitor_is_ready_before_the_next_one_is_let_back() -> None:
    world, taken, found = monitored_node()
    ready: list[bool] = []

    def look() -> None:
        if world.labels[EXPORTER] == "true":
            (dcgm,) = clients.gated_by(world.pods.values(), (DCGM,))
            ready.append(dcgm.is_ready)

    world.clock.on_wait.append(look)
    gpu_clients_of(world).resume_monitors(found, taken, wish(world))

    assert ready
    assert all(ready)
    assert taken.journal.paused_labels == {}


def test_a_monitor_that_somebody_else_has_switched_off_is_not_waited_for() -> None:
    world, taken, found = monitored_node()
    world.labels[DCGM] = "false"
    begun = world.clock.now_s

    gpu_clients_of(world).resume_monitors(found, taken, wish(world))

    assert world.labels[DCGM] == "false"
    assert world.labels[EXPORTER] == "true"
    assert world.clock.now_s - begun < 1
    assert "MonitorNotReady" not in world.events


def test_a_newer_wish_does_not_wait_for_monitors() -> None:
    world, taken, found = monitored_node()
    world.deploy_daemons[DCGM] = False
    begun = world.clock.now_s

    gpu_clients_of(world).resume_monitors(found, taken, wish(world, ends_at=1))

    assert world.clock.now_s - begun < 1
    assert set(taken.journal.paused_labels) == {EXPORTER}


def test_an_api_that_fails_leaves_the_monitors_to_the_end_of_the_run() -> None:
    world, taken, found = monitored_node()
    refusal = errors.ClusterError("no", reason=errors.Reason.API_UNAVAILABLE)
    patch_at = len(world.log)
    world.failing = {patch_at: refusal}

    gpu_clients_of(world).resume_monitors(found, taken, wish(world))

    assert world.log[patch_at] == "node.patch"
    assert list(taken.journal.paused_labels) == [DCGM, EXPORTER]


def test_validators_on_their_way_out_are_not_deleted_again() -> None:
    world, taken, found = monitored_node()
    uid = world.add_pod("v", labels={"app": "nvidia-operator-validator"})
    world.pods[uid] = dataclasses.replace(world.pods[uid], is_terminating=True)
    world.log.clear()

    gpu_clients_of(world).resume_monitors(found, taken, wish(world))

    assert "workloads.delete" not in world.log


def test_a_patch_that_failed_does_not_lose_the_gpus() -> None:
    world = sliced_node()
    written = journal(world)
    written.note(gpus=world.hardware.observe())
    world.log.clear()
    world.failing = {0: errors.ClusterError("503", reason=errors.Reason.API_UNAVAILABLE)}
    with pytest.raises(errors.ClusterError):
        written.enter(model.Phase.DRAIN, "x")

    written.finish(outcomes.failed(errors.Reason.API_UNAVAILABLE, "503"))

    assert cluster.GPUS_ANNOTATION in world.annotations


def test_a_watch_that_misses_a_plugin_s_pod_ends_no_pause() -> None:
    world = sliced_node()
    world.watched = lambda: ()

    paused(world, journal(world))

    assert not any(clients.is_device_plugin(pod) for pod in world.pods.values())


def test_a_watch_that_shows_a_plugin_that_has_gone_proves_nothing() -> None:
    world = sliced_node()
    shown = tuple(world.pods.values())
    world.watched = lambda: shown
    world.pods.clear()
    world.plugin_is_broken = True

    with pytest.raises(errors.NotReadyError) as caught:
        gpu_clients_of(world).plugin.wait_schedulable(
            device_plugin.ANY_PLUGIN, world.gpus, wish(world)
        )

    assert caught.value.reason is errors.Reason.PLUGIN_NOT_READY
