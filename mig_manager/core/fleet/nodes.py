"""The nodes of a rollout, what it writes on them, and where it wants to have them.

Everything stands on the nodes themselves: the label that asks for a layout, what the agent says of
it, and in an annotation what was asked for before.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from mig_manager.core import model

_MAX_GPUS = 64
"""Of a node that a status annotation is read for; anybody with access to the node may write it."""
_MAX_WORD = 80


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What the agent says in the status annotation."""

    config: str = ""
    state: str = ""
    phase: str = ""
    reason: str = ""
    message: str = ""
    is_retried: bool = False
    """Whether the agent tries again by itself."""
    unreachable: tuple[str, ...] = ()
    """GPUs that it cannot reach, as ``GPU 3 (UUID)``."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """What a rollout writes on a node, for the way back."""

    layout: str
    """What the rollout asked for."""
    before: str | None
    """What was asked for before; None: nothing."""
    is_undone: bool = False

    def to_json(self) -> str:
        """Return the annotation's value."""
        data = {"layout": self.layout, "before": self.before, "undone": self.is_undone}
        return json.dumps(data)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node as the API has it, as far as a rollout cares."""

    name: str
    version: str
    """Another one after each change."""
    wanted: str | None
    """The label that asks for a layout."""
    state: str
    applied: str
    is_ready: bool
    is_cordoned: bool
    """Cordoned or held, by whomever."""
    told: Told | None = None
    """None: no agent of ours has ever said anything."""
    mark: Mark | None = None
    gpus: str = ""
    """What GPUs there are, as ``inventory`` reads it; empty: nobody says."""
    allocatable: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def has_agent(self) -> bool:
        """Whether an agent of ours has ever spoken there; NVIDIA's says nothing but the state."""
        return self.told is not None or bool(self.gpus)

    @property
    def is_away(self) -> bool:
        """Whether no workload can come to it now."""
        return self.is_cordoned or not self.is_ready

    @property
    def is_settled(self) -> bool:
        """Whether its agent has nothing left to do for what its label asks."""
        if self.wanted is None:
            return True
        if self.state in (model.State.PENDING.value, model.State.REBOOTING.value):
            return False
        if self.told is None:
            # NVIDIA's manager says nothing but the state.
            return bool(self.state)
        return self.told.config == self.wanted and not self.told.is_retried

    @property
    def has_reacted(self) -> bool:
        """Whether an agent is at work, or has been, on what is asked."""
        is_busy = self.state in (model.State.PENDING.value, model.State.REBOOTING.value)
        return is_busy or (self.told is not None and self.told.config == self.wanted)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """Every node shall have one layout."""

    layout: str

    def target(self, _node: Node) -> str | None:
        """Return what the label shall say."""
        return self.layout

    def mark(self, node: Node) -> Mark:
        """Return what is written on a node that is asked."""
        return Mark(layout=self.layout, before=node.wanted or node.applied or None)

    def has_left(self, _node: Node) -> bool:
        """Tell whether somebody has asked for something else since the rollout."""
        return False

    def concerns(self, _node: Node) -> bool:
        """Tell whether it is about this node."""
        return True


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Back:
    """Every node that a rollout has asked shall have what it had before."""

    def target(self, node: Node) -> str | None:
        """Return what the label shall say; None: there shall be none."""
        return node.mark.before if node.mark else node.wanted

    def mark(self, node: Node) -> Mark | None:
        """Return what is written on a node that is asked."""
        return dataclasses.replace(node.mark, is_undone=True) if node.mark else None

    def has_left(self, node: Node) -> bool:
        """Tell whether somebody has asked for something else since the rollout."""
        mark = node.mark
        return mark is not None and node.wanted not in (mark.layout, mark.before)

    def concerns(self, node: Node) -> bool:
        """Tell whether it is about this node: not if an older way back has led somewhere else."""
        return node.mark is not None and not (node.mark.is_undone and self.has_left(node))


Goal = Forward | Back


def told(text: str | None) -> Told | None:
    """Read the status annotation; what makes no sense says nothing."""
    try:
        data: Any = json.loads(text or "")
        return Told(
            config=str(data["config"]),
            state=str(data["state"]),
            phase=str(data.get("phase", "")),
            reason=str(data.get("reason", "")),
            message=str(data.get("message", "")),
            is_retried="retryAt" in data,
            unreachable=_gpus(data.get("unreachableGpus")),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _gpus(rows: object) -> tuple[str, ...]:
    """Return unreachable GPUs in words; what makes no sense says nothing."""
    return tuple(
        f"GPU {index}" + (f" ({uuid})" if (uuid := str(row.get("uuid", ""))[:_MAX_WORD]) else "")
        for row in (rows[:_MAX_GPUS] if isinstance(rows, list) else ())
        if isinstance(row, dict) and isinstance(index := row.get("index"), int)
    )


def mark(text: str | None) -> Mark | None:
    """Read a rollout's annotation; what makes no sense is none."""
    try:
        data: Any = json.loads(text or "")
        before = data["before"]
        return Mark(
            layout=str(data["layout"]),
            before=None if before is None else str(before),
            is_undone=data.get("undone") is True,
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
