"""Kill an agent on a node in memory, or have calls of its ports and of the driver fail."""

import contextlib
import itertools
import types
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest

from mig_manager import errors, reasons
from mig_manager.core import model, steps
from mig_manager.core.records import run_status
from tests.rigs.node import agents, fakes, node_rig, port_calls


@contextlib.contextmanager
def on_calls(rig: node_rig.NodeRig, act: Callable[[], object]) -> Iterator[None]:
    """Act in each call of the rig's ports, in the context only."""
    before = rig.on_call

    def strike() -> None:
        before()
        act()

    rig.on_call = strike
    try:
        yield
    finally:
        rig.on_call = before


@contextlib.contextmanager
def on_steps(
    rig: node_rig.NodeRig, answer: Callable[[steps.Step], Exception | None]
) -> Iterator[None]:
    """Answer each step of the driver, with the error of one that fails, in the context only."""
    before, rig.driver.step_error = rig.driver.step_error, answer
    try:
        yield
    finally:
        rig.driver.step_error = before


_T = TypeVar("_T")


def note(
    rig: node_rig.NodeRig, read: Callable[[], _T], *, when: Callable[[], bool] = lambda: True
) -> list[_T]:
    """Read a value in each call of the rig's ports at which a condition holds; return the values.

    What the rig does in its calls already, it still does.
    """
    values: list[_T] = []
    before = rig.on_call

    def act() -> None:
        before()
        if when():
            values.append(read())

    rig.on_call = act
    return values


def act_once(rig: node_rig.NodeRig, is_due: Callable[[], bool], act: Callable[[], object]) -> None:
    """Act in the first call of the rig's ports at which a condition holds, and in no other."""
    before, pending = rig.on_call, [act]

    def strike() -> None:
        before()
        if pending and is_due():
            pending.pop()()

    rig.on_call = strike


def at_each_call(rig: node_rig.NodeRig, name: str, act: Callable[[], object]) -> None:
    """Act in each call of one method of the rig's ports, such as ``workloads.evict``."""
    before = rig.on_call

    def strike() -> None:
        before()
        if rig.log[-1] == name:
            act()

    rig.on_call = strike


def at_time(rig: node_rig.NodeRig, when_s: float, act: Callable[[], object]) -> None:
    """Act once, in the first wait that ends at or after a time of the rig's clock."""
    pending = [act]

    def check() -> None:
        if pending and rig.clock.now_s >= when_s:
            pending.pop()()

    rig.clock.on_wait.append(check)


def at_call(rig: node_rig.NodeRig, index: int, act: Callable[[], object]) -> None:
    """Act in one call of the rig's ports, counted from 0 as in its log."""
    act_once(rig, lambda: len(rig.log) == index + 1, act)


def at_first_step(rig: node_rig.NodeRig, answer: Callable[[], Exception | None]) -> None:
    """Answer the first step of the driver, with the error if it fails, and no other."""
    before = rig.driver.step_error

    def strike(_step: steps.Step) -> Exception | None:
        rig.driver.step_error = before
        return answer()

    rig.driver.step_error = strike


StepKind = type[steps.Step] | types.UnionType


def nth(kind: StepKind, number: int) -> Callable[[steps.Step], bool]:
    """Return what holds for one step of a kind only, counted from 1."""
    numbers = itertools.count(1)
    return lambda step: isinstance(step, kind) and next(numbers) == number


def kill_before(
    rig: node_rig.NodeRig,
    kind: StepKind,
    layout: str,
    *,
    number: int = 1,
    **options: Any,
) -> None:
    """Apply a layout with an agent that is killed before a step of a kind, counted from 1."""
    is_due = nth(kind, number)

    def kill(step: steps.Step) -> None:
        if is_due(step):
            raise Killed

    with on_steps(rig, kill), pytest.raises(Killed):
        agents.run(rig, layout, **options)


def kill_when(
    rig: node_rig.NodeRig,
    is_due: Callable[[], bool],
    act: Callable[[node_rig.NodeRig], object],
) -> None:
    """Kill the agent that acts, in its first call at which a condition holds."""

    def kill() -> None:
        if is_due():
            raise Killed

    with on_calls(rig, kill), pytest.raises(Killed):
        act(rig)


