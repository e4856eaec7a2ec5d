"""The C functions about the library, the node, its devices and its events; all are queries.

Events: ``nvml.h``, chapters "Event Handling Methods" and "Event Types"; here are
``nvmlEventMigConfigChange`` and ``nvmlEventTypeXidCriticalError``. Old drivers report changes only
while MIG is on: DCGM's cache manager tolerates NOT_SUPPORTED there. Inferred: drivers also report
a pending mode change.
"""

import ctypes
import threading
import time
from collections.abc import Mapping
from typing import Any

import pynvml

from mig_manager.core import model
from mig_manager.sandbox.driver import arguments, calls, sessions, states, transitions, views

_MIB = 2**20
_CLIENT_MIB = 512
_NO_INSTANCE = 0xFFFF_FFFF
_CHANGE = int(pynvml.nvmlEventMigConfigChange)
_XID = int(pynvml.nvmlEventTypeXidCriticalError)
_POLL_S = 0.02  # the longest delay until a waiting event set sees a change by another process

_ARCHITECTURES = {
    name: getattr(pynvml, f"NVML_DEVICE_ARCH_{name.upper()}")
    for name in ("turing", "ampere", "ada", "hopper", "blackwell")
}
_VIRTUALIZATIONS = {
    model.Virtualization.NONE: pynvml.NVML_GPU_VIRTUALIZATION_MODE_NONE,
    model.Virtualization.PASSTHROUGH: pynvml.NVML_GPU_VIRTUALIZATION_MODE_PASSTHROUGH,
    model.Virtualization.VGPU: pynvml.NVML_GPU_VIRTUALIZATION_MODE_VGPU,
    model.Virtualization.HOST: pynvml.NVML_GPU_VIRTUALIZATION_MODE_HOST_VGPU,
}
_ERROR_TEXTS: Mapping[int, str] = {
    states.Code.SUCCESS: "Success",
    states.Code.UNINITIALIZED: "Uninitialized",
    states.Code.INVALID_ARGUMENT: "Invalid Argument",
    states.Code.NOT_SUPPORTED: "Not Supported",
    states.Code.NO_PERMISSION: "Insufficient Permissions",
    states.Code.NOT_FOUND: "Not Found",
    states.Code.INSUFFICIENT_SIZE: "Insufficient Size",
    states.Code.DRIVER_NOT_LOADED: "Driver Not Loaded",
    states.Code.TIMEOUT: "Timeout",
    states.Code.GPU_IS_LOST: "GPU is lost",
    states.Code.RESET_REQUIRED: "GPU requires reset",
    states.Code.IN_USE: "In use by another client",
    states.Code.INSUFFICIENT_RESOURCES: "Insufficient Resources",
    states.Code.ARGUMENT_VERSION_MISMATCH: "Argument Version Mismatch",
    states.Code.GPU_NOT_FOUND: "No supported GPUs were found",
}


# -- library and node -------------------------------------------------------------------------


def error_text(code: Any) -> bytes:
    """Return the text of ``nvmlErrorString`` for a code; needs no session."""
    return _ERROR_TEXTS.get(arguments.number(code), "Unknown Error").encode()


@calls.function(
    "nvmlInitWithFlags", "nvmlInit_v2", "nvmlInit", latency="init_s", needs_session=False
)
def _init(view: views.DriverView, *_: Any) -> None:
    view.session.begin()


@calls.function("nvmlShutdown")
def _shutdown(view: views.DriverView) -> None:
    view.session.end()


@calls.function("nvmlSystemGetDriverVersion", "nvmlSystemGetNVMLVersion")
def _driver_version(view: views.DriverView, buffer: Any, length: Any) -> None:
    arguments.put_text(buffer, length, view.node.options.driver_version)


@calls.function("nvmlSystemGetProcessName")
def _process_name(view: views.DriverView, pid: Any, buffer: Any, length: Any) -> None:
    requested = arguments.number(pid)
    for client in view.node.clients:
        if client.pid == requested:
            arguments.put_text(buffer, length, client.name)
            return
    raise states.Refused(states.Code.NOT_FOUND)


@calls.function("nvmlDeviceGetCount", "nvmlDeviceGetCount_v2")
def _count(view: views.DriverView, count: Any) -> None:
    arguments.put(count, ctypes.c_uint, len(view.boards))


@calls.function("nvmlDeviceGetHandleByIndex", "nvmlDeviceGetHandleByIndex_v2")
def _by_index(view: views.DriverView, index: Any, device: Any) -> None:
    requested = arguments.number(index)
    if not 0 <= requested < len(view.boards):
        raise states.Refused(states.Code.INVALID_ARGUMENT)
    _put_whole(view, device, requested)


