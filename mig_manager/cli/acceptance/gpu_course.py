"""The fixed course of ``acceptance --change-gpu``: every kind of change, on one idle GPU.

The journal of ``apply`` has the GPU as it was before the course, and the instances that the course
creates. Whatever ends the course, the GPU is rolled back: here, or by the next command after a
kill.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping

from mig_manager import errors, reasons
from mig_manager.change import change_recorder, journal_file, shell, transaction
from mig_manager.core import model, steps
from mig_manager.core.acceptance import stages
from mig_manager.core.planner import planner
from mig_manager.core.records import gpu_recovery

NAME = "acceptance"  # name of the layout in the journal
_KILLED_AFTER = 2  # steps
_CANNOT_RESET = {reasons.Reason.NOT_SUPPORTED, reasons.Reason.REBOOT_REQUIRED}
"""Reasons why a virtual machine cannot reset its GPUs."""
_NO_MIG = "MIG mode could not be enabled"


class WorkerKilledError(Exception):
    """The GPU worker was killed in the middle of a plan, as the course asked."""


class _NotTriedError(Exception):
    """A stage is not possible on this machine; the text identifies no machine."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CourseResult:
    """The results of the course by stage."""

    stages: tuple[stages.AcceptanceStage, ...]
    compute_profiles: Mapping[int, tuple[model.ComputeInstanceProfile, ...]]
    """Compute-instance profiles by the enum index of the GPU-instance profile."""


KillingAfter = Callable[[int], contextlib.AbstractContextManager[None]]
"""Makes the context in which the GPU worker is killed after so many steps of a plan, so that the
change raises ``WorkerKilledError``."""
Using = Callable[[str], contextlib.AbstractContextManager[str]]
"""Makes the context in which a process uses the MIG device of a UUID, and which returns why none
does, or an empty text."""


def run(
    deps: shell.ShellDependencies,
    uuid: str,
    killing_after: KillingAfter,
    using: Using,
) -> CourseResult:
    """Run the course on an idle GPU, and restore the GPU whatever happens.

    Resets this GPU alone: a reset that would take others along is refused.

    Raises:
        GpuInUseError: The GPU has instances, a pending mode or a fault; nothing was changed.
        HardwareError: NVML failed, or (VERIFY_FAILED) the GPU is not as it was before.
        LayoutError: The GPU has no MIG; nothing was changed.
        LockedError: Another manager had the lock until the deadline; nothing was changed.
        UsageError: No such GPU, an earlier change was left unfinished, or lock or journal cannot
            be written; nothing was changed.
    """
    with deps.hold_lock(f"{NAME} of a GPU"):
        observed = deps.observe_when_loaded()
        recorder = journal_file.open_recorder(deps, observed, layout=NAME)
        gpu = find_gpu(observed, uuid)
        require_unused(gpu)
        if recorder.journal.gpus.snapshots:
            raise errors.UsageError(
                journal_file.describe_interrupted(recorder.journal),
                remedy="Run 'mig-manager apply' or 'restore' first.",
            )
        course = _Course(
            deps=deps,
            recorder=recorder,
            initial=gpu.snapshot,
            killing_after=killing_after,
            using=using,
            observed=observed,
        )
        done = []
        with deps.uninterrupted() as check:
            try:
                for stage in course.run():
                    done.append(stage)
                    check()
            finally:
                course.undo()
        return CourseResult(stages=tuple(done), compute_profiles=course.compute_profiles)


def find_gpu(observed: model.ObservedGpus, uuid: str) -> model.Gpu:
    """Return the GPU with this UUID.

    Raises:
        LayoutError: It has no MIG.
        UsageError: It does not exist.
    """
    gpu = next((each for each in observed if each.uuid == uuid), None)
    if gpu is None:
        uuids = ", ".join(each.uuid for each in observed)
        raise errors.UsageError(f"no reachable GPU {uuid}; there are {uuids}")
    if not gpu.is_mig_capable:
        raise errors.LayoutError(f"{gpu} has no MIG", reason=reasons.Reason.NOT_MIG_CAPABLE)
    return gpu


