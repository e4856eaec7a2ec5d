"""One change of the GPUs, all or nothing: lock, journal, execute, verify, roll back on failure.

Agent, ``apply``, ``restore`` and ``boot`` all use this transaction. They differ before and after
it, and in where they keep the journal (``ChangeJournal``): in a file or on the Node.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator
from typing import Protocol, Unpack

import structlog

from mig_manager import errors
from mig_manager.change import execution, hook_points, rollback
from mig_manager.core import messages, model, ports, steps, timing
from mig_manager.core.planner import planner, vgpus
from mig_manager.core.records import journals

_log = structlog.get_logger()

Observed = model.ObservedGpus
Snapshots = tuple[model.GpuSnapshot, ...]
Replan = Callable[[Observed], steps.Plan]

_MAX_ROUNDS = 3
"""The mode, then instances whose profiles are known only then, and one to spare."""


class ChangeJournal(Protocol):
    """The journal of a change, which outlives a killed process and lists what to undo."""

    @property
    def entries(self) -> journals.Journal:
        """The entries as they are now."""

    def begin(self, before: Snapshots, plan: steps.Plan) -> object:
        """Write the snapshot that a rollback restores, before a plan is executed.

        Called again when a later plan of the same change affects more.

        Raises:
            MigManagerError: The journal cannot be written; nothing may be executed.
        """

    def begin_rollback(self) -> object:
        """Report that a rollback begins; must not raise ``MigManagerError``."""

    def note_gpus(self, gpus: Observed) -> object:
        """Note the GPUs after a rollback."""

    def note(self, **entries: Unpack[journals.Changes]) -> object:
        """Change entries; a file is written at once, and the Node with its next patch.

        Raises:
            MigManagerError: A snapshot that must be kept cannot be written.
        """

    def announce(self, **entries: Unpack[journals.Changes]) -> object:
        """Change entries and write them now; must not raise ``MigManagerError``."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Executed:
    """A plan that was executed."""

    plan: steps.Plan
    gpus: Observed  # before the plan


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Transaction:
    """Changes GPUs, or rolls them back; the caller holds the node's lock (``hold_lock``)."""

    gpus: ports.Gpus
    journal: ChangeJournal
    clock: timing.Clock
    refresh_files: Callable[[], object] | None
    """Brings device nodes and CDI specs up to date; None: the caller does, after more changes."""
    reset: ports.GpuReset | None = None
    """Resets GPUs with a pending mode; None: the mode stays pending, and no GPU is repaired."""
    idle_wait: timing.Wait | None = None
    """For processes that use instances to be destroyed; None: one attempt."""
    may_stay_pending: bool = False  # whether a mode may stay pending until a reset or a reboot
    elsewhere: Snapshots = ()  # snapshots of other changes in the same journal
    require_unused: execution.RequireUnused | None = None
    """Asks kubelet; None: for the agent, which drains pods itself."""
    in_use_timeout_s: float = 0.0
    """With ``require_unused``: how long to retry what the driver refuses as in use."""

    def run(
        self,
        first: steps.Plan,
        *,
        observed: Observed,
        replan: Replan,
        interrupted: Snapshots = (),
        unrestored: Callable[[Observed], Snapshots] = lambda _gpus: (),
        points: hook_points.HookPoints | None = None,
    ) -> tuple[Observed, tuple[Executed, ...]]:
        """Execute a plan, and a second one if the driver reports profiles only with MIG on.

        The caller then calls ``refresh``.

        Args:
            first: The plan; not empty.
            observed: The GPUs that the plan was made for. GPUs without steps are not observed
                again: the drift check detects changes by other programs.
            replan: Plans the same layout again; an empty plan verifies it.
            interrupted: The GPUs before an interrupted change, which a rollback restores.
            unrestored: Returns snapshots of unreachable GPUs outside the layout, to restore later.
            points: Where hooks run; None: no hooks.

        Returns:
            The GPUs afterwards, and the plans that were executed.

        Raises:
            GpuInUseError: Processes or pods use devices to be destroyed; nothing was touched.
            StalePlanError: An instance that the plan creates exists; nothing was touched.
            HardwareError: A step failed, or the layout is not active although all succeeded
                (VERIFY_FAILED). The message says how the rollback went. A mode that needs a reset
                (RESET_REQUIRED) stays pending.
            HostError: A reset was refused, and the mode stays pending; or a hook failed.
            LayoutError: The second plan is impossible.
            MigManagerError: The journal cannot be written.
            Superseded: The change was superseded before its first step, or while a hook ran.
        """
        rounds = _Rounds(self, interrupted, points or hook_points.HookPoints())
        plan = rounds.points.first_stage(first)
        rounds.begin(first, observed)
        try:
            after = rounds.run(plan, first, observed, replan)
        except errors.Superseded as end:
            _log.info("change_superseded", why=end.why)
            self._give_up(rounds)
            raise
        except errors.MigManagerError as error:
            _log.warning("change_failed", reason=error.reason.value, error=error.message)
            # A reboot activates a pending mode; cancelling the mode would waste the reboot.
            keep_pending = error.reason.is_mode_pending
            result = (
                self._give_up_keeping_modes(rounds, first, observed)
                if keep_pending
                else self._give_up(rounds)
            )
            error.add(result.message)
            for warning in vgpus.host_warnings(observed, first):
                error.add(warning)
            if result.foreign and not keep_pending:
                raise errors.HardwareError(
                    error.message, reason=errors.Reason.VERIFY_FAILED
                ) from error
            raise
        self.journal.note(snapshot=(*self.elsewhere, *unrestored(after)), stale_files=True)
        return after, tuple(rounds.executed)

    def _give_up(self, rounds: "_Rounds") -> rollback.Rollback:
        if rounds.has_begun:
            return self.roll_back(rounds.before)
        nothing = rollback.Rollback(is_complete=True, message="nothing was changed")
        snapshot = (*self.elsewhere, *rounds.earlier)
        result = _with_failure(nothing, lambda: self.journal.note(snapshot=snapshot))
        if not rounds.earlier:
            return result
        # The devices of an interrupted change may be in use since.
        return self.roll_back(rounds.earlier, requires_idle=not rounds.executed)

    def _give_up_keeping_modes(
        self, rounds: "_Rounds", plan: steps.Plan, observed: Observed
    ) -> rollback.Rollback:
        """Roll back, but leave an older change of a mode that the plan keeps to a later rollback.

        Else the reset or reboot that activates the pending modes would activate the old one too.
        """
        switched = {(step.gpu_uuid, step.mode) for step in plan.of(steps.SetMode)}
        now = {gpu.uuid: gpu.snapshot for gpu in observed}

        def target(older: model.GpuSnapshot) -> model.GpuSnapshot:
            present = now.get(older.uuid, older)
            is_switched = (older.uuid, older.current_mode) in switched
            if present.current_mode is older.current_mode or is_switched:
                return older
            return dataclasses.replace(present, created=older.created)

        before = tuple(map(target, rounds.before))
        result = self.roll_back(before, keep_pending=True)
        if before == rounds.before:
            return result
        snapshot = (*self.elsewhere, *planner.trim(result.gpus, rounds.before))
        return _with_failure(result, lambda: self.journal.note(snapshot=snapshot))

    def roll_back(
        self, before: Snapshots, *, keep_pending: bool = False, requires_idle: bool = False
    ) -> rollback.Rollback:
        """Restore a snapshot, and retry if the failure is transient."""
        self.journal.begin_rollback()
        restore = rollback.Restore(
            executing=self.execution,
            clock=self.clock,
            before=before,
            keep_pending=keep_pending,
            requires_idle=requires_idle,
        )
        result = restore.run()
        if result.gpus:
            self.journal.note_gpus(result.gpus)
        if restore.is_begun or result.is_complete:
            return self.conclude(result)
        # Instances that others create from now on must not count as the change's.
        snapshot = planner.trim(result.gpus, self.journal.entries.snapshot)
        return _with_failure(result, lambda: self.journal.note(snapshot=snapshot))

    def conclude(self, result: rollback.Rollback) -> rollback.Rollback:
        """Note the end of a rollback and refresh device files; return it with their failures."""
        snapshot = (
            (*self.elsewhere, *result.unrestored)
            if result.is_complete
            else planner.trim(result.gpus, self.journal.entries.snapshot)
        )
        result = _with_failure(
            result, lambda: self.journal.note(snapshot=snapshot, stale_files=True)
        )
        return _with_failure(result, self.refresh)

    def refresh(self) -> None:
        """Bring device nodes and CDI specs up to date; ``HostError``: DEVICE_FILES_FAILED."""
        if self.refresh_files is not None:
            self.refresh_files()
            self.journal.note(stale_files=False)

    @property
    def execution(self) -> execution.Execution:
        """The execution of its plans."""
        return execution.Execution(
            gpus=self.gpus,
            reset=self.reset,
            note_persistence=self.note_persistence,
            may_stay_pending=self.may_stay_pending,
            require_unused=self.require_unused,
            in_use_wait=timing.Wait(clock=self.clock, timeout_s=self.in_use_timeout_s),
        )

    def note_persistence(self, uuids: Collection[str], *, is_on: bool) -> None:
        """Note that the persistence mode of GPUs will be switched off, or is on again."""
        others = [uuid for uuid in self.journal.entries.persistent_gpus if uuid not in uuids]
        self.journal.announce(persistent_gpus=(*others, *(() if is_on else uuids)))


