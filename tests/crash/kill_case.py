"""Kill or stop an agent at a moment of a change, and check how the next agent ends."""

import dataclasses
import itertools
import signal
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from mig_manager.core.objects import well_known
from mig_manager.core.records import run_status
from mig_manager.sandbox.node import objects
from tests.crash import agent_process, changes
from tests.crash.crash_stage import CrashStage, Start
from tests.rigs import layout_table, waiting
from tests.rigs.node.simulated_rig import devices
from tests.rigs.stage import process_moments

_RECORDINGS = 3
_GRACE_S = 60.0
_WAIT_S = 180.0
_CONVERGE_S = 60.0

Downtime = changes.Downtime
Recorder = Callable[[changes.ProcessChange], "Recording"]
Ends = Collection[tuple[str | None, str | None, layout_table.Gpus]]
"""How a node may be in the end: its state, its applied layout, and its GPUs."""


class Recording(NamedTuple):
    """What a change is without a disturbance."""

    start: Start
    moments: tuple[str, ...]
    """Where the agent is struck, in their order, if it always comes there.

    After each call that may change something, and after the first of each read that follows it.
    From outside, the moment before a call equals the one after the call that came before. So do
    the moments before the first change: the last of them stands for all.
    """


class KillResult(NamedTuple):
    phase: str  # of the node when our signal struck the agent at its moment
    problems: tuple[str, ...] = ()


def record(change: changes.ProcessChange) -> Recording:
    """Play a change, and what leads to it, without a disturbance.

    Whether kubelet or the agent reports new devices first, and whether a wait polls at all,
    depends on their speed; so it is played several times.
    """
    start = _start_of(change)
    first, *others = (_moments(change, start) for _ in range(_RECORDINGS))
    moments = tuple(moment for moment in first if all(moment in each for each in others))
    return Recording(start=start, moments=moments)


def _moments(change: changes.ProcessChange, start: Start) -> tuple[str, ...]:
    with CrashStage(change, start) as crash_stage:
        assert crash_stage.devices_in_words() == change.before
        crash_stage.label(change.layout)
        agent = crash_stage.spawn()
        waiting.until(lambda: agent.has_served, f"the end of {change.name}")
        problem = f"{crash_stage.status()}\n{crash_stage.logs()}"
        assert crash_stage.status()["state"] == change.ends.value, problem
        assert crash_stage.status()["reason"] == change.reason.value, problem
        return process_moments.distinct_moments(agent.moments())


def _start_of(change: changes.ProcessChange) -> Start:
    bare = dataclasses.replace(change, guarded_resource="", is_cordoned=False, options=())
    with CrashStage(bare, None) as crash_stage:
        keys = {well_known.CONFIG_LABEL, well_known.STATE_LABEL, well_known.APPLIED_LABEL}
        if change.was:
            crash_stage.label(change.was)
            agent = crash_stage.spawn()
            waiting.until(lambda: agent.has_served, f"layout {change.was}")
            assert crash_stage.status()["state"] == run_status.State.SUCCESS.value, (
                crash_stage.logs()
            )
            agent.kill()
        node, now = crash_stage.node(), crash_stage.state.read()
        return Start(
            gpus=now.gpus,
            next_serial=now.next_serial,
            labels={k: v for k, v in objects.labels(node).items() if k in keys},
            annotations=objects.annotations(node),
        )


def strike_and_restart(
    variant: changes.Variant, recording: Recording, moment: str
) -> KillResult | None:
    """Strike an agent at a moment, and start the next one on the node that it leaves.

    Returns:
        None if the agent did not come to the moment.
    """
    strike = _kill if variant.strike_with is signal.SIGKILL else _stop
    with CrashStage(variant.change, recording.start) as crash_stage:
        crash_stage.label(variant.change.layout)
        result = strike(crash_stage, moment)
        if result and not result.problems:
            _pass_downtime(variant.downtime, crash_stage)
            result = result._replace(
                problems=_problems_at_end(crash_stage, crash_stage.spawn(), variant.downtime)
            )
        if result and result.problems:
            result = result._replace(problems=(*result.problems, crash_stage.logs()))
        return result


def _kill(crash_stage: CrashStage, moment: str) -> KillResult | None:
    agent = crash_stage.spawn(strike_at=moment)
    waiting.until(lambda: agent.is_gone() or agent.has_served, f"the end at {moment}")
    if not agent.is_gone():
        agent.kill()
        return None
    end = agent.status, agent.moments()[-1:]
    is_ours = end == (-signal.SIGKILL, [moment])
    return KillResult(
        crash_stage.phase(), () if is_ours else (f"not our kill ended it, but {end}",)
    )


def _stop(crash_stage: CrashStage, moment: str) -> KillResult | None:
    agent = crash_stage.spawn(strike_at=moment, strike_with=signal.SIGTERM)
    waiting.until(lambda: moment in agent.moments() or agent.has_served, f"the way to {moment}")
    if moment not in agent.moments():
        agent.kill()
        return None
    phase, problems = crash_stage.phase(), []
    if agent.is_gone(_GRACE_S):
        if status := agent.status:
            problems.append(f"exit status {status}")
        problems += _not_restored(crash_stage, is_stopped=True)
        if (
            objects.labels(crash_stage.node()).get(well_known.STATE_LABEL)
            == run_status.State.PENDING.value
        ):
            problems.append("the node says pending")
    else:
        problems = [f"it still runs {_GRACE_S:g} s after SIGTERM"]
    agent.kill()
    return KillResult(phase, tuple(problems))


