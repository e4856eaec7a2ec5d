"""GPUs that vanish, return, or cannot be observed for a while."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from mig_manager import errors
from mig_manager.agent import outcomes
from mig_manager.agent.drift import actions
from mig_manager.core import model
from mig_manager.core.objects import well_known
from mig_manager.core.records import run_status
from mig_manager.reasons import Reason
from tests.pipeline.drifts import TWO_GPUS, tamper
from tests.rigs.node import agents, call_errors, ends, gpu_values, node_rig, nodes


def readiness_of(rig: node_rig.NodeRig) -> tuple[str, str]:
    """Return status and reason of the condition ``MigReady``."""
    assert rig.node_object.ready_condition is not None
    return rig.node_object.ready_condition["status"], rig.node_object.ready_condition["reason"]


@pytest.mark.parametrize("failing", ["too-much", "no-such-layout"])
@pytest.mark.parametrize("is_restarted", [False, True])
def test_the_applied_label_is_removed_if_a_gpu_returns_without_the_layout(
    failing: str, *, is_restarted: bool
) -> None:
    rig, agent = (rig := nodes.node()), agents.new_agent(rig)
    rig.driver.lost.add(rig.gpus[1].uuid)
    ends.run_to(rig, "all-balanced", Reason.APPLIED, by=agent)
    agents.run(rig, failing, by=agent)
    assert rig.node_object.labels[well_known.APPLIED_LABEL] == "all-balanced"
    rig.driver.lost.clear()
    if is_restarted:
        agent = agents.start(rig, failing)

    agents.run(rig, failing, by=agent)

    assert well_known.APPLIED_LABEL not in rig.node_object.labels


def test_gpus_unreachable_for_a_while_do_not_count_as_drift() -> None:
    rig, agent, outcome = nodes.at_rest("all-balanced")
    rig.failures.add("gpus.observe", call_errors.NO_DRIVER, times=1)

    assert agent.check_drift("all-balanced", outcome) is actions.Action.REST

    assert rig.node_object.states == []
    assert rig.node_object.labels[well_known.APPLIED_LABEL] == "all-balanced"


@pytest.mark.parametrize(
    ("reason", "first", "is_away"),
    [
        (Reason.DRIVER_NOT_LOADED, 40, True),
        (Reason.DRIVER_LIBRARY_MISMATCH, 40, True),
        (Reason.NVML_TIMEOUT, 3, False),
        (Reason.NVML_ERROR, 3, False),
        (Reason.NO_PERMISSION, 3, False),
        (Reason.GPU_LOST, 3, False),
    ],
)
def test_gpus_that_cannot_be_observed_for_long_make_readiness_unknown(
    reason: Reason, first: int, *, is_away: bool
) -> None:
    rig, agent, outcome = nodes.at_rest("all-balanced")
    labels = dict(rig.node_object.labels)
    rig.failures.add("gpus.observe", errors.HardwareError("gone", reason=reason))
    for number in range(1, first + 3):
        assert agent.check_drift("all-balanced", outcome) is actions.Action.REST
        assert readiness_of(rig) == (
            ("True", "LayoutVerified") if number < first else ("Unknown", reason.value)
        )
        assert agent.awaits_driver(outcome) is (is_away and number < first)
    assert rig.node_object.events == [reason.value]
    assert (rig.node_object.labels, rig.node_object.states) == (labels, [])

    rig.failures.clear()
    for _ in range(2):
        assert agent.check_drift("all-balanced", outcome) is actions.Action.REST
    assert readiness_of(rig) == ("True", "LayoutVerified")
    assert not agent.awaits_driver(outcome)
    assert (rig.node_object.labels, rig.node_object.events.count("AlreadyApplied")) == (labels, 1)


def test_no_driver_is_awaited_once_the_label_is_removed() -> None:
    rig, agent, outcome = nodes.at_rest("all-balanced")
    rig.failures.add("gpus.observe", call_errors.NO_DRIVER)
    agent.check_drift("all-balanced", outcome)
    assert agent.awaits_driver(outcome)

    agent.restore_without_request()

    assert not agent.awaits_driver(None)


def test_a_drift_found_after_the_driver_was_away_is_published() -> None:
    rig, agent, outcome = nodes.at_rest("all-balanced")
    tamper(rig)
    rig.failures.add("gpus.observe", call_errors.NO_DRIVER)
    for _ in range(3):
        agent.check_drift("all-balanced", outcome)
    rig.failures.clear()

    agent.check_drift("all-balanced", outcome)

    assert readiness_of(rig) == ("False", "Drifted")
    assert rig.node_object.labels[well_known.STATE_LABEL] == "failed"


def node_after_reload(
    mode: model.MigMode,
) -> tuple[node_rig.NodeRig, agents.AgentInMemory, outcomes.Outcome]:
    """Return a node at rest whose driver was reloaded, which took the layout."""
    rig, agent, outcome = nodes.at_rest("all-balanced")
    rig.failures.add("gpus.observe", call_errors.NO_DRIVER)
    agent.check_drift("all-balanced", outcome)
    rig.failures.clear()
    rig.gpus = tuple(
        dataclasses.replace(gpu, current_mode=mode, pending_mode=mode, gpu_instances=())
        for gpu in rig.gpus
    )
    return rig, agent, outcome


def add_pod(rig: node_rig.NodeRig) -> None:
    rig.pods.add("training", devices=frozenset({rig.gpus[0].uuid}))


@pytest.mark.parametrize(
    ("mode", "use"),
    [
        pytest.param(model.MigMode.ENABLED, lambda _rig: None, id="idle"),
        pytest.param(model.MigMode.ENABLED, node_rig.NodeRig.register_devices, id="plugin"),
        pytest.param(model.MigMode.ENABLED, add_pod, id="pod"),
        pytest.param(model.MigMode.DISABLED, lambda _rig: None, id="mode off, idle"),
        pytest.param(
            model.MigMode.DISABLED, node_rig.NodeRig.register_devices, id="mode off, plugin"
        ),
    ],
)
def test_a_layout_that_a_reload_of_the_driver_took_is_restored(
    mode: model.MigMode, use: Callable[[node_rig.NodeRig], None]
) -> None:
    rig, agent, outcome = node_after_reload(mode)
    served = len(rig.kubelet.schedulable["nvidia.com/gpu"])
    use(rig)

    assert agent.check_drift("all-balanced", outcome) is actions.Action.HEAL
    agents.run(rig, "all-balanced", by=agent, is_heal=True)

    assert "workloads.evict" not in rig.log
    assert ends.has_layout(rig, "all-balanced")
    assert len(rig.kubelet.schedulable["nvidia.com/gpu"]) == served


def test_a_layout_that_a_reload_took_is_not_restored_under_a_pod() -> None:
    rig, agent, outcome = node_after_reload(model.MigMode.DISABLED)
    add_pod(rig)

    assert agent.check_drift("all-balanced", outcome) is actions.Action.HEAL
    outcome = agents.run(rig, "all-balanced", by=agent, is_heal=True)

    assert "workloads.evict" not in rig.log
    assert (outcome.reason, "training" in outcome.message) == (Reason.DRIFTED, True)
    assert [agent.check_drift("all-balanced", outcome) for _ in range(2)] == [
        actions.Action.REST
    ] * 2


@pytest.mark.parametrize("driver", ["stayed", "was away before"])
def test_instances_that_a_person_removed_are_not_restored(driver: str) -> None:
    rig, agent, outcome = nodes.at_rest("all-balanced")
    if driver != "stayed":
        rig.failures.add("gpus.observe", call_errors.NO_DRIVER, times=1)
        for _ in range(2):
            agent.check_drift("all-balanced", outcome)
    rig.gpus = gpu_values.without_instances(rig.gpus, 0, 1)

    assert [agent.check_drift("all-balanced", outcome) for _ in range(2)] == [
        actions.Action.REST
    ] * 2

    assert rig.node_object.labels[well_known.STATE_LABEL] == "failed"
    assert rig.node_object.events == ["Drifted", "DestroyedDevices"]


def test_single_failed_checks_between_good_ones_do_not_add_up() -> None:
    rig, agent, outcome = nodes.at_rest("all-balanced")
    for _ in range(4):
        rig.failures.add("gpus.observe", call_errors.NO_DRIVER, times=1)
        agent.check_drift("all-balanced", outcome)
        agent.check_drift("all-balanced", outcome)
    assert readiness_of(rig) == ("True", "LayoutVerified")
    assert rig.node_object.events == []


@pytest.mark.parametrize(
    ("layout", "policy"),
    [
        ("all-balanced", "reports"),
        ("two-gpus", "reports"),
        ("all-balanced", "heals"),
        ("two-gpus", "restarts"),
    ],
)
def test_a_gpu_that_the_driver_no_longer_lists_is_a_drift(layout: str, policy: str) -> None:
    heals = policy != "reports"
    rig, agent, outcome = nodes.at_rest(
        layout, rig=nodes.node(), layouts=TWO_GPUS, heals_drift=heals
    )
    assert outcome.state is run_status.State.SUCCESS
    rig.pods.add("spared", devices=frozenset(rig.gpus[0].mig_uuids[:1]))
    before, rig.gpus = rig.gpus, rig.gpus[:1]
    if policy == "restarts":
        agent = agents.start(rig, layout, layouts=TWO_GPUS, heals_drift=heals)
        outcome = ends.run_to(rig, layout, Reason.DRIFTED, by=agent)

    for _ in range(2):
        assert agent.check_drift(layout, outcome) is actions.Action.REST

    assert rig.node_object.labels[well_known.STATE_LABEL] == "failed"
    assert rig.node_object.events == ["Drifted", "DestroyedDevices"]
    assert well_known.APPLIED_LABEL not in rig.node_object.labels
    assert f"the driver no longer lists {before[1]}" in rig.node_object.status_messages[-1]
    assert "workloads.evict" not in rig.log
    if not heals:
        rig.gpus = gpu_values.without_instances(before, 1)
        assert agent.check_drift(layout, outcome) is actions.Action.REST
        assert "the driver no longer lists" not in rig.node_object.status_messages[-1]
    rig.gpus = before
    assert agent.check_drift(layout, outcome) is actions.Action.REST
    assert rig.node_object.labels[well_known.STATE_LABEL] == "success"


@pytest.mark.parametrize("event", ["reboot", "new request"])
def test_a_vanished_gpu_is_no_drift_after_a_reboot_or_a_new_request(event: str) -> None:
    rig = nodes.node()
    agents.run(rig, "all-balanced")
    rig.gpus = rig.gpus[:1]
    if event == "reboot":
        rig.host.boot_id = "next-boot"
    agent = agents.start(rig, "all-balanced")

    outcome = agents.run(rig, "all-balanced", by=agent, is_new=event == "new request")

    assert outcome.state is run_status.State.SUCCESS


def test_a_gpu_that_is_back_gets_the_layout_once_no_pod_uses_it() -> None:
    rig = nodes.node(layout="all-1g.5gb")
    pod = rig.pods.add("training", devices=frozenset({nodes.device(rig, 1, "1g.5gb")}))
    rig.driver.lost.add(rig.gpus[1].uuid)
    agent = agents.new_agent(rig)
    outcome = agents.run(rig, "all-disabled", by=agent, is_new=True)
    rig.driver.lost.clear()
    assert agent.check_drift("all-disabled", outcome) is actions.Action.HEAL
    rest: dict[str, Any] = {"by": agent, "is_heal": True}

    why = f"all-disabled is applied to GPU 1 ({rig.gpus[1].uuid}) once no pod uses devices"
    outcome = ends.run_to(rig, "all-disabled", Reason.IN_USE, why, "default/training", **rest)

    assert outcome.should_retry
    rig.pods.remove(pod)
    ends.run_to(rig, "all-disabled", Reason.APPLIED, **rest)
    assert ends.has_layout(rig, "all-disabled")