@calls.function("nvmlDeviceGetHandleByPciBusId", "nvmlDeviceGetHandleByPciBusId_v2")
def _by_pci_bus_id(view: views.DriverView, bus_id: Any, device: Any) -> None:
    # Domains are written with four digits or eight.
    requested = arguments.text(bus_id).upper().lstrip("0")
    for board in view.boards:
        if board.pci_address.lstrip("0") == requested:
            _put_whole(view, device, board.index)
            return
    raise states.Refused(states.Code.NOT_FOUND)


def _put_whole(view: views.DriverView, device: Any, index: int) -> None:
    if view.node.gpus[index].is_lost:
        raise states.Refused(states.Code.GPU_IS_LOST)
    view.put_handle(device, sessions.whole(view.node, index))


# -- devices ----------------------------------------------------------------------------------


@calls.function("nvmlDeviceGetName", takes=calls.DEVICE)
def _name(view: views.DeviceView, buffer: Any, length: Any) -> None:
    name = view.board.product.name
    if not view.is_gpu:
        name += f" MIG {transitions.compute_name(view.parent, view.compute.placement.size)}"
    arguments.put_text(buffer, length, name)


@calls.function("nvmlDeviceGetUUID", takes=calls.DEVICE)
def _uuid(view: views.DeviceView, buffer: Any, length: Any) -> None:
    board = view.board
    uuid = board.uuid if view.is_gpu else board.mig_uuid(view.instance, view.compute)
    arguments.put_text(buffer, length, uuid)


def _minor(view: views.DeviceView) -> int:
    if not view.is_gpu:
        raise states.Refused(states.Code.NOT_SUPPORTED)
    return view.node.minor(view.board.index)


calls.numbers(
    calls.DEVICE,
    {
        "nvmlDeviceGetMinorNumber": _minor,
        "nvmlDeviceGetArchitecture": lambda view: _ARCHITECTURES[view.board.product.generation],
    },
)
calls.numbers(
    calls.GPU,
    {
        "nvmlDeviceGetVirtualizationMode": lambda view: _VIRTUALIZATIONS[
            view.node.options.virtualization
        ]
    },
)


@calls.function("nvmlDeviceGetPciInfo_v3", takes=calls.GPU)
def _pci_info(view: views.DeviceView, info: Any) -> None:
    board = view.board
    device_id = board.product.pci_device_ids[0]
    arguments.fill(
        arguments.struct(info, pynvml.nvmlPciInfo_t),
        busIdLegacy=board.pci_address[4:].encode(),
        busId=board.pci_address.encode(),
        domain=0,
        bus=board.pci_bus,
        device=0,
        pciDeviceId=device_id,
        # Invented: subsystem ids distinguish boards with the same chip; no product here needs it.
        pciSubSystemId=device_id,
    )


@calls.function("nvmlDeviceGetMemoryInfo", takes=calls.DEVICE)
def _memory_info(view: views.DeviceView, info: Any) -> None:
    arguments.fill(arguments.struct(info, pynvml.c_nvmlMemory_t), **memory(view))


def memory(view: views.DeviceView) -> dict[str, int]:
    """Return the bytes of memory; every computing client has the same invented share."""
    mib = (view.board.product if view.is_gpu else view.parent).memory_mib
    used = min(mib, _CLIENT_MIB * len(_computing(view))) * _MIB
    return {"total": mib * _MIB, "used": used, "free": mib * _MIB - used}


@calls.function("nvmlDeviceGetFieldValues", takes=calls.GPU)
def _field_values(view: views.DeviceView, count: Any, values: Any) -> None:
    product = view.board.product
    value_by_id: dict[int, int] = {}
    if view.node.options.reports_recovery_action:
        value_by_id[pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION] = view.gpu.recovery_action
    if product.is_mig_capable:
        value_by_id[pynvml.NVML_FI_DEV_IS_RESETLESS_MIG_SUPPORTED] = int(
            not product.mode_needs_reset
        )
    for entry in arguments.struct(values, pynvml.c_nvmlFieldValue_t * arguments.number(count)):
        is_known = entry.fieldId in value_by_id
        entry.valueType = pynvml.NVML_VALUE_TYPE_UNSIGNED_INT
        entry.nvmlReturn = states.Code.SUCCESS if is_known else states.Code.NOT_SUPPORTED
        entry.value.uiVal = value_by_id.get(entry.fieldId, 0)


@calls.function("nvmlDeviceGetGpuFabricInfo", takes=calls.GPU)
def _fabric_info(view: views.DeviceView, info: Any) -> None:
    target = arguments.struct(info, pynvml.c_nvmlGpuFabricInfo_t)
    arguments.fill(target, status=states.Code.SUCCESS, state=view.node.options.fabric_state)


