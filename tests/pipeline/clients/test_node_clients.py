"""The device plugin, the monitors and the owner's daemons in a run."""

from typing import Any

import pytest

from mig_manager.core import model, steps
from mig_manager.core.node import (
    clients,
    device_ids,
    pod_object,
    policies,
    strategies,
    well_known,
)
from mig_manager.errors import Reason
from tests.node import fakes, scenes
from tests.node.scenes import (
    BROKEN,
    CONFIG,
    assert_ends,
    assert_superseded,
    busy_node,
    node,
    reconciler,
    refuse,
    run,
)
from tests.node.swept_scenes import (
    DCGM,
    EXPORTER,
    GFD,
    SAMPLER,
    monitored_node,
    sharing_node,
    watched_node,
)


def plugins(rig: fakes.NodeRig) -> list[str]:
    return [uid for uid, pod in rig.pods.items() if clients.is_device_plugin(pod)]


def test_plugin_that_cannot_be_verified_is_restarted_once() -> None:
    rig = node(layout="all-balanced")
    agent = reconciler(rig)

    before_waits: list[int] = []

    def stale() -> None:
        rig.schedulable = {"nvidia.com/gpu": frozenset({"MIG-of-yesterday"})}
        before_waits.append(rig.log.count("allocations.allocatable"))

    stale()
    rig.clock.on_wait.append(stale)

    requests = []
    for attempt in (1, 2):
        rig.log = [call for call in rig.log if call == "workloads.delete"]
        before_waits.clear()
        assert_ends(rig, Reason.NOT_ALLOCATABLE, layout="all-balanced", by=agent, attempt=attempt)
        assert rig.log.count("workloads.delete") == 1
        requests.append(before_waits[0])
    assert requests == [4, 4]


def test_a_plugin_that_does_not_stop_closes_the_node_once() -> None:
    rig = busy_node()
    agent = reconciler(rig)

    def live_without_end_of_the_plugin() -> None:
        for uid, pod in list(rig.pods.items()):
            if pod.is_terminating and not clients.is_device_plugin(pod):
                del rig.pods[uid]
                rig.kubelet.assigned.pop(uid, None)

    rig.clock.on_wait = [live_without_end_of_the_plugin]
    late = "did not stop within 20 s: default/nvidia-device-plugin"
    assert_ends(rig, Reason.IN_USE, late, by=agent)
    rig.log.clear()

    assert_ends(rig, Reason.IN_USE, "default/nvidia-device-plugin", by=agent, attempt=2)

    assert "workloads.delete" not in rig.log
    # How it ended, and nothing before.
    assert rig.log.count("node.patch") <= 2
    rig.clock.on_wait.append(rig.live)
    rig.live()
    assert_ends(rig, Reason.APPLIED, by=agent, attempt=3)


@pytest.mark.parametrize("value", ["false", "paused-for-driver-upgrade"])
def test_a_node_that_shall_have_no_plugin_is_not_waited_for(value: str) -> None:
    rig = node(layout="all-1g.5gb")
    rig.labels[well_known.PLUGIN_DEPLOY_LABEL] = value
    rig.pods.clear()

    assert_ends(rig, Reason.ALREADY_APPLIED, layout="all-1g.5gb")


@pytest.mark.parametrize("before", [None, "all-1g.5gb"])
def test_a_newer_request_need_not_wait_for_a_plugin_that_does_not_come(before: str | None) -> None:
    def broken() -> fakes.NodeRig:
        rig = node(layout=before)
        rig.plugin.is_broken = True
        rig.pods.clear()
        rig.start_plugin()
        return rig

    patient = fakes.FakeRequest((rig := broken()).clock)
    assert_ends(rig, Reason.PLUGIN_NOT_READY, layout="all-1g.5gb", request=patient)

    rig = broken()
    assert_superseded(rig, "all-1g.5gb", when=lambda: False, ends_at=patient.asked, replaced=True)
    assert rig.log.count("gpus.execute") == (0 if before else 1)


