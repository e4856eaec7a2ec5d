"""``apply`` and ``restore`` at a shell: lock, journal, change, then verified or rolled back.

The verified layout is saved for the next boot.
"""

import contextlib
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence

from mig_manager import errors
from mig_manager.change import hook_points, local, transaction
from mig_manager.core import model, ports, steps
from mig_manager.core.files import checkpoint
from mig_manager.core.layout import layouts, plans
from mig_manager.core.node import clients
from mig_manager.core.planner import planner
from mig_manager.core.records import journals


def apply(
    deps: local.LocalDependencies,
    resolve: Callable[[], layouts.Layout],
    *,
    is_mode_only: bool = False,
    is_locked: bool = False,
) -> plans.Applied:
    """Apply a layout, and verify it.

    Rolls back the changes of a killed ``apply`` on idle GPUs outside this layout, on all GPUs if
    the layout does not fit. With ``is_mode_only`` GPUs in the right MIG mode keep their instances.
    Without the right to reset, a mode that needs a reset stays pending: a failure, unless only
    the mode counts. ``is_locked`` is whether the caller holds the node's lock.

    Raises:
        ConfigError: The layout or hooks file is invalid.
        HostError: A reset was refused, device files are not up to date, or a hook failed.
        GpuInUseError: Processes or pods use devices to be destroyed; nothing was changed.
        HardwareError: NVML refused or failed; RESET_REQUIRED or REBOOT_REQUIRED when the new mode
            is pending; VERIFY_FAILED when the layout is not active afterwards.
        LayoutError: The layout is unknown, or impossible on these GPUs.
        LockedError: Another manager had the lock until the deadline; nothing was changed.
        UsageError: Lock or journal cannot be written; nothing was changed.
    """
    # An invalid request fails before the GPUs are observed, and is no reason to undo anything.
    layout = resolve()
    variables = {"MIG_PARTED_SELECTED_CONFIG": layout.name}
    points = hook_points.HookPoints(deps.hooks, variables=variables)
    deps = _aware_of_hooks(deps, points)

    def processes() -> plans.Processes | None:
        # What blocks the change is asked again when it begins.
        with contextlib.suppress(errors.HardwareError):
            return deps.processes()
        return None

    target = _Target(
        name=layout.name,
        content_hash=layout.content_hash,
        covered=lambda gpus: layouts.select(layout, gpus),
        plan=lambda gpus: plans.plan(
            gpus,
            layout,
            is_mode_only=is_mode_only,
            users=deps.pods.by_device,
            processes=processes,
        ),
        unrestored_elsewhere=lambda gpus, snapshot: layouts.unrestored_elsewhere(
            layout, gpus, snapshot
        ),
    )
    return _run(deps, target, points, None if is_locked else "apply", is_mode_only=is_mode_only)


def restore(
    deps: local.LocalDependencies,
    source: ports.ConfigSource,
    *,
    is_mode_only: bool = False,
) -> plans.Applied:
    """Restore the instances in a checkpoint, and verify them.

    Existing instances of the checkpoint stay. GPUs outside it are not touched.

    Raises:
        CheckpointError: It is invalid, or for other GPUs; nothing was changed.
        MigManagerError: As ``apply``.
    """
    text = source.read()
    content = checkpoint.parse(text, source=source.name)
    name = f"checkpoint {source.name}"

    def plan(gpus: model.ObservedGpus) -> plans.Planned:
        changes = planner.restore_checkpoint(content, gpus, is_mode_only=is_mode_only)
        return plans.Planned(layout=name, gpus=gpus, desired={}, plan=changes, users={})

    target = _Target(
        name=name,
        content_hash=hashlib.sha256(text.encode(errors="replace")).hexdigest(),
        covered=lambda _: frozenset(device.uuid for device in content),
        plan=plan,
        # A checkpoint does not cover unreachable GPUs.
        unrestored_elsewhere=lambda gpus, snapshot: gpus.unreachable_snapshots(snapshot),
    )
    points = hook_points.HookPoints(deps.hooks)
    deps = _aware_of_hooks(deps, points)
    return _run(deps, target, points, "restore", is_mode_only=is_mode_only)


def _aware_of_hooks(
    deps: local.LocalDependencies, points: hook_points.HookPoints
) -> local.LocalDependencies:
    """Accept kubelet's last answer once a hook has run, which may stop kubelet."""
    pods = dataclasses.replace(deps.pods, has_hook_run=lambda: points.has_run)
    return dataclasses.replace(deps, pods=pods)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    """The goal of a change; ``covered`` and ``plan`` raise ``MigManagerError`` if impossible."""

    name: str
    content_hash: str  # differs between targets of the same name
    covered: Callable[[model.ObservedGpus], Collection[str]]  # returns the UUIDs of its GPUs
    plan: Callable[[model.ObservedGpus], plans.Planned]
    unrestored_elsewhere: Callable[
        [model.ObservedGpus, Sequence[model.GpuSnapshot]], tuple[model.GpuSnapshot, ...]
    ]
    """Returns the snapshots of unreachable GPUs outside the target that are not restored."""


