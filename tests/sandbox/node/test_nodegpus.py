import pathlib

import pynvml
import pytest

from mig_manager.adapters import host
from mig_manager.adapters.nvml import nvml_gpus
from mig_manager.core import model
from mig_manager.sandbox.driver import state_file, states
from mig_manager.sandbox.node import device_plugin
from tests.rigs.node import nvml_rig


@pytest.fixture
def path(start: nvml_rig.Start) -> pathlib.Path:
    """A node with MIG off on one GPU, and whole and partial compute instances on another."""
    library = start("2xa100-sxm4-40gb")
    handle = nvml_rig.gpu_with_mig(1)
    for gpu_instance, compute_instances in ((9, (0, 1)), (14, (1,)), (20, (0,)), (19, ())):
        instance = pynvml.nvmlDeviceCreateGpuInstance(handle, gpu_instance)
        for compute_instance in compute_instances:
            pynvml.nvmlGpuInstanceCreateComputeInstance(instance, compute_instance)
    return library.state.path


def test_programs_observe_the_same_gpus_as_nvml(path: pathlib.Path) -> None:
    reported = nvml_gpus.NvmlGpus(clock=host.SystemClock()).observe()

    gpus = device_plugin.enumerate_gpus(state_file.SharedState(path))

    assert [(g.index, g.uuid) for g in gpus] == [(g.index, g.uuid) for g in reported]
    assert [g.is_mig_enabled for g in gpus] == [
        g.current_mode is model.MigMode.ENABLED for g in reported
    ]
    assert [g.mig_devices for g in gpus] == [
        {c.uuid: c.profile for i in g.gpu_instances for c in i.compute_instances} for g in reported
    ]
    assert len(gpus[1].mig_devices) == 4


def a_user(
    state: state_file.SharedState, uuid: str, kind: states.ClientKind
) -> device_plugin.DeviceUser:
    return device_plugin.DeviceUser(state=state, name="p", device_ids=lambda: [uuid], kind=kind)


def test_program_uses_its_device_until_it_stops_and_is_listed(path: pathlib.Path) -> None:
    state = state_file.SharedState(path)
    whole, partitioned = device_plugin.enumerate_gpus(state)
    train = a_user(state, next(iter(partitioned.mig_devices)), states.ClientKind.COMPUTE)
    train.start(0.0)
    a_user(state, whole.uuid, states.ClientKind.MONITOR).start(0.0)
    listed = pynvml.nvmlDeviceGetComputeRunningProcesses
    assert [len(listed(nvml_rig.handle(index))) for index in range(2)] == [0, 1]
    train.stop()
    train.stop()

    assert listed(nvml_rig.handle(1)) == []
    assert pynvml.nvmlDeviceSetMigMode(nvml_rig.handle(0), 1) == pynvml.NVML_ERROR_IN_USE


def test_a_device_that_does_not_exist_cannot_be_used(path: pathlib.Path) -> None:
    user = a_user(state_file.SharedState(path), "MIG-gone", states.ClientKind.COMPUTE)

    with pytest.raises(device_plugin.NotStartedError, match="MIG-gone"):
        user.start(0.0)
