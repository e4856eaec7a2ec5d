"""The common part of changes at a shell: dependencies, lock, journal file, undoing a killed run.

The journal outlives a killed process. It has the GPUs as they were before the change. So the next
run can roll back, and does not mistake half of a change for the former state.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection
from typing import Unpack

from mig_manager import errors
from mig_manager.change import change_journal, execution, layout_store, pod_use, transaction
from mig_manager.core import gpu_processes, model, ports, steps, timing
from mig_manager.core.planner import planner
from mig_manager.core.records import journals, run_status

SignalsDeferred = Callable[[], contextlib.AbstractContextManager[Callable[[], object]]]

RETRIED_LATER = "the next 'apply' tries again"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LocalDependencies:
    """The ports and settings of a change from the command line."""

    gpus: ports.Gpus
    lock: ports.NodeLock
    journal: ports.KeptFile  # journal of a change under way
    verified_layout_file: ports.KeptFile
    clock: timing.Clock
    boot_id: str  # differs after each reboot; empty: unknown
    lock_timeout_s: float
    notify: Callable[[str], object]
    uninterrupted: SignalsDeferred = lambda: contextlib.nullcontext(tuple)
    """Makes the context of a change, which delays signals. Entering it returns a check, for hooks
    and waits, that raises ``Superseded`` after a signal."""
    reset: ports.GpuReset | None = None
    """Resets GPUs with a pending mode; None: the mode stays pending."""
    may_reset: bool = True
    hooks: ports.Hooks | None = None
    processes: Callable[[], gpu_processes.Processes] = dict
    """Returns the processes that use each GPU; raises HardwareError if the driver refuses."""
    pods: pod_use.PodUse  # the pods whose devices a change must not destroy
    refresh_files: Callable[[], object] = lambda: None
    """Brings device nodes and CDI specs up to date, if no other program writes them; raises
    HostError DEVICE_FILES_FAILED."""
    idle_timeout_s: float = 0.0
    """How long to wait for processes and pods that use instances to be destroyed; 0: fail at
    once."""
    in_use_timeout_s: float = 0.0  # how long to retry what the driver refuses as in use
    driver_timeout_s: float = 0.0
    """How long to wait for a driver that is not loaded yet; 0: fail at once."""

    @property
    def verified_layout(self) -> layout_store.VerifiedLayoutStore:
        """The verified layout, saved for the next boot."""
        return layout_store.VerifiedLayoutStore(self.verified_layout_file, self.boot_id)


def hold_lock(deps: LocalDependencies, doing: str) -> contextlib.AbstractContextManager[None]:
    """Wait for the node's lock, and hold it in the context.

    Raises:
        LockedError: On entering: another manager had the lock until the deadline.
        UsageError: On entering: the lock file cannot be written.
    """
    return transaction.hold_lock(deps.lock, doing, new_wait(deps, deps.lock_timeout_s))


def observe(deps: LocalDependencies) -> model.ObservedGpus:
    """Observe the GPUs, and wait for a driver that is not loaded yet.

    For the first observation only: a driver that is unloaded during a change is an error.

    Raises:
        HardwareError: The driver was not loaded in time, or NVML refused or failed.
    """
    return new_wait(deps, deps.driver_timeout_s).retry(
        deps.gpus.observe,
        may_pass=lambda error: error.reason is errors.Reason.DRIVER_NOT_LOADED,
        goal=" for it",
    )


def new_wait(
    deps: LocalDependencies, timeout_s: float, *, check: Callable[[], object] = lambda: None
) -> timing.Wait:
    """Return a wait that notifies people when it begins; exceptions of ``check`` end it."""

    def sleep(seconds: float) -> None:
        check()
        deps.clock.wait(seconds)
        check()

    return timing.Wait(
        clock=deps.clock,
        timeout_s=timeout_s,
        sleep=sleep,
        on_wait=lambda error: deps.notify(
            f"{error.message}; waiting up to {round(timeout_s, 1):g} s"
        ),
    )


def new_transaction(
    deps: LocalDependencies,
    journal: change_journal.ChangeJournal,
    *,
    check: Callable[[], object] = lambda: None,
    may_stay_pending: bool = False,
    kept_snapshots: model.Snapshots = (),
) -> transaction.Transaction:
    """Build the transaction of a change at a shell."""
    return transaction.Transaction(
        executor=execution.Execution(
            gpus=deps.gpus,
            reset=deps.reset if deps.may_reset else None,
            note_persistence=functools.partial(change_journal.note_persistence, journal),
            clock=deps.clock,
            require_unused=deps.pods.require_unused,
            in_use_timeout_s=deps.in_use_timeout_s,
            may_stay_pending=may_stay_pending,
        ),
        journal=journal,
        refresh_files=deps.refresh_files,
        idle_wait=new_wait(deps, deps.idle_timeout_s, check=check),
        kept_snapshots=kept_snapshots,
    )


@dataclasses.dataclass(slots=True)
class LocalJournal:
    """Implements ``change_journal.ChangeJournal`` in a file."""

    deps: LocalDependencies
    entries: journals.Journal
    config: str = ""  # the layout that the next change applies

    def begin(self, before: model.Snapshots, _plan: steps.Plan) -> None:
        """Write the snapshot that a rollback restores; UsageError if that is impossible."""
        self.note(config=self.config, snapshot=before)

    def begin_rollback(self) -> None:
        """Report nothing: the outcome of the change includes the rollback's."""

    def note_status(self, **fields: Unpack[run_status.Fields]) -> None:
        """Note nothing: the file has no status."""

    def note(self, **entries: Unpack[journals.Entries]) -> None:
        """Change entries, and write the file or remove it.

        Raises:
            UsageError: A snapshot cannot be written.
        """
        before = self.entries
        self.entries = dataclasses.replace(
            before.with_entries(**entries), boot_id=self.deps.boot_id
        )
        if not self.entries.is_empty:
            try:
                self.deps.journal.save(self.entries.to_json())
            except errors.ConfigError as error:
                if self.entries.gpus.snapshot:
                    self.entries = before
                    raise _not_written(error) from error
            else:
                return
        # An outdated snapshot is worse than outdated device files.
        try:
            self.deps.journal.clear()
        except errors.ConfigError as error:
            self.deps.notify(f"{error.message}; remove it, because it is outdated")

    def announce(self, **entries: Unpack[journals.Entries]) -> None:
        """Change entries and write the file; a failure is only reported."""
        try:
            self.note(**entries)
        except errors.UsageError as error:
            self.deps.notify(error.message)

    def refresh_files(self) -> None:
        """Refresh outdated device files; HostError (DEVICE_FILES_FAILED) if that fails."""
        if self.entries.gpus.stale_files:
            new_transaction(self.deps, self).refresh()

    def undo(self, observed: model.ObservedGpus) -> str:
        """Roll back the changes of a killed run; return the outcome, empty if there were none."""
        unfinished = describe_unfinished(self.entries)
        before = self.entries.gpus.snapshot
        if not before:
            try:
                self.refresh_files()
            except errors.HostError as error:
                return error.message
            return ""
        plan = planner.restore(observed, before)
        if not self.deps.may_reset and any(gpu.needs_reset for gpu in plan.gpus):
            return f"{unfinished} and is not undone, because that resets a GPU"
        with self.deps.uninterrupted():
            result = new_transaction(self.deps, self).roll_back(before, requires_idle=True)
        if result.is_complete and not result.unrestored:
            return f"{unfinished} and is undone now"
        return f"{unfinished}; {result.message}; {RETRIED_LATER}"


