"""GPUs at rest that another program changes, and other managers of the node."""

import contextlib
import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest

from mig_manager import errors
from mig_manager.agent import drift, outcomes
from mig_manager.core import model, profile_name
from mig_manager.core.node import device_ids, well_known
from mig_manager.errors import Reason
from tests import changes
from tests.node import fakes, gpu_values, scenes, swept_scenes
from tests.node.scenes import assert_ends
from tests.unit import machine

LAYOUT = "all-balanced"
OFF = model.MigMode.DISABLED


def tamper(rig: fakes.NodeRig) -> tuple[model.Gpu, ...]:
    """Destroy the first instance of the first GPU; return what there was."""
    before = rig.gpus
    first, *others = before
    rig.gpus = (dataclasses.replace(first, gpu_instances=first.gpu_instances[1:]), *others)
    return before


def readiness_of(rig: fakes.NodeRig) -> tuple[str, str]:
    """Return status and reason of the condition ``MigReady``."""
    assert rig.condition is not None
    return rig.condition["status"], rig.condition["reason"]


def test_a_drift_is_published_once_and_cleared_when_it_is_over() -> None:
    rig, agent, ended = scenes.at_rest(LAYOUT)
    assert agent.check_drift(LAYOUT, ended) is drift.Action.REST
    assert rig.states == []
    before = tamper(rig)

    for _ in range(3):
        assert agent.check_drift(LAYOUT, ended) is drift.Action.REST

    assert rig.labels[well_known.STATE_LABEL] == "failed"
    assert well_known.APPLIED_LABEL not in rig.labels
    assert rig.events == ["Drifted"]
    assert "gpus.execute" not in rig.log

    rig.gpus = before
    agent.check_drift(LAYOUT, ended)
    assert rig.labels[well_known.STATE_LABEL] == "success"
    assert rig.labels[well_known.APPLIED_LABEL] == LAYOUT


@pytest.mark.parametrize("is_foreign", [False, True])
def test_a_drifted_node_offers_no_device_that_is_gone(*, is_foreign: bool) -> None:
    rig, agent, ended = scenes.at_rest(LAYOUT)
    tamper(rig)
    if is_foreign:
        # It restarts the plugin itself, maybe after further steps.
        rig.add_pod("nvidias", owner_kind="DaemonSet", container_names=("nvidia-mig-manager",))

    assert agent.check_drift(LAYOUT, ended) is drift.Action.REST
    rig.clock.wait(1)

    present = {"nvidia.com/gpu": device_ids.expected_ids(rig.gpus)[0]}
    assert (rig.schedulable == present) is not is_foreign
    assert rig.labels[well_known.STATE_LABEL] == "failed"
    plugins, lists = set(rig.pods), rig.log.count("workloads.list")
    rig.watched = lambda: tuple(rig.pods.values())
    assert agent.check_drift(LAYOUT, ended) is drift.Action.REST
    rig.clock.wait(1)
    assert set(rig.pods) == plugins
    assert rig.log.count("workloads.list") == lists


def test_each_drift_restarts_the_plugin_also_after_a_refused_deletion() -> None:
    rig, agent, ended = scenes.at_rest(LAYOUT)
    for refusal in ({}, {"workloads.delete": scenes.BROKEN["workloads"]}):
        tamper(rig)
        rig.refusing.update(refusal)
        assert agent.check_drift(LAYOUT, ended) is drift.Action.REST
        rig.refusing.clear()
        assert agent.check_drift(LAYOUT, ended) is drift.Action.REST
        rig.clock.wait(1)
        assert rig.schedulable == {"nvidia.com/gpu": device_ids.expected_ids(rig.gpus)[0]}
    assert rig.events == [Reason.DRIFTED.value]


def test_a_plugin_that_began_in_a_drift_is_restarted_once_the_layout_is_back() -> None:
    rig, agent, ended = scenes.at_rest(LAYOUT)
    served = rig.schedulable
    before = tamper(rig)
    rig.schedulable = {"nvidia.com/gpu": device_ids.expected_ids(rig.gpus)[0]}
    agent.check_drift(LAYOUT, ended)

    rig.gpus = before
    assert agent.check_drift(LAYOUT, ended) is drift.Action.HEAL
    scenes.assert_ends(rig, Reason.ALREADY_APPLIED, layout=LAYOUT, by=agent, may_evict=False)

    assert rig.schedulable == served


