"""The C functions about events; of these the simulation has one, ``nvmlEventMigConfigChange``.

Sources: ``nvml.h``, chapters "Event Handling Methods" and "Event Types". That old drivers tell of
changes only while MIG is on follows from DCGM's cache manager, which puts up with NOT_SUPPORTED
there; that a switch which only becomes pending is told as well is inferred.
"""

import ctypes
import time
from typing import Any

import pynvml

from mig_manager.sandbox.driver import calls, memory, states

_registry = calls.Registry()
FUNCTIONS = _registry.functions
"""By C name."""

_DEVICE = frozenset({calls.Kind.GPU, calls.Kind.MIG_DEVICE})
_NO_INSTANCE = 0xFFFF_FFFF
_LOOK_EVERY_S = 0.02
"""How soon a change that another process makes is seen."""


@_registry.query("nvmlDeviceGetSupportedEventTypes", takes=_DEVICE)
def _supported(view: calls.DeviceView, types: Any) -> None:
    memory.put(types, ctypes.c_ulonglong, _types(view))


@_registry.query("nvmlDeviceRegisterEvents", takes=_DEVICE)
def _register(view: calls.DeviceView, types: Any, event_set: Any) -> None:
    found = view.session.event_set(event_set)
    wanted = memory.number(types)
    if wanted & ~_types(view):
        raise states.Refused(states.Code.NOT_SUPPORTED)
    if wanted:
        found.watch(view.target.gpu, view.gpu.changes)


@_registry.system("nvmlEventSetCreate")
def _create(view: calls.View, event_set: Any) -> None:
    memory.put_handle(event_set, view.session.new_event_set())


@_registry.system("nvmlEventSetFree")
def _free(view: calls.View, event_set: Any) -> None:
    view.session.free_event_set(event_set)


@_registry.system("nvmlEventSetWait", "nvmlEventSetWait_v2")
def _wait(view: calls.View, event_set: Any, data: Any, timeout_ms: Any) -> None:
    target = memory.struct(data, pynvml.c_nvmlEventData_t)
    deadline = time.monotonic() + memory.number(timeout_ms) / 1000
    # Looked up anew each time: another thread may free the set or close the session.
    while (gpu := view.session.event_set(event_set).take(view.look())) is None:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise states.Refused(states.Code.TIMEOUT)
        view.session.pause(min(_LOOK_EVERY_S, left_s))
    handle = view.session.handle(calls.whole(view.look(), gpu))
    memory.fill(
        target,
        device=ctypes.cast(handle, pynvml.c_nvmlDevice_t),
        eventType=pynvml.nvmlEventMigConfigChange,
        eventData=0,
        gpuInstanceId=_NO_INSTANCE,
        computeInstanceId=_NO_INSTANCE,
    )


def _types(view: calls.DeviceView) -> int:
    """Return the mask of what this GPU tells of."""
    is_guest = view.node.options.virtualization is states.Virtualization.VGPU
    is_capable = view.is_gpu and view.board.product.is_mig_capable and not is_guest
    return int(pynvml.nvmlEventMigConfigChange) if is_capable and _tells(view) else 0


def _tells(view: calls.DeviceView) -> bool:
    match view.node.options.mig_events:
        case states.MigEvents.ALWAYS:
            return True
        case states.MigEvents.WHILE_ON:
            return view.gpu.is_enabled
        case states.MigEvents.NEVER:
            return False
