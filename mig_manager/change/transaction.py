"""One change of the GPUs, all or nothing: journal, execute, verify, and roll back on failure.

The agent, ``apply``, ``restore`` and ``boot`` all go through this transaction, so that none of
them leaves a half-applied change behind. What differs between them is where the journal is kept
(``Journal``) and what happens around the transaction.
"""

import dataclasses
import typing
from collections.abc import Callable, Sequence

import structlog

from mig_manager import errors
from mig_manager.change import hook_points
from mig_manager.core import model, ports, steps, timing
from mig_manager.core.planner import planner

_ROLLBACK_TRIES = 3
_ROLLBACK_PAUSE_S = 1.0

_log = structlog.get_logger()

Observed = model.ObservedGpus
Snapshot = Sequence[model.GpuSnapshot]
Reset = Callable[[Sequence[model.Gpu]], None]
Replan = Callable[[Observed], steps.Plan]

_MOST_ROUNDS = 3
"""One for the mode, one for the instances where profiles are known only then, one to spare."""

_PACE = timing.Backoff()


class Journal(typing.Protocol):
    """The write-ahead record of a transaction; it outlives a process that is killed."""

    def begin(self, before: tuple[model.GpuSnapshot, ...], plan: steps.Plan) -> object:
        """Write what a rollback restores, before a plan is executed.

        Called again, with more, where a later plan of the same change does more.

        Raises:
            MigManagerError: It cannot be kept; then nothing is executed.
        """

    def rolling_back(self) -> object:
        """Learn that a rollback begins; must not raise ``MigManagerError``."""

    def undone(self, due: tuple[model.GpuSnapshot, ...] = ()) -> object:
        """Learn that the reachable GPUs are again as they were.

        Args:
            due: What GPUs had that are unreachable now: it is restored once they are back.
        """

    def done(self, gpus: Observed) -> object:
        """Learn that the change is verified: there is nothing to roll back any more."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How a transaction waits for processes to let go of what it is going to destroy."""

    timeout_s: float = 0.0
    """0: it is refused at once."""
    wait: Callable[[float], object] | None = None
    """Waits for seconds; what it raises ends the change. None: the transaction's clock."""
    on_wait: Callable[[errors.GpuInUseError], object] = lambda _error: None
    """Called once, before the first wait."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rollback:
    """How a rollback went."""

    is_complete: bool
    """Whether the reachable GPUs are as they were, with nothing beside."""
    message: str
    """As a part of a sentence."""
    foreign: tuple[str, ...] = ()
    """Instances that were kept because the change did not create them, in words."""
    due: tuple[model.GpuSnapshot, ...] = ()
    """What GPUs had that are unreachable now, and so do not have it again."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Transaction:
    """Changes GPUs, or restores what they had.

    The caller holds the node's lock (``turn.held``).
    """

    gpus: ports.Gpus
    journal: Journal
    clock: timing.Clock
    reset: Reset | None = None
    """Resets GPUs whose new mode waits for that; None: nothing does."""
    device_files: ports.DeviceFiles | None = None
    """Refreshed after each change and each rollback; None: others see to them."""
    patience: Patience = dataclasses.field(default_factory=Patience)
    """With processes that use what is going to be destroyed."""

    def run(
        self,
        first: steps.Plan,
        *,
        seen: Observed,
        replan: Replan,
        older: Snapshot = (),
        points: hook_points.HookPoints | None = None,
    ) -> tuple[Observed, tuple[steps.Plan, ...]]:
        """Execute a plan, and a second one where the driver tells its profiles only with MIG on.

        Args:
            first: The plan; not empty.
            seen: The GPUs as the plan was made for them. Those that it leaves alone are not looked
                at again: what somebody else makes of them is found as drift.
            replan: The planner, asked again for the same layout; an empty plan verifies it.
            older: What an unfinished change found: a rollback leads back past it.
            points: Where the owner's hooks run before the steps; None: there are none.

        Returns:
            The GPUs afterwards, and the plans that were executed.

        Raises:
            GpuInUseError: Processes use what the plan destroys; nothing was touched.
            StalePlanError: Somebody else has made what the plan creates; nothing was touched.
            HardwareError: A step failed, or the layout is not active although none did
                (VERIFY_FAILED). The message says how the rollback went; a mode that waits for a
                reset (RESET_REQUIRED) is left waiting.
            HostError: A reset was refused, and the mode is left waiting; or a hook failed; or
                DEVICE_FILES_FAILED: the change itself is verified all the same.
            LayoutError: The second plan cannot be made.
            MigManagerError: The journal cannot be kept.
            Superseded: The change ended early, before its first step or while a hook ran.
        """
        rounds = _Rounds(self, planner.baseline(first, seen, older), points)
        self.journal.begin(rounds.before, first)
        try:
            after = rounds.run(first, seen, replan)
        except errors.Superseded as end:
            _log.info("change_superseded", why=end.why)
            self._give_up(rounds, older, keep_pending=False)
            raise
        except errors.MigManagerError as error:
            _log.warning("change_failed", reason=error.reason.value, error=error.message)
            # Where only a reboot brings the mode, to call it off would make every reboot in vain.
            keep_pending = error.reason.means_mode_waits
            result = self._give_up(rounds, older, keep_pending=keep_pending)
            error.add(result.message)
            if result.foreign and not keep_pending:
                raise errors.HardwareError(
                    error.message, reason=errors.Reason.VERIFY_FAILED
                ) from error
            raise
        self.journal.done(after)
        self.refresh()
        return after, tuple(rounds.executed)

    def _give_up(self, rounds: "_Rounds", older: Snapshot, *, keep_pending: bool) -> Rollback:
        if rounds.is_refused and not older:
            self.journal.undone()
            return Rollback(is_complete=True, message="nothing was changed")
        # What a stale plan creates is there, and is not its own.
        before = older if rounds.is_stale else rounds.before
        return self.roll_back(before, keep_pending=keep_pending)

    def roll_back(
        self, before: Snapshot, *, keep_pending: bool = False, requires_idle: bool = False
    ) -> Rollback:
        """Restore a snapshot, in several tries where a failure can pass.

        Only what the change created is removed. Any other instance that the snapshot lacks is
        named and kept, and the journal stays.

        Args:
            before: What the GPUs had.
            keep_pending: Whether a mode that waits for a reset may go on waiting.
            requires_idle: Whether to refuse while a process uses what would be removed.
        """
        self.journal.rolling_back()
        restore = _Restore(self, before, keep_pending=keep_pending, requires_idle=requires_idle)
        result = restore.run()
        if result.is_complete:
            self.journal.undone(result.due)
        if restore.is_begun:
            try:
                self.refresh()
            except errors.HostError as error:
                more = f"{result.message}; {error.message}"
                return dataclasses.replace(result, message=more)
        return result

    def without_steps(self, now: Observed, before: Snapshot) -> Rollback:
        """End a rollback for which no step is due: foreign instances alone keep it open.

        Args:
            now: The GPUs as they are.
            before: What they had.
        """
        foreign = planner.unowned_instances(now, before)
        if not foreign:
            due = now.missing(before)
            self.journal.undone(due)
            return Rollback(is_complete=True, message="", due=due)
        return _with_foreign("the instances from before are back", foreign)

    def refresh(self) -> None:
        """Bring device nodes and CDI specs up to date with the GPUs.

        Raises:
            HostError: DEVICE_FILES_FAILED.
        """
        if self.device_files is not None:
            self.device_files.refresh()

    def execute(self, plan: steps.Plan, seen: Observed) -> tuple[Observed, bool]:
        """Execute a plan; where a mode then waits for a reset, reset those GPUs and no other.

        A mode that the driver reports as in use waits as well: ``nvidia-persistenced`` and the
        kernel's persistence mode keep an Ampere GPU open and let go only for a reset by nvidia-smi
        (gpu-operator#118). The reset names every other process in its way and touches none.

        Returns:
            The GPUs afterwards, and whether the rest of the plan is still due, which is so where a
            mode had to wait.

        Raises:
            HardwareError: A step failed.
            HostError: A reset was refused.
        """
        try:
            return seen.updated(self.gpus.execute(plan, seen)), False
        except errors.GpuInUseError:
            raise
        except errors.HardwareError as error:
            return self._reset_waiting(plan, error), True

    def _reset_waiting(self, plan: steps.Plan, error: errors.HardwareError) -> Observed:
        """Reset the GPUs whose mode waits, if that is why a plan failed; else raise the error."""
        is_in_use = error.reason is errors.Reason.IN_USE
        if self.reset is None or not (is_in_use or error.reason is errors.Reason.RESET_REQUIRED):
            raise error
        ours = {gpu_plan.gpu_uuid for gpu_plan in plan.gpus if gpu_plan.changes_mode}
        waiting = tuple(
            gpu for gpu in self.gpus.observe() if gpu.uuid in ours and gpu.has_pending_mode
        )
        if is_in_use and not waiting:
            raise error
        _log.info("reset_due", gpus=[gpu.uuid for gpu in waiting])
        try:
            if waiting:
                self.reset(waiting)
        except errors.HostError as refused:
            if not is_in_use:
                raise
            error.add(f"no reset either: {refused.message}")
            raise error from refused
        return self.gpus.observe()


