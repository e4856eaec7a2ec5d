"""``boot``: restore the GPUs' layout after a reboot, each instance at its placement.

No MIG instance survives a reboot, and GPUs from Hopper on lose MIG mode too (NVIDIA's MIG User
Guide, "Getting Started"). Agent and ``apply`` save each layout that they verify. A missing, new or
broken GPU is reported, and the others are restored: a node with seven GPUs is better than none.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from mig_manager import errors
from mig_manager.change import applying, boot_change, boot_problems, journal_file, shell
from mig_manager.core import model
from mig_manager.core.layout import layouts, plans
from mig_manager.core.planner import planner
from mig_manager.core.records import gpu_recovery, gpu_repair, verified_layouts

if TYPE_CHECKING:
    from mig_manager.core.answers import plan_answers


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """The outcome of a boot."""

    layout: str  # empty: there was no layout to restore
    is_fallback: bool = False  # whether no valid layout was saved
    executed: tuple[plans.Planned, ...]  # empty if all GPUs had the layout
    problems: tuple[boot_problems.Problem, ...]
    may_be_partial: bool = False  # whether a failed change may have left a GPU between two layouts
    faults: tuple[str, ...] = ()
    """The GPUs that need recovery from a fault, with what to do, in sentences."""

    def to_data(self) -> "plan_answers.Boot":
        """Return plain data for JSON and YAML."""
        return {
            "kind": "Boot",
            "layout": self.layout,
            "is_changed": bool(self.executed) or self.may_be_partial,
            "plans": [planned.to_data() for planned in self.executed],
            "problems": [problem.message for problem in self.problems],
            "faults": [*self.faults],
        }


def boot(
    deps: shell.ShellDependencies,
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
    problems: tuple[boot_problems.Problem, ...] = ()
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
                    executed=applied.executed,
                    problems=problems,
                    faults=tuple(gpu_recovery.faults(applied.gpus)),
                )
    if result := journal_file.undo_interrupted(deps):
        deps.notify(result)
    return Restored(layout="", executed=(), problems=problems)


def _is_saved(deps: shell.ShellDependencies) -> bool:
    """Return whether a layout is saved, even an invalid one."""
    try:
        return deps.verified_layout_file.read() is not None
    except errors.ConfigError:
        return True


def _read(
    deps: shell.ShellDependencies,
) -> tuple[verified_layouts.VerifiedLayout | None, tuple[boot_problems.Problem, ...]]:
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
    return None, (boot_problems.Problem(message=message, remedy=boot_problems.APPLY_ONE),)


def _restore(
    deps: shell.ShellDependencies,
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
        outcome = boot_change.BootChange(
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
    problems = [
        *boot_problems.of_other_gpus(observed, target),
        *misfits,
        *boot_problems.of_lost_gpus(outcome.unreachable, observed),
        *map(boot_problems.of_error, outcome.failures),
    ]
    executed = tuple(
        plans.Planned(layout=saved.layout, gpus=each.gpus, desired={}, plan=each.plan, users={})
        for each in outcome.executed
    )
    after = observed
    if faulty:
        try:
            after = deps.gpus.observe()
        except errors.HardwareError as error:
            problems.append(boot_problems.of_error(error))
    return Restored(
        layout=saved.layout,
        executed=executed,
        problems=tuple(problems),
        may_be_partial=any(gpu.uuid in uuids for gpu in recorder.journal.gpus.snapshots),
        faults=tuple(gpu_recovery.faults(after)),
    )


def _differing(
    observed: model.ObservedGpus,
    target: Mapping[str, model.GpuSnapshot],
    faulty: Sequence[model.Gpu],
) -> tuple[tuple[str, ...], list[boot_problems.Problem]]:
    """Return the UUIDs of the GPUs to change, and the GPUs that cannot have their layout."""
    uuids, problems = list[str](), list[boot_problems.Problem]()
    for gpu in observed:
        try:
            if gpu in faulty or not planner.restore([gpu], [*target.values()]).is_empty:
                uuids.append(gpu.uuid)
        except errors.LayoutError as error:
            problems.append(
                boot_problems.Problem(message=error.message, remedy=boot_problems.APPLY_ONE)
            )
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
