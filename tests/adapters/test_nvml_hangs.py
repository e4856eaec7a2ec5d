"""Whichever NVML function hangs, it is named in time, and the next call finds a clean slate."""

import dataclasses
import gc
import pathlib
import threading
import time
from collections.abc import Callable

import pytest

from mig_manager import errors
from mig_manager.adapters.nvml import client as nvml_worker
from testkit import nvml_faults
from tests.adapters import nvml_rig, proc_tree, processes

HANG_S = 600.0
FIRST_DEADLINE_S = 2.0
LAST_DEADLINE_S = 30.0


@dataclasses.dataclass(frozen=True)
class Resources:
    """What this process could leave behind."""

    descriptors: frozenset[str]
    threads: frozenset[threading.Thread]
    children: frozenset[int]


def resources() -> Resources:
    # An error that was caught may keep a simulated node of ours, which has a descriptor.
    gc.collect()
    return Resources(
        descriptors=frozenset(processes.descriptors()),
        threads=frozenset(threading.enumerate()),
        children=frozenset(processes.children()),
    )


class Node:
    """One simulated GPU with instances, and workers that change everything on it and back."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        proc = proc_tree.ProcTree(folder / "proc")
        with nvml_rig.rig(folder / "state") as node:
            self.before = node.fill("1g.5gb", "3g.20gb")
        self.state = nvml_faults.SharedState(folder / "state")
        self._command = nvml_worker.worker_command(
            simulate_state=str(folder / "state"), in_use_timeout_s=0.0, proc_root=str(proc.root)
        )

    def gpus(self, *, timeout_s: float = 60.0) -> nvml_worker.WorkerGpus:
        return nvml_worker.WorkerGpus(command=self._command, timeout_s=timeout_s)

    def observe(self, gpus: nvml_worker.WorkerGpus) -> None:
        assert nvml_rig.names(gpus.observe()[0])

    def execute(self, gpus: nvml_worker.WorkerGpus) -> None:
        gpus.execute(nvml_rig.everything(self.before))

    def find_the_gpu_in_use(self, gpus: nvml_worker.WorkerGpus) -> None:
        """Execute what a process in a GPU instance forbids; NVML is asked who it is."""
        refusal = None
        try:
            gpus.execute(nvml_rig.plan_of([self.before], *nvml_rig.end_steps(self.before)))
        except errors.HardwareError as error:
            if error.reason is not errors.Reason.IN_USE:
                raise
            refusal = error
        assert refusal is not None
        assert "in use by python3 (pid 4711" in refusal.message

    def functions(self, act: Callable[[nvml_worker.WorkerGpus], None]) -> list[str]:
        """Return the C functions that an act calls in peace."""
        self.state.log_calls(is_on=True)
        act(self.gpus())
        self.state.log_calls(is_on=False)
        return sorted({call.function for call in nvml_faults.read_calls(self.state.path)})

    def restore(self) -> None:
        """Bring the GPU back to where it was."""
        self.state.update(lambda _: (self._start, None))

    def keep(self) -> None:
        """Take this state as the one to restore."""
        self._start = self.state.read()


def named(function: str) -> str:
    """Return what the binding calls a C function; it hides most versions."""
    name = {"nvmlInitWithFlags": "nvmlInit"}.get(function, function)
    return name.partition("_v")[0]


def hang(
    node: Node, function: str, act: Callable[[nvml_worker.WorkerGpus], None]
) -> errors.HardwareError:
    """Have a function hang once; return what is said of it."""
    deadline_s = FIRST_DEADLINE_S
    while True:
        node.restore()
        node.state.add_fault(nvml_faults.Fault(function=function, hang_s=HANG_S))
        since = time.monotonic()
        with pytest.raises(errors.HardwareError) as caught:
            act(node.gpus(timeout_s=deadline_s))
        assert time.monotonic() - since < deadline_s + 5.0
        if any(armed.fired for armed in node.state.faults()):
            return caught.value
        # This machine is slow now: the time was up before the function was reached.
        assert deadline_s < LAST_DEADLINE_S
        deadline_s *= 2


def check(node: Node, function: str, act: Callable[[nvml_worker.WorkerGpus], None]) -> None:
    """Have a function hang, and look at everything that is left."""
    before = resources()
    error = hang(node, function, act)
    assert resources() == before
    assert error.reason is errors.Reason.NVML_TIMEOUT
    assert error.operation.partition("_v")[0] == named(function)
    assert error.message.startswith(error.operation)
    assert " has not returned for " in error.message
    # Nothing is known of a GPU before it is asked for, and the session is no GPU's.
    is_of_gpu = function not in {"nvmlInitWithFlags", "nvmlShutdown", "nvmlDeviceGetCount_v2"}
    assert error.gpu.startswith("GPU 0") is is_of_gpu
    # What hung is over: with the same state the act goes through.
    node.state.clear_faults()
    gpus = node.gpus()
    gpus.observe()
    node.restore()
    act(gpus)
    assert resources() == before


ACTS = [
    pytest.param("observe", 23, id="observing"),
    pytest.param("execute", 20, id="changing"),
    pytest.param("find_the_gpu_in_use", 15, id="in use"),
]


def prepared(folder: pathlib.Path, act: str) -> Node:
    node = Node(folder)
    if act == "find_the_gpu_in_use":
        (uuid, *_) = node.before.mig_uuids
        node.state.add_client(uuid, name="python3", pid=4711)
    node.keep()
    return node


@pytest.mark.parametrize(
    ("act", "function"),
    [
        pytest.param("observe", "nvmlInitWithFlags"),
        pytest.param("execute", "nvmlGpuInstanceDestroy"),
    ],
)
def test_a_function_that_hangs_is_named_and_nothing_is_left(
    act: str, function: str, tmp_path: pathlib.Path
) -> None:
    node = prepared(tmp_path, act)
    check(node, function, getattr(node, act))


@pytest.mark.slow
@pytest.mark.parametrize(("act", "at_least"), ACTS)
def test_each_function_that_hangs_is_named_and_nothing_is_left(
    act: str, at_least: int, tmp_path: pathlib.Path
) -> None:
    node = prepared(tmp_path, act)
    functions = node.functions(getattr(node, act))
    node.restore()
    assert len(functions) >= at_least
    for function in functions:
        check(node, function, getattr(node, act))
