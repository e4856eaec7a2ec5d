"""GPUs with a fault: what the agent reports, while the layout's outcome stays as it is."""

import contextlib
from typing import Any

import pytest
import structlog.testing

from mig_manager import errors, reasons
from mig_manager.agent import outcomes
from mig_manager.core import model
from mig_manager.core.objects import well_known
from mig_manager.core.settings import node_settings
from tests.pipeline import repairs
from tests.rigs.node import agents, call_errors, ends, fakes, gpu_values, node_rig, nodes

RESET = model.RecoveryAction.GPU_RESET
REBOOT = model.RecoveryAction.NODE_REBOOT
HEALTHY = model.RecoveryAction.NONE


def node_at_rest(
    **settings: Any,
) -> tuple[node_rig.NodeRig, agents.AgentInMemory, outcomes.Outcome]:
    """Return a node whose layout is active and whose GPUs report no fault."""
    rig = nodes.node(layout="all-balanced")
    set_action(rig, HEALTHY, *range(len(rig.gpus)))
    return nodes.at_rest("all-balanced", rig=rig, settings=settings)


def set_action(rig: node_rig.NodeRig, action: model.RecoveryAction, *indices: int) -> None:
    rig.gpus = gpu_values.with_action(rig.gpus, action, *indices)


def recovery(rig: node_rig.NodeRig) -> tuple[str, str] | None:
    """Return status and reason of the condition; None: the node lacks it."""
    condition = rig.node_object.recovery_condition
    return (condition["status"], condition["reason"]) if condition else None


def test_a_fault_is_reported_once_and_the_layout_stays_a_success() -> None:
    rig, agent, outcome = node_at_rest()
    ready, status = (
        rig.node_object.ready_condition,
        rig.node_object.annotations[well_known.STATUS_ANNOTATION],
    )
    set_action(rig, RESET, 0)

    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            agent.check_drift("all-balanced", outcome)

    assert recovery(rig) == ("True", "GpuReset")
    assert rig.node_object.events == ["GpuRecoveryNeeded"]
    assert "nvidia-smi --gpu-reset -i 0" in rig.node_object.event_messages[0]
    assert [entry["gpus"] for entry in logs if entry["event"] == "gpu_recovery_needed"] == [
        ["GPU 0: gpu-reset"]
    ]
    assert rig.node_object.ready_condition == ready
    assert rig.node_object.annotations[well_known.STATUS_ANNOTATION] == status
    assert rig.node_object.labels[well_known.STATE_LABEL] == "success"
    published = rig.node_object.published_gpus
    assert [gpu.recovery_action for gpu in published][:2] == [RESET, None]


def test_another_action_and_the_recovery_are_reported_too() -> None:
    rig, agent, outcome = node_at_rest()
    for action in (RESET, REBOOT, HEALTHY):
        set_action(rig, action, 0)
        agent.check_drift("all-balanced", outcome)

    assert rig.node_object.events == ["GpuRecoveryNeeded", "GpuRecoveryNeeded", "GpuRecovered"]
    assert recovery(rig) == ("False", "NoRecoveryNeeded")


def test_a_node_without_faults_gets_neither_condition_nor_event() -> None:
    rig, agent, outcome = node_at_rest()
    before = len(rig.log)
    agent.check_drift("all-balanced", outcome)
    assert (recovery(rig), rig.node_object.events) == (None, [])
    assert not {"node.patch", "node.update"} & set(rig.log[before:])


def test_a_restarted_agent_clears_the_condition_of_the_one_before() -> None:
    rig, agent, outcome = node_at_rest()
    set_action(rig, RESET, 0)
    agent.check_drift("all-balanced", outcome)
    set_action(rig, HEALTHY, 0)

    agents.run(rig, "all-balanced", by=agents.new_agent(rig))

    assert recovery(rig) == ("False", "NoRecoveryNeeded")


def test_faults_found_by_a_run_are_reported_at_its_end() -> None:
    rig = nodes.node()
    set_action(rig, REBOOT, 1)
    ends.run_to(rig, "all-balanced", reasons.Reason.APPLIED)
    assert recovery(rig) == ("True", "NodeReboot")
    assert rig.node_object.events[-1] == "GpuRecoveryNeeded"


