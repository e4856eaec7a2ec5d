"""Follow the nodes of a rollout: from what their agents publish, and since when.

A node counts as unavailable if it is not ready, cordoned or tainted. It also counts from the
request, even before the drain, until its agent has finished and will not retry.
"""

import dataclasses
import datetime as dt
from typing import NamedTuple

from mig_manager.core import messages
from mig_manager.core.fleet import cluster_plan, fleet_nodes, goals, node_progress, preview
from mig_manager.core.fleet.node_progress import NodeProgress, NodeProgressState
from mig_manager.core.records import run_status

_OUTDATED = "its agent still has other content"
_EDITED = "the layout's content was edited meanwhile"


class _Failure(NamedTuple):
    """The identity of a failure: a repeated one differs."""

    state: NodeProgressState
    attempt: int = 0
    at: dt.datetime | None = None  # when the failed run finished


@dataclasses.dataclass(frozen=True, slots=True)
class _Unfinished:
    """A request that an agent has not finished."""

    requested: str | None
    has_responded: bool
    since_s: float  # since when both are so


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeMemory:
    """What a rollout remembers of one node from one decision to the next."""

    uid: str = ""  # a node registered again under its name is another node
    is_requested: bool = False  # whether its label was written and is not visible yet
    gpus_text: str | None = None  # as its agent last published them
    misfit: cluster_plan.NodePlan | None = None  # why it cannot have the layout, by these GPUs
    has_joined: bool = False  # whether it has shown the target label during this rollout
    target: str | None = None
    """The label's value when it joined: an undo's is unknown once the mark is gone."""
    is_withdrawn: bool = False  # whether its previous request was restored
    has_had_content: bool = False  # whether its agent has listed the named document's content
    since_s: float | None = None  # since when it is in progress, without its wait for a slot
    unfinished: _Unfinished | None = None
    failure: NodeProgress | None = None  # the last one; None if it is applied
    earlier_failure: _Failure | None = None  # at the start: does not pause the rollout
    has_failed: bool = False  # during the rollout, even if the layout was applied later

    def after(
        self,
        progress: NodeProgress,
        reported: run_status.PublishedStatus | None,
        *,
        has_begun: bool,
    ) -> "NodeMemory":
        """Return it with the failure that this progress shows; an applied layout ends one."""
        if progress.state is NodeProgressState.SUCCESS:
            return dataclasses.replace(self, failure=None)
        if progress.state not in node_progress.BAD:
            return self
        failure = _Failure(progress.state)
        if reported and progress.state is NodeProgressState.FAILED:
            failure = _Failure(progress.state, reported.attempt, reported.at)
        earlier = self.earlier_failure if has_begun else failure
        return dataclasses.replace(
            self,
            failure=progress,
            earlier_failure=earlier,
            has_failed=self.has_failed or failure != earlier,
        )


Advanced = tuple[NodeMemory, NodeProgress]


