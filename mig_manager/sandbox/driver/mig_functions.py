"""The C functions about MIG: mode, profiles, MIG devices, GPU instances and compute instances."""

import ctypes
from typing import Any

import pynvml

from mig_manager.catalogue import product_table
from mig_manager.core import model
from mig_manager.sandbox.driver import arguments, calls, sessions, states, transitions, views

# -- mode -------------------------------------------------------------------------------------


@calls.function("nvmlDeviceGetMigMode", takes=calls.GPU)
def _get_mode(view: views.DeviceView, current: Any, pending: Any) -> None:
    if not view.board.product.is_mig_capable:
        raise states.Refused(states.Code.NOT_SUPPORTED)
    arguments.put(current, ctypes.c_uint, int(view.gpu.is_enabled))
    arguments.put(pending, ctypes.c_uint, int(view.gpu.is_pending))


def _mode_latency(view: views.DeviceView, mode: Any, _: Any) -> str:
    if bool(arguments.number(mode)) is view.gpu.is_enabled:
        return "query_s"
    needs_reset = view.board.product.mode_needs_reset
    return "mode_with_reset_s" if needs_reset else "mode_without_reset_s"


@calls.change("nvmlDeviceSetMigMode", calls.GPU, _mode_latency)
def _set_mode(view: views.DeviceView, mode: Any, activation: Any) -> states.GpuState:
    gpu, status = transitions.set_mode(view.now, arguments.number(mode))
    arguments.put(activation, ctypes.c_uint, status)
    return gpu


# -- MIG devices ------------------------------------------------------------------------------


def _mig_instance(view: views.DeviceView) -> states.GpuInstance:
    """Return the GPU instance of a MIG device; a whole GPU is refused."""
    if view.is_gpu:
        raise states.Refused(states.Code.NOT_SUPPORTED)
    return view.instance


def _compute_instance_id(view: views.DeviceView) -> int:
    _mig_instance(view)
    return view.compute.instance_id


calls.numbers(
    calls.DEVICE,
    {
        "nvmlDeviceGetGpuInstanceId": lambda view: _mig_instance(view).instance_id,
        "nvmlDeviceGetComputeInstanceId": _compute_instance_id,
    },
)
calls.numbers(
    calls.GPU,
    {
        "nvmlDeviceGetMaxMigDeviceCount": lambda view: (
            view.board.product.max_instances if view.gpu.is_enabled else 0
        )
    },
)


@calls.function("nvmlDeviceGetMigDeviceHandleByIndex", takes=calls.GPU)
def _mig_device(view: views.DeviceView, index: Any, handle: Any) -> None:
    transitions.require_mig(view.now)
    devices = transitions.mig_devices(view.gpu)
    requested = arguments.number(index)
    if requested >= view.board.product.max_instances:
        raise states.Refused(states.Code.INVALID_ARGUMENT)
    if requested >= len(devices):
        raise states.Refused(states.Code.NOT_FOUND)
    view.put_handle(handle, sessions.mig_device(view.target.gpu, *devices[requested]))


# -- GPU instances ----------------------------------------------------------------------------


@calls.function("nvmlDeviceGetGpuInstanceProfileInfo", takes=calls.GPU)
def _profile_info(view: views.DeviceView, profile: Any, info: Any) -> None:
    row = row_by_enum(view, profile)
    if not view.gpu.is_enabled and not view.node.options.reports_profiles_while_mig_off:
        raise states.Refused(states.Code.NOT_SUPPORTED)
    fill_profile(arguments.struct(info, pynvml.c_nvmlGpuInstanceProfileInfo_t), row)


def row_by_enum(view: views.DeviceView, profile: Any) -> product_table.GpuProfile:
    """Return the profile of an ``NVML_GPU_INSTANCE_PROFILE_*``."""
    number = arguments.number(profile)
    if not 0 <= number < view.node.options.profile_enum_count:
        raise states.Refused(states.Code.INVALID_ARGUMENT)
    for row in view.board.product.profiles:
        if row.enum_index == number:
            return row
    raise states.Refused(states.Code.NOT_SUPPORTED)


def fill_profile(target: Any, row: product_table.GpuProfile) -> None:
    """Write a profile to a struct of any version."""
    arguments.fill(
        target,
        id=row.profile_id,
        isP2pSupported=0,
        sliceCount=row.profile.gpu_slices,
        instanceCount=row.max_instances,
        multiprocessorCount=row.multiprocessors,
        copyEngineCount=row.copy_engines,
        decoderCount=row.engines.decoders,
        encoderCount=row.engines.encoders,
        jpegCount=row.engines.jpegs,
        ofaCount=row.engines.ofas,
        memorySizeMB=row.memory_mib,
    )


