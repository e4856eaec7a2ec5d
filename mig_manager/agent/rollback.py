"""Return GPUs to where an interrupted or failed change found them, and hurt nobody by it.

Right after a failure nobody can hold what the change made: the plugin is away. Later, when a
killed agent has come back or an earlier way back had failed, somebody may. So it is looked first,
and where a pod would lose its device the GPUs stay as they are.
"""

import contextlib
from collections.abc import Sequence

import structlog

from mig_manager import errors
from mig_manager.agent import drain, gpu_clients, record
from mig_manager.change import instrumentation, transaction
from mig_manager.core import model, ports, steps, timing
from mig_manager.core.node import clients
from mig_manager.core.planner import planner

_log = structlog.get_logger()


class WayBack:
    """The rollback of a change that an earlier run left unfinished.

    Args:
        transaction: Rolls back.
        workloads: The pods.
        allocations: Which pod uses which devices.
        staff: The node's daemons.
        telemetry: Told that a wait goes on.
    """

    def __init__(
        self,
        transaction: transaction.Transaction,
        workloads: ports.Workloads,
        allocations: ports.DeviceAllocations,
        *,
        staff: gpu_clients.Daemons,
        telemetry: instrumentation.Telemetry,
    ) -> None:
        self._telemetry = telemetry
        self._transaction = transaction
        self._workloads = workloads
        self._allocations = allocations
        self._daemons = staff

    def is_open(self, now: Sequence[model.Gpu], snapshot: Sequence[model.GpuSnapshot]) -> bool:
        """Tell whether the snapshot can be returned to without taking a device from a pod.

        Raises:
            ClusterError: The API refused or does not answer.
        """
        try:
            return not self._hurt(planner.restore(now, snapshot), now)
        except errors.LayoutError as error:
            _log.warning("way_back_closed", error=error.message)
            return False

    def take(self, journal: record.Record) -> str:
        """Return to the journal's snapshot, if it has one and that hurts nobody.

        Args:
            journal: Told of it if the GPUs are as they were; keeps the snapshot if not.

        Returns:
            How it went, as a part of a sentence; empty when there was nothing to do.
        """
        if not journal.journal.snapshot:
            return ""
        try:
            return self._take(journal)
        except errors.MigManagerError as error:
            _log.warning("way_back_failed", reason=error.reason.value, error=error.message)
            return f"the change under way before could not be undone: {error.message}"

    def _take(self, journal: record.Record) -> str:
        snapshot = journal.journal.snapshot
        now = self._transaction.gpus.observe()
        journal.note(gpus=now)
        plan = planner.restore(now, snapshot)
        if plan.is_empty:
            return self._transaction.without_steps(now, snapshot).message
        self._require_unheld(plan, now)
        self._transaction.journal.rolling_back()
        steadfast = _Steadfast(self._transaction.clock, self._telemetry)
        paused = self._daemons.pause(plan, journal, steadfast)
        try:
            # Only now can nobody be given a device any more.
            self._require_unheld(plan, now)
            result = self._transaction.roll_back(snapshot, requires_idle=True)
            if result.is_complete:
                journal.note(gpus=self._transaction.gpus.observe())
        finally:
            # An API that fails now must not hide the reason; the end gives everything back.
            with contextlib.suppress(errors.ClusterError):
                self._daemons.resume_plugin(paused, journal)
        return result.message

    def _require_unheld(self, plan: steps.Plan, now: Sequence[model.Gpu]) -> None:
        hurt = self._hurt(plan, now)
        if hurt:
            raise errors.DrainError(
                f"pods hold what would go: {', '.join(hurt)}", pods=tuple(hurt)
            )

    def _hurt(self, plan: steps.Plan, now: Sequence[model.Gpu]) -> tuple[str, ...]:
        holders = drain.survey(self._workloads, self._allocations)
        affected = clients.affected_ids(plan, now)
        return tuple(
            pod.key for pod in clients.affected_pods(holders.pods, holders.assigned, affected)
        )


class _Steadfast:
    """Implements ``ports.Cancellation`` for what must be finished whatever is wanted meanwhile."""

    def __init__(self, clock: timing.Clock, telemetry: instrumentation.Telemetry) -> None:
        self._clock = clock
        self._telemetry = telemetry

    def check(self) -> None:
        """Never end."""
        self._telemetry.still_working()

    def wait(self, seconds: float) -> None:
        """Sleep through."""
        self._telemetry.still_working()
        self._clock.wait(seconds)

    def pause(self, seconds: float) -> None:
        """Sleep through."""
        self.wait(seconds)
