"""Restore a saved layout on all GPUs of a node at once, or on one after the other."""

import dataclasses
from collections.abc import Callable, Mapping

from mig_manager import errors, reasons
from mig_manager.change import change_plans, journal_file, shell, transaction
from mig_manager.core import model
from mig_manager.core.planner import planner
from mig_manager.core.records import gpu_recovery


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RestoreResult:
    """The outcome of changes of some GPUs."""

    executed: tuple[change_plans.ExecutedPlan, ...] = ()
    failures: tuple[errors.MigManagerError, ...] = ()
    unreachable: tuple[model.UnreachableGpu, ...] = ()

    def join(self, more: "RestoreResult") -> "RestoreResult":
        """Return the outcome of both changes."""
        return RestoreResult(
            executed=(*self.executed, *more.executed),
            failures=(*self.failures, *more.failures),
            unreachable=(*self.unreachable, *more.unreachable),
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BootChange:
    """The restore of one saved layout, under the lock."""

    deps: shell.ShellDependencies
    recorder: journal_file.FileRecorder
    target: Mapping[str, model.GpuSnapshot]  # the desired state of each GPU, by UUID
    interrupted: dict[str, model.GpuSnapshot]  # GPUs before an interrupted run, for a rollback
    unreachable: model.Snapshots  # in the journal
    faulty: tuple[model.Gpu, ...]  # to reset first
    uuids: tuple[str, ...]  # UUIDs of the GPUs to change
    check: Callable[[], object]
    idle_by_s: float  # the deadline of the one wait for processes that use the GPUs

    def run(self) -> RestoreResult:
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
            outcome = outcome.join(RestoreResult(failures=(error,)))
        return outcome

    def _repair(self) -> RestoreResult:
        """Reset and restore GPUs with a fault, one after the other: one may be in use."""
        outcome = RestoreResult()
        for gpu in self.faulty:
            self.deps.notify(f"{gpu_recovery.fault(gpu)}: resetting it")
            outcome = outcome.join(self._change((gpu.uuid,), is_repair=True))
        return outcome

    def _change_all(self) -> RestoreResult:
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

    def _change(self, uuids: tuple[str, ...], *, is_repair: bool = False) -> RestoreResult:
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
            return RestoreResult(failures=(error,), unreachable=observed.unreachable)
        return RestoreResult(
            executed=executed, unreachable=(*observed.unreachable, *after.unreachable)
        )
