"""Slots for nodes under change: which are free, and which may be claimed.

A slot is a numbered Lease. A node holds at most one, under its own name, so that a restarted agent
still has it. The silence of a holder counts from the time when we saw its Lease change, because
clocks of nodes differ.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from mig_manager.core import messages
from mig_manager.core.node import node_object, well_known
from mig_manager.core.records import journals

PREFIX = "mig-manager-slot-"
_MAX_NAMED = 10  # nodes in a message before it counts the rest


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One Lease."""

    index: int
    holder: str  # name of the node; empty: none
    version: str  # ``resourceVersion``
    duration_s: float  # how long the holder keeps it without a renewal
    transitions: int = 0  # changes of the holder

    @property
    def name(self) -> str:
        """The Lease's name."""
        return f"{PREFIX}{self.index}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """Since when a slot has been unchanged, by our observation."""

    version: str
    since_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The slots, sorted by their use for our node."""

    mine: tuple[Slot, ...]  # slots of our node: one, or more if a response was lost
    free: tuple[Slot, ...]  # free slots; without a version if there is no Lease yet
    silent: tuple[Slot, ...]  # slots of other nodes, not renewed for the duration of the Lease
    occupied: tuple[Slot, ...]  # other slots of other nodes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Denial:
    """Why no slot was free."""

    limit: int
    changing: tuple[str, ...]  # nodes under change
    silent: tuple[str, ...] = ()
    """Nodes with a silent agent that an interrupted change has made unavailable."""

    def __str__(self) -> str:
        def list_nodes(nodes: Iterable[str]) -> str:
            return messages.list_names(sorted(nodes), limit=_MAX_NAMED)

        parts = []
        if self.changing:
            parts.append(f"under change now: {list_nodes(self.changing)}")
        if self.silent:
            parts.append(
                "interrupted in a change, and their agents are silent: "
                f"{list_nodes(self.silent)} (bring them back, or delete Node or Lease)"
            )
        what = "; ".join(parts) or "others were quicker"
        return f"waiting for one of {self.limit} slots for nodes under change; {what}"


def index_of(name: str) -> int | None:
    """Return the number of a slot; None for another Lease."""
    number = name.removeprefix(PREFIX)
    is_ours = name.startswith(PREFIX) and number.isascii() and number.isdigit()
    is_ours = is_ours and str(int(number[:9])) == number
    return int(number) if is_ours else None


def remember(
    before: Mapping[int, Sighting], slots: Iterable[Slot], now_s: float
) -> dict[int, Sighting]:
    """Return since when the slots are unchanged; ``before`` is the result of the last call."""
    return {
        slot.index: before[slot.index]
        if slot.index in before and before[slot.index].version == slot.version
        else Sighting(version=slot.version, since_s=now_s)
        for slot in slots
    }


def judge(
    slots: Sequence[Slot],
    sightings: Mapping[int, Sighting],
    now_s: float,
    *,
    node: str,
    limit: int,
) -> Judgement:
    """Sort the slots by their use for our node.

    ``slots`` are all slots, even beyond the limit, because the limit of another agent can differ.
    ``sightings`` is the result of ``remember``, and ``now_s`` has the same clock.
    """
    by_index = {slot.index: slot for slot in slots}
    others = tuple(slot for slot in slots if slot.holder not in ("", node))
    silent = tuple(
        slot for slot in others if now_s - sightings[slot.index].since_s >= slot.duration_s
    )
    return Judgement(
        mine=tuple(slot for slot in slots if slot.holder == node),
        free=tuple(
            by_index.get(index) or Slot(index=index, holder="", version="", duration_s=0.0)
            for index in range(limit)
            if index not in by_index or not by_index[index].holder
        ),
        silent=silent,
        occupied=tuple(slot for slot in others if slot not in silent),
    )


def is_disrupted(view: node_object.NodeView) -> bool:
    """Return whether a node has the marks of a running or interrupted change.

    A journal that only keeps what cannot be restored yet, such as the instances of an unreachable
    GPU, is none.
    """
    text = view.annotations.get(well_known.JOURNAL_ANNOTATION)
    journal = journals.parse_or_none(text)
    return (
        (bool(text) and (journal is None or journal.blocks_workloads))
        or well_known.HOLD_TAINT in view.taint_keys
        or any(map(well_known.is_paused, view.labels.values()))
    )
