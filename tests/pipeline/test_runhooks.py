"""Hooks in the agent's pipeline: at which points, what a failing one costs, and who pays."""

import pytest

from mig_manager import errors
from mig_manager.agent import outcomes
from mig_manager.change import instrumentation
from mig_manager.core import model, steps
from mig_manager.core.node import cluster
from mig_manager.core.planner import planner
from mig_manager.core.records import status
from tests import fakes, scenes

LAYOUT = "one-slice-changed"
START, CONFIG, EXIT = "start", "config", "exit"


def steadfast(world: fakes.World) -> fakes.FakeWish:
    return fakes.FakeWish(world.clock, replaced=False)


def hooked_node() -> fakes.World:
    return scenes.hooked(scenes.busy_node())


def journal(world: fakes.World) -> status.Journal:
    return status.Journal.from_json(world.annotations[cluster.JOURNAL_ANNOTATION])


def is_as_before(world: fakes.World, before: tuple[model.Gpu, ...]) -> bool:
    return planner.restore(world.gpus, [gpu.snapshot for gpu in before]).is_empty


def test_hooks_run_before_the_taint_before_the_steps_and_before_the_plugin_returns() -> None:
    world = hooked_node()
    seen: list[tuple[str, str]] = []

    def note() -> None:
        if world.log[-1] == "hooks.run":
            seen.append((world.told[-1], "closed" if world.has_hold_taint else "open"))

    world.on_call = note
    outcome = scenes.run(world, LAYOUT)

    assert outcome.state is model.State.SUCCESS
    assert world.hooked == [START, CONFIG, EXIT]
    assert [where for _, where in seen] == ["open", "closed", "closed"]
    assert seen[0][0] == "running the apply-start hooks"
    assert seen[1][0].startswith("running 5 steps") or "steps on the GPUs" in seen[1][0]
    calls = world.log
    last_hook = max(at for at, call in enumerate(calls) if call == "hooks.run")
    assert max(at for at, call in enumerate(calls) if call == "gpus.execute") < last_hook
    assert calls.index("host.refresh") < last_hook
    assert "restarting the device plugin" in world.told
    scenes.assert_nothing_taken(world)


def test_with_a_switch_of_the_mode_all_four_points_come_in_order() -> None:
    world = scenes.hooked(scenes.node())
    executed: list[int] = []
    world.on_call = lambda: executed.append(len(world.executed))

    assert scenes.run(world, "all-1g.5gb").state is model.State.SUCCESS

    assert world.hooked == [START, "mode", CONFIG, EXIT]
    executed_types = [type(step) for step in world.executed]
    assert executed_types[:2] == [steps.SetMode, steps.SetMode]
    at = [executed[n] for n, call in enumerate(world.log) if call == "hooks.run"]
    assert at == [0, 0, 2, len(executed_types)]


def test_hooks_are_told_of_the_layout() -> None:
    world = hooked_node()
    scenes.run(world, LAYOUT)

    assert world.hook_environment == {
        "MIG_PARTED_HOOKS_FILE": "hooks.yaml",
        "MIG_PARTED_SELECTED_CONFIG": LAYOUT,
    }


def test_where_nothing_changes_the_agent_runs_no_hook_as_the_peers_does_not() -> None:
    world = scenes.hooked(scenes.node(layout="all-balanced"))

    outcome = scenes.run(world, "all-balanced")

    assert outcome.reason is errors.Reason.ALREADY_APPLIED
    assert world.hooked == []


@pytest.mark.parametrize("point", [START, CONFIG])
def test_a_hook_that_fails_before_the_change_is_in_force_brings_everything_back(
    point: str,
) -> None:
    world = hooked_node()
    world.broken_hooks = {point}
    before = world.gpus

    outcome = scenes.run(world, LAYOUT)

    assert outcome.reason is errors.Reason.HOOK_FAILED
    assert outcome.message.startswith(f"{point} failed")
    assert outcome.should_retry
    assert world.hooked == ([START] if point == START else [START, CONFIG, EXIT])
    assert is_as_before(world, before)
    assert ("workloads.evict" in world.log) is (point != START)
    scenes.assert_nothing_taken(world)
    world.broken_hooks = set()
    assert scenes.run(world, LAYOUT).state is model.State.SUCCESS


def test_a_hook_that_fails_between_mode_and_instances_brings_the_mode_back() -> None:
    world = scenes.hooked(scenes.node())
    world.broken_hooks = {CONFIG}
    before = world.gpus

    outcome = scenes.run(world, "all-1g.5gb")

    assert outcome.reason is errors.Reason.HOOK_FAILED
    assert "the instances from before are back" in outcome.message
    assert world.hooked == [START, "mode", CONFIG, EXIT]
    assert is_as_before(world, before)
    scenes.assert_nothing_taken(world)