@calls.function(
    "nvmlDeviceGetGpuInstancePossiblePlacements_v2",
    "nvmlDeviceGetGpuInstancePossiblePlacements",
    takes=calls.GPU,
)
def _placements(view: views.DeviceView, profile_id: Any, placements: Any, count: Any) -> None:
    transitions.require_permission(view.node.options)
    transitions.require_capable(view.now)
    row = view.board.row(arguments.number(profile_id))
    _put_placements(row.placements, pynvml.c_nvmlGpuInstancePlacement_t, placements, count)


@calls.change("nvmlDeviceCreateGpuInstance", calls.GPU, "create_gpu_instance_s")
def _create(
    view: views.DeviceView, profile_id: Any, handle: Any, place: model.Placement | None = None
) -> states.GpuState:
    gpu, instance = transitions.create_gpu_instance(view.now, arguments.number(profile_id), place)
    view.put_handle(handle, view.target_of(instance))
    return gpu


@calls.change("nvmlDeviceCreateGpuInstanceWithPlacement", calls.GPU, "create_gpu_instance_s")
def _create_placed(
    view: views.DeviceView, profile_id: Any, placement: Any, handle: Any
) -> states.GpuState:
    source = arguments.struct(placement, pynvml.c_nvmlGpuInstancePlacement_t)
    return _create(view, profile_id, handle, model.Placement(source.start, source.size))


@calls.change("nvmlGpuInstanceDestroy", calls.GPU_INSTANCE, "destroy_gpu_instance_s")
def _destroy(view: views.DeviceView) -> states.GpuState:
    return transitions.destroy_gpu_instance(view.now, view.instance)


@calls.function("nvmlDeviceGetGpuInstances", takes=calls.GPU)
def _instances(view: views.DeviceView, profile_id: Any, handles: Any, count: Any) -> None:
    transitions.require_permission(view.node.options)
    transitions.require_mig(view.now)
    row = view.board.row(arguments.number(profile_id))
    targets = [
        view.target_of(each) for each in view.gpu.instances if each.profile_id == row.profile_id
    ]
    _put_handles(view, targets, handles, count)


@calls.function("nvmlDeviceGetGpuInstanceById", takes=calls.GPU)
def _instance_by_id(view: views.DeviceView, instance_id: Any, handle: Any) -> None:
    transitions.require_permission(view.node.options)
    transitions.require_mig(view.now)
    targets = {each.instance_id: view.target_of(each) for each in view.gpu.instances}
    _put_known(view, targets.get(arguments.number(instance_id)), handle)


def _put_known(view: views.DeviceView, target: sessions.HandleTarget | None, handle: Any) -> None:
    if target is None:
        raise states.Refused(states.Code.NOT_FOUND)
    view.put_handle(handle, target)


@calls.function("nvmlGpuInstanceGetInfo", takes=calls.GPU_INSTANCE)
def _instance_info(view: views.DeviceView, info: Any) -> None:
    target = arguments.struct(info, pynvml.c_nvmlGpuInstanceInfo_t)
    instance = view.instance
    view.put_handle(ctypes.byref(target), view.whole)
    arguments.fill(target, id=instance.instance_id, profileId=instance.profile_id)
    arguments.fill(target.placement, start=instance.placement.start, size=instance.placement.size)


# -- compute instances ------------------------------------------------------------------------


@calls.function("nvmlGpuInstanceGetComputeInstanceProfileInfo", takes=calls.GPU_INSTANCE)
def _compute_profile(view: views.DeviceView, profile: Any, engine_profile: Any, info: Any) -> None:
    row = compute_row(view, profile, engine_profile)
    fill_compute(
        arguments.struct(info, pynvml.c_nvmlComputeInstanceProfileInfo_t), view.parent, row
    )


def compute_row(
    view: views.DeviceView, profile_id: Any, engine_profile: Any = 0
) -> product_table.ComputeProfile:
    """Return a compute-instance profile of this GPU instance."""
    if arguments.number(engine_profile) != pynvml.NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED:
        raise states.Refused(states.Code.INVALID_ARGUMENT)
    return transitions.compute_row(view.board, view.instance, arguments.number(profile_id))


