"""Strike an agent at every point of a scenario, and judge what its successor makes of it."""

import dataclasses
import itertools
import signal
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from mig_manager.core import model
from mig_manager.core.node import well_known
from mig_manager.sandbox.node import objects
from tests import changes
from tests.crash import points as points_
from tests.crash import scenarios, stage
from tests.node.simulated_rig import devices

_RECORDINGS = 3
_GRACE_S = 60.0
_CONVERGE_S = 60.0
_TERMINAL = (model.State.SUCCESS, model.State.FAILED)

Aftermath = scenarios.Aftermath
Recorder = Callable[[scenarios.Scenario], "Recording"]
Ends = Collection[tuple[str | None, str | None, changes.Gpus]]
"""How a node may be in the end: its state, its applied layout, and its GPUs."""


class Recording(NamedTuple):
    """What a scenario is without a disturbance."""

    start: stage.Start
    points: tuple[str, ...]
    """Where the agent is struck, in their order, if it always comes there.

    After each call that may change something, and after the first of each read that follows it.
    From outside, the moment before a call equals the one after the call that came before. So do
    the moments before the first change: the last of them stands for all.
    """


class Verdict(NamedTuple):
    phase: str
    """What the node said when our signal met the agent at its point."""
    problems: tuple[str, ...] = ()


def record(scenario: scenarios.Scenario) -> Recording:
    """Play a scenario, and what leads to it, without a disturbance.

    Whether kubelet or the agent reports new devices first, and whether a wait polls at all,
    depends on their speed; so it is played several times.
    """
    start = _start_of(scenario)
    first, *others = (_points(scenario, start) for _ in range(_RECORDINGS))
    points = tuple(point for point in first if all(point in each for each in others))
    return Recording(start=start, points=points)


def _points(scenario: scenarios.Scenario, start: stage.Start) -> tuple[str, ...]:
    with stage.CrashStage(scenario, start) as rig:
        assert rig.geometry() == scenario.before
        rig.label(scenario.layout)
        agent = rig.spawn()
        rig.wait(lambda: agent.has_served, f"the end of {scenario.name}")
        problem = f"{rig.status()}\n{rig.last_words()}"
        assert rig.status()["state"] == scenario.ends.value, problem
        assert rig.status()["reason"] == scenario.reason.value, problem
        return points_.chosen(agent.points())


def _start_of(scenario: scenarios.Scenario) -> stage.Start:
    bare = dataclasses.replace(scenario, guarded="", is_cordoned=False, options=())
    with stage.CrashStage(bare, None) as rig:
        keys = {well_known.CONFIG_LABEL, well_known.STATE_LABEL, well_known.APPLIED_LABEL}
        if scenario.was:
            rig.label(scenario.was)
            agent = rig.spawn()
            rig.wait(lambda: agent.has_served, f"layout {scenario.was}")
            assert rig.status()["state"] == model.State.SUCCESS.value, rig.last_words()
            agent.kill()
        node, now = rig.node(), rig.state.read()
        return stage.Start(
            gpus=now.gpus,
            next_serial=now.next_serial,
            labels={k: v for k, v in objects.labels(node).items() if k in keys},
            annotations=objects.annotations(node),
        )


def play(play: scenarios.PlayedScenario, recording: Recording, point: str) -> Verdict | None:
    """Strike an agent at a point, and let another one begin where it ended.

    Returns:
        None if the agent did not come to the point.
    """
    strike = _kill if play.strike_with is signal.SIGKILL else _stop
    with stage.CrashStage(play.scenario, recording.start) as rig:
        rig.label(play.scenario.layout)
        verdict = strike(rig, point)
        if verdict and not verdict.problems:
            _let_pass(play.aftermath, rig)
            verdict = verdict._replace(problems=_converged(rig, rig.spawn(), play.aftermath))
        if verdict and verdict.problems:
            verdict = verdict._replace(problems=(*verdict.problems, rig.last_words()))
        return verdict


def _kill(rig: stage.CrashStage, point: str) -> Verdict | None:
    agent = rig.spawn(strike_at=point)
    rig.wait(lambda: agent.is_gone() or agent.has_served, f"the end at {point}")
    if not agent.is_gone():
        agent.kill()
        return None
    ended = agent.status, agent.points()[-1:]
    is_ours = ended == (-signal.SIGKILL, [point])
    return Verdict(rig.phase(), () if is_ours else (f"not our kill ended it, but {ended}",))


def _stop(rig: stage.CrashStage, point: str) -> Verdict | None:
    agent = rig.spawn(strike_at=point, strike_with=signal.SIGTERM)
    rig.wait(lambda: point in agent.points() or agent.has_served, f"the way to {point}")
    if point not in agent.points():
        agent.kill()
        return None
    phase, problems = rig.phase(), []
    if agent.is_gone(_GRACE_S):
        if status := agent.status:
            problems.append(f"exit status {status}")
        problems += _taken(rig, is_stopped=True)
        if objects.labels(rig.node()).get(well_known.STATE_LABEL) == model.State.PENDING.value:
            problems.append("the node says pending")
    else:
        problems = [f"it still runs {_GRACE_S:g} s after SIGTERM"]
    agent.kill()
    return Verdict(phase, tuple(problems))