def test_a_last_hook_that_fails_leaves_the_layout_and_is_tried_again() -> None:
    world = hooked_node()
    world.broken_hooks = {EXIT}
    ours = scenes.reconciler(world)

    outcome = ours.run(LAYOUT, steadfast(world))

    assert outcome.reason is errors.Reason.HOOK_FAILED
    assert outcome.is_unfinished
    assert journal(world).exit_hook
    assert not world.is_unschedulable
    assert cluster.PAUSED_VALUE not in world.labels.values()
    world.broken_hooks = set()
    executed = len(world.executed)

    again = ours.run(LAYOUT, steadfast(world), attempt=2)

    assert again.state is model.State.SUCCESS
    assert len(world.executed) == executed
    assert world.hooked == [START, CONFIG, EXIT, EXIT]
    scenes.assert_nothing_taken(world)


def test_the_reason_of_a_failing_change_is_not_hidden_by_a_failing_last_hook() -> None:
    world = hooked_node()
    world.broken_hooks = {EXIT}
    world.step_error = scenes.refuse(steps.CreateGpuInstance, times=1)

    outcome = scenes.run(world, LAYOUT)

    assert outcome.reason is errors.Reason.INSUFFICIENT_RESOURCES
    assert "exit failed" in outcome.message
    assert world.hooked == [START, CONFIG, EXIT]


def test_a_drain_that_fails_still_comes_to_the_last_point() -> None:
    world = hooked_node()
    world.budgets["victim"] = "budget 'pdb-a' allows no disruption"

    outcome = scenes.run(world, LAYOUT)

    assert outcome.reason is errors.Reason.DRAIN_TIMEOUT
    assert world.hooked == [START, EXIT]
    scenes.assert_nothing_taken(world)


@pytest.mark.parametrize(
    ("text", "reason", "said"),
    [
        ("hooks: {apply: []}", errors.Reason.INVALID_CONFIG, "hooks.yaml:1:9"),
        (scenes.HOOKS, errors.Reason.HOOK_FAILED, "hooks.yaml:6:32: program config"),
    ],
)
def test_what_cannot_be_run_is_told_before_anything_is_touched(
    text: str, reason: errors.Reason, said: str
) -> None:
    world = hooked_node()
    world.hooks = text
    world.missing_hooks = {CONFIG}
    pods = dict(world.pods)

    outcome = scenes.run(world, LAYOUT)

    assert outcome.reason is reason
    assert said in outcome.message
    assert world.states == ["failed"]
    assert (world.pods, world.hooked, world.executed) == (pods, [], [])
    scenes.assert_nothing_taken(world)


def test_a_program_that_this_change_does_not_run_may_be_missing() -> None:
    world = hooked_node()
    world.missing_hooks = {"mode"}

    assert scenes.run(world, LAYOUT).state is model.State.SUCCESS


def killed_with_hooks(at: str) -> fakes.World:
    """Return a node whose agent was killed while a hook ran."""
    world = hooked_node()

    def kill() -> None:
        due = {START: 0, CONFIG: 1, EXIT: 2}[at]
        if world.log[-1] == "hooks.run" and world.log.count("hooks.run") == due + 1:
            raise scenes.Killed

    world.on_call = kill
    with pytest.raises(scenes.Killed):
        scenes.run(world, LAYOUT)
    world.on_call = lambda: None
    return world


@pytest.mark.parametrize("at", [START, CONFIG, EXIT])
def test_whoever_comes_after_a_kill_in_a_hook_pays_what_is_owed(at: str) -> None:
    world = killed_with_hooks(at)
    assert journal(world).exit_hook
    successor = scenes.reconciler(world)

    successor.recover(None)
    successor.rest()

    assert world.hooked[-1] == EXIT
    scenes.assert_nothing_taken(world)


@pytest.mark.parametrize("at", [START, CONFIG, EXIT])
def test_whoever_carries_on_after_a_kill_in_a_hook_comes_to_the_last_point_once(
    at: str,
) -> None:
    world = killed_with_hooks(at)
    successor = scenes.reconciler(world)

    successor.recover(LAYOUT)
    outcome = successor.run(LAYOUT, steadfast(world))

    assert outcome.state is model.State.SUCCESS
    assert world.hooked.count(EXIT) == 1
    scenes.assert_nothing_taken(world)


def test_what_is_owed_is_forgotten_where_the_owner_has_taken_the_hooks_away() -> None:
    world = killed_with_hooks(CONFIG)
    world.hooks = ""
    successor = scenes.reconciler(world)

    successor.recover(LAYOUT)

    assert successor.run(LAYOUT, steadfast(world)).state is model.State.SUCCESS
    assert cluster.JOURNAL_ANNOTATION not in world.annotations


def test_a_hooks_file_that_went_bad_meanwhile_is_told_and_what_is_owed_stays_so() -> None:
    world = killed_with_hooks(CONFIG)
    world.hooks = "hooks: ["
    successor = scenes.reconciler(world)

    successor.recover(None)

    assert any("hooks.yaml:2:1" in each for each in world.messages)
    assert journal(world).exit_hook


def test_a_hook_gives_signs_of_life() -> None:
    world = hooked_node()
    lives: list[int] = []

    class Listener(instrumentation.Telemetry):
        def still_working(self) -> None:
            lives.append(len(world.log))

    ours = scenes.reconciler(world, telemetry=Listener())

    assert isinstance(ours.run(LAYOUT, steadfast(world)), outcomes.Outcome)
    assert len(lives) >= 3
