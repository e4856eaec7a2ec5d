"""The nodes of a cluster: their published status, their state, and what a rollout requests.

All state is on the nodes: the label that requests a layout, the agent's status, and an annotation
with the layout requested before the rollout.
"""

import contextlib
import dataclasses
import datetime as dt
import enum
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from mig_manager import errors
from mig_manager.core import json_text, messages, model, timestamps
from mig_manager.core.layout import custom_layouts, layouts, served
from mig_manager.core.node import api_values, node_object, strategies, well_known
from mig_manager.core.records import gpu_codec, gpu_recovery, journals
from mig_manager.core.records import status as run_status

_GPU_LABELS = ("nvidia.com/gpu.present", "nvidia.com/mig.capable")
_CHANGING = (model.State.PENDING.value, model.State.REBOOTING.value)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """The annotation that a rollout writes on a node, for ``undo``."""

    layout: str  # requested by the rollout
    before: str | None  # requested before the rollout; None: nothing
    is_undone: bool = False
    failed_at: dt.datetime | None = None
    """Start of a run that failed for the same layout before this request."""

    def to_json(self) -> str:
        """Return the annotation's value."""
        data = {"layout": self.layout, "before": self.before, "undone": self.is_undone}
        if self.failed_at is not None:
            data["failedAt"] = self.failed_at.isoformat()
        return json.dumps(data)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node with what its agent published."""

    view: node_object.NodeView
    is_ready: bool
    version: str = ""  # ``resourceVersion``
    status: run_status.PublishedStatus | None = None
    """None: missing or invalid."""
    status_error: str = ""  # why the status is invalid; empty if it is valid or missing
    mark: Mark | None = None
    requested_by: str = ""  # last writer of the request, by ``managedFields``; empty if unknown
    requested_at: dt.datetime | None = None
    """When that writer last wrote to the node, which may be later than the request."""

    @property
    def name(self) -> str:
        """The node's name."""
        return self.view.name

    @property
    def requested(self) -> str | None:
        """The requested layout."""
        return self.view.labels.get(well_known.CONFIG_LABEL) or None

    @property
    def state(self) -> str:
        """Label of the last run's state, which NVIDIA's manager also sets."""
        return self.view.labels.get(well_known.STATE_LABEL, "")

    @property
    def applied(self) -> str:
        """The layout last verified; empty for none."""
        return self.view.labels.get(well_known.APPLIED_LABEL, "")

    @property
    def applied_before(self) -> str:
        """The layout applied before the change under way, which removes the label; or empty."""
        text = self.view.annotations.get(well_known.JOURNAL_ANNOTATION)
        if self.applied or text is None:
            return ""
        try:
            return journals.Journal.from_json(text).applied
        except ValueError:
            return ""

    @property
    def applied_text(self) -> str:
        """The applied layout for people, or the one before the change; empty for none."""
        return self.applied or (f"{self.applied_before} (before)" if self.applied_before else "")

    @property
    def strategy(self) -> strategies.Strategy | None:
        """The device plugin's MIG strategy; None if unknown."""
        return strategies.labelled(self.view.labels)

    @property
    def gpus(self) -> str | None:
        """The published GPUs, for ``gpu_codec``."""
        return self.view.annotations.get(well_known.GPUS_ANNOTATION)

    @property
    def layouts(self) -> tuple[served.Entry, ...]:
        """The layouts that its agent lists; empty without a valid list."""
        try:
            return served.from_json(self.view.annotations.get(well_known.LAYOUTS_ANNOTATION, ""))
        except ValueError:
            return ()

    @property
    def takes_custom(self) -> bool | None:
        """Whether its agent takes custom layouts; None without a valid list."""
        return served.takes_custom(self.view.annotations.get(well_known.LAYOUTS_ANNOTATION, ""))

    @property
    def is_reported(self) -> bool:
        """Whether the status is about the request: its name and, if custom, its content."""
        if self.status is None or self.status.config != self.requested:
            return False
        expected = custom_layouts.Custom.of(self.view).annotation_hash
        return self.status.annotation_hash in ("", expected)

    @property
    def has_gpus(self) -> bool:
        """Whether a label, a resource or an annotation indicates NVIDIA GPUs."""
        return (
            bool(self.requested or self.view.allocatable)
            or any(self.view.labels.get(label) == "true" for label in _GPU_LABELS)
            or well_known.STATUS_ANNOTATION in self.view.annotations
        )

    @property
    def is_unavailable(self) -> bool:
        """Whether no new pod can be scheduled to it: not ready, cordoned or tainted."""
        return (
            not self.is_ready
            or self.view.is_unschedulable
            or well_known.HOLD_TAINT in self.view.taint_keys
        )

    @property
    def answer(self) -> run_status.PublishedStatus | None:
        """The status of the requested layout; None if the agent has not reported on it."""
        published = self.status
        if published is None or not self.is_reported:
            return None
        failed_at = self.mark.failed_at if self.mark else None
        return published if failed_at is None or published.started_at != failed_at else None

    @property
    def is_finished(self) -> bool:
        """Whether its agent has finished with the requested layout and will not retry."""
        if self.requested is None:
            return True
        if self.state in _CHANGING:
            return False
        if self.status is None:
            # NVIDIA's manager sets only the state.
            return bool(self.state)
        return self.answer is not None and not self.answer.is_retried

    @property
    def has_responded(self) -> bool:
        """Whether its agent has started on the requested layout."""
        return self.state in _CHANGING or self.answer is not None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """The request of a rollout: one layout, or, to undo, every node's former layout."""

    layout: str | None  # None: undo on the nodes with a rollout's mark

    def target(self, node: Node) -> str | None:
        """Return the label's value; None to remove it."""
        if self.layout is not None:
            return self.layout
        return node.mark.before if node.mark else node.requested

    def mark(self, node: Node) -> Mark | None:
        """Return the mark to write with the request."""
        if self.layout is not None:
            failed_at, last = None, node.status
            if last and last.config == self.layout and last.state is model.State.FAILED:
                failed_at = last.started_at
            before = node.requested or node.applied or None
            return Mark(layout=self.layout, before=before, failed_at=failed_at)
        return dataclasses.replace(node.mark, is_undone=True) if node.mark else None

    def is_superseded(self, node: Node) -> bool:
        """Return whether another layout was requested between a rollout and its undo."""
        if self.layout is not None or node.mark is None:
            return False
        return node.requested not in (node.mark.layout, node.mark.before)

    def includes(self, node: Node) -> bool:
        """Return whether the rollout includes a node; an undo omits one superseded after it."""
        if self.layout is not None:
            return True
        return node.mark is not None and not (node.mark.is_undone and self.is_superseded(node))