def goes_on(rig: stage.CrashStage) -> tuple[str, ...]:
    """Start another agent, which has a real GPU worker; return what it leaves to be desired."""
    return _converged(rig, rig.spawn(has_worker=True), Aftermath.RESTART)


def _let_pass(aftermath: Aftermath, rig: stage.CrashStage) -> None:
    match aftermath:
        case Aftermath.RESTART:
            pass
        case Aftermath.REBOOT:
            rig.reboot()
        case Aftermath.OTHER_LAYOUT:
            rig.label(rig.scenario.other)
        case Aftermath.NO_LAYOUT:
            rig.label(None)
        case Aftermath.OLD_LAYOUT:
            rig.label(rig.scenario.was)
        case Aftermath.CORRUPT_JOURNAL:
            rig.spoil_journal()


# -- judging ------------------------------------------------------------------------------------


def _converged(
    rig: stage.CrashStage, successor: stage.AgentProcess, aftermath: Aftermath
) -> tuple[str, ...]:
    """Wait for the successor to have nothing to do; return what is not as it must be then."""
    if not rig.comes_true(lambda: successor.has_served, stage.WAIT_S):
        return (f"no end within {stage.WAIT_S:g} s", f"status {dict(rig.status())}")
    problems: list[str] = []

    def is_well() -> bool:
        problems[:] = _problems(rig, aftermath)
        return not problems

    # The plugin of a failed change, and kubelet with it, come back when they come back.
    rig.comes_true(is_well, _CONVERGE_S)
    return tuple(problems)


def _problems(rig: stage.CrashStage, aftermath: Aftermath) -> Iterable[str]:
    yield from _taken(rig)
    labels, gpus = objects.labels(rig.node()), rig.geometry()
    end = labels.get(well_known.STATE_LABEL), labels.get(well_known.APPLIED_LABEL), gpus
    if end not in _ends(rig.scenario, aftermath):
        yield f"the end {end}, status {dict(rig.status())}"
    if not rig.is_offering():
        allocatable = rig.sandboxes[0].devices.allocatable()
        yield f"allocatable: {allocatable}, not {sorted(devices(rig.state))}"
    if aftermath is not Aftermath.REBOOT:
        yield from _hurt(rig, aftermath)


def _taken(rig: stage.CrashStage, *, is_stopped: bool = False) -> list[str]:
    hooks = ["the hooks of the end are owed"] if rig.owes_hooks() else []
    return hooks + rig.remaining(
        is_stopped=is_stopped, is_cordoned=rig.scenario.is_cordoned, deployed=rig.deployed
    )


def _ends(scenario: scenarios.Scenario, aftermath: Aftermath) -> Ends:
    """Return how the node may be in the end; a change that failed has not moved an instance."""
    was, success, failed = (
        scenario.was or None,
        model.State.SUCCESS.value,
        model.State.FAILED.value,
    )
    done = scenario.layout, scenario.after
    match aftermath:
        case Aftermath.OTHER_LAYOUT:
            return {(success, scenario.other, scenario.gpus_with(scenario.other))}
        case Aftermath.OLD_LAYOUT:
            return {(success, was, scenario.before)}
        case Aftermath.NO_LAYOUT:
            # What is active but not yet verified has no name once the label is gone.
            named = (done, (None, scenario.after), (was, scenario.before))
            return {(state, *each) for state, each in itertools.product((success, failed), named)}
        case Aftermath.REBOOT:
            return {(success, *done)}
        case Aftermath.RESTART | Aftermath.CORRUPT_JOURNAL:
            if scenario.ends is model.State.SUCCESS:
                return {(success, *done)}
            return {(failed, was, scenario.before)}


def _hurt(rig: stage.CrashStage, aftermath: Aftermath) -> Iterable[str]:
    """Name the pods that were disturbed although the change does not affect their devices."""
    spared = changes.each(rig.scenario.before) & changes.each(rig.scenario.changed)
    if aftermath is Aftermath.OTHER_LAYOUT:
        spared &= changes.each(rig.scenario.gpus_with(rig.scenario.other))
    now, in_use, ready = rig.serials(), rig.devices_by_pod(), rig.ready_pods()
    for pod in rig.pods:
        if not spared.issuperset(pod.devices):
            continue
        found = ready.get(pod.name)
        if found is None or objects.uid(found) != pod.uid or objects.restart_count(found):
            yield f"{pod.name} was disturbed"
        elif in_use.get(pod.name) != pod.device_ids:
            yield f"{pod.name} has {in_use.get(pod.name)}, not {pod.device_ids}"
        elif any(now.get(id_) != rig.serials_before[id_] for id_ in pod.device_ids):
            yield f"the instance of {pod.name} was destroyed and made again"