def test_change_whose_plugin_does_not_return_is_verified_later() -> None:
    rig = node(layout="all-1g.5gb")
    rig.plugin.is_broken = True
    why = "with MIG strategy single it does not start: MIG devices differ"
    for _ in range(2):
        assert_ends(rig, Reason.PLUGIN_NOT_READY, why, layout="all-balanced")
        assert well_known.APPLIED_LABEL not in rig.labels

    rig.plugin.is_broken = False
    for uid in plugins(rig):
        del rig.pods[uid]
    assert run(rig, "all-balanced").state is model.State.SUCCESS


def test_plugin_that_does_not_start_names_the_gpu_without_a_device() -> None:
    text = CONFIG + "  bare:\n  - {devices: all, mig-enabled: true, mig-devices: {}}\n"
    rig = node()
    rig.plugin.is_broken = True
    why = "no MIG device on GPU 0, GPU 1"

    assert_ends(rig, Reason.PLUGIN_NOT_READY, why, layout="bare", by=reconciler(rig, text))


def test_a_plugin_that_kubelet_cannot_start_is_named_while_it_is_awaited() -> None:
    rig = node()
    rig.plugin.is_broken = True
    rig.plugin.waiting = pod_object.ContainerWaiting(
        reason="ErrImagePull", message="plugin:9: not found"
    )
    why = "nvidia-device-plugin (ErrImagePull: plugin:9: not found)"

    assert_ends(rig, Reason.PLUGIN_NOT_READY, why, layout="all-1g.5gb")

    assert [why in message for message in rig.statuses].count(True) == 2


def node_with_plugin_service() -> fakes.NodeRig:
    """A node whose device plugin is a service of the host."""
    rig = node(layout="all-1g.5gb")
    del rig.labels[well_known.PLUGIN_DEPLOY_LABEL]
    rig.pods.clear()
    return rig


def node_between_plugins() -> fakes.NodeRig:
    """A node with what kubelet keeps of a plugin whose socket is gone."""
    rig = node(layout="all-balanced")
    rig.plugin.is_gated = False
    rig.labels.pop(well_known.PLUGIN_DEPLOY_LABEL, None)
    rig.pods.clear()
    rig.plugin.unhealthy, rig.schedulable = (
        rig.schedulable,
        dict.fromkeys(rig.schedulable, frozenset()),
    )
    return rig


@pytest.mark.parametrize(
    ("restarts", "reasons"),
    [
        ("during the wait", [Reason.APPLIED, Reason.ALREADY_APPLIED]),
        ("after it", [Reason.NOT_ALLOCATABLE, Reason.ALREADY_APPLIED]),
        ("never", [Reason.NOT_ALLOCATABLE, Reason.NOT_ALLOCATABLE]),
    ],
)
def test_a_plugin_that_is_no_pod_must_not_advertise_devices_that_are_gone(
    restarts: str, reasons: list[Reason]
) -> None:
    rig, agent = (rig := node_with_plugin_service()), reconciler(rig)

    def restart() -> None:
        rig.schedulable = {"nvidia.com/gpu": device_ids.expected_ids(rig.gpus)[0]}

    if restarts == "during the wait":
        rig.clock.on_wait.append(restart)
    why = "kubelet has 10 allocatable devices that no GPU has"
    texts = [] if restarts == "during the wait" else [why]
    assert_ends(rig, reasons[0], *texts, layout="all-balanced", by=agent)
    if restarts == "after it":
        restart()
    assert_ends(rig, reasons[1], layout="all-balanced", by=agent, attempt=2)


@pytest.mark.parametrize(
    ("strategy", "reason"),
    [
        ("", Reason.APPLIED),
        ("none", Reason.APPLIED),
        ("single", Reason.NOT_ALLOCATABLE),
        ("mixed", Reason.NOT_ALLOCATABLE),
    ],
)
def test_a_plugin_that_is_no_pod_advertises_whole_gpus_with_strategy_none_only(
    strategy: str, reason: Reason
) -> None:
    rig = node()
    del rig.labels[well_known.PLUGIN_DEPLOY_LABEL]
    rig.pods.clear()
    if strategy:
        rig.labels[strategies.STRATEGY_LABEL] = strategy

    assert_ends(rig, reason, layout="all-1g.5gb")