def recovery_problems(crash_stage: CrashStage) -> tuple[str, ...]:
    """Start another agent, with a real GPU worker; return what is wrong once it rests."""
    return _problems_at_end(crash_stage, crash_stage.spawn(has_worker=True), Downtime.RESTART)


def _pass_downtime(downtime: Downtime, crash_stage: CrashStage) -> None:
    match downtime:
        case Downtime.RESTART:
            pass
        case Downtime.REBOOT:
            crash_stage.reboot()
        case Downtime.OTHER_LAYOUT:
            crash_stage.label(crash_stage.change.other)
        case Downtime.NO_LAYOUT:
            crash_stage.label(None)
        case Downtime.OLD_LAYOUT:
            crash_stage.label(crash_stage.change.was)
        case Downtime.CORRUPT_JOURNAL:
            crash_stage.cut_journal()


# -- what is wrong at the end -----------------------------------------------------------------


def _problems_at_end(
    crash_stage: CrashStage, successor: agent_process.AgentProcess, downtime: Downtime
) -> tuple[str, ...]:
    """Wait until the next agent has nothing to do; return what is wrong then."""
    if not waiting.comes_true(lambda: successor.has_served, within_s=_WAIT_S):
        return (f"no end within {_WAIT_S:g} s", f"status {dict(crash_stage.status())}")
    problems: list[str] = []

    def is_converged() -> bool:
        problems[:] = _problems(crash_stage, downtime)
        return not problems

    # The plugin of a failed change, and kubelet with it, come back when they come back.
    waiting.comes_true(is_converged, within_s=_CONVERGE_S)
    return tuple(problems)


def _problems(crash_stage: CrashStage, downtime: Downtime) -> Iterable[str]:
    yield from _not_restored(crash_stage)
    labels, gpus = objects.labels(crash_stage.node()), crash_stage.devices_in_words()
    end = labels.get(well_known.STATE_LABEL), labels.get(well_known.APPLIED_LABEL), gpus
    if end not in _allowed_ends(crash_stage.change, downtime):
        yield f"the end {end}, status {dict(crash_stage.status())}"
    if not crash_stage.is_offering():
        allocatable = crash_stage.sandboxes[0].devices.allocatable()
        yield f"allocatable: {allocatable}, not {sorted(devices(crash_stage.state))}"
    if downtime is not Downtime.REBOOT:
        yield from _disturbed_pods(crash_stage, downtime)


def _not_restored(crash_stage: CrashStage, *, is_stopped: bool = False) -> list[str]:
    hooks = ["the exit hooks have not run"] if crash_stage.awaits_exit_hooks() else []
    slots = [f"the slot {name} is not released" for name in crash_stage.slots_in_use()]
    on_node = crash_stage.unrestored_on_node(
        is_stopped=is_stopped,
        is_cordoned=crash_stage.change.is_cordoned,
        deployed=crash_stage.deploy_labels,
    )
    return [*hooks, *slots, *on_node]


def _allowed_ends(change: changes.ProcessChange, downtime: Downtime) -> Ends:
    """Return how the node may be in the end; a change that failed has not moved an instance."""
    was, success, failed = (
        change.was or None,
        run_status.State.SUCCESS.value,
        run_status.State.FAILED.value,
    )
    done = change.layout, change.after
    match downtime:
        case Downtime.OTHER_LAYOUT:
            return {(success, change.other, change.gpus_with(change.other))}
        case Downtime.OLD_LAYOUT:
            return {(success, was, change.before)}
        case Downtime.NO_LAYOUT:
            # What is active but not yet verified has no name once the label is gone.
            named = (done, (None, change.after), (was, change.before))
            return {(state, *each) for state, each in itertools.product((success, failed), named)}
        case Downtime.REBOOT:
            return {(success, *done)}
        case Downtime.RESTART | Downtime.CORRUPT_JOURNAL:
            if change.ends is run_status.State.SUCCESS:
                return {(success, *done)}
            return {(failed, was, change.before)}


def _disturbed_pods(crash_stage: CrashStage, downtime: Downtime) -> Iterable[str]:
    """Name the pods that were disturbed although the change does not affect their devices."""
    spared = layout_table.devices_by_gpu(crash_stage.change.before)
    spared &= layout_table.devices_by_gpu(crash_stage.change.gpus_after_drain)
    if downtime is Downtime.OTHER_LAYOUT:
        spared &= layout_table.devices_by_gpu(
            crash_stage.change.gpus_with(crash_stage.change.other)
        )
    now, in_use, ready = (
        crash_stage.serials(),
        crash_stage.devices_by_pod(),
        crash_stage.ready_pods(),
    )
    for pod in crash_stage.pods:
        if not spared.issuperset(pod.devices):
            continue
        current = ready.get(pod.name)
        if current is None or objects.uid(current) != pod.uid or objects.restart_count(current):
            yield f"{pod.name} was disturbed"
        elif in_use.get(pod.name) != pod.device_ids:
            yield f"{pod.name} has {in_use.get(pod.name)}, not {pod.device_ids}"
        elif any(now.get(id_) != crash_stage.serials_before[id_] for id_ in pod.device_ids):
            yield f"the instance of {pod.name} was destroyed and made again"
