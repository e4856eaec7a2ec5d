import pathlib

import pynvml
import pytest

from mig_manager import errors
from mig_manager.adapters import host
from mig_manager.adapters.nvml import gpus as nvml_adapter
from mig_manager.core import model
from mig_manager.sandbox.node import device_plugin
from tests.node import nvml_rig


@pytest.fixture
def state_file(start: nvml_rig.Start) -> pathlib.Path:
    """A node with MIG off on one GPU, and whole and partial compute instances on another."""
    library = start("2xa100-sxm4-40gb")
    handle = nvml_rig.enabled(1)
    for gpu_instance, compute_instances in ((9, (0, 1)), (14, (1,)), (20, (0,)), (19, ())):
        instance = pynvml.nvmlDeviceCreateGpuInstance(handle, gpu_instance)
        for compute_instance in compute_instances:
            pynvml.nvmlGpuInstanceCreateComputeInstance(instance, compute_instance)
    return library.state.path


def test_programs_see_what_nvml_reports(state_file: pathlib.Path) -> None:
    reported = nvml_adapter.NvmlGpus(clock=host.SystemClock()).observe()

    seen = device_plugin.SimulatedGpus(state_file).observe()

    assert [(g.index, g.uuid, g.name, g.memory_mib) for g in seen] == [
        (g.index, g.uuid, g.name, g.memory_mib) for g in reported
    ]
    assert [g.is_mig_capable for g in seen] == [g.is_mig_capable for g in reported]
    assert [g.is_mig_enabled for g in seen] == [
        g.current_mode is model.MigMode.ENABLED for g in reported
    ]
    assert [{(d.uuid, d.profile) for d in g.mig_devices} for g in seen] == [
        {(c.uuid, c.profile) for i in g.gpu_instances for c in i.compute_instances}
        for g in reported
    ]
    assert len(seen[1].mig_devices) == 4


def test_program_uses_its_device_until_released_and_is_listed(state_file: pathlib.Path) -> None:
    gpus = device_plugin.SimulatedGpus(state_file)
    whole, partitioned = gpus.observe()
    let_go = gpus.hold(partitioned.mig_devices[0].uuid, process="train", computes=True)
    gpus.hold(whole.uuid, process="monitor", computes=False)
    listed = pynvml.nvmlDeviceGetComputeRunningProcesses
    assert [len(listed(nvml_rig.gpu(index))) for index in range(2)] == [0, 1]
    let_go()
    let_go()

    assert listed(nvml_rig.gpu(1)) == []
    assert pynvml.nvmlDeviceSetMigMode(nvml_rig.gpu(0), 1) == pynvml.NVML_ERROR_IN_USE


def test_a_device_that_does_not_exist_cannot_be_used(state_file: pathlib.Path) -> None:
    with pytest.raises(errors.HardwareError, match="MIG-gone"):
        device_plugin.SimulatedGpus(state_file).hold("MIG-gone", process="train", computes=True)
