"""Resets of simulated GPUs: by the driver itself, by the stand-in ``nvidia-smi``, by a reboot."""

import re
from collections.abc import Collection
from typing import Any

import pynvml
import pytest

from mig_manager import errors, reasons
from mig_manager.adapters import host
from mig_manager.adapters.nvml import nvml_gpus
from mig_manager.core import model
from mig_manager.sandbox.driver import resets, states
from testkit import nvidia_smi, nvml_faults
from tests.rigs.node import nvml_rig

FIRST, SECOND = "00000000:07:00.0", "00000000:0F:00.0"


@pytest.mark.parametrize(
    ("options", "status", "text"),
    [
        ({"virtualization": model.Virtualization.PASSTHROUGH}, 3, f"GPU {FIRST} is not supp"),
        ({"virtualization": model.Virtualization.VGPU}, 3, f"GPU {FIRST} is not supported."),
        ({"permitted": False}, 4, "Insufficient Permissions"),
        ({"linked_gpus": ((0, 2),)}, 3, "00000000:17:00.0"),
        ({}, 255, f"could not be reset:\n  GPU {SECOND}: In use by another client\n\n1 device is"),
    ],
    ids=["virtual machine", "vGPU guest", "no permission", "linked", "in use"],
)
def test_a_reset_is_refused_for_all_named_gpus_as_on_a_real_machine(
    options: dict[str, object],
    status: int,
    text: str,
    start: nvml_rig.Start,
    capsys: pytest.CaptureFixture[str],
) -> None:
    library = start("3xA100", **options)
    if not options:
        uuid = pynvml.nvmlDeviceGetUUID(nvml_rig.handle(1))
        library.state.add_client(uuid, name="dcgm", kind=states.ClientKind.MONITOR)
    before = library.state.read()

    exit_status = nvidia_smi.main([str(library.state.path), "-r", "-i", f"{FIRST},{SECOND}"])

    assert (exit_status, text in capsys.readouterr().out) == (status, True)
    assert library.state.read() == before


def test_a_handle_and_a_minor_number_last_until_the_gpu_is_attached_again(
    start: nvml_rig.Start,
) -> None:
    library = start("2xA100", reattaches=True)
    first, second = nvml_rig.handle(0), nvml_rig.handle(1)
    minor = pynvml.nvmlDeviceGetMinorNumber(first)
    assert pynvml.nvmlDeviceSetMigMode(first, 1) == pynvml.NVML_SUCCESS

    assert nvml_rig.refusal(pynvml.nvmlDeviceGetMigMode, first) == "INVALID_ARGUMENT"
    assert pynvml.nvmlDeviceGetMigMode(second) == [0, 0]
    assert pynvml.nvmlDeviceGetMigMode(nvml_rig.handle(0)) == [1, 1]
    again = pynvml.nvmlDeviceGetMinorNumber(nvml_rig.handle(0))
    assert again not in (minor, pynvml.nvmlDeviceGetMinorNumber(second))
    assert library.state.reset_gpu(1) is states.Code.SUCCESS
    assert nvml_rig.refusal(pynvml.nvmlDeviceGetUUID, second) == "INVALID_ARGUMENT"


# -- the reset of ``--simulate`` --------------------------------------------------------------


def ignore(uuids: Collection[str], *, is_on: bool) -> None:
    raise AssertionError(f"persistence mode of {uuids}: {is_on}")


def reset_and_gpu(library: nvml_faults.CountingLibrary) -> tuple[resets.SimulatedReset, model.Gpu]:
    """Return the port, and the first GPU as the programs see it."""
    (gpu, *_) = nvml_gpus.NvmlGpus(clock=host.SystemClock()).observe()
    return resets.SimulatedReset(library.state), gpu


def test_a_repair_by_the_port_ends_the_fault_and_the_instances(start: nvml_rig.Start) -> None:
    library = start("2xA100")
    nvml_rig.create_instances(nvml_rig.gpu_with_mig())
    library.state.fail_gpu(0, action=1)
    reset, gpu = reset_and_gpu(library)

    with pytest.raises(errors.HostError, match="no change of its MIG mode is pending"):
        reset.reset([gpu], ignore)
    reset.reset([gpu], ignore, is_repair=True)

    after = library.state.read().gpus[0]
    assert (after.recovery_action, after.instances, after.is_enabled) == (0, (), True)


@pytest.mark.parametrize(
    ("options", "reason", "words"),
    [
        ({}, reasons.Reason.IN_USE, "in use by train (pid 4711)"),
        ({"permitted": False}, reasons.Reason.NO_PERMISSION, "NO_PERMISSION"),
        ({"linked_gpus": ((0, 1),)}, reasons.Reason.REBOOT_REQUIRED, "NOT_SUPP"),
    ],
)
def test_a_refusal_of_the_port_has_its_reason_and_changes_nothing(
    start: nvml_rig.Start,
    options: dict[str, Any],
    reason: reasons.Reason,
    words: str,
) -> None:
    library = start("2xA100", **options)
    reset, gpu = reset_and_gpu(library)
    library.state.fail_gpu(0, action=1)
    if reason is reasons.Reason.IN_USE:
        library.state.add_client(gpu.uuid, name="train", pid=4711)

    with pytest.raises(errors.HostError, match=re.escape(words)) as refused:
        reset.reset([gpu], ignore, is_repair=True)

    assert refused.value.reason is reason
    assert library.state.read().gpus[0].recovery_action == 1
