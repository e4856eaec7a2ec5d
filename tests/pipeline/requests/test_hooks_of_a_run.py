"""Hooks in the agent's pipeline: at which points, what a failing one costs, and who pays."""

import pytest

from mig_manager.core import steps
from mig_manager.core.objects import well_known
from mig_manager.reasons import Reason
from tests.rigs.node import agents, call_errors, ends, fakes, node_rig, nodes, strikes

START, MODE, CONFIG, EXIT = "start", "mode", "config", "exit"


@pytest.fixture
def rig() -> node_rig.NodeRig:
    """A busy node with a hook at each point."""
    return nodes.add_hooks(nodes.busy_node())


def test_hooks_run_at_their_points(rig: node_rig.NodeRig) -> None:
    status_and_taint = rig.note(
        lambda: (rig.node_object.status_messages[-1], rig.node_object.has_reconfiguring_taint),
        at="hooks.run",
    )

    ends.run_to(rig, "one-slice-changed", Reason.APPLIED)

    assert rig.hooks.commands == [START, CONFIG, EXIT]
    assert rig.hooks.environment == {
        "MIG_PARTED_HOOKS_FILE": "hooks.yaml",
        "MIG_PARTED_SELECTED_CONFIG": "one-slice-changed",
    }
    assert [is_closed for _, is_closed in status_and_taint] == [False, True, True]
    assert status_and_taint[0][0] == "running the apply-start hooks"
    assert "steps on the GPUs" in status_and_taint[1][0]
    last_hook = max(at for at, call in enumerate(rig.log) if call == "hooks.run")
    assert max(at for at, call in enumerate(rig.log) if call == "gpus.execute") < last_hook
    assert rig.log.index("refresh_files") < last_hook
    assert "restarting the device plugin" in rig.node_object.status_messages


def test_a_mig_mode_change_passes_all_four_hook_points_in_order() -> None:
    rig = nodes.add_hooks(nodes.node())
    executed = rig.note(lambda: len(rig.driver.executed_steps))

    ends.run_to(rig, "all-1g.5gb", Reason.APPLIED)

    assert rig.hooks.commands == [START, MODE, CONFIG, EXIT]
    assert [type(step) for step in rig.driver.executed_steps[:2]] == [steps.SetMode, steps.SetMode]
    at = [executed[n] for n, call in enumerate(rig.log) if call == "hooks.run"]
    assert at == [0, 0, 2, len(rig.driver.executed_steps)]


def test_where_nothing_changes_the_agent_runs_no_hook_like_mig_parted(
    rig: node_rig.NodeRig,
) -> None:
    ends.run_to(rig, "all-balanced", Reason.ALREADY_APPLIED)

    assert rig.hooks.commands == []


@pytest.mark.parametrize("point", [START, CONFIG])
def test_a_hook_that_fails_before_the_change_is_active_rolls_back(
    rig: node_rig.NodeRig, point: str
) -> None:
    rig.hooks.broken = {point}
    before = rig.gpus

    outcome = ends.run_to(rig, "one-slice-changed", Reason.HOOK_FAILED)

    assert outcome.message.startswith(f"{point} failed")
    assert outcome.should_retry
    assert rig.hooks.commands == [*dict.fromkeys((START, point)), EXIT]
    assert ends.is_as_before(rig, before)
    assert ("workloads.evict" in rig.log) is (point != START)
    rig.hooks.broken = set()
    ends.run_to(rig, "one-slice-changed", Reason.APPLIED)


def test_a_hook_that_fails_between_mode_and_instances_restores_the_mode() -> None:
    rig = nodes.add_hooks(nodes.node())
    rig.hooks.broken = {CONFIG}
    before = rig.gpus

    back = "the former instances are restored"
    ends.run_to(rig, "all-1g.5gb", Reason.HOOK_FAILED, back)

    assert rig.hooks.commands == [START, MODE, CONFIG, EXIT]
    assert ends.is_as_before(rig, before)


