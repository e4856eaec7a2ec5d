"""Survey the GPUs for ``acceptance``: what each NVML function answers, and how long it takes.

Changes nothing. The adapter's own classes observe the GPUs, so that its own calls are timed.
"""

import contextlib
import ctypes
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

import pynvml

from mig_manager import errors
from mig_manager.adapters.nvml import (
    events,
    gpu_device,
    last_calls,
    library,
    observation,
    processes,
)
from mig_manager.core import model
from mig_manager.core.acceptance import surveys

_REPETITIONS = 5
_NO_ID = 250  # above every profile id and instance id
_BEYOND = 31  # above every ``NVML_GPU_INSTANCE_PROFILE_*``

_Trace = list[tuple[str, int, float]]
_FABRICS: Mapping[int, surveys.Fabric] = {
    pynvml.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED: surveys.Fabric.NONE,
    pynvml.NVML_GPU_FABRIC_STATE_NOT_STARTED: surveys.Fabric.NOT_STARTED,
    pynvml.NVML_GPU_FABRIC_STATE_IN_PROGRESS: surveys.Fabric.IN_PROGRESS,
    pynvml.NVML_GPU_FABRIC_STATE_COMPLETED: surveys.Fabric.COMPLETED,
}
_NAMES: Mapping[int, str] = {
    value: name.removeprefix("NVML_ERROR_")
    for name, value in vars(pynvml).items()
    if name.startswith("NVML_ERROR_")
}


def survey(library_path: str | None, driver_roots: Sequence[str] = ()) -> surveys.Survey:
    """Survey every GPU, in two sessions.

    Raises:
        HardwareError: The whole driver failed, or the caller may not list instances.
    """
    with last_calls.RECORDER.traced() as trace:
        inspection = processes.inspect(library_path, driver_roots=driver_roots, proc_root=None)
        with library.session(library_path, driver_roots):
            count: int = library.call(pynvml.nvmlDeviceGetCount)
            shared = _take_calls(trace)
            earlier = [_uuid(index) for index in range(count)]
        shared += _take_calls(trace)[-1:]  # the end of the session
        with library.session(library_path, driver_roots):
            shared += _take_calls(trace)
            gpus = []
            for index in range(count):
                gpu = _survey_gpu(index, earlier[index])
                gpus.append(dataclasses.replace(gpu, calls=_take_calls(trace)))
            # As the agent does; an event is taken if there is one.
            with contextlib.suppress(errors.HardwareError), events.registered() as changes:
                changes.wait(0.0)
            shared += _take_calls(trace)
    return surveys.Survey(
        driver_version=inspection.driver_version,
        nvml_version=inspection.nvml_version,
        gpus=tuple(gpus),
        calls=shared,
    )


def _take_calls(trace: _Trace) -> tuple[surveys.SurveyedCall, ...]:
    """Return the calls so far, and start again."""
    calls = tuple(
        surveys.SurveyedCall(function, _answer(code), seconds) for function, code, seconds in trace
    )
    trace.clear()
    return calls


def _answer(code: int) -> str:
    return surveys.SUCCESS if code == pynvml.NVML_SUCCESS else _NAMES.get(code, str(code))


def _uuid(index: int) -> str:
    """Return the UUID of a GPU; empty if it does not answer."""
    try:
        handle = library.call(pynvml.nvmlDeviceGetHandleByIndex, index)
        return str(library.call(pynvml.nvmlDeviceGetUUID, handle))
    except errors.HardwareError:
        return ""


def _survey_gpu(index: int, earlier_uuid: str) -> surveys.SurveyedGpu:
    gpu = [observation.observe(index) for _ in range(_REPETITIONS)][-1]
    if isinstance(gpu, model.UnreachableGpu):
        return surveys.SurveyedGpu(gpu=gpu)
    handle = library.call(pynvml.nvmlDeviceGetHandleByIndex, index)
    device = gpu_device.Device(handle, profiles=gpu.profiles)
    device.minor()
    return surveys.SurveyedGpu(
        gpu=gpu,
        earlier_uuid=earlier_uuid,
        is_found_by_address=_is_found(gpu),
        fabric=_fabric(device),
        facts=_facts(device, gpu),
        mig_devices=tuple(_mig_devices(device, gpu)),
        probes=tuple(_probes(device)),
    )


def _is_found(gpu: model.Gpu) -> bool:
    """Return whether the PCI address leads to the GPU, as a plan needs."""
    try:
        gpu_device.find(gpu.index, gpu.uuid, gpu)
    except errors.HardwareError:
        return False
    return True


