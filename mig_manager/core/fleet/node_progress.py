"""The progress of one node of a rollout."""

import dataclasses
import enum


class NodeProgressState(enum.Enum):
    """The progress of a node; the values are a public contract."""

    SUCCESS = "success"
    TO_DO = "to-do"
    PENDING = "pending"
    FAILED = "failed"  # as its agent reports; it retries only if ``NodeProgress.is_retried``
    TIMED_OUT = "timed-out"  # not applied within ``node_timeout_s``
    NO_RESPONSE = "no-response"  # its agent does not respond; the previous request is restored
    SKIPPED = "skipped"
    """Without a request: the layout does not fit, it is not ready, or no agent ever reported."""
    SUPERSEDED = "superseded"  # another layout, or other content of it, was requested meanwhile


BAD = frozenset(
    {
        NodeProgressState.FAILED,
        NodeProgressState.TIMED_OUT,
        NodeProgressState.NO_RESPONSE,
        NodeProgressState.SUPERSEDED,
    }
)
"""Failures, for ``RolloutLimits.pauses``."""
MOVING = (NodeProgressState.PENDING, NodeProgressState.TIMED_OUT)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeProgress:
    """One node of a rollout."""

    name: str
    state: NodeProgressState
    phase: str = ""
    reason: str = ""
    message: str = ""
    is_retried: bool = False
    seconds: float = 0.0  # since it was first seen in progress
    before: str | None = None  # the layout that ``undo`` requests
    is_unavailable: bool = False
    is_reserved: bool = False  # whether another request must finish before this node starts
    is_outdated: bool = False  # whether its agent must read the layout's content before that
    unreachable: tuple[str, ...] = ()
    """Unreachable GPUs of a ``SUCCESS`` node: the layout is not active on them."""