class _Rounds:
    """The plans of one change, executed one after the other until there is nothing left to do."""

    def __init__(
        self,
        transaction: Transaction,
        before: tuple[model.GpuSnapshot, ...],
        points: hook_points.HookPoints | None,
    ) -> None:
        self._transaction = transaction
        self._points = points or hook_points.HookPoints()
        self.before = before
        """What a rollback restores; grows with each plan."""
        self.executed: list[steps.Plan] = []
        self.is_refused = False
        """Whether no step was run, because processes use what would be destroyed."""
        self.is_stale = False
        """Whether no step was run, because what would be created was there already."""

    def run(self, first: steps.Plan, seen: Observed, replan: Replan) -> Observed:
        plan, after = self._points.staged(first), seen
        while True:
            self._points.before(plan)
            after, was_reset = self._when_idle(plan, after)
            self.executed.append(plan)
            rest = replan(after)
            if rest.is_empty:
                return after
            is_more_known = plan.is_provisional and not rest.is_provisional
            is_staged = len(self.executed) == 1 and plan is not first
            is_last = len(self.executed) == _MOST_ROUNDS
            if is_last or not (was_reset or is_more_known or is_staged):
                raise _not_active(rest, after)
            plan = rest
            self._cover(plan, after)

    def _cover(self, plan: steps.Plan, seen: Observed) -> None:
        """Have the journal name what a later plan changes, if that is more."""
        before = planner.baseline(plan, seen, self.before)
        if before != self.before:
            self.before = before
            self._transaction.journal.begin(before, plan)

    def _when_idle(self, plan: steps.Plan, seen: Observed) -> tuple[Observed, bool]:
        """Execute a plan once no process uses what it destroys, within the patience.

        The executor looks in the session in which it then begins, so that no time is between.
        """
        patience, clock = self._transaction.patience, self._transaction.clock
        guarded = dataclasses.replace(plan, requires_idle=True)
        until: float | None = None
        turn = 0
        while True:
            try:
                return self._transaction.execute(guarded, seen)
            except errors.StalePlanError:
                self.is_refused = self.is_stale = not self.executed
                raise
            except errors.GpuInUseError as error:
                # A worker may take long to come to its answer: that is no wait.
                if until is None:
                    until = clock.monotonic() + patience.timeout_s
                left_s = until - clock.monotonic()
                self.is_refused = not self.executed
                if left_s <= 0:
                    if turn:
                        error.add(f"waited {patience.timeout_s:g} s")
                    raise
                if turn == 0:
                    patience.on_wait(error)
            (patience.wait or clock.wait)(min(_PACE.delay_s(turn), left_s))
            self.is_refused = False
            turn += 1


