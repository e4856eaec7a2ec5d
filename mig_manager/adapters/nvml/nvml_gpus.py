"""The GPUs of this node through NVIDIA's management library, in this process."""

import contextlib
import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import pynvml

from mig_manager import errors, reasons
from mig_manager.adapters.host import call_thread
from mig_manager.adapters.nvml import gpu_device, last_calls, library, observation, step_executor
from mig_manager.core import model, steps, timing

_Result = TypeVar("_Result")
_NameUsers = Callable[[steps.GpuPlan, model.Gpu | None], str]
"""Names the processes that block a GPU's plan; empty if none does."""


@dataclasses.dataclass(kw_only=True, eq=False, repr=False, match_args=False)
class NvmlGpus:
    """Implements ``ports.Gpus``: one NVML session for each call, one thread for each GPU.

    A call into a hung driver does not return and cannot be cancelled; read-only commands
    put a thread around this class, ``worker_client.WorkerGpus`` a process.
    """

    library_path: str | None = None  # None leaves the search to the loader
    driver_roots: Sequence[str] = ()
    """Where to look for the library when the loader does not find the right one."""
    in_use_timeout_s: float = 30.0
    """How long a GPU's steps are retried while it is in use, from its first IN_USE on."""
    clock: timing.Clock
    proc_root: pathlib.Path | None = None
    """Where to look for processes that use a GPU; None: ask NVML only."""
    on_step: Callable[[int], None] | None = None
    """Called with the index of a GPU after each of its steps, in the thread of that GPU."""

    def observe(self) -> model.ObservedGpus:
        """Return the GPUs, reachable or not; HardwareError if none is reachable.

        NO_PERMISSION: MIG is on and the caller may not list instances.
        """
        with library.session(self.library_path, self.driver_roots):
            count = library.call(pynvml.nvmlDeviceGetCount)
            one = functools.partial(observation.observe, records_minor=self.proc_root is not None)
            observed = _share_profiles(_each([functools.partial(one, i) for i in range(count)]))
        if observed.unreachable and not observed:
            raise _join_failures([_failure(gpu) for gpu in observed.unreachable])
        _require_distinct(observed)
        return observed

    def execute(self, plan: steps.Plan, observed: Sequence[model.Gpu] = ()) -> model.ObservedGpus:
        """Execute the plan, GPUs in parallel; return its GPUs as they are in the same session.

        NOT_SUPPORTED before the first step: the library lacks a function that the plan needs.
        """
        by_uuid = {gpu.uuid: gpu for gpu in observed}
        timeout_s = self.in_use_timeout_s
        if plan.in_use_timeout_s is not None:
            timeout_s = min(timeout_s, plan.in_use_timeout_s)
        with self._session_for(plan, by_uuid) as lost:

            def run(gpu: steps.GpuPlan) -> model.Gpu | model.UnreachableGpu:
                before = by_uuid.get(gpu.gpu_uuid)
                return lost.get(gpu.gpu_uuid) or self._run(gpu, before, timeout_s)

            return _share_profiles(_each([functools.partial(run, gpu) for gpu in plan.gpus]))

    @contextlib.contextmanager
    def _session_for(
        self, plan: steps.Plan, by_uuid: Mapping[str, model.Gpu]
    ) -> Iterator[Mapping[str, model.UnreachableGpu]]:
        """Refuse the plan if it requires that, or yield the unreachable GPUs by UUID."""
        name_users: _NameUsers | None = None
        if plan.requires_idle:
            from mig_manager.adapters.nvml import processes  # noqa: PLC0415 - seldom needed

            # Before the session, which opens the device nodes itself.
            agent = os.getppid()
            files = processes.OpenFiles.find(self.proc_root, self.driver_roots, exclude=(agent,))
            name_users = functools.partial(processes.name_blocking, files)
        with library.session(self.library_path, self.driver_roots):
            _require_functions(plan)
            yield _require_executable(plan, by_uuid, name_users) if name_users else {}

    def _run(
        self, plan: steps.GpuPlan, observed: model.Gpu | None, in_use_timeout_s: float
    ) -> model.Gpu | model.UnreachableGpu:
        executor = step_executor.GpuStepExecutor(
            plan=plan,
            observed=observed,
            in_use_timeout_s=in_use_timeout_s,
            clock=self.clock,
            proc_root=self.proc_root,
            driver_roots=self.driver_roots,
            on_step=self.on_step,
        )
        try:
            return executor.run()
        except errors.HardwareError as error:
            return _as_unreachable(plan, observed, error)


