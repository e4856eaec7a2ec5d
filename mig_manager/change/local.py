"""What runs without a cluster have in common: whose turn it is, and how to get back.

The journal outlives whoever is killed. It has what the GPUs had before the change, and so whoever
comes next knows the way back: no half of a change is ever taken for what was there before.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

from mig_manager import errors
from mig_manager.change import transaction
from mig_manager.core import model, ports, steps, timing
from mig_manager.core.planner import planner
from mig_manager.core.records import status

LATER = "the next 'apply' tries again"


class KeptLayout(ports.VerifiedLayouts, Protocol):
    """The layout last proven, for those who also read it."""

    def set_aside(self) -> str:
        """Move one that makes no sense out of the way; return where it is kept.

        Raises:
            ConfigError: It cannot be moved.
        """


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Dependencies:
    """What a run without a cluster works with."""

    gpus: ports.Gpus
    exclusion: ports.NodeLock
    journal: ports.JournalStore
    proven: KeptLayout
    clock: timing.Clock
    boot_id: str
    """Tells this boot from others; empty: the system does not say."""
    lock_timeout_s: float
    """How long to wait while another manager is at work."""
    tell: Callable[[str], object]
    """Takes remarks for people."""
    guard: Callable[[], contextlib.AbstractContextManager[Callable[[], object] | None]] = (
        contextlib.nullcontext
    )
    """Makes the context of a change, which should not be cut off. It may have a function that
    raises ``Superseded`` when somebody tries, for what can be ended early."""
    reset: transaction.Reset | None = None
    """Resets GPUs whose mode waits for that; None: nobody does."""
    hooks: ports.Hooks | None = None
    """The owner's programs around a change; None: there are none."""
    device_files: ports.DeviceFiles | None = None
    """Brought up to date after a change; None: the driver and others look after them."""
    idle_timeout_s: float = 0.0
    """How long to wait for processes that use what a change destroys; 0: it is refused at once."""


def held(world: Dependencies, doing: str) -> contextlib.AbstractContextManager[None]:
    """Keep every other manager off while the context lasts, once it is our turn.

    Raises:
        LockedError: On entering: another manager was at work all the time.
        UsageError: On entering: the lock cannot be kept where it should be.
    """
    return transaction.locked(
        world.exclusion,
        doing,
        clock=world.clock,
        wait=world.clock.wait,
        timeout_s=world.lock_timeout_s,
        on_wait=lambda error: world.tell(
            f"{error.message}; waiting up to {world.lock_timeout_s:g} s"
        ),
    )


class Journal:
    """Implements ``change.Journal`` in a file.

    Args:
        world: What to work with.
        name: The layout.
        on_done: Called once the change is verified; removes the journal, or leaves in it what is
            due on unreachable GPUs (``Pending.keep``).
    """

    def __init__(
        self,
        world: Dependencies,
        name: str,
        *,
        on_done: Callable[[model.ObservedGpus], object] = lambda _gpus: None,
    ) -> None:
        self._world = world
        self._name = name
        self._on_done = on_done
        self.is_open = False
        """Whether it names GPUs that a change may have left in between."""

    def begin(self, before: tuple[model.GpuSnapshot, ...], _plan: steps.Plan) -> None:
        """Write what a rollback restores.

        Raises:
            UsageError: It cannot be kept where it should be.
        """
        self.write(before)

    def write(self, before: Sequence[model.GpuSnapshot]) -> None:
        """Have the journal name these GPUs and no others; none: remove it.

        Raises:
            UsageError: It cannot be kept where it should be.
        """
        self.is_open = bool(before)
        if not before:
            forget(self._world)
            return
        journal = status.Journal(
            config=self._name, boot_id=self._world.boot_id, snapshot=tuple(before)
        )
        try:
            self._world.journal.write(journal.to_json())
        except errors.ConfigError as error:
            raise _unkept(error) from error

    def rolling_back(self) -> None:
        """Keep the journal as it is."""

    def undone(self, due: tuple[model.GpuSnapshot, ...] = ()) -> None:
        """Leave a journal of what is due on unreachable GPUs, or none."""
        self.write(due)

    def done(self, gpus: model.ObservedGpus) -> None:
        """Go on to what follows a verified change."""
        self.is_open = False
        self._on_done(gpus)


