"""``boot``: restore the GPUs' layout after a reboot, each instance at its placement.

No MIG instance survives a reboot, and GPUs from Hopper on lose MIG mode too (NVIDIA's MIG User
Guide, "Getting Started"). The layout is the last one that was verified, as agent and ``apply``
saved it. A GPU that is missing, new or broken is a problem to report, and does not keep the others
from being restored: a node with seven GPUs is better than a node with none.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from mig_manager import errors
from mig_manager.change import apply, local
from mig_manager.core import model, steps
from mig_manager.core.layout import config, plans
from mig_manager.core.planner import planner
from mig_manager.core.records import journals

if TYPE_CHECKING:
    from mig_manager.core import answers

_APPLY_ONE = "Apply a layout: it is restored at the next boot once it is verified."
_APPLY_AGAIN = "Apply the layout again, or another one; see 'mig-manager status'."


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Something that was not restored."""

    message: str
    remedy: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What was restored, and what was not."""

    layout: str
    """Empty when there was nothing to restore."""
    rounds: tuple[plans.Planned, ...]
    """The plans that were executed; empty when nothing had to be done."""
    problems: tuple[Problem, ...]

    def to_data(self) -> "answers.Boot":
        """Return plain data for JSON and YAML."""
        return {
            "kind": "Boot",
            "layout": self.layout,
            "is_changed": bool(self.rounds),
            "plans": [planned.to_data() for planned in self.rounds],
            "problems": [problem.message for problem in self.problems],
        }


def boot(
    deps: local.Dependencies,
    fallback: Callable[[], config.Layout] | None,
    *,
    driver_timeout_s: float,
) -> Restored:
    """Restore the layout that was last verified.

    Returns:
        What was restored. A saved layout that is invalid is set aside and a problem.

    Raises:
        ConfigError: The fallback is invalid.
        HardwareError: The driver was not loaded in time, or NVML refused or failed.
        LayoutError: The fallback is unknown, or impossible on these GPUs.
        LockedError: Another manager had the lock until the deadline; nothing was changed.
        UsageError: Lock, journal or saved layout cannot be written.
    """
    deps = dataclasses.replace(deps, driver_timeout_s=driver_timeout_s)
    saved, problems = _read(deps)
    if saved is not None:
        with local.locked(deps, f"restore layout {saved.config}"):
            return _restored(deps, saved)
    if fallback is not None:
        applied = apply.apply(deps, fallback)
        return Restored(layout=applied.layout, rounds=applied.rounds, problems=problems)
    result = local.undo_interrupted(deps)
    if result:
        deps.notify(result)
    return Restored(layout="", rounds=(), problems=problems)


def _read(
    deps: local.Dependencies,
) -> tuple[journals.VerifiedLayout | None, tuple[Problem, ...]]:
    """Return the saved layout, or what is wrong with it."""
    try:
        text = deps.boot_layout.read()
        return (journals.VerifiedLayout.from_json(text) if text is not None else None), ()
    except (ValueError, errors.ConfigError) as error:
        why = error.message if isinstance(error, errors.ConfigError) else str(error)
    try:
        kept = deps.boot_layout.set_aside()
    except errors.ConfigError as error:
        raise errors.UsageError(
            f"{error.message}; run as root, or name another file with --verified-layout-file"
        ) from error
    message = f"the layout saved for this boot is invalid ({why}); it is now in {kept}"
    return None, (Problem(message=message, remedy=_APPLY_ONE),)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Boot:
    """The restore of one saved layout, under the lock."""

    deps: local.Dependencies
    taken: local.Taken
    target: Mapping[str, model.GpuSnapshot]
    """What each GPU is to have, by UUID."""
    interrupted: dict[str, model.GpuSnapshot]
    """What GPUs had before a run that was killed: a rollback restores that."""
    owed: frozenset[str]
    """UUIDs of GPUs that stay in the journal while others are changed: those that are to be
    changed, and unreachable ones. An interrupted change of any other needs no rollback now."""
    check: Callable[[], object]
    idle_by_s: float
    """Until when processes that use the GPUs are waited for: all GPUs together, once."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Ended:
    """How a change of some GPUs ended."""

    executed: tuple[steps.Plan, ...] = ()
    failures: tuple[errors.MigManagerError, ...] = ()
    unreachable: tuple[model.UnreachableGpu, ...] = ()
    """GPUs that could not be observed meanwhile."""

    def joined(self, more: "_Ended") -> "_Ended":
        """Return this and a later one as one."""
        return _Ended(
            executed=(*self.executed, *more.executed),
            failures=(*self.failures, *more.failures),
            unreachable=(*self.unreachable, *more.unreachable),
        )


