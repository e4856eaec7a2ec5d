"""What changes at a shell share: dependencies, lock, journal file, undoing a killed run.

The journal outlives a killed process. It has what the GPUs had before the change, so the next run
can roll back, and never takes half of a change for what was there before.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

from mig_manager import errors
from mig_manager.change import transaction
from mig_manager.core import model, ports, steps, timing
from mig_manager.core.planner import planner
from mig_manager.core.records import journals

RETRIED_LATER = "the next 'apply' tries again"


class BootLayout(ports.KeptText, Protocol):
    """The layout for the next boot."""

    def set_aside(self) -> str:
        """Move an invalid one away; return where it is kept.

        Raises:
            ConfigError: It cannot be moved.
        """


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Dependencies:
    """The ports and settings of a change from the command line."""

    gpus: ports.Gpus
    lock: ports.NodeLock
    journal: ports.JournalStore
    boot_layout: BootLayout
    clock: timing.Clock
    boot_id: str
    """Differs after each reboot; empty: unknown."""
    lock_timeout_s: float
    notify: Callable[[str], object]
    uninterrupted: Callable[[], contextlib.AbstractContextManager[Callable[[], object] | None]] = (
        contextlib.nullcontext
    )
    """Makes the context of a change, which delays signals. It may return a check that raises
    ``Superseded`` after a signal, for hooks and waits."""
    reset: ports.GpuReset | None = None
    """Resets GPUs whose mode is pending; None: the mode stays pending."""
    may_reset: bool = True
    hooks: ports.Hooks | None = None
    device_files: ports.DeviceFiles | None = None
    """None: another program writes device nodes and CDI specs."""
    idle_timeout_s: float = 0.0
    """How long to wait for processes that use what a change destroys; 0: fail at once."""


def locked(deps: Dependencies, doing: str) -> contextlib.AbstractContextManager[None]:
    """Wait for the node's lock, and hold it in the context.

    Raises:
        LockedError: On entering: another manager had the lock until the deadline.
        UsageError: On entering: the lock file cannot be written.
    """
    return transaction.locked(
        deps.lock,
        doing,
        clock=deps.clock,
        wait=announced_wait(deps, deps.lock_timeout_s),
    )


def announced_wait(
    deps: Dependencies, timeout_s: float, *, check: Callable[[], object] = lambda: None
) -> timing.Wait:
    """Return a wait whose begin is shown to people; what ``check`` raises ends it."""

    def wait(seconds: float) -> None:
        check()
        deps.clock.wait(seconds)
        check()

    return timing.Wait(
        timeout_s=timeout_s,
        wait=wait,
        on_wait=lambda error: deps.notify(f"{error.message}; waiting up to {timeout_s:g} s"),
    )


def new_transaction(
    deps: Dependencies,
    journal: transaction.Journal,
    *,
    check: Callable[[], object] = lambda: None,
) -> transaction.Transaction:
    """Return a transaction."""
    return transaction.Transaction(
        gpus=deps.gpus,
        journal=journal,
        clock=deps.clock,
        reset=deps.reset.reset if deps.reset and deps.may_reset else None,
        device_files=deps.device_files,
        idle_wait=announced_wait(deps, deps.idle_timeout_s, check=check),
    )


class Journal:
    """Implements ``transaction.Journal`` in a file."""

    def __init__(
        self,
        deps: Dependencies,
        content: journals.Journal,
        *,
        on_done: Callable[[model.ObservedGpus], object] = lambda _gpus: None,
    ) -> None:
        self._deps = deps
        self._on_done = on_done
        self._content = dataclasses.replace(content, boot_id=deps.boot_id)

    @property
    def is_open(self) -> bool:
        """Whether a later run has something to finish."""
        return not self._content.is_empty

    def begin(self, before: tuple[model.GpuSnapshot, ...], _plan: steps.Plan) -> None:
        """Write what a rollback restores; raises as ``write``."""
        self.write(before)

    def write(self, before: Sequence[model.GpuSnapshot], *, config: str = "") -> None:
        """Replace the journal's GPUs, which ``config`` has changed if it is not this layout.

        Raises:
            UsageError: It cannot be written.
        """
        self._content = dataclasses.replace(
            self._content, snapshot=tuple(before), config=config or self._content.config
        )
        if self.is_open:
            try:
                self._deps.journal.write(self._content.to_json())
            except errors.ConfigError as error:
                if before:
                    raise _not_written(error) from error
            else:
                return
        # A snapshot that is no longer true is worse than outdated device files.
        _remove_journal(self._deps)

    def rolling_back(self) -> None:
        """Keep the journal as it is."""

    def undone(
        self, unrestored: tuple[model.GpuSnapshot, ...] = (), *, has_changed: bool = True
    ) -> None:
        """Keep what unreachable GPUs had, and whether device files may be outdated."""
        self._note_files(are_stale=has_changed or self._content.stale_files)
        self.write(unrestored)

    def done(self, gpus: model.ObservedGpus) -> None:
        """Go on to what follows a verified change."""
        self._content = dataclasses.replace(self._content, snapshot=())
        self._note_files(are_stale=True)
        self._on_done(gpus)

    def persistence_off(self, uuids: tuple[str, ...]) -> None:
        """Write the GPUs; a failure is shown."""
        self._content = dataclasses.replace(self._content, persistent_gpus=uuids)
        try:
            self.write(self._content.snapshot)
        except errors.UsageError as error:
            self._deps.notify(error.message)

    def refreshed(self) -> None:
        """Keep what unreachable GPUs had, or remove the journal."""
        self._note_files(are_stale=False)
        self.write(self._content.snapshot)

    def refresh_files(self) -> None:
        """Refresh device files that may be outdated; ``HostError``: DEVICE_FILES_FAILED."""
        if self._content.stale_files:
            new_transaction(self._deps, self).refresh()

    def _note_files(self, *, are_stale: bool) -> None:
        self._content = dataclasses.replace(self._content, stale_files=are_stale)


def undo_interrupted(deps: Dependencies) -> str:
    """Roll back what a killed run left, if there was one.

    Returns:
        How it went, as a part of a sentence; empty when there was nothing to undo.

    Raises:
        HardwareError: NVML refused or failed.
        LockedError: Another manager had the lock until the deadline.
        UsageError: Lock or journal cannot be written.
    """
    with contextlib.suppress(errors.ConfigError):
        if deps.journal.read() is None:
            return ""
    with locked(deps, "undo an unfinished 'apply'"):
        return Interrupted(deps, deps.gpus.observe()).undo()


class Interrupted:
    """The change that a killed run left, if any.

    Raises:
        UsageError: An invalid journal cannot be moved away.
    """

    def __init__(self, deps: Dependencies, observed: model.ObservedGpus) -> None:
        self._deps = deps
        self._needs_reset = False
        self._journal = self._read(observed)
        self._name = f"the 'apply' of layout '{self.config}'"
        self._file = Journal(deps, self._journal)

    @property
    def exists(self) -> bool:
        """Whether there is anything to undo."""
        return bool(self._journal.snapshot)

    @property
    def config(self) -> str:
        """The layout that it was to apply."""
        return self._journal.config

    @property
    def snapshot(self) -> tuple[model.GpuSnapshot, ...]:
        """What the GPUs had before; empty when there is nothing to undo."""
        return self._journal.snapshot

    @property
    def are_files_stale(self) -> bool:
        """Whether device nodes and CDI specs may be those of before."""
        return self._journal.stale_files

    def announce(self) -> None:
        """Say what a rollback of the present change restores."""
        if self.exists:
            self._deps.notify(
                f"{self._name} was left unfinished; should this one fail, the GPUs return to "
                "what they had before that one"
            )

    def undo(self) -> str:
        """Roll it back; return how that went, as a part of a sentence; empty: nothing to do."""
        if not self.exists:
            try:
                self._file.refresh_files()
            except errors.HostError as error:
                return error.message
            return ""
        if not self._deps.may_reset and self._needs_reset:
            return f"{self._name} was left unfinished and is not undone: that resets a GPU"
        change = new_transaction(self._deps, self._file)
        with self._deps.uninterrupted():
            result = change.roll_back(self.snapshot, requires_idle=True)
        if result.is_complete and not result.unrestored:
            return f"{self._name} was left unfinished and is undone now"
        return f"{self._name} was left unfinished; {result.message}; {RETRIED_LATER}"

    def _read(self, observed: model.ObservedGpus) -> journals.Journal:
        """Return the journal of a killed run, without GPUs that need no rollback or are new."""
        nothing = journals.Journal(config="")
        try:
            text = self._deps.journal.read()
            if text is None:
                return nothing
            journal = journals.Journal.from_json(text)
            plan = planner.restore(observed, journal.snapshot)
        except (ValueError, errors.ConfigError, errors.LayoutError) as error:
            problem = error.message if isinstance(error, errors.MigManagerError) else str(error)
            try:
                kept = self._deps.journal.set_aside()
            except errors.ConfigError as refused:
                raise _not_written(refused) from refused
            self._deps.notify(
                f"the journal of an earlier 'apply' is invalid ({problem}); it is kept as {kept} "
                "and otherwise ignored"
            )
            return nothing
        if self._deps.reset and journal.boot_id == self._deps.boot_id:
            # No reboot keeps persistence mode.
            off = [gpu for gpu in observed if gpu.uuid in journal.persistent_gpus]
            self._deps.reset.restore_persistence(off)
        journal = dataclasses.replace(journal, stale_files=True, persistent_gpus=())
        self._needs_reset = any(gpu.needs_reset for gpu in plan.gpus)
        is_complete = not planner.unowned_instances(observed, journal.snapshot)
        if plan.is_empty and is_complete and not observed.missing(journal.snapshot):
            return self._without_gpus(journal)
        # No instance survives a reboot, so another program has created those that exist.
        is_rebooted = bool(journal.boot_id) and journal.boot_id != self._deps.boot_id
        if is_rebooted and any(gpu.gpu_instances for gpu in observed):
            self._deps.notify(
                f"the 'apply' of layout '{journal.config}' was left unfinished when the node was "
                "rebooted, and the GPUs were set up since: it will not be undone"
            )
            return self._without_gpus(journal)
        if later := self._verified_since(observed, journal):
            self._deps.notify(
                f"the 'apply' of layout '{journal.config}' was left unfinished, and layout "
                f"'{later}' was verified since: it will not be undone"
            )
            return self._without_gpus(journal)
        return journal

    def _verified_since(self, observed: model.ObservedGpus, journal: journals.Journal) -> str:
        """Return the layout that the journal's GPUs have and that was verified in this boot.

        An unfinished change leaves none: an agent has applied it after the process was killed.
        """
        try:
            text = self._deps.boot_layout.read()
            kept = journals.VerifiedLayout.from_json(text or "")
            snapshot = tuple(
                gpu
                for gpu in kept.snapshot
                if gpu.uuid in {each.uuid for each in journal.snapshot}
            )
            is_active = planner.restore(observed, snapshot).is_empty and not (
                observed.missing(snapshot) or planner.unowned_instances(observed, snapshot)
            )
        except (ValueError, errors.ConfigError, errors.LayoutError):
            return ""
        is_known = len(snapshot) == len(journal.snapshot) and kept.boot_id == self._deps.boot_id
        return kept.config if is_known and is_active else ""

    def _without_gpus(self, journal: journals.Journal) -> journals.Journal:
        Journal(self._deps, journal).write(())
        return dataclasses.replace(journal, snapshot=())


def save_layout(
    store: ports.KeptText,
    gpus: model.ObservedGpus,
    *,
    config: str,
    config_hash: str,
    boot_id: str,
) -> None:
    """Save a verified layout for the next boot; keep what is saved of unreachable GPUs.

    Raises:
        ConfigError: The layout cannot be written.
    """
    snapshot = tuple(gpu.snapshot for gpu in gpus)
    if gpus.unreachable:
        # What is saved and invalid is replaced.
        with contextlib.suppress(ValueError, errors.ConfigError):
            if (text := store.read()) is not None:
                snapshot += gpus.missing(journals.VerifiedLayout.from_json(text).snapshot)
    verified = journals.VerifiedLayout(
        config=config, config_hash=config_hash, boot_id=boot_id, snapshot=snapshot
    )
    store.save(verified.to_json())


def _remove_journal(deps: Dependencies) -> None:
    """Remove the journal; a failure does not undo the change."""
    try:
        deps.journal.clear()
    except errors.ConfigError as error:
        deps.notify(f"{error.message}; remove it, because it is no longer true")


def _not_written(error: errors.ConfigError) -> errors.UsageError:
    return errors.UsageError(
        f"{error.message}; run as root, or name another file with --journal-file"
    )
