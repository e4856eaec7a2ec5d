"""Slots for nodes under change: which nodes have one, and which may be taken.

A slot is a Lease, named by its number. A node holds at most one, under its own name, so that an
agent that was killed leaves it to its successor. How long a holder has been silent is judged by
when we saw its Lease change, and never by comparing its clock with ours.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from mig_manager.core import messages
from mig_manager.core.node import cluster

PREFIX = "mig-manager-slot-"
_MOST_NAMED = 10  # holders that a message names before it counts the rest


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One Lease as the API has it."""

    index: int
    holder: str  # the node that has it; empty: none
    version: str  # another one after each change
    duration_s: float  # how long it stays taken without being renewed
    transitions: int = 0  # how often another node has taken it

    @property
    def name(self) -> str:
        """The Lease's name."""
        return f"{PREFIX}{self.index}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Since when a slot is unchanged, as far as was observed."""

    version: str
    since_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The slots, by what our node may do with them."""

    mine: tuple[Slot, ...]  # slots of our node: one, or more if a response was lost
    free: tuple[Slot, ...]  # free slots; without a version if there is no Lease yet
    silent: tuple[Slot, ...]  # slots of other nodes, not renewed for the duration of the Lease
    held: tuple[Slot, ...]  # other slots of other nodes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Denial:
    """Why no slot was free."""

    limit: int
    holders: tuple[str, ...]  # nodes that are under change now
    silent: tuple[str, ...] = ()
    """Nodes whose agent is silent, and that an interrupted change has left unavailable."""

    def __str__(self) -> str:
        def named(nodes: Iterable[str]) -> str:
            return messages.listed(sorted(nodes), most=_MOST_NAMED)

        parts = []
        if self.holders:
            parts.append(f"under change now: {named(self.holders)}")
        if self.silent:
            parts.append(
                "interrupted in a change, and their agents are silent: "
                f"{named(self.silent)} (bring them back, or delete Node or Lease)"
            )
        what = "; ".join(parts) or "others were quicker"
        return f"waiting for one of {self.limit} slots for nodes under change; {what}"


def index_of(name: str) -> int | None:
    """Return the number of a slot; None for a Lease that is something else."""
    number = name.removeprefix(PREFIX)
    is_ours = name.startswith(PREFIX) and number.isascii() and number.isdigit()
    is_ours = is_ours and str(int(number[:9])) == number
    return int(number) if is_ours else None


def remember(before: Mapping[int, Seen], slots: Iterable[Slot], now_s: float) -> dict[int, Seen]:
    """Return since when each slot is unchanged; ``before`` is the result of the last call."""
    return {
        slot.index: before[slot.index]
        if slot.index in before and before[slot.index].version == slot.version
        else Seen(version=slot.version, since_s=now_s)
        for slot in slots
    }


def judge(
    slots: Sequence[Slot], seen: Mapping[int, Seen], now_s: float, *, node: str, limit: int
) -> Judgement:
    """Sort the slots by what our node may do with them.

    ``slots`` are all, also those beyond the limit, which another agent may have; ``seen`` is the
    result of ``remember`` for them, and ``now_s`` counts from the same fixed point.
    """
    there = {slot.index: slot for slot in slots}
    others = tuple(slot for slot in slots if slot.holder not in ("", node))
    silent = tuple(slot for slot in others if now_s - seen[slot.index].since_s >= slot.duration_s)
    return Judgement(
        mine=tuple(slot for slot in slots if slot.holder == node),
        free=tuple(
            there.get(index) or Slot(index=index, holder="", version="", duration_s=0.0)
            for index in range(limit)
            if index not in there or not there[index].holder
        ),
        silent=silent,
        held=tuple(slot for slot in others if slot not in silent),
    )


def is_disrupted(view: cluster.NodeView) -> bool:
    """Return whether a node has the marks of a change, also of an interrupted one."""
    return (
        bool(view.annotations.get(cluster.JOURNAL_ANNOTATION))
        or cluster.HOLD_TAINT in view.taint_keys
        or cluster.PAUSED_VALUE in view.labels.values()
    )
