"""Workers on a simulated node: what its driver does to them, and that nothing is left of them."""

import gc
import itertools
import os
import pathlib
import re
import subprocess
from collections.abc import Callable

import pytest

from mig_manager import errors, reasons
from mig_manager.adapters.host import worker_messages
from mig_manager.adapters.nvml import worker_client
from mig_manager.core import model, steps
from mig_manager.sandbox.driver import simulated_worker
from testkit import nvml_faults
from tests.rigs.host import proc_tree, processes
from tests.rigs.node import gpu_values, nvml_rig

pytestmark = pytest.mark.usefixtures("leaves_nothing_behind")


class WorkerNode:
    """Simulated GPUs, the first with instances, and workers for them."""

    def __init__(self, folder: pathlib.Path, spec: str) -> None:
        self.proc = proc_tree.ProcTree(folder / "proc")
        with nvml_rig.booted(folder / "state", spec) as rig:
            self.before = rig.fill("1g.5gb", "3g.20gb")
        self.state = nvml_faults.SharedState(folder / "state")
        self._start = self.state.read()
        self.command = worker_client.worker_command(
            program=simulated_worker.program(self.state.path),
            in_use_timeout_s=0.0,
            proc_root=self.proc.root,
        )

    def gpus(self, *, timeout_s: float = 60.0) -> worker_client.WorkerGpus:
        return worker_client.WorkerGpus(
            command=self.command, timeout_s=timeout_s, proc_root=self.proc.root
        )

    def restore(self) -> None:
        self.state.update(lambda _: self._start)


@pytest.fixture
def node(tmp_path: pathlib.Path, spec: str) -> WorkerNode:
    return WorkerNode(tmp_path, spec)


@pytest.fixture
def spec() -> str:
    return "2xa100-sxm4-40gb"


with_one_gpu = pytest.mark.parametrize("spec", ["a100-sxm4-40gb"], ids=["one GPU"])


def switch_on(gpu: model.Gpu) -> steps.Plan:
    return nvml_rig.plan_of([gpu], gpu_values.mode_step(gpu, nvml_rig.ON))


@pytest.mark.slow
def test_a_driver_that_crashes_takes_only_the_worker_along(node: WorkerNode) -> None:
    node.state.add_fault(nvml_faults.Fault(function="nvmlDeviceSetMigMode", crashes=True))
    gpus = node.gpus()
    gpu = gpus.observe()[1]
    with pytest.raises(errors.HardwareError) as caught:
        gpus.execute(switch_on(gpu))
    assert caught.value.message == (
        f"the GPU worker was killed by SIGABRT in nvmlDeviceSetMigMode on GPU 1 ({gpu.uuid})"
    )
    assert caught.value.reason is reasons.Reason.NVML_ERROR
    assert caught.value.operation == "nvmlDeviceSetMigMode"
    assert caught.value.gpu == f"GPU 1 ({gpu.uuid})"
    gpus.execute(switch_on(gpus.observe()[1]))


@pytest.mark.parametrize("is_simulated", [True, False])
def test_a_missing_driver_is_a_typed_error(tmp_path: pathlib.Path, *, is_simulated: bool) -> None:
    missing = str(tmp_path / "none")
    command = (
        worker_client.worker_command(program=simulated_worker.program(missing))
        if is_simulated
        else worker_client.worker_command(library_path=missing)
    )
    with pytest.raises(errors.HardwareError) as caught:
        worker_client.WorkerGpus(command=command, timeout_s=60.0).observe()
    assert caught.value.reason is reasons.Reason.DRIVER_NOT_LOADED
    assert (missing in caught.value.message) is not is_simulated


