"""Layouts requested on a node whose GPUs await their reset."""

from mig_manager import reasons
from mig_manager.agent.drift import actions
from mig_manager.core import model, steps
from mig_manager.core.objects import well_known
from mig_manager.core.records import run_status
from tests.pipeline import repairs
from tests.rigs.node import agents, call_errors, ends, gpu_values, nodes


def test_a_layout_waits_for_the_repair_of_its_gpu_before_an_eviction() -> None:
    rig = repairs.faulty_node()
    agent = repairs.agent_of(rig)

    outcome = repairs.request_other(rig, agent)

    assert outcome.reason is reasons.Reason.GPU_NEEDS_RESET
    assert outcome.should_retry
    assert outcome.message.endswith(f"To be reset by the agent: {rig.gpus[0]}.")
    assert {"affected", "spared"} <= rig.pods.names
    ends.assert_restored(rig)
    assert rig.node_object.recovery_condition is not None
    assert rig.node_object.recovery_condition["reason"] == "GpuReset"
    assert rig.node_object.recovery_condition["message"].endswith(
        "The agent evicts its pods, and resets it."
    )
    assert "nvidia-smi" not in rig.node_object.recovery_condition["message"]
    outcome = repairs.request_other(rig, agent, attempt=2)
    assert outcome.state is run_status.State.SUCCESS
    assert any(
        "steps on the GPUs, with 1 reset" in each for each in rig.node_object.status_messages
    )
    assert repairs.resets(rig) == 1
    assert ends.has_layout(rig, "all-1g.5gb")
    ends.assert_restored(rig)


def test_a_fault_during_a_change_is_repaired_before_the_next_attempt() -> None:
    rig = nodes.busy_node()
    before = gpu_values.geometry(rig.gpus)
    rig.callbacks.add(
        steps.CreateGpuInstance,
        lambda: repairs.break_gpus(rig, 0),
        when=lambda: not repairs.resets(rig),
    )
    rig.failures.add(
        steps.Step, call_errors.broken("gpus"), when=lambda: rig.gpus[0].recovers_by_reset
    )
    agent = repairs.agent_of(rig)
    outcome = repairs.request_other(rig, agent)
    assert outcome.should_retry

    for attempt in range(2, 5):
        outcome = repairs.request_other(rig, agent, attempt=attempt)

    assert outcome.state is run_status.State.SUCCESS, outcome.message
    assert repairs.resets(rig) == 1
    assert ends.has_layout(rig, "all-1g.5gb")
    assert before != gpu_values.geometry(rig.gpus)
    ends.assert_restored(rig)


def test_a_layout_evicts_no_pod_after_a_failed_repair() -> None:
    rig = repairs.faulty_node()
    rig.failures.add("reset.reset", repairs.REFUSED)
    agent = repairs.agent_of(rig)
    repairs.request_other(rig, agent)
    outcome = repairs.request_other(rig, agent, attempt=2)

    assert outcome.reason is reasons.Reason.GPU_NEEDS_RESET
    assert "only be reset together" in repairs.message(rig)
    assert rig.node_object.labels[well_known.APPLIED_LABEL] == "all-balanced"
    assert "spared" in rig.pods.names
    assert agent.check_drift("all-1g.5gb", outcome) is actions.Action.REST
    ends.assert_restored(rig)

    rig.failures.clear()
    rig.clock.wait(1000)
    assert agent.check_drift("all-1g.5gb", outcome) is actions.Action.RUN
    outcome = repairs.request_other(rig, agent, attempt=3)
    assert outcome.state is run_status.State.SUCCESS
    assert ends.has_layout(rig, "all-1g.5gb")


def test_a_repair_that_a_removed_label_prevented_may_begin_at_once() -> None:
    rig = repairs.faulty_node()
    agent = repairs.agent_of(rig)
    repairs.request_other(rig, agent)
    agent.restore_without_request()
    assert repairs.resets(rig) == 0

    assert repairs.request_other(rig, agent).should_retry
    outcome = repairs.request_other(rig, agent, attempt=2)

    assert outcome.state is run_status.State.SUCCESS, outcome.message
    assert repairs.resets(rig) == 1


def test_a_failed_layout_runs_again_once_another_program_has_reset_the_gpu() -> None:
    rig = repairs.faulty_node()
    rig.node_object.is_unschedulable = True
    agent = repairs.agent_of(rig)
    outcome = repairs.request_other(rig, agent)
    assert (outcome.reason, outcome.should_retry) == (reasons.Reason.GPU_NEEDS_RESET, False)
    assert "Not reset now: GPU 0 (the node is cordoned)." in outcome.message
    assert {"affected", "spared"} <= rig.pods.names
    assert agent.check_drift("all-1g.5gb", outcome) is actions.Action.REST
    rig.gpus = gpu_values.with_action(rig.gpus, model.RecoveryAction.NONE, 0)
    assert agent.check_drift("all-1g.5gb", outcome) is actions.Action.RUN


def test_a_layout_without_the_faulty_gpu_is_applied() -> None:
    rig = repairs.faulty_node(1)
    ends.run_to(
        rig, "one-slice-changed", reasons.Reason.APPLIED, by=repairs.agent_of(rig), is_new=True
    )
    assert repairs.resets(rig) == 0


def test_an_unknown_layout_does_not_block_a_repair() -> None:
    rig = repairs.faulty_node()
    before = gpu_values.geometry(rig.gpus)
    agent = repairs.agent_of(rig)
    outcome = agents.run(rig, "no-such-layout", by=agent, is_new=True)
    assert outcome.should_retry

    outcome = agents.run(rig, "no-such-layout", by=agent)

    assert (outcome.reason, outcome.should_retry) == (reasons.Reason.UNKNOWN_CONFIG, False)
    assert repairs.resets(rig) == 1
    assert gpu_values.geometry(rig.gpus) == before
    assert rig.node_object.labels[well_known.APPLIED_LABEL] == "all-balanced"
    ends.assert_restored(rig)
