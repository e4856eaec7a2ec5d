"""Kill an agent at the moments of its run."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mig_manager.core import model
from mig_manager.core.records import run_status
from tests.rigs.node import agents, moments, node_rig, port_calls


def kill_before(
    rig: node_rig.NodeRig,
    kind: moments.MomentSelector,
    layout: str,
    *,
    number: int = 1,
    **options: Any,
) -> None:
    """Apply a layout with an agent that is killed before the n-th step or call of a kind."""
    rig.failures.add(kind, Killed(), when=nth(number), times=1)
    with pytest.raises(Killed):
        agents.run(rig, layout, **options)


def nth(number: int) -> Callable[[], bool]:
    """Return what holds the n-th time only, counted from 1."""
    numbers = itertools.count(1)
    return lambda: next(numbers) == number


def kill_when(
    rig: node_rig.NodeRig,
    is_due: Callable[[], bool],
    act: Callable[[node_rig.NodeRig], object],
) -> None:
    """Kill the agent that acts, in its first call at which a condition holds."""
    rig.failures.add(moments.Call, Killed(), when=is_due, times=1)
    with pytest.raises(Killed):
        act(rig)


def kill_at_call(
    make: Callable[[], node_rig.NodeRig],
    index: int,
    act: Callable[[node_rig.NodeRig], object],
) -> tuple[node_rig.NodeRig, tuple[model.Gpu, ...]]:
    """Return a node whose agent was killed in its call ``index``, and the GPUs before."""
    rig = make()
    before = rig.gpus
    rig.failures.add(index, Killed())
    with pytest.raises(Killed):
        act(rig)
    return rig, before


def indices(
    make: Callable[[], node_rig.NodeRig], act: Callable[[node_rig.NodeRig], object]
) -> Iterator[int]:
    """Yield the indices of calls at which a kill leaves nodes that differ.

    These are the first call of an undisturbed run, and each after a wait or a call that writes.
    """
    rig = make()
    times_s = rig.note(lambda: rig.clock.now_s)
    act(rig)
    assert len(times_s) > 2
    for index, now_s in enumerate(times_s):
        if not (index and rig.log[index - 1] in port_calls.READS and now_s == times_s[index - 1]):
            yield index


def kills(
    make: Callable[[], node_rig.NodeRig], act: Callable[[node_rig.NodeRig], object]
) -> Iterator[tuple[int, node_rig.NodeRig, tuple[model.Gpu, ...]]]:
    """Yield what ``kill_at_call`` returns, for each state that an undisturbed run's node has."""
    for index in indices(make, act):
        yield (index, *kill_at_call(make, index, act))


def calls(make: Callable[[], node_rig.NodeRig], layout: str) -> list[str]:
    """Return the port calls of an undisturbed run."""
    rig = make()
    assert agents.run(rig, layout).state is run_status.State.SUCCESS
    return rig.log


class Killed(BaseException):
    """Stands for SIGKILL: nothing of ours runs after it."""