def test_a_request_whose_parent_is_gone_is_not_carried_out(node: WorkerNode) -> None:
    node.state.log_calls()

    def ask(*, is_read: bool) -> int:
        with subprocess.Popen(  # noqa: S603 - our own program
            node.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            if not is_read:
                process.stdout.close()
            process.stdin.write(worker_messages.encode(("observe",)))
            process.stdin.close()
            return process.wait(60)

    assert ask(is_read=False) == 1
    assert nvml_faults.read_calls(node.state.path) == ()
    assert ask(is_read=True) == 0
    assert nvml_faults.read_calls(node.state.path) != ()


def test_a_worker_asks_the_driver_less_about_gpus_observed_before(node: WorkerNode) -> None:
    gpus = node.gpus()
    observed = gpus.observe()
    node.state.log_calls()

    def calls(earlier: model.ObservedGpus) -> int:
        before = len(nvml_faults.read_calls(node.state.path))
        gpus.execute(switch_on(observed[0]), earlier)
        return len(nvml_faults.read_calls(node.state.path)) - before

    assert calls(observed) < calls(model.NO_GPUS)


# -- functions that hang ----------------------------------------------------------------------

Act = Callable[[WorkerNode, worker_client.WorkerGpus], object]


def observe(_node: WorkerNode, gpus: worker_client.WorkerGpus) -> None:
    assert gpus.observe()[0].gpu_instances


def execute(node: WorkerNode, gpus: worker_client.WorkerGpus) -> None:
    gpus.execute(nvml_rig.everything(node.before))


def find_users(node: WorkerNode, gpus: worker_client.WorkerGpus) -> None:
    """Execute what a process in a GPU instance forbids; NVML is asked which."""
    node.state.add_client(node.before.mig_uuids[0], name="python3", pid=4711)
    try:
        gpus.execute(nvml_rig.plan_of([node.before], *nvml_rig.end_steps(node.before)))
    except errors.HardwareError as error:
        if "in use by python3 (pid 4711" not in error.message:
            raise
    else:
        pytest.fail("the instance is in use")


def hang(node: WorkerNode, act: Act = observe, **fault: object) -> errors.HardwareError:
    """Have a function hang; return the error of the client that gave it up."""
    hanging = nvml_faults.Fault(hang_s=600.0, **fault)  # type: ignore[arg-type]
    for timeout_s in (2.0, 4.0, 8.0, 16.0, 32.0):
        node.restore()
        node.state.add_fault(hanging)
        with pytest.raises(errors.HardwareError) as caught:
            act(node, node.gpus(timeout_s=timeout_s))
        is_reached = [armed.strikes for armed in node.state.faults()] == [hanging.count]
        node.state.clear_faults()
        # An error that was caught may keep a simulated node of ours, which has a descriptor.
        gc.collect()
        if is_reached:
            return caught.value
        # This machine is slow now: the time was up before the function was reached.
    pytest.fail("the function was never reached")


def check(node: WorkerNode, function: str, act: Act) -> None:
    """Have a function hang; it is named, and with the same state the next act goes through."""
    with processes.leaving_nothing_behind():
        error = hang(node, act, function=function)
    assert error.reason is reasons.Reason.NVML_TIMEOUT
    # The binding hides most versions.
    name = {"nvmlInitWithFlags": "nvmlInit"}.get(function, function)
    assert error.operation.partition("_v")[0] == name.partition("_v")[0]
    # Nothing is known of a GPU before it is asked for, and the session is no GPU's.
    is_of_gpu = function not in {"nvmlInitWithFlags", "nvmlShutdown", "nvmlDeviceGetCount_v2"}
    gpu = f"GPU 0 ({node.before.uuid})" if error.gpu.endswith(")") else "GPU 0"
    assert error.gpu == (gpu if is_of_gpu else "")
    on_gpu = f" on {gpu}" if is_of_gpu else ""
    assert re.fullmatch(
        rf"{error.operation}{re.escape(on_gpu)} has not returned for [\d.]+ s; "
        "the GPU worker was killed",
        error.message,
    )
    gpus = node.gpus()
    gpus.observe()
    node.restore()
    act(node, gpus)


@pytest.mark.slow
@pytest.mark.parametrize(("act", "at_least"), [(observe, 23), (execute, 20), (find_users, 15)])
@with_one_gpu
def test_each_function_that_hangs_is_named_and_nothing_is_left(
    act: Act, at_least: int, node: WorkerNode
) -> None:
    node.state.log_calls(is_on=True)
    act(node, node.gpus())
    node.state.log_calls(is_on=False)
    functions = sorted({call.function for call in nvml_faults.read_calls(node.state.path)})
    assert len(functions) >= at_least
    for function in functions:
        check(node, function, act)


@pytest.mark.slow
def test_every_gpu_that_hangs_is_named(node: WorkerNode) -> None:
    message = hang(node, function="nvmlDeviceGetMigMode", count=2).message
    for index in range(2):
        assert f"nvmlDeviceGetMigMode on GPU {index} (GPU-" in message
    assert message.count("has not returned for") == 1


def test_processes_with_the_hung_gpu_open_are_named_without_nvml(node: WorkerNode) -> None:
    unit = "0::/system.slice/nvidia-dcgm.service"
    node.proc.add(88, "/dev/nvidiactl", "/dev/nvidia1", name="nv-hostengine", cgroup=unit)
    node.proc.add(89, "/dev/nvidia0", name="another")
    node.proc.add(90, "/dev/nvidia1", name="listener", parent=os.getpid())
    users = itertools.chain(*node.gpus().processes().values())
    assert [user.pid for user in users] == [89, 88]
    # Not read, since the driver serves it: a pipe without a writer would hang us.
    node.proc.add_capabilities(1, {"gi1": 30})
    access = node.proc.root / "driver/nvidia/capabilities/gpu1/mig/gi1/access"
    access.unlink()
    os.mkfifo(access)
    error = hang(node, function="nvmlDeviceGetMigMode", gpu=1)
    assert error.message.endswith(
        "the GPU worker was killed; "
        f"{error.gpu} is open in nv-hostengine (pid 88, unit nvidia-dcgm.service), "
        "and maybe in others that cannot be seen from here"
    )