def test_a_plugin_is_restarted_after_a_change_of_a_gpu_outside_the_layout() -> None:
    text = "version: v1\nmig-configs:\n  first:\n" + changes.entry("[0]", {"7g.40gb": 1}) + "\n"
    rig, agent, ended = scenes.at_rest("first", rig=scenes.node(), text=text)
    assert agent.check_drift("first", ended) is drift.Action.REST
    desired = model.DesiredGpu.of(model.MigMode.ENABLED, {profile_name.parse("3g.20gb"): 2})
    rig.gpus = (rig.gpus[0], *gpu_values.brought_to(rig.gpus[1:], desired))

    assert agent.check_drift("first", ended) is drift.Action.HEAL
    rested = assert_ends(rig, Reason.ALREADY_APPLIED, layout="first", by=agent, may_evict=False)

    assert rig.schedulable == {"nvidia.com/gpu": device_ids.expected_ids(rig.gpus)[0]}
    assert agent.check_drift("first", rested) is drift.Action.REST

    agent.rest()
    rig.gpus = (rig.gpus[0], *gpu_values.brought_to(rig.gpus[1:], model.DesiredGpu(mode=OFF)))
    agent.check_without_request()
    assert rig.labels[well_known.APPLIED_LABEL] == "first"


def test_a_plugin_is_restarted_whenever_instances_were_recreated_in_place() -> None:
    rig, agent, ended = scenes.at_rest(LAYOUT)
    for name in ("another", "a third"):
        served, first = rig.schedulable, rig.gpus[0].gpu_instances[0]
        (device,) = first.compute_instances
        device = dataclasses.replace(device, uuid=machine.mig_uuid(name))
        recreated = dataclasses.replace(first, compute_instances=(device,))
        instances = (recreated, *rig.gpus[0].gpu_instances[1:])
        rig.gpus = (dataclasses.replace(rig.gpus[0], gpu_instances=instances), *rig.gpus[1:])

        assert agent.check_drift(LAYOUT, ended) is drift.Action.HEAL
        ended = assert_ends(rig, Reason.ALREADY_APPLIED, layout=LAYOUT, by=agent, may_evict=False)

        assert rig.schedulable != served
        assert rig.schedulable == {"nvidia.com/gpu": device_ids.expected_ids(rig.gpus)[0]}
        assert agent.check_drift(LAYOUT, ended) is drift.Action.REST


def test_a_plugin_that_missed_a_gpu_between_two_checks_is_restarted() -> None:
    rig, agent, ended = scenes.at_rest(LAYOUT)
    served = rig.schedulable
    assert agent.check_drift(LAYOUT, ended) is drift.Action.REST
    # It restarted while GPU 1 did not answer, and kubelet has forgotten the former devices.
    rig.schedulable = {"nvidia.com/gpu": device_ids.expected_ids(rig.gpus[:1])[0]}

    assert agent.check_drift(LAYOUT, ended) is drift.Action.HEAL
    assert_ends(rig, Reason.ALREADY_APPLIED, layout=LAYOUT, by=agent, may_evict=False)

    assert rig.schedulable == served


@pytest.mark.parametrize("failing", ["too-much", "no-such-layout"])
@pytest.mark.parametrize("is_restarted", [False, True])
def test_applied_label_goes_if_a_gpu_without_the_layout_is_back(
    failing: str, *, is_restarted: bool
) -> None:
    rig, agent = (rig := scenes.node()), scenes.reconciler(rig)
    rig.driver.lost.add(rig.gpus[1].uuid)
    assert_ends(rig, Reason.APPLIED, layout=LAYOUT, by=agent)
    scenes.run(rig, failing, by=agent)
    assert rig.labels[well_known.APPLIED_LABEL] == LAYOUT
    rig.driver.lost.clear()
    if is_restarted:
        agent = scenes.reconciler(rig)
        agent.recover(failing)

    scenes.run(rig, failing, by=agent)

    assert well_known.APPLIED_LABEL not in rig.labels


def test_on_request_a_drift_is_healed() -> None:
    rig, agent, ended = scenes.at_rest(LAYOUT, heals_drift=True)
    before = tamper(rig)

    assert agent.check_drift(LAYOUT, ended) is drift.Action.HEAL
    assert_ends(rig, Reason.APPLIED, layout=LAYOUT, by=agent, may_evict=False)

    assert scenes.is_as_before(rig, before)


def restarted_beside_foreign_pod() -> tuple[fakes.NodeRig, scenes.Agent]:
    """Return a node that drifted while its agent was down, and the agent that started again."""
    rig, _, _ = scenes.at_rest(LAYOUT)
    scenes.add_pod_on_foreign_instances(rig)
    restarted = scenes.reconciler(rig)
    restarted.recover(LAYOUT)
    return rig, restarted


def test_healing_waits_until_no_pod_uses_the_devices() -> None:
    rig, agent, ended = scenes.at_rest(LAYOUT, heals_drift=True)
    scenes.add_pod_on_foreign_instances(rig)

    assert agent.check_drift(LAYOUT, ended) is drift.Action.REST
    assert "default/foreign" in rig.statuses[-1]
    assert agent.check_drift(LAYOUT, ended) is drift.Action.REST
    assert rig.events == ["Drifted"]

    uid = next(uid for uid, pod in rig.pods.items() if pod.name == "foreign")
    del rig.pods[uid], rig.kubelet.assigned[uid]
    assert agent.check_drift(LAYOUT, ended) is drift.Action.HEAL


