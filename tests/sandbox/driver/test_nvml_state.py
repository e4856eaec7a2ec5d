"""The simulated node between processes, between threads, over faults and over reboots."""

import concurrent.futures
import contextlib
import itertools
import os
import pathlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pynvml
import pytest

from mig_manager import errors
from mig_manager.sandbox.driver import simulated_nvml, state_file, states
from testkit import nvml_faults
from tests.rigs.node import nvml_rig

OPENING = """
import pathlib, sys, pynvml
from mig_manager.sandbox.driver import simulated_nvml
simulated_nvml.install(pathlib.Path(sys.argv[1]))
pynvml.nvmlInit()
device = pynvml.nvmlDeviceGetHandleByIndex(0)
"""
CREATE = "nvmlDeviceCreateGpuInstance"


@pytest.fixture
def path(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Name a state file in a folder that is still to be made."""
    yield tmp_path / "node" / "state.json"
    simulated_nvml.load(None)


def boot(
    path: pathlib.Path, spec: str = "A100", *, logs_calls: bool = False, **options: Any
) -> nvml_faults.SharedState:
    """Boot a node, open NVML on it and switch MIG on everywhere."""
    state_file.SharedState(path).create(spec, options=states.Options(**options))
    library = nvml_faults.install(path)
    library.state.log_calls(is_on=logs_calls)
    pynvml.nvmlInit()
    for index in range(pynvml.nvmlDeviceGetCount()):
        nvml_rig.gpu_with_mig(index)
    return library.state


def start(path: pathlib.Path, body: str) -> subprocess.Popen[bytes]:
    """Start another process on the same node."""
    return subprocess.Popen([sys.executable, "-c", OPENING + body, str(path)])  # noqa: S603 - our own interpreter


def create(index: int = 0, profile_id: int = 19) -> Any:
    return pynvml.nvmlDeviceCreateGpuInstance(nvml_rig.handle(index), profile_id)


def created_at_once(path: pathlib.Path, *gpus: int) -> list[nvml_faults.Call]:
    """Create an instance on each GPU at once; return the calls as the driver began them."""
    ready = threading.Barrier(len(gpus))

    def one(index: int) -> None:
        ready.wait()
        create(index)

    with concurrent.futures.ThreadPoolExecutor(len(gpus)) as pool:
        tuple(pool.map(one, gpus))
    calls = [call for call in nvml_faults.read_calls(path) if call.function == CREATE]
    return sorted(calls, key=lambda call: call.entered_ns)


def test_create_keeps_an_equal_node_and_refuses_a_different_one(path: pathlib.Path) -> None:
    boot(path, "2xA30", seed="first")
    before = path.read_bytes()
    state_file.SharedState(path).create("2xA30", options=states.Options(seed="second"))
    with pytest.raises(errors.UsageError, match="2xA30"):
        state_file.SharedState(path).create("4xA30")
    assert path.read_bytes() == before


def test_state_survives_the_file_and_seeds_determine_the_uuids(
    path: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    state = boot(
        path,
        "2xA100",
        latency=states.Latency(query_s=0.001),
        absent_functions=("nvmlX",),
        swapped_gpus=(1,),
        linked_gpus=((0, 1),),
        mig_events=states.MigEvents.NEVER,
    )
    pynvml.nvmlGpuInstanceCreateComputeInstance(create(profile_id=9), 0)
    uuid = pynvml.nvmlDeviceGetUUID(nvml_rig.handle())
    state.add_client(uuid, name="train")
    state.add_fault(nvml_faults.Fault(function="x*", gpu=1, first=2, count=None, code=19))
    assert nvml_faults.SharedState(path).faults() == state.faults()
    assert nvml_faults.SharedState(path).read() == state.read()
    boot(tmp_path / "other", "2xA100", seed="b")
    assert pynvml.nvmlDeviceGetUUID(nvml_rig.handle()) != uuid


@pytest.mark.slow
def test_processes_change_one_gpu_concurrently_and_lose_nothing(path: pathlib.Path) -> None:
    state = boot(path, logs_calls=True)
    create()
    assert state.read() is state.read()
    events = pynvml.nvmlEventSetCreate()
    pynvml.nvmlDeviceRegisterEvents(nvml_rig.handle(), pynvml.nvmlEventMigConfigChange, events)
    body = f"""
assert pynvml.nvmlDeviceGetGpuInstanceById(device, 13)
for _ in range(2): pynvml.{CREATE}(device, 19)
"""
    running = [start(path, body) for _ in range(3)]
    for _ in range(6):
        assert pynvml.nvmlEventSetWait_v2(events, 60_000)
    assert [process.wait() for process in running] == [0, 0, 0]
    instances = state.read().gpus[0].instances
    assert len({instance.serial for instance in instances}) == 7
    assert len({instance.placement for instance in instances}) == 7
    pids = {call.pid for call in nvml_faults.read_calls(path)}
    assert pids == {os.getpid(), *(process.pid for process in running)}
    with pytest.raises(pynvml.NVMLError_InsufficientResources):
        create()


def test_a_reader_is_not_given_the_older_state_of_another_thread(path: pathlib.Path) -> None:
    boot(path)
    first_has_opened, first_may_end = threading.Event(), threading.Event()

    class Overtaken(pathlib.PosixPath):
        """The file whose first reader goes on only when the second one has read it."""

        @contextlib.contextmanager
        def open(self, *_args: Any, **_kwargs: Any) -> Iterator[Any]:  # type: ignore[override]
            with path.open(encoding="utf-8") as file:
                if threading.current_thread() is first:
                    first_has_opened.set()
                    assert first_may_end.wait(60)
                yield file
            if threading.current_thread() is not first:
                first_may_end.set()
                first.join()

    state = nvml_faults.SharedState(Overtaken(path))
    first = threading.Thread(target=state.read)
    first.start()
    assert first_has_opened.wait(60)
    create()
    assert len(state.read().gpus[0].instances) == 1


@pytest.mark.parametrize(
    ("gpus", "is_one_lock", "is_overlapping"),
    [((0, 1), False, True), ((0, 0, 0), False, False), ((0, 1), True, False)],
    ids=["two GPUs", "one GPU", "two GPUs under one lock"],
)
def test_changes_on_two_gpus_overlap_unless_all_have_one_lock(
    path: pathlib.Path, gpus: tuple[int, ...], *, is_one_lock: bool, is_overlapping: bool
) -> None:
    seconds = 1.0 if is_overlapping else 0.05
    latency = states.Latency(create_gpu_instance_s=seconds)
    boot(path, "2xA100", latency=latency, logs_calls=True, serialise_all_gpus=is_one_lock)
    calls = created_at_once(path, *gpus)
    assert len(calls) == len(gpus)
    for first, second in itertools.pairwise(calls):
        assert ((second.entered_ns - first.entered_ns) / 1e9 < seconds) is is_overlapping


def test_a_refused_call_takes_no_simulated_time(path: pathlib.Path) -> None:
    boot(path, latency=states.Latency(create_gpu_instance_s=60.0))
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        create(profile_id=nvml_rig.UNKNOWN)


@pytest.mark.parametrize(
    ("product", "mode"), [("A100", [1, 1]), ("H100", [0, 0]), ("RTX-PRO-6000", [0, 0])]
)
def test_reboot_ends_instances_and_clients_and_modes_that_do_not_persist(
    path: pathlib.Path, product: str, mode: list[int]
) -> None:
    state = boot(path, product)
    create(profile_id=0)
    state.add_client(pynvml.nvmlDeviceGetUUID(nvml_rig.handle()), name="train")
    boot_id = state.boot_id
    assert state.boot_id == boot_id
    state.reboot()
    assert pynvml.nvmlDeviceGetMigMode(nvml_rig.handle()) == mode
    assert state.read().gpus[0].instances == ()
    assert state.read().clients == ()
    assert state.boot_id != boot_id


def test_a_thread_never_reads_half_of_a_state(path: pathlib.Path) -> None:
    state = boot(path)
    stop = threading.Event()

    def read() -> int:
        most = 0
        while not stop.is_set():
            most = max(most, len(nvml_faults.SharedState(path).read().gpus[0].instances))
        return most

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        for _ in range(30):
            pynvml.nvmlGpuInstanceDestroy(create(profile_id=0))
        stop.set()
        assert reading.result(timeout=60) <= 1
    assert state.read().gpus[0].instances == ()
