"""``boot``: restore the GPUs' layout after a reboot, each instance at its placement.

No MIG instance survives a reboot, and GPUs from Hopper on lose MIG mode too (NVIDIA's MIG User
Guide, "Getting Started"). Agent and ``apply`` save each layout that they verify. A missing, new or
broken GPU is reported, and the others are restored: a node with seven GPUs is better than none.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from mig_manager import errors, reasons
from mig_manager.change import applying, journal_file, shell, transaction
from mig_manager.core import model
from mig_manager.core.layout import layouts, plans
from mig_manager.core.planner import planner
from mig_manager.core.records import gpu_recovery, gpu_repair, verified_layouts

if TYPE_CHECKING:
    from mig_manager.core.answers import plan_answers

_APPLY_ONE = "Apply a layout; once verified, it is restored at the next boot."
_APPLY_AGAIN = "Apply the layout again, or another one; see 'mig-manager status'."


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Something that was not restored."""

    message: str
    remedy: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """The outcome of a boot."""

    layout: str  # empty: there was no layout to restore
    is_fallback: bool = False  # whether no valid layout was saved
    rounds: tuple[plans.Planned, ...]
    """The plans that were executed; empty if all GPUs had the layout."""
    problems: tuple[Problem, ...]
    may_be_partial: bool = False  # whether a failed change may have left a GPU between two layouts
    faults: tuple[str, ...] = ()
    """The GPUs that need recovery from a fault, with what to do, in sentences."""

    def to_data(self) -> "plan_answers.Boot":
        """Return plain data for JSON and YAML."""
        return {
            "kind": "Boot",
            "layout": self.layout,
            "is_changed": bool(self.rounds) or self.may_be_partial,
            "plans": [planned.to_data() for planned in self.rounds],
            "problems": [problem.message for problem in self.problems],
            "faults": [*self.faults],
        }


def boot(
    deps: shell.Dependencies,
    fallback: Callable[[], layouts.Layout] | None,
    *,
    driver_timeout_s: float,
    resets_faulty: bool = False,
) -> Restored:
    """Restore the layout that was last verified.

    ``resets_faulty`` is whether to reset GPUs of the layout with a fault that a reset ends.

    Returns:
        The outcome. An invalid saved layout is set aside and reported as a problem.

    Raises:
        ConfigError: The fallback is invalid.
        HardwareError: The driver was not loaded in time, or NVML refused or failed.
        LayoutError: The fallback is unknown, or impossible on these GPUs.
        LockedError: Another manager had the lock until the deadline; nothing was changed.
        UsageError: Lock, journal or saved layout cannot be written.
    """
    deps = dataclasses.replace(deps, driver_timeout_s=driver_timeout_s)
    problems: tuple[Problem, ...] = ()
    if fallback is not None or _is_saved(deps):
        with deps.hold_lock("restore the layout of this node"):
            # The manager that had the lock may have verified another layout.
            saved, problems = _read(deps)
            if saved is not None:
                return _restore(deps, saved, resets_faulty=resets_faulty)
            if fallback is not None:
                applied = applying.apply(deps, fallback, is_locked=True)
                return Restored(
                    layout=applied.layout,
                    is_fallback=True,
                    rounds=applied.rounds,
                    problems=problems,
                    faults=tuple(gpu_recovery.faults(applied.gpus)),
                )
    if result := journal_file.undo_interrupted(deps):
        deps.notify(result)
    return Restored(layout="", rounds=(), problems=problems)


def _is_saved(deps: shell.Dependencies) -> bool:
    """Return whether a layout is saved, even an invalid one."""
    try:
        return deps.verified_layout_file.read() is not None
    except errors.ConfigError:
        return True