def describe_unfinished(entries: journals.Journal) -> str:
    """Say whose change a killed run left unfinished."""
    return f"the change to layout '{entries.config}' was left unfinished"


def describe_interrupted(
    journal: ports.KeptFile,
    observed: model.ObservedGpus = model.NO_GPUS,
    covered: Collection[str] = (),
) -> str:
    """Say that a killed run left a change unfinished; empty without a valid journal of one.

    Names the GPUs that 'apply' restores although its layout does not cover them (by UUID).
    """
    entries = _read(journal)
    try:
        outside = list_restored_outside(observed, entries.gpus.snapshot, covered)
    except errors.LayoutError:
        return ""
    if not entries.gpus.snapshot:
        return ""
    also = f", and restores {outside} outside its layout" if outside else ""
    return (
        f"{describe_unfinished(entries)}; the next 'apply', 'restore' or 'boot' finishes or "
        f"undoes it{also}"
    )


def as_if_undone(
    deps: LocalDependencies, observed: model.ObservedGpus, gpu: model.Gpu
) -> model.Gpu:
    """Return a GPU as undoing a killed run leaves it."""
    entries = _read(deps.journal)
    before: model.Gpu | model.GpuSnapshot = gpu
    if not _why_outdated(deps, entries, observed):
        before = next((each for each in entries.gpus.snapshot if each.uuid == gpu.uuid), gpu)
    return dataclasses.replace(
        gpu,
        current_mode=before.current_mode,
        pending_mode=before.pending_mode,
        gpu_instances=before.gpu_instances,
    )


def _read(journal: ports.KeptFile) -> journals.Journal:
    """Return the journal's entries; none if it is missing or invalid."""
    try:
        return journals.Journal.from_json(journal.read() or "")
    except (ValueError, errors.ConfigError, errors.LayoutError):
        return journals.Journal(config="")


def list_restored_outside(
    observed: model.ObservedGpus, snapshot: model.Snapshots, covered: Collection[str]
) -> str:
    """Name the GPUs outside a layout that its change restores; empty if there are none."""
    outside = [gpu for gpu in snapshot if gpu.uuid not in covered]
    uuids = planner.restore(observed, outside).gpu_uuids
    return ", ".join(str(gpu) for gpu in observed if gpu.uuid in uuids)


