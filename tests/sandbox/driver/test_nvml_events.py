"""The simulated library's events: who changed MIG on which GPU, through the real pynvml."""

from typing import Any

import pynvml

from mig_manager.sandbox.driver import states
from tests.rigs.node import nvml_rig

CHANGE = pynvml.nvmlEventMigConfigChange
SOON_MS = 60_000  # far longer than an event takes
WAIT = pynvml.nvmlEventSetWait_v2


def watching(*indices: int) -> Any:
    """Return an event set in which GPUs are registered."""
    events = pynvml.nvmlEventSetCreate()
    for index in indices:
        pynvml.nvmlDeviceRegisterEvents(nvml_rig.handle(index), CHANGE, events)
    return events


def read_event(events: Any) -> int:
    """Wait for an event and return the index of its GPU."""
    data = WAIT(events, SOON_MS)
    assert data.eventType == CHANGE
    assert data.eventData == 0
    assert data.gpuInstanceId == data.computeInstanceId == 0xFFFF_FFFF
    return int(pynvml.nvmlDeviceGetMinorNumber(data.device))


def is_silent(events: Any) -> bool:
    return nvml_rig.refusal(WAIT, events, 0) == "TIMEOUT"


def test_change_of_a_registered_gpu_is_one_event_even_if_undone(start: nvml_rig.Start) -> None:
    library = start("2xA100-SXM4-40GB")
    events = watching(0, 1)
    device = nvml_rig.gpu_with_mig(1)
    assert read_event(events) == 1
    instance, compute = nvml_rig.create_instances(device)
    pynvml.nvmlComputeInstanceDestroy(compute)
    pynvml.nvmlGpuInstanceDestroy(instance)
    assert [read_event(events) for _ in range(4)] == [1, 1, 1, 1]
    assert library.state.reset_gpu(0) is states.Code.SUCCESS
    assert read_event(events) == 0
    assert is_silent(events)


def test_an_old_driver_reports_only_gpus_with_mig_mode_on(start: nvml_rig.Start) -> None:
    start(mig_events=states.MigEvents.WHILE_ON)
    device = nvml_rig.gpu_with_mig()
    assert pynvml.nvmlDeviceGetSupportedEventTypes(device) & CHANGE
    events = watching(0)
    pynvml.nvmlDeviceCreateGpuInstance(device, 9)
    assert read_event(events) == 0


def test_an_xid_is_an_event_and_a_reset_clears_the_recovery_action(start: nvml_rig.Start) -> None:
    library = start("2xA100-SXM4-40GB")
    events = pynvml.nvmlEventSetCreate()
    pynvml.nvmlDeviceRegisterEvents(
        nvml_rig.handle(1), pynvml.nvmlEventTypeXidCriticalError, events
    )
    field = pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION

    library.state.fail_gpu(1, action=pynvml.NVML_GPU_RECOVERY_ACTION_GPU_RESET, xid=48)

    event = WAIT(events, SOON_MS)
    assert (event.eventType, event.eventData) == (pynvml.nvmlEventTypeXidCriticalError, 48)
    assert is_silent(events)
    assert pynvml.nvmlDeviceGetFieldValues(nvml_rig.handle(1), [field])[0].value.uiVal == 1
    assert library.state.reset_gpu(1) is states.Code.SUCCESS
    assert pynvml.nvmlDeviceGetFieldValues(nvml_rig.handle(1), [field])[0].value.uiVal == 0


def test_a_reset_does_not_clear_an_action_that_needs_a_reboot(start: nvml_rig.Start) -> None:
    state = start("A30").state
    state.fail_gpu(0, action=pynvml.NVML_GPU_RECOVERY_ACTION_NODE_REBOOT)
    assert state.reset_gpu(0) is states.Code.SUCCESS
    assert state.read().gpus[0].recovery_action == pynvml.NVML_GPU_RECOVERY_ACTION_NODE_REBOOT
    state.reboot()
    assert state.read().gpus[0].recovery_action == pynvml.NVML_GPU_RECOVERY_ACTION_NONE
