"""Hooks in the agent's pipeline: at which points, what a failing one costs, and who pays."""

import pytest

from mig_manager import errors
from mig_manager.agent import outcomes
from mig_manager.core import model, ports, steps
from mig_manager.core.node import cluster
from mig_manager.core.planner import planner
from mig_manager.core.records import status
from tests import fakes, scenes

LAYOUT = "one-slice-changed"
START, CONFIG, EXIT = "start", "config", "exit"


def steadfast(rig: fakes.NodeRig) -> fakes.FakeRequest:
    return fakes.FakeRequest(rig.clock)


def hooked_node() -> fakes.NodeRig:
    return scenes.hooked(scenes.busy_node())


def journal(rig: fakes.NodeRig) -> status.Journal:
    return status.Journal.from_json(rig.annotations[cluster.JOURNAL_ANNOTATION])


def is_as_before(rig: fakes.NodeRig, before: tuple[model.Gpu, ...]) -> bool:
    return planner.restore(rig.gpus, [gpu.snapshot for gpu in before]).is_empty


def test_hooks_run_before_the_taint_before_the_steps_and_before_the_plugin_returns() -> None:
    rig = hooked_node()
    seen: list[tuple[str, str]] = []

    def note() -> None:
        if rig.log[-1] == "hooks.run":
            seen.append((rig.statuses[-1], "closed" if rig.has_hold_taint else "open"))

    rig.on_call = note
    outcome = scenes.run(rig, LAYOUT)

    assert outcome.state is model.State.SUCCESS
    assert rig.hooked == [START, CONFIG, EXIT]
    assert [where for _, where in seen] == ["open", "closed", "closed"]
    assert seen[0][0] == "running the apply-start hooks"
    assert seen[1][0].startswith("running 5 steps") or "steps on the GPUs" in seen[1][0]
    calls = rig.log
    last_hook = max(at for at, call in enumerate(calls) if call == "hooks.run")
    assert max(at for at, call in enumerate(calls) if call == "gpus.execute") < last_hook
    assert calls.index("host.refresh") < last_hook
    assert "restarting the device plugin" in rig.statuses
    scenes.assert_nothing_taken(rig)


def test_a_mig_mode_change_passes_all_four_hook_points_in_order() -> None:
    rig = scenes.hooked(scenes.node())
    executed: list[int] = []
    rig.on_call = lambda: executed.append(len(rig.executed))

    assert scenes.run(rig, "all-1g.5gb").state is model.State.SUCCESS

    assert rig.hooked == [START, "mode", CONFIG, EXIT]
    executed_types = [type(step) for step in rig.executed]
    assert executed_types[:2] == [steps.SetMode, steps.SetMode]
    at = [executed[n] for n, call in enumerate(rig.log) if call == "hooks.run"]
    assert at == [0, 0, 2, len(executed_types)]


def test_hooks_get_the_layout_in_their_environment() -> None:
    rig = hooked_node()
    scenes.run(rig, LAYOUT)

    assert rig.hook_environment == {
        "MIG_PARTED_HOOKS_FILE": "hooks.yaml",
        "MIG_PARTED_SELECTED_CONFIG": LAYOUT,
    }


def test_where_nothing_changes_the_agent_runs_no_hook_like_mig_parted() -> None:
    rig = scenes.hooked(scenes.node(layout="all-balanced"))

    outcome = scenes.run(rig, "all-balanced")

    assert outcome.reason is errors.Reason.ALREADY_APPLIED
    assert rig.hooked == []


@pytest.mark.parametrize("point", [START, CONFIG])
def test_a_hook_that_fails_before_the_change_is_active_rolls_back(
    point: str,
) -> None:
    rig = hooked_node()
    rig.broken_hooks = {point}
    before = rig.gpus

    outcome = scenes.run(rig, LAYOUT)

    assert outcome.reason is errors.Reason.HOOK_FAILED
    assert outcome.message.startswith(f"{point} failed")
    assert outcome.should_retry
    assert rig.hooked == ([START] if point == START else [START, CONFIG, EXIT])
    assert is_as_before(rig, before)
    assert ("workloads.evict" in rig.log) is (point != START)
    scenes.assert_nothing_taken(rig)
    rig.broken_hooks = set()
    assert scenes.run(rig, LAYOUT).state is model.State.SUCCESS


def test_a_hook_that_fails_between_mode_and_instances_brings_the_mode_back() -> None:
    rig = scenes.hooked(scenes.node())
    rig.broken_hooks = {CONFIG}
    before = rig.gpus

    outcome = scenes.run(rig, "all-1g.5gb")

    assert outcome.reason is errors.Reason.HOOK_FAILED
    assert "the instances from before are back" in outcome.message
    assert rig.hooked == [START, "mode", CONFIG, EXIT]
    assert is_as_before(rig, before)
    scenes.assert_nothing_taken(rig)


