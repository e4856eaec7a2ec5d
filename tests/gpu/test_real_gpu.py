"""The adapter on real GPUs. It looks and changes nothing, so any GPU in any use will do."""

import re

import pynvml
import pytest

from mig_manager import errors
from mig_manager.adapters.host import clock
from mig_manager.adapters.nvml import events
from mig_manager.adapters.nvml import gpus as nvml_gpus
from mig_manager.adapters.nvml_worker import client as nvml_worker
from mig_manager.core import model, steps

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def gpus() -> tuple[model.Gpu, ...]:
    try:
        return nvml_gpus.NvmlGpus(clock=clock.SystemClock()).observe()
    except errors.HardwareError as error:
        if error.reason is errors.Reason.DRIVER_NOT_LOADED:
            pytest.skip(f"no NVIDIA driver here: {error.message}")
        raise


def test_every_gpu_says_who_it_is(gpus: tuple[model.Gpu, ...]) -> None:
    assert [gpu.index for gpu in gpus] == list(range(len(gpus)))
    for gpu in gpus:
        assert re.fullmatch(r"GPU-[0-9a-f-]{36}", gpu.uuid)
        assert re.fullmatch(r"[0-9a-f]{8}:[0-9a-f]{2}:[0-9a-f]{2}\.0", gpu.pci_address)
        assert gpu.pci_device_id & 0xFFFF == 0x10DE
        assert gpu.name


def test_every_profile_has_a_name_and_a_place(gpus: tuple[model.Gpu, ...]) -> None:
    offered = [row for gpu in gpus for row in gpu.profiles or ()]
    if not offered:
        pytest.skip("no GPU here tells MIG profiles")
    for row in offered:
        assert row.placements
        assert row.profile.spans
        assert not any(name.startswith("enum") for name in row.profile.attributes)
    for gpu in gpus:
        names = [row.profile for row in gpu.profiles or ()]
        assert len(names) == len(set(names))


def test_instances_lie_where_their_profile_can_be_placed(gpus: tuple[model.Gpu, ...]) -> None:
    for gpu in gpus:
        places = {row.profile_id: row.placements for row in gpu.profiles or ()}
        for instance in gpu.gpu_instances:
            assert instance.placement in places[instance.profile_id]
            for compute in instance.compute_instances:
                assert compute.uuid is not None
                assert compute.uuid.startswith("MIG-")


def test_looking_again_and_from_another_process_shows_the_same(
    gpus: tuple[model.Gpu, ...],
) -> None:
    assert nvml_gpus.NvmlGpus(clock=clock.SystemClock()).observe() == gpus
    child = nvml_worker.WorkerGpus(command=nvml_worker.worker_command(), timeout_s=60.0)
    assert child.observe() == gpus


def test_every_gpu_with_mig_says_whether_it_tells_of_changes(gpus: tuple[model.Gpu, ...]) -> None:
    capable = [gpu for gpu in gpus if gpu.current_mode is not None]
    try:
        with events.listening(None) as changes:
            types = {
                gpu.uuid: pynvml.nvmlDeviceGetSupportedEventTypes(
                    pynvml.nvmlDeviceGetHandleByIndex(gpu.index)
                )
                for gpu in gpus
            }
            heard = set(changes.gpus)
            # Nobody should be changing them now; what is told all the same is of one of them.
            assert changes.wait(0.0) in {None, *heard}
    except errors.HardwareError as error:
        assert error.reason is errors.Reason.NOT_SUPPORTED  # noqa: PT017 - the one good refusal
        pytest.skip(f"MIG changes are not told here: {error.message}")
    told = {uuid for uuid, mask in types.items() if mask & pynvml.nvmlEventMigConfigChange}
    assert heard <= {gpu.uuid for gpu in capable}
    assert heard == told & {gpu.uuid for gpu in capable}


@pytest.mark.usefixtures("gpus")
def test_carrying_out_nothing_is_allowed() -> None:
    nvml_gpus.NvmlGpus(clock=clock.SystemClock()).execute(steps.Plan(gpus=()))
