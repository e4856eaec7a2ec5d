"""Strike an agent at every point of a scenario, and judge what its successor makes of it."""

import collections
import dataclasses
import itertools
import signal
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from mig_manager.core import model
from mig_manager.core.node import cluster
from mig_manager.sandbox.driver import states
from mig_manager.sandbox.node import objects
from tests import journals
from tests.crash import points as points_
from tests.crash import scenarios, stage
from tests.simulated_rig import devices

_MOST_PLAYS = 4
_GRACE_S = 30.0
_CONVERGE_S = 20.0
_TERMINAL = (model.State.SUCCESS, model.State.FAILED)

Aftermath = scenarios.Aftermath
Recorder = Callable[[scenarios.Scenario], "Recording"]
Shape = tuple[tuple[bool, bool, tuple[object, ...]], ...]
"""Mode, pending mode and instances of each GPU, without what the driver gives at will."""
Ends = Collection[tuple[str | None, str | None, Shape]]
"""How a node may be in the end: its state, its applied layout, and its GPUs."""


class Undisturbed(NamedTuple):
    """An undisturbed run, and what it left."""

    points: tuple[str, ...]
    """Where its agent is struck, in their order.

    After each call that may change something, and after the first of the looks that follow it.
    From outside, the moment before a call equals the one after the call that came before.
    """
    gpus: tuple[states.GpuState, ...]
    serials: stage.Serials


class Recording(NamedTuple):
    """What a scenario is without a disturbance."""

    start: stage.Start
    own: Undisturbed
    other: Undisturbed | None
    """With the other layout, where there is one."""
    cured: Undisturbed
    """Without what makes it fail."""


class Verdict(NamedTuple):
    point: str
    is_struck: bool
    """Whether our signal met the agent at that point, and nothing else ended it."""
    phase: str = ""
    """What the node said then."""
    problems: tuple[str, ...] = ()
    plays: int = 1
    """How often it was played until the agent came to its point."""
    log: str = ""

    def __str__(self) -> str:
        return f"{self.point}: {'; '.join(self.problems)}\n{self.log}"


def record(scenario: scenarios.Scenario) -> Recording:
    """Play a scenario, and what leads to it, without a disturbance."""
    start = _start_of(scenario)
    own = _undisturbed(scenario, start)
    # Its short waits are there to be over in vain.
    well = dataclasses.replace(
        scenario, faults=(), guarded="", options=(), ends=model.State.SUCCESS
    )
    instead = dataclasses.replace(well, layout=scenario.other)
    return Recording(
        start=start,
        own=own,
        other=_undisturbed(instead, start) if scenario.other else None,
        cured=own if scenario.ends is model.State.SUCCESS else _undisturbed(well, start),
    )


def _start_of(scenario: scenarios.Scenario) -> stage.Start:
    bare = dataclasses.replace(scenario, guarded="", is_cordoned=False, options=())
    with stage.Stage(bare, None) as rig:
        keys = {cluster.CONFIG_LABEL, cluster.STATE_LABEL, cluster.APPLIED_LABEL}
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


def _undisturbed(scenario: scenarios.Scenario, start: stage.Start) -> Undisturbed:
    with stage.Stage(scenario, start) as rig:
        rig.label(scenario.layout)
        agent = rig.spawn()
        rig.wait(lambda: agent.has_served, f"the end of {scenario.name}")
        problem = f"{rig.status()}\n{rig.last_words()}"
        assert rig.status()["state"] == scenario.ends.value, problem
        points = (each for each in agent.points() if each.startswith("after "))
        return Undisturbed(
            points=tuple(point for point in points if not points_.is_repeated(point)),
            gpus=rig.state.read().gpus,
            serials=rig.serials(),
        )


def play(
    scenario: scenarios.Scenario,
    recording: Recording,
    *,
    point: str,
    aftermath: Aftermath = Aftermath.RESTART,
    strike_with: signal.Signals = signal.SIGKILL,
) -> Verdict:
    """Strike an agent at a point, and let another one begin where it ended.

    A case is played again if its agent did not come to the point: a wait may have been over before
    its first poll.
    """
    strike = _kill if strike_with is signal.SIGKILL else _stop
    for plays in itertools.count(1):
        with stage.Stage(scenario, recording.start) as rig:
            rig.label(scenario.layout)
            verdict = strike(rig, point)._replace(plays=plays)
            if verdict.is_struck and not verdict.problems:
                _let_pass(aftermath, rig)
                problems = _converged(rig, rig.spawn(), recording, aftermath)
                verdict = verdict._replace(problems=problems)
            if verdict.problems:
                return verdict._replace(log=rig.last_words())
        if verdict.is_struck or plays == _MOST_PLAYS:
            return verdict
    raise AssertionError