def test_a_last_hook_that_fails_leaves_the_layout_and_is_tried_again(
    rig: node_rig.NodeRig,
) -> None:
    rig.hooks.broken = {EXIT}
    agent = agents.new_agent(rig)

    outcome = ends.run_to(rig, "one-slice-changed", Reason.HOOK_FAILED, by=agent)

    assert outcome.should_retry
    assert rig.node_object.journal.host.must_run_exit_hooks
    rig.hooks.broken = set()
    executed = len(rig.driver.executed_steps)
    ends.run_to(rig, "one-slice-changed", Reason.APPLIED, by=agent, attempt=2)
    assert len(rig.driver.executed_steps) == executed
    assert rig.hooks.commands == [START, CONFIG, EXIT, EXIT]


def test_failing_exit_hook_does_not_hide_the_reason_of_a_failure(rig: node_rig.NodeRig) -> None:
    rig.hooks.broken = {EXIT}
    rig.failures.add(steps.CreateGpuInstance, call_errors.REFUSED, times=1)

    ends.run_to(rig, "one-slice-changed", Reason.INSUFFICIENT_RESOURCES, "exit failed")

    assert rig.hooks.commands == [START, CONFIG, EXIT]


def test_a_failed_drain_still_runs_the_hooks_of_the_last_point(rig: node_rig.NodeRig) -> None:
    rig.disruptions.refusals["affected"] = "budget 'pdb-a' allows no disruption"

    ends.run_to(rig, "one-slice-changed", Reason.DRAIN_TIMEOUT)

    assert rig.hooks.commands == [START, EXIT]


def test_a_request_that_ends_during_the_start_hooks_closes_no_node(rig: node_rig.NodeRig) -> None:
    taints = rig.note(lambda: rig.node_object.has_reconfiguring_taint)

    ends.supersede(
        rig, "one-slice-changed", ends_when=lambda: rig.log[-1] == "hooks.run", is_replaced=True
    )
    ends.assert_restored(rig)

    assert set(taints) == {False}


def test_a_program_that_this_change_does_not_run_may_be_missing(rig: node_rig.NodeRig) -> None:
    rig.hooks.missing = {MODE}

    ends.run_to(rig, "one-slice-changed", Reason.APPLIED)


def kill_in_hook(rig: node_rig.NodeRig, number: int) -> None:
    """Kill the agent while the hook with this number runs."""
    strikes.kill_before(rig, "hooks.run", "one-slice-changed", number=number)


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("resumes", [True, False])
def test_exit_hook_runs_once_after_a_kill_in_a_hook(
    rig: node_rig.NodeRig, number: int, *, resumes: bool
) -> None:
    kill_in_hook(rig, number)
    assert rig.node_object.journal.host.must_run_exit_hooks
    if resumes:
        assert agents.resume(rig, "one-slice-changed").reason is Reason.APPLIED
        assert rig.hooks.commands.count(EXIT) == 1
    else:
        agents.undo(rig)
        assert rig.hooks.commands[-1] == EXIT

    ends.assert_restored(rig)


def test_pending_exit_hook_is_dropped_if_the_hooks_are_removed(rig: node_rig.NodeRig) -> None:
    kill_in_hook(rig, 2)
    rig.hooks.text = ""

    assert agents.resume(rig, "one-slice-changed").reason is Reason.APPLIED
    assert well_known.JOURNAL_ANNOTATION not in rig.node_object.annotations


def test_an_exit_hook_stays_pending_while_the_hooks_file_is_invalid(rig: node_rig.NodeRig) -> None:
    kill_in_hook(rig, 2)
    rig.hooks.text = "hooks: ["

    agents.start(rig, None)

    assert any("hooks.yaml:2:1" in each for each in rig.node_object.event_messages)
    assert rig.node_object.journal.host.must_run_exit_hooks


def test_a_hook_gives_signs_of_life(rig: node_rig.NodeRig) -> None:
    telemetry = fakes.FakeTelemetry()

    ends.run_to(
        rig, "one-slice-changed", Reason.APPLIED, by=agents.new_agent(rig, telemetry=telemetry)
    )

    assert len(telemetry.events["still_working"]) >= 3