def test_a_pod_that_comes_while_a_drift_is_healed_is_spared() -> None:
    rig, agent, _ = scenes.at_rest(LAYOUT, heals_drift=True)
    scenes.add_pod_on_foreign_instances(rig)
    gpus = rig.gpus

    assert_ends(rig, Reason.DRIFTED, "default/foreign", layout=LAYOUT, by=agent, may_evict=False)

    assert rig.gpus == gpus
    assert "workloads.evict" not in rig.log


def test_healing_refuses_a_pod_that_gets_a_device_after_the_survey() -> None:
    rig, agent, _ = scenes.at_rest(LAYOUT, heals_drift=True)
    scenes.add_pod_on_foreign_instances(rig)
    gpus = rig.gpus
    uid, late = next((uid, pod) for uid, pod in rig.pods.items() if pod.name == "foreign")
    del rig.pods[uid]

    def bind() -> None:
        if rig.has_hold_taint:
            rig.pods[uid] = late

    rig.on_call = bind
    assert_ends(rig, Reason.DRIFTED, "default/foreign", layout=LAYOUT, by=agent, may_evict=False)

    assert rig.gpus == gpus
    assert "workloads.evict" not in rig.log


def test_a_drift_is_published_although_kubelet_is_silent() -> None:
    rig, agent, ended = scenes.at_rest(LAYOUT, heals_drift=True)
    scenes.add_pod_on_foreign_instances(rig)
    rig.kubelet.is_silent = True

    assert agent.check_drift(LAYOUT, ended) is drift.Action.REST

    assert rig.events == ["Drifted"]
    assert "default/foreign" in rig.statuses[-1]


def test_an_extra_client_does_not_keep_a_drift_from_being_healed() -> None:
    rig, agent, ended = scenes.at_rest(LAYOUT, heals_drift=True)
    scenes.add_pod_on_foreign_instances(rig)
    uid = next(uid for uid, pod in rig.pods.items() if pod.name == "foreign")
    labels, owner = {"app": "watcher"}, "DaemonSet"
    rig.pods[uid] = dataclasses.replace(rig.pods[uid], labels=labels, owner_kind=owner)
    rig.extra_clients = swept_scenes.EXTRA_CLIENTS

    assert agent.check_drift(LAYOUT, ended) is drift.Action.HEAL
    assert_ends(rig, Reason.APPLIED, layout=LAYOUT, by=agent, may_evict=False)


def test_no_pod_is_evicted_for_a_drift_that_could_not_be_healed_before() -> None:
    rig, agent, _ = scenes.at_rest(LAYOUT, heals_drift=True)
    scenes.add_pod_on_foreign_instances(rig)
    rig.refusing = {"gpus.observe": errors.HardwareError("no", reason=Reason.NO_PERMISSION)}
    scenes.run(rig, LAYOUT, by=agent, may_evict=False)
    rig.refusing = {}

    # As the loop does when the hardware has changed since a failure for good.
    assert_ends(rig, Reason.DRIFTED, layout=LAYOUT, by=agent)

    assert "workloads.evict" not in rig.log


def test_restarted_agent_evicts_no_pod_for_an_applied_layout() -> None:
    rig, restarted = restarted_beside_foreign_pod()

    assert_ends(rig, Reason.DRIFTED, layout=LAYOUT, by=restarted)

    assert "workloads.evict" not in rig.log
    # The label requests it again, so eviction is allowed.
    restarted.recover(None)
    restarted.rest()
    assert_ends(rig, Reason.APPLIED, layout=LAYOUT, by=restarted)


NO_DRIVER = errors.HardwareError("gone", reason=Reason.DRIVER_NOT_LOADED)


@pytest.mark.parametrize(
    "refusing",
    [
        {"gpus.observe": NO_DRIVER},
        {"node.patch": errors.ClusterError("503", reason=Reason.API_UNAVAILABLE)},
    ],
    ids=["driver", "API"],
)
def test_failure_at_the_start_does_not_make_the_retry_evict(
    refusing: dict[str, Exception],
) -> None:
    rig, restarted = restarted_beside_foreign_pod()
    rig.refusing = {"gpus.observe": NO_DRIVER}
    assert scenes.run(rig, LAYOUT, by=restarted).should_retry
    rig.refusing = refusing
    with contextlib.suppress(errors.ClusterError):
        scenes.run(rig, LAYOUT, by=restarted, attempt=2)
    rig.refusing = {}
    # As the agent's loop does after an API that did not answer.
    restarted.recover(LAYOUT)

    assert_ends(rig, Reason.DRIFTED, layout=LAYOUT, by=restarted, attempt=3)

    assert "workloads.evict" not in rig.log


