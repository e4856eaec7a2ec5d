"""One change of the GPUs, all or nothing: lock, journal, execute, verify, roll back on failure.

Agent, ``apply``, ``restore`` and ``boot`` all use this transaction. They differ before and after
it, and in where they keep the journal (``ChangeJournal``): in a file or on the Node.

A rollback removes only instances that the change created. It names and keeps instances of other
programs.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator
from typing import Any, Protocol

import structlog

from mig_manager import errors
from mig_manager.change import hook_points
from mig_manager.core import messages, model, ports, steps, timing
from mig_manager.core.planner import planner, vgpus
from mig_manager.core.records import journals

_log = structlog.get_logger()

Observed = model.ObservedGpus
Snapshots = tuple[model.GpuSnapshot, ...]
Replan = Callable[[Observed], steps.Plan]

_MAX_ROUNDS = 3
"""The mode, then instances whose profiles are known only then, and one to spare."""
_ROLLBACK_PAUSES_S = (1.0, 2.0)
"""Before the second and third attempt, however long the previous one took: the driver may need
time to recover."""


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

    def note(self, **entries: Any) -> object:
        """Change entries; a file is written at once, and the Node with its next patch.

        Raises:
            MigManagerError: A snapshot that must be kept cannot be written.
        """

    def announce(self, **entries: Any) -> object:
        """Change entries and write them now; must not raise ``MigManagerError``."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rollback:
    """The outcome of a rollback."""

    is_complete: bool  # whether the reachable GPUs have exactly their former instances
    message: str  # as a part of a sentence
    foreign: tuple[str, ...] = ()
    """Instances that were kept because the change did not create them."""
    unrestored: Snapshots = ()  # snapshots of unreachable GPUs, to be restored once they are back


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
    in_use_timeout_s: float | None = None
    """How long the executor waits for a GPU in use; None, and in a rollback: its own limit."""
    elsewhere: Snapshots = ()  # snapshots of other changes in the same journal

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
            GpuInUseError: Processes use instances to be destroyed; nothing was touched.
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
        rounds.begin(plan, observed)
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

    def _give_up(self, rounds: "_Rounds") -> Rollback:
        if not rounds.refusal:
            return self.roll_back(rounds.before)
        nothing = Rollback(is_complete=True, message="nothing was changed")
        snapshot = (*self.elsewhere, *rounds.earlier)
        result = _with_failure(nothing, lambda: self.journal.note(snapshot=snapshot))
        if not rounds.earlier:
            return result
        # The devices of an interrupted change may be in use since.
        return self.roll_back(rounds.earlier, requires_idle=not rounds.executed)

    def _give_up_keeping_modes(
        self, rounds: "_Rounds", plan: steps.Plan, observed: Observed
    ) -> Rollback:
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
        snapshot = (*self.elsewhere, *rounds.before)
        return _with_failure(result, lambda: self.journal.note(snapshot=snapshot))

    def roll_back(
        self, before: Snapshots, *, keep_pending: bool = False, requires_idle: bool = False
    ) -> Rollback:
        """Restore a snapshot, and retry if the failure is transient."""
        self.journal.begin_rollback()
        restore = _Restore(self, before, keep_pending=keep_pending, requires_idle=requires_idle)
        result = restore.run()
        return self.conclude(result) if restore.is_begun or result.is_complete else result

    def conclude(self, result: Rollback) -> Rollback:
        """Note the end of a rollback and refresh device files; return it with their failures."""
        entries = {"snapshot": (*self.elsewhere, *result.unrestored)} if result.is_complete else {}
        result = _with_failure(result, lambda: self.journal.note(stale_files=True, **entries))
        return _with_failure(result, self.refresh)

    def refresh(self) -> None:
        """Bring device nodes and CDI specs up to date; ``HostError``: DEVICE_FILES_FAILED."""
        if self.refresh_files is not None:
            self.refresh_files()
            self.journal.note(stale_files=False)

    def execute(self, plan: steps.Plan, observed: Observed) -> tuple[Observed, bool]:
        """Execute a plan, and reset its GPUs with a pending mode, or to be repaired.

        A mode that the driver reports as in use is pending as well: ``nvidia-persistenced`` and
        the kernel's persistence mode keep an Ampere GPU open. They close it only for a reset by
        nvidia-smi (gpu-operator#118). The reset names any other process that blocks it, and kills
        none. Raises as ``run``.

        Returns:
            The GPUs afterwards, and whether the rest of the plan remains after a reset. GPUs
            without steps are not observed again.
        """
        is_repair = any(gpu_plan.is_repair for gpu_plan in plan.gpus)
        try:
            after = observed.updated(self.gpus.execute(plan, observed))
            return (self._repair(plan, observed), True) if is_repair else (after, False)
        except errors.GpuInUseError:
            raise
        except errors.HardwareError as error:
            if is_repair and error.reason is not errors.Reason.IN_USE:
                # The reset removes the instances that the fault kept the driver from destroying.
                _log.warning("reset_with_instances", error=error.message)
                return self._repair(plan, observed), True
            is_put_off = error.reason.is_mode_pending or error.reason is errors.Reason.IN_USE
            if self.may_stay_pending and is_put_off:
                now = self._observe_again(plan, observed)
                if _has_modes(plan, now):
                    return now, False
            self._reset_pending(plan, error)
            return self._observe_again(plan, observed), True

    def _reset_pending(self, plan: steps.Plan, error: errors.HardwareError) -> None:
        """Reset the GPUs of a plan whose mode is pending; raise its error if that cannot help."""
        is_in_use = error.reason is errors.Reason.IN_USE
        may_help = is_in_use or error.reason is errors.Reason.RESET_REQUIRED
        if self.reset is None or not may_help:
            raise error
        uuids = {gpu_plan.gpu_uuid for gpu_plan in plan.gpus if gpu_plan.takes_whole_gpu}
        pending = tuple(
            gpu for gpu in self.gpus.observe() if gpu.uuid in uuids and gpu.has_pending_mode
        )
        if is_in_use and not pending:
            raise error
        _log.info("reset_pending", gpus=[gpu.uuid for gpu in pending])
        try:
            if pending:
                self.reset.reset(pending, self.note_persistence)
        except errors.HostError as refused:
            if not is_in_use:
                raise
            error.add(f"the reset failed as well: {refused.message}")
            raise error from refused

    def _observe_again(self, plan: steps.Plan, observed: Observed) -> Observed:
        return observed.updated(self.gpus.observe().only(plan.gpu_uuids))

    def _repair(self, plan: steps.Plan, observed: Observed) -> Observed:
        uuids = {gpu_plan.gpu_uuid for gpu_plan in plan.gpus if gpu_plan.is_repair}
        remembered = {gpu.uuid: gpu for gpu in observed.only(uuids) if gpu.is_remembered}
        now = self.gpus.observe()
        # One that answers again has been reset by a person, and may have new pods.
        silent = [
            remembered[gpu.uuid]
            for gpu in now.unreachable
            if gpu.requires_reset and gpu.uuid in remembered
        ]
        faulty = (*now.only(uuids - remembered.keys()), *silent)
        if self.reset is not None and faulty:
            self.reset.reset(faulty, self.note_persistence, is_repair=True)
        return self._observe_again(plan, observed)

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
    """``before`` without the present plan: the rollback if that is refused. The instances that a
    stale plan would create belong to another program."""
    executed: list[Executed] = dataclasses.field(default_factory=list)
    refusal: errors.GpuInUseError | errors.StalePlanError | None = None
    """Why the executor refused to begin the present plan."""

    def begin(self, plan: steps.Plan, now: Observed) -> None:
        """Write the snapshot that a rollback restores once a plan is executed."""
        before = planner.baseline(plan, now, self.before)
        if before != self.before or not self.executed:
            self.transaction.journal.begin((*self.transaction.elsewhere, *before), plan)
        self.earlier, self.before = self.before, before

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
        """Execute a plan once no process uses the instances that it destroys.

        The executor checks this in the NVML session of the change, so no process can start in
        between.
        """
        guarded = dataclasses.replace(
            plan, requires_idle=True, in_use_timeout_s=self.transaction.in_use_timeout_s
        )

        def attempt() -> tuple[Observed, bool]:
            self.refusal = None
            try:
                return self.transaction.execute(guarded, observed)
            except (errors.GpuInUseError, errors.StalePlanError) as error:
                self.refusal = error
                raise

        wait = self.transaction.idle_wait or timing.Wait(clock=self.transaction.clock)
        return wait.retry(attempt, may_pass=lambda error: isinstance(error, errors.GpuInUseError))


