"""GPU clients are paused before a change, and resumed after it."""

import dataclasses

import pytest

from mig_manager import errors
from mig_manager.agent import gpu_clients, outcomes, record, settings
from mig_manager.catalogue import hardware
from mig_manager.core import model, ports, steps
from mig_manager.core.node import clients, cluster
from mig_manager.core.planner import planner
from mig_manager.core.records import status
from tests import fakes, gpu_values

DCGM, EXPORTER, CLIENT = (
    cluster.DEPLOY_LABEL_PREFIX + name for name in ("dcgm", "dcgm-exporter", "client")
)
WATCHER = clients.ExtraClient(labels={"app": "watcher"})


def sliced_node() -> fakes.NodeRig:
    """One GPU with instances, and a device plugin with a deploy label."""
    product = hardware.find("A100-SXM4-40GB")
    gpu = hardware.template(product, 0)
    profiles = {str(known.profile): known.profile for known in gpu.profiles or ()}
    wanted = model.DesiredGpu.of(model.MigMode.ENABLED, {profiles["1g.5gb"]: 7})
    rig = fakes.NodeRig(gpus=gpu_values.brought_to((gpu,), wanted))
    rig.labels[cluster.PLUGIN_DEPLOY_LABEL] = "true"
    rig.start_plugin()
    return rig


def emptying(rig: fakes.NodeRig) -> steps.Plan:
    nothing = model.DesiredGpu(mode=model.MigMode.DISABLED)
    return planner.plan(rig.gpus, {rig.gpus[0].uuid: nothing})


def dependencies_of(rig: fakes.NodeRig) -> ports.Dependencies:
    return ports.Dependencies(
        gpus=rig.hardware,
        node=rig.node,
        workloads=rig.workloads,
        allocations=rig.allocations,
        configs=fakes.FakeConfig(""),
        clock=rig.clock,
    )


def gpu_clients_of(rig: fakes.NodeRig) -> gpu_clients.GpuClients:
    limits = settings.Limits(plugin_timeout_s=10, monitor_timeout_s=5)
    return gpu_clients.GpuClients(dependencies_of(rig), limits)


def journal(rig: fakes.NodeRig) -> record.Record:
    return record.Record(dependencies_of(rig), status.Journal(config="a"))


def new_request(rig: fakes.NodeRig, *, ends_at: int | None = None) -> fakes.FakeRequest:
    return fakes.FakeRequest(rig.clock, ends_at=ends_at, replaced=True)


def paused(rig: fakes.NodeRig, taken: record.Record) -> gpu_clients.Paused:
    return gpu_clients_of(rig).pause(emptying(rig), taken, new_request(rig), (WATCHER,))


def names(rig: fakes.NodeRig) -> set[str]:
    return {pod.name for pod in rig.pods.values()}


def test_a_pause_takes_away_what_labels_place_and_what_the_owner_lists() -> None:
    rig = sliced_node()
    rig.labels |= {CLIENT: "true", DCGM: "true"}
    rig.deploy_daemons[CLIENT] = True
    rig.loose_daemons.add("watcher")
    rig.live()
    taken = journal(rig)

    found = paused(rig, taken)

    assert names(rig) == set()
    assert found.labels_with_pods == {cluster.PLUGIN_DEPLOY_LABEL, CLIENT}
    assert set(taken.journal.paused_labels) == {cluster.PLUGIN_DEPLOY_LABEL, CLIENT, DCGM}
    assert taken.journal.hold_taint
    assert status.Journal.from_json(rig.annotations[cluster.JOURNAL_ANNOTATION]) == taken.journal


def test_a_daemon_that_tolerates_every_taint_starts_once_more_after_the_change() -> None:
    rig = sliced_node()
    rig.loose_daemons.add("watcher")
    rig.live()
    taken = journal(rig)
    found = paused(rig, taken)
    early = rig.add_pod("watcher", labels={"app": "watcher"}, owner_kind="DaemonSet")

    gpu_clients_of(rig).resume_plugin(found, taken)

    assert rig.pods[early].is_terminating


def test_the_plugins_config_and_its_release_are_written_in_one_patch() -> None:
    rig = sliced_node()
    taken = journal(rig)
    found = paused(rig, taken)
    rig.log.clear()

    gpu_clients_of(rig).resume_plugin(found, taken, plugin_config="sliced")

    assert rig.log.count("node.patch") == 1
    assert rig.labels[cluster.PLUGIN_CONFIG_LABEL] == "sliced"
    assert rig.labels[cluster.PLUGIN_DEPLOY_LABEL] == "true"
    assert taken.journal.plugin_config == status.PluginConfig(before=None, now="sliced")


