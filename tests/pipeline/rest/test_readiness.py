"""The condition MigReady and the owner's startup taints, from the agent's start to its end."""

import pytest

from mig_manager import errors, reasons
from mig_manager.agent.drift import actions
from mig_manager.core import steps
from mig_manager.core.node import policies
from tests.pipeline import drifts
from tests.rigs.node import agents, ends, node_rig, nodes, strikes

STARTUP = "example.com/mig-not-ready"
OTHER = "dedicated"


def new_node(layout: str | None = None) -> node_rig.NodeRig:
    """Return a node that has just joined, with the owner's taints."""
    rig = nodes.node(layout=layout)
    rig.owner.policy = policies.Policy(startup_taints=frozenset({STARTUP}))
    rig.node_object.taints = {STARTUP, OTHER}
    rig.node_object.ready_condition, rig.node_object.ready_reasons = None, []
    return rig


def is_ready(rig: node_rig.NodeRig) -> bool | None:
    condition = rig.node_object.ready_condition
    return None if condition is None else condition["status"] == "True"


def test_node_is_not_ready_until_its_layout_is_verified() -> None:
    rig = new_node()
    entries = rig.note(lambda: (rig.log[-1], is_ready(rig), STARTUP in rig.node_object.taints))

    ends.run_to(rig, "all-balanced", reasons.Reason.APPLIED)

    assert rig.node_object.ready_reasons == ["Pending", "LayoutVerified"]
    assert is_ready(rig)
    assert rig.node_object.taints == {OTHER}
    during = [entry for entry in entries if entry[0] in {"gpus.execute", "workloads.delete"}]
    assert {entry[1:] for entry in during} == {(False, True)}


def test_an_applied_layout_stays_ready_and_nothing_is_written_again() -> None:
    rig = new_node()
    agents.run(rig, "all-balanced")
    rig.node_object.ready_reasons.clear()

    ends.run_to(rig, "all-balanced", reasons.Reason.ALREADY_APPLIED)

    assert rig.node_object.ready_reasons == []
    assert is_ready(rig)


def test_a_new_agent_on_a_node_with_its_layout_removes_the_startup_taint() -> None:
    rig = new_node("all-balanced")

    ends.run_to(rig, "all-balanced", reasons.Reason.ALREADY_APPLIED)

    assert (rig.node_object.taints, rig.node_object.ready_reasons) == ({OTHER}, ["LayoutVerified"])


@pytest.mark.parametrize("layout", ["no-such-layout", "too-much"])
def test_failed_layout_keeps_the_startup_taint(layout: str) -> None:
    rig = new_node()

    outcome = agents.run(rig, layout)

    assert rig.node_object.taints == {STARTUP, OTHER}
    assert rig.node_object.ready_condition is not None
    assert (is_ready(rig), rig.node_object.ready_condition["reason"]) == (
        False,
        outcome.reason.value,
    )
    assert rig.node_object.ready_condition["message"] == outcome.message


def test_a_drift_ends_readiness_and_its_end_restores_it() -> None:
    rig = new_node("all-balanced")
    agent = agents.new_agent(rig)
    outcome = agents.run(rig, "all-balanced", by=agent)
    since = (
        rig.node_object.ready_condition and rig.node_object.ready_condition["lastTransitionTime"]
    )
    before = drifts.tamper(rig)
    rig.clock.now_s += 60

    assert agent.check_drift("all-balanced", outcome) is actions.Action.REST
    assert is_ready(rig) is False
    rig.gpus = before
    agent.check_drift("all-balanced", outcome)

    assert rig.node_object.ready_reasons == ["LayoutVerified", "Drifted", "LayoutVerified"]
    assert rig.node_object.ready_condition is not None
    assert rig.node_object.ready_condition["lastTransitionTime"] not in (None, since)


def test_a_node_without_a_request_is_ready_and_loses_its_startup_taint() -> None:
    rig = new_node()

    assert not agents.undo(rig)
    assert not agents.undo(rig)

    assert (is_ready(rig), rig.node_object.ready_reasons) == (True, ["NoLayoutRequested"])
    assert rig.node_object.taints == {OTHER}
    assert rig.log.count("node.patch") == 2, "the taint, and the GPUs"


def test_change_that_cannot_be_undone_keeps_the_node_unready() -> None:
    rig = new_node("all-balanced")
    strikes.kill_before(rig, steps.DestroyComputeInstance, "all-1g.5gb", number=2)
    rig.failures.add("gpus.execute", errors.HardwareError("no", reason=reasons.Reason.NVML_ERROR))

    assert agents.undo(rig)

    assert (is_ready(rig), STARTUP in rig.node_object.taints) == (False, True)

    rig.failures.clear()
    assert not agents.undo(rig)
    assert (is_ready(rig), STARTUP in rig.node_object.taints) == (True, False)


def test_a_startup_taint_is_removed_at_each_success_and_never_added() -> None:
    rig = new_node("all-balanced")
    rig.node_object.taints = {OTHER}

    agents.run(rig, "all-balanced")
    assert rig.node_object.taints == {OTHER}
    rig.node_object.taints.add(STARTUP)
    agents.run(rig, "all-balanced")

    assert rig.node_object.taints == {OTHER}