def _kill(rig: stage.Stage, point: str) -> Verdict:
    agent = rig.spawn(strike_at=point)
    rig.wait(lambda: agent.is_gone() or agent.has_served, f"the end at {point}")
    if not agent.is_gone():
        agent.kill()
        return Verdict(point, is_struck=False)
    ended = agent.status, agent.points()[-1:]
    if ended != (-signal.SIGKILL, [point]):
        return Verdict(point, is_struck=False, problems=(f"not our kill ended it, but {ended}",))
    return Verdict(point, is_struck=True, phase=rig.phase())


def _stop(rig: stage.Stage, point: str) -> Verdict:
    agent = rig.spawn(strike_at=point, strike_with=signal.SIGTERM)
    rig.wait(lambda: point in agent.points() or agent.has_served, f"the way to {point}")
    phase, problems = rig.phase(), []
    is_struck = point in agent.points()
    if is_struck and not agent.is_gone(_GRACE_S):
        problems = [f"it still runs {_GRACE_S:g} s after SIGTERM"]
    elif is_struck:
        if status := agent.status:
            problems.append(f"exit status {status}")
        problems += _taken(rig, is_stopped=True)
        if objects.labels(rig.node()).get(cluster.STATE_LABEL) == model.State.PENDING.value:
            problems.append("the node says pending")
    agent.kill()
    return Verdict(point, is_struck=is_struck, phase=phase, problems=tuple(problems))


def goes_on(rig: stage.Stage, recording: Recording) -> tuple[str, ...]:
    """Start another agent, which has a real GPU worker; return what it leaves to be desired."""
    return _converged(rig, rig.spawn(has_worker=True), recording, Aftermath.RESTART)


def _let_pass(aftermath: Aftermath, rig: stage.Stage) -> None:
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
    rig: stage.Stage, successor: stage.Agent, recording: Recording, aftermath: Aftermath
) -> tuple[str, ...]:
    """Wait for the successor to have nothing to do; return what is not as it must be then."""
    if not rig.comes_true(lambda: successor.has_served, stage.WAIT_S):
        return (f"no end within {stage.WAIT_S:g} s", f"status {dict(rig.status())}")
    problems: list[str] = []

    def is_well() -> bool:
        problems[:] = _problems(rig, recording, aftermath)
        return not problems

    # The plugin of a failed change, and kubelet with it, come back when they come back.
    rig.comes_true(is_well, _CONVERGE_S)
    return tuple(problems)


def _problems(rig: stage.Stage, recording: Recording, aftermath: Aftermath) -> Iterable[str]:
    yield from _taken(rig)
    labels, gpus = objects.labels(rig.node()), rig.state.read().gpus
    published = labels.get(cluster.STATE_LABEL), labels.get(cluster.APPLIED_LABEL)
    exact = _shape(gpus, is_exact=True)
    seen = {(*published, exact), (*published, _shape(gpus, is_exact=False))}
    if seen.isdisjoint(_ends(rig.scenario, recording, aftermath)):
        yield f"published {published}, GPUs {exact}, status {dict(rig.status())}"
    if not rig.is_offering():
        yield f"allocatable: {rig.sandbox.devices.allocatable()}, not {sorted(devices(rig.state))}"
    for gpu in gpus:
        idle = [gi.instance_id for gi in gpu.instances if not gi.compute_instances]
        if idle:
            yield f"GPU instances without compute instance: {idle}"
    if aftermath is not Aftermath.REBOOT:
        yield from _hurt(rig, recording, aftermath)