@pytest.mark.parametrize("device", ["nvidia0/gi7", "GPU-00000000-0000-0000-0000-000000000009-0"])
def test_devices_of_other_plugins_need_not_be_of_a_gpu(device: str) -> None:
    rig = node_with_plugin_service()
    rig.schedulable = {"nvidia.com/gpu": frozenset({device})}

    assert_ends(rig, Reason.APPLIED, layout="all-balanced")


def test_advertising_agent_waits_for_no_plugin() -> None:
    rig = node_between_plugins()
    rig.clock.on_wait = []

    assert_ends(rig, Reason.APPLIED, by=reconciler(rig, is_advertiser=True))


@pytest.mark.parametrize("comes", ["during the change", "after it", "never"])
def test_a_plugin_between_two_pods_of_its_daemonset_is_waited_for(comes: str) -> None:
    rig = node_between_plugins()

    def start() -> None:
        if not plugins(rig) and "gpus.execute" in rig.log:
            rig.plugin.unhealthy = {}
            rig.start_plugin()

    match comes:
        case "during the change":
            rig.driver.step_error = lambda _step: start()
        case "after it":
            rig.clock.on_wait = [start]
        case _:
            rig.clock.on_wait = []

    reason = Reason.PLUGIN_NOT_READY if comes == "never" else Reason.APPLIED
    assert_ends(rig, reason)
    expected = device_ids.expected_ids(rig.gpus)[0]
    assert comes == "never" or rig.schedulable == {"nvidia.com/gpu": expected}


def test_monitors_resume_one_by_one_after_the_change_is_verified() -> None:
    rig = monitored_node()
    has_gfd: list[bool] = []

    def note_order() -> None:
        if "gpus.execute" in rig.log and rig.labels[EXPORTER] == "true":
            has_gfd.append("gpu-feature-discovery" in rig.pod_names)

    rig.on_call = note_order

    assert_ends(rig, Reason.APPLIED)

    verifying = rig.statuses.index("waiting for the new devices to be schedulable")
    assert rig.statuses[verifying + 1 : verifying + 3] == [
        "resuming gpu-feature-discovery, dcgm",
        "resuming dcgm-exporter",
    ]
    assert has_gfd
    assert all(has_gfd)
    assert {rig.labels[key] for key in (GFD, DCGM, EXPORTER)} == {"true"}
    assert "MonitorNotReady" not in rig.events


def test_a_newer_request_does_not_wait_for_monitors() -> None:
    rig = monitored_node()
    rig.daemons.deployed[GFD] = False
    hasty = fakes.FakeRequest(rig.clock, replaced=True)
    hasty.ends_when = lambda: rig.statuses[-1].startswith("resuming")

    assert_ends(rig, Reason.APPLIED, request=hasty)

    assert rig.clock.now_s < 2


def test_an_api_that_fails_leaves_the_monitors_to_the_end_of_the_run() -> None:
    rig = monitored_node()

    def fail() -> None:
        if rig.statuses[-1].startswith("resuming") and rig.log[-1] == "node.patch":
            rig.on_call = lambda: None
            raise BROKEN["node"]

    rig.on_call = lambda: fail() if rig.statuses else None

    assert_ends(rig, Reason.APPLIED)

    assert rig.labels[EXPORTER] == "true"


def test_monitor_that_does_not_return_is_only_a_warning() -> None:
    rig = monitored_node()
    rig.daemons.deployed[GFD] = False
    closed: list[bool] = []
    rig.clock.on_wait.append(lambda: closed.append(rig.has_hold_taint))

    assert_ends(rig, Reason.APPLIED)

    assert rig.events[-2:] == ["MonitorNotReady", "Applied"]
    assert GFD in rig.messages[-2]
    assert rig.labels[EXPORTER] == "true"
    assert closed[-1] is False


