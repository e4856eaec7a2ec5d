"""The C functions about the library, the node and its devices; none changes anything."""

import ctypes
import threading
from collections.abc import Mapping
from typing import Any

import pynvml

from mig_manager.sandbox import nvml_calls, nvml_driver, nvml_memory, nvml_model

_registry = nvml_calls.Registry()
FUNCTIONS = _registry.functions
"""By C name."""

_GPU = frozenset({nvml_calls.Kind.GPU})
_MIG = frozenset({nvml_calls.Kind.MIG_DEVICE})
_DEVICE = _GPU | _MIG
_MIB = 2**20
_CLIENT_MIB = 512
_NO_INSTANCE = 0xFFFF_FFFF
_CUDA_VERSION = 13000
_EVENT_SET = 0x7E00_0000_1000

_ARCHITECTURES: Mapping[str, int] = {
    "turing": pynvml.NVML_DEVICE_ARCH_TURING,
    "ampere": pynvml.NVML_DEVICE_ARCH_AMPERE,
    "ada": pynvml.NVML_DEVICE_ARCH_ADA,
    "hopper": pynvml.NVML_DEVICE_ARCH_HOPPER,
    "blackwell": pynvml.NVML_DEVICE_ARCH_BLACKWELL,
}

_ERROR_TEXTS: Mapping[int, str] = {
    nvml_model.Code.SUCCESS: "Success",
    nvml_model.Code.UNINITIALIZED: "Uninitialized",
    nvml_model.Code.INVALID_ARGUMENT: "Invalid Argument",
    nvml_model.Code.NOT_SUPPORTED: "Not Supported",
    nvml_model.Code.NO_PERMISSION: "Insufficient Permissions",
    nvml_model.Code.NOT_FOUND: "Not Found",
    nvml_model.Code.INSUFFICIENT_SIZE: "Insufficient Size",
    nvml_model.Code.DRIVER_NOT_LOADED: "Driver Not Loaded",
    nvml_model.Code.TIMEOUT: "Timeout",
    nvml_model.Code.GPU_IS_LOST: "GPU is lost",
    nvml_model.Code.RESET_REQUIRED: "GPU requires reset",
    nvml_model.Code.IN_USE: "In use by another client",
    nvml_model.Code.INSUFFICIENT_RESOURCES: "Insufficient Resources",
    nvml_model.Code.ARGUMENT_VERSION_MISMATCH: "Argument Version Mismatch",
}


class _ProcessInfoV1(ctypes.Structure):
    """``nvmlProcessInfo_v1_t``: before MIG; pynvml no longer has it."""

    _fields_ = (("pid", ctypes.c_uint), ("usedGpuMemory", ctypes.c_ulonglong))


def _init_price(view: nvml_calls.View, *_: Any) -> float:
    return view.node.options.latency.init_s


@_registry.system(
    "nvmlInitWithFlags", "nvmlInit_v2", "nvmlInit", price=_init_price, needs_session=False
)
def _init(view: nvml_calls.View, *_: Any) -> None:
    view.session.begin()


@_registry.system("nvmlShutdown")
def _shutdown(view: nvml_calls.View) -> None:
    view.session.end()


@_registry.system("nvmlSystemGetDriverVersion", "nvmlSystemGetNVMLVersion")
def _driver_version(view: nvml_calls.View, buffer: Any, length: Any) -> None:
    nvml_memory.put_text(buffer, length, view.node.options.driver_version)


@_registry.system("nvmlSystemGetCudaDriverVersion", "nvmlSystemGetCudaDriverVersion_v2")
def _cuda_version(_: nvml_calls.View, version: Any) -> None:
    nvml_memory.put(version, ctypes.c_int, _CUDA_VERSION)


@_registry.system("nvmlSystemGetProcessName")
def _process_name(view: nvml_calls.View, pid: Any, buffer: Any, length: Any) -> None:
    wanted = nvml_memory.number(pid)
    for client in view.node.clients:
        if client.pid == wanted:
            nvml_memory.put_text(buffer, length, client.name)
            return
    raise nvml_model.Refused(nvml_model.Code.NOT_FOUND)


@_registry.system("nvmlDeviceGetCount", "nvmlDeviceGetCount_v2")
def _count(view: nvml_calls.View, count: Any) -> None:
    nvml_memory.put(count, ctypes.c_uint, len(view.boards))


@_registry.system("nvmlDeviceGetHandleByIndex", "nvmlDeviceGetHandleByIndex_v2")
def _by_index(view: nvml_calls.View, index: Any, device: Any) -> None:
    wanted = nvml_memory.number(index)
    if not 0 <= wanted < len(view.boards):
        raise nvml_model.Refused(nvml_model.Code.INVALID_ARGUMENT)
    view.put_handle(device, _whole(wanted))


@_registry.system("nvmlDeviceGetHandleByPciBusId", "nvmlDeviceGetHandleByPciBusId_v2")
def _by_pci_bus_id(view: nvml_calls.View, bus_id: Any, device: Any) -> None:
    # Domains are written with four digits or eight.
    wanted = nvml_memory.text(bus_id).upper().lstrip("0")
    for board in view.boards:
        if board.pci_address.lstrip("0") == wanted:
            view.put_handle(device, _whole(board.index))
            return
    raise nvml_model.Refused(nvml_model.Code.NOT_FOUND)


