"""``apply`` at a shell: one at a time, written down before it is done, then proven or undone.

What is proven is kept for the next boot. ``restore`` goes the same way with another wish.
"""

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from mig_manager import errors
from mig_manager.change import hook_points, local, plans, waiting
from mig_manager.core import model, steps
from mig_manager.core.layout import config, selection
from mig_manager.core.planner import planner
from mig_manager.core.records import checkpoint


class Wish(Protocol):
    """What shall come into force."""

    @property
    def name(self) -> str:
        """What people call it."""

    @property
    def content_hash(self) -> str:
        """Tells it from others of that name."""

    def covered(self, observed: model.ObservedGpus) -> Collection[str]:
        """Return the UUIDs of the GPUs that it is about.

        Raises:
            MigManagerError: It cannot be had on these GPUs.
        """

    def due_elsewhere(
        self, observed: model.ObservedGpus, due: Sequence[model.GpuSnapshot]
    ) -> tuple[model.GpuSnapshot, ...]:
        """Return what stays due on unreachable GPUs that it is not about."""

    def planned(self, observed: model.ObservedGpus, *, scope: plans.Scope) -> plans.Planned:
        """Return what it would change.

        Raises:
            MigManagerError: It cannot be had on these GPUs.
        """


@dataclasses.dataclass(frozen=True, slots=True)
class LayoutWish:
    """Implements ``Wish`` for a layout."""

    layout: config.Layout

    @property
    def name(self) -> str:
        """The layout's."""
        return self.layout.name

    @property
    def content_hash(self) -> str:
        """The layout's."""
        return self.layout.content_hash

    def covered(self, observed: model.ObservedGpus) -> Collection[str]:
        """Return the UUIDs of the GPUs that it is about.

        Raises:
            LayoutError: It cannot be had on these GPUs.
        """
        return config.select(self.layout, observed)

    def due_elsewhere(
        self, observed: model.ObservedGpus, due: Sequence[model.GpuSnapshot]
    ) -> tuple[model.GpuSnapshot, ...]:
        """Return what stays due on unreachable GPUs that it is not about."""
        return selection.unrestored_elsewhere(self.layout, observed, due)

    def planned(self, observed: model.ObservedGpus, *, scope: plans.Scope) -> plans.Planned:
        """Return what it would change.

        Raises:
            LayoutError: It cannot be had on these GPUs.
        """
        return plans.planned(observed, self.layout, scope=scope, holders={})


def apply(
    world: local.Dependencies,
    resolve: Callable[[], config.Layout],
    *,
    scope: plans.Scope = plans.Scope.ALL,
    may_reset: bool = True,
) -> plans.Applied:
    """Bring a layout into force, and prove that it is.

    What an ``apply`` that was cut off has changed of GPUs that this layout is not about returns
    to what it was. If these GPUs cannot have the layout, that goes for all GPUs.

    Args:
        world: What to work with.
        resolve: Returns the wish.
        scope: How much of it counts.
        may_reset: Whether to reset GPUs whose new mode waits for that. Where not, the mode is
            left waiting, which is a failure unless the mode is all that counts.

    Raises:
        ConfigError: There is no such wish, or the hooks file is no good.
        HostError: A reset was refused, device files are not up to date, or a hook failed.
        GpuInUseError: Processes use what it would destroy; nothing was changed.
        HardwareError: NVML refused or failed; RESET_REQUIRED or REBOOT_REQUIRED when the new
            mode waits; VERIFY_FAILED when the layout is not in force afterwards.
        LayoutError: There is no such layout, or it cannot be had on these GPUs.
        LockedError: Another manager was at work all the time; nothing was changed.
        UsageError: Lock or journal cannot be kept where they should be; nothing was changed.
    """
    return bring(
        world,
        lambda: LayoutWish(resolve()),
        scope=scope,
        may_reset=may_reset,
        told=lambda wish: {"MIG_PARTED_SELECTED_CONFIG": wish.name},
    )