def test_an_agent_that_starts_restores_what_a_reboot_took() -> None:
    rig, _, _ = scenes.at_rest(LAYOUT)
    rig.gpus = tuple(dataclasses.replace(gpu, gpu_instances=()) for gpu in rig.gpus)

    assert scenes.resume(rig, LAYOUT).state is model.State.SUCCESS

    assert rig.labels[well_known.APPLIED_LABEL] == LAYOUT


def test_gpus_that_cannot_be_seen_for_a_while_are_no_drift() -> None:
    rig, agent, ended = scenes.at_rest(LAYOUT)
    rig.failing = {len(rig.log): NO_DRIVER}

    assert agent.check_drift(LAYOUT, ended) is drift.Action.REST

    assert rig.states == []
    assert rig.labels[well_known.APPLIED_LABEL] == LAYOUT


@pytest.mark.parametrize(
    "reason",
    [
        Reason.DRIVER_NOT_LOADED,
        Reason.NVML_TIMEOUT,
        Reason.NVML_ERROR,
        Reason.DRIVER_LIBRARY_MISMATCH,
        Reason.NO_PERMISSION,
        Reason.GPU_LOST,
    ],
)
def test_gpus_that_cannot_be_observed_for_long_make_readiness_unknown(reason: Reason) -> None:
    rig, agent, ended = scenes.at_rest(LAYOUT)
    labels = dict(rig.labels)
    is_away = reason in {Reason.DRIVER_NOT_LOADED, Reason.DRIVER_LIBRARY_MISMATCH}
    first = 40 if is_away else 3
    for number in range(1, first + 3):
        rig.refusing = {"gpus.observe": errors.HardwareError("gone", reason=reason)}
        assert agent.check_drift(LAYOUT, ended) is drift.Action.REST
        assert readiness_of(rig) == (
            ("True", "LayoutVerified") if number < first else ("Unknown", reason.value)
        )
        assert agent.awaits_driver is (is_away and number < first)
    assert rig.events == [reason.value]
    assert (rig.labels, rig.states) == (labels, [])

    rig.refusing = {}
    for _ in range(2):
        assert agent.check_drift(LAYOUT, ended) is drift.Action.REST
    assert readiness_of(rig) == ("True", "LayoutVerified")
    assert not agent.awaits_driver
    assert (rig.labels, rig.events.count("AlreadyApplied")) == (labels, 1)


def test_no_driver_is_awaited_once_the_label_is_removed() -> None:
    rig, agent, ended = scenes.at_rest(LAYOUT)
    rig.refusing = {"gpus.observe": NO_DRIVER}
    agent.check_drift(LAYOUT, ended)
    assert agent.awaits_driver

    agent.rest()

    assert not agent.awaits_driver


def test_a_drift_found_after_the_driver_was_away_is_published() -> None:
    rig, agent, ended = scenes.at_rest(LAYOUT)
    tamper(rig)
    rig.refusing = {"gpus.observe": NO_DRIVER}
    for _ in range(3):
        agent.check_drift(LAYOUT, ended)
    rig.refusing = {}

    agent.check_drift(LAYOUT, ended)

    assert readiness_of(rig) == ("False", "Drifted")
    assert rig.labels[well_known.STATE_LABEL] == "failed"


@pytest.mark.parametrize("use", ["idle", "pod", "plugin"])
@pytest.mark.parametrize("mode", [model.MigMode.ENABLED, model.MigMode.DISABLED])
def test_a_layout_that_a_reload_of_the_driver_took_is_restored(
    use: str, mode: model.MigMode
) -> None:
    rig, agent, ended = scenes.at_rest(LAYOUT)
    served = len(rig.schedulable["nvidia.com/gpu"])
    rig.refusing = {"gpus.observe": NO_DRIVER}
    agent.check_drift(LAYOUT, ended)
    rig.refusing = {}
    rig.gpus = tuple(
        dataclasses.replace(gpu, current_mode=mode, pending_mode=mode, gpu_instances=())
        for gpu in rig.gpus
    )
    if use == "plugin":
        rig.schedulable = {"nvidia.com/gpu": device_ids.expected_ids(rig.gpus)[0]}
    elif use == "pod":
        rig.add_pod("training", devices=frozenset({rig.gpus[0].uuid}))

    assert agent.check_drift(LAYOUT, ended) is drift.Action.HEAL
    rig.events.clear()
    ended = scenes.run(rig, LAYOUT, by=agent, may_evict=False)

    assert "workloads.evict" not in rig.log
    if use == "pod" and mode is model.MigMode.DISABLED:
        assert (ended.reason, "training" in ended.message) == (Reason.DRIFTED, True)
        assert [agent.check_drift(LAYOUT, ended) for _ in range(2)] == [drift.Action.REST] * 2
    else:
        assert scenes.has_layout(rig, LAYOUT)
        assert len(rig.schedulable["nvidia.com/gpu"]) == served