def _fabric(device: gpu_device.Device) -> surveys.Fabric:
    """Return the state of the NVSwitch fabric, which older drivers do not report."""
    info = pynvml.c_nvmlGpuFabricInfo_t()
    with contextlib.suppress(errors.HardwareError):
        library.call(pynvml.nvmlDeviceGetGpuFabricInfo, device.handle, ctypes.byref(info))
    # A byte in nvml.h; pynvml reads the padding after it, too.
    state = _FABRICS.get(info.state & 0xFF, surveys.Fabric.FAILED)
    # Of a completed registration alone (nvml.h).
    is_failed = state is surveys.Fabric.COMPLETED and info.status != pynvml.NVML_SUCCESS
    return surveys.Fabric.FAILED if is_failed else state


def _facts(device: gpu_device.Device, gpu: model.Gpu) -> dict[int, surveys.ProfileFacts]:
    rows = gpu.profiles or ()
    compute = {}
    if gpu.current_mode is model.MigMode.ENABLED:
        for instance in device.gpu_instances([row.profile_id for row in rows]):
            compute[instance.profile_id] = tuple(
                (each, device.compute_placements(instance, each.profile_id))
                for each in device.compute_profiles(instance)
            )
    facts = {}
    for row in rows:
        get = pynvml.nvmlDeviceGetGpuInstanceProfileInfo
        info = library.call(get, device.handle, row.enum_index, gpu_device.UNVERSIONED)
        facts[row.enum_index] = surveys.ProfileFacts(
            slices=info.sliceCount,
            copy_engines=info.copyEngineCount,
            compute=compute.get(row.profile_id),
        )
    return facts


def _mig_devices(device: gpu_device.Device, gpu: model.Gpu) -> Iterator[tuple[int, int]]:
    """Yield the ids of each MIG device, in the driver's order."""
    if not gpu.devices:
        return
    for handle in device.mig_devices():
        yield (
            library.call(pynvml.nvmlDeviceGetGpuInstanceId, handle),
            library.call(pynvml.nvmlDeviceGetComputeInstanceId, handle),
        )


def _probes(device: gpu_device.Device) -> Iterator[surveys.Probe]:
    """Yield what the driver answers to unusual arguments."""
    gpu = device.handle
    empty = {_answer(code) for code in gpu_device.EMPTY_INDEX}
    unoffered = {_answer(code) for code in library.UNOFFERED}
    rows: Sequence[tuple[str, set[str], Callable[[], object]]] = (
        (
            "nvmlDeviceGetGpuInstanceProfileInfo of a profile that no driver knows",
            unoffered,
            lambda: library.call(
                pynvml.nvmlDeviceGetGpuInstanceProfileInfo, gpu, _BEYOND, gpu_device.UNVERSIONED
            ),
        ),
        (
            "nvmlDeviceGetGpuInstancePossiblePlacements of a profile that the GPU lacks",
            unoffered,
            lambda: device.placements(_NO_ID),
        ),
        (
            "nvmlDeviceGetGpuInstances of a profile that the GPU lacks",
            unoffered,
            lambda: device.gpu_instances([_NO_ID]),
        ),
        (
            "nvmlDeviceGetGpuInstanceById of an instance that does not exist",
            {"NOT_FOUND", "NOT_SUPPORTED"},
            lambda: library.call(pynvml.nvmlDeviceGetGpuInstanceById, gpu, _NO_ID),
        ),
        (
            "nvmlDeviceGetMigDeviceHandleByIndex beyond the last MIG device",
            {*empty, "NOT_SUPPORTED"},
            lambda: library.call(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, gpu, _NO_ID),
        ),
        (
            "nvmlDeviceGetGpuInstanceId of a whole GPU",
            unoffered,
            lambda: library.call(pynvml.nvmlDeviceGetGpuInstanceId, gpu),
        ),
        (
            "nvmlDeviceGetComputeInstanceId of a whole GPU",
            unoffered,
            lambda: library.call(pynvml.nvmlDeviceGetComputeInstanceId, gpu),
        ),
        (
            "nvmlDeviceGetMaxMigDeviceCount",
            {surveys.SUCCESS},
            lambda: library.call(pynvml.nvmlDeviceGetMaxMigDeviceCount, gpu),
        ),
    )
    for call, handled, make in rows:
        answer = surveys.SUCCESS
        try:
            make()
        except errors.HardwareError as error:
            answer = _answer(error.code) if error.code is not None else error.reason.value
        yield surveys.Probe(call, answer, answer in handled)
