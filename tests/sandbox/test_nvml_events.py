"""The simulated library's events: who changed MIG on which GPU, through the real pynvml."""

import threading
import time
from typing import Any

import pynvml

from mig_manager.sandbox.driver import states
from tests.node import nvml_rig

CHANGE = pynvml.nvmlEventMigConfigChange
SOON_MS = 60_000
"""Far longer than an event takes."""
WAIT = pynvml.nvmlEventSetWait_v2


def watching(*indices: int) -> Any:
    """Return an event set in which GPUs are registered."""
    events = pynvml.nvmlEventSetCreate()
    for index in indices:
        pynvml.nvmlDeviceRegisterEvents(nvml_rig.gpu(index), CHANGE, events)
    return events


def read_event(events: Any) -> int:
    """Wait for an event and return the index of its GPU."""
    data = WAIT(events, SOON_MS)
    assert data.eventType == CHANGE
    assert data.eventData == 0
    assert data.gpuInstanceId == data.computeInstanceId == 0xFFFF_FFFF
    return int(pynvml.nvmlDeviceGetIndex(data.device))


def is_silent(events: Any) -> bool:
    return nvml_rig.refusal(WAIT, events, 0) == "TIMEOUT"


def test_change_of_a_registered_gpu_is_one_event_even_if_undone(start: nvml_rig.Start) -> None:
    library = start("2xA100-SXM4-40GB")
    events = watching(0, 1)
    device = nvml_rig.enabled(1)
    assert read_event(events) == 1
    instance, compute = nvml_rig.filled(device)
    pynvml.nvmlComputeInstanceDestroy(compute)
    pynvml.nvmlGpuInstanceDestroy(instance)
    assert [read_event(events) for _ in range(4)] == [1, 1, 1, 1]
    assert library.state.reset_gpu(0) is states.Code.SUCCESS
    assert read_event(events) == 0
    assert is_silent(events)


def test_what_changes_nothing_or_came_before_or_elsewhere_is_no_event(
    start: nvml_rig.Start,
) -> None:
    library = start("2xA100-SXM4-40GB")
    device = nvml_rig.enabled(0)
    events = watching(0)
    nvml_rig.enabled(1)
    nvml_rig.enabled(0)
    nvml_rig.refusal(pynvml.nvmlDeviceCreateGpuInstance, device, nvml_rig.UNKNOWN)
    library.state.add_client(pynvml.nvmlDeviceGetUUID(device), name="train")
    assert is_silent(events)


def test_every_set_gets_every_event_and_registering_again_loses_none(
    start: nvml_rig.Start,
) -> None:
    start()
    first, second = watching(0), watching(0)
    pynvml.nvmlDeviceRegisterEvents(nvml_rig.enabled(), CHANGE, second)
    assert [read_event(first), read_event(second)] == [0, 0]


def test_a_wait_ends_at_its_time_out_or_when_its_set_is_freed(start: nvml_rig.Start) -> None:
    start()
    events = watching(0)
    since = time.monotonic()
    assert nvml_rig.refusal(WAIT, events, 150) == "TIMEOUT"
    assert time.monotonic() - since >= 0.15
    codes: list[str] = []
    waiter = threading.Thread(
        target=lambda: codes.append(nvml_rig.refusal(WAIT, events, 10 * SOON_MS))
    )
    waiter.start()
    pynvml.nvmlEventSetFree(events)
    waiter.join(SOON_MS / 1000)
    assert codes == ["INVALID_ARGUMENT"]


def test_a_wait_does_not_hold_up_other_calls(start: nvml_rig.Start) -> None:
    start()
    events = watching(0)
    heard: list[int] = []
    waiter = threading.Thread(target=lambda: heard.append(read_event(events)))
    waiter.start()
    assert pynvml.nvmlDeviceGetCount() == 1
    assert not heard
    nvml_rig.enabled()
    waiter.join(SOON_MS / 1000)
    assert heard == [0]


def test_sets_that_were_freed_or_never_made_are_invalid(start: nvml_rig.Start) -> None:
    start()
    freed = watching(0)
    pynvml.nvmlEventSetFree(freed)
    closed = watching(0)
    pynvml.nvmlShutdown()
    pynvml.nvmlInit()
    register = pynvml.nvmlDeviceRegisterEvents
    for events in (freed, closed, None):
        for call, *arguments in (
            (WAIT, events, 0),
            (pynvml.nvmlEventSetFree, events),
            (register, nvml_rig.gpu(), CHANGE, events),
        ):
            assert nvml_rig.refusal(call, *arguments) == "INVALID_ARGUMENT"


def test_an_old_driver_reports_only_gpus_with_mig_mode_on(start: nvml_rig.Start) -> None:
    start(mig_events=states.MigEvents.WHILE_ON)
    device = nvml_rig.enabled()
    assert pynvml.nvmlDeviceGetSupportedEventTypes(device) & CHANGE
    events = watching(0)
    pynvml.nvmlDeviceCreateGpuInstance(device, 9)
    assert read_event(events) == 0


def test_neither_mig_devices_nor_other_events_are_supported(device: Any) -> None:
    nvml_rig.filled(device)
    mig = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(device, 0)
    assert pynvml.nvmlDeviceGetSupportedEventTypes(mig) == 0
    events = pynvml.nvmlEventSetCreate()
    register = pynvml.nvmlDeviceRegisterEvents
    both = CHANGE | pynvml.nvmlEventTypePState
    assert nvml_rig.refusal(register, mig, CHANGE, events) == "NOT_SUPPORTED"
    assert nvml_rig.refusal(register, device, both, events) == "NOT_SUPPORTED"
    pynvml.nvmlDeviceCreateGpuInstance(device, 9)
    assert is_silent(events)


def test_an_xid_is_an_event_and_a_reset_clears_the_recovery_action(start: nvml_rig.Start) -> None:
    library = start("2xA100-SXM4-40GB")
    events = pynvml.nvmlEventSetCreate()
    pynvml.nvmlDeviceRegisterEvents(nvml_rig.gpu(1), pynvml.nvmlEventTypeXidCriticalError, events)
    field = pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION

    library.state.fail_gpu(1, action=pynvml.NVML_GPU_RECOVERY_ACTION_GPU_RESET, xid=48)

    event = WAIT(events, SOON_MS)
    assert (event.eventType, event.eventData) == (pynvml.nvmlEventTypeXidCriticalError, 48)
    assert is_silent(events)
    assert pynvml.nvmlDeviceGetFieldValues(nvml_rig.gpu(1), [field])[0].value.uiVal == 1
    assert library.state.reset_gpu(1) is states.Code.SUCCESS
    assert pynvml.nvmlDeviceGetFieldValues(nvml_rig.gpu(1), [field])[0].value.uiVal == 0


def test_a_reset_does_not_clear_what_only_a_reboot_does(start: nvml_rig.Start) -> None:
    state = start("A30").state
    state.fail_gpu(0, action=pynvml.NVML_GPU_RECOVERY_ACTION_NODE_REBOOT)
    assert state.reset_gpu(0) is states.Code.SUCCESS
    assert state.read().gpus[0].recovery_action == pynvml.NVML_GPU_RECOVERY_ACTION_NODE_REBOOT
    state.reboot()
    assert state.read().gpus[0].recovery_action == pynvml.NVML_GPU_RECOVERY_ACTION_NONE
