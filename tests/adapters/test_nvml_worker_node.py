"""The GPU worker and its client on a simulated node: what its driver does to them."""

import contextlib
import os
import pathlib
import re
import subprocess
from collections.abc import Callable, Iterator

import pytest

from mig_manager import errors
from mig_manager.adapters.host import subprocesses
from mig_manager.adapters.nvml import client as nvml_worker
from mig_manager.core import model, steps
from mig_manager.sandbox.driver import library as simulated
from testkit import nvml_faults
from tests.adapters import nvml_rig, proc_tree, processes


@pytest.fixture(autouse=True)
def _leaves_nothing_behind() -> Iterator[None]:
    with processes.leaving_nothing_behind():
        yield


@pytest.fixture
def state(tmp_path: pathlib.Path) -> Iterator[nvml_faults.SharedState]:
    path = tmp_path / "state"
    simulated.create("2xa100-sxm4-40gb", path)
    with contextlib.closing(nvml_faults.SharedState(path)) as state:
        yield state


def simulating(
    state: nvml_faults.SharedState, *, timeout_s: float = 60.0
) -> nvml_worker.WorkerGpus:
    command = nvml_worker.worker_command(simulate_state=str(state.path), in_use_timeout_s=0.0)
    return nvml_worker.WorkerGpus(command=command, timeout_s=timeout_s)


def switch_on(gpu: model.Gpu) -> steps.Plan:
    return nvml_rig.plan_of([gpu], nvml_rig.mode_step(gpu, nvml_rig.ON))


def test_a_node_is_observed_and_changed_through_workers(state: nvml_faults.SharedState) -> None:
    gpus = simulating(state)
    gpus.execute(switch_on(gpus.observe()[1]))
    assert [gpu.current_mode for gpu in gpus.observe()] == [
        model.MigMode.DISABLED,
        model.MigMode.ENABLED,
    ]


def test_a_step_that_fails_in_a_worker_is_reported_in_full(state: nvml_faults.SharedState) -> None:
    gpus = simulating(state)
    gpu = gpus.observe()[0]
    state.add_client(gpu.uuid, name="python3", pid=4711)
    with pytest.raises(errors.HardwareError, match=r"in use by python3 \(pid 4711\)") as caught:
        gpus.execute(switch_on(gpu))
    assert caught.value.reason is errors.Reason.IN_USE
    assert caught.value.operation == "nvmlDeviceSetMigMode"


def hang(
    state: nvml_faults.SharedState,
    fault: nvml_faults.Fault,
    gpus: Callable[[float], nvml_worker.WorkerGpus],
) -> tuple[errors.HardwareError, float]:
    """Observe with a fault that hangs; return what is expected, and the deadline it was given."""
    for timeout_s in (3.0, 6.0, 12.0, 24.0):
        state.add_fault(fault)
        with pytest.raises(errors.HardwareError) as caught:
            gpus(timeout_s).observe()
        (armed,) = state.faults()
        state.clear_faults()
        if armed.fired == fault.count:
            return caught.value, timeout_s
        # This machine is slow now: the time was up before the function was reached.
    pytest.fail("the function was never reached")


def test_a_driver_that_hangs_is_given_up_at_the_deadline(state: nvml_faults.SharedState) -> None:
    gpu = simulating(state).observe()[1]
    fault = nvml_faults.Fault(function="nvmlDeviceGetMigMode", gpu=1, hang_s=600.0)
    error, _ = hang(state, fault, lambda s: simulating(state, timeout_s=s))
    assert error.reason is errors.Reason.NVML_TIMEOUT
    assert error.operation == "nvmlDeviceGetMigMode"
    assert error.gpu == f"GPU 1 ({gpu.uuid})"
    expected = re.fullmatch(
        rf"nvmlDeviceGetMigMode on GPU 1 \({gpu.uuid}\) has not returned for ([\d.]+) s; "
        "the GPU worker was killed",
        error.message,
    )
    assert expected, error.message
    assert 0.0 < float(expected[1]) < fault.hang_s
    assert len(simulating(state).observe()) == 2