@dataclasses.dataclass(slots=True)
class _Rounds:
    """The plans of one change, executed one after the other."""

    transaction: Transaction
    before: Snapshots  # the GPUs that a rollback restores; grows with each plan
    points: hook_points.HookPoints
    earlier: Snapshots = ()
    """``before`` without the present plan: the rollback if that was not begun. The instances that
    a stale plan would create belong to another program."""
    executed: list[Executed] = dataclasses.field(default_factory=list)
    has_begun: bool = False  # whether a step of the present plan may have been executed

    def begin(self, plan: steps.Plan, now: Observed) -> None:
        """Write the snapshot that a rollback restores once a plan is executed."""
        before = planner.baseline(plan, now, self.before)
        if before != self.before or not self.executed:
            self.transaction.journal.begin((*self.transaction.elsewhere, *before), plan)
        self.earlier, self.before = planner.trim(now, self.before), before
        self.has_begun = False

    def run(
        self, plan: steps.Plan, first: steps.Plan, observed: Observed, replan: Replan
    ) -> Observed:
        after = observed
        while True:
            self.points.before(plan)
            before_plan = after
            after, was_reset = self._execute_idle(plan, before_plan)
            self.executed.append(Executed(plan=plan, gpus=before_plan))
            rest = replan(after)
            if rest.is_empty:
                return after
            if was_reset and any(gpu_plan.is_repair for gpu_plan in rest.gpus):
                raise errors.HardwareError(
                    "the GPU still needs a reset, although it was reset",
                    reason=errors.Reason.GPU_NEEDS_RESET,
                )
            is_more_known = plan.is_provisional and not rest.is_provisional
            is_staged = len(self.executed) == 1 and plan is not first
            is_last = len(self.executed) == _MAX_ROUNDS
            # The pods of other GPUs were not drained.
            is_drained = rest.gpu_uuids <= first.gpu_uuids
            if is_last or not (is_drained and (was_reset or is_more_known or is_staged)):
                raise errors.HardwareError(
                    "the layout is not active, although every step succeeded, on "
                    + ", ".join(str(gpu) for gpu in after if gpu.uuid in rest.gpu_uuids),
                    reason=errors.Reason.VERIFY_FAILED,
                )
            plan = rest
            self.begin(plan, after)

    def _execute_idle(self, plan: steps.Plan, observed: Observed) -> tuple[Observed, bool]:
        """Execute a plan once no process or pod uses the instances that it destroys.

        The executor checks processes in the NVML session of the change, so no process can start in
        between.
        """
        guarded = dataclasses.replace(plan, requires_idle=True)

        def attempt() -> tuple[Observed, bool]:
            self.has_begun = True
            try:
                return self.transaction.execution.run(guarded, observed)
            except execution.REFUSALS:
                self.has_begun = False
                raise

        wait = self.transaction.idle_wait or timing.Wait(clock=self.transaction.clock)
        return wait.retry(attempt, may_pass=lambda error: isinstance(error, errors.GpuInUseError))