class _Restore:
    """From what there is to what there was."""

    def __init__(
        self,
        transaction: Transaction,
        before: Snapshot,
        *,
        keep_pending: bool,
        requires_idle: bool,
    ) -> None:
        self._transaction = transaction
        self._gpus = transaction.gpus
        self._before = before
        self._keep_pending = keep_pending
        self._requires_idle = requires_idle
        self._foreign: tuple[str, ...] = ()
        self._now = model.NO_GPUS
        self.is_begun = False
        """Whether any step may have been run."""

    def run(self) -> Rollback:
        import tenacity  # noqa: PLC0415 - a fifth of what a command imports, and seldom needed

        trying = tenacity.Retrying(
            stop=tenacity.stop_after_attempt(_ROLLBACK_TRIES),
            wait=tenacity.wait_exponential(multiplier=_ROLLBACK_PAUSE_S),
            retry=tenacity.retry_if_exception(_can_pass),
            sleep=self._transaction.clock.wait,
            reraise=True,
        )
        try:
            message = trying(self._restore)
        except errors.MigManagerError as error:
            _log.warning("rollback_failed", reason=error.reason.value, error=error.message)
            failed = f"returning to the instances from before failed as well: {error.message}"
            # A driver that has just hung would hang on the question what is left, too.
            left = "" if error.reason is errors.Reason.NVML_TIMEOUT else self._left()
            return Rollback(is_complete=False, message=f"{failed}{left}", foreign=self._foreign)
        if self._foreign:
            return _with_foreign(message, self._foreign)
        due = self._now.missing(self._before)
        if due:
            lost = "; ".join(gpu.sentence for gpu in self._now.unreachable)
            described = "; ".join(map(_described, due))
            message += f" on the GPUs that answer; {lost}; due once it is back: {described}"
        return Rollback(is_complete=True, message=message, due=due)

    def _restore(self) -> str:
        """Restore, verify, and say how it went.

        Raises:
            MigManagerError: Something is still due.
        """
        now = self._gpus.observe()
        plan = self._plan(now)
        if plan.is_empty and not self.is_begun:
            return (
                "only the new mode stays pending" if self._keep_pending else "nothing was changed"
            )
        if not plan.is_empty:
            now, was_reset = self._execute(plan, now)
            plan = self._plan(now)
            if was_reset and not plan.is_empty:
                plan = self._plan(now.updated(self._gpus.execute(plan, now)))
        if plan.is_empty:
            return "the instances from before are back"
        raise errors.HardwareError(
            "the steps succeeded and did not bring them back", reason=errors.Reason.VERIFY_FAILED
        )

    def _execute(self, plan: steps.Plan, now: Observed) -> tuple[Observed, bool]:
        requires_idle = self._requires_idle and not self.is_begun
        try:
            done = self._transaction.execute(
                dataclasses.replace(plan, requires_idle=requires_idle), now
            )
        except errors.GpuInUseError:
            raise
        except BaseException:
            self.is_begun = True
            raise
        self.is_begun = True
        return done

    def _left(self) -> str:
        """Say what is still due, to the last instance; empty where it cannot be told."""
        try:
            plan = self._plan(self._gpus.observe())
        except errors.MigManagerError:
            return ""
        due = [
            f"GPU {gpu.gpu_index}: {', '.join(map(steps.described, gpu.steps))}"
            for gpu in plan.gpus
            if gpu.steps
        ]
        return f"; still due: {'; '.join(due)}" if due else ""

    def _plan(self, now: Observed) -> steps.Plan:
        self._now = now
        self._foreign = planner.unowned_instances(now, self._before)
        return planner.restore(now, self._before, keep_pending=self._keep_pending)