class ProgressTracker:
    """Derives the progress of a rollout's nodes; methods take and return a node's memory."""

    def __init__(self, goal: goals.RolloutGoal, limits: goals.RolloutLimits) -> None:
        self._goal = goal
        self._limits = limits
        self._misfits: dict[object, cluster_plan.NodePlan | None] = {}

    def follow(self, memory: NodeMemory | None, node: fleet_nodes.FleetNode) -> NodeMemory:
        """Return the memory of a node with the GPUs that it shows now; None: it is new."""
        if memory is None or memory.uid != node.view.uid:
            # Else the replacement of a failed node would let further nodes start.
            has_failed = memory is not None and memory.has_failed
            memory = NodeMemory(uid=node.view.uid, has_failed=has_failed)
        if memory.has_joined or node.gpus_text in (None, memory.gpus_text):
            # For a node that shows no GPUs for a while, its previous ones count.
            return memory
        misfit = preview.misfit(self._goal, node, self._misfits)
        return dataclasses.replace(memory, gpus_text=node.gpus_text, misfit=misfit)

    def is_ours(self, memory: NodeMemory, node: fleet_nodes.FleetNode) -> bool:
        """Return whether a rollout made the node's request, and it is not withdrawn."""
        return not memory.is_withdrawn and self._goal.withdrawal(node) is not None

    def omit(self, memory: NodeMemory, node: fleet_nodes.FleetNode, now_s: float) -> Advanced:
        """Return the memory of a node that is not changed, and whether it is unavailable."""
        state = NodeProgressState.SKIPPED
        memory, is_awaited = self._follow_request(memory, node, now_s)
        return memory, NodeProgress(
            name=node.name,
            state=state,
            is_unavailable=self._is_unavailable(memory, node, state, is_awaited=is_awaited),
            is_reserved=is_awaited,
        )

    def _follow_request(
        self, memory: NodeMemory, node: fleet_nodes.FleetNode, now_s: float
    ) -> tuple[NodeMemory, bool]:
        """Return the memory with an unfinished request, and whether that may change the node."""
        unfinished = _unfinished_request(memory.unfinished, node, now_s)
        # A silent agent changes nothing.
        is_awaited = unfinished is not None and (
            node.has_responded or now_s - unfinished.since_s < self._limits.silence_timeout_s
        )
        return dataclasses.replace(memory, unfinished=unfinished), is_awaited

    def advance(
        self, memory: NodeMemory, node: fleet_nodes.FleetNode, now_s: float, *, has_begun: bool
    ) -> Advanced:
        """Return what to remember of a node, and its progress.

        ``has_begun`` is whether the rollout has made a decision before.
        """
        is_listed = self._goal.is_listed_on(node)
        is_outdated = is_listed is False
        if is_listed:
            memory = dataclasses.replace(memory, has_had_content=True)
        target = memory.target if memory.has_joined else self._goal.target(node)
        is_visible = node.requested == target
        state, message = self._state(memory, node, is_visible=is_visible, is_outdated=is_outdated)
        is_edited = memory.has_had_content and is_outdated
        if is_edited and state is NodeProgressState.PENDING:
            state, message = NodeProgressState.SUPERSEDED, _EDITED
        reported = node.current_status
        since_s = memory.since_s
        reason, why = _cause(state, memory.misfit, reported)
        if is_visible and state is not NodeProgressState.SKIPPED:
            memory = dataclasses.replace(
                memory, is_requested=False, has_joined=True, target=node.requested
            )
        if state in (NodeProgressState.SUCCESS, NodeProgressState.TO_DO):
            since_s = None
        elif state in (NodeProgressState.PENDING, NodeProgressState.FAILED):
            waits = is_visible and reported and reported.phase == run_status.Phase.WAIT.value
            since_s = now_s if waits or since_s is None else since_s
        seconds = 0.0 if since_s is None else now_s - since_s
        if state is NodeProgressState.PENDING:
            is_silent = is_visible and not node.has_responded
            state, late = self._state_in_time(seconds, is_silent=is_silent)
            message = messages.join(late, message)
        memory, is_awaited = self._follow_request(memory, node, now_s)
        progress = NodeProgress(
            name=node.name,
            state=state,
            phase=reported.phase if reported and state in node_progress.MOVING else "",
            reason=reason,
            message=message or why,
            is_retried=state is NodeProgressState.FAILED
            and bool(reported and reported.is_retried),
            seconds=seconds,
            before=node.mark.before if node.mark else None,
            unreachable=reported.unreachable
            if reported and state is NodeProgressState.SUCCESS
            else (),
            is_unavailable=self._is_unavailable(memory, node, state, is_awaited=is_awaited),
            is_reserved=state is NodeProgressState.TO_DO
            and self._goal.layout is not None
            and is_awaited
            # A request that failed has changed nothing.
            and not (reported and reported.state is run_status.State.FAILED),
            is_outdated=state is NodeProgressState.TO_DO and is_outdated,
        )
        memory = dataclasses.replace(memory, since_s=since_s)
        return memory.after(progress, reported, has_begun=has_begun), progress

    def _is_unavailable(
        self,
        memory: NodeMemory,
        node: fleet_nodes.FleetNode,
        state: NodeProgressState,
        *,
        is_awaited: bool,
    ) -> bool:
        """Return whether a node counts as unavailable."""
        if not (node.has_published or node.has_gpus):
            return False
        if node.is_unavailable or state in node_progress.MOVING:
            return True
        if state is NodeProgressState.NO_RESPONSE:
            # An agent that returns acts on its request until the request is withdrawn.
            return self.is_ours(memory, node)
        return is_awaited

    def _state(
        self,
        memory: NodeMemory,
        node: fleet_nodes.FleetNode,
        *,
        is_visible: bool,
        is_outdated: bool,
    ) -> tuple[NodeProgressState, str]:
        """Return a node's state without limits, with a message if its agent reports none."""
        if memory.is_withdrawn:
            why = "no agent responded; the previous request is restored"
            return NodeProgressState.NO_RESPONSE, why
        if not node.has_published:
            return NodeProgressState.SKIPPED, fleet_nodes.NO_GPUS_SHOWN
        if is_visible:
            return _state_of_requested(node, self._goal.content_hash)
        if memory.is_requested:
            return NodeProgressState.PENDING, ""
        if memory.has_joined or self._goal.is_superseded(node):
            requested = node.requested and f"layout {node.requested} was requested"
            message = f"{requested or 'the label was removed'} meanwhile"
            return NodeProgressState.SUPERSEDED, message
        skipped = NodeProgressState.SKIPPED, "" if memory.misfit else "the node is not ready"
        is_startable = node.is_ready and not memory.misfit
        to_do = NodeProgressState.TO_DO, _OUTDATED if is_outdated else ""
        return to_do if is_startable else skipped

    def _state_in_time(
        self, elapsed_s: float, *, is_silent: bool
    ) -> tuple[NodeProgressState, str]:
        """Return the state of a node in progress, by the limits."""
        silence_s = self._limits.silence_timeout_s
        if is_silent and elapsed_s >= silence_s:
            why = f"no agent has responded for {silence_s:g} s; is it running?"
            return NodeProgressState.NO_RESPONSE, why
        if elapsed_s >= self._limits.node_timeout_s:
            why = f"not applied {self._limits.node_timeout_s:g} s after the start"
            return NodeProgressState.TIMED_OUT, why
        return NodeProgressState.PENDING, ""


