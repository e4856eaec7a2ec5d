"""Execute the steps of one GPU in order; a step whose result exists already is done."""

import contextlib
import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Callable, Sequence

import pynvml

from mig_manager import errors, reasons
from mig_manager.adapters.nvml import (
    gpu_device,
    last_calls,
    library,
    observation,
    placed_creation,
)
from mig_manager.core import model, steps, timing

_GONE = frozenset({pynvml.NVML_ERROR_NOT_FOUND})

_SET_MODE = "nvmlDeviceSetMigMode"
_MODES = {
    model.MigMode.DISABLED: pynvml.NVML_DEVICE_MIG_DISABLE,
    model.MigMode.ENABLED: pynvml.NVML_DEVICE_MIG_ENABLE,
}

_PAUSES = timing.Backoff(first_s=0.05, max_s=1.0, factor=2.0)


@dataclasses.dataclass(kw_only=True, eq=False, repr=False, match_args=False)
class GpuStepExecutor:
    """Executes the steps of one GPU in an open session.

    The instances of a profile are listed once and then kept up to date, because no other program
    changes the GPU meanwhile. After a failed step they are listed again.
    """

    plan: steps.GpuPlan
    observed: model.Gpu | None
    """The GPU before; None once its mode has changed, and its facts with it."""
    in_use_timeout_s: float  # for all steps together, from the first one in use
    clock: timing.Clock
    proc_root: pathlib.Path | None
    driver_roots: Sequence[str]
    """Where the driver's capability files may be, if not in ``proc_root``."""
    on_step: Callable[[int], None] | None = None  # called with the GPU's index after each step
    _give_up_s: float | None = dataclasses.field(default=None, init=False)
    _device: gpu_device.Device | None = dataclasses.field(default=None, init=False)
    _by_id: dict[int, gpu_device.GpuInstanceRef] = dataclasses.field(
        default_factory=dict, init=False
    )
    _by_profile: dict[int, list[gpu_device.GpuInstanceRef]] = dataclasses.field(
        default_factory=dict, init=False
    )
    """All GPU instances of the profiles that were listed."""
    _compute: dict[int, list[tuple[int, model.Placement]]] = dataclasses.field(
        default_factory=dict, init=False
    )
    """Slices and placement of all compute instances, by the id of their GPU instance."""

    def run(self) -> model.Gpu:
        """Execute the steps; return the GPU as it is then.

        Raises:
            HardwareError: A step failed. If IN_USE, the error names the processes that use the GPU
                or the instance.
        """
        with last_calls.RECORDER.on_gpu(self.plan.gpu_index):
            for step in self.plan.steps:
                try:
                    self._once_idle(functools.partial(self._perform, step))
                except errors.HardwareError as error:
                    if error.reason is reasons.Reason.IN_USE:
                        self._add_users(step, error)
                    error.begin_with(str(self.plan), doing=f"cannot {steps.describe(step)}")
                    raise
                if self.on_step is not None:
                    self.on_step(self.plan.gpu_index)
            try:
                if self.observed is not None:
                    return observation.observe_again(self.observed, self._open())
                return observation.observe_in_full(
                    self.plan.gpu_index, self.plan.gpu_uuid, self._open()
                )
            except errors.HardwareError as error:
                error.begin_with(str(self.plan), doing="cannot observe the result")
                raise

    def _clear(self) -> None:
        self._by_id.clear()
        self._by_profile.clear()
        self._compute.clear()

    def _once_idle(self, action: Callable[[], object]) -> None:
        for attempt in itertools.count():
            try:
                action()
            except errors.HardwareError as error:
                self._clear()
                now_s = self.clock.monotonic()
                if error.reason is not reasons.Reason.IN_USE:
                    raise
                self._give_up_s = self._give_up_s or now_s + self.in_use_timeout_s
                if now_s >= self._give_up_s:
                    raise
            else:
                return
            self.clock.wait(_PAUSES.delay_s(attempt))

    def _perform(self, step: steps.Step) -> None:
        match step:
            case steps.DestroyComputeInstance():
                self._destroy_compute_instance(step)
            case steps.DestroyGpuInstance():
                self._destroy_gpu_instance(step)
            case steps.SetMode():
                self._set_mode(step)
            case steps.Reset():
                pass  # the transaction resets the GPU, because NVML cannot
            case steps.CreateGpuInstance():
                self._create_gpu_instance(step)
            case steps.CreateComputeInstance():
                self._create_compute_instance(step)

    def _add_users(self, step: steps.Step, error: errors.HardwareError) -> None:
        from mig_manager.adapters.nvml import processes  # noqa: PLC0415 - seldom needed

        instance_id = None
        if isinstance(step, steps.DestroyComputeInstance | steps.DestroyGpuInstance):
            instance_id = step.gpu_instance_id
        with contextlib.suppress(errors.HardwareError):
            processes.add_users(
                error,
                self._open(),
                gpu_instance_id=instance_id,
                proc_root=self.proc_root,
                driver_roots=self.driver_roots,
            )

    def _open(self) -> gpu_device.Device:
        if self._device is None:
            self._device = gpu_device.find(self.plan.gpu_index, self.plan.gpu_uuid, self.observed)
            if self.proc_root is not None:
                # Each time, because a change of MIG mode may change it (nvml.h).
                minor = self._device.minor()
                last_calls.RECORDER.set_gpu(self.plan.gpu_index, self.plan.gpu_uuid, minor)
        return self._device

    def _destroy_compute_instance(self, step: steps.DestroyComputeInstance) -> None:
        device = self._open()
        # Ids are reused: another instance with this id must not be destroyed.
        instance = self._gpu_instance(step.gpu_instance_id)
        if instance is None or instance.placement != step.within:
            return
        if not self._has_profile(instance, step.profile.gpu_instance):
            return
        handle = library.call_unless(
            _GONE,
            pynvml.nvmlGpuInstanceGetComputeInstanceById,
            instance.handle,
            step.compute_instance_id,
        )
        if handle is None:
            return
        if device.compute_instance(instance, handle).slices == step.profile.compute_slices:
            library.call_unless(_GONE, pynvml.nvmlComputeInstanceDestroy, handle)
            self._compute.pop(instance.instance_id, None)

    def _destroy_gpu_instance(self, step: steps.DestroyGpuInstance) -> None:
        instance = self._gpu_instance(step.gpu_instance_id)
        if instance is None or instance.placement != step.placement:
            return
        if self._has_profile(instance, step.profile):
            library.call_unless(_GONE, pynvml.nvmlGpuInstanceDestroy, instance.handle)
            del self._by_id[instance.instance_id]
            # Its id may be reused, and its placement is free.
            self._compute.pop(instance.instance_id, None)
            self._by_profile.pop(instance.profile_id, None)

    def _gpu_instance(self, instance_id: int) -> gpu_device.GpuInstanceRef | None:
        """Look up a GPU instance; None if it, or MIG mode, is gone."""
        if instance_id in self._by_id:
            return self._by_id[instance_id]
        device = self._open()
        try:
            handle = library.call_unless(
                _GONE, pynvml.nvmlDeviceGetGpuInstanceById, device.handle, instance_id
            )
        except errors.HardwareError as error:
            is_unsupported = error.reason is reasons.Reason.NOT_SUPPORTED
            modes = device.mig_mode() if is_unsupported else None
            if is_unsupported and (modes is None or modes[0] is model.MigMode.DISABLED):
                return None
            raise
        if handle is None:
            return None
        return self._by_id.setdefault(instance_id, device.gpu_instance(handle))

    def _has_profile(self, instance: gpu_device.GpuInstanceRef, name: model.Profile) -> bool:
        return instance.profile_id in self._open().profile_ids(name)

    def _set_mode(self, step: steps.SetMode) -> None:
        device = self._open()
        if device.mig_mode() == (step.mode, step.mode):
            return
        try:
            # Why the new mode is pending, although NVML reports success (nvml.h).
            activation: int = library.call(
                pynvml.nvmlDeviceSetMigMode, device.handle, _MODES[step.mode]
            )
        except errors.HardwareError as error:
            is_unsupported = error.reason is reasons.Reason.NOT_SUPPORTED
            if is_unsupported and device.virtualization() is model.Virtualization.VGPU:
                error.add("this machine has a vGPU, whose MIG mode is up to its host")
            raise
        finally:
            # A switch, also a failed one, may detach and attach the GPU again, which can change
            # its handle (nvml.h) and its profiles.
            self._device = None
            self.observed = None
            self._clear()
        _require_mode(self._open(), step.mode, activation)

    def _create_gpu_instance(self, step: steps.CreateGpuInstance) -> None:
        device = self._open()
        existing = self._gpu_instances(step.profile_id)
        if any(instance.placement == step.placement for instance in existing):
            return
        handle = placed_creation.create(
            placed_creation.GPU_INSTANCES,
            device.handle,
            step.profile_id,
            step.placement,
            once_idle=self._once_idle,
        )
        created = device.gpu_instance(handle)
        existing.append(created)
        self._compute[created.instance_id] = []

    def _gpu_instances(self, profile_id: int) -> list[gpu_device.GpuInstanceRef]:
        if profile_id not in self._by_profile:
            self._by_profile[profile_id] = list(self._open().gpu_instances([profile_id]))
        return self._by_profile[profile_id]

    def _create_compute_instance(self, step: steps.CreateComputeInstance) -> None:
        device = self._open()
        instance = self._gpu_instance_at(step)
        if instance.instance_id not in self._compute:
            self._compute[instance.instance_id] = [
                (compute.slices, compute.placement)
                for compute in device.compute_instances(instance)
            ]
        existing = self._compute[instance.instance_id]
        for slices, placement in existing:
            if slices == step.profile.compute_slices and (
                step.profile.spans or placement == step.placement
            ):
                return
        profile_id = _compute_profile(device.compute_profiles(instance), step.profile).profile_id
        is_up_to_driver = step.profile.spans
        if not is_up_to_driver:
            # The plan follows the placement rules of the open kernel modules. A driver with other
            # rules chooses, because the layout names no placement.
            possible = device.compute_placements(instance, profile_id)
            is_up_to_driver = possible is not None and step.placement not in possible
        if is_up_to_driver:
            library.call(placed_creation.COMPUTE_INSTANCES.create, instance.handle, profile_id)
        else:
            placed_creation.create(
                placed_creation.COMPUTE_INSTANCES,
                instance.handle,
                profile_id,
                step.placement,
                once_idle=self._once_idle,
            )
        existing.append((step.profile.compute_slices, step.placement))

    def _gpu_instance_at(self, step: steps.CreateComputeInstance) -> gpu_device.GpuInstanceRef:
        profile_ids = self._open().profile_ids(step.profile.gpu_instance)
        # List instances only if no lookup by id has returned it.
        listed = (instance for each in profile_ids for instance in self._gpu_instances(each))
        for instance in itertools.chain(self._by_id.values(), listed):
            is_placed = instance.placement == step.gpu_instance_placement
            if is_placed and instance.profile_id in profile_ids:
                return instance
        raise errors.HardwareError(
            f"no GPU instance {step.profile.gpu_instance} at {step.gpu_instance_placement}",
            reason=reasons.Reason.VERIFY_FAILED,
        )