def new_transaction(
    world: Dependencies,
    journal: transaction.Journal,
    *,
    may_reset: bool = True,
    check: Callable[[], object] = lambda: None,
) -> transaction.Transaction:
    """Return the transaction of a change without a cluster.

    Args:
        world: What to work with.
        journal: Where it is written what a rollback restores.
        may_reset: Whether it may reset a GPU.
        check: Called while processes are waited for; what it raises ends the change.
    """

    def wait(seconds: float) -> None:
        check()
        world.clock.wait(seconds)
        check()

    return transaction.Transaction(
        gpus=world.gpus,
        journal=journal,
        clock=world.clock,
        reset=world.reset if may_reset else None,
        device_files=world.device_files,
        idle_wait=transaction.IdleWait(
            timeout_s=world.idle_timeout_s,
            wait=wait,
            on_wait=lambda error: world.tell(
                f"{error.message}; waiting up to {world.idle_timeout_s:g} s"
            ),
        ),
    )


def forget(world: Dependencies) -> None:
    """Remove the journal; a change is not undone because that fails."""
    try:
        world.journal.clear()
    except errors.ConfigError as error:
        world.tell(f"{error.message}; remove it, for what it says is no longer true")


def keep(world: Dependencies, gpus: model.ObservedGpus, *, config: str, config_hash: str) -> None:
    """Keep a layout for the next boot; one that is in force stays so where that fails."""
    try:
        save_layout(
            world.proven, gpus, config=config, config_hash=config_hash, boot_id=world.boot_id
        )
    except errors.ConfigError as error:
        world.tell(f"{error.message}; the next boot will not bring this layout back")


def save_layout(
    store: ports.VerifiedLayouts,
    gpus: model.ObservedGpus,
    *,
    config: str,
    config_hash: str,
    boot_id: str,
) -> None:
    """Save a verified layout for the next boot; keep what is saved of unreachable GPUs.

    Args:
        store: Keeps one layout.
        gpus: As they were observed when the layout was verified.
        config: Name of the layout.
        config_hash: Hash of its meaning.
        boot_id: This boot.

    Raises:
        ConfigError: The layout cannot be written.
    """
    snapshot = tuple(gpu.snapshot for gpu in gpus)
    if gpus.unreachable:
        snapshot += gpus.missing(_saved_snapshot(store))
    verified = status.VerifiedLayout(
        config=config, config_hash=config_hash, boot_id=boot_id, snapshot=snapshot
    )
    store.save(verified.to_json())


def _saved_snapshot(store: ports.VerifiedLayouts) -> tuple[model.GpuSnapshot, ...]:
    """Return what is saved already; nothing where that cannot be read."""
    try:
        text = store.read()
        return status.VerifiedLayout.from_json(text).snapshot if text is not None else ()
    except (ValueError, errors.ConfigError):
        return ()


def undo_unfinished(world: Dependencies, *, may_reset: bool = True) -> str:
    """Return the GPUs to what they had before a run that was cut off, if one was.

    Returns:
        How that went, as a part of a sentence; empty when there was nothing to undo.

    Raises:
        HardwareError: NVML refused or failed.
        LockedError: Another manager was at work all the time.
        UsageError: Lock or journal cannot be kept where they should be.
    """
    with contextlib.suppress(errors.ConfigError):
        if world.journal.read() is None:
            return ""
    with held(world, "undo an unfinished 'apply'"):
        pending = Pending(world, world.gpus.observe(), may_reset=may_reset)
        return pending.give_back() if pending.is_due else ""