@pytest.mark.parametrize("value", ["false", None])
def test_a_monitor_that_is_switched_off_meanwhile_is_not_awaited(value: str | None) -> None:
    rig = monitored_node()
    rig.daemons.deployed[GFD] = False

    def switch_off() -> None:
        if rig.statuses[-1].startswith("resuming"):
            rig.labels.pop(GFD, None)
            rig.labels |= {GFD: value} if value else {}

    rig.clock.on_wait.append(switch_off)

    assert_ends(rig, Reason.APPLIED)

    assert rig.labels.get(GFD) == value
    assert "MonitorNotReady" not in rig.events


def test_validator_and_ungated_feature_discovery_are_restarted() -> None:
    rig = busy_node()
    rig.daemons.loose.add("nvidia-operator-validator")
    rig.live()
    before = {pod.uid for pod in rig.pods.values() if clients.is_validator(pod)}
    discovery: dict[str, Any] = {"container_names": ("gpu-feature-discovery-ctr",)}
    cuda: dict[str, Any] = {"labels": {"app": "nvidia-cuda-validator"}}
    before.add(rig.add_pod("gfd", **discovery, owner_kind="DaemonSet"))
    before.add(rig.add_pod("cuda", **cuda, owner_kind="ClusterPolicy"))
    assert len(before) == 3
    others = {rig.add_pod("bare", **each) for each in (discovery, cuda)}
    others |= {rig.add_pod("web", **each, owner_kind="ReplicaSet") for each in (discovery, cuda)}

    assert_ends(rig, Reason.APPLIED)

    assert all(uid not in rig.pods or rig.pods[uid].is_terminating for uid in before)
    assert not any(rig.pods[uid].is_terminating for uid in others)


def test_validators_on_their_way_out_are_not_deleted_again() -> None:
    rig = busy_node()
    leaving: dict[str, Any] = {"owner_kind": "DaemonSet", "is_terminating": True}
    labels = {"app": "nvidia-operator-validator"}
    rig.clock.on_wait.append(lambda: rig.add_pod("v", labels=labels, **leaving))

    assert_ends(rig, Reason.APPLIED)

    assert "workloads.delete" not in rig.log


def test_a_validator_that_cannot_be_deleted_does_not_fail_the_run() -> None:
    rig = monitored_node()
    assert_ends(rig, Reason.APPLIED)
    last_delete = len(rig.log) - 1 - rig.log[::-1].index("workloads.delete")
    rig = monitored_node()
    rig.failing = {last_delete: BROKEN["workloads"]}

    assert_ends(rig, Reason.APPLIED)


def test_the_owners_daemons_are_away_during_the_change_and_back_after_it() -> None:
    rig = watched_node()
    here: list[set[str]] = []

    def note_pods(_step: steps.Step) -> None:
        here.append(rig.pod_names)

    rig.driver.step_error = note_pods
    assert_ends(rig, Reason.APPLIED)
    rig.live()

    assert here
    assert all({"watcher", "sampler"}.isdisjoint(names) for names in here)
    assert {"watcher", "sampler"} <= rig.pod_names
    assert "workloads.evict" in rig.log
    assert rig.labels[SAMPLER] == "true"


def test_daemon_that_tolerates_every_taint_restarts_after_the_change() -> None:
    rig = watched_node()
    early: list[str] = []

    def start(_step: steps.Step) -> None:
        if not early:
            early.append(rig.add_pod("watcher", labels={"app": "watcher"}, owner_kind="DaemonSet"))

    rig.driver.step_error = start
    assert_ends(rig, Reason.APPLIED)

    assert early[0] not in rig.pods


@pytest.mark.parametrize("shows_old", [True, False])
def test_outdated_watch_does_not_end_the_wait_for_the_plugin(*, shows_old: bool) -> None:
    rig = node(layout="all-1g.5gb")
    shown = tuple(rig.pods.values()) if shows_old else ()
    rig.watched = lambda: shown
    here: list[str] = []
    rig.driver.step_error = lambda _step: here.extend(plugins(rig))
    rig.plugin.is_broken = shows_old

    reason = Reason.PLUGIN_NOT_READY if shows_old else Reason.APPLIED
    assert_ends(rig, reason, layout="all-balanced")

    assert rig.driver.executed
    assert here == []