def _taken(rig: stage.Stage, *, is_stopped: bool = False) -> list[str]:
    node = rig.node()
    problems = []
    if not rig.are_deploy_labels_as_before():
        problems.append(f"deploy labels: {dict(objects.labels(node))}")
    if bool(node["spec"].get("unschedulable")) != rig.scenario.is_cordoned:
        problems.append(f"unschedulable: {node['spec'].get('unschedulable')}")
    if any(taint["key"] == cluster.HOLD_TAINT for taint in objects.taints(node)):
        problems.append("the hold taint is there")
    if rig.owes_hooks():
        problems.append("the hooks of the end are owed")
    journal = objects.annotations(node).get(cluster.JOURNAL_ANNOTATION)
    if not journals.lists_nothing(journal, is_stopped=is_stopped):
        problems.append(f"a journal: {journal}")
    return problems


def _ends(scenario: scenarios.Scenario, recording: Recording, aftermath: Aftermath) -> Ends:
    """Return how the node may be in the end.

    A layout is active wherever its instances lie; a change that failed has left no trace, so that
    they lie where they lay.
    """
    was, success = scenario.was, model.State.SUCCESS.value
    before, as_before = (_shape(recording.start.gpus, is_exact=each) for each in (True, False))
    done = _shape(recording.own.gpus, is_exact=False)
    match aftermath:
        case Aftermath.OTHER_LAYOUT:
            assert recording.other is not None
            return {(success, scenario.other, _shape(recording.other.gpus, is_exact=False))}
        case Aftermath.OLD_LAYOUT:
            return {(success, was, as_before)}
        case Aftermath.NO_LAYOUT:
            # What is active but not yet verified has no name once the label is gone.
            named = ((scenario.layout, done), (None, done), (was or None, before))
            return {(s.value, *each) for s, each in itertools.product(_TERMINAL, named)}
        case Aftermath.REBOOT:
            return {(success, scenario.layout, _shape(recording.cured.gpus, is_exact=False))}
        case Aftermath.RESTART | Aftermath.CORRUPT_JOURNAL:
            if scenario.ends is model.State.SUCCESS:
                return {(success, scenario.layout, done)}
            return {(model.State.FAILED.value, was or None, before)}


def _hurt(rig: stage.Stage, recording: Recording, aftermath: Aftermath) -> Iterable[str]:
    """Name the pods that were disturbed without need."""
    spared = {*rig.serials_before.items()} & {*recording.own.serials.items()}
    if aftermath is Aftermath.OTHER_LAYOUT and recording.other:
        spared &= {*recording.other.serials.items()}
    now, in_use, ready = rig.serials(), rig.devices_by_pod(), rig.ready_pods()
    for pod in rig.pods:
        if not pod.device_ids or not pod.device_ids <= dict(spared).keys():
            continue
        found = ready.get(pod.name)
        if found is None or objects.uid(found) != pod.uid or objects.restart_count(found):
            yield f"{pod.name} was disturbed"
        elif in_use.get(pod.name) != pod.device_ids:
            yield f"{pod.name} has {in_use.get(pod.name)}, not {pod.device_ids}"
        elif any(now.get(id_) != rig.serials_before[id_] for id_ in pod.device_ids):
            yield f"the instance of {pod.name} was destroyed and made again"


def _shape(gpus: Sequence[states.GpuState], *, is_exact: bool) -> Shape:
    """Return what is on the GPUs, with or without where the instances lie."""

    def where(placement: model.Placement) -> tuple[int, ...]:
        return (placement.start,) if is_exact else ()

    def inside(gi: states.GpuInstance) -> tuple[object, ...]:
        return tuple((ci.profile_id, *where(ci.placement)) for ci in gi.compute_instances)

    def instances(gpu: states.GpuState) -> tuple[object, ...]:
        return tuple(
            sorted((gi.profile_id, *where(gi.placement), inside(gi)) for gi in gpu.instances)
        )

    return tuple((gpu.is_enabled, gpu.is_pending, instances(gpu)) for gpu in gpus)


def summary(verdicts: Sequence[Verdict]) -> dict[str, object]:
    """Count what became of the cases, in all and by the phase of each strike."""
    phases: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for verdict in verdicts:
        if verdict.is_struck:
            phases[verdict.phase]["struck"] += 1
            phases[verdict.phase]["converged"] += not verdict.problems
    total = sum(phases.values(), collections.Counter[str]())
    return {
        "tried": len(verdicts),
        "struck": total["struck"],
        "converged": total["converged"],
        "played again": sum(verdict.plays - 1 for verdict in verdicts),
        "phases": {name: dict(counts) for name, counts in phases.items()},
    }
