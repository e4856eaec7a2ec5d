"""Which GPUs' MIG changes are heard of, over the simulated NVML."""

import pathlib

import pynvml
import pytest

from mig_manager import errors, reasons
from mig_manager.adapters.nvml import events
from mig_manager.core import model
from mig_manager.sandbox.driver import states
from testkit import nvml_faults
from tests.rigs.node import nvml_rig

SOON_S = 10.0


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "state"


def test_a_change_is_reported_with_its_gpu(path: pathlib.Path) -> None:
    with nvml_rig.booted(path, "2xa100-sxm4-40gb") as rig, events.listening(None) as changes:
        uuids = tuple(gpu.uuid for gpu in rig.gpus.observe())
        assert (changes.gpus, changes.gpu_count) == (uuids, 2)
        rig.enable(1)
        assert changes.wait(SOON_S) == events.GpuEvent(uuids[1])
        assert changes.wait(0.0) is None


def test_a_critical_error_is_reported_with_its_number(path: pathlib.Path) -> None:
    with nvml_rig.booted(path, "2xA30") as rig, events.listening(None) as changes:
        rig.state.fail_gpu(1, xid=79)
        assert changes.wait(SOON_S) == events.GpuEvent(rig.state.boards[1].uuid, 79)
        assert changes.wait(0.0) is None


@pytest.mark.parametrize("xid", sorted(events.APPLICATION_XIDS))
def test_an_applications_error_is_not_reported_as_an_event(path: pathlib.Path, xid: int) -> None:
    with nvml_rig.booted(path, "A30") as rig, events.listening(None) as changes:
        rig.state.fail_gpu(0, xid=xid)
        rig.state.fail_gpu(0, xid=94)
        assert changes.wait(SOON_S) is None
        assert changes.wait(SOON_S) == events.GpuEvent(rig.state.boards[0].uuid, 94)


def test_a_library_without_event_types_still_reports_changes(path: pathlib.Path) -> None:
    options = states.Options(absent_functions=("nvmlDeviceGetSupportedEventTypes",))
    with nvml_rig.booted(path, "A30", options=options) as rig, events.listening(None) as changes:
        rig.state.fail_gpu(0, xid=79)
        rig.enable()
        assert changes.wait(SOON_S) == events.GpuEvent(rig.state.boards[0].uuid)


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        ("L40S", states.Options()),
        ("A30", states.Options(virtualization=model.Virtualization.VGPU)),
        ("A30", states.Options(mig_events=states.MigEvents.NEVER)),
        ("A30", states.Options(mig_events=states.MigEvents.WHILE_ON)),
        ("A30", states.Options(absent_functions=("nvmlEventSetCreate",))),
        ("A30", states.Options(absent_functions=("nvmlDeviceRegisterEvents",))),
    ],
)
def test_without_a_gpu_that_reports_changes_it_is_not_supported(
    path: pathlib.Path, spec: str, options: states.Options
) -> None:
    with (
        nvml_rig.booted(path, spec, options=options),
        pytest.raises(errors.HardwareError) as caught,
        events.listening(None),
    ):
        pass
    assert caught.value.reason is reasons.Reason.NOT_SUPPORTED


@pytest.mark.parametrize(
    ("function", "code"),
    [
        ("", states.Code.SUCCESS),
        ("nvmlDeviceGetMigMode", states.Code.GPU_IS_LOST),
        ("nvmlDeviceRegisterEvents", states.Code.UNKNOWN),
        ("nvmlDeviceRegisterEvents", states.Code.NO_PERMISSION),
        ("nvmlDeviceRegisterEvents", states.Code.RESET_REQUIRED),
    ],
    ids=["without MIG", "lost", "unknown", "forbidden", "to be reset"],
)
def test_gpu_that_cannot_be_watched_hides_no_event_of_another(
    path: pathlib.Path, function: str, code: states.Code
) -> None:
    broken = nvml_faults.Fault(function=function, gpu=0, code=int(code), count=None)
    spec, faults = ("2xA30", (broken,)) if function else ("L40S+A30", ())
    with nvml_rig.booted(path, spec, faults=faults) as rig, events.listening(None) as changes:
        assert (changes.gpus, changes.gpu_count) == ((rig.state.boards[1].uuid,), 2)


def test_a_refusal_for_every_gpu_is_passed_on_with_its_gpu(path: pathlib.Path) -> None:
    broken = nvml_faults.Fault(function="nvmlDeviceRegisterEvents", code=999, count=None)
    with (
        nvml_rig.booted(path, "2xA30", faults=(broken,)),
        pytest.raises(errors.HardwareError, match="GPU 0") as caught,
        events.listening(None),
    ):
        pass
    assert caught.value.reason is reasons.Reason.NVML_ERROR


def test_a_gpu_that_falls_off_the_bus_ends_the_wait(path: pathlib.Path) -> None:
    with nvml_rig.booted(path) as rig, events.listening(None) as changes:
        rig.state.add_fault(
            nvml_faults.Fault(function="nvmlEventSetWait_v2", code=int(states.Code.GPU_IS_LOST))
        )
        with pytest.raises(errors.HardwareError) as caught:
            changes.wait(SOON_S)
        assert caught.value.reason is reasons.Reason.GPU_LOST


def test_set_and_session_are_released_whatever_happens(path: pathlib.Path) -> None:
    with nvml_rig.booted(path) as rig:
        with pytest.raises(KeyError), events.listening(None):
            raise KeyError
        assert rig.calls("nvmlEventSetFree") == rig.calls("nvmlShutdown") == 1
        with pytest.raises(pynvml.NVMLError_Uninitialized):
            pynvml.nvmlDeviceGetCount()