@pytest.mark.parametrize("driver", ["stayed", "was away before"])
def test_instances_that_a_person_removed_are_not_restored(driver: str) -> None:
    rig, agent, ended = scenes.at_rest(LAYOUT)
    if driver != "stayed":
        rig.failing = {len(rig.log): NO_DRIVER}
        for _ in range(2):
            agent.check_drift(LAYOUT, ended)
    rig.gpus = tuple(dataclasses.replace(gpu, gpu_instances=()) for gpu in rig.gpus)

    assert [agent.check_drift(LAYOUT, ended) for _ in range(2)] == [drift.Action.REST] * 2

    assert (rig.labels[well_known.STATE_LABEL], rig.events) == ("failed", ["Drifted"])


def test_single_failed_checks_between_good_ones_do_not_add_up() -> None:
    rig, agent, ended = scenes.at_rest(LAYOUT)
    for _ in range(4):
        rig.failing = {len(rig.log): NO_DRIVER}
        agent.check_drift(LAYOUT, ended)
        agent.check_drift(LAYOUT, ended)
    assert readiness_of(rig) == ("True", "LayoutVerified")
    assert rig.events == []


def test_final_failure_is_retried_only_after_the_hardware_changed() -> None:
    rig, agent, ended = scenes.at_rest("too-much", rig=scenes.node())
    assert not ended.should_retry

    assert [agent.check_drift("too-much", ended) for _ in range(3)] == [drift.Action.REST] * 3
    enabled = {"current_mode": model.MigMode.ENABLED, "pending_mode": model.MigMode.ENABLED}
    rig.gpus = tuple(dataclasses.replace(gpu, **enabled) for gpu in rig.gpus)  # type: ignore[arg-type]
    assert agent.check_drift("too-much", ended) is drift.Action.RUN


def finish_modes(rig: fakes.NodeRig) -> None:
    """Reset the GPUs as a person does."""
    rig.driver.mode_waits = False
    rig.gpus = tuple(dataclasses.replace(gpu, current_mode=gpu.pending_mode) for gpu in rig.gpus)


def waiting_mode(rig: fakes.NodeRig) -> Callable[[], None]:
    rig.driver.mode_waits = True
    return lambda: finish_modes(rig)


def missing_gpu(rig: fakes.NodeRig) -> Callable[[], None]:
    gpus, rig.gpus = rig.gpus, rig.gpus[:1]
    return lambda: setattr(rig, "gpus", gpus)


def no_permission(rig: fakes.NodeRig) -> Callable[[], None]:
    rig.refusing = {"gpus.observe": errors.HardwareError("no", reason=Reason.NO_PERMISSION)}
    return rig.refusing.clear


TWO_GPUS = """\
version: v1
mig-configs:
  two-gpus:
  - {devices: [0], mig-enabled: true, mig-devices: {1g.5gb: 7}}
  - {devices: [1], mig-enabled: true, mig-devices: {1g.5gb: 7}}
"""


@pytest.mark.parametrize(
    ("fail", "reason"),
    [
        (waiting_mode, Reason.RESET_REQUIRED),
        (missing_gpu, Reason.NO_GPU_MATCHES),
        (no_permission, Reason.NO_PERMISSION),
    ],
)
@pytest.mark.parametrize("checks", [0, 2])
def test_hardware_mended_after_a_final_failure_is_served(
    fail: Callable[[fakes.NodeRig], Callable[[], None]], reason: Reason, checks: int
) -> None:
    rig = scenes.node()
    mend = fail(rig)
    _, agent, ended = scenes.at_rest("two-gpus", rig=rig, text=TWO_GPUS)
    assert (ended.reason, ended.should_retry) == (reason, False)
    for _ in range(checks):
        assert agent.check_drift("two-gpus", ended) is drift.Action.REST

    mend()

    assert agent.check_drift("two-gpus", ended) is drift.Action.RUN
    assert_ends(rig, Reason.APPLIED, layout="two-gpus", by=agent)


def test_an_invalid_file_alone_is_not_retried_at_each_check() -> None:
    text = "version: v1\nmig-configs: 3\n"
    _, agent, ended = scenes.at_rest("two-gpus", rig=scenes.node(), text=text)
    assert ended.reason is Reason.INVALID_CONFIG

    assert [agent.check_drift("two-gpus", ended) for _ in range(3)] == [drift.Action.REST] * 3