def _described(gpu: model.GpuSnapshot) -> str:
    mode = gpu.current_mode.value if gpu.current_mode else "unsupported"
    instances = ", ".join(f"{each.profile} at {each.placement}" for each in gpu.gpu_instances)
    return f"{gpu.uuid}: MIG {mode}, {instances or 'no instance'}"


def _with_foreign(message: str, foreign: tuple[str, ...]) -> Rollback:
    _log.warning("foreign_instances_kept", instances=foreign)
    which = ", ".join(foreign)
    return Rollback(
        is_complete=False,
        message=f"{message}; {which} was not there before, and is kept because this change did "
        "not create it",
        foreign=foreign,
    )


def _can_pass(error: BaseException) -> bool:
    # A driver that hangs costs a whole deadline at each try: that is left to a later run. Whoever
    # uses what a later rollback would remove is waited for by that run as well.
    return (
        isinstance(error, errors.MigManagerError)
        and error.reason.is_transient
        and error.reason is not errors.Reason.NVML_TIMEOUT
        and not isinstance(error, errors.GpuInUseError)
    )


def _not_active(rest: steps.Plan, after: Observed) -> errors.HardwareError:
    unlike = {gpu_plan.gpu_uuid for gpu_plan in rest.gpus}
    return errors.HardwareError(
        "the layout is not active, although every step succeeded, on "
        + ", ".join(str(gpu) for gpu in after if gpu.uuid in unlike),
        reason=errors.Reason.VERIFY_FAILED,
    )
