"""The moments of a run on a node in memory, and what a test plans for them.

A moment is just before a call of a port (``Call``), just before a step of the driver
(``steps.Step``), or just after a wait (``Wait``). A test names moments by what they share:

- ``"gpus.execute"``: the calls of one method; ``17``: the call with this index into the log
- ``Time(8)``: the first wait that ends at or after a time of the node's clock
- ``steps.SetMode``, ``moments.Call``: all moments of a type

A strike is what ends or disturbs an agent at a moment: a kill, a failed call, or what another
program writes then.
"""

import contextlib
import dataclasses
import math
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Generic, NamedTuple, TypeVar

from mig_manager.core import steps


class Call(NamedTuple):
    """Just before a call of a port, which is the last in the log already."""

    name: str
    at: int  # its index into the log


class Wait(NamedTuple):
    """Just after a wait: the node has advanced."""

    now_s: float


class Time(NamedTuple):
    """The first wait that ends at or after a time."""

    since_s: float


Moment = Call | Wait | steps.Step
MomentSelector = str | int | Time | type | types.UnionType  # what moments share

_Planned = TypeVar("_Planned")


@dataclasses.dataclass(slots=True, eq=False)
class _Entry(Generic[_Planned]):
    moments: MomentSelector
    what: _Planned
    condition: Callable[[], bool]
    remaining: float  # how many times it may still come

    def comes_at(self, moment: Moment) -> bool:
        """Return whether it comes at a moment, and count it."""
        if not (_are_met(self.moments, moment) and self.remaining and self.condition()):
            return False
        self.remaining -= 1
        return True


def _are_met(moments: MomentSelector, moment: Moment) -> bool:
    match moments:
        case str():
            return isinstance(moment, Call) and moment.name == moments
        case int():
            return isinstance(moment, Call) and moment.at == moments
        case Time():
            return isinstance(moment, Wait) and moment.now_s >= moments.since_s
        case _:
            return isinstance(moment, moments)


class Plans(Generic[_Planned]):
    """What is planned for moments, in order: the errors that they raise, or what happens then."""

    def __init__(self) -> None:
        self._entries: list[_Entry[_Planned]] = []

    def add(
        self,
        moments: MomentSelector,
        what: _Planned,
        *,
        when: Callable[[], bool] = lambda: True,
        times: float = math.inf,
    ) -> None:
        """Plan something.

        Args:
            moments: For which moments; an index into the log and a time are of one only.
            what: What is planned.
            when: What else must hold then.
            times: How often at most.
        """
        is_of_one = isinstance(moments, int | Time)
        self._entries.append(_Entry(moments, what, when, 1 if is_of_one else times))

    @contextlib.contextmanager
    def adding(
        self, moments: MomentSelector, what: _Planned, *, when: Callable[[], bool] = lambda: True
    ) -> Iterator[None]:
        """Plan something for as long as the context lasts."""
        self.add(moments, what, when=when)
        (*_, entry) = self._entries
        try:
            yield
        finally:
            self._entries = [each for each in self._entries if each is not entry]

    def add_all(self, table: Mapping[str, _Planned]) -> None:
        """Plan something for the calls of each method."""
        for method, what in table.items():
            self.add(method, what)

    def remove(self, moments: MomentSelector) -> None:
        """Remove what is planned for these moments."""
        self._entries = [each for each in self._entries if each.moments != moments]

    def clear(self) -> None:
        """Remove everything."""
        self._entries = []

    def planned_for(self, moment: Moment) -> Iterator[_Planned]:
        """Yield what comes at a moment, and keep nothing that cannot come again."""
        for entry in [*self._entries]:
            if entry.comes_at(moment):
                if not entry.remaining:
                    self._entries.remove(entry)
                yield entry.what

    def __contains__(self, moments: MomentSelector) -> bool:
        """Return whether something is planned for these moments."""
        return any(each.moments == moments for each in self._entries)

    def __bool__(self) -> bool:
        """Return whether anything is still planned."""
        return bool(self._entries)