def _with_failure(result: rollback.Rollback, act: Callable[[], object]) -> rollback.Rollback:
    """Act after a rollback, and add a failure to its outcome.

    Raised, it would replace the failure of the change. The journal keeps what ``begin`` wrote.
    """
    try:
        act()
    except errors.MigManagerError as error:
        if error.message not in result.message:
            message = messages.join(result.message, error.message)
            return dataclasses.replace(result, message=message)
    return result


OBSERVING = "observing the GPUs"
CHECKING = "checking layout"
PLANNING = "planning layout"


def may_change_gpus(owner: str) -> bool:
    """Return whether the owner of the node's lock, as described, may be changing the GPUs."""
    reads = (OBSERVING, CHECKING, PLANNING)
    return bool(owner) and not any(f", {each}" in owner for each in reads)


@contextlib.contextmanager
def hold_lock(lock: ports.NodeLock, doing: str, wait: timing.Wait) -> Iterator[None]:
    """Wait for the node's lock, and hold it in the context.

    Raises:
        LockedError: On entering: another manager, which it names, had the lock until the deadline.
        UsageError: On entering: as ``hold`` of the lock.
    """
    with contextlib.ExitStack() as stack:
        wait.retry(
            lambda: stack.enter_context(lock.hold(doing)),
            may_pass=lambda error: isinstance(error, errors.LockedError),
            goal=" for it to finish",
        )
        yield
