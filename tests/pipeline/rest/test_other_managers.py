"""Another program that holds the node's lock: the agent waits for it, and touches nothing."""

import pytest

from mig_manager.agent.drift import actions
from mig_manager.core.objects import well_known
from mig_manager.reasons import Reason
from tests.pipeline.drifts import tamper
from tests.rigs.node import agents, ends, fakes, nodes


def test_a_run_waits_until_another_manager_releases_the_lock() -> None:
    rig = nodes.node()
    other = fakes.FakeLock(refusals=4)

    ends.run_to(rig, "all-1g.5gb", Reason.APPLIED, by=agents.new_agent(rig, lock=other))

    assert other.descriptions == ["applying layout all-1g.5gb"]


def test_a_manager_that_does_not_finish_is_named_and_nothing_is_touched() -> None:
    rig = nodes.busy_node()

    outcome = ends.run_to(
        rig,
        "one-slice-changed",
        Reason.LOCKED,
        "another manager is at work",
        by=agents.new_agent(rig, lock=fakes.FakeLock(refusals=10**9)),
    )

    assert outcome.should_retry
    assert [call for call in rig.log if call.startswith("gpus.")] == []


def test_a_newer_request_need_not_wait_for_another_manager() -> None:
    rig = nodes.node()
    agent = agents.new_agent(rig, lock=fakes.FakeLock(refusals=10**9))

    ends.supersede(rig, "one-slice-changed", by=agent, ends_at=2)

    assert rig.clock.now_s < 1


def test_the_layout_for_the_next_boot_is_saved_only_under_the_lock() -> None:
    rig, other = nodes.node(), fakes.FakeLock()
    saves = rig.note(lambda: other.is_locked, at="verified_layout_file.save")
    rig.resets.are_available = False
    agent = agents.new_agent(rig, lock=other)

    ends.run_to(rig, "all-disabled", Reason.ALREADY_APPLIED, by=agent)
    rig.driver.mode_waits = True
    ends.run_to(rig, "all-1g.5gb", Reason.RESET_REQUIRED, by=agent)

    assert saves == [True, True]


def test_gpus_that_another_manager_works_on_are_checked_later() -> None:
    other = fakes.FakeLock()
    rig, agent, outcome = nodes.at_rest("all-balanced", lock=other)
    tamper(rig)

    other.refusals = 9
    while other.refusals:
        assert agent.check_drift("all-balanced", outcome) is actions.Action.REST
    assert rig.node_object.labels[well_known.STATE_LABEL] == "success"
    assert (rig.node_object.ready_condition or {})["status"] == "True"
    agent.check_drift("all-balanced", outcome)
    assert rig.node_object.labels[well_known.STATE_LABEL] == "failed"


@pytest.mark.parametrize("state", ["success", "failed"])
@pytest.mark.parametrize("is_whole", [False, True], ids=["label", "label and status"])
def test_an_outcome_that_another_manager_replaced_is_published_again(
    state: str, *, is_whole: bool
) -> None:
    rig, agent, outcome = nodes.at_rest("all-balanced")
    if state == "failed":
        tamper(rig)
        agent.check_drift("all-balanced", outcome)
    status, ready = rig.node_object.status, rig.node_object.ready_condition
    if is_whole:
        # As an agent whose lock was refused, and which was removed since.
        other = agents.new_agent(rig, lock=fakes.FakeLock(refusals=10**9))
        ends.run_to(rig, "all-balanced", Reason.LOCKED, by=other)
    rig.node_object.labels[well_known.STATE_LABEL] = "failed" if state == "success" else "success"

    assert agent.check_drift("all-balanced", outcome) is actions.Action.REST
    assert rig.node_object.labels[well_known.STATE_LABEL] == state
    assert (rig.node_object.status["state"], rig.node_object.status["reason"]) == (
        state,
        status["reason"],
    )
    assert (rig.node_object.ready_condition or {})["status"] == (ready or {})["status"]
    rig.log.clear()
    agent.check_drift("all-balanced", outcome)
    assert "node.patch" not in rig.log