@dataclasses.dataclass(slots=True)
class _Restore:
    """One rollback."""

    transaction: Transaction
    before: Snapshots
    _: dataclasses.KW_ONLY
    keep_pending: bool
    requires_idle: bool
    is_begun: bool = False  # whether a step may have been executed
    now: Observed = model.NO_GPUS

    @property
    def foreign(self) -> tuple[str, ...]:
        """Instances that the change did not create, as last observed."""
        return planner.unowned_instances(self.now, self.before)

    def run(self) -> Rollback:
        """Restore the GPUs, and verify them."""
        pauses_s = iter(_ROLLBACK_PAUSES_S)
        while True:
            try:
                return self._success(self._restore())
            except errors.MigManagerError as error:
                pause_s = next(pauses_s, None)
                # The run itself waits for processes that use instances to be removed. A hung
                # driver costs a whole deadline for each attempt, so a later run retries.
                is_retried = error.reason.is_transient and not isinstance(
                    error, errors.GpuInUseError
                )
                is_hung = error.reason is errors.Reason.NVML_TIMEOUT
                if pause_s is None or is_hung or not is_retried:
                    return self._failure(error)
            self.transaction.clock.wait(pause_s)

    def _success(self, message: str) -> Rollback:
        """Return the success, with the snapshots of unreachable GPUs."""
        if self.foreign:
            return _with_foreign(message, self.foreign)
        unrestored = self.now.unreachable_snapshots(self.before)
        if unrestored:
            lost = "; ".join(gpu.sentence for gpu in self.now.unreachable)
            described = "; ".join(map(_describe, unrestored))
            message += f" on the reachable GPUs; {lost}; to restore once it is back: {described}"
        return Rollback(is_complete=True, message=message, unrestored=unrestored)

    def _restore(self) -> str:
        """Restore and verify once; return the outcome as a part of a sentence."""
        gpus = self.transaction.gpus
        plan = self._plan(gpus.observe())
        if plan.is_empty and not self.is_begun:
            return (
                "only the new mode stays pending" if self.keep_pending else "nothing was changed"
            )
        if not plan.is_empty:
            requires_idle = self.requires_idle and not self.is_begun
            guarded = dataclasses.replace(plan, requires_idle=requires_idle)
            try:
                now, was_reset = self.transaction.execute(guarded, self.now)
            except errors.GpuInUseError:
                raise
            except BaseException:
                self.is_begun = True
                raise
            self.is_begun = True
            plan = self._plan(now)
            if was_reset and not plan.is_empty:
                plan = self._plan(now.updated(gpus.execute(plan, now)))
        if plan.is_empty:
            return "the former instances are restored"
        raise errors.HardwareError(
            "every step succeeded, but the former instances are not restored",
            reason=errors.Reason.VERIFY_FAILED,
        )

    def _failure(self, error: errors.MigManagerError) -> Rollback:
        """Return the failure, with the remaining steps if the GPUs can be observed."""
        _log.warning("rollback_failed", reason=error.reason.value, error=error.message)
        message = f"the rollback failed as well: {error.message}"
        # A driver that has just hung would hang again.
        if error.reason is not errors.Reason.NVML_TIMEOUT:
            with contextlib.suppress(errors.MigManagerError):
                plan = self._plan(self.transaction.gpus.observe())
                if remaining := "; ".join(
                    f"GPU {gpu.gpu_index}: {', '.join(map(steps.describe, gpu.steps))}"
                    for gpu in plan.gpus
                    if gpu.steps
                ):
                    message += f"; still to do: {remaining}"
        return Rollback(is_complete=False, message=message, foreign=self.foreign)

    def _plan(self, now: Observed) -> steps.Plan:
        self.now = now
        return planner.restore(now, self.before, keep_pending=self.keep_pending)


