"""The journal of a change at a shell, in a file, and undoing an interrupted run.

The journal outlives a killed process. It has the GPUs as they were before the change. So the next
run can roll back, and does not mistake half of a change for the former state.
"""

import contextlib
import dataclasses
from collections.abc import Collection
from typing import Unpack

from mig_manager import errors
from mig_manager.change import shell
from mig_manager.core import model, ports, steps
from mig_manager.core.planner import planner
from mig_manager.core.records import journals, run_status

RETRIED_LATER = "the next 'apply' tries again"


@dataclasses.dataclass(slots=True)
class FileRecorder:
    """Writes the journal to a file; implements ``change_recorder.ChangeRecorder``."""

    deps: shell.ShellDependencies
    journal: journals.Journal
    layout: str = ""  # the layout that the next change applies

    def begin_execution(self, before: model.Snapshots, _plan: steps.Plan) -> None:
        """Write the snapshot that a rollback restores; UsageError if that is impossible."""
        self.set_journal(layout=self.layout, gpus=self.journal.gpus.with_snapshots(before))

    def begin_rollback(self) -> None:
        """Report nothing: the outcome of the change includes the rollback's."""

    def set_status(self, **fields: Unpack[run_status.Fields]) -> None:
        """Do nothing: the file has no status."""

    def set_journal(self, **fields: Unpack[journals.Fields]) -> None:
        """Change entries, and write the file or remove it.

        Raises:
            UsageError: A snapshot cannot be written.
        """
        before = self.journal
        self.journal = dataclasses.replace(before, boot_id=self.deps.boot_id, **fields)
        if self.journal.remainder is not journals.Remainder.NOTHING:
            try:
                self.deps.journal.save(self.journal.to_json())
            except errors.ConfigError as error:
                if self.journal.gpus.snapshots:
                    self.journal = before
                    raise _not_written(error.message) from error
            else:
                return
        # An outdated snapshot is worse than stale device files.
        try:
            self.deps.journal.clear()
        except errors.ConfigError as error:
            self.deps.notify(f"{error.message}; remove it, because it is outdated")

    def announce(self, **fields: Unpack[journals.Fields]) -> None:
        """Change entries and write the file; a failure is only reported."""
        try:
            self.set_journal(**fields)
        except errors.UsageError as error:
            self.deps.notify(error.message)

    def refresh_files(self) -> None:
        """Refresh stale device files; HostError (DEVICE_FILES_FAILED) if that fails."""
        if self.journal.gpus.has_stale_files:
            self.deps.new_transaction(self).refresh()

    def undo(self, observed: model.ObservedGpus) -> str:
        """Roll back an interrupted run; return the outcome, empty if there was none."""
        interrupted = describe_interrupted(self.journal)
        before = self.journal.gpus.snapshots
        if not before:
            try:
                self.refresh_files()
            except errors.HostError as error:
                return error.message
            return ""
        plan = planner.restore(observed, before)
        if not self.deps.may_reset and any(gpu.resets_gpu for gpu in plan.gpus):
            return f"{interrupted} and is not undone, because that resets a GPU"
        with self.deps.uninterrupted():
            result = self.deps.new_transaction(self).roll_back(before, requires_idle=True)
        if result.is_complete and not result.unrestored:
            return f"{interrupted} and is undone now"
        return f"{interrupted}; {result.message}; {RETRIED_LATER}"


def describe_interrupted(entries: journals.Journal) -> str:
    """Name the change of an interrupted run, as the start of a sentence."""
    return f"the change to layout '{entries.layout}' was left unfinished"


def what_follows(
    journal: ports.SavedFile,
    observed: model.ObservedGpus = model.NO_GPUS,
    covered: Collection[str] = (),
) -> str:
    """Say what the next command does about an interrupted run; empty without a valid journal.

    Names the GPUs that 'apply' restores although its layout does not cover them (by UUID).
    """
    entries = _read(journal)
    try:
        outside = list_restored_outside(observed, entries.gpus.snapshots, covered)
    except errors.LayoutError:
        return ""
    if not entries.gpus.snapshots:
        return ""
    also = f", and restores {outside} outside its layout" if outside else ""
    return (
        f"{describe_interrupted(entries)}; the next 'apply', 'restore' or 'boot' finishes or "
        f"undoes it{also}"
    )


def as_if_undone(
    deps: shell.ShellDependencies, observed: model.ObservedGpus, gpu: model.Gpu
) -> model.Gpu:
    """Return a GPU as undoing an interrupted run leaves it."""
    entries = _read(deps.journal)
    snapshots, _ = _still_to_undo(deps, entries, observed)
    before = next((each for each in snapshots if each.uuid == gpu.uuid), gpu)
    return dataclasses.replace(
        gpu,
        current_mode=before.current_mode,
        pending_mode=before.pending_mode,
        gpu_instances=before.gpu_instances,
    )