@pytest.mark.slow
def test_every_gpu_that_hangs_is_named(state: nvml_faults.SharedState) -> None:
    fault = nvml_faults.Fault(function="nvmlDeviceGetMigMode", hang_s=600.0, count=2)
    error, _ = hang(state, fault, lambda s: simulating(state, timeout_s=s))
    for index in range(2):
        assert f"nvmlDeviceGetMigMode on GPU {index} (GPU-" in error.message
    assert error.message.count("has not returned for") == 1


def test_processes_that_have_the_hung_gpu_open_are_named_without_asking_the_driver(
    state: nvml_faults.SharedState, tmp_path: pathlib.Path
) -> None:
    proc = proc_tree.ProcTree(tmp_path / "proc")
    proc.add(
        *(88, "/dev/nvidiactl", "/dev/nvidia1"),
        name="nv-hostengine",
        cgroup="0::/system.slice/nvidia-dcgm.service",
    )
    proc.add(89, "/dev/nvidia0", name="another")
    proc.add(90, "/dev/nvidia1", name="listener", parent=os.getpid())
    # Not read, since the driver serves it: a pipe without a writer would hang us.
    proc.add_capabilities(1, {"gi1": 30})
    access = proc.root / "driver/nvidia/capabilities/gpu1/mig/gi1/access"
    access.unlink()
    os.mkfifo(access)
    command = nvml_worker.worker_command(simulate_state=str(state.path), proc_root=str(proc.root))
    error, _ = hang(
        state,
        nvml_faults.Fault(function="nvmlDeviceGetMigMode", gpu=1, hang_s=600.0),
        lambda s: nvml_worker.WorkerGpus(command=command, timeout_s=s, proc_root=proc.root),
    )
    assert error.message.endswith(
        "the GPU worker was killed; "
        f"{error.gpu} is open in nv-hostengine (pid 88, unit nvidia-dcgm.service), "
        "and maybe in others that cannot be seen from here"
    )


def test_a_driver_that_crashes_takes_only_the_worker_along(state: nvml_faults.SharedState) -> None:
    state.add_fault(nvml_faults.Fault(function="nvmlDeviceSetMigMode", crashes=True))
    gpus = simulating(state)
    gpu = gpus.observe()[0]
    with pytest.raises(errors.HardwareError) as caught:
        gpus.execute(switch_on(gpu))
    assert caught.value.message == (
        f"the GPU worker was killed by SIGABRT in nvmlDeviceSetMigMode on GPU 0 ({gpu.uuid})"
    )
    assert caught.value.reason is errors.Reason.NVML_ERROR
    assert caught.value.operation == "nvmlDeviceSetMigMode"
    assert caught.value.gpu == f"GPU 0 ({gpu.uuid})"
    gpus.execute(switch_on(gpus.observe()[0]))


def test_a_missing_driver_is_a_typed_error(tmp_path: pathlib.Path) -> None:
    with pytest.raises(errors.HardwareError) as caught:
        simulating(nvml_faults.SharedState(tmp_path / "none")).observe()
    assert caught.value.reason is errors.Reason.DRIVER_NOT_LOADED


def test_a_request_whose_parent_is_gone_is_not_carried_out(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "node.json"
    simulated.create("1xA30", path)
    nvml_faults.SharedState(path).log_calls()

    def ask(*, is_read: bool) -> int:
        with subprocess.Popen(  # noqa: S603 - our own program
            nvml_worker.worker_command(simulate_state=str(path)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            if not is_read:
                process.stdout.close()
            process.stdin.write(subprocesses._encoded(("observe",)))
            process.stdin.close()
            return process.wait(60)

    assert ask(is_read=False) == 1
    assert nvml_faults.read_calls(path) == ()
    assert ask(is_read=True) == 0
    assert nvml_faults.read_calls(path) != ()
