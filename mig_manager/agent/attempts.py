"""One attempt at a request, and the state that its phases share."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import structlog

from mig_manager import errors, reasons
from mig_manager.agent import agent_settings, outcomes, publish, run_recorder, successors
from mig_manager.change import (
    change_recorder,
    hook_points,
    layout_store,
    plan_executor,
    transaction,
)
from mig_manager.core import messages, model, ports, timing
from mig_manager.core.layout import config, custom_layouts, layout_documents
from mig_manager.core.node import pod_object
from mig_manager.core.records import node_entries, requests, run_status
from mig_manager.core.settings import node_settings

_Problem = TypeVar("_Problem")

_log = structlog.get_logger()

_parsed = functools.lru_cache(maxsize=1)(config.parse)
"""Cache: the file rarely changes, and parsing would take half of the time until ``pending``."""
_NOT_RETRIED = "Request a layout that keeps what is in use; the agent does not retry."
_REFUSAL_PAUSE_S = 10.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The requested layout, and how to attempt it."""

    config: str = ""  # the name of the layout; empty: none is requested
    custom: custom_layouts.Custom | None = None
    """The content of ``custom``; None for other layouts."""
    annotation_hash: str = ""
    """Hash of ``custom`` where its content is not needed, because nothing is applied."""
    is_new: bool = False  # whether label or annotation have changed since the last run
    is_heal: bool = False  # whether a drift is healed, for which no pod is evicted
    attempt: int = 1
    retry_after_s: float = 0.0  # the pause before the next attempt, if this one fails
    repairs: frozenset[str] = frozenset()
    """UUIDs of the GPUs to repair, in an attempt that repairs; empty: the layout is applied."""

    @property
    def key(self) -> run_status.RequestKey:
        """Which request this is, for comparison with a record or journal."""
        custom = self.custom
        return run_status.RequestKey(
            self.config, custom.annotation_hash if custom else self.annotation_hash
        )

    def never_evicts(self, record: requests.RequestRecord) -> bool:
        """Return whether no attempt evicts a pod: for a layout that programs choose on demand.

        A repair has the right from the owner's setting, whatever the origin of the layout.
        """
        return not (record.may_evict or self.repairs)


