"""The state of a node for people: whether it has the requested layout, and unusual facts."""

import dataclasses
import datetime as dt
import enum
import re
from collections.abc import Iterator

from mig_manager.core import model, timestamps
from mig_manager.core.fleet import fleet_nodes
from mig_manager.core.objects import well_known
from mig_manager.core.records import gpu_recovery, requests, run_status

_MAX_RUN = dt.timedelta(hours=1)
"""Drain, change and verification have deadlines that end well before."""
_OVERDUE = dt.timedelta(minutes=15)


class NodeState(enum.Enum):
    """Whether a node has the requested layout; the values are a public contract.

    The first ones come from the state label, where it is about the request.
    """

    SUCCESS = run_status.State.SUCCESS.value
    PENDING = run_status.State.PENDING.value
    REBOOTING = run_status.State.REBOOTING.value
    FAILED = run_status.State.FAILED.value
    WAITING = "waiting"  # the agent has not reported on the requested layout
    STALE = "stale"  # a run started long ago and the agent has not reported its end
    UNREADABLE = "unreadable"  # the status is invalid
    NO_AGENT = "no-agent"  # a layout is requested, and no agent has ever reported
    NO_REQUEST = "no-request"

    @property
    def is_good(self) -> bool:
        """Whether the requested layout is applied, or none is requested."""
        return self in (NodeState.SUCCESS, NodeState.NO_REQUEST)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """The state of a node."""

    node: fleet_nodes.FleetNode
    state: NodeState
    gpus: model.ObservedGpus | None  # as ``fleet_nodes.published_gpus``
    notes: tuple[str, ...]  # sentences about unusual or missing facts

    @property
    def last_run(self) -> run_status.PublishedStatus | None:
        """The status of the node, unless it is a failure of a layout no longer requested."""
        return None if _is_obsolete(self.node) else self.node.status


def _is_obsolete(node: fleet_nodes.FleetNode) -> bool:
    published = node.status
    return bool(not node.requested and published and published.state is run_status.State.FAILED)


def of(node: fleet_nodes.FleetNode, now: dt.datetime) -> NodeReport:
    """Compare a node's request with its status, and note unusual or missing facts."""
    state = _state(node, now)
    notes = [f"the status cannot be read: {node.status_error}"] if node.status_error else []
    notes += [
        f"label {label} has no effect; write {well_known.CONFIG_LABEL}"
        for label in node.view.labels
        if label != well_known.CONFIG_LABEL == re.sub("[-_]", ".", label)
    ]
    if node.status and node.state not in ("", node.status.state.value):
        # An agent writes both in one patch.
        notes.append(
            f"another program set label {well_known.STATE_LABEL} to {node.state}: this may be old"
        )
    if state is NodeState.SUCCESS and _has_rebooted(node):
        notes.append(
            "the node has rebooted since its layout was verified, which no instance survives: "
            "check that the agent runs"
        )
    gpus, why = fleet_nodes.published_gpus(node)
    if why and (node.gpus_text or node.has_gpus):
        notes.append(why)
    notes += _notes(node, state, now)
    notes += [gpu.sentence for gpu in (gpus or model.NO_GPUS).unreachable]
    notes += gpu_recovery.faults(gpus or ())
    return NodeReport(node=node, state=state, gpus=gpus, notes=tuple(notes))


def _state(node: fleet_nodes.FleetNode, now: dt.datetime) -> NodeState:
    published = node.status
    if node.status_error:
        return NodeState.UNREADABLE
    if not node.requested:
        return NodeState.NO_REQUEST
    if published is None:
        return NodeState.NO_AGENT
    if not node.is_reported:
        return NodeState.WAITING
    return _state_of_run(published, now)


def _has_rebooted(node: fleet_nodes.FleetNode) -> bool:
    """Return whether a layout was verified in an earlier boot; no if that is unknown."""
    try:
        text = node.view.annotations.get(well_known.REQUEST_ANNOTATION, "")
        applied = requests.RequestRecord.from_json(text).applied_fingerprints
    except ValueError:
        return False
    boots = {node.boot_id, applied.boot_id} if applied else set[str]()
    return len(boots - {""}) > 1


def _state_of_run(published: run_status.PublishedStatus, now: dt.datetime) -> NodeState:
    state = NodeState(published.state.value)
    if state in (NodeState.SUCCESS, NodeState.FAILED):
        return state
    started_at = published.started_at
    is_old = started_at is None or now - started_at > _MAX_RUN
    # An agent can wait long for a slot.
    has_slot = published.phase != run_status.Phase.WAIT.value
    return NodeState.STALE if is_old and has_slot else state


def _notes(node: fleet_nodes.FleetNode, state: NodeState, now: dt.datetime) -> Iterator[str]:
    if not node.is_ready:
        yield "the node is not ready: its agent may not run, and this may be old"
    published = node.status
    if published is None:
        if state is NodeState.NO_AGENT:
            yield (
                f"another MIG manager runs here: {well_known.STATE_LABEL} is {node.state}"
                if node.state
                else "check that an agent runs on this node"
            )
        return
    if _is_obsolete(node):
        why = f" ({published.reason})" if published.reason else ""
        yield f"layout {published.layout} failed{why}, and is no longer requested"
        return
    match state:
        case NodeState.NO_REQUEST:
            yield f"the status is of layout {published.layout}, which is no longer requested"
        case NodeState.WAITING:
            is_same = published.layout == node.requested
            earlier = f"an earlier annotation {well_known.LAYOUT_ANNOTATION}"
            other = f"layout {published.layout}, not {node.requested}"
            yield f"the agent last reported {earlier if is_same else other}"
        case NodeState.STALE:
            since = timestamps.show(published.started_at) or "some time"
            yield f"no report since {since}: check that the agent runs"
        case NodeState.SUCCESS if node.applied != published.layout:
            yield f"label {well_known.APPLIED_LABEL} is {node.applied or 'missing'}"
        case _:
            pass
    if published.retry_at and now - published.retry_at > _OVERDUE:
        expected = timestamps.show(published.retry_at)
        yield f"the next retry was scheduled for {expected}: check that the agent runs"
