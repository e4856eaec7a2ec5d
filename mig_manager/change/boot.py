"""``boot``: restore the GPUs' layout after a reboot, each instance at its placement.

No MIG instance survives a reboot, and GPUs from Hopper on lose MIG mode too (NVIDIA's MIG User
Guide, "Getting Started"). The layout is the last one that was verified, as agent and ``apply``
saved it. A GPU that is missing, new or broken is a problem to report, and does not keep the others
from being restored: a node with seven GPUs is better than a node with none.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from mig_manager import errors
from mig_manager.change import apply, local, plans
from mig_manager.core import model, steps, timing
from mig_manager.core.layout import config
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
    deps = dataclasses.replace(deps, gpus=_AwaitedGpus(deps, driver_timeout_s))
    saved, problems = _read(deps)
    if saved is not None:
        with local.locked(deps, f"restore layout {saved.config}"):
            return _Run(deps, saved).run()
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


class _AwaitedGpus:
    """Implements ``ports.Gpus``: the first observation waits for the driver."""

    def __init__(self, deps: local.Dependencies, timeout_s: float) -> None:
        self._gpus = deps.gpus
        self._clock = deps.clock
        self._wait = local.announced_wait(deps, timeout_s)

    def observe(self) -> model.ObservedGpus:
        # No wait for a driver that is unloaded later, in the middle of a change.
        wait, self._wait = self._wait, timing.Wait()
        return wait.retry(
            self._gpus.observe,
            self._clock,
            may_pass=lambda error: error.reason is errors.Reason.DRIVER_NOT_LOADED,
            goal=" for it",
        )

    def execute(self, plan: steps.Plan, seen: Sequence[model.Gpu] = ()) -> model.ObservedGpus:
        return self._gpus.execute(plan, seen)


class _Journal:
    """Implements ``transaction.Journal`` for one change after another.

    It lists the GPUs of the change under way, and those that earlier ones left unfinished.
    """

    def __init__(
        self,
        deps: local.Dependencies,
        content: journals.Journal,
        unfinished: Iterable[model.GpuSnapshot],
    ) -> None:
        self._file = local.Journal(deps, content)
        self._under_way: tuple[str, ...] = ()
        self.unfinished = {gpu.uuid: gpu for gpu in unfinished}
        """What the GPUs of unfinished changes had before, by UUID."""

    def begin(self, before: tuple[model.GpuSnapshot, ...], _plan: steps.Plan) -> None:
        self.unfinished |= {gpu.uuid: gpu for gpu in before}
        self._under_way = tuple(gpu.uuid for gpu in before)
        self._file.write(tuple(self.unfinished.values()))

    def rolling_back(self) -> None:
        """Keep it as it is."""

    def undone(
        self, unrestored: tuple[model.GpuSnapshot, ...] = (), *, has_changed: bool = True
    ) -> None:
        del has_changed  # ``close`` takes every change for one that did
        self.remove(set(self._under_way) - {gpu.uuid for gpu in unrestored})

    def done(self, _gpus: model.ObservedGpus) -> None:
        self.remove(self._under_way)

    def persistence_off(self, uuids: tuple[str, ...]) -> None:
        self._file.persistence_off(uuids)

    def refreshed(self) -> None:
        """Keep it as it is: device files are refreshed once, after the last GPU."""

    def remove(self, uuids: Iterable[str]) -> None:
        """Remove GPUs; ``close`` writes it."""
        for uuid in uuids:
            self.unfinished.pop(uuid, None)

    def close(self) -> None:
        """Write the GPUs of unfinished changes, or remove the journal."""
        self._file.undone(tuple(self.unfinished.values()), has_changed=bool(self._under_way))

    def refresh_files(self) -> None:
        """Refresh device files that may be outdated; ``HostError``: DEVICE_FILES_FAILED."""
        self._file.refresh_files()


class _Run:
    """The restore of one saved layout, under the lock."""

    def __init__(self, deps: local.Dependencies, saved: journals.VerifiedLayout) -> None:
        self._deps = deps
        self._name = saved.config
        self._observed = deps.gpus.observe()
        interrupted = local.Interrupted(deps, self._observed)
        # A rollback restores what was there before a killed run.
        self._older = {gpu.uuid: gpu for gpu in interrupted.snapshot}
        # A GPU that the saved layout does not list may have been part of that run.
        self._target = self._older | {gpu.uuid: gpu for gpu in saved.snapshot}
        self._problems: list[Problem] = list(self._other_gpus())
        self._journal = _Journal(
            deps,
            journals.Journal(config=self._name, stale_files=interrupted.are_files_stale),
            self._observed.missing(interrupted.snapshot),
        )
        self._check: Callable[[], object] = lambda: None
        self._reported: set[str | int] = {_key(gpu) for gpu in self._observed.unreachable}
        """Unreachable GPUs that are among the problems already."""
        self._idle_by_s = deps.clock.monotonic() + deps.idle_timeout_s

    def run(self) -> Restored:
        uuids = tuple(gpu.uuid for gpu in self._observed if self._is_incomplete(gpu))
        executed: tuple[steps.Plan, ...] = ()
        if uuids:
            # The journal is true again before a signal ends the process.
            with self._deps.uninterrupted() as check:
                self._check = check or self._check
                try:
                    executed = self._restore(uuids)
                finally:
                    self._journal.close()
                self._refresh_files()
        else:
            self._journal.close()
            self._refresh_files()
        rounds = tuple(
            plans.Planned(layout=self._name, gpus=self._observed, wanted={}, plan=plan, users={})
            for plan in executed
        )
        return Restored(layout=self._name, rounds=rounds, problems=tuple(self._problems))

    def _refresh_files(self) -> None:
        try:
            self._journal.refresh_files()
        except errors.HostError as error:
            self._report(error)

    def _other_gpus(self) -> Iterator[Problem]:
        """Yield the GPUs that are unreachable, missing or new, if they support MIG."""
        yield from map(_unreachable, self._observed.unreachable)
        here = {gpu.uuid for gpu in self._observed}
        here |= {gpu.uuid for gpu in self._observed.missing(self._target.values())}
        for gone in self._target.values():
            if gone.uuid not in here and gone.current_mode is not None:
                yield Problem(
                    message=f"GPU {gone.uuid} is gone, and what it had with it", remedy=_APPLY_ONE
                )
        for gpu in self._observed:
            if gpu.uuid not in self._target and gpu.current_mode is not None:
                yield Problem(
                    message=f"{gpu} is new: no layout is saved for it, and it was not changed",
                    remedy=_APPLY_ONE,
                )

    def _is_incomplete(self, gpu: model.Gpu) -> bool:
        """Check whether a GPU lacks something; an impossible layout is a problem."""
        try:
            return not self._plan([gpu], [gpu.uuid]).is_empty
        except errors.LayoutError as error:
            self._problems.append(Problem(message=error.message, remedy=_APPLY_ONE))
            return False

    def _plan(self, observed: Sequence[model.Gpu], uuids: Sequence[str]) -> steps.Plan:
        return planner.restore(
            observed, [self._target[uuid] for uuid in uuids if uuid in self._target]
        )

    def _restore(self, uuids: tuple[str, ...]) -> tuple[steps.Plan, ...]:
        """Restore all GPUs in one change; where one fails, each in a change of its own."""
        executed, error = self._change(uuids)
        if error is None:
            return executed
        # A driver that hangs does so for every GPU, for a whole deadline each.
        if len(uuids) == 1 or error.reason is errors.Reason.NVML_TIMEOUT:
            self._report(error)
            return executed
        self._deps.notify(f"{error.message}; trying one GPU after the other")
        for uuid in uuids:
            more, error = self._change((uuid,))
            executed += more
            if error is not None:
                self._report(error)
        return executed

    def _change(
        self, uuids: tuple[str, ...]
    ) -> tuple[tuple[steps.Plan, ...], errors.MigManagerError | None]:
        """Restore GPUs, or roll them back; return the error."""
        try:
            seen = self._deps.gpus.observe()
            self._report_lost(seen)
            plan = self._plan(seen, uuids)
            if plan.is_empty:
                self._journal.remove(uuids)
                return (), None
            older = self._older | self._journal.unfinished
            # All GPUs together are waited for once, however many are in use.
            idle_timeout_s = max(0.0, self._idle_by_s - self._deps.clock.monotonic())
            # The device files are refreshed once, after the last GPU.
            deps = dataclasses.replace(
                self._deps, device_files=None, idle_timeout_s=idle_timeout_s
            )
            change = dataclasses.replace(
                local.new_transaction(deps, self._journal, check=self._check),
                in_use_timeout_s=idle_timeout_s,
            )
            after, executed = change.run(
                plan,
                seen=seen,
                older=[older[uuid] for uuid in uuids if uuid in older],
                replan=lambda after: self._plan(after, uuids),
            )
        except errors.MigManagerError as error:
            return (), error
        self._report_lost(after)
        return executed, None

    def _report_lost(self, gpus: model.ObservedGpus) -> None:
        for gpu in gpus.unreachable:
            if _key(gpu) not in self._reported:
                self._reported.add(_key(gpu))
                self._problems.append(_unreachable(gpu))

    def _report(self, error: errors.MigManagerError) -> None:
        remedy = error.own_remedy or error.reason.remedy_at_shell or _APPLY_AGAIN
        self._problems.append(Problem(message=error.message, remedy=remedy))


def _key(gpu: model.UnreachableGpu) -> str | int:
    """Identify a GPU, whatever it answers at the moment."""
    return gpu.uuid or gpu.index


def _unreachable(gpu: model.UnreachableGpu) -> Problem:
    return Problem(
        message=f"{gpu.sentence}; its saved layout is restored at a boot with it",
        remedy=errors.Reason.GPU_UNREACHABLE.remedy,
    )
