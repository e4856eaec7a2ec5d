"""Compare a node's requested layout with what its agent published."""

import dataclasses
import datetime as dt
import enum
from collections.abc import Iterator

from mig_manager import errors
from mig_manager.core import messages, model
from mig_manager.core.fleet import nodes
from mig_manager.core.node import cluster
from mig_manager.core.records import gpu_codec, status

_LONGEST_RUN = dt.timedelta(hours=1)
"""Drain, change and verification have deadlines that end well before."""
_OVERDUE = dt.timedelta(minutes=15)
_MAX_WORD = 80


class NodeState(enum.Enum):
    """How request and node agree; the values are a public contract."""

    APPLIED = "applied"
    CHANGING = "changing"
    FAILED = "failed"
    DRIFTED = "drifted"  # the layout was applied, and the GPUs were changed since
    WAITING = "waiting"  # the agent has not reported on the requested layout
    STALE = "stale"  # A run started long ago and the agent has not reported its end
    UNREADABLE = "unreadable"  # the status cannot be parsed
    NO_AGENT = "no-agent"  # A layout is requested, and no agent has ever reported
    NO_REQUEST = "no-request"

    @property
    def is_good(self) -> bool:
        """Whether the requested layout is applied, or none is requested."""
        return self in (NodeState.APPLIED, NodeState.NO_REQUEST)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The state of a node."""

    node: nodes.Node
    state: NodeState
    gpus: model.ObservedGpus | None  # as published; None if they are missing or cannot be parsed
    notes: tuple[str, ...]  # sentences about what is unusual or unknown

    @property
    def status(self) -> status.PublishedStatus | None:
        """What the agent published."""
        return self.node.status


def report(node: nodes.Node, now: dt.datetime) -> Report:
    """Compare a node's request with its status, and note what is unusual or unknown."""
    state = _state(node, now)
    notes = [f"the status cannot be read: {node.status_error}"] if node.status_error else []
    gpus: model.ObservedGpus | None = None
    if node.gpus is not None:
        try:
            gpus = gpu_codec.from_json(node.gpus)
        except ValueError as error:
            why_not = messages.printable(str(error)[:_MAX_WORD])
            notes.append(f"the published GPUs cannot be read: {why_not}")
    elif node.has_gpus:
        notes.append("no agent has published the GPUs of this node")
    notes += _notes(node, state, now)
    notes += [gpu.sentence for gpu in model.unreachable(gpus or ())]
    return Report(node=node, state=state, gpus=gpus, notes=tuple(notes))


def _state(node: nodes.Node, now: dt.datetime) -> NodeState:
    published = node.status
    if node.status_error:
        return NodeState.UNREADABLE
    if not node.requested:
        return NodeState.NO_REQUEST
    if published is None:
        return NodeState.NO_AGENT
    if published.config != node.requested:
        return NodeState.WAITING
    return _state_of_run(published, now)


def _state_of_run(published: status.PublishedStatus, now: dt.datetime) -> NodeState:
    match published.state:
        case model.State.SUCCESS:
            return NodeState.APPLIED
        case model.State.FAILED:
            is_drift = published.reason == errors.Reason.DRIFTED.value
            return NodeState.DRIFTED if is_drift else NodeState.FAILED
        case model.State.PENDING | model.State.REBOOTING:
            started_at = published.started_at
            is_old = started_at is None or now - started_at > _LONGEST_RUN
            # An agent may wait long for a slot.
            has_slot = published.phase != model.Phase.WAIT.value
            return NodeState.STALE if is_old and has_slot else NodeState.CHANGING


def _notes(node: nodes.Node, state: NodeState, now: dt.datetime) -> Iterator[str]:
    if not node.is_ready:
        yield "the node is not ready: its agent may not run, and this may be old"
    published = node.status
    if published is None:
        if node.state and state is NodeState.NO_AGENT:
            yield f"another MIG manager runs here: {cluster.STATE_LABEL} is {node.state}"
        return
    match state:
        case NodeState.NO_REQUEST:
            yield f"the status is of layout {published.config}, which is no longer requested"
        case NodeState.WAITING:
            yield f"the agent last reported layout {published.config}, not {node.requested}"
        case NodeState.STALE:
            since = messages.format_time(published.started_at) or "some time"
            yield f"no report since {since}: check that the agent runs"
        case NodeState.APPLIED if node.applied != published.config:
            yield f"label {cluster.APPLIED_LABEL} is {node.applied or 'missing'}"
        case _:
            pass
    if published.retry_at and now - published.retry_at > _OVERDUE:
        expected = messages.format_time(published.retry_at)
        yield f"the next retry was scheduled for {expected}: check that the agent runs"
