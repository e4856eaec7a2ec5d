"""Slots for nodes under change: which are free, and which may be claimed.

A slot is a numbered Lease. A node holds at most one, under its own name, so that a restarted agent
still has it.
"""

import dataclasses
from collections.abc import Iterable, Sequence

from mig_manager.core import messages
from mig_manager.core.objects import lease, node_object, well_known
from mig_manager.core.records import journals

_PREFIX = "mig-manager-slot-"
_MAX_NAMED = 10  # nodes in a message before it counts the rest


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SlotUse:
    """The slots, sorted by their use for our node."""

    mine: tuple[lease.Lease, ...]  # slots of our node: one, or more if a response was lost
    free: tuple[lease.Lease, ...]  # free slots; without a version if there is no Lease yet
    silent: tuple[lease.Lease, ...]
    """Slots of other nodes that were not renewed for the duration of the Lease."""
    occupied: tuple[lease.Lease, ...]  # other slots of other nodes


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
                f"{list_nodes(self.silent)} (start them, or delete Node or Lease)"
            )
        what = "; ".join(parts) or "others were quicker"
        return f"waiting for one of {self.limit} slots for nodes under change; {what}"


def name_of(index: int) -> str:
    """Return the name of a slot's Lease."""
    return f"{_PREFIX}{index}"


def index_of(name: str) -> int | None:
    """Return the number of a slot; None for another Lease."""
    number = name.removeprefix(_PREFIX)[:9]
    is_number = number.isascii() and number.isdigit()
    return int(number) if is_number and name_of(int(number)) == name else None


def classify(slots: Sequence[lease.Lease], *, node: str, limit: int) -> SlotUse:
    """Sort the slots by their use for our node.

    ``slots`` are all slots, even beyond the limit, because the limit of another agent can differ.
    """
    by_name = {slot.name: slot for slot in slots}
    first = [by_name.get(name) or lease.Lease(name=name) for name in map(name_of, range(limit))]
    others = [slot for slot in slots if slot.holder not in ("", node)]
    return SlotUse(
        mine=tuple(slot for slot in slots if slot.holder == node),
        free=tuple(slot for slot in first if not slot.holder),
        silent=tuple(slot for slot in others if slot.is_silent()),
        occupied=tuple(slot for slot in others if not slot.is_silent()),
    )


def is_disrupted(view: node_object.NodeView) -> bool:
    """Return whether a node has the marks of a running or interrupted change.

    A journal that only keeps what cannot be restored yet, such as the instances of an unreachable
    GPU, does not count.
    """
    text = view.annotations.get(well_known.JOURNAL_ANNOTATION)
    journal = journals.parse_or_none(text)
    return (
        (bool(text) and (journal is None or journal.node.blocks_workloads))
        or well_known.RECONFIGURING_TAINT in view.taint_keys
        or any(map(well_known.is_paused, view.labels.values()))
    )