def parse(item: Mapping[str, Any]) -> Node:
    """Parse a Node object of the API. Raises ClusterError: It is malformed."""
    view = node_object.parse_node(item)
    with api_values.as_cluster_error(f"node {view.name}"):
        conditions = (item.get("status") or {}).get("conditions") or ()
        is_ready = any(
            each.get("type") == "Ready" and each.get("status") == "True" for each in conditions
        )
        metadata = item["metadata"]
        requested_by, requested_at = _writer(metadata)
    published, status_error = None, ""
    text = view.annotations.get(well_known.STATUS_ANNOTATION)
    try:
        published = None if text is None else run_status.parse(text)
    except ValueError as error:
        status_error = messages.printable(str(error)) or "it is empty"
    return Node(
        view=view,
        is_ready=is_ready,
        version=str(metadata.get("resourceVersion") or ""),
        status=published,
        status_error=status_error,
        mark=parse_mark(view.annotations.get(well_known.ROLLOUT_ANNOTATION)),
        requested_by=requested_by,
        requested_at=requested_at,
    )


def _writer(metadata: Mapping[str, Any]) -> tuple[str, dt.datetime | None]:
    """Return the field manager of the request's label, and when it last wrote."""
    for entry in metadata.get("managedFields") or ():
        owned = (entry.get("fieldsV1") or {}).get("f:metadata") or {}
        if f"f:{well_known.CONFIG_LABEL}" in (owned.get("f:labels") or {}):
            manager = messages.printable(str(entry.get("manager") or ""))
            return manager, timestamps.parse(entry.get("time"))
    return "", None


NO_FILE = layouts.Document(source="the node's list", layouts={})
"""In place of a layout file: generated layouts need none."""


def is_listed(nodes: Iterable[Node], name: str) -> bool:
    """Return whether any node lists a layout, or takes it from its annotation."""
    return any(
        (name == well_known.CUSTOM_LAYOUT and node.takes_custom)
        or any(name == entry.name for entry in node.layouts)
        for node in nodes
    )


def require_layout(nodes: Iterable[Node], document: layouts.Document, name: str) -> None:
    """Raise LayoutError (UNKNOWN_CONFIG) if neither document nor any node has the layout."""
    every = tuple(nodes)
    if not is_listed(every, name):
        document.layout(name, [gpus for node in every if (gpus := published_gpus(node)[0])])


def layout_of(
    node: Node, gpus: Iterable[model.Gpu], document: layouts.Document, name: str
) -> layouts.Layout:
    """Return the layout that a node with these GPUs serves under a name.

    It is from the document, unless the node lists the content of a generated layout, or takes it
    from its annotation.

    Raises:
        ConfigError: The annotation is invalid.
        LayoutError: The annotation is missing (NO_CUSTOM_LAYOUT), or the layout is unknown
            (UNKNOWN_CONFIG).
    """
    if name == well_known.CUSTOM_LAYOUT and node.takes_custom:
        return custom_layouts.Custom.of(node.view).layout()[0]
    listed = next((each for each in node.layouts if each.name == name), None)
    own = document.layouts.get(name)
    if listed and (own is None or own.content_hash != listed.content_hash):
        made = served.generated(gpus).get(name)
        if made and made.content_hash == listed.content_hash:
            return made
    if listed and own is None:
        raise errors.LayoutError(
            f"{document.source} has no content of layout '{name}' ({listed.origin})",
            reason=errors.Reason.UNKNOWN_CONFIG,
        )
    return document.layout(name)