@_registry.system("nvmlDeviceGetHandleByUUID")
def _by_uuid(view: nvml_calls.View, uuid: Any, device: Any) -> None:
    wanted = nvml_memory.text(uuid)
    for board, gpu in zip(view.boards, view.node.gpus, strict=True):
        if board.uuid == wanted:
            view.put_handle(device, _whole(board.index))
            return
        for instance, compute in nvml_driver.mig_devices(gpu):
            if board.mig_uuid(instance, compute) == wanted:
                view.put_handle(device, nvml_calls.mig_device(board.index, instance, compute))
                return
    raise nvml_model.Refused(nvml_model.Code.NOT_FOUND)


@_registry.query("nvmlDeviceGetName", takes=_DEVICE)
def _name(view: nvml_calls.DeviceView, buffer: Any, length: Any) -> None:
    name = view.board.product.name
    if not view.is_gpu:
        name += f" MIG {_mig_profile(view)}"
    nvml_memory.put_text(buffer, length, name)


@_registry.query("nvmlDeviceGetUUID", takes=_DEVICE)
def _uuid(view: nvml_calls.DeviceView, buffer: Any, length: Any) -> None:
    board = view.board
    uuid = board.uuid if view.is_gpu else board.mig_uuid(view.instance, view.compute)
    nvml_memory.put_text(buffer, length, uuid)


@_registry.query("nvmlDeviceGetIndex", "nvmlDeviceGetMinorNumber", takes=_DEVICE)
def _index(view: nvml_calls.DeviceView, index: Any) -> None:
    _whole_only(view)
    nvml_memory.put(index, ctypes.c_uint, view.board.index)


@_registry.query("nvmlDeviceGetPciInfo_v3", takes=_GPU)
def _pci_info(view: nvml_calls.DeviceView, info: Any) -> None:
    board = view.board
    device_id = board.product.pci_device_ids[0]
    nvml_memory.fill(
        nvml_memory.struct(info, pynvml.nvmlPciInfo_t),
        busIdLegacy=board.pci_address[4:].encode(),
        busId=board.pci_address.encode(),
        domain=0,
        bus=board.pci_bus,
        device=0,
        pciDeviceId=device_id,
        # Made up: subsystem ids tell boards of one chip apart, and no product here needs that.
        pciSubSystemId=device_id,
    )


@_registry.query("nvmlDeviceGetMemoryInfo", takes=_DEVICE)
def _memory_info(view: nvml_calls.DeviceView, info: Any) -> None:
    total, used = _memory(view)
    nvml_memory.fill(
        nvml_memory.struct(info, pynvml.c_nvmlMemory_t),
        total=total,
        used=used,
        free=total - used,
    )


@_registry.query("nvmlDeviceGetMemoryInfo_v2", takes=_DEVICE)
def _memory_info_v2(view: nvml_calls.DeviceView, info: Any) -> None:
    target = nvml_memory.struct(info, pynvml.c_nvmlMemory_v2_t)
    nvml_memory.require_version(target, pynvml.nvmlMemory_v2)
    total, used = _memory(view)
    nvml_memory.fill(target, total=total, reserved=0, used=used, free=total - used)


@_registry.query("nvmlDeviceGetArchitecture", takes=_DEVICE)
def _architecture(view: nvml_calls.DeviceView, architecture: Any) -> None:
    number = _ARCHITECTURES[view.board.product.generation]
    nvml_memory.put(architecture, ctypes.c_uint, number)


@_registry.query("nvmlDeviceGetCudaComputeCapability", takes=_DEVICE)
def _compute_capability(view: nvml_calls.DeviceView, major: Any, minor: Any) -> None:
    nvml_memory.put(major, ctypes.c_int, view.board.product.compute_capability[0])
    nvml_memory.put(minor, ctypes.c_int, view.board.product.compute_capability[1])


@_registry.query("nvmlDeviceGetVirtualizationMode", takes=_GPU)
def _virtualization(view: nvml_calls.DeviceView, mode: Any) -> None:
    nvml_memory.put(mode, ctypes.c_uint, view.node.options.virtualization.value)


@_registry.query("nvmlDeviceGetFieldValues", takes=_GPU)
def _field_values(view: nvml_calls.DeviceView, count: Any, values: Any) -> None:
    array = pynvml.c_nvmlFieldValue_t * nvml_memory.number(count)
    for entry in nvml_memory.struct(values, array):
        value = _field(view, entry.fieldId)
        entry.valueType = pynvml.NVML_VALUE_TYPE_UNSIGNED_INT
        entry.nvmlReturn = nvml_model.Code.NOT_SUPPORTED if value is None else 0
        entry.value.uiVal = value or 0


@_registry.query(
    "nvmlDeviceGetComputeRunningProcesses_v2",
    "nvmlDeviceGetComputeRunningProcesses_v3",
    takes=_DEVICE,
)
def _processes(view: nvml_calls.DeviceView, count: Any, infos: Any) -> None:
    _put_processes(view, count, infos, pynvml.c_nvmlProcessInfo_v3_t)