def _run(
    deps: local.LocalDependencies,
    target: _Target,
    points: hook_points.HookPoints,
    verb: str | None,  # None: the caller holds the lock
    *,
    is_mode_only: bool,
) -> plans.Applied:
    points.load()
    if is_mode_only:
        # ``boot`` names what it restores, and these GPUs need not have the layout's instances.
        target = dataclasses.replace(target, name=f"{target.name} (MIG mode only)")
    with local.hold_lock(deps, f"{verb} {target.name}") if verb else contextlib.nullcontext():
        observed = local.observe(deps)
        journal = local.open_journal(deps, observed, config=target.name)
        change = _LockedChange(
            deps=deps,
            target=target,
            points=points,
            journal=journal,
            interrupted=journal.entries,
            may_stay_pending=is_mode_only and not deps.may_reset,
        )
        return change.run(observed)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Outside:
    """The snapshots, from an interrupted change, of GPUs outside the target."""

    idle: transaction.Snapshots  # this change restores them
    in_use: transaction.Snapshots
    """The journal keeps them for a later change."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _LockedChange:
    """One change, under the lock."""

    deps: local.LocalDependencies
    target: _Target
    points: hook_points.HookPoints
    journal: local.LocalJournal
    interrupted: journals.Journal  # the journal of a killed run
    may_stay_pending: bool
    """Whether a mode may stay pending until a reset.

    NVIDIA's unit for bare metal first sets the mode (``apply --mode-only --skip-reset``), then
    checks whether the machine can reset the GPU or must reboot.
    """

    def run(self, observed: model.ObservedGpus) -> plans.Applied:
        with contextlib.ExitStack() as stack:
            check: Callable[[], object] = tuple
            try:
                outside = self._outside(observed)
                first = self._plan(observed, outside)
                if self.points.has_hooks or not first.plan.is_empty:
                    self.points.require(first.plan)
                    if self.points.has_hooks:
                        self._require_unused(first)
                    check = stack.enter_context(self.deps.uninterrupted())
                    stack.enter_context(self.points.around(check))
                if self.points.has_hooks:
                    # Hooks may change the GPUs.
                    after = self.deps.gpus.observe()
                    outside = self._outside(after)
                    first = self._plan(after, outside)
            except errors.MigManagerError as error:
                if undone := self.journal.undo(observed):
                    error.add(undone)
                raise
            if outside.in_use:
                names = ", ".join(map(str, first.gpus.only(gpu.uuid for gpu in outside.in_use)))
                self.deps.notify(
                    f"{local.describe_unfinished(self.interrupted)}; {names}, outside this "
                    "layout, is not restored while it is in use"
                )
            if first.plan.is_empty:
                self.journal.note(
                    snapshot=(*outside.in_use, *self._unrestored_snapshots(first.gpus, outside))
                )
                self._save(first.gpus)
                self.journal.refresh_files()
                return self._result(first, first.gpus, ())
            if self.interrupted.snapshot:
                covered = self.target.covered(first.gpus)
                restored = local.list_restored_outside(first.gpus, outside.idle, covered)
                self.deps.notify(
                    f"{local.describe_unfinished(self.interrupted)}; if this one fails, the GPUs "
                    "are rolled back to their state before that one"
                    f"{restored and f'; this one also restores {restored}, outside its layout'}"
                )
            return self._result(first, *self._execute(first, outside, check))

    def _require_unused(self, first: plans.Planned) -> None:
        """Refuse to destroy the devices of pods before hooks run, which may stop kubelet.

        A command that waits does so after the hooks, which may end the pods.
        """
        try:
            self.deps.pods.require_unused(first.affected)
        except errors.GpuInUseError as error:
            if self.deps.idle_timeout_s:
                return
            # An interrupted change is undone now.
            if not self.interrupted.snapshot:
                error.add("nothing was changed")
            raise

    def _outside(self, gpus: model.ObservedGpus) -> _Outside:
        covered = self.target.covered(gpus)
        snapshots = [gpu for gpu in self.interrupted.snapshot if gpu.uuid not in covered]
        rollback = planner.restore(gpus, snapshots)
        processes = functools.cache(self.deps.processes)
        used = {each.gpu_uuid for each in rollback.gpus if self._is_in_use(each, gpus, processes)}
        return _Outside(
            idle=tuple(gpu for gpu in snapshots if gpu.uuid not in used),
            in_use=tuple(gpu for gpu in snapshots if gpu.uuid in used),
        )

    def _is_in_use(
        self,
        plan: steps.GpuPlan,
        gpus: model.ObservedGpus,
        processes: Callable[[], plans.Processes],
    ) -> bool:
        """Check whether pods or processes prevent the rollback of a GPU."""
        try:
            self.deps.pods.require_unused(
                clients.affected_ids(steps.Plan(gpus=(plan,)), gpus.only({plan.gpu_uuid}))
            )
        except errors.GpuInUseError as error:
            if error.reason is not errors.Reason.IN_USE:
                raise
            return True
        # What blocks the change is asked again when it begins.
        with contextlib.suppress(errors.HardwareError):
            users = processes().get(plan.gpu_uuid, ()) if plan.steps else ()
            return bool(steps.blocking(plan, users))
        return False

    def _plan(self, gpus: model.ObservedGpus, outside: _Outside) -> plans.Planned:
        """Plan the target, and the rollback of idle GPUs outside it."""
        planned = self.target.plan(gpus)
        rollback = planner.restore(gpus, outside.idle)
        return dataclasses.replace(planned, plan=planner.combine(planned.plan, rollback))

    def _unrestored_snapshots(
        self, gpus: model.ObservedGpus, outside: _Outside
    ) -> tuple[model.GpuSnapshot, ...]:
        return self.target.unrestored_elsewhere(gpus, self._to_roll_back(outside))

    def _to_roll_back(self, outside: _Outside) -> transaction.Snapshots:
        """Return the snapshots that a rollback of this change restores, too."""
        return tuple(gpu for gpu in self.interrupted.snapshot if gpu not in outside.in_use)

    def _execute(
        self,
        first: plans.Planned,
        outside: _Outside,
        check: Callable[[], object],
    ) -> tuple[model.ObservedGpus, tuple[transaction.Executed, ...]]:
        change = dataclasses.replace(
            local.new_transaction(self.deps, self.journal, check=check),
            may_stay_pending=self.may_stay_pending,
            elsewhere=outside.in_use,
        )
        try:
            after, executed = change.run(
                first.plan,
                observed=first.gpus,
                interrupted=self._to_roll_back(outside),
                replan=lambda after: self._remaining(self._plan(after, outside)),
                unrestored=lambda after: self._unrestored_snapshots(after, outside),
                points=self.points,
            )
            if self.journal.entries.snapshot:
                # The snapshot belongs to the interrupted change.
                self.journal.note(config=self.interrupted.config)
            now = self._plan(after, outside)
            if now.plan.is_empty:
                self._save(after)
            else:
                for gpu in _pending(now):
                    self.deps.notify(f"the MIG mode of {gpu} waits for a reset or a reboot")
                if all(gpu.has_pending_mode for gpu in self._selected_gpus(after)):
                    self._keep_pending_modes(after)
                else:
                    self._save(after)
            change.refresh()
        except errors.MigManagerError as error:
            if error.reason.is_mode_pending:
                with contextlib.suppress(errors.MigManagerError):
                    self._keep_pending_modes(self.deps.gpus.observe())
            if not self.journal.entries.is_empty:
                error.add(local.RETRIED_LATER)
            raise
        return after, executed

    def _remaining(self, planned: plans.Planned) -> steps.Plan:
        """Return the steps that remain, without modes that may stay pending."""
        if not self.may_stay_pending:
            return planned.plan
        pending = {gpu.uuid for gpu in _pending(planned)}
        return steps.Plan(
            gpus=tuple(each for each in planned.plan.gpus if each.gpu_uuid not in pending)
        )

    def _save(self, gpus: model.ObservedGpus) -> None:
        """Save a verified layout for the next boot; a failure is only reported."""
        if why := self.deps.saved_layout.save(
            gpus,
            config=self.target.name,
            config_hash=self.target.content_hash,
            covered=self.target.covered(gpus),
        ):
            self.deps.notify(f"{why}; the next boot will not restore this layout")

    def _selected_gpus(self, gpus: model.ObservedGpus) -> model.ObservedGpus:
        return gpus.only(self.target.covered(gpus))

    def _keep_pending_modes(self, gpus: model.ObservedGpus) -> None:
        if why := self.deps.saved_layout.drop_pending(self._selected_gpus(gpus)):
            self.deps.notify(f"{why}; the next boot will undo the new MIG mode")

    def _result(
        self,
        first: plans.Planned,
        gpus: model.ObservedGpus,
        executed: tuple[transaction.Executed, ...],
    ) -> plans.Applied:
        return plans.Applied(
            layout=first.layout,
            gpus=gpus,
            rounds=tuple(
                dataclasses.replace(first, plan=each.plan, gpus=each.gpus) for each in executed
            ),
            overlooked=first.overlooked,
        )


def _pending(planned: plans.Planned) -> Iterator[model.Gpu]:
    """Yield the GPUs whose pending mode is the desired one."""
    for gpu in planned.gpus:
        goal = planned.desired.get(gpu.uuid)
        if goal and gpu.has_pending_mode and gpu.pending_mode is goal.mode:
            yield gpu