@pytest.mark.parametrize(
    ("layout", "agents"),
    [(LAYOUT, "reports"), ("two-gpus", "reports"), (LAYOUT, "heals"), ("two-gpus", "restarts")],
)
def test_a_gpu_that_the_driver_no_longer_lists_is_a_drift(layout: str, agents: str) -> None:
    heals = agents != "reports"
    rig, agent, ended = scenes.at_rest(layout, rig=scenes.node(), text=TWO_GPUS, heals_drift=heals)
    assert ended.state is model.State.SUCCESS
    rig.add_pod("spared", devices=frozenset(rig.gpus[0].mig_uuids[:1]))
    before, rig.gpus = rig.gpus, rig.gpus[:1]
    if agents == "restarts":
        agent = scenes.reconciler(rig, TWO_GPUS, heals_drift=heals)
        agent.recover(layout)
        ended = assert_ends(rig, Reason.DRIFTED, layout=layout, by=agent)

    for _ in range(2):
        assert agent.check_drift(layout, ended) is drift.Action.REST

    assert (rig.labels[well_known.STATE_LABEL], rig.events) == ("failed", ["Drifted"])
    assert well_known.APPLIED_LABEL not in rig.labels
    assert f"the driver no longer lists {before[1]}" in rig.statuses[-1]
    assert "workloads.evict" not in rig.log
    if not heals:
        rig.gpus = (before[0], dataclasses.replace(before[1], gpu_instances=()))
        assert agent.check_drift(layout, ended) is drift.Action.REST
        assert "the driver no longer lists" not in rig.statuses[-1]
    rig.gpus = before
    assert agent.check_drift(layout, ended) is drift.Action.REST
    assert rig.labels[well_known.STATE_LABEL] == "success"


@pytest.mark.parametrize("at_run", ["listed", "missing"])
def test_a_drift_that_changes_between_a_run_and_a_check_is_published(at_run: str) -> None:
    rig, _, _ = scenes.at_rest(LAYOUT)
    before = rig.gpus
    scenes.add_pod_on_foreign_instances(rig)
    changed = {"listed": rig.gpus, "missing": before[:1]}
    rig.gpus = changed.pop(at_run)
    agent = scenes.reconciler(rig)
    agent.recover(LAYOUT)
    ended = assert_ends(rig, Reason.DRIFTED, layout=LAYOUT, by=agent)
    (rig.gpus,) = changed.values()

    for _ in range(2):
        assert agent.check_drift(LAYOUT, ended) is drift.Action.REST

    is_missing = f"the driver no longer lists {before[1]}" in rig.statuses[-1]
    assert is_missing is (at_run == "listed")
    assert rig.events == ["Drifted", "Drifted"]


@pytest.mark.parametrize("ends", ["reboot", "new request"])
def test_a_gpu_that_vanished_is_no_drift_after(ends: str) -> None:
    rig = scenes.node()
    scenes.run(rig, "all-balanced")
    rig.gpus = rig.gpus[:1]
    if ends == "reboot":
        rig.host.boot_id = "next-boot"
    agent = scenes.reconciler(rig)
    agent.recover("all-balanced")

    outcome = scenes.run(rig, "all-balanced", by=agent, is_new=ends == "new request")

    assert outcome.state is model.State.SUCCESS


UNUSABLE_FILES = {
    "typo": scenes.CONFIG.replace(f"{scenes.LAYOUT}:", "one-slice-chnged:"),
    "invalid": scenes.CONFIG + "  bad: [{devices: all, mig-devices: {1g.5gb: x}}]\n",
}


def test_a_gpu_that_is_back_gets_the_layout_once_no_pod_uses_it() -> None:
    rig = scenes.node(layout="all-1g.5gb")
    pod = rig.add_pod("training", devices=frozenset({scenes.device(rig, 1, "1g.5gb")}))
    rig.driver.lost.add(rig.gpus[1].uuid)
    agent = scenes.reconciler(rig)
    ended = scenes.run(rig, "all-disabled", by=agent, is_new=True)
    rig.driver.lost.clear()
    assert agent.check_drift("all-disabled", ended) is drift.Action.HEAL
    rest: dict[str, Any] = {"layout": "all-disabled", "by": agent, "may_evict": False}

    why = f"all-disabled is applied to GPU 1 ({rig.gpus[1].uuid}) once no pod uses devices"
    outcome = assert_ends(rig, Reason.IN_USE, why, "default/training", **rest)

    assert outcome.should_retry
    rig.kubelet.assigned.pop(pod)
    del rig.pods[pod]
    assert_ends(rig, Reason.APPLIED, **rest)
    assert scenes.has_layout(rig, "all-disabled")