def undo_interrupted(deps: LocalDependencies) -> str:
    """Roll back the changes of a killed run; return the outcome, empty if there were none.

    Raises:
        HardwareError: NVML refused or failed.
        LockedError: Another manager had the lock until the deadline.
        UsageError: Lock or journal cannot be written.
    """
    with contextlib.suppress(errors.ConfigError):
        if deps.journal.read() is None:
            return ""
    with hold_lock(deps, "undo an unfinished change"):
        observed = observe(deps)
        return open_journal(deps, observed).undo(observed)


def open_journal(
    deps: LocalDependencies, observed: model.ObservedGpus, *, config: str = ""
) -> LocalJournal:
    """Open the journal, with the entries of a killed run if there are any.

    ``config`` is the layout to apply next.

    Raises:
        UsageError: An invalid journal cannot be moved away.
    """
    empty = LocalJournal(deps, journals.Journal(config=config), config)
    try:
        text = deps.journal.read()
        if text is None:
            return empty
        entries = journals.Journal.from_json(text)
        plan = planner.restore(observed, entries.gpus.snapshot)
    except (ValueError, errors.ConfigError, errors.LayoutError) as error:
        problem = error.message if isinstance(error, errors.MigManagerError) else str(error)
        try:
            kept = deps.journal.set_aside()
        except errors.ConfigError as refused:
            raise _not_written(refused) from refused
        deps.notify(
            f"the journal of an earlier change is invalid ({problem}); it is kept as {kept} "
            "and otherwise ignored"
        )
        return empty
    journal = LocalJournal(
        deps,
        # The other entries are the agent's, and do not occur in a file.
        journals.Journal(
            config=entries.config,
            gpus=journals.GpuEntries(
                snapshot=planner.trim(observed, entries.gpus.snapshot),
                stale_files=True,
                persistent_gpus=_restore_persistence(deps, entries, observed),
            ),
        ),
        config=config,
    )
    is_complete = not planner.unowned_instances(observed, entries.gpus.snapshot)
    is_undone = (
        plan.is_empty and is_complete and not observed.unreachable_snapshots(entries.gpus.snapshot)
    )
    why = "" if is_undone else _why_outdated(deps, entries, observed)
    if why:
        deps.notify(f"{describe_unfinished(entries)}{why}: it will not be undone")
    if is_undone or why:
        journal.note(snapshot=())
    return journal


def _restore_persistence(
    deps: LocalDependencies, journal: journals.Journal, observed: model.ObservedGpus
) -> tuple[str, ...]:
    """Switch on the persistence mode that a killed run switched off; return where it stays off."""
    if journal.boot_id != deps.boot_id:
        # A reboot switches persistence mode off.
        return ()
    present = [gpu for gpu in observed if gpu.uuid in journal.gpus.persistent_gpus]
    is_on = deps.reset is not None and deps.reset.restore_persistence(present)
    restored = {gpu.uuid for gpu in present if is_on}
    # The UUID of an unreachable GPU may be unknown; GPUs of another node do not matter.
    uuids = {gpu.uuid for gpu in (*observed, *observed.unreachable)}
    return tuple(
        uuid
        for uuid in journal.gpus.persistent_gpus
        if uuid not in restored and (uuid in uuids or "" in uuids)
    )


def _why_outdated(
    deps: LocalDependencies, journal: journals.Journal, observed: model.ObservedGpus
) -> str:
    """Return why the journal is outdated; empty unless another program set up its GPUs since."""
    uuids = {gpu.uuid for gpu in journal.gpus.snapshot}
    # No instance survives a reboot, so another program has created the existing ones.
    is_rebooted = bool(journal.boot_id) and journal.boot_id != deps.boot_id
    if is_rebooted and any(gpu.gpu_instances for gpu in observed.only(uuids)):
        return " when the node was rebooted, and the GPUs were set up since"
    # An unfinished change leaves no verified layout: an agent has applied it after the kill.
    kept = deps.verified_layout.read()
    if kept is None:
        return ""
    snapshot = tuple(gpu for gpu in kept.snapshot if gpu.uuid in uuids)
    try:
        is_active = planner.restore(observed, snapshot).is_empty and not (
            observed.unreachable_snapshots(snapshot)
            or planner.unowned_instances(observed, snapshot)
        )
    except errors.LayoutError:
        return ""
    is_covered = kept.covered is None or uuids.issubset(kept.covered)
    is_complete = is_covered and len(snapshot) == len(journal.gpus.snapshot)
    is_known = is_complete and kept.boot_id == deps.boot_id
    return f", and layout '{kept.config}' was verified since" if is_known and is_active else ""


def _not_written(error: errors.ConfigError) -> errors.UsageError:
    return errors.UsageError(
        f"{error.message}; run as root, or name another file with --journal-file"
    )