def test_a_patch_that_failed_does_not_lose_the_gpus() -> None:
    assert_ends(undisturbed := node(), Reason.APPLIED, layout="all-1g.5gb")
    rig = node()
    rig.failing = {undisturbed.log.index("node.patch"): BROKEN["node"]}

    assert_ends(rig, Reason.API_UNAVAILABLE, layout="all-1g.5gb")

    assert well_known.GPUS_ANNOTATION in rig.annotations


def test_the_plugin_starts_with_the_config_that_goes_with_the_layout() -> None:
    rig = sharing_node()
    seen: set[tuple[str, str]] = set()
    keys = (well_known.PLUGIN_CONFIG_LABEL, well_known.PLUGIN_DEPLOY_LABEL)
    rig.on_call = lambda: seen.add((rig.labels[keys[0]], rig.labels[keys[1]]))

    assert_ends(rig, Reason.APPLIED)

    assert seen == {("whole", "true"), ("whole", well_known.PAUSED_VALUE), ("sliced", "true")}
    assert rig.labels[well_known.PLUGIN_CONFIG_LABEL] == "sliced"


@pytest.mark.parametrize("is_plugin_broken", [True, False])
def test_a_plugin_config_is_restored_where_the_change_or_the_plugin_fails(
    *, is_plugin_broken: bool
) -> None:
    rig = sharing_node()
    rig.plugin.is_broken = is_plugin_broken
    if not is_plugin_broken:
        rig.driver.step_error = refuse(steps.CreateGpuInstance, times=1)

    reason = Reason.PLUGIN_NOT_READY if is_plugin_broken else Reason.INSUFFICIENT_RESOURCES
    assert_ends(rig, reason)

    assert rig.labels[well_known.PLUGIN_CONFIG_LABEL] == "whole"


def test_the_first_plugin_config_is_restored_after_an_upgrade_with_another() -> None:
    rig = sharing_node()
    rig.plugin.is_broken = True

    def kill() -> None:
        if rig.labels[well_known.PLUGIN_CONFIG_LABEL] == "sliced":
            raise scenes.Killed

    rig.on_call = kill
    with pytest.raises(scenes.Killed):
        run(rig)
    rig.on_call = lambda: None
    rig.policy = policies.Policy(plugin_configs=((scenes.LAYOUT, "halved"),))

    assert scenes.resume(rig, scenes.LAYOUT).reason is Reason.PLUGIN_NOT_READY

    assert rig.labels[well_known.PLUGIN_CONFIG_LABEL] == "whole"


def test_plugin_config_of_another_program_is_not_overwritten() -> None:
    rig = sharing_node()
    rig.plugin.is_broken = True

    def choose() -> None:
        if rig.labels[well_known.PLUGIN_CONFIG_LABEL] == "sliced":
            rig.labels[well_known.PLUGIN_CONFIG_LABEL] = "mine"

    rig.clock.on_wait.append(choose)
    run(rig)

    assert rig.labels[well_known.PLUGIN_CONFIG_LABEL] == "mine"


def test_active_layout_gets_its_plugin_config_without_gpu_changes() -> None:
    rig = node(layout="one-slice-changed")
    rig.policy = policies.Policy(plugin_configs=(("*", "sliced"),))
    (old_plugin,) = plugins(rig)

    assert_ends(rig, Reason.ALREADY_APPLIED)

    assert rig.labels[well_known.PLUGIN_CONFIG_LABEL] == "sliced"
    assert old_plugin not in rig.pods
    assert "gpus.execute" not in rig.log


def test_a_plugin_with_strategy_mixed_serves_what_strategy_single_refuses() -> None:
    rig = node()
    rig.labels[strategies.STRATEGY_LABEL] = "mixed"

    assert_ends(rig, Reason.APPLIED, layout="all-balanced")