def shared_engines(parent: product_table.GpuProfile) -> dict[str, int]:
    """Return the struct fields of the engines; compute instances share all of them."""
    return {
        "sharedCopyEngineCount": parent.copy_engines,
        "sharedDecoderCount": parent.engines.decoders,
        "sharedEncoderCount": parent.engines.encoders,
        "sharedJpegCount": parent.engines.jpegs,
        "sharedOfaCount": parent.engines.ofas,
    }


def fill_compute(
    target: Any, parent: product_table.GpuProfile, row: product_table.ComputeProfile
) -> None:
    """Write a compute-instance profile to a struct of any version."""
    arguments.fill(
        target,
        id=row.profile_id,
        sliceCount=row.slices,
        instanceCount=row.max_instances,
        multiprocessorCount=row.multiprocessors,
        **shared_engines(parent),
    )


@calls.function("nvmlGpuInstanceGetComputeInstancePossiblePlacements", takes=calls.GPU_INSTANCE)
def _compute_placements(
    view: views.DeviceView, profile_id: Any, placements: Any, count: Any
) -> None:
    transitions.require_permission(view.node.options)
    row = compute_row(view, profile_id)
    _put_placements(row.placements, pynvml.c_nvmlComputeInstancePlacement_t, placements, count)


@calls.change(
    "nvmlGpuInstanceCreateComputeInstance", calls.GPU_INSTANCE, "create_compute_instance_s"
)
def _create_compute(
    view: views.DeviceView, profile_id: Any, handle: Any, place: model.Placement | None = None
) -> states.GpuState:
    gpu, compute = transitions.create_compute_instance(
        view.now, view.instance, arguments.number(profile_id), place
    )
    view.put_handle(handle, view.target_within(compute))
    return gpu


@calls.change(
    "nvmlGpuInstanceCreateComputeInstanceWithPlacement",
    calls.GPU_INSTANCE,
    "create_compute_instance_s",
)
def _create_compute_placed(
    view: views.DeviceView, profile_id: Any, placement: Any, handle: Any
) -> states.GpuState:
    source = arguments.struct(placement, pynvml.c_nvmlComputeInstancePlacement_t)
    return _create_compute(view, profile_id, handle, model.Placement(source.start, source.size))


@calls.change("nvmlComputeInstanceDestroy", calls.COMPUTE_INSTANCE, "destroy_compute_instance_s")
def _destroy_compute(view: views.DeviceView) -> states.GpuState:
    return transitions.destroy_compute_instance(view.now, view.instance, view.compute)


@calls.function("nvmlGpuInstanceGetComputeInstances", takes=calls.GPU_INSTANCE)
def _computes(view: views.DeviceView, profile_id: Any, handles: Any, count: Any) -> None:
    transitions.require_permission(view.node.options)
    row = compute_row(view, profile_id)
    targets = [
        view.target_within(each)
        for each in view.instance.compute_instances
        if each.profile_id == row.profile_id
    ]
    _put_handles(view, targets, handles, count)


@calls.function("nvmlGpuInstanceGetComputeInstanceById", takes=calls.GPU_INSTANCE)
def _compute_by_id(view: views.DeviceView, compute_id: Any, handle: Any) -> None:
    transitions.require_permission(view.node.options)
    computes = view.instance.compute_instances
    targets = {each.instance_id: view.target_within(each) for each in computes}
    _put_known(view, targets.get(arguments.number(compute_id)), handle)


@calls.function("nvmlComputeInstanceGetInfo_v2", takes=calls.COMPUTE_INSTANCE)
def _compute_info(view: views.DeviceView, info: Any) -> None:
    kind = pynvml.c_nvmlComputeInstanceInfo_t
    compute = view.compute
    target = arguments.struct(info, kind)
    view.put_handle(ctypes.byref(target), view.whole)
    view.put_handle(ctypes.byref(target, kind.gpuInstance.offset), view.target_of(view.instance))
    arguments.fill(target, id=compute.instance_id, profileId=compute.profile_id)
    arguments.fill(target.placement, start=compute.placement.start, size=compute.placement.size)


def _put_handles(
    view: views.DeviceView, targets: list[sessions.HandleTarget], handles: Any, count: Any
) -> None:
    arguments.put_all(handles, ctypes.c_void_p, [view.session.handle(each) for each in targets])
    arguments.put(count, ctypes.c_uint, len(targets))


def _put_placements(
    placements: tuple[model.Placement, ...], kind: Any, array: Any, count: Any
) -> None:
    """Write placements and their number; only the number if the caller has no array."""
    if array is not None:
        values = [kind(start=place.start, size=place.size) for place in placements]
        arguments.put_all(array, kind, values)
    arguments.put(count, ctypes.c_uint, len(placements))