def require_unused(gpu: model.Gpu) -> None:
    """Raise ``GpuInUseError`` if the course may not run on this GPU."""
    if gpu.has_pending_mode:
        raise errors.GpuInUseError(
            f"{gpu} waits for a reset, after a change of its MIG mode",
            remedy="Reset it with 'nvidia-smi --gpu-reset' or reboot, or choose another GPU.",
        )
    if gpu.needs_recovery:
        raise errors.GpuInUseError(gpu_recovery.fault(gpu), remedy=gpu_recovery.remedy(gpu))
    if gpu.gpu_instances:
        names = ", ".join(f"{each.profile} at {each.placement}" for each in gpu.gpu_instances)
        raise errors.GpuInUseError(
            f"{gpu} has GPU instances ({names})",
            remedy="Apply a layout without instances on this GPU, or choose another one.",
        )


@dataclasses.dataclass(slots=True, kw_only=True)
class _Course:
    deps: shell.ShellDependencies
    recorder: journal_file.FileRecorder
    initial: model.GpuSnapshot
    killing_after: KillingAfter
    using: Using
    observed: model.ObservedGpus  # after the last change
    compute_profiles: dict[int, tuple[model.ComputeInstanceProfile, ...]] = dataclasses.field(
        default_factory=dict
    )

    @property
    def uuid(self) -> str:
        return self.initial.uuid

    def run(self) -> Iterator[stages.AcceptanceStage]:
        """Yield the stages as they end."""
        enabled = self._try("enable MIG mode", lambda: self._change(_with_instances()))
        yield enabled
        if enabled.outcome is not stages.StageOutcome.DONE:
            yield stages.AcceptanceStage(
                name="instances", outcome=stages.StageOutcome.NOT_TRIED, why=_NO_MIG
            )
            return
        for name, act in self._acts(self.gpu.profiles or ()):
            yield self._try(name, act)

    def _acts(
        self, profiles: tuple[model.GpuInstanceProfile, ...]
    ) -> Iterator[tuple[str, Callable[[], object]]]:
        if pair := stages.disjoint_pair(profiles):
            yield "refuse to destroy an instance in use", lambda: self._refuse_in_use(*pair)
            yield "keep an unowned instance", lambda: self._keep_unowned(*pair)
        full = tuple(stages.full_layouts(profiles))
        for name, desired in (*stages.single_profiles(profiles), *full):
            yield name, functools.partial(self._change, desired)
        yield "reset the GPU", self._reset
        if full:
            yield "restore after kill -9", lambda: self._survive_kill(full[-1][1])
        yield "restore the GPU", self.undo

    def _try(self, name: str, act: Callable[[], object]) -> stages.AcceptanceStage:
        try:
            act()
        except _NotTriedError as reason:
            return stages.AcceptanceStage(
                name=name, outcome=stages.StageOutcome.NOT_TRIED, why=str(reason)
            )
        except errors.MigManagerError as error:
            self.observed = self.deps.gpus.observe()
            return stages.AcceptanceStage(
                name=name, outcome=stages.StageOutcome.FAILED, why=_cause(error)
            )
        return stages.AcceptanceStage(name=name)

    @property
    def gpu(self) -> model.Gpu:
        """The GPU as last observed; GPU_LOST if it was unreachable then."""
        gpu = next(iter(self.observed.only([self.uuid])), None)
        if gpu is None:
            raise errors.HardwareError("the GPU is unreachable", reason=reasons.Reason.GPU_LOST)
        return gpu

    def _change(self, desired: model.DesiredGpu) -> None:
        """Bring the GPU to a state as ``apply`` does, and keep the journal of the course."""
        goal = transaction.ChangeTarget(
            lambda gpus: planner.plan(gpus, {self.uuid: desired}),
            lambda _, before: before,  # the journal ends with the course
        )
        self.observed, _ = self.deps.new_transaction(self.recorder).run(
            goal.plan(self.observed),
            goal,
            observed=self.observed,
            interrupted=self.recorder.journal.gpus.snapshots,
        )
        for row in self.gpu.profiles or ():
            if row.compute_profiles:
                self.compute_profiles[row.enum_index] = row.compute_profiles

    def _plan(self, *pins: model.Pin) -> steps.Plan:
        """Plan these instances alone."""
        return planner.plan(self.observed, {self.uuid: _with_instances(*pins)})

    def _refuse_in_use(self, used: model.Pin, free: model.Pin) -> None:
        """Check that neither instance of a device in use can be destroyed, and another can."""
        self._change(_with_instances(used, free))
        (device,) = next(
            each.compute_instances
            for each in self.gpu.gpu_instances
            if each.placement.start == used.start
        )
        # The driver answers IN_USE for a compute instance with a context, and for its GPU instance
        # (nvml.h, ``nvmlGpuInstanceDestroy``); ``requires_idle`` refuses before the first call.
        refused = dataclasses.replace(self._plan(free), in_use_timeout_s=0.0)
        (gpu,) = refused.gpus
        attempts = [
            dataclasses.replace(refused, gpus=(dataclasses.replace(gpu, steps=(step,)),))
            for step in gpu.steps
        ]
        with self.using(device.uuid or "") as problem:
            if problem:
                raise _NotTriedError(problem)
            for attempt in (dataclasses.replace(refused, requires_idle=True), *attempts):
                self._require_refusal(attempt)
            self.deps.gpus.execute(self._plan(used), self.observed)
        self.observed = self.deps.gpus.observe()
        self._change(_with_instances())

    def _require_refusal(self, attempt: steps.Plan) -> None:
        try:
            self.deps.gpus.execute(attempt, self.observed)
        except errors.HardwareError as error:
            if error.reason is reasons.Reason.IN_USE:
                return
            raise
        raise _verification_error("destroy an instance in use")

    def _keep_unowned(self, mine: model.Pin, unowned: model.Pin) -> None:
        """Check that a rollback names and keeps an instance that its change did not create."""
        self._change(_with_instances())
        before = planner.baseline(self._plan(mine), self.observed)
        # The journal of the course has both, so that a kill leaves neither.
        self._change(_with_instances(mine, unowned))
        change = self.deps.new_transaction(
            self.recorder, kept_snapshots=self.recorder.journal.gpus.snapshots
        )
        rollback = change.roll_back(before)
        self.observed = self.deps.gpus.observe()
        starts = [each.placement.start for each in self.gpu.gpu_instances]
        if starts != [unowned.start] or not rollback.unowned:
            raise _verification_error("keep an unowned instance alone")

    def _survive_kill(self, desired: model.DesiredGpu) -> None:
        """Kill the worker in the middle of a change, and undo it from the journal."""
        self._change(_with_instances())
        with contextlib.suppress(WorkerKilledError), self.killing_after(_KILLED_AFTER):
            self._change(desired)
        # The next command would undo it in the same way, from the file.
        observed = self.deps.gpus.observe()
        self.recorder = journal_file.open_recorder(self.deps, observed, layout=NAME)
        self.undo()

    def _reset(self) -> None:
        """Reset the GPU without instances; GPUs from Hopper on are without MIG then."""
        self._change(_with_instances())
        if self.deps.reset is None:
            raise _NotTriedError("no program that resets GPUs")
        try:
            record = functools.partial(change_recorder.record_persistence, self.recorder)
            self.deps.reset.reset([self.gpu], record, is_repair=True)
        except errors.HostError as error:
            if error.reason in _CANNOT_RESET:
                raise _NotTriedError(error.reason.value) from error
            raise
        self.observed = self.deps.gpus.observe()
        if self.gpu.has_pending_mode or self.gpu.gpu_instances:
            raise _verification_error("reset without instances")

    def undo(self) -> None:
        """Restore the GPU from the journal; VERIFY_FAILED: it is not as before."""
        # Without a journal a mode may still be pending.
        before = self.recorder.journal.gpus.snapshots or (
            dataclasses.replace(self.initial, created=()),
        )
        self.deps.new_transaction(self.recorder).roll_back(before, requires_idle=True)
        self.observed = self.deps.gpus.observe()
        if _shape(self.gpu.snapshot) != _shape(self.initial):
            raise errors.HardwareError(
                f"{self.gpu} is not as it was before the course; the journal is kept",
                reason=reasons.Reason.VERIFY_FAILED,
            )


def _with_instances(*pins: model.Pin) -> model.DesiredGpu:
    """Return a GPU with MIG, and with these instances alone."""
    return model.DesiredGpu.of(model.MigMode.ENABLED, {}, dict.fromkeys(pins, 1))


def _verification_error(what: str) -> errors.HardwareError:
    return errors.HardwareError(
        f"not verified: {what}", reason=reasons.Reason.VERIFY_FAILED, operation=what
    )


def _shape(gpu: model.GpuSnapshot) -> tuple[object, ...]:
    instances = tuple(
        (gi.profile, gi.placement, tuple(ci.profile for ci in gi.compute_instances))
        for gi in gpu.gpu_instances
    )
    return gpu.current_mode, gpu.pending_mode, instances


def _cause(error: errors.MigManagerError) -> str:
    """Describe an error without what identifies a machine, which its message has."""
    if isinstance(error, errors.HardwareError) and error.operation:
        code = "" if error.code is None else f" answered {error.code}"
        return f"{error.reason.value}: {error.operation}{code}"
    return error.reason.value
