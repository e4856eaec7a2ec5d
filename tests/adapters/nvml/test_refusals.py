"""Steps that the driver refuses: on what is in use, and mode changes without effect."""

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

import pynvml
import pytest

from mig_manager import reasons
from mig_manager.core import model
from mig_manager.sandbox.driver import states
from testkit import nvml_faults
from tests.rigs import layout_table
from tests.rigs.node.gpu_values import ci_step, gi_step, mode_step
from tests.rigs.node.nvml_rig import OFF, ON, Boot, NvmlRig, end_steps

# -- instances in use -------------------------------------------------------------------------


def test_a_step_on_an_instance_in_use_is_retried_until_it_is_idle(rig: NvmlRig) -> None:
    gpu = rig.fill("1g.5gb")
    client = rig.state.add_client(gpu.mig_uuids[0], name="/usr/bin/python3")
    waits: list[float] = []

    def leave_after_three_seconds() -> None:
        waits.append(rig.clock.now_s)
        if rig.clock.now_s > 3.0:
            rig.state.remove_client(client)

    rig.clock.on_wait.append(leave_after_three_seconds)
    rig.execute(*end_steps(gpu))
    assert rig.observe().gpu_instances == ()
    pauses = [after - before for before, after in zip([0.0, *waits], waits, strict=False)]
    assert pauses == sorted(pauses)
    assert max(pauses) <= 1.0


def test_an_instance_that_stays_in_use_is_an_error_that_names_the_process(boot: Boot) -> None:
    rig = boot(in_use_timeout_s=10.0)
    gpu = rig.fill("1g.5gb", "2g.10gb")
    first, second = gpu.gpu_instances
    rig.state.add_client(first.compute_instances[0].uuid or "", name="train.py", pid=4711)
    rig.state.add_client(second.compute_instances[0].uuid or "", name="other", pid=4712)
    error = rig.refusal(*end_steps(gpu))
    assert 10.0 <= rig.clock.now_s <= 12.0
    assert error.message == (
        f"GPU 0 ({gpu.uuid}): cannot destroy compute instance 1g.5gb (instance "
        f"{first.instance_id}/0, {first.compute_instances[0].uuid}): "
        "nvmlComputeInstanceDestroy answered 'In use by another client'; "
        f"in use by train.py (pid 4711, GPU instance {first.instance_id})"
    )
    assert error.reason is reasons.Reason.IN_USE
    assert error.operation == "nvmlComputeInstanceDestroy"
    assert error.code == pynvml.NVML_ERROR_IN_USE


@pytest.mark.parametrize("spec", ["a100-sxm4-40gb", "h100-sxm5-80gb"])
def test_a_mode_change_is_retried_until_the_gpu_is_idle(spec: str, boot: Boot) -> None:
    rig = boot(spec)
    gpu = rig.observe()
    client = rig.state.add_client(gpu.uuid, name="python3")
    rig.clock.on_wait.append(lambda: rig.state.remove_client(client))
    assert rig.enable().current_mode is ON


def test_an_explanation_that_several_gpus_share_is_written_once(boot: Boot) -> None:
    rig = boot("2xA100-SXM4-40GB", in_use_timeout_s=0.0)
    gpus = rig.gpus.observe()
    for gpu in gpus:
        rig.state.add_client(gpu.uuid, name="dcgm", kind=states.ClientKind.MONITOR)
    error = rig.refusal(*[mode_step(gpu, ON) for gpu in gpus])
    assert all(gpu.uuid in error.message for gpu in gpus)
    assert error.message.count("NVML lists no process") == 1
    assert rig.clock.now_s == 0.0


def test_the_bound_on_waiting_is_for_the_gpu_and_not_for_each_step(boot: Boot) -> None:
    rig = boot(in_use_timeout_s=10.0)
    gpu = rig.fill("1g.5gb", "1g.5gb")
    first = rig.state.add_client(gpu.mig_uuids[0], name="a")
    rig.state.add_client(gpu.mig_uuids[1], name="b")

    def leave_after_eight_seconds() -> None:
        if rig.clock.now_s > 8.0:
            rig.state.remove_client(first)

    rig.clock.on_wait.append(leave_after_eight_seconds)
    assert "in use by b" in rig.refusal(*end_steps(gpu)).message
    assert rig.clock.now_s <= 12.0