def _restored(deps: local.Dependencies, saved: journals.VerifiedLayout) -> Restored:
    """Restore the GPUs of a saved layout."""
    observed = local.first_observation(deps)
    taken = local.opened(deps, observed, config=saved.config)
    interrupted = {gpu.uuid: gpu for gpu in taken.journal.snapshot}
    unreachable = observed.missing(taken.journal.snapshot)
    # A GPU that the saved layout does not list may have been part of the killed run.
    target = interrupted | {gpu.uuid: gpu for gpu in saved.snapshot}
    problems = [*_other_gpus(observed, target)]
    uuids = []
    for gpu in observed:
        try:
            if not _plan(target, [gpu], [gpu.uuid]).is_empty:
                uuids.append(gpu.uuid)
        except errors.LayoutError as error:
            problems.append(Problem(message=error.message, remedy=_APPLY_ONE))
    with deps.uninterrupted() as check:
        run = _Boot(
            deps=deps,
            taken=taken,
            target=target,
            interrupted=interrupted,
            owed=frozenset((*(gpu.uuid for gpu in unreachable), *uuids)),
            check=check,
            idle_by_s=deps.clock.monotonic() + deps.idle_timeout_s,
        )
        ended = _Ended()
        if uuids:
            ended = _changed(run, tuple(uuids))
        else:
            taken.note(snapshot=unreachable)
        if ended.failures:
            # Some of their steps may have been executed.
            taken.note(stale_files=True)
        try:
            taken.refresh_files()
        except errors.HostError as error:
            ended = ended.joined(_Ended(failures=(error,)))
    lost = {_key(gpu): gpu for gpu in ended.unreachable}
    known = {_key(gpu) for gpu in observed.unreachable}
    problems += [_unreachable(gpu) for key, gpu in lost.items() if key not in known]
    problems += map(_failed, ended.failures)
    rounds = tuple(
        plans.Planned(layout=saved.config, gpus=observed, wanted={}, plan=plan, users={})
        for plan in ended.executed
    )
    return Restored(layout=saved.config, rounds=rounds, problems=tuple(problems))


def _changed(run: _Boot, uuids: tuple[str, ...]) -> _Ended:
    """Restore all GPUs in one change; where one fails, each in a change of its own."""
    ended = _change(run, uuids)
    # A driver that hangs does so for every GPU, for a whole deadline each.
    is_hung = any(error.reason is errors.Reason.NVML_TIMEOUT for error in ended.failures)
    if not ended.failures or is_hung or len(uuids) == 1:
        return ended
    run.deps.notify(f"{ended.failures[0].message}; trying one GPU after the other")
    ended = dataclasses.replace(ended, failures=())
    for uuid in uuids:
        ended = ended.joined(_change(run, (uuid,)))
    return ended


def _change(run: _Boot, uuids: tuple[str, ...]) -> _Ended:
    """Restore GPUs in one change, or roll them back."""
    before = {gpu.uuid: gpu for gpu in run.taken.journal.snapshot}
    interrupted = run.interrupted | before
    elsewhere = tuple(gpu for uuid, gpu in before.items() if uuid in run.owed - {*uuids})
    seen = after = model.NO_GPUS
    try:
        seen = run.deps.gpus.observe()
        plan = _plan(run.target, seen, uuids)
        if plan.is_empty:
            run.taken.note(snapshot=elsewhere)
            return _Ended(unreachable=seen.unreachable)
        idle_timeout_s = max(0.0, run.idle_by_s - run.deps.clock.monotonic())
        deps = dataclasses.replace(run.deps, idle_timeout_s=idle_timeout_s)
        change = dataclasses.replace(
            local.new_transaction(deps, run.taken, check=run.check),
            # Once, after the last GPU.
            refresh_files=None,
            in_use_timeout_s=idle_timeout_s,
            elsewhere=elsewhere,
        )
        after, executed = change.run(
            plan,
            seen=seen,
            interrupted=tuple(interrupted[uuid] for uuid in uuids if uuid in interrupted),
            replan=lambda after: _plan(run.target, after, uuids),
        )
    except errors.UsageError:
        raise
    except errors.MigManagerError as error:
        return _Ended(failures=(error,), unreachable=seen.unreachable)
    return _Ended(executed=executed, unreachable=(*seen.unreachable, *after.unreachable))


def _plan(
    target: Mapping[str, model.GpuSnapshot], gpus: Iterable[model.Gpu], uuids: Iterable[str]
) -> steps.Plan:
    """Plan what some GPUs lack."""
    return planner.restore(tuple(gpus), [target[uuid] for uuid in uuids if uuid in target])


def _other_gpus(
    observed: model.ObservedGpus, target: Mapping[str, model.GpuSnapshot]
) -> Iterator[Problem]:
    """Yield the GPUs that are unreachable, missing or new, if they support MIG."""
    yield from map(_unreachable, observed.unreachable)
    here = {gpu.uuid for gpu in (*observed, *observed.missing(tuple(target.values())))}
    for gone in target.values():
        if gone.uuid not in here and gone.current_mode is not None:
            yield Problem(
                message=f"GPU {gone.uuid} is gone, and what it had with it", remedy=_APPLY_ONE
            )
    for gpu in observed:
        if gpu.uuid not in target and gpu.current_mode is not None:
            yield Problem(
                message=f"{gpu} is new: no layout is saved for it, and it was not changed",
                remedy=_APPLY_ONE,
            )


def _failed(error: errors.MigManagerError) -> Problem:
    remedy = error.own_remedy or error.reason.remedy_at_shell or _APPLY_AGAIN
    return Problem(message=error.message, remedy=remedy)


def _key(gpu: model.UnreachableGpu) -> str | int:
    """Identify a GPU, whatever it answers at the moment."""
    return gpu.uuid or gpu.index


def _unreachable(gpu: model.UnreachableGpu) -> Problem:
    return Problem(
        message=f"{gpu.sentence}; its saved layout is restored at a boot with it",
        remedy=errors.Reason.GPU_UNREACHABLE.remedy,
    )