class Pending:
    """What a run that was cut off has left to undo, if anything.

    Args:
        world: What to work with.
        observed: The GPUs as they are.
        may_reset: Whether the way back may reset a GPU.

    Raises:
        UsageError: A journal that makes no sense cannot be moved out of the way.
    """

    def __init__(
        self, world: Dependencies, observed: model.ObservedGpus, *, may_reset: bool
    ) -> None:
        self._world = world
        self._observed = observed
        self._may_reset = may_reset
        self._journal: status.Journal | None = None
        self.due = steps.Plan(gpus=())
        """The way back."""
        self._find()

    @property
    def is_due(self) -> bool:
        """Whether there is anything to undo."""
        return self._journal is not None

    @property
    def snapshot(self) -> tuple[model.GpuSnapshot, ...]:
        """What the GPUs had before; empty when nothing is to be undone."""
        return self._journal.snapshot if self._journal else ()

    @property
    def _name(self) -> str:
        return f"the 'apply' of layout '{self._journal.config if self._journal else ''}'"

    def remark(self) -> None:
        """Tell people where the way back leads."""
        if self.is_due:
            self._world.tell(
                f"{self._name} was left unfinished; should this one fail, the GPUs return to "
                "what they had before that one"
            )

    def keep(self, due: Sequence[model.GpuSnapshot]) -> None:
        """Leave a journal of what is still to undo, under the name that it has, or none.

        Raises:
            UsageError: It cannot be kept where it should be.
        """
        Journal(self._world, self._journal.config if self._journal else "").write(due)

    def give_back(self) -> str:
        """Return the GPUs to what they had; say how that went, as a part of a sentence."""
        if not self._may_reset and any(gpu.needs_reset for gpu in self.due.gpus):
            return f"{self._name} was left unfinished and is not undone: that resets a GPU"
        journal = Journal(self._world, self._journal.config if self._journal else "")
        restoring = new_transaction(self._world, journal, may_reset=self._may_reset)
        with self._world.guard():
            result = restoring.roll_back(self.snapshot, requires_idle=True)
        if result.is_complete and not result.due:
            return f"{self._name} was left unfinished and is undone now"
        return f"{self._name} was left unfinished; {result.message}; {LATER}"

    def _find(self) -> None:
        text = self._read()
        if text is None:
            return
        try:
            journal = status.Journal.from_json(text)
            self.due = planner.restore(self._observed, journal.snapshot)
        except (ValueError, errors.LayoutError) as error:
            self._set_aside(str(error))
            return
        is_complete = not planner.unowned_instances(self._observed, journal.snapshot)
        if self.due.is_empty and is_complete and not self._observed.missing(journal.snapshot):
            forget(self._world)
        elif self._is_outdated(journal):
            self._world.tell(
                f"the 'apply' of layout '{journal.config}' was left unfinished when the node was "
                "rebooted, and the GPUs were set up since: it will not be undone"
            )
            self.due = steps.Plan(gpus=())
            forget(self._world)
        else:
            self._journal = journal

    def _is_outdated(self, journal: status.Journal) -> bool:
        """Tell whether somebody set up the GPUs since, for no instance survives a reboot."""
        is_rebooted = bool(journal.boot_id) and journal.boot_id != self._world.boot_id
        return is_rebooted and any(gpu.gpu_instances for gpu in self._observed)

    def _read(self) -> str | None:
        try:
            return self._world.journal.read()
        except errors.ConfigError as error:
            self._set_aside(error.message)
            return None

    def _set_aside(self, why: str) -> None:
        try:
            kept = self._world.journal.set_aside()
        except errors.ConfigError as error:
            raise _unkept(error) from error
        self._world.tell(
            f"the journal of an earlier 'apply' makes no sense ({why}); it is kept as {kept} and "
            "otherwise ignored"
        )


def _unkept(error: errors.ConfigError) -> errors.UsageError:
    return errors.UsageError(
        f"{error.message}; run as root, or name another file with --journal-file"
    )
