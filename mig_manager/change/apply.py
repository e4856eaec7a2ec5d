"""``apply`` and ``restore`` at a shell: lock, journal, change, then verified or rolled back.

The verified layout is saved for the next boot.
"""

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from mig_manager import errors
from mig_manager.change import hook_points, local, plans
from mig_manager.core import model, ports, steps
from mig_manager.core.layout import config, layouts
from mig_manager.core.planner import planner
from mig_manager.core.records import checkpoint, journals


def apply(
    deps: local.Dependencies,
    resolve: Callable[[], config.Layout],
    *,
    scope: plans.Scope = plans.Scope.ALL,
) -> plans.Applied:
    """Apply a layout, and verify it.

    What a killed ``apply`` changed on GPUs outside this layout is rolled back. If these GPUs
    cannot have the layout, that goes for all GPUs. Where ``deps`` may not reset, a mode that needs
    a reset stays pending, which is a failure unless the scope is the mode alone.

    Raises:
        ConfigError: The layout or hooks file is invalid.
        HostError: A reset was refused, device files are not up to date, or a hook failed.
        GpuInUseError: Processes use what it would destroy; nothing was changed.
        HardwareError: NVML refused or failed; RESET_REQUIRED or REBOOT_REQUIRED when the new mode
            is pending; VERIFY_FAILED when the layout is not active afterwards.
        LayoutError: The layout is unknown, or impossible on these GPUs.
        LockedError: Another manager had the lock until the deadline; nothing was changed.
        UsageError: Lock or journal cannot be written; nothing was changed.
    """
    # An invalid request fails before the GPUs are observed, and is no reason to undo anything.
    layout = resolve()
    target = _Target(
        name=layout.name,
        content_hash=layout.content_hash,
        covered=lambda gpus: config.select(layout, gpus),
        plan=lambda gpus: plans.plan(gpus, layout, scope=scope),
        unrestored_elsewhere=lambda gpus, snapshot: layouts.unrestored_elsewhere(
            layout, gpus, snapshot
        ),
    )
    variables = {"MIG_PARTED_SELECTED_CONFIG": layout.name}
    points = hook_points.HookPoints(deps.hooks, variables=variables)
    points.load()
    with local.locked(deps, f"apply {target.name}"):
        is_mode_only = scope is plans.Scope.MODE_ONLY
        return _Run(deps, target, points, is_mode_only=is_mode_only).run()


def restore(
    deps: local.Dependencies,
    source: ports.ConfigSource,
    *,
    scope: plans.Scope = plans.Scope.ALL,
) -> plans.Applied:
    """Restore the instances in a checkpoint, and verify them.

    Instances that are there already stay. GPUs that the checkpoint does not list are not touched.

    Raises:
        CheckpointError: It is invalid, or for other GPUs; nothing was changed.
        MigManagerError: As ``apply``.
    """
    text = source.read()
    content = checkpoint.parse(text, source=source.name)
    name = f"checkpoint {source.name}"
    is_mode_only = scope is plans.Scope.MODE_ONLY

    def plan(gpus: model.ObservedGpus) -> plans.Planned:
        result = planner.restore_checkpoint(content, gpus, is_mode_only=is_mode_only)
        return plans.Planned(layout=name, gpus=gpus, wanted={}, plan=result.plan, users={})

    target = _Target(
        name=name,
        content_hash=hashlib.sha256(text.encode(errors="replace")).hexdigest(),
        covered=lambda gpus: planner.restore_checkpoint(content, gpus).covered,
        plan=plan,
        # A checkpoint is not about unreachable GPUs.
        unrestored_elsewhere=lambda gpus, snapshot: gpus.missing(snapshot),
    )
    points = hook_points.HookPoints(deps.hooks)
    points.load()
    with local.locked(deps, f"restore {name}"):
        return _Run(deps, target, points, is_mode_only=is_mode_only).run()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    """What a change is to achieve.

    ``covered`` and ``plan`` raise ``MigManagerError`` where it is impossible on these GPUs.
    """

    name: str
    content_hash: str
    """Differs between targets of the same name."""
    covered: Callable[[model.ObservedGpus], Collection[str]]
    """Returns the UUIDs of its GPUs."""
    plan: Callable[[model.ObservedGpus], plans.Planned]
    unrestored_elsewhere: Callable[
        [model.ObservedGpus, Sequence[model.GpuSnapshot]], tuple[model.GpuSnapshot, ...]
    ]
    """Returns what of a snapshot is not restored on unreachable GPUs outside it."""