# -- mode changes without effect --------------------------------------------------------------


PENDING = {
    model.Virtualization.NONE: (
        reasons.Reason.RESET_REQUIRED,
        "answered 'GPU requires restart', yet the mode waits for a reset",
    ),
    model.Virtualization.PASSTHROUGH: (
        reasons.Reason.REBOOT_REQUIRED,
        "inside which no reset can help, only a reboot of it",
    ),
}


def with_activation_status(status: int) -> Mapping[str, nvml_faults.Alteration]:
    """Have a mode change do its work and give this activation status."""

    def switch(call: Callable[..., int], device: Any, mode: Any, answer: Any) -> int:
        code = call(device, mode, answer)
        ctypes.cast(answer, ctypes.POINTER(ctypes.c_uint)).contents.value = status
        return code

    return {"nvmlDeviceSetMigMode": switch}


@pytest.mark.parametrize("virtualization", PENDING)
@pytest.mark.parametrize("status", [None, pynvml.NVML_SUCCESS, pynvml.NVML_ERROR_NOT_SUPPORTED])
def test_pending_mode_is_an_error_whatever_the_activation_status(
    status: int | None,
    virtualization: model.Virtualization,
    boot: Boot,
) -> None:
    rig = boot(
        options=states.Options(resets_itself=False, virtualization=virtualization),
        alterations=None if status is None else with_activation_status(status),
    )
    error = rig.refusal(mode_step(rig.observe(), ON))
    gpu = rig.observe()
    assert (gpu.current_mode, gpu.pending_mode) == (OFF, ON)
    assert rig.clock.now_s == 0.0
    reason, why = PENDING[virtualization]
    assert (error.reason, error.operation) == (reason, "nvmlDeviceSetMigMode")
    if status is None:
        assert error.code == pynvml.NVML_ERROR_RESET_REQUIRED
        assert error.message.endswith(why)


def test_an_active_mode_is_success_whatever_the_activation_status(boot: Boot) -> None:
    rig = boot(alterations=with_activation_status(pynvml.NVML_ERROR_IN_USE))
    assert rig.enable().current_mode is ON
    assert rig.clock.now_s == 0.0


def test_success_that_changes_nothing_is_an_error_without_a_reset(boot: Boot) -> None:
    rig = boot(alterations={"nvmlDeviceSetMigMode": lambda *_: pynvml.NVML_SUCCESS})
    error = rig.refusal(mode_step(rig.observe(), ON))
    assert "neither active nor pending" in error.message
    assert error.reason is reasons.Reason.VERIFY_FAILED


def test_the_error_of_a_vgpu_guest_says_that_its_host_decides(boot: Boot) -> None:
    rig = boot(options=states.Options(virtualization=model.Virtualization.VGPU))
    error = rig.refusal(mode_step(rig.observe(), ON))
    assert "up to its host" in error.message
    assert error.reason is reasons.Reason.NOT_SUPPORTED


def test_a_gpu_that_a_mode_change_attaches_again_is_found(boot: Boot) -> None:
    rig = boot(options=states.Options(reattaches=True))
    gpu = rig.observe()
    create = gi_step(gpu, "7g.40gb")
    rig.execute(mode_step(gpu, ON), create, ci_step(create, "7g.40gb"))
    after = rig.observe()
    assert layout_table.gpu_in_words(after) == "7g.40gb@0"
    assert (after.index, after.uuid) == (gpu.index, gpu.uuid)


def test_a_pending_mode_is_withdrawn_by_asking_for_the_current_one(boot: Boot) -> None:
    rig = boot(in_use_timeout_s=0.0)
    gpu = rig.observe()
    rig.state.add_client(gpu.uuid, name="dcgm", kind=states.ClientKind.MONITOR)
    rig.refusal(mode_step(gpu, ON))
    rig.execute(mode_step(gpu, OFF))
    gpu = rig.observe()
    assert (gpu.current_mode, gpu.pending_mode) == (OFF, OFF)