def _cause(
    state: NodeProgressState,
    misfit: cluster_plan.NodePlan | None,
    reported: run_status.PublishedStatus | None,
) -> tuple[str, str]:
    """Return why a node has its state: the reason and the message; empty if unknown."""
    if state is NodeProgressState.SKIPPED:
        return (misfit.reason_text, misfit.message) if misfit else ("", "")
    return (reported.reason, reported.message) if reported else ("", "")


def _unfinished_request(
    before: _Unfinished | None, node: fleet_nodes.FleetNode, now_s: float
) -> _Unfinished | None:
    """Return the request that a node's agent has not finished, if there is one."""
    if node.is_finished:
        return None
    now = _Unfinished(node.requested, node.has_responded, now_s)
    is_same = before is not None and now == dataclasses.replace(before, since_s=now_s)
    return before if is_same else now


def _state_of_requested(
    node: fleet_nodes.FleetNode, content_hash: str
) -> tuple[NodeProgressState, str]:
    if node.requested is None:
        if node.is_changing:
            return NodeProgressState.PENDING, "its agent has not finished the former request"
        why = "no layout is requested, as before the rollout; the GPUs stay unchanged"
        return NodeProgressState.SUCCESS, why
    is_success = node.state == run_status.State.SUCCESS.value and node.applied == node.requested
    if is_success and (node.status is None or node.is_finished):
        # Without a hash its content is unknown.
        status_hash = node.status.content_hash if node.status else ""
        if content_hash and status_hash and status_hash != content_hash:
            return NodeProgressState.PENDING, _OUTDATED
        return NodeProgressState.SUCCESS, ""
    has_failed = node.current_status and node.current_status.state is run_status.State.FAILED
    return NodeProgressState.FAILED if has_failed else NodeProgressState.PENDING, ""
