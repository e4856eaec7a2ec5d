"""Strike an agent at every point of a scenario, and judge what its successor makes of it."""

import collections
import dataclasses
import signal
from collections.abc import Callable, Iterable, Sequence

from mig_manager.core import model
from mig_manager.core.node import cluster
from mig_manager.sandbox.driver import states
from mig_manager.sandbox.node import objects
from tests.crash import forkserver, scenarios, stage
from tests.crash import points as points_

_MOST_PLAYS = 4
_GRACE_S = 30.0
_CONVERGE_S = 20.0
_TERMINAL = frozenset({model.State.SUCCESS.value, model.State.FAILED.value})

Aftermath = scenarios.Aftermath
Recorder = Callable[[scenarios.Scenario], "Recording"]
Shape = tuple[tuple[bool, bool, tuple[object, ...]], ...]
"""Mode, pending mode and instances of each GPU, without what the driver gives at will."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Undisturbed:
    """An undisturbed run, and what it left."""

    points: tuple[str, ...]
    gpus: tuple[states.GpuState, ...]
    serials: stage.Serials


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """What a scenario is without a disturbance."""

    start: stage.Start
    own: Undisturbed
    other: Undisturbed | None
    """With the other layout, where there is one."""
    cured: Undisturbed
    """Without what makes it fail."""

    @property
    def points(self) -> tuple[str, ...]:
        """Where its agent is struck, in their order.

        After each call that may change something, and after the first of the looks that follow
        it. From outside, the moment before a call equals the one after the call that came
        before.
        """
        return self.own.points


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How a node may be in the end."""

    states: frozenset[str]
    applied: frozenset[str | None]
    shape: Shape
    is_exact: bool
    """Whether instances lie where they lay."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of one case."""

    point: str
    plays: int
    """How often it was played until the agent came to its point."""
    is_struck: bool
    """Whether our signal met the agent at that point, and nothing else ended it."""
    phase: str
    """What the node said then."""
    problems: tuple[str, ...]
    log: str = ""

    def __str__(self) -> str:
        return f"{self.point}: {'; '.join(self.problems)}\n{self.log}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """One play of a case up to the end of the struck agent."""

    is_struck: bool
    phase: str = ""
    problems: tuple[str, ...] = ()
    """What is wrong already."""


def record(scenario: scenarios.Scenario, forks: forkserver.ForkServer) -> Recording:
    """Play a scenario, and what leads to it, without a disturbance."""
    start = _start_of(scenario, forks)
    own = _undisturbed(scenario, start, forks)
    # Its short waits are there to be over in vain.
    well = dataclasses.replace(
        scenario, faults=(), guarded="", options=(), ends=model.State.SUCCESS
    )
    instead = dataclasses.replace(well, layout=scenario.other)
    return Recording(
        start=start,
        own=own,
        other=_undisturbed(instead, start, forks) if scenario.other else None,
        cured=own if scenario.ends is model.State.SUCCESS else _undisturbed(well, start, forks),
    )


def _start_of(scenario: scenarios.Scenario, forks: forkserver.ForkServer) -> stage.Start:
    bare = dataclasses.replace(scenario, guarded="", is_cordoned=False, options=())
    with stage.Stage(bare, None, forks) as rig:
        keys = {cluster.CONFIG_LABEL, cluster.STATE_LABEL, cluster.APPLIED_LABEL}
        if scenario.was:
            rig.label(scenario.was)
            agent = rig.start_agent()
            rig.wait(lambda: agent.has_served, f"layout {scenario.was}")
            assert rig.status()["state"] == model.State.SUCCESS.value, rig.last_words()
            agent.process.kill()
        node = rig.node()
        now = rig.state.read()
        return stage.Start(
            gpus=now.gpus,
            next_serial=now.next_serial,
            labels={k: v for k, v in objects.labels(node).items() if k in keys},
            annotations=objects.annotations(node),
        )


def _undisturbed(
    scenario: scenarios.Scenario, start: stage.Start, forks: forkserver.ForkServer
) -> Undisturbed:
    with stage.Stage(scenario, start, forks) as rig:
        rig.label(scenario.layout)
        agent = rig.start_agent()
        rig.wait(lambda: agent.has_served, f"the end of {scenario.name}")
        problem = f"{rig.status()}\n{rig.last_words()}"
        assert rig.status()["state"] == scenario.ends.value, problem
        points = [
            point
            for point in agent.points()
            if point.startswith("after ") and not points_.is_repeated(point)
        ]
        return Undisturbed(points=tuple(points), gpus=rig.state.read().gpus, serials=rig.serials())


def play(
    scenario: scenarios.Scenario,
    recording: Recording,
    forks: forkserver.ForkServer,
    *,
    point: str,
    aftermath: Aftermath = Aftermath.RESTART,
) -> Verdict:
    """Kill an agent at a point, and let another one begin where it ended."""
    return _play(scenario, recording, forks, point=point, strike=_kill, aftermath=aftermath)


def play_stop(
    scenario: scenarios.Scenario,
    recording: Recording,
    forks: forkserver.ForkServer,
    *,
    point: str,
) -> Verdict:
    """Ask an agent at a point to stop, and let another one begin where it ended."""
    return _play(
        scenario, recording, forks, point=point, strike=_stop, aftermath=Aftermath.RESTART
    )


def _play(
    scenario: scenarios.Scenario,
    recording: Recording,
    forks: forkserver.ForkServer,
    *,
    point: str,
    strike: Callable[[stage.Stage, str], Strike],
    aftermath: Aftermath,
) -> Verdict:
    """Play a case until its agent is struck; a wait may have been over before its first poll."""
    plays, log = 0, ""
    struck = Strike(is_struck=False)
    problems: tuple[str, ...] = ()
    while not (struck.is_struck or problems) and plays < _MOST_PLAYS:
        plays += 1
        with stage.Stage(scenario, recording.start, forks) as rig:
            rig.label(scenario.layout)
            struck = strike(rig, point)
            problems = struck.problems
            if struck.is_struck and not problems:
                _let_pass(aftermath, rig)
                problems = _converged(rig, rig.start_agent(), recording, aftermath)
            log = rig.last_words() if problems else ""
    return Verdict(
        point=point,
        plays=plays,
        is_struck=struck.is_struck,
        phase=struck.phase,
        problems=problems,
        log=log,
    )


def _kill(rig: stage.Stage, point: str) -> Strike:
    agent = rig.start_agent(strike_at=point)
    rig.wait(lambda: agent.process.is_gone() or agent.has_served, f"the end at {point}")
    if not agent.process.is_gone():
        agent.process.kill()
        return Strike(is_struck=False)
    status, last = agent.process.status(), agent.points()[-1:]
    if (status, last) != (-signal.SIGKILL, [point]):
        problem = f"it ended with status {status} at {last}, not by our kill"
        return Strike(is_struck=False, problems=(problem,))
    return Strike(is_struck=True, phase=rig.phase())


def _stop(rig: stage.Stage, point: str) -> Strike:
    agent = rig.start_agent(strike_at=point, strike_with=signal.SIGTERM)
    rig.wait(lambda: point in agent.points() or agent.has_served, f"the way to {point}")
    if point not in agent.points():
        agent.process.kill()
        return Strike(is_struck=False)
    phase = rig.phase()
    problems = _stopped_well(rig, agent)
    agent.process.kill()
    return Strike(is_struck=True, phase=phase, problems=problems)


def goes_on(rig: stage.Stage, recording: Recording) -> tuple[str, ...]:
    """Start another agent, which has a real GPU worker; return what it leaves to be desired."""
    successor = rig.start_agent(has_worker=True)
    return _converged(rig, successor, recording, Aftermath.RESTART)


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


def _stopped_well(rig: stage.Stage, agent: stage.Agent) -> tuple[str, ...]:
    if not agent.process.is_gone(_GRACE_S):
        return (f"it still runs {_GRACE_S:g} s after SIGTERM",)
    status = agent.process.status()
    problems = [f"exit status {status}"] if status else []
    problems += _taken(rig)
    if objects.labels(rig.node()).get(cluster.STATE_LABEL) == model.State.PENDING.value:
        problems.append("the node says pending")
    return tuple(problems)


def _converged(
    rig: stage.Stage, successor: stage.Agent, recording: Recording, aftermath: Aftermath
) -> tuple[str, ...]:
    """Wait for the successor to have nothing to do; return what is not as it must be then."""
    if not rig.comes_true(lambda: successor.has_served, stage.WAIT_S):
        return (f"no end within {stage.WAIT_S:g} s", f"status {dict(rig.status())}")
    found: list[tuple[str, ...]] = [()]

    def is_well() -> bool:
        found[0] = tuple(_problems(rig, recording, aftermath))
        return not found[0]

    # The plugin of a failed change, and kubelet with it, come back when they come back.
    rig.comes_true(is_well, _CONVERGE_S)
    return found[0]


def _problems(rig: stage.Stage, recording: Recording, aftermath: Aftermath) -> Iterable[str]:
    yield from _taken(rig)
    yield from _wrong_end(rig, _ends(rig.scenario, recording, aftermath))
    if not rig.is_offering():
        yield f"allocatable: {rig.sandbox.devices.allocatable()}, not {sorted(rig.existing())}"
    for gpu in rig.state.read().gpus:
        idle = [gi.instance_id for gi in gpu.instances if not gi.compute_instances]
        if idle:
            yield f"GPU instances without compute instance: {idle}"
    if aftermath is not Aftermath.REBOOT:
        yield from _hurt(rig, recording, aftermath)


def _taken(rig: stage.Stage) -> list[str]:
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
    ours = (cluster.JOURNAL_ANNOTATION, cluster.CORDON_ANNOTATION)
    left = objects.annotations(node)
    return [*problems, *(f"{key}: {left[key]}" for key in ours if key in left)]


def _wrong_end(rig: stage.Stage, ends: Sequence[End]) -> Iterable[str]:
    labels = objects.labels(rig.node())
    published = labels.get(cluster.STATE_LABEL), labels.get(cluster.APPLIED_LABEL)
    exact = _shape(rig.state.read().gpus, is_exact=True)
    loose = _shape(rig.state.read().gpus, is_exact=False)
    if not any(
        published[0] in end.states
        and published[1] in end.applied
        and end.shape == (exact if end.is_exact else loose)
        for end in ends
    ):
        yield f"published {published}, GPUs {exact}, status {dict(rig.status())}"


def _ends(
    scenario: scenarios.Scenario, recording: Recording, aftermath: Aftermath
) -> Sequence[End]:
    start = recording.start.gpus
    match aftermath:
        case Aftermath.OTHER_LAYOUT:
            assert recording.other is not None
            return [_active(scenario.other, recording.other.gpus)]
        case Aftermath.OLD_LAYOUT:
            return [_active(scenario.was, start)]
        case Aftermath.NO_LAYOUT:
            # What is active but not yet verified has no name once the label is gone.
            done = _active(scenario.layout, recording.own.gpus)
            applied = frozenset({scenario.layout, None})
            return [
                dataclasses.replace(_undone(scenario, start), states=_TERMINAL),
                dataclasses.replace(done, states=_TERMINAL, applied=applied),
            ]
        case Aftermath.REBOOT:
            return [_active(scenario.layout, recording.cured.gpus)]
        case Aftermath.RESTART | Aftermath.CORRUPT_JOURNAL:
            is_good = scenario.ends is model.State.SUCCESS
            own = recording.own.gpus
            return [_active(scenario.layout, own) if is_good else _undone(scenario, start)]


def _active(layout: str, gpus: Sequence[states.GpuState]) -> End:
    """Return the end with a layout active, wherever its instances lie."""
    return End(
        states=frozenset({model.State.SUCCESS.value}),
        applied=frozenset({layout}),
        shape=_shape(gpus, is_exact=False),
        is_exact=False,
    )


def _undone(scenario: scenarios.Scenario, start: Sequence[states.GpuState]) -> End:
    """Return the end of a change that failed and left no trace."""
    return End(
        states=frozenset({model.State.FAILED.value}),
        applied=frozenset({scenario.was or None}),
        shape=_shape(start, is_exact=True),
        is_exact=True,
    )


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
    return tuple(
        (gpu.is_enabled, gpu.is_pending, tuple(sorted(_instances(gpu, is_exact=is_exact))))
        for gpu in gpus
    )


def _instances(gpu: states.GpuState, *, is_exact: bool) -> Iterable[tuple[object, ...]]:
    for instance in gpu.instances:
        inside = tuple(
            (ci.profile_id, *((ci.placement.start,) if is_exact else ()))
            for ci in instance.compute_instances
        )
        place = (instance.placement.start,) if is_exact else ()
        yield (instance.profile_id, *place, inside)


def summary(verdicts: Sequence[Verdict]) -> dict[str, object]:
    """Count what became of the cases, in all and by the phase of each strike."""
    phases: dict[str, collections.Counter[str]] = {}
    for verdict in verdicts:
        if verdict.is_struck:
            counts = phases.setdefault(verdict.phase, collections.Counter())
            counts["struck"] += 1
            counts["converged"] += not verdict.problems
    return {
        "tried": len(verdicts),
        "struck": sum(counts["struck"] for counts in phases.values()),
        "converged": sum(counts["converged"] for counts in phases.values()),
        "played again": sum(verdict.plays - 1 for verdict in verdicts),
        "phases": {name: dict(counts) for name, counts in phases.items()},
    }