_MODE_FUNCTIONS = ("nvmlDeviceGetMigMode", "nvmlDeviceSetMigMode")
_INSTANCE_FUNCTIONS = (
    "nvmlDeviceGetGpuInstances",
    "nvmlDeviceGetGpuInstanceById",
    "nvmlGpuInstanceGetInfo",
    "nvmlDeviceCreateGpuInstance",
    "nvmlGpuInstanceDestroy",
    "nvmlGpuInstanceGetComputeInstances",
    "nvmlGpuInstanceGetComputeInstanceById",
    "nvmlComputeInstanceGetInfo_v2",
    "nvmlGpuInstanceCreateComputeInstance",
    "nvmlComputeInstanceDestroy",
)
"""To create and to destroy instances, because a rollback does the opposite.

The ``...WithPlacement`` ones, which R450 (GPU instances) and R515 (compute instances) lack, are
not required: ``step_executor`` works without them.
"""


def _require_functions(plan: steps.Plan) -> None:
    """Check that the loaded library has the functions that a plan and its rollback need."""
    functions = {
        name
        for step in plan.steps
        for name in (_MODE_FUNCTIONS if isinstance(step, steps.SetMode) else _INSTANCE_FUNCTIONS)
    }
    missing = sorted(name for name in functions if not hasattr(pynvml.nvmlLib, name))
    if missing:
        raise errors.HardwareError(
            f"the driver's NVML library has no {', '.join(missing)}, which this change needs",
            reason=reasons.Reason.NOT_SUPPORTED,
            operation=missing[0],
        )


def _require_executable(
    plan: steps.Plan, by_uuid: Mapping[str, model.Gpu], name_users: _NameUsers
) -> dict[str, model.UnreachableGpu]:
    """Refuse a plan for GPUs in use or other instances; return the unreachable GPUs by UUID.

    An unreachable GPU does not stop the others. Its steps must not run, even if it is back soon,
    because its users are unknown.
    """
    busy: list[str] = []
    lost: dict[str, model.UnreachableGpu] = {}
    for gpu in plan.gpus:
        observed = by_uuid.get(gpu.gpu_uuid)
        try:
            if users := name_users(gpu, observed):
                busy.append(users)
            else:
                _require_fresh(gpu, observed)
        except errors.HardwareError as error:
            lost[gpu.gpu_uuid] = _as_unreachable(gpu, observed, error)
    if busy:
        raise errors.GpuInUseError("; ".join(busy))
    return lost


def _require_fresh(plan: steps.GpuPlan, observed: model.Gpu | None) -> None:
    """Refuse a plan if an instance that it creates exists already.

    Another program created it after planning, or the driver withheld it then. A rollback removes
    the instances that the plan creates, and must not remove that instance.
    """
    creates = plan.of(steps.CreateGpuInstance)
    placements = {step.placement for step in creates}
    # The others are in GPU instances that the plan keeps.
    inside = [
        step
        for step in plan.of(steps.CreateComputeInstance)
        if step.gpu_instance_placement not in placements
    ]
    if not (creates or inside) or plan.takes_whole_gpu:
        return
    with last_calls.RECORDER.on_gpu(plan.gpu_index):
        try:
            device = gpu_device.find(plan.gpu_index, plan.gpu_uuid, observed)
            existing = [*_existing(plan, device, creates), *_existing_inside(plan, device, inside)]
        except errors.HardwareError as error:
            error.begin_with(str(plan), doing="cannot list its GPU instances")
            raise
    if existing:
        raise errors.OutdatedPlanError(f"{plan} has {', '.join(existing)} already")


def _existing(
    plan: steps.GpuPlan, device: gpu_device.Device, creates: Sequence[steps.CreateGpuInstance]
) -> Iterator[str]:
    """Name the GPU instances to create that exist, and that the plan does not destroy."""
    new = {(step.profile_id, step.placement): step.profile for step in creates}
    destroyed = {
        (step.gpu_instance_id, step.placement, step.profile)
        for step in plan.of(steps.DestroyGpuInstance)
    }
    for each in device.gpu_instances(sorted({profile_id for profile_id, _ in new})):
        profile = new.get((each.profile_id, each.placement))
        # Ids are reused: the instance to destroy may have been replaced.
        if profile and (each.instance_id, each.placement, profile) not in destroyed:
            yield f"{profile} at {each.placement}"


def _existing_inside(
    plan: steps.GpuPlan, device: gpu_device.Device, creates: Sequence[steps.CreateComputeInstance]
) -> Iterator[str]:
    """Name the compute instances to create that exist, and that the plan does not destroy."""
    destroyed = {
        (step.gpu_instance_id, step.within, step.compute_instance_id, step.profile)
        for step in plan.of(steps.DestroyComputeInstance)
    }
    profiles = {step.profile.gpu_instance for step in creates}
    listed = [profile_id for each in profiles for profile_id in device.profile_ids(each)]
    for gi in device.gpu_instances(listed):
        new = [step for step in creates if step.gpu_instance_placement == gi.placement]
        for ci in device.compute_instances(gi) if new else ():
            for step in new:
                is_there = step.profile.spans or step.placement == ci.placement
                is_same = is_there and step.profile.compute_slices == ci.slices
                existing = gi.instance_id, gi.placement, ci.instance_id, step.profile
                if is_same and existing not in destroyed:
                    yield f"{step.profile} at {ci.placement} in the GPU instance at {gi.placement}"