def _with_failure(result: Rollback, act: Callable[[], object]) -> Rollback:
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


def verify_without_steps(now: Observed, before: Snapshots) -> Rollback:
    """Return the outcome for GPUs that need no step; a foreign instance makes it incomplete."""
    foreign = planner.unowned_instances(now, before)
    if foreign:
        return _with_foreign("the former instances are restored", foreign)
    return Rollback(is_complete=True, message="", unrestored=now.unreachable_snapshots(before))


def _with_foreign(message: str, foreign: tuple[str, ...]) -> Rollback:
    _log.warning("foreign_instances_kept", instances=foreign)
    return Rollback(
        is_complete=False,
        message=f"{message}; {', '.join(foreign)} is new, and is kept because this change did not "
        "create it",
        foreign=foreign,
    )


def _has_modes(plan: steps.Plan, gpus: Observed) -> bool:
    """Return whether the modes that a plan sets are active or pending."""
    modes = {gpu.uuid: gpu.pending_mode for gpu in gpus}
    return all(modes.get(step.gpu_uuid) is step.mode for step in plan.of(steps.SetMode))


def _describe(gpu: model.GpuSnapshot) -> str:
    mode = gpu.current_mode.value if gpu.current_mode else "unsupported"
    instances = ", ".join(f"{each.profile} at {each.placement}" for each in gpu.gpu_instances)
    return f"{gpu.uuid}: MIG {mode}, {instances or 'no instance'}"


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
