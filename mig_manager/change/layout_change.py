"""One change to a layout or checkpoint at a shell, under the node's lock."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator

from mig_manager import errors, reasons
from mig_manager.change import hook_points, journal_file, shell, transaction
from mig_manager.core import gpu_processes, model, steps
from mig_manager.core.layout import plans
from mig_manager.core.planner import planner
from mig_manager.core.records import journals


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestedLayout:
    """The layout or checkpoint that a command applies."""

    name: str
    content_hash: str
    is_mode_only: bool  # whether GPUs in the right MIG mode keep their instances
    gpu_uuids: Callable[[model.ObservedGpus], frozenset[str]]
    plan: Callable[[model.ObservedGpus], plans.Planned]
    unrestored_snapshots: Callable[[model.ObservedGpus, model.Snapshots], model.Snapshots]
    """As of ``transaction.ChangeTarget``."""

    @property
    def full_name(self) -> str:
        """Its name in lock and journal.

        ``boot`` names what it restores, and with ``is_mode_only`` the GPUs need not have the
        layout's instances.
        """
        return f"{self.name} (MIG mode only)" if self.is_mode_only else self.name


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _LayoutAndRollback:
    """The requested layout, and GPUs as before an interrupted run."""

    requested: RequestedLayout
    to_restore: model.Snapshots  # idle, and outside the layout; this change restores them
    outside_in_use: model.Snapshots
    """Pods or processes use what their rollback destroys. The journal keeps them for a later
    change."""
    inside_in_use: model.Snapshots
    """GPUs of the layout, likewise; the journal keeps them only if this change fails."""
    may_stay_pending: bool
    """Whether a mode may stay pending until a reset.

    NVIDIA's unit for bare metal first sets the mode (``apply --mode-only --skip-reset``), then
    checks whether the machine can reset the GPU or must reboot.
    """

    @property
    def in_use(self) -> model.Snapshots:
        """The GPUs that no rollback of this change touches."""
        return (*self.outside_in_use, *self.inside_in_use)

    def plan(self, gpus: model.ObservedGpus) -> plans.Planned:
        planned = self.requested.plan(gpus)
        rollback = planner.restore(gpus, self.to_restore)
        return dataclasses.replace(planned, plan=planner.combine(planned.plan, rollback))

    def plan_rest(self, gpus: model.ObservedGpus) -> steps.Plan:
        """Return the steps that remain, without modes that may stay pending."""
        planned = self.plan(gpus)
        if not self.may_stay_pending:
            return planned.plan
        pending = {gpu.uuid for gpu in _pending(planned)}
        return steps.Plan(
            gpus=tuple(each for each in planned.plan.gpus if each.gpu_uuid not in pending)
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayoutChange:
    """One change to a layout or checkpoint; the caller holds the node's lock."""

    deps: shell.ShellDependencies
    requested: RequestedLayout
    points: hook_points.HookPoints
    recorder: journal_file.FileRecorder
    interrupted: journals.Journal  # the journal of an interrupted run

    def run(self, observed: model.ObservedGpus) -> plans.ApplyResult:
        """Execute, verify and save the layout, or roll back; raises as ``applying.apply``.

        ``observed`` are the GPUs now; hooks may change them.
        """
        with contextlib.ExitStack() as stack:
            check: hook_points.Check = hook_points.no_check
            try:
                combined = self._combine(observed)
                first = combined.plan(observed)
                if self.points.has_hooks:
                    self.points.require(first.plan)
                    self._require_unused(first)
                if self.points.has_hooks or not first.plan.is_empty:
                    check = stack.enter_context(self.deps.uninterrupted())
                if self.points.has_hooks:
                    stack.enter_context(self.points.with_exit())
                    self.points.start(check)
                    # Hooks may change the GPUs.
                    after = self.deps.gpus.observe()
                    combined = self._combine(after)
                    first = combined.plan(after)
            except errors.MigManagerError as error:
                if undone := self.recorder.undo(observed):
                    error.add(undone)
                raise
            self._note_interrupted(combined, first)
            return self._execute(combined, first, check)

    def _require_unused(self, first: plans.Planned) -> None:
        """Refuse to destroy the devices of pods before hooks run, which may stop kubelet.

        A command that waits does so after the hooks, which may end the pods.
        """
        try:
            self.deps.pods.require_unused(first.affected, first.gpus)
        except errors.GpuInUseError as error:
            if self.deps.idle_timeout_s:
                return
            # An interrupted change is undone now.
            if not self.interrupted.gpus.snapshots:
                error.add("nothing was changed")
            raise

    def _combine(self, gpus: model.ObservedGpus) -> _LayoutAndRollback:
        """Return the layout, with the interrupted changes of idle GPUs outside it to undo."""
        before = self.interrupted.gpus.snapshots
        covered = self.requested.gpu_uuids(gpus)
        processes = functools.cache(self.deps.processes)
        used = {
            each.gpu_uuid
            for each in planner.restore(gpus, before).gpus
            if self._is_in_use(each, gpus, processes)
        }
        outside = [gpu for gpu in before if gpu.uuid not in covered]
        return _LayoutAndRollback(
            requested=self.requested,
            to_restore=tuple(gpu for gpu in outside if gpu.uuid not in used),
            outside_in_use=tuple(gpu for gpu in outside if gpu.uuid in used),
            inside_in_use=tuple(gpu for gpu in before if gpu.uuid in used & covered),
            may_stay_pending=self.requested.is_mode_only and not self.deps.may_reset,
        )

    def _is_in_use(
        self,
        plan: steps.GpuPlan,
        gpus: model.ObservedGpus,
        processes: Callable[[], gpu_processes.Processes],
    ) -> bool:
        """Return whether pods or processes prevent the rollback of a GPU."""
        try:
            self.deps.pods.require_unused(
                steps.Plan(gpus=(plan,)).affected_ids(gpus.only({plan.gpu_uuid})), gpus
            )
        except errors.GpuInUseError as error:
            if error.reason is not reasons.Reason.IN_USE:
                raise
            return True
        # What blocks the change is asked again when it begins.
        with contextlib.suppress(errors.HardwareError):
            users = processes().get(plan.gpu_uuid, ()) if plan.steps else ()
            return bool(gpu_processes.blocking(plan, users))
        return False

    def _note_interrupted(self, combined: _LayoutAndRollback, first: plans.Planned) -> None:
        """Say what becomes of an interrupted change."""
        former = journal_file.describe_interrupted(self.interrupted)

        def name(snapshots: model.Snapshots) -> str:
            return ", ".join(map(str, first.gpus.only(gpu.uuid for gpu in snapshots)))

        inside = name(combined.inside_in_use)
        if outside := name(combined.outside_in_use):
            self.deps.notify(
                f"{former}; {outside}, outside this layout, is not restored while it is in use"
            )
        if self.interrupted.gpus.snapshots and not first.plan.is_empty:
            covered = self.requested.gpu_uuids(first.gpus)
            restored = journal_file.list_restored_outside(first.gpus, combined.to_restore, covered)
            but = f", but not {inside}, which pods or processes use" if inside else ""
            also = f"; this one also restores {restored}, outside its layout" if restored else ""
            self.deps.notify(
                f"{former}; if this one fails, the GPUs are rolled back to their state before "
                f"that one{but}{also}"
            )

    def _execute(
        self, combined: _LayoutAndRollback, first: plans.Planned, check: hook_points.Check
    ) -> plans.ApplyResult:
        change = self.deps.new_transaction(
            self.recorder,
            check=check,
            may_stay_pending=combined.may_stay_pending,
            kept_snapshots=combined.in_use,
        )
        try:
            after, executed = change.run(
                first.plan,
                transaction.ChangeTarget(
                    combined.plan_rest,
                    lambda *now: (
                        *combined.outside_in_use,
                        *self.requested.unrestored_snapshots(*now),
                    ),
                ),
                observed=first.gpus,
                interrupted=tuple(
                    gpu for gpu in self.interrupted.gpus.snapshots if gpu not in combined.in_use
                ),
                points=self.points,
            )
            if self.recorder.journal.gpus.snapshots:
                # The snapshot belongs to the interrupted change.
                self.recorder.set_journal(layout=self.interrupted.layout)
            waiting = [*_pending(combined.plan(after))]
            for gpu in waiting:
                self.deps.notify(f"the MIG mode of {gpu} waits for a reset or a reboot")
            if waiting and all(gpu.has_pending_mode for gpu in self._selected_gpus(after)):
                self._keep_pending_modes(after)
            else:
                self._save(after)
            self.recorder.refresh_files()
        except errors.MigManagerError as error:
            if error.reason.is_mode_pending:
                with contextlib.suppress(errors.MigManagerError):
                    self._keep_pending_modes(self.deps.gpus.observe())
            if self.recorder.journal.remainder is not journals.Remainder.NOTHING:
                error.add(journal_file.RETRIED_LATER)
            raise
        return plans.ApplyResult(
            layout=first.layout,
            gpus=after,
            executed=tuple(
                dataclasses.replace(first, plan=each.plan, gpus=each.gpus) for each in executed
            ),
            lenient_warnings=first.lenient_warnings,
        )

    def _save(self, gpus: model.ObservedGpus) -> None:
        """Save a verified layout for the next boot; a failure is only reported."""
        try:
            self.deps.verified_layout.save(
                gpus,
                layout=self.requested.full_name,
                content_hash=self.requested.content_hash,
                covered=self.requested.gpu_uuids(gpus),
            )
        except errors.ConfigError as error:
            self.deps.notify(f"{error.message}; the next boot will not restore this layout")

    def _selected_gpus(self, gpus: model.ObservedGpus) -> model.ObservedGpus:
        return gpus.only(self.requested.gpu_uuids(gpus))

    def _keep_pending_modes(self, gpus: model.ObservedGpus) -> None:
        try:
            self.deps.verified_layout.drop_pending(self._selected_gpus(gpus))
        except errors.ConfigError as error:
            self.deps.notify(f"{error.message}; the next boot will undo the new MIG mode")


def _pending(planned: plans.Planned) -> Iterator[model.Gpu]:
    """Yield the GPUs whose pending mode is the desired one."""
    for gpu in planned.gpus:
        goal = planned.desired.get(gpu.uuid)
        if goal and gpu.has_pending_mode and gpu.pending_mode is goal.mode:
            yield gpu
