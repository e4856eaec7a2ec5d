"""``boot``: what the GPUs had comes back after a reboot, each instance in its place.

No MIG instance survives a reboot, and GPUs from Hopper on lose MIG mode too (NVIDIA's MIG User
Guide, "Getting Started"). What comes back is the layout last proven in force, as agent and
``apply`` have kept it. One GPU that is gone, new or broken does not keep the others from coming
back: whoever waits for them at boot is better off with seven than with none.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence

from mig_manager import errors
from mig_manager.change import apply, local, plans, transaction
from mig_manager.core import model, steps, timing
from mig_manager.core.layout import config
from mig_manager.core.planner import planner
from mig_manager.core.records import status

_PACE = timing.Backoff()
_APPLY_ONE = "Apply a layout: what is then proven in force comes back at the next boot."
_APPLY_AGAIN = "Apply the layout again, or another one; see 'mig-manager status'."


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Something that did not come back."""

    message: str
    remedy: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What came back, and what did not."""

    layout: str
    """Its name; empty when there was nothing to bring back."""
    rounds: tuple[plans.Planned, ...]
    """The plans that were run; empty when nothing had to be done."""
    problems: tuple[Problem, ...]

    def to_data(self) -> dict[str, object]:
        """Return plain data for JSON and YAML."""
        return {
            "layout": self.layout,
            "is_changed": bool(self.rounds),
            "plans": [planned.to_data() for planned in self.rounds],
            "problems": [problem.message for problem in self.problems],
        }


def boot(
    world: local.Dependencies,
    fallback: Callable[[], config.Layout] | None,
    *,
    driver_timeout_s: float,
) -> Restored:
    """Bring back the layout last proven in force.

    Args:
        world: What to work with.
        fallback: Returns the layout for a node where none is kept; None: there is none.
        driver_timeout_s: How long to wait for the driver to be loaded.

    Returns:
        What came back. What is kept and makes no sense is set aside and a problem.

    Raises:
        ConfigError: The fallback is not to be had.
        HardwareError: The driver was not loaded in time, or NVML refused or failed.
        LayoutError: As ``ConfigError``, or it cannot be had on these GPUs.
        LockedError: Another manager was at work all the time; nothing was changed.
        UsageError: Lock, journal or what is kept are not where they should be.
    """
    world = dataclasses.replace(world, gpus=_Awaited(world, driver_timeout_s))
    proven, problems = _read(world)
    if proven is not None:
        with local.held(world, f"bring back layout {proven.config}"):
            return _Run(world, proven).run()
    if fallback is not None:
        applied = apply.apply(world, fallback)
        return Restored(layout=applied.layout, rounds=applied.rounds, problems=problems)
    said = local.undo_unfinished(world)
    if said:
        world.tell(said)
    return Restored(layout="", rounds=(), problems=problems)


def _lost(gpu: model.UnreachableGpu) -> Problem:
    return Problem(
        message=f"{gpu.sentence}; the layout kept for it is restored at a boot with it",
        remedy=errors.Reason.GPU_UNREACHABLE.remedy,
    )


def _read(world: local.Dependencies) -> tuple[status.VerifiedLayout | None, tuple[Problem, ...]]:
    """Return what is kept, or what is wrong with it."""
    try:
        text = world.proven.read()
        return (status.VerifiedLayout.from_json(text) if text is not None else None), ()
    except (ValueError, errors.ConfigError) as error:
        why = error.message if isinstance(error, errors.ConfigError) else str(error)
    try:
        aside = world.proven.set_aside()
    except errors.ConfigError as error:
        raise errors.UsageError(
            f"{error.message}; run as root, or name another file with --proven-file"
        ) from error
    said = f"the layout kept for this boot makes no sense ({why}); it is now in {aside}"
    return None, (Problem(message=said, remedy=_APPLY_ONE),)


class _Awaited:
    """Implements ``ports.Gpus``: the first look waits until the driver is loaded."""

    def __init__(self, world: local.Dependencies, timeout_s: float) -> None:
        self._gpus = world.gpus
        self._clock = world.clock
        self._tell = world.tell
        self._timeout_s = timeout_s

    def observe(self) -> model.ObservedGpus:
        until = self._clock.monotonic() + self._timeout_s
        turn = 0
        while True:
            try:
                gpus = self._gpus.observe()
            except errors.HardwareError as error:
                left_s = until - self._clock.monotonic()
                if error.reason is not errors.Reason.DRIVER_NOT_LOADED or self._timeout_s <= 0:
                    raise
                if left_s <= 0:
                    error.add(f"waited {self._timeout_s:g} s for it")
                    raise
                if turn == 0:
                    self._tell(f"{error.message}; waiting up to {self._timeout_s:g} s")
                self._clock.wait(min(_PACE.delay_s(turn), left_s))
                turn += 1
            else:
                # A driver that goes away later, in the middle of a change, is not waited for.
                self._timeout_s = 0.0
                return gpus

    def execute(self, plan: steps.Plan, seen: Sequence[model.Gpu] = ()) -> model.ObservedGpus:
        return self._gpus.execute(plan, seen)


class _Journal:
    """Implements ``change.Journal`` for one change after another.

    It names the GPUs of the change under way, and those that earlier ones have left in between.
    """

    def __init__(self, world: local.Dependencies, name: str) -> None:
        self._file = local.Journal(world, name)
        self._under_way: tuple[str, ...] = ()
        self.between: dict[str, model.GpuSnapshot] = {}
        """What GPUs had before, by UUID: of those that a change has left in between."""

    def begin(self, before: tuple[model.GpuSnapshot, ...], _plan: steps.Plan) -> None:
        self.between |= {gpu.uuid: gpu for gpu in before}
        self._under_way = tuple(gpu.uuid for gpu in before)
        self._file.write(tuple(self.between.values()))

    def rolling_back(self) -> None:
        """Keep it as it is."""

    def undone(self, due: tuple[model.GpuSnapshot, ...] = ()) -> None:
        self.settle(set(self._under_way) - {gpu.uuid for gpu in due})

    def done(self, _gpus: model.ObservedGpus) -> None:
        self.settle(self._under_way)

    def settle(self, uuids: Iterable[str]) -> None:
        """Name these GPUs no longer, once ``close`` writes it."""
        for uuid in uuids:
            self.between.pop(uuid, None)

    def close(self) -> None:
        """Leave a journal of the GPUs that are left in between, or none."""
        self._file.write(tuple(self.between.values()))


class _Run:
    """One kept layout on its way back, under the lock."""

    def __init__(self, world: local.Dependencies, proven: status.VerifiedLayout) -> None:
        self._world = world
        self._name = proven.config
        self._observed = world.gpus.observe()
        pending = local.Pending(world, self._observed, may_reset=True)
        # A rollback leads back past a run that was cut off.
        self._older = {gpu.uuid: gpu for gpu in pending.snapshot}
        # A GPU of which nothing was proven may have been part of that run.
        self._target = self._older | {gpu.uuid: gpu for gpu in proven.snapshot}
        self._problems: list[Problem] = list(self._strangers())
        self._journal = _Journal(world, self._name)
        self._journal.between |= {
            gpu.uuid: gpu for gpu in self._observed.missing(pending.snapshot)
        }
        self._check: Callable[[], object] = lambda: None

    def run(self) -> Restored:
        due = tuple(gpu.uuid for gpu in self._observed if self._is_due(gpu))
        rounds: tuple[plans.Planned, ...] = ()
        if due:
            # The journal is true again before a signal takes its effect.
            with self._world.guard() as check:
                self._check = check or self._check
                try:
                    rounds = self._told(self._bring_back(due))
                finally:
                    self._journal.close()
                self._refresh()
        else:
            self._journal.close()
        return Restored(layout=self._name, rounds=rounds, problems=tuple(self._problems))

    def _strangers(self) -> Iterator[Problem]:
        """Yield the GPUs that are gone or new, as far as they can do MIG."""
        yield from map(_lost, self._observed.unreachable)
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
                    message=f"{gpu} is new: nothing is kept for it, and it was left as it is",
                    remedy=_APPLY_ONE,
                )

    def _is_due(self, gpu: model.Gpu) -> bool:
        """Tell whether a GPU lacks something; that it can no longer have it is a problem."""
        try:
            return not self._plan([gpu], [gpu.uuid]).is_empty
        except errors.LayoutError as error:
            self._problems.append(Problem(message=error.message, remedy=_APPLY_ONE))
            return False

    def _plan(self, observed: Sequence[model.Gpu], uuids: Sequence[str]) -> steps.Plan:
        return planner.restore(
            observed, [self._target[uuid] for uuid in uuids if uuid in self._target]
        )

    def _bring_back(self, due: tuple[str, ...]) -> tuple[steps.Plan, ...]:
        """Bring GPUs back at once; where one fails, each by itself, to lose no other."""
        executed, error = self._change(due)
        if error is None:
            return executed
        # A driver that hangs does so for every GPU, for a whole deadline each.
        if len(due) == 1 or error.reason is errors.Reason.NVML_TIMEOUT:
            self._note(error)
            return executed
        self._world.tell(f"{error.message}; trying one GPU after the other")
        for uuid in due:
            more, error = self._change((uuid,))
            executed += more
            if error is not None:
                self._note(error)
        return executed

    def _change(
        self, due: tuple[str, ...]
    ) -> tuple[tuple[steps.Plan, ...], errors.MigManagerError | None]:
        """Give GPUs what is kept for them, or what they had; tell the error."""
        try:
            seen = self._world.gpus.observe()
            plan = self._plan(seen, due)
            if plan.is_empty:
                self._journal.settle(due)
                return (), None
            older = self._older | self._journal.between
            after, executed = self._transaction().run(
                plan,
                seen=seen,
                older=[older[uuid] for uuid in due if uuid in older],
                replan=lambda after: self._plan(after, due),
            )
        except errors.MigManagerError as error:
            return (), error
        lost = set(after.unreachable) - set(self._observed.unreachable)
        self._problems += [_lost(gpu) for gpu in after.unreachable if gpu in lost]
        return executed, None

    def _transaction(self) -> transaction.Transaction:
        # The device files are refreshed once, after the last GPU.
        world = dataclasses.replace(self._world, device_files=None)
        return local.new_transaction(world, self._journal, check=self._check)

    def _refresh(self) -> None:
        """Bring device files up to date; that they are not is a problem, and undoes nothing."""
        if self._world.device_files is not None:
            try:
                self._world.device_files.refresh()
            except errors.HostError as error:
                self._note(error)

    def _note(self, error: errors.MigManagerError) -> None:
        remedy = error.reason.remedy_at_shell or _APPLY_AGAIN
        self._problems.append(Problem(message=error.message, remedy=remedy))

    def _told(self, executed: Iterable[steps.Plan]) -> tuple[plans.Planned, ...]:
        return tuple(
            plans.Planned(layout=self._name, gpus=self._observed, wanted={}, plan=plan, holders={})
            for plan in executed
        )