@_registry.query("nvmlDeviceGetComputeRunningProcesses", takes=_DEVICE)
def _processes_v1(view: nvml_calls.DeviceView, count: Any, infos: Any) -> None:
    _put_processes(view, count, infos, _ProcessInfoV1)


@_registry.query(
    "nvmlDeviceGetGraphicsRunningProcesses_v2",
    "nvmlDeviceGetGraphicsRunningProcesses_v3",
    takes=_DEVICE,
)
def _graphics_processes(_: nvml_calls.DeviceView, count: Any, __: Any) -> None:
    nvml_memory.put(count, ctypes.c_uint, 0)


@_registry.query("nvmlDeviceGetSupportedEventTypes", takes=_DEVICE)
def _event_types(_: nvml_calls.DeviceView, types: Any) -> None:
    nvml_memory.put(types, ctypes.c_ulonglong, 0)


@_registry.query("nvmlDeviceRegisterEvents", takes=_DEVICE)
def _register_events(_: nvml_calls.DeviceView, *__: Any) -> None:
    raise nvml_model.Refused(nvml_model.Code.NOT_SUPPORTED)


@_registry.system("nvmlEventSetCreate")
def _create_event_set(_: nvml_calls.View, event_set: Any) -> None:
    nvml_memory.put_handle(event_set, _EVENT_SET)


@_registry.system("nvmlEventSetFree")
def _free_event_set(_: nvml_calls.View, __: Any) -> None:
    pass


@_registry.system("nvmlEventSetWait", "nvmlEventSetWait_v2")
def _wait_for_events(_: nvml_calls.View, __: Any, ___: Any, timeout_ms: Any) -> None:
    threading.Event().wait(nvml_memory.number(timeout_ms) / 1000)
    raise nvml_model.Refused(nvml_model.Code.TIMEOUT)


def error_text(code: Any) -> bytes:
    """Return what ``nvmlErrorString`` says of a code; it needs no session."""
    return _ERROR_TEXTS.get(nvml_memory.number(code), "Unknown Error").encode()


def _whole(index: int) -> nvml_calls.Target:
    return nvml_calls.Target(kind=nvml_calls.Kind.GPU, gpu=index)


def _whole_only(view: nvml_calls.DeviceView) -> None:
    if not view.is_gpu:
        raise nvml_model.Refused(nvml_model.Code.NOT_SUPPORTED)


def _mig_profile(view: nvml_calls.DeviceView) -> str:
    row = view.board.row(view.instance.profile_id)
    return nvml_driver.compute_name(row, view.compute.placement.size)


def _memory(view: nvml_calls.DeviceView) -> tuple[int, int]:
    """Return total and used bytes; each computing client is given the same made-up share."""
    mib = view.board.product.memory_mib
    if not view.is_gpu:
        mib = view.board.row(view.instance.profile_id).memory_mib
    return mib * _MIB, min(mib, _CLIENT_MIB * len(_computing(view))) * _MIB


def _field(view: nvml_calls.DeviceView, field: int) -> int | None:
    """Return the value of a field, or None when this GPU or driver does not have it."""
    if not view.board.product.is_mig_capable:
        return None
    if field == pynvml.NVML_FI_DEV_IS_RESETLESS_MIG_SUPPORTED:
        return int(not view.board.product.mode_needs_reset)
    if field == pynvml.NVML_FI_DEV_IS_MIG_MODE_INDEPENDENT_MIG_QUERY_CAPABLE:
        return 1 if view.node.options.tells_profiles_while_mig_off else None
    return None


def _computing(view: nvml_calls.DeviceView) -> list[nvml_model.Client]:
    computing = [
        client
        for client in view.node.clients_of(view.board.uuid)
        if client.kind is nvml_model.ClientKind.COMPUTE
    ]
    if view.is_gpu:
        return computing
    ids = (view.instance.instance_id, view.compute.instance_id)
    return [c for c in computing if (c.gpu_instance_id, c.compute_instance_id) == ids]


def _put_processes(view: nvml_calls.DeviceView, count: Any, infos: Any, kind: Any) -> None:
    """Write the processes, or only their number where the caller's array is too short."""
    found = [_process(client, kind) for client in _computing(view)]
    room = nvml_memory.struct(count, ctypes.c_uint).value
    nvml_memory.put(count, ctypes.c_uint, len(found))
    if room < len(found):
        raise nvml_model.Refused(nvml_model.Code.INSUFFICIENT_SIZE)
    if found:
        nvml_memory.put_all(infos, kind, found)


def _process(client: nvml_model.Client, kind: Any) -> Any:
    info = kind(pid=client.pid, usedGpuMemory=_CLIENT_MIB * _MIB)
    if kind is not _ProcessInfoV1:
        instance, compute = client.gpu_instance_id, client.compute_instance_id
        info.gpuInstanceId = _NO_INSTANCE if instance is None else instance
        info.computeInstanceId = _NO_INSTANCE if compute is None else compute
    return info