def _read(journal: ports.SavedFile) -> journals.Journal:
    """Return the journal's entries; none if it is missing or invalid."""
    try:
        return journals.Journal.from_json(journal.read() or "")
    except (ValueError, errors.ConfigError, errors.LayoutError):
        return journals.Journal(layout="")


def list_restored_outside(
    observed: model.ObservedGpus, snapshots: model.Snapshots, covered: Collection[str]
) -> str:
    """Name the GPUs outside a layout that its change restores; empty if there are none."""
    outside = [gpu for gpu in snapshots if gpu.uuid not in covered]
    uuids = planner.restore(observed, outside).gpu_uuids
    return ", ".join(str(gpu) for gpu in observed if gpu.uuid in uuids)


def undo_interrupted(deps: shell.ShellDependencies) -> str:
    """Roll back an interrupted run; return the outcome, empty if there was none.

    Raises:
        HardwareError: NVML refused or failed.
        LockedError: Another manager had the lock until the deadline.
        UsageError: Lock or journal cannot be written.
    """
    with contextlib.suppress(errors.ConfigError):
        if deps.journal.read() is None:
            return ""
    with deps.hold_lock("undo an unfinished change"):
        observed = deps.observe_when_loaded()
        return open_recorder(deps, observed).undo(observed)


def open_recorder(
    deps: shell.ShellDependencies, observed: model.ObservedGpus, *, layout: str = ""
) -> FileRecorder:
    """Open the journal, with the entries of an interrupted run if there are any.

    ``layout`` is the one to apply next.

    Raises:
        UsageError: An invalid journal cannot be moved away.
    """
    empty = FileRecorder(deps, journals.Journal(layout=layout), layout)
    try:
        text = deps.journal.read()
        if text is None:
            return empty
        entries = journals.Journal.from_json(text)
        is_undone = planner.are_restored(observed, entries.gpus.snapshots)
    except (ValueError, errors.ConfigError, errors.LayoutError) as error:
        problem = error.message if isinstance(error, errors.MigManagerError) else str(error)
        try:
            kept = deps.journal.set_aside()
        except errors.ConfigError as refused:
            # A file that cannot be opened may not exist.
            is_unread = isinstance(error.__cause__, OSError)
            raise _not_written(problem if is_unread else refused.message) from refused
        deps.notify(
            f"the journal of an earlier change is invalid ({problem}); it is kept as {kept} "
            "and otherwise ignored"
        )
        return empty
    recorder = FileRecorder(
        deps,
        # The other entries are the agent's, and do not occur in a file.
        journals.Journal(
            layout=entries.layout,
            boot_id=entries.boot_id,
            gpus=journals.GpuEntries(
                snapshots=planner.trim(observed, entries.gpus.snapshots),
                has_stale_files=True,
                persistent_gpus=_restore_persistence(deps, entries, observed),
            ),
        ),
        layout=layout,
    )
    if is_undone:
        recorder.set_journal(gpus=recorder.journal.gpus.with_snapshots(()))
        return recorder
    rest, why = _still_to_undo(deps, recorder.journal, observed)
    if why:
        deps.notify(f"{describe_interrupted(entries)}{why}: it is not undone there")
        recorder.set_journal(gpus=recorder.journal.gpus.with_snapshots(rest))
    return recorder


def _restore_persistence(
    deps: shell.ShellDependencies,
    journal: journals.Journal,
    observed: model.ObservedGpus,
) -> tuple[str, ...]:
    """Switch on the persistence mode that an interrupted run switched off.

    Returns the UUIDs of the GPUs where it stays off.
    """
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


def _still_to_undo(
    deps: shell.ShellDependencies,
    journal: journals.Journal,
    observed: model.ObservedGpus,
) -> tuple[model.Snapshots, str]:
    """Return the snapshots to undo, and why the other GPUs stay: a program set them up since."""
    before = journal.gpus.snapshots
    # No instance survives a reboot, so another program has created the existing ones.
    is_rebooted = bool(journal.boot_id) and journal.boot_id != deps.boot_id
    if is_rebooted and any(gpu.gpu_instances for gpu in observed.only(gpu.uuid for gpu in before)):
        return (), " when the node was rebooted, and the GPUs were set up since"
    rest, since = deps.verified_layout.without_verified_since(before, observed)
    if not since:
        return before, ""
    gpus = ", ".join(map(str, observed.only(gpu.uuid for gpu in before if gpu not in rest)))
    return rest, f", and layout '{since}' was verified since on {gpus}"


def _not_written(problem: str) -> errors.UsageError:
    remedy = "Run as root, or name another file with --journal-file."
    return errors.UsageError(problem, remedy=remedy)