@calls.function(
    "nvmlDeviceGetComputeRunningProcesses_v2",
    "nvmlDeviceGetComputeRunningProcesses_v3",
    takes=calls.DEVICE,
)
def _processes(view: views.DeviceView, count: Any, infos: Any) -> None:
    """Write the processes, or only their number if the caller's array is too short."""
    clients = _computing(view)
    room = arguments.struct(count, ctypes.c_uint).value
    arguments.put(count, ctypes.c_uint, len(clients))
    if room < len(clients):
        raise states.Refused(states.Code.INSUFFICIENT_SIZE)
    processes = []
    for client in clients:
        instance, compute = client.gpu_instance_id, client.compute_instance_id
        info = pynvml.c_nvmlProcessInfo_v3_t(
            pid=client.pid,
            usedGpuMemory=_CLIENT_MIB * _MIB,
            gpuInstanceId=_NO_INSTANCE if instance is None else instance,
            computeInstanceId=_NO_INSTANCE if compute is None else compute,
        )
        processes.append(info)
    if processes:
        arguments.put_all(infos, pynvml.c_nvmlProcessInfo_v3_t, processes)


@calls.function(
    "nvmlDeviceGetGraphicsRunningProcesses_v2",
    "nvmlDeviceGetGraphicsRunningProcesses_v3",
    takes=calls.DEVICE,
)
def _graphics_processes(_: views.DeviceView, count: Any, __: Any) -> None:
    arguments.put(count, ctypes.c_uint, 0)


def _computing(view: views.DeviceView) -> list[states.Client]:
    computing = [
        client
        for client in view.node.clients_of(view.board.uuid)
        if client.kind is states.ClientKind.COMPUTE
    ]
    if view.is_gpu:
        return computing
    ids = (view.instance.instance_id, view.compute.instance_id)
    return [c for c in computing if (c.gpu_instance_id, c.compute_instance_id) == ids]


# -- events -----------------------------------------------------------------------------------


@calls.function("nvmlDeviceGetSupportedEventTypes", takes=calls.DEVICE)
def _event_types(view: views.DeviceView, types: Any) -> None:
    arguments.put(types, ctypes.c_ulonglong, _event_mask(view))


@calls.function("nvmlDeviceRegisterEvents", takes=calls.DEVICE)
def _register_events(view: views.DeviceView, types: Any, event_set: Any) -> None:
    events = view.session.event_set(event_set)
    mask = arguments.number(types)
    if mask & ~_event_mask(view):
        raise states.Refused(states.Code.NOT_SUPPORTED)
    changes, xids = (bool(mask & each) for each in (_CHANGE, _XID))
    events.watch(view.target.gpu, view.gpu, changes=changes, xids=xids)


def _event_mask(view: views.DeviceView) -> int:
    """Return the mask of the events that this GPU reports."""
    options = view.node.options
    is_guest = options.virtualization is model.Virtualization.VGPU
    reports = {
        states.MigEvents.ALWAYS: True,
        states.MigEvents.WHILE_ON: view.gpu.is_enabled,
        states.MigEvents.NEVER: False,
    }[options.mig_events]
    is_capable = view.is_gpu and view.board.product.is_mig_capable and not is_guest
    return (_CHANGE if is_capable and reports else 0) | (_XID if view.is_gpu else 0)


@calls.function("nvmlEventSetCreate")
def _create_event_set(view: views.DriverView, event_set: Any) -> None:
    arguments.put(event_set, ctypes.c_void_p, view.session.new_event_set())


@calls.function("nvmlEventSetFree")
def _free_event_set(view: views.DriverView, event_set: Any) -> None:
    view.session.free_event_set(event_set)


@calls.function("nvmlEventSetWait", "nvmlEventSetWait_v2")
def _wait_for_event(view: views.DriverView, event_set: Any, data: Any, timeout_ms: Any) -> None:
    target = arguments.struct(data, pynvml.c_nvmlEventData_t)
    deadline = time.monotonic() + arguments.number(timeout_ms) / 1000
    pause = threading.Event()
    # Resolved in every round: another thread may free the set or close the session.
    while (event := view.session.event_set(event_set).take(view.read())) is None:
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            raise states.Refused(states.Code.TIMEOUT)
        pause.wait(min(_POLL_S, remaining_s))
    gpu, xid = event
    handle = view.session.handle(sessions.whole(view.read(), gpu))
    arguments.fill(
        target,
        device=ctypes.cast(handle, pynvml.c_nvmlDevice_t),
        eventType=_CHANGE if xid is None else _XID,
        eventData=xid or 0,
        gpuInstanceId=_NO_INSTANCE,
        computeInstanceId=_NO_INSTANCE,
    )
