"""Clear the way for a change: who must leave, the node closed to newcomers, the drain."""

import dataclasses
import random
from collections.abc import Sequence

import structlog

from mig_manager import errors
from mig_manager.agent import dependencies, drain, outcomes, record
from mig_manager.core import messages, model, ports, steps, timing
from mig_manager.core.node import clients, cluster, other_managers
from mig_manager.core.node import policy as policies

_log = structlog.get_logger()

_PACE = timing.Backoff(first_s=0.25, max_s=10.0)
"""A slot that becomes free is taken soon where many wait, for their looks are spread."""
_TELL_AGAIN_S = 60.0
"""Hundreds of nodes may wait: each says anew who is before it only so often."""


class Admission:
    """The way of one run to a slot."""

    def __init__(
        self,
        slots: ports.Slots,
        written: record.Record,
        clock: timing.Clock,
        *,
        pace: timing.Backoff = _PACE,
    ) -> None:
        self._slots = slots
        self._record = written
        self._clock = clock
        self._pace = pace
        self._told = ""
        self._told_at_s = 0.0

    def take_again(self) -> None:
        """Take our former slot, or another, for a node that is disrupted already."""
        try:
            denial = self._slots.take()
        except errors.ClusterError as error:
            denial = error.message
        if denial:
            _log.warning("slot_not_taken_again", why=denial)

    def wait(self, wish: ports.Cancellation) -> None:
        """Return once a slot is held.

        Args:
            wish: Asked at every turn.

        Raises:
            ClusterError: The API refused the request as such, or the news of the wait.
            Superseded: The run is no longer wanted.
        """
        turn = 0
        while denial := self._ask():
            self._tell(denial)
            # Lest all who wait come at the same time.
            wish.wait(self._pace.delay_s(turn) * random.uniform(0.5, 1.0))  # noqa: S311 - a spread
            turn += 1

    def _ask(self) -> str:
        try:
            return self._slots.take()
        except errors.ClusterError as error:
            if error.reason is errors.Reason.FORBIDDEN:
                raise
            _log.warning("slots_unknown", reason=error.reason.value, error=error.message)
            return f"waiting for a slot for nodes under change: {error.message}"

    def _tell(self, denial: str) -> None:
        now_s = self._clock.monotonic()
        is_due = not self._told or now_s - self._told_at_s >= _TELL_AGAIN_S
        if denial == self._told or not is_due:
            return
        self._told, self._told_at_s = denial, now_s
        self._record.enter(model.Phase.WAIT, denial, reason=errors.Reason.SLOTS_TAKEN)


Gpus = tuple[model.Gpu, ...]


class Clearing:
    """The way of one run."""

    def __init__(
        self,
        world: dependencies.Dependencies,
        limits: dependencies.Limits,
        written: record.Record,
        *,
        name: str,
    ) -> None:
        self._world = world
        self._limits = limits
        self._record = written
        self._name = name
        self.spares = False
        """Whether nobody may be made to leave."""
        self.applied_before = ""
        """The layout that the node named as in force when it was closed."""

    def survey(self) -> drain.Holders:
        """Return who holds what, unless another program manages the GPUs as well.

        Raises:
            ClusterError: The API refused or does not answer.
            MigManagerError: FOREIGN_MANAGER.
        """
        holders = drain.survey(self._world.workloads, self._world.allocations)
        if not self._limits.allows_foreign_managers:
            others = other_managers.managers(holders.pods, self._world.own_pod_uid)
            if others:
                raise other_managers.refusal(others)
        return holders

    def close(
        self,
        plan: steps.Plan,
        gpus: Gpus,
        holders: drain.Holders,
        table: Sequence[clients.ExtraClient],
    ) -> drain.Drain:
        """Close the node to newcomers, and return the drain for those who must leave.

        Args:
            plan: What is going to change.
            gpus: What there is now.
            holders: The survey that the plan was made with.
            table: The owner's daemons, which are paused later.

        Raises:
            ClusterError: The API refused or does not answer; then nothing was taken.
            Drifted: Pods must leave, and nobody may be made to.
            NotReadyError: The slot that the owner's budget asks for may be another node's.
        """
        order = self._order(plan, gpus, table)
        leaving = order.leaving(holders)
        if leaving and self.spares:
            raise outcomes.Drifted(self._name, tuple(pod.key for pod in leaving))
        self._taint()
        if leaving:
            names = messages.listed(
                [clients.describe_pod(pod, holders.assigned) for pod in leaving]
            )
            pods = "1 pod" if len(leaving) == 1 else f"{len(leaving)} pods"
            self._announce("Draining", f"{pods} must leave: {names}", is_warning=False)
        return self._drain(order)

    def in_the_way(self, plan: steps.Plan, gpus: Gpus) -> tuple[str, ...]:
        """Return the pods that would have to leave for a plan.

        Raises:
            ClusterError: The API refused or does not answer.
        """
        holders = drain.survey(self._world.workloads, self._world.allocations)
        return tuple(pod.key for pod in self._order(plan, gpus, ()).leaving(holders))

    def whole_node(self) -> tuple[drain.Drain, drain.Holders]:
        """Return the drain of every pod with a GPU, whatever the policy spares otherwise.

        Raises:
            ClusterError: The API refused or does not answer.
        """
        order = drain.Order(
            affected=frozenset(),
            policy=dataclasses.replace(self._limits.policy, drain=policies.Drain.NODE),
            timeout_s=self._limits.drain_timeout_s,
            pace=self._limits.pace,
        )
        return self._drain(order), drain.survey(self._world.workloads, self._world.allocations)

    def _order(
        self, plan: steps.Plan, gpus: Gpus, table: Sequence[clients.ExtraClient]
    ) -> drain.Order:
        policy = self._limits.policy
        if self.spares:
            policy = dataclasses.replace(policy, drain=policies.Drain.NONE, is_forced=False)
        return drain.Order(
            affected=clients.affected_ids(plan, gpus),
            policy=policy,
            daemons=tuple(table),
            has_begun=self._record.journal.draining,
            timeout_s=0.0 if self.spares else self._limits.drain_timeout_s,
            pace=self._limits.pace,
        )

    def _taint(self) -> None:
        if self._world.slots is not None and not self._record.journal.blocks_workloads:
            self._world.slots.check()
        self._record.take(model.Phase.CORDON, self._closing)

    def _closing(self, view: cluster.NodeView) -> record.Step:
        self.applied_before = view.labels.get(cluster.APPLIED_LABEL, "")
        return record.Step(
            message=f"applying {self._name}",
            journal=dataclasses.replace(self._record.journal, hold_taint=True),
            change=cluster.NodePatch(hold_taint=True),
        )

    def _drain(self, order: drain.Order) -> drain.Drain:
        return drain.Drain(
            self._world.workloads,
            self._world.allocations,
            self._world.clock,
            order=order,
            tell=drain.Tell(
                on_turn=self._announce_turn,
                on_force=lambda names: self._announce(
                    "ForcedDrain", f"deleting by force {names}", is_warning=True
                ),
            ),
            telemetry=self._world.telemetry,
        )

    def _announce_turn(self, message: str) -> None:
        """Publish the next turn of a rolling drain; written before its first eviction."""
        self._record.enter(
            model.Phase.DRAIN,
            message,
            take=dataclasses.replace(self._record.journal, draining=True),
        )

    def _announce(self, reason: str, message: str, *, is_warning: bool) -> None:
        self._record.enter(model.Phase.DRAIN, message)
        self._world.node.emit(
            reason=reason, message=f"{self._name}: {message}", is_warning=is_warning
        )