def test_a_last_hook_that_fails_leaves_the_layout_and_is_tried_again() -> None:
    rig = hooked_node()
    rig.broken_hooks = {EXIT}
    ours = scenes.reconciler(rig)

    outcome = ours.run(LAYOUT, steadfast(rig))

    assert outcome.reason is errors.Reason.HOOK_FAILED
    assert outcome.is_unfinished
    assert journal(rig).exit_hook
    assert not rig.is_unschedulable
    assert cluster.PAUSED_VALUE not in rig.labels.values()
    rig.broken_hooks = set()
    executed = len(rig.executed)

    again = ours.run(LAYOUT, steadfast(rig), attempt=2)

    assert again.state is model.State.SUCCESS
    assert len(rig.executed) == executed
    assert rig.hooked == [START, CONFIG, EXIT, EXIT]
    scenes.assert_nothing_taken(rig)


def test_the_reason_of_a_failing_change_is_not_hidden_by_a_failing_last_hook() -> None:
    rig = hooked_node()
    rig.broken_hooks = {EXIT}
    rig.step_error = scenes.refuse(steps.CreateGpuInstance, times=1)

    outcome = scenes.run(rig, LAYOUT)

    assert outcome.reason is errors.Reason.INSUFFICIENT_RESOURCES
    assert "exit failed" in outcome.message
    assert rig.hooked == [START, CONFIG, EXIT]


def test_a_drain_that_fails_still_comes_to_the_last_point() -> None:
    rig = hooked_node()
    rig.budgets["affected"] = "budget 'pdb-a' allows no disruption"

    outcome = scenes.run(rig, LAYOUT)

    assert outcome.reason is errors.Reason.DRAIN_TIMEOUT
    assert rig.hooked == [START, EXIT]
    scenes.assert_nothing_taken(rig)


@pytest.mark.parametrize(
    ("text", "reason", "text_of_error"),
    [
        ("hooks: {apply: []}", errors.Reason.INVALID_CONFIG, "hooks.yaml:1:9"),
        (scenes.HOOKS, errors.Reason.HOOK_FAILED, "hooks.yaml:6:32: program config"),
    ],
)
def test_an_invalid_hooks_file_or_missing_program_fails_before_anything_is_touched(
    text: str, reason: errors.Reason, text_of_error: str
) -> None:
    rig = hooked_node()
    rig.hooks = text
    rig.missing_hooks = {CONFIG}
    pods = dict(rig.pods)

    outcome = scenes.run(rig, LAYOUT)

    assert outcome.reason is reason
    assert text_of_error in outcome.message
    assert rig.states == ["failed"]
    assert (rig.pods, rig.hooked, rig.executed) == (pods, [], [])
    scenes.assert_nothing_taken(rig)


def test_a_program_that_this_change_does_not_run_may_be_missing() -> None:
    rig = hooked_node()
    rig.missing_hooks = {"mode"}

    assert scenes.run(rig, LAYOUT).state is model.State.SUCCESS


def killed_with_hooks(at: str) -> fakes.NodeRig:
    """Return a node whose agent was killed while a hook ran."""
    rig = hooked_node()

    def kill() -> None:
        earlier = {START: 0, CONFIG: 1, EXIT: 2}[at]
        if rig.log[-1] == "hooks.run" and rig.log.count("hooks.run") == earlier + 1:
            raise scenes.Killed

    rig.on_call = kill
    with pytest.raises(scenes.Killed):
        scenes.run(rig, LAYOUT)
    rig.on_call = lambda: None
    return rig


@pytest.mark.parametrize("at", [START, CONFIG, EXIT])
@pytest.mark.parametrize("resumes", [True, False])
def test_after_a_kill_in_a_hook_the_exit_hook_runs_once_whether_or_not_the_run_is_resumed(
    at: str, *, resumes: bool
) -> None:
    rig = killed_with_hooks(at)
    assert journal(rig).exit_hook
    successor = scenes.reconciler(rig)

    successor.recover(LAYOUT if resumes else None)
    if resumes:
        assert successor.run(LAYOUT, steadfast(rig)).state is model.State.SUCCESS
        assert rig.hooked.count(EXIT) == 1
    else:
        successor.rest()
        assert rig.hooked[-1] == EXIT

    scenes.assert_nothing_taken(rig)


def test_what_is_owed_is_forgotten_where_the_owner_has_taken_the_hooks_away() -> None:
    rig = killed_with_hooks(CONFIG)
    rig.hooks = ""
    successor = scenes.reconciler(rig)

    successor.recover(LAYOUT)

    assert successor.run(LAYOUT, steadfast(rig)).state is model.State.SUCCESS
    assert cluster.JOURNAL_ANNOTATION not in rig.annotations


def test_an_exit_hook_stays_pending_while_the_hooks_file_is_invalid() -> None:
    rig = killed_with_hooks(CONFIG)
    rig.hooks = "hooks: ["
    successor = scenes.reconciler(rig)

    successor.recover(None)

    assert any("hooks.yaml:2:1" in each for each in rig.messages)
    assert journal(rig).exit_hook


def test_a_hook_gives_signs_of_life() -> None:
    rig = hooked_node()
    lives: list[int] = []

    class Listener(ports.Telemetry):
        def still_working(self) -> None:
            lives.append(len(rig.log))

    ours = scenes.reconciler(rig, telemetry=Listener())

    assert isinstance(ours.run(LAYOUT, steadfast(rig)), outcomes.Outcome)
    assert len(lives) >= 3