def _read(
    deps: shell.Dependencies,
) -> tuple[verified_layouts.VerifiedLayout | None, tuple[Problem, ...]]:
    """Return the saved layout, or why it is invalid."""
    try:
        return deps.verified_layout.parse(), ()
    except errors.ConfigError as error:
        why = error.message
    try:
        kept = deps.verified_layout_file.set_aside()
    except errors.ConfigError as error:
        raise errors.UsageError(
            error.message, remedy="Run as root, or name another file with --verified-layout-file."
        ) from error
    message = f"the layout saved for this boot is invalid ({why}); it is now in {kept}"
    return None, (Problem(message=message, remedy=_APPLY_ONE),)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _RestoreOutcome:
    """The outcome of a change of some GPUs."""

    executed: tuple[transaction.Executed, ...] = ()
    failures: tuple[errors.MigManagerError, ...] = ()
    unreachable: tuple[model.UnreachableGpu, ...] = ()

    def join(self, more: "_RestoreOutcome") -> "_RestoreOutcome":
        return _RestoreOutcome(
            executed=(*self.executed, *more.executed),
            failures=(*self.failures, *more.failures),
            unreachable=(*self.unreachable, *more.unreachable),
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _LockedBoot:
    """The restore of one saved layout, under the lock."""

    deps: shell.Dependencies
    recorder: journal_file.FileRecorder
    target: Mapping[str, model.GpuSnapshot]  # the desired state of each GPU, by UUID
    interrupted: dict[str, model.GpuSnapshot]  # GPUs before an interrupted run, for a rollback
    unreachable: model.Snapshots  # in the journal
    faulty: tuple[model.Gpu, ...]  # to reset first
    uuids: tuple[str, ...]  # UUIDs of the GPUs to change
    check: Callable[[], object]
    idle_by_s: float  # the deadline of the one wait for processes that use the GPUs

    def run(self) -> _RestoreOutcome:
        """Repair and change the GPUs, and refresh the device files."""
        outcome = self._repair()
        if self.uuids:
            # A GPU whose repair failed has its layout as far as the driver allows.
            outcome = outcome.join(self._change_all())
        else:
            gpus = self.recorder.journal.gpus.with_snapshots(self.unreachable)
            self.recorder.set_journal(gpus=gpus)
        if outcome.failures:
            # Failed changes may have executed some of their steps.
            gpus = dataclasses.replace(self.recorder.journal.gpus, has_stale_files=True)
            self.recorder.set_journal(gpus=gpus)
        try:
            self.recorder.refresh_files()
        except errors.HostError as error:
            outcome = outcome.join(_RestoreOutcome(failures=(error,)))
        return outcome

    def _repair(self) -> _RestoreOutcome:
        """Reset and restore GPUs with a fault, one after the other: one may be in use."""
        outcome = _RestoreOutcome()
        for gpu in self.faulty:
            self.deps.notify(f"{gpu_recovery.fault(gpu)}: resetting it")
            outcome = outcome.join(self._change((gpu.uuid,), is_repair=True))
        return outcome

    def _change_all(self) -> _RestoreOutcome:
        """Restore all GPUs in one change; if it fails, one GPU after the other."""
        outcome = self._change(self.uuids)
        # A hung driver would cost a whole deadline for each GPU.
        is_hung = any(error.reason is reasons.Reason.NVML_TIMEOUT for error in outcome.failures)
        if not outcome.failures or is_hung or len(self.uuids) == 1:
            return outcome
        self.deps.notify(f"{outcome.failures[0].message}; trying one GPU after the other")
        outcome = dataclasses.replace(outcome, failures=())
        for uuid in self.uuids:
            outcome = outcome.join(self._change((uuid,)))
        return outcome

    def _change(self, uuids: tuple[str, ...], *, is_repair: bool = False) -> _RestoreOutcome:
        """Restore GPUs in one change, or roll them back."""
        before = {gpu.uuid: gpu for gpu in self.recorder.journal.gpus.snapshots}
        interrupted = self.interrupted | before
        # An interrupted change of a GPU that has its layout needs no rollback now.
        pending = {*self.uuids, *(gpu.uuid for gpu in self.unreachable)}
        others = tuple(gpu for uuid, gpu in before.items() if uuid in pending - {*uuids})
        saved = tuple(self.target[uuid] for uuid in uuids if uuid in self.target)
        plan = planner.repair if is_repair else planner.restore
        goal = transaction.ChangeTarget(lambda gpus: plan(gpus, saved), lambda *_: others)
        observed = after = model.NO_GPUS
        try:
            observed = self.deps.gpus.observe()
            idle_timeout_s = max(0.0, self.idle_by_s - self.deps.clock.monotonic())
            deps = dataclasses.replace(
                self.deps, idle_timeout_s=idle_timeout_s, in_use_timeout_s=idle_timeout_s
            )
            change = dataclasses.replace(
                deps.new_transaction(self.recorder, check=self.check, kept_snapshots=others),
                refresh_files=None,  # once, after the last GPU
            )
            after, executed = change.run(
                goal.plan(observed),
                goal,
                observed=observed,
                interrupted=tuple(interrupted[uuid] for uuid in uuids if uuid in interrupted),
            )
        except errors.UsageError:
            raise
        except errors.MigManagerError as error:
            return _RestoreOutcome(failures=(error,), unreachable=observed.unreachable)
        return _RestoreOutcome(
            executed=executed, unreachable=(*observed.unreachable, *after.unreachable)
        )


def _restore(
    deps: shell.Dependencies,
    saved: verified_layouts.VerifiedLayout,
    *,
    resets_faulty: bool,
) -> Restored:
    observed = deps.observe_when_loaded()
    recorder = journal_file.open_recorder(deps, observed, layout=saved.layout)
    interrupted = {gpu.uuid: gpu for gpu in recorder.journal.gpus.snapshots}
    # The interrupted run may have changed GPUs that the saved layout does not cover. It lists such
    # GPUs as that run left them, if at all.
    target = interrupted | {
        gpu.uuid: gpu
        for gpu in saved.snapshots
        if gpu.uuid in saved.covered or gpu.uuid not in interrupted
    }
    faulty = tuple(
        gpu
        for gpu in observed
        if resets_faulty and gpu.uuid in target and gpu_repair.is_possible(gpu)
    )
    uuids, misfits = _differing(observed, target, faulty)
    with deps.uninterrupted() as check:
        outcome = _LockedBoot(
            deps=deps,
            recorder=recorder,
            target=target,
            interrupted=interrupted,
            unreachable=observed.unreachable_snapshots(recorder.journal.gpus.snapshots),
            faulty=faulty,
            uuids=uuids,
            check=check,
            idle_by_s=deps.clock.monotonic() + deps.idle_timeout_s,
        ).run()
    for sentence in _earlier_states(observed, saved):
        deps.notify(sentence)
    problems = [*_other_gpus(observed, target), *misfits, *_problems(outcome, observed)]
    rounds = tuple(
        plans.Planned(layout=saved.layout, gpus=each.gpus, desired={}, plan=each.plan, users={})
        for each in outcome.executed
    )
    after = observed
    if faulty:
        try:
            after = deps.gpus.observe()
        except errors.HardwareError as error:
            problems.append(_problem_of(error))
    return Restored(
        layout=saved.layout,
        rounds=rounds,
        problems=tuple(problems),
        may_be_partial=any(gpu.uuid in uuids for gpu in recorder.journal.gpus.snapshots),
        faults=tuple(gpu_recovery.faults(after)),
    )


def _differing(
    observed: model.ObservedGpus,
    target: Mapping[str, model.GpuSnapshot],
    faulty: Sequence[model.Gpu],
) -> tuple[tuple[str, ...], list[Problem]]:
    """Return the UUIDs of the GPUs to change, and the GPUs that cannot have their layout."""
    uuids, problems = list[str](), list[Problem]()
    for gpu in observed:
        try:
            if gpu in faulty or not planner.restore([gpu], [*target.values()]).is_empty:
                uuids.append(gpu.uuid)
        except errors.LayoutError as error:
            problems.append(Problem(message=error.message, remedy=_APPLY_ONE))
    return tuple(uuids), problems


def _earlier_states(
    observed: model.ObservedGpus, saved: verified_layouts.VerifiedLayout
) -> Iterator[str]:
    """Describe the GPUs that get an earlier layout than the saved one."""
    for gpu in observed:
        if layout := saved.earlier.get(gpu.uuid):
            yield (
                f"{gpu} was unreachable when layout '{saved.layout}' was verified: its saved "
                f"state is of layout '{layout}'"
            )


def _other_gpus(
    observed: model.ObservedGpus, target: Mapping[str, model.GpuSnapshot]
) -> Iterator[Problem]:
    """Yield the GPUs that are unreachable, missing or new, if they support MIG."""
    yield from map(_unreachable, observed.unreachable)
    observed_uuids = {
        gpu.uuid for gpu in (*observed, *observed.unreachable_snapshots(tuple(target.values())))
    }
    for gone in target.values():
        if gone.uuid not in observed_uuids and gone.current_mode is not None:
            yield Problem(
                message=f"GPU {gone.uuid} is gone, with its instances", remedy=_APPLY_ONE
            )
    for gpu in observed:
        if gpu.uuid not in target and gpu.current_mode is not None:
            yield Problem(
                message=f"{gpu} is new, or its MIG mode waited for this boot: no layout is saved "
                "for it, and it was not changed",
                remedy=_APPLY_ONE,
            )


def _problems(outcome: _RestoreOutcome, observed: model.ObservedGpus) -> Iterator[Problem]:
    """Yield the GPUs that were lost during the changes, and the failures."""
    lost = {_key(gpu): gpu for gpu in outcome.unreachable}
    reported = {_key(gpu) for gpu in observed.unreachable}
    yield from (_unreachable(gpu) for key, gpu in lost.items() if key not in reported)
    yield from map(_problem_of, outcome.failures)


def _problem_of(error: errors.MigManagerError) -> Problem:
    remedy = error.remedy_at_shell or _APPLY_AGAIN
    return Problem(message=error.message, remedy=str(remedy))


def _key(gpu: model.UnreachableGpu) -> str | int:
    """Identify a GPU whose UUID may be unknown."""
    return gpu.uuid or gpu.index


def _unreachable(gpu: model.UnreachableGpu) -> Problem:
    return Problem(
        message=f"{gpu.sentence}; once it is back, the next boot restores its saved layout",
        remedy=gpu_recovery.remedy(gpu),
    )