def test_a_config_that_was_set_before_the_run_is_not_rolled_back() -> None:
    rig = sliced_node()
    rig.labels[cluster.PLUGIN_CONFIG_LABEL] = "sliced"
    taken = journal(rig)

    gpu_clients_of(rig).resume_plugin(paused(rig, taken), taken, plugin_config="sliced")

    assert taken.journal.plugin_config is None
    assert gpu_clients_of(rig).has_config("sliced")
    assert not gpu_clients_of(rig).has_config("whole")


def monitored_node() -> tuple[fakes.NodeRig, record.Record, gpu_clients.Paused]:
    """The plugin is back already; two monitors are still away."""
    rig = sliced_node()
    rig.labels |= {EXPORTER: "true", DCGM: "true"}
    rig.deploy_daemons |= {EXPORTER: True, DCGM: True}
    rig.live()
    taken = journal(rig)
    found = paused(rig, taken)
    found = gpu_clients_of(rig).resume_plugin(found, taken)
    return rig, taken, found


def test_each_monitor_is_ready_before_the_next_one_is_let_back() -> None:
    rig, taken, found = monitored_node()
    ready: list[bool] = []

    def note_ready() -> None:
        if rig.labels[EXPORTER] == "true":
            (dcgm,) = clients.gated_by(rig.pods.values(), (DCGM,))
            ready.append(dcgm.is_ready)

    rig.clock.on_wait.append(note_ready)
    gpu_clients_of(rig).resume_monitors(found, taken, new_request(rig))

    assert ready
    assert all(ready)
    assert taken.journal.paused_labels == {}


def test_a_monitor_that_another_program_has_switched_off_is_not_waited_for() -> None:
    rig, taken, found = monitored_node()
    rig.labels[DCGM] = "false"
    begun = rig.clock.now_s

    gpu_clients_of(rig).resume_monitors(found, taken, new_request(rig))

    assert rig.labels[DCGM] == "false"
    assert rig.labels[EXPORTER] == "true"
    assert rig.clock.now_s - begun < 1
    assert "MonitorNotReady" not in rig.events


def test_a_newer_request_does_not_wait_for_monitors() -> None:
    rig, taken, found = monitored_node()
    rig.deploy_daemons[DCGM] = False
    begun = rig.clock.now_s

    gpu_clients_of(rig).resume_monitors(found, taken, new_request(rig, ends_at=1))

    assert rig.clock.now_s - begun < 1
    assert set(taken.journal.paused_labels) == {EXPORTER}


def test_an_api_that_fails_leaves_the_monitors_to_the_end_of_the_run() -> None:
    rig, taken, found = monitored_node()
    refusal = errors.ClusterError("no", reason=errors.Reason.API_UNAVAILABLE)
    patch_at = len(rig.log)
    rig.failing = {patch_at: refusal}

    gpu_clients_of(rig).resume_monitors(found, taken, new_request(rig))

    assert rig.log[patch_at] == "node.patch"
    assert list(taken.journal.paused_labels) == [DCGM, EXPORTER]


def test_validators_on_their_way_out_are_not_deleted_again() -> None:
    rig, taken, found = monitored_node()
    uid = rig.add_pod("v", labels={"app": "nvidia-operator-validator"})
    rig.pods[uid] = dataclasses.replace(rig.pods[uid], is_terminating=True)
    rig.log.clear()

    gpu_clients_of(rig).resume_monitors(found, taken, new_request(rig))

    assert "workloads.delete" not in rig.log


def test_a_patch_that_failed_does_not_lose_the_gpus() -> None:
    rig = sliced_node()
    written = journal(rig)
    written.note(gpus=rig.hardware.observe())
    rig.log.clear()
    rig.failing = {0: errors.ClusterError("503", reason=errors.Reason.API_UNAVAILABLE)}
    with pytest.raises(errors.ClusterError):
        written.enter(model.Phase.DRAIN, "x")

    written.finish(outcomes.failed(errors.Reason.API_UNAVAILABLE, "503"))

    assert cluster.GPUS_ANNOTATION in rig.annotations


def test_a_watch_that_misses_a_plugin_s_pod_ends_no_pause() -> None:
    rig = sliced_node()
    rig.watched = lambda: ()

    paused(rig, journal(rig))

    assert not any(clients.is_device_plugin(pod) for pod in rig.pods.values())


def test_a_watch_that_shows_a_plugin_that_has_gone_proves_nothing() -> None:
    rig = sliced_node()
    shown = tuple(rig.pods.values())
    rig.watched = lambda: shown
    rig.pods.clear()
    rig.plugin_is_broken = True

    with pytest.raises(errors.NotReadyError) as caught:
        gpu_clients_of(rig).wait_schedulable(gpu_clients.ANY_PLUGIN, rig.gpus, new_request(rig))

    assert caught.value.reason is errors.Reason.PLUGIN_NOT_READY
