"""How a node stands towards the layout wished for it, from what the API tells of it.

Everybody who may write to the Node may have written what is read here, so texts are made harmless
and nothing is taken for granted.
"""

import dataclasses
import datetime as dt
import enum
import json
from collections.abc import Mapping
from typing import Any

from mig_manager import errors
from mig_manager.core import messages, model
from mig_manager.core.node import cluster
from mig_manager.core.records import gpu_codec

_LONGEST_RUN = dt.timedelta(hours=1)
"""Drain, change and proof have deadlines of their own that end well before."""
_OVERDUE = dt.timedelta(minutes=15)
_MAX_MESSAGE = 2000
_MAX_WORD = 80
_GPU_LABELS = ("nvidia.com/gpu.present", "nvidia.com/mig.capable")
_STRATEGY_LABEL = "nvidia.com/mig.strategy"


class Standing(enum.Enum):
    """How wish and node agree; the value is for people and machines alike."""

    IN_FORCE = "in-force"
    CHANGING = "changing"
    FAILED = "failed"
    DRIFTED = "drifted"
    """It was in force, and somebody has changed the GPUs since."""
    BEHIND = "behind"
    """The agent has not answered to the label as it is now."""
    STALE = "stale"
    """A run began and nobody has told of its end for too long."""
    UNREADABLE = "unreadable"
    NO_AGENT = "no-agent"
    """A layout is wished for, and no agent has ever answered."""
    NO_WISH = "no-wish"

    @property
    def is_good(self) -> bool:
        """Whether the node has what is wished for it."""
        return self in (Standing.IN_FORCE, Standing.NO_WISH)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node as a viewer sees it."""

    view: cluster.NodeView
    is_ready: bool
    wished_by: str = ""
    """Who wrote the wish last, as the API server keeps it; empty when it does not tell."""
    wished_at: dt.datetime | None = None
    """When that somebody last wrote to the node, which may be later than the wish."""

    @property
    def wish(self) -> str:
        """The layout wished for; empty for none."""
        return self.view.labels.get(cluster.CONFIG_LABEL, "")

    @property
    def applied(self) -> str:
        """The layout proven in force; empty for none."""
        return self.view.labels.get(cluster.APPLIED_LABEL, "")

    @property
    def strategy(self) -> str:
        """How the device plugin names MIG devices; empty when nobody tells."""
        return self.view.labels.get(_STRATEGY_LABEL, "")

    @property
    def is_about_gpus(self) -> bool:
        """Whether anything says that the node has NVIDIA GPUs."""
        return (
            bool(self.wish or self.view.allocatable)
            or any(self.view.labels.get(label) == "true" for label in _GPU_LABELS)
            or cluster.STATUS_ANNOTATION in self.view.annotations
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """The status annotation, as far as people want to know it."""

    config: str
    config_hash: str
    state: model.State
    phase: str
    reason: str
    message: str
    attempt: int
    started_at: dt.datetime | None
    finished_at: dt.datetime | None
    retry_at: dt.datetime | None

    @property
    def at(self) -> dt.datetime | None:
        """When it came to be as it is."""
        return self.finished_at or self.started_at


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What there is to say of a node."""

    node: Node
    standing: Standing
    told: Told | None
    gpus: model.ObservedGpus | None
    """As published; None where nothing is, or nothing that makes sense."""
    notes: tuple[str, ...]
    """Sentences about what is odd or not known."""


def judge(node: Node, now: dt.datetime) -> Report:
    """Work out how a node stands.

    Args:
        node: The node.
        now: The present time, in UTC.
    """
    notes: list[str] = []
    told, is_unreadable = None, False
    text = node.view.annotations.get(cluster.STATUS_ANNOTATION)
    if text is not None:
        try:
            told = read(text)
        except ValueError as error:
            is_unreadable = True
            notes.append(f"the status cannot be read: {messages.printable(str(error))}")
    if is_unreadable:
        standing = Standing.UNREADABLE
    elif not node.wish:
        standing = Standing.NO_WISH
    elif told is None:
        standing = Standing.NO_AGENT
    else:
        standing = _of(node, told, now)
    gpus = _gpus(node, notes)
    notes += _oddities(node, told, standing, now)
    notes += [gpu.sentence for gpu in gpus.unreachable] if gpus is not None else []
    return Report(node=node, standing=standing, told=told, gpus=gpus, notes=tuple(notes))


