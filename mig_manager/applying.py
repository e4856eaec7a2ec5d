"""``apply`` at a shell: one at a time, written down before it is done, then proven or undone.

What is proven is kept for the next boot.
"""

import dataclasses
from collections.abc import Callable

from mig_manager import change, commands, errors, standalone, waiting
from mig_manager.core import config, model, planner, status


def apply(
    world: standalone.World,
    resolve: Callable[[], config.Layout],
    *,
    scope: commands.Scope = commands.Scope.ALL,
    may_reset: bool = True,
) -> commands.Applied:
    """Bring a layout into force, and prove that it is.

    What an ``apply`` that was cut off has changed of GPUs that this layout is not about returns
    to what it was. If nothing can be done for the layout, that goes for all GPUs.

    Args:
        world: What to work with.
        resolve: Returns the wish.
        scope: How much of it counts.
        may_reset: Whether to reset GPUs whose new mode waits for that. Where not, the mode is
            left waiting, which is a failure unless the mode is all that counts.

    Raises:
        ConfigError: There is no such wish.
        HostError: A reset was refused, or device files are not up to date.
        HardwareError: NVML refused or failed; RESET_REQUIRED or REBOOT_REQUIRED when the new
            mode waits; VERIFY_FAILED when the layout is not in force afterwards.
        LayoutError: There is no such layout, or it cannot be had on these GPUs.
        LockedError: Another manager was at work all the time; nothing was changed.
        UsageError: Lock or journal cannot be kept where they should be; nothing was changed.
    """
    try:
        layout = resolve()
    except (errors.ConfigError, errors.LayoutError) as error:
        _undo_first(world, error, may_reset=may_reset)
        raise
    with standalone.held(world, f"apply {layout.name}"):
        return _Run(world, layout, scope=scope, may_reset=may_reset).run()


def _undo_first(
    world: standalone.World, error: errors.MigManagerError, *, may_reset: bool
) -> None:
    """Undo what was cut off, if anything was, although there is nothing to apply."""
    try:
        said = standalone.undo_unfinished(world, may_reset=may_reset)
    except errors.MigManagerError as other:
        said = f"an 'apply' that was left unfinished could not be undone: {other.message}"
    if said:
        error.add(said)


class _Run:
    """One layout on its way into force, under the lock."""

    def __init__(
        self,
        world: standalone.World,
        layout: config.Layout,
        *,
        scope: commands.Scope,
        may_reset: bool,
    ) -> None:
        self._world = world
        self._layout = layout
        self._scope = scope
        self._may_reset = may_reset
        self._may_wait = scope is commands.Scope.MODE_ONLY and not may_reset
        self._observed = world.gpus.observe()
        self._pending = standalone.Pending(world, self._observed, may_reset=may_reset)
        self._others: tuple[model.GpuSnapshot, ...] = ()

    def run(self) -> commands.Applied:
        try:
            first = self._first()
        except errors.MigManagerError as error:
            if self._pending.is_due:
                error.add(self._pending.give_back())
            raise
        if first.plan.is_empty:
            standalone.forget(self._world)
            self._keep(self._observed)
            return self._applied(first, ())
        self._pending.remark()
        with self._world.guard():
            plans = self._change(first.plan)
        return self._applied(first, plans)

    def _applied(self, first: commands.Planned, plans: tuple[model.Plan, ...]) -> commands.Applied:
        return commands.Applied(
            layout=self._layout.name,
            rounds=tuple(dataclasses.replace(first, plan=run) for run in plans),
            overlooked=first.overlooked,
        )

    def _first(self) -> commands.Planned:
        covered = config.select(self._layout, self._observed)
        self._others = tuple(gpu for gpu in self._pending.snapshot if gpu.uuid not in covered)
        return self._planned(self._observed)

    def _planned(self, observed: tuple[model.Gpu, ...]) -> commands.Planned:
        """Plan the wish, and the way back of GPUs that it is not about."""
        planned = commands.planned(observed, self._layout, scope=self._scope, holders={})
        back = planner.restore(observed, self._others)
        both = sorted((*planned.plan.gpus, *back.gpus), key=lambda gpu: gpu.gpu_index)
        return dataclasses.replace(planned, plan=model.Plan(gpus=tuple(both)))

    def _rest(self, after: tuple[model.Gpu, ...]) -> model.Plan:
        """Return what is still due: not a mode that may wait."""
        planned = self._planned(after)
        if not self._may_wait:
            return planned.plan
        return waiting.without(planned.plan, waiting.for_their_mode(after, planned.wanted))

    def _change(self, first: model.Plan) -> tuple[model.Plan, ...]:
        before = self._pending.snapshot or tuple(gpu.snapshot for gpu in self._observed)
        standalone.write_down(self._world, self._layout.name, before)
        is_back = False

        def back() -> None:
            nonlocal is_back
            is_back = True
            standalone.forget(self._world)

        try:
            after, plans = change.carry_out(
                waiting.Lenient(self._world.gpus) if self._may_wait else self._world.gpus,
                first,
                seen=self._observed,
                before=before,
                replan=self._rest,
                undo=change.Undo(on_end=back, pause=self._world.clock.wait),
                reset=self._world.reset if self._may_reset else None,
            )
        except errors.MigManagerError as error:
            if not is_back:
                error.add(standalone.LATER)
            raise
        standalone.forget(self._world)
        if not self._planned(after).plan.is_empty:
            self._tell_what_waits(after)
            return plans
        self._keep(after)
        standalone.refresh(self._world)
        return plans

    def _tell_what_waits(self, after: tuple[model.Gpu, ...]) -> None:
        """Say which modes come later; nothing is proven, so nothing is kept for a boot."""
        for gpu in waiting.for_their_mode(after, self._planned(after).wanted):
            self._world.tell(f"the MIG mode of {gpu} waits for a reset or a reboot")

    def _keep(self, gpus: tuple[model.Gpu, ...]) -> None:
        proven = status.Proven(
            config=self._layout.name,
            config_hash=self._layout.content_hash,
            boot_id=self._world.boot_id,
            snapshot=tuple(gpu.snapshot for gpu in gpus),
        )
        standalone.keep(self._world, proven)