class _Run:
    """One change, under the lock."""

    def __init__(
        self,
        deps: local.Dependencies,
        target: _Target,
        points: hook_points.HookPoints,
        *,
        is_mode_only: bool,
    ) -> None:
        self._deps = deps
        self._target = target
        self._points = points
        self._may_stay_pending = is_mode_only and not deps.may_reset
        self._observed = deps.gpus.observe()
        self._interrupted = local.Interrupted(deps, self._observed)
        content = journals.Journal(
            config=target.name, stale_files=self._interrupted.are_files_stale
        )
        self._journal = local.Journal(deps, content, on_done=self._conclude)
        self._outside: tuple[model.GpuSnapshot, ...] = ()
        """What GPUs outside the target had before the interrupted change."""
        self._check: Callable[[], object] = lambda: None

    def run(self) -> plans.Applied:
        with contextlib.ExitStack() as stack:
            try:
                first = self._first()
                if not self._points.is_empty:
                    self._points.require(first.plan)
                    # Signals end hooks.
                    self._check = stack.enter_context(self._deps.uninterrupted()) or self._check
                    stack.enter_context(self._points.around(self._check))
                    # A hook may change the GPUs.
                    self._observed = self._deps.gpus.observe()
                    first = self._first()
            except errors.MigManagerError as error:
                if undone := self._interrupted.undo():
                    error.add(undone)
                raise
            if first.plan.is_empty:
                self._keep_unrestored(self._observed)
                self._save(self._observed)
                self._journal.refresh_files()
                return self._applied(first, ())
            self._interrupted.announce()
            if self._points.is_empty:
                self._check = stack.enter_context(self._deps.uninterrupted()) or self._check
            return self._applied(first, self._execute(first.plan))

    def _first(self) -> plans.Planned:
        covered = self._target.covered(self._observed)
        self._outside = tuple(gpu for gpu in self._interrupted.snapshot if gpu.uuid not in covered)
        return self._planned(self._observed)

    def _planned(self, observed: model.ObservedGpus) -> plans.Planned:
        """Plan the target, and the rollback of GPUs outside it."""
        planned = self._target.plan(observed)
        outside = planner.restore(observed, self._outside)
        return dataclasses.replace(planned, plan=planner.combined(planned.plan, outside))

    def _execute(self, first: steps.Plan) -> tuple[steps.Plan, ...]:
        change = local.new_transaction(self._deps, self._journal, check=self._check)
        if self._may_stay_pending:
            change = dataclasses.replace(change, gpus=_PendingModeGpus(self._deps.gpus))
        try:
            after, executed = change.run(
                first,
                seen=self._observed,
                older=self._interrupted.snapshot,
                replan=self._replan,
                points=self._points,
            )
        except errors.MigManagerError as error:
            if self._journal.is_open:
                error.add(local.RETRIED_LATER)
            raise
        self._observed = after
        return executed

    def _replan(self, after: model.ObservedGpus) -> steps.Plan:
        """Return what remains to execute, without modes that may stay pending."""
        planned = self._planned(after)
        if not self._may_stay_pending:
            return planned.plan
        pending = {gpu.uuid for gpu in _pending(after, planned.wanted)}
        return steps.Plan(
            gpus=tuple(each for each in planned.plan.gpus if each.gpu_uuid not in pending)
        )

    def _conclude(self, after: model.ObservedGpus) -> None:
        """Save a verified layout for the next boot, or name the modes that are pending."""
        self._keep_unrestored(after)
        planned = self._planned(after)
        if planned.plan.is_empty:
            self._save(after)
            return
        for gpu in _pending(after, planned.wanted):
            self._deps.notify(f"the MIG mode of {gpu} waits for a reset or a reboot")

    def _keep_unrestored(self, gpus: model.ObservedGpus) -> None:
        snapshot = self._interrupted.snapshot
        unrestored = self._target.unrestored_elsewhere(gpus, snapshot)
        self._journal.write(unrestored, config=self._interrupted.config)

    def _save(self, gpus: model.ObservedGpus) -> None:
        """Save a verified layout for the next boot; a failure is shown and leaves it active."""
        try:
            local.save_layout(
                self._deps.boot_layout,
                gpus,
                config=self._target.name,
                config_hash=self._target.content_hash,
                boot_id=self._deps.boot_id,
            )
        except errors.ConfigError as error:
            self._deps.notify(f"{error.message}; the next boot will not restore this layout")

    def _applied(self, first: plans.Planned, executed: tuple[steps.Plan, ...]) -> plans.Applied:
        return plans.Applied(
            layout=self._target.name,
            gpus=self._observed,
            rounds=tuple(dataclasses.replace(first, plan=each) for each in executed),
            overlooked=first.overlooked,
        )


def _pending(
    gpus: Iterable[model.Gpu], wanted: Mapping[str, model.DesiredGpu]
) -> tuple[model.Gpu, ...]:
    """Return the GPUs whose pending mode is the desired one."""
    return tuple(
        gpu
        for gpu in gpus
        if gpu.uuid in wanted
        and gpu.has_pending_mode
        and gpu.pending_mode is wanted[gpu.uuid].mode
    )


class _PendingModeGpus:
    """Implements ``ports.Gpus``: a mode that stays pending is no failure.

    NVIDIA's unit for bare metal works like that: it sets the mode first (``apply --mode-only
    --skip-reset``), and then checks whether the machine can reset the GPU or must reboot.
    """

    def __init__(self, gpus: ports.Gpus) -> None:
        self._gpus = gpus

    def observe(self) -> model.ObservedGpus:
        return self._gpus.observe()

    def execute(self, plan: steps.Plan, seen: Sequence[model.Gpu] = ()) -> model.ObservedGpus:
        try:
            return self._gpus.execute(plan, seen)
        except errors.HardwareError as error:
            if not error.reason.means_mode_waits:
                raise
        return self._gpus.observe().only(each.gpu_uuid for each in plan.gpus)