def node_without_file(
    text: str = UNUSABLE_FILES["invalid"], *, heals: bool = False
) -> tuple[fakes.NodeRig, scenes.Agent, outcomes.Outcome]:
    """Return a node whose layout is active, although the file is unusable now."""
    rig = scenes.node(layout=scenes.LAYOUT)
    configs = fakes.FakeConfig(scenes.CONFIG)
    agent = scenes.reconciler(rig, heals_drift=heals, configs=configs)
    scenes.run(rig, by=agent)
    configs.text = text
    ended = scenes.run(rig, by=agent)
    assert (ended.reason, ended.state) == (Reason.ALREADY_APPLIED, model.State.SUCCESS)
    rig.events.clear()
    return rig, agent, ended


@pytest.mark.parametrize(
    ("text", "heals"), [(UNUSABLE_FILES["typo"], False), (UNUSABLE_FILES["invalid"], True)]
)
def test_a_drift_is_published_although_the_file_is_unusable(text: str, *, heals: bool) -> None:
    rig, agent, ended = node_without_file(text, heals=heals)
    verified = json.loads(rig.annotations[well_known.REQUEST_ANNOTATION])["verified"]
    assert agent.check_drift(scenes.LAYOUT, ended) is drift.Action.REST
    assert rig.events == []

    before = tamper(rig)
    for _ in range(2):
        assert agent.check_drift(scenes.LAYOUT, ended) is drift.Action.REST
    assert (rig.labels[well_known.STATE_LABEL], rig.events) == ("failed", ["Drifted"])

    rig.gpus = before
    assert agent.check_drift(scenes.LAYOUT, ended) is drift.Action.REST
    assert rig.labels[well_known.STATE_LABEL] == "success"
    record = json.loads(rig.annotations[well_known.REQUEST_ANNOTATION])
    assert record["verified"] == verified


def test_a_layout_active_again_keeps_its_hash_although_the_file_lacks_it() -> None:
    rig, configs = scenes.node(layout=LAYOUT), fakes.FakeConfig(scenes.CONFIG)
    configs.text = scenes.CONFIG.replace(LAYOUT, "mine")
    # The layout may be one of the lost GPU's model.
    rig.gpus = (rig.gpus[0], dataclasses.replace(rig.gpus[1], pci_device_id=0x20B710DE))
    rig.driver.lost.add(rig.gpus[1].uuid)
    _, agent, ended = scenes.at_rest("mine", rig=rig, configs=configs)
    verified = json.loads(rig.annotations[well_known.REQUEST_ANNOTATION])["verified"]
    before = tamper(rig)
    agent.check_drift("mine", ended)

    configs.text, rig.gpus = scenes.CONFIG, before
    agent.check_drift("mine", ended)

    assert rig.labels[well_known.STATE_LABEL] == "success"
    assert json.loads(rig.annotations[well_known.REQUEST_ANNOTATION])["verified"] == verified


IMPOSSIBLE_NOW: dict[str, Callable[[model.Gpu], model.Gpu]] = {
    "profile": lambda gpu: dataclasses.replace(
        gpu, profiles=tuple(each for each in gpu.profiles or () if str(each.profile) != "3g.20gb")
    ),
    "mode": lambda gpu: dataclasses.replace(
        gpu, current_mode=None, pending_mode=None, profiles=()
    ),
    "host": lambda gpu: dataclasses.replace(gpu, virtualization=model.Virtualization.VGPU),
}


@pytest.mark.parametrize(("lost", "heals"), [("profile", True), ("mode", False), ("host", True)])
def test_a_drift_that_cannot_be_planned_is_published(lost: str, *, heals: bool) -> None:
    rig, agent, ended = scenes.at_rest(LAYOUT, heals_drift=heals)
    before = rig.gpus
    rig.gpus = tuple(
        IMPOSSIBLE_NOW[lost](dataclasses.replace(gpu, gpu_instances=())) for gpu in rig.gpus
    )

    for _ in range(2):
        assert agent.check_drift(LAYOUT, ended) is drift.Action.REST

    assert (rig.labels[well_known.STATE_LABEL], rig.events) == ("failed", ["Drifted"])
    assert well_known.APPLIED_LABEL not in rig.labels
    assert "it cannot be restored" in rig.statuses[-1]
    rig.gpus = before
    agent.check_drift(LAYOUT, ended)
    assert rig.labels[well_known.STATE_LABEL] == "success"


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_layout_without_a_request_is_labelled_until_it_is_gone(*, is_restarted: bool) -> None:
    rig, agent, _ = scenes.at_rest(LAYOUT)
    agent.rest()
    agent.check_without_request()
    assert rig.labels[well_known.APPLIED_LABEL] == LAYOUT
    tamper(rig)

    if is_restarted:
        scenes.undo(rig)
    else:
        agent.check_without_request()

    assert well_known.APPLIED_LABEL not in rig.labels