def read(text: str) -> Told:
    """Read a status annotation.

    Raises:
        ValueError: It is none.
    """
    try:
        data = json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(data, dict):
        raise ValueError("it is no JSON object")  # noqa: TRY004 - content
    attempt = data.get("attempt", 1)
    return Told(
        config=_word(data, "config"),
        config_hash=_word(data, "configHash"),
        state=model.State(data.get("state")),
        phase=_word(data, "phase"),
        reason=_word(data, "reason"),
        message=messages.printable(str(data.get("message", ""))[:_MAX_MESSAGE], " "),
        attempt=attempt if isinstance(attempt, int) and 0 <= attempt < 2**31 else 1,
        started_at=messages.parse_time(data.get("startedAt")),
        finished_at=messages.parse_time(data.get("finishedAt")),
        retry_at=messages.parse_time(data.get("retryAt")),
    )


def _word(data: Mapping[str, Any], key: str) -> str:
    return messages.printable(str(data.get(key, ""))[:_MAX_WORD])


def _of(node: Node, told: Told, now: dt.datetime) -> Standing:
    if told.config != node.wish:
        return Standing.BEHIND
    match told.state:
        case model.State.SUCCESS:
            return Standing.IN_FORCE
        case model.State.FAILED:
            is_drift = told.reason == errors.Reason.DRIFTED.value
            return Standing.DRIFTED if is_drift else Standing.FAILED
        case model.State.PENDING | model.State.REBOOTING:
            is_old = told.started_at is None or now - told.started_at > _LONGEST_RUN
            # For its turn among the nodes an agent may wait for long.
            is_waiting = told.phase == model.Phase.WAIT.value
            return Standing.STALE if is_old and not is_waiting else Standing.CHANGING


def _gpus(node: Node, notes: list[str]) -> model.ObservedGpus | None:
    text = node.view.annotations.get(cluster.GPUS_ANNOTATION)
    if text is None:
        if node.is_about_gpus:
            notes.append("no agent has published the GPUs of this node")
        return None
    try:
        return gpu_codec.from_json(text)
    except ValueError as error:
        notes.append(f"what is published of the GPUs cannot be read: {_short(error)}")
        return None


def _short(error: ValueError) -> str:
    return messages.printable(str(error)[:_MAX_WORD])


def _oddities(node: Node, told: Told | None, standing: Standing, now: dt.datetime) -> list[str]:
    notes: list[str] = []
    if not node.is_ready:
        notes.append("the node is not ready: its agent may not run, and this may be old")
    if told is not None:
        return notes + _odd_about(node, told, standing, now)
    foreign = node.view.labels.get(cluster.STATE_LABEL)
    if foreign and standing is Standing.NO_AGENT:
        notes.append(
            f"another manager than mig-manager serves it: {cluster.STATE_LABEL} is {foreign}"
        )
    return notes


def _odd_about(node: Node, told: Told, standing: Standing, now: dt.datetime) -> list[str]:
    notes: list[str] = []
    match standing:
        case Standing.NO_WISH:
            notes.append(f"what is told is of layout {told.config}, which nobody wishes any more")
        case Standing.BEHIND:
            notes.append(f"the agent last told of layout {told.config}, not of {node.wish}")
        case Standing.STALE:
            since = messages.format_time(told.started_at) or "some time"
            notes.append(f"nothing more was told since {since}: look whether the agent runs")
        case Standing.IN_FORCE if node.applied != told.config:
            notes.append(f"label {cluster.APPLIED_LABEL} says {node.applied or 'nothing'}")
        case _:
            pass
    if told.retry_at and now - told.retry_at > _OVERDUE:
        due = messages.format_time(told.retry_at)
        notes.append(f"the next try was due at {due}: look whether the agent runs")
    return notes