def bring(
    world: local.Dependencies,
    resolve: Callable[[], Wish],
    *,
    scope: plans.Scope,
    may_reset: bool = True,
    doing: str = "apply",
    told: Callable[[Wish], Mapping[str, str]] = lambda _wish: {},
) -> plans.Applied:
    """Bring a wish into force; see ``apply``.

    Args:
        world: What to work with.
        resolve: Returns the wish.
        scope: How much of it counts.
        may_reset: Whether a change of mode may reset a GPU.
        doing: What is done with it, for those who wait for us.
        told: Returns what hooks are told of the wish, as variables.

    Raises:
        MigManagerError: As ``apply``, and what ``resolve`` and the wish raise.
    """
    # What is wrong with the request itself shows before the GPUs are even looked at: it is no
    # reason to undo anything.
    wish = resolve()
    points = hook_points.HookPoints(world.hooks, variables=told(wish))
    points.load()
    with local.held(world, f"{doing} {wish.name}"):
        return _Run(world, wish, points, scope=scope, may_reset=may_reset).run()


class _Run:
    """One wish on its way into force, under the lock."""

    def __init__(
        self,
        world: local.Dependencies,
        wish: Wish,
        points: hook_points.HookPoints,
        *,
        scope: plans.Scope,
        may_reset: bool,
    ) -> None:
        self._world = world
        self._wish = wish
        self._points = points
        self._scope = scope
        self._may_reset = may_reset
        self._may_wait = scope is plans.Scope.MODE_ONLY and not may_reset
        self._observed = world.gpus.observe()
        self._pending = local.Pending(world, self._observed, may_reset=may_reset)
        self._others: tuple[model.GpuSnapshot, ...] = ()
        self._check: Callable[[], object] = lambda: None

    def run(self) -> plans.Applied:
        with contextlib.ExitStack() as stack:
            try:
                first = self._first()
                if not self._points.is_empty:
                    self._points.require(first.plan)
                    self._start_hooks(stack)
                    # A hook may do to the GPUs what it likes.
                    self._observed = self._world.gpus.observe()
                    first = self._first()
            except errors.MigManagerError as error:
                if self._pending.is_due:
                    error.add(self._pending.give_back())
                raise
            return self._settled(first)

    def _start_hooks(self, stack: contextlib.ExitStack) -> None:
        """Have the hooks run around all that follows, and let a signal end those before it."""
        check = stack.enter_context(self._world.guard())
        self._check = check or self._check
        stack.enter_context(self._points.around(self._check))

    def _settled(self, first: plans.Planned) -> plans.Applied:
        if first.plan.is_empty:
            self._pending.keep(self._due_elsewhere(self._observed))
            self._keep(self._observed)
            return self._applied(first, ())
        self._pending.remark()
        # With hooks it has begun already.
        with self._world.guard() if self._points.is_empty else contextlib.nullcontext() as check:
            self._check = check or self._check
            executed = self._change(first.plan)
        return self._applied(first, executed)

    def _applied(self, first: plans.Planned, executed: tuple[steps.Plan, ...]) -> plans.Applied:
        return plans.Applied(
            layout=self._wish.name,
            gpus=self._observed,
            rounds=tuple(dataclasses.replace(first, plan=run) for run in executed),
            overlooked=first.overlooked,
        )

    def _first(self) -> plans.Planned:
        covered = self._wish.covered(self._observed)
        self._others = tuple(gpu for gpu in self._pending.snapshot if gpu.uuid not in covered)
        return self._planned(self._observed)

    def _planned(self, observed: model.ObservedGpus) -> plans.Planned:
        """Plan the wish, and the way back of GPUs that it is not about."""
        planned = self._wish.planned(observed, scope=self._scope)
        back = planner.restore(observed, self._others)
        return dataclasses.replace(planned, plan=planner.combined(planned.plan, back))

    def _rest(self, after: model.ObservedGpus) -> steps.Plan:
        """Return what is still due: not a mode that may wait."""
        planned = self._planned(after)
        if not self._may_wait:
            return planned.plan
        return waiting.without(planned.plan, waiting.for_their_mode(after, planned.wanted))

    def _change(self, first: steps.Plan) -> tuple[steps.Plan, ...]:
        journal = local.Journal(self._world, self._wish.name, on_done=self._conclude)
        transaction = local.new_transaction(
            self._world, journal, may_reset=self._may_reset, check=self._check
        )
        if self._may_wait:
            gpus = waiting.Lenient(self._world.gpus)
            transaction = dataclasses.replace(transaction, gpus=gpus)
        try:
            after, executed = transaction.run(
                first,
                seen=self._observed,
                older=self._pending.snapshot,
                replan=self._rest,
                points=self._points,
            )
        except errors.MigManagerError as error:
            if journal.is_open:
                error.add(local.LATER)
            raise
        self._observed = after
        return executed

    def _due_elsewhere(self, gpus: model.ObservedGpus) -> tuple[model.GpuSnapshot, ...]:
        return self._wish.due_elsewhere(gpus, self._pending.snapshot)

    def _conclude(self, after: model.ObservedGpus) -> None:
        """Keep a layout that is verified for the next boot; tell which modes come later."""
        self._pending.keep(self._due_elsewhere(after))
        if self._planned(after).plan.is_empty:
            self._keep(after)
        else:
            self._tell_what_waits(after)

    def _tell_what_waits(self, after: model.ObservedGpus) -> None:
        """Say which modes come later; nothing is proven, so nothing is kept for a boot."""
        for gpu in waiting.for_their_mode(after, self._planned(after).wanted):
            self._world.tell(f"the MIG mode of {gpu} waits for a reset or a reboot")

    def _keep(self, gpus: model.ObservedGpus) -> None:
        local.keep(self._world, gpus, config=self._wish.name, config_hash=self._wish.content_hash)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointWish:
    """Implements ``applying.Wish`` for a checkpoint."""

    name: str
    content_hash: str
    content: checkpoint.Checkpoint

    @staticmethod
    def of(text: str, *, source: str) -> "CheckpointWish":
        """Read a checkpoint.

        Args:
            text: Of the file.
            source: Name of the file.

        Raises:
            CheckpointError: It is none.
        """
        return CheckpointWish(
            name=f"checkpoint {source}",
            content_hash=hashlib.sha256(text.encode(errors="replace")).hexdigest(),
            content=checkpoint.parse(text, source=source),
        )

    def covered(self, observed: model.ObservedGpus) -> Collection[str]:
        """Return the UUIDs of the GPUs that it tells of.

        Raises:
            CheckpointError: They cannot have what they had.
        """
        return planner.restore_checkpoint(self.content, observed).covered

    def due_elsewhere(
        self, observed: model.ObservedGpus, due: Sequence[model.GpuSnapshot]
    ) -> tuple[model.GpuSnapshot, ...]:
        """Return what stays due on unreachable GPUs: it cannot tell of any of them."""
        return observed.missing(due)

    def planned(self, observed: model.ObservedGpus, *, scope: plans.Scope) -> plans.Planned:
        """Return what the way back to it would change.

        Raises:
            CheckpointError: The GPUs cannot have what they had.
            LayoutError: NOT_SUPPORTED: a GPU is a vGPU.
        """
        due = planner.restore_checkpoint(
            self.content, observed, is_mode_only=scope is plans.Scope.MODE_ONLY
        ).plan
        return plans.Planned(layout=self.name, gpus=observed, wanted={}, plan=due, holders={})


def restore(
    world: local.Dependencies,
    read: Callable[[], CheckpointWish],
    *,
    scope: plans.Scope = plans.Scope.ALL,
) -> plans.Applied:
    """Return GPUs to what a checkpoint tells of them, and prove that they have it.

    What is right already stays. GPUs that the checkpoint does not tell of are not touched.

    Args:
        world: What to work with.
        read: Returns the checkpoint.
        scope: How much of it counts.

    Raises:
        CheckpointError: It is no checkpoint, or none of these GPUs; nothing was changed.
        MigManagerError: As ``applying.apply``.
    """
    return bring(world, read, scope=scope, doing="restore")