@dataclasses.dataclass(slots=True)
class AttemptMemory:
    """What attempts on one node remember of earlier ones, besides the journal."""

    stuck_uids: frozenset[str] = frozenset()
    """UIDs of pods that did not stop by the deadline of an earlier pause."""
    returning: successors.Successors = dataclasses.field(default_factory=successors.Successors)
    """Where evicted pods return, over the attempts of one drain."""
    restarted: frozenset[str] = frozenset()
    """Names of the advertisers with outdated devices that attempts at this request restarted."""
    checked_ids: frozenset[str] | None = None
    """The devices that were last withdrawn if no GPU had them; None: to be done."""
    stopped_services: frozenset[str] = frozenset()
    """Names of the host services that this process stopped, and has not started since."""
    _removal_refused_s: float = dataclasses.field(default=-math.inf, init=False)

    def begin_request(self) -> None:
        """Forget the restarted advertisers and the checked devices of an earlier request."""
        self.restarted = frozenset()
        self.checked_ids = None

    def set_checked(self, ids: frozenset[str] | None) -> None:
        """Remember the devices for which no further withdrawal is sent; None: none."""
        self.checked_ids = ids

    def add_restarted(self, names: Iterable[str]) -> None:
        """Remember advertisers that were restarted because of outdated devices."""
        self.restarted |= frozenset(names)

    def begin_drain(self) -> None:
        """Forget where the pods of an earlier drain returned."""
        self.returning = successors.Successors()

    def add_stuck(self, pods: Iterable[pod_object.Pod]) -> None:
        """Remember pods that did not stop in time."""
        self.stuck_uids |= {pod.uid for pod in pods}

    def add_stopped_services(self, names: Iterable[str]) -> None:
        """Remember host services before they are stopped."""
        self.stopped_services |= frozenset(names)

    def remove_stopped_service(self, name: str) -> None:
        """Forget a host service that was started."""
        self.stopped_services -= {name}

    def may_remove_phantoms(self, now_s: float) -> bool:
        """Return whether to request a removal; a wait asks this more often than it may."""
        return now_s >= self._removal_refused_s + _REFUSAL_PAUSE_S

    def record_refused_removal(self, now_s: float) -> None:
        """Remember that the API refused to remove phantom devices."""
        self._removal_refused_s = now_s


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeContext:
    """The ports, limits and memory of one node, for all attempts on it.

    A function takes it for the limits or the memory; for ports alone it takes ``deps`` or a port.
    """

    deps: ports.Dependencies
    limits: agent_settings.Limits
    publisher: publish.Publisher
    memory: AttemptMemory

    @property
    def node_labels(self) -> Mapping[str, str]:
        """The node's labels, from the watch if it runs."""
        return self.deps.node.latest().labels

    @property
    def may_repair(self) -> bool:
        """Whether the owner lets the agent reset GPUs with a fault, and it can."""
        is_allowed = self.limits.repair is node_settings.RepairPolicy.RESET
        return is_allowed and self.deps.reset is not None

    @property
    def verified_layout(self) -> layout_store.VerifiedLayoutStore:
        """The verified layout, saved for the next boot."""
        return layout_store.VerifiedLayoutStore(self.deps.verified_layout_file, self.deps.boot_id)

    def layout_file(self) -> layout_documents.Document:
        """Parse the config document; ConfigError if it cannot be read or is invalid."""
        source, limits = self.deps.configs, self.limits
        try:
            return _parsed(source.read(), source=source.name, is_lenient=limits.is_lenient)
        except errors.ConfigError as error:
            if limits.has_default_layouts:
                _log.warning("default_layouts_not_read", error=error.message)
            raise

    def hold_lock(
        self, doing: str, wait: timing.Wait | None = None, *, changes_gpus: bool = True
    ) -> contextlib.AbstractContextManager[None]:
        """Hold the node's lock in the context; without ``wait``, try once.

        Raises:
            LockedError: On entering: another manager had it until the deadline.
            Superseded: On entering: the wait was interrupted.
        """
        wait = wait or timing.Wait(clock=self.deps.clock)
        return transaction.hold_lock(self.deps.lock, doing, wait, changes_gpus=changes_gpus)

    def observe(self) -> model.ObservedGpus:
        """Observe the GPUs while no other manager changes them.

        Raises:
            HardwareError: None can be observed.
            LockedError: Another manager is at work.
        """
        with self.hold_lock("observing the GPUs", changes_gpus=False):
            return self.deps.gpus.observe()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Attempt(NodeContext):
    """One attempt at a request; its fields never change.

    A function that takes it waits, writes the journal, or acts as the request says.
    """

    request: Request
    cancel: ports.Cancellation  # can cancel the attempt until GPUs are touched
    recorder: run_recorder.RunRecorder
    hooks: hook_points.HookPoints

    @property
    def status(self) -> run_status.RunStatus:
        """The status, with the GPUs as last observed in this attempt; empty before."""
        return self.recorder.status

    @property
    def is_first(self) -> bool:
        """Whether no attempt at the same request came before."""
        return self.request.attempt == 1

    @property
    def only_restores(self) -> bool:
        """Whether the layout was verified since it was requested: no pod is evicted for it."""
        is_verified = self.request.is_heal or self.recorder.record.verified is not None
        return is_verified and not self.request.repairs

    @property
    def never_evicts(self) -> bool:
        """Whether no attempt at this request evicts a pod."""
        return self.request.never_evicts(self.recorder.record)

    @property
    def plugin_config(self) -> str | None:
        """The device plugin's config for this layout; None keeps the present one."""
        is_repair = bool(self.request.repairs)
        return None if is_repair else self.limits.policy.plugin_config(self.request.config)

    def failure(
        self, reason: reasons.Reason, *parts: str, is_final: bool = False, remedy: str = ""
    ) -> outcomes.Outcome:
        """Return the failure of this attempt, with unreachable GPUs.

        It is retried if its reason is temporary, unless it ``is_final``. It is also retried if
        GPUs or host services are in neither the requested nor the previous state.
        """
        message = messages.join(*parts)
        is_about_gpu = reason is reasons.Reason.GPU_UNREACHABLE
        lost = () if is_about_gpu else self.status.gpus.unreachable
        remaining = self.recorder.journal.remaining(node_entries.RunEnd.RESTORED)
        is_undone = not remaining.needs_undo
        is_final = is_final and is_undone
        return outcomes.failure(
            reason,
            messages.join(message, *(gpu.sentence for gpu in lost if gpu.message not in message)),
            should_retry=not is_undone or (reason.is_transient and not is_final),
            remedy=_NOT_RETRIED if is_final else remedy,
        )

    def forget_former_layout(self) -> None:
        """Forget the former layout: an undo no longer restores it, unless a repair kept it."""
        if not self.request.repairs:
            self.recorder.set_journal(applied_before="")

    def wait(self, timeout_s: float) -> timing.Wait:
        """Return a wait that a newer request ends."""
        return timing.Wait(
            clock=self.deps.clock,
            timeout_s=timeout_s,
            sleep=self.cancel.wait,
            backoff=self.limits.backoff,
        )

    def until_solved(
        self, find: Callable[[pod_object.Pods], _Problem], timeout_s: float
    ) -> tuple[_Problem, pod_object.Pods]:
        """Wait until ``find`` finds no problem with the node's pods.

        A list confirms the watch's report, because a watch may lag behind.

        Returns:
            The problem at the deadline, if it remains, and the pods as last listed.

        Raises:
            ClusterError: The API refused or does not answer.
            Superseded: Another layout is requested, or the agent stops.
        """
        workloads = self.deps.workloads
        rounds = dataclasses.replace(self.wait(timeout_s), sleep=self.cancel.pause).attempts()
        while True:
            is_late = next(rounds)
            watched = None if is_late else workloads.from_watch()
            if watched is None or not find(watched):
                pods = workloads.list()
                if not (problem := find(pods)) or is_late:
                    return problem, pods

    def transaction(
        self,
        idle_wait: timing.Wait | None = None,
        require_unused: plan_executor.RequireUnused | None = None,
    ) -> transaction.Transaction:
        """Return a transaction on the node's GPUs."""
        return transaction.Transaction(
            executor=plan_executor.PlanExecutor(
                gpus=self.deps.gpus,
                reset=self.deps.reset,
                record_persistence=functools.partial(
                    change_recorder.record_persistence, self.recorder
                ),
                clock=self.deps.clock,
                require_unused=require_unused,
            ),
            recorder=self.recorder,
            refresh_files=self.deps.refresh_files,
            idle_wait=idle_wait or timing.Wait(clock=self.deps.clock),
        )