def test_a_gpu_lost_while_the_file_is_unusable_starts_no_run() -> None:
    rig, agent, ended = node_without_file()
    rig.driver.lost.add(rig.gpus[1].uuid)

    assert agent.check_drift(scenes.LAYOUT, ended) is drift.Action.REST

    assert rig.labels[well_known.STATE_LABEL] == "success"


def test_a_gpu_back_while_the_file_is_unusable_starts_no_run() -> None:
    rig = scenes.node(layout=LAYOUT)
    rig.driver.lost.add(rig.gpus[1].uuid)
    configs = fakes.FakeConfig(scenes.CONFIG)
    agent = scenes.reconciler(rig, configs=configs)
    ended = scenes.run(rig, LAYOUT, by=agent)
    configs.text = UNUSABLE_FILES["invalid"]
    rig.driver.lost.clear()
    rig.schedulable = {"nvidia.com/gpu": device_ids.expected_ids(rig.gpus[:1])[0]}

    assert agent.check_drift(LAYOUT, ended) is drift.Action.REST

    assert rig.labels[well_known.STATE_LABEL] == "success"


def test_an_edit_while_a_gpu_is_lost_is_applied_once_it_is_back() -> None:
    rig = scenes.node()
    head = "version: v1\nmig-configs:\n  mine:\n" + changes.entry("[0]", {"7g.40gb": 1}) + "\n"
    configs = fakes.FakeConfig(head + changes.entry("[1]", {"3g.20gb": 2}))
    agent = scenes.reconciler(rig, configs=configs)
    assert_ends(rig, Reason.APPLIED, layout="mine", by=agent)
    rig.add_pod("affected", devices=frozenset(rig.gpus[1].mig_uuids))
    rig.driver.lost.add(rig.gpus[1].uuid)
    assert_ends(rig, Reason.GPU_UNREACHABLE, layout="mine", by=agent)
    configs.text = head + changes.entry("[1]", {"7g.40gb": 1})

    rig.driver.lost.clear()
    assert_ends(rig, Reason.APPLIED, layout="mine", by=agent)

    assert "affected" not in rig.pod_names


def test_phantoms_are_withdrawn_although_the_file_is_unusable() -> None:
    rig, agent, ended = node_without_file()
    rig.kubelet.phantoms = {"nvidia.com/mig-7g.40gb": 1}

    agent.check_drift(scenes.LAYOUT, ended)

    assert rig.events == ["PhantomDevicesRemoved"]


# -- other managers ------------------------------------------------------------------------------


def test_a_run_waits_until_another_manager_releases_the_lock() -> None:
    rig = scenes.node()
    other = fakes.FakeExclusion(refusals=4)

    assert_ends(rig, Reason.APPLIED, layout="all-1g.5gb", by=scenes.reconciler(rig, lock=other))

    assert other.descriptions == ["applying layout all-1g.5gb"]


def test_a_manager_that_does_not_finish_is_named_and_nothing_is_touched() -> None:
    rig = scenes.busy_node()

    outcome = assert_ends(
        rig,
        Reason.LOCKED,
        "another manager is at work",
        by=scenes.reconciler(rig, lock=fakes.FakeExclusion(refusals=10**9)),
    )

    assert outcome.should_retry
    assert [call for call in rig.log if call.startswith("gpus.")] == []


def test_a_newer_request_need_not_wait_for_another_manager() -> None:
    rig = scenes.node()
    agent = scenes.reconciler(rig, lock=fakes.FakeExclusion(refusals=10**9))

    with pytest.raises(errors.Superseded):
        scenes.run(rig, by=agent, request=fakes.FakeRequest(rig.clock, ends_at=2))

    assert rig.clock.now_s < 1


def test_the_layout_for_the_next_boot_is_saved_only_under_the_lock() -> None:
    rig, other = scenes.node(), fakes.FakeExclusion()
    saves: list[bool] = []
    rig.on_call = lambda: saves.append(other.is_locked) if rig.log[-1] == "host.save" else None
    agent = scenes.reconciler(rig, lock=other)

    assert_ends(rig, Reason.ALREADY_APPLIED, layout="all-disabled", by=agent)
    rig.driver.mode_waits = True
    assert_ends(rig, Reason.RESET_REQUIRED, layout="all-1g.5gb", by=agent)

    assert saves == [True, True]


def test_gpus_that_another_manager_works_on_are_checked_later() -> None:
    other = fakes.FakeExclusion()
    rig, agent, ended = scenes.at_rest(LAYOUT, lock=other)
    tamper(rig)

    other.refusals = 1
    assert agent.check_drift(LAYOUT, ended) is drift.Action.REST
    assert rig.labels[well_known.STATE_LABEL] == "success"
    agent.check_drift(LAYOUT, ended)
    assert rig.labels[well_known.STATE_LABEL] == "failed"