def parse_mark(text: str | None) -> Mark | None:
    """Parse a rollout's annotation; None if it is missing or malformed."""
    with contextlib.suppress(ValueError), json_text.decoding("a rollout's mark"):
        data = json_text.parse_object(text or "")
        before = data["before"]
        return Mark(
            layout=str(data["layout"]),
            before=None if before is None else str(before),
            is_undone=data.get("undone") is True,
            failed_at=timestamps.parse(data.get("failedAt")),
        )
    return None


_LONGEST_RUN = dt.timedelta(hours=1)
"""Drain, change and verification have deadlines that end well before."""
_OVERDUE = dt.timedelta(minutes=15)
_MAX_WORD = 80


class NodeState(enum.Enum):
    """Whether a node has the requested layout; the values are a public contract."""

    APPLIED = "applied"
    CHANGING = "changing"
    FAILED = "failed"
    DRIFTED = "drifted"  # the GPUs changed after the layout was applied
    WAITING = "waiting"  # the agent has not reported on the requested layout
    STALE = "stale"  # a run started long ago and the agent has not reported its end
    UNREADABLE = "unreadable"  # the status is invalid
    NO_AGENT = "no-agent"  # a layout is requested, and no agent has ever reported
    NO_REQUEST = "no-request"

    @property
    def is_good(self) -> bool:
        """Whether the requested layout is applied, or none is requested."""
        return self in (NodeState.APPLIED, NodeState.NO_REQUEST)


def published_gpus(node: Node) -> tuple[model.ObservedGpus | None, str]:
    """Return the GPUs that an agent has published, or None and the reason."""
    if not node.gpus:
        return None, "no agent has published its GPUs; is one running there?"
    try:
        return gpu_codec.from_json(node.gpus), ""
    except ValueError as error:
        detail = messages.printable(str(error)[:_MAX_WORD])
        return None, f"the published GPUs cannot be read: {detail}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The state of a node."""

    node: Node
    state: NodeState
    gpus: model.ObservedGpus | None  # as ``published_gpus``
    notes: tuple[str, ...]  # sentences about unusual or missing facts


def report(node: Node, now: dt.datetime) -> Report:
    """Compare a node's request with its status, and note unusual or missing facts."""
    state = _state(node, now)
    notes = [f"the status cannot be read: {node.status_error}"] if node.status_error else []
    gpus, why = published_gpus(node)
    if why and (node.gpus or node.has_gpus):
        notes.append(why)
    notes += _notes(node, state, now)
    notes += [gpu.sentence for gpu in model.unreachable(gpus or ())]
    notes += gpu_recovery.faults(gpus or ())
    return Report(node=node, state=state, gpus=gpus, notes=tuple(notes))


def _state(node: Node, now: dt.datetime) -> NodeState:
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


def _state_of_run(published: run_status.PublishedStatus, now: dt.datetime) -> NodeState:
    match published.state:
        case model.State.SUCCESS:
            return NodeState.APPLIED
        case model.State.FAILED:
            is_drift = published.reason == errors.Reason.DRIFTED.value
            return NodeState.DRIFTED if is_drift else NodeState.FAILED
        case model.State.PENDING | model.State.REBOOTING:
            started_at = published.started_at
            is_old = started_at is None or now - started_at > _LONGEST_RUN
            # An agent can wait long for a slot.
            has_slot = published.phase != model.Phase.WAIT.value
            return NodeState.STALE if is_old and has_slot else NodeState.CHANGING


def _notes(node: Node, state: NodeState, now: dt.datetime) -> Iterator[str]:
    if not node.is_ready:
        yield "the node is not ready: its agent may not run, and this may be old"
    published = node.status
    if published is None:
        if node.state and state is NodeState.NO_AGENT:
            yield f"another MIG manager runs here: {well_known.STATE_LABEL} is {node.state}"
        return
    match state:
        case NodeState.NO_REQUEST:
            yield f"the status is of layout {published.config}, which is no longer requested"
        case NodeState.WAITING:
            is_same = published.config == node.requested
            earlier = f"an earlier annotation {well_known.LAYOUT_ANNOTATION}"
            other = f"layout {published.config}, not {node.requested}"
            yield f"the agent last reported {earlier if is_same else other}"
        case NodeState.STALE:
            since = timestamps.show(published.started_at) or "some time"
            yield f"no report since {since}: check that the agent runs"
        case NodeState.APPLIED if node.applied != published.config:
            yield f"label {well_known.APPLIED_LABEL} is {node.applied or 'missing'}"
        case _:
            pass
    if published.retry_at and now - published.retry_at > _OVERDUE:
        expected = timestamps.show(published.retry_at)
        yield f"the next retry was scheduled for {expected}: check that the agent runs"