def _as_unreachable(
    plan: steps.GpuPlan, observed: model.Gpu | None, error: errors.HardwareError
) -> model.UnreachableGpu:
    """Return the GPU of a plan as unreachable; raise the error if it is not due to the GPU."""
    if not _is_unreachable(plan, error):
        raise error
    lost = model.UnreachableGpu(
        index=plan.gpu_index,
        uuid=plan.gpu_uuid,
        reason=error.reason,
        code=error.code,
        message=error.text,
    )
    return lost.with_identity(observed) if observed else lost


def _is_unreachable(plan: steps.GpuPlan, error: errors.HardwareError) -> bool:
    """Return whether an error is due to the GPU, so that it cannot be observed either."""
    about_gpu = {
        reasons.Reason.GPU_LOST,
        reasons.Reason.GPU_NEEDS_RESET,
        reasons.Reason.NVML_ERROR,
    }
    if error.reason not in about_gpu:
        return False
    try:
        now = observation.observe(plan.gpu_index)
    except errors.HardwareError:
        # The driver as a whole fails, not this GPU.
        return False
    return not isinstance(now, model.Gpu) or now.uuid != plan.gpu_uuid


def _share_profiles(observed: Sequence[model.Gpu | model.UnreachableGpu]) -> model.ObservedGpus:
    """Share equal profiles, and their compute-instance profiles, among GPUs.

    A worker's message consists mostly of profiles.
    """
    gpus = [gpu for gpu in observed if isinstance(gpu, model.Gpu)]
    shared: dict[tuple[model.GpuInstanceProfile, ...], tuple[model.GpuInstanceProfile, ...]] = {}
    for gpu in gpus:
        if gpu.profiles is not None:
            pairs = zip(shared.get(gpu.profiles, gpu.profiles), gpu.profiles, strict=True)
            shared[gpu.profiles] = tuple(a if a.compute_profiles else b for a, b in pairs)
    return model.ObservedGpus(
        (
            gpu
            if gpu.profiles is None
            else dataclasses.replace(gpu, profiles=shared[gpu.profiles])
            for gpu in gpus
        ),
        (gpu for gpu in observed if isinstance(gpu, model.UnreachableGpu)),
    )


def _require_distinct(gpus: model.ObservedGpus) -> None:
    """Refuse GPUs that report one UUID, which identifies them in plans and checks."""
    by_uuid: dict[str, int] = {}
    for gpu in gpus:
        first = by_uuid.setdefault(gpu.uuid, gpu.index)
        if first != gpu.index:
            raise errors.HardwareError(
                f"GPU {first} and GPU {gpu.index} report the same UUID, {gpu.uuid}",
                reason=reasons.Reason.NVML_ERROR,
                operation="nvmlDeviceGetUUID",
                gpu=str(gpu),
            )


def _failure(gpu: model.UnreachableGpu) -> errors.HardwareError:
    failure = errors.HardwareError(gpu.message, reason=gpu.reason, code=gpu.code)
    failure.begin_with(str(gpu))
    return failure


def _each(actions: Sequence[Callable[[], _Result]]) -> list[_Result]:
    """Run the actions in parallel; when all have ended, raise their failures in one error."""
    calls: list[call_thread.CallThread[_Result]] = []
    try:
        for action in actions:
            calls.append(call_thread.CallThread(action))  # noqa: PERF401 - all started ones are joined
    finally:
        # Always: no call may outlive the session.
        for call in calls:
            call.join()
    failures = [call.error for call in calls if isinstance(call.error, errors.HardwareError)]
    if failures:
        # The caller gets no result with the GPUs that were lost meanwhile.
        results = (call.result() for call in calls if call.error is None)
        lost = [_failure(each) for each in results if isinstance(each, model.UnreachableGpu)]
        raise _join_failures([*failures, *lost]) from failures[0]
    return [call.result() for call in calls]


def _join_failures(failures: list[errors.HardwareError]) -> errors.HardwareError:
    first = failures[0]
    problems: dict[tuple[str, ...], list[str]] = {}
    are_alike = len({failure.reason for failure in failures}) == 1
    for failure in failures:
        problem = ": ".join(filter(None, (failure.place, failure.problem)))
        # The error has the first GPU's reason; the text keeps the other reasons.
        problem = problem if are_alike else f"{problem} ({failure.reason.value})"
        problems.setdefault(failure.additions, []).append(problem)
    # What several GPUs share is stated once.
    parts = [part for shared, causes in problems.items() for part in (*causes, *shared)]
    return errors.HardwareError(
        "; ".join(parts),
        reason=first.reason,
        operation=first.operation,
        gpu=first.gpu,
        code=first.code,
    )