def _require_mode(device: gpu_device.Device, mode: model.MigMode, activation: int) -> None:
    modes = device.mig_mode()
    if modes == (mode, mode):
        return
    if activation == pynvml.NVML_ERROR_IN_USE:
        raise library.from_code(activation, operation=_SET_MODE)
    is_pending = modes is not None and modes[1] is mode
    status = f"{_SET_MODE} reported success"
    if activation != pynvml.NVML_SUCCESS:
        refused = library.from_code(activation, operation=_SET_MODE)
        if not is_pending:
            raise refused
        # Virtual machines get NOT_SUPPORTED (NVIDIA MIG User Guide, "Enable MIG Mode").
        status = refused.message
    reason, what = reasons.Reason.RESET_REQUIRED, "yet the mode waits for a reset"
    if not is_pending:
        reason, what = reasons.Reason.VERIFY_FAILED, "yet the mode is neither active nor pending"
    elif device.virtualization() is model.Virtualization.PASSTHROUGH:
        reason = reasons.Reason.REBOOT_REQUIRED
        what = (
            "and the mode is pending: the GPU is passed through to this virtual machine, inside "
            "which no reset can help, only a reboot of it"
        )
    raise errors.HardwareError(
        f"{status}, {what}",
        reason=reason,
        operation=_SET_MODE,
        code=activation if is_pending else None,
    )


def _compute_profile(
    profiles: tuple[model.ComputeInstanceProfile, ...], name: model.Profile
) -> model.ComputeInstanceProfile:
    """Choose the compute-instance profile of a GPU instance for a name.

    For a whole GPU instance the profile with most multiprocessors: in a double-memory ``1g`` on
    Hopper 1_SLICE (0) would leave ten of 26 idle. Of equal ones the first: 7_SLICE and 7_SLICE_NVL
    are both named ``7g``, and an A100 does not have the second (dra-driver-nvidia-gpu#1480). For a
    part the plain profile, which comes first.
    """
    fitting = [candidate for candidate in profiles if candidate.slices == name.compute_slices]
    if not fitting:
        raise errors.HardwareError(
            f"{name.gpu_instance} offers no compute instance of {name.compute_slices} slices",
            reason=reasons.Reason.NOT_SUPPORTED,
            operation="nvmlGpuInstanceGetComputeInstanceProfileInfo",
        )
    if name.spans:
        return max(fitting, key=lambda candidate: candidate.multiprocessors)
    return fitting[0]