def kill_at_call(
    make: Callable[[], node_rig.NodeRig],
    index: int,
    act: Callable[[node_rig.NodeRig], object],
) -> tuple[node_rig.NodeRig, tuple[model.Gpu, ...]]:
    """Return a node whose agent was killed in its call ``index``, and the GPUs before."""
    rig = make()
    before = rig.gpus
    rig.fail_once(index, Killed())
    with pytest.raises(Killed):
        act(rig)
    return rig, before


def moments(
    make: Callable[[], node_rig.NodeRig], act: Callable[[node_rig.NodeRig], object]
) -> Iterator[int]:
    """Yield the first call of an undisturbed run, and each after a wait or a call that writes."""
    rig = make()
    times_s = note(rig, lambda: rig.clock.now_s)
    act(rig)
    assert len(times_s) > 2
    for index, now_s in enumerate(times_s):
        if not (index and rig.log[index - 1] in port_calls.READS and now_s == times_s[index - 1]):
            yield index


def kills(
    make: Callable[[], node_rig.NodeRig], act: Callable[[node_rig.NodeRig], object]
) -> Iterator[tuple[int, node_rig.NodeRig, tuple[model.Gpu, ...]]]:
    """Yield what ``kill_at_call`` returns, for each state that an undisturbed run's node has."""
    for index in moments(make, act):
        yield (index, *kill_at_call(make, index, act))


NodeAndAgent = tuple[node_rig.NodeRig, agents.AgentInMemory]


def supersede_at_checks(
    make: Callable[[], NodeAndAgent], layout: str, *, is_replaced: bool = False
) -> Iterator[NodeAndAgent]:
    """Yield node and agent of a run whose request ends at a check, for each of its checks."""
    for number in itertools.count(1):
        rig, agent = make()
        request = fakes.FakeRequest(rig.clock, ends_at=number, is_replaced=is_replaced)
        with contextlib.suppress(errors.Superseded):
            agents.run(rig, layout, by=agent, request=request)
            return
        yield rig, agent


def refuse(
    step_type: StepKind,
    *,
    times: int,
    reason: reasons.Reason = reasons.Reason.INSUFFICIENT_RESOURCES,
) -> Callable[[steps.Step], Exception | None]:
    """Return a driver that refuses the first steps of a kind."""
    remaining = [times]

    def answer(step: steps.Step) -> Exception | None:
        if isinstance(step, step_type) and remaining[0]:
            remaining[0] -= 1
            return errors.HardwareError("no", reason=reason)
        return None

    return answer


BROKEN = {
    "gpus": errors.HardwareError("broken", reason=reasons.Reason.NVML_ERROR),
    "verified_layout_file": errors.ConfigError("broken"),
    "host_copy_file": errors.ConfigError("broken"),
    **dict.fromkeys(
        ("services", "reset", "reboot", "refresh_files"),
        errors.HostError("broken", reason=reasons.Reason.HOST_SERVICE_FAILED),
    ),
    "hooks": errors.HostError("broken", reason=reasons.Reason.HOOK_FAILED),
    "node": errors.ClusterError("broken", reason=reasons.Reason.API_UNAVAILABLE, status=503),
    "workloads": errors.ClusterError("broken", reason=reasons.Reason.FORBIDDEN, status=403),
    "allocations": errors.KubeletError("broken"),
    "slices": errors.ClusterError("broken", reason=reasons.Reason.API_UNAVAILABLE, status=503),
    "slots": errors.ClusterError("broken", reason=reasons.Reason.API_UNAVAILABLE, status=503),
    "slots.check": errors.NotReadyError("broken", reason=reasons.Reason.SLOTS_TAKEN),
}


NO_DRIVER = errors.HardwareError("gone", reason=reasons.Reason.DRIVER_NOT_LOADED)


def calls(make: Callable[[], node_rig.NodeRig], layout: str) -> list[str]:
    """Return the port calls of an undisturbed run."""
    rig = make()
    assert agents.run(rig, layout).state is run_status.State.SUCCESS
    return rig.log


def broken(call: str) -> Exception:
    """Return what a port call raises that fails."""
    return BROKEN.get(call) or BROKEN[call.partition(".")[0]]


class Killed(BaseException):
    """Stands for SIGKILL: nothing of ours runs after it."""