def test_an_unreachable_gpu_is_in_the_condition_without_another_event() -> None:
    rig, agent, outcome = node_at_rest()
    rig.driver.lost.add(rig.gpus[1].uuid)
    agent.check_drift("all-balanced", outcome)
    assert recovery(rig) == ("True", "GpuUnreachable")
    assert rig.node_object.events == []


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        (reasons.Reason.GPU_LOST, ("True", "GpuUnreachable")),
        (reasons.Reason.GPU_NEEDS_RESET, ("True", "GpuUnreachable")),
        (reasons.Reason.DRIVER_NOT_LOADED, None),
    ],
)
def test_a_node_whose_only_gpu_is_lost_gets_the_condition(
    reason: reasons.Reason, expected: tuple[str, str] | None
) -> None:
    rig, agent, outcome = node_at_rest()
    rig.failures.add("gpus.observe", errors.HardwareError("GPU 0 is lost", reason=reason))
    agent.check_drift("all-balanced", outcome)
    assert recovery(rig) == expected
    assert rig.node_object.labels[well_known.STATE_LABEL] == "success"

    rig.failures.remove("gpus.observe")
    agent.check_drift("all-balanced", outcome)
    assert recovery(rig) == (expected and ("False", "NoRecoveryNeeded"))
    assert rig.node_object.events.count("GpuRecovered") == (expected is not None)


def test_a_fault_does_not_change_the_repair_by_another_program() -> None:
    rig, agent, outcome = node_at_rest()
    rig.node_object.is_unschedulable, rig.node_object.taints = True, {"nvidia.com/gpu-error"}
    rig.pods.add("train", devices=frozenset(rig.gpus[0].mig_uuids[:1]))
    set_action(rig, RESET, 0)

    agent.check_drift("all-balanced", outcome)

    assert recovery(rig) == ("True", "GpuReset")
    assert (rig.node_object.is_unschedulable, rig.node_object.taints) == (
        True,
        {"nvidia.com/gpu-error"},
    )
    assert not rig.node_object.has_reconfiguring_taint
    assert "train" in rig.pods.names
    assert not {"workloads.evict", "workloads.delete", "gpus.execute"} & set(rig.log)


def test_repair_off_reports_nothing_on_the_node() -> None:
    rig, agent, outcome = node_at_rest(repair=node_settings.RepairPolicy.OFF)
    set_action(rig, RESET, 0)
    agent.faults.add_xids([(rig.gpus[0].uuid, 79)])
    agent.check_drift("all-balanced", outcome)
    agent.restore_without_request()
    agent.check_without_request()
    assert (recovery(rig), rig.node_object.events) == (None, [])


@pytest.mark.parametrize("is_silent", [False, True])
def test_a_fault_and_drift_are_published_without_the_right_to_list_pods(
    *, is_silent: bool
) -> None:
    rig = repairs.stuck_node() if is_silent else repairs.faulty_node()
    agent = repairs.agent_of(rig)
    outcome = agents.run(rig, "all-balanced", by=agent)
    rig.node_object.recovery_condition = None
    rig.failures.add("workloads.list", call_errors.broken("workloads"))
    if is_silent:
        rig.gpus = gpu_values.without_instances(rig.gpus, 1)

    with contextlib.suppress(errors.ClusterError):
        agent.check_drift("all-balanced", outcome)

    assert "Not reset now: broken." in repairs.message(rig)
    assert (rig.node_object.labels[well_known.STATE_LABEL] == "failed") is is_silent


def test_a_node_without_a_request_is_checked_too() -> None:
    rig = nodes.node()
    agent = agents.new_agent(rig)
    agent.restore_without_request()
    set_action(rig, RESET, 0)

    agent.check_without_request()
    assert recovery(rig) == ("True", "GpuReset")

    rig.failures.add("gpus.observe", call_errors.broken("gpus"))
    agent.check_without_request()
    assert recovery(rig) == ("True", "GpuReset")


def test_xids_are_counted_and_each_causes_one_event_an_hour() -> None:
    rig = nodes.node(layout="all-balanced")
    telemetry = fakes.FakeTelemetry()
    agent = agents.new_agent(rig, telemetry=telemetry)
    outcome = agents.run(rig, "all-balanced", by=agent)
    rig.node_object.events.clear()
    uuid = rig.gpus[0].uuid

    def report(*xids: int) -> None:
        agent.faults.add_xids((uuid, xid) for xid in xids)
        agent.check_drift("all-balanced", outcome)

    report(94, 94, 154)
    report(94)
    assert rig.node_object.events == ["GpuXid"]
    assert f"Xid 94 of {uuid}, Xid 154 of {uuid}" in rig.node_object.event_messages[-1]
    rig.clock.now_s += 3600
    report(94)
    assert rig.node_object.events == ["GpuXid", "GpuXid"]
    assert [xid for _, xid in telemetry.events["xid_reported"]] == [94, 94, 154, 94, 94]


def test_a_lost_write_is_tried_again_with_the_next_check() -> None:
    rig, agent, outcome = node_at_rest()
    set_action(rig, RESET, 0)
    rig.failures.add("node.patch", call_errors.broken("node"))
    with pytest.raises(errors.ClusterError):
        agent.check_drift("all-balanced", outcome)

    rig.failures.remove("node.patch")
    agent.check_drift("all-balanced", outcome)

    assert rig.node_object.events == ["GpuRecoveryNeeded"]
    assert rig.node_object.published_gpus[0].recovery_action is RESET
