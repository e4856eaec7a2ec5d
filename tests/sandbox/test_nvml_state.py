"""The simulated node between processes, between threads, over faults and over reboots."""

import concurrent.futures
import itertools
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pynvml
import pytest

from mig_manager import errors
from mig_manager.sandbox.driver import library as simulated
from mig_manager.sandbox.driver import states
from testkit import nvml_faults

OPENING = """
import pathlib, sys, pynvml
from mig_manager.sandbox.driver import library as simulated
simulated.install(pathlib.Path(sys.argv[1]))
pynvml.nvmlInit()
device = pynvml.nvmlDeviceGetHandleByIndex(0)
"""


@pytest.fixture
def path(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Name a state file in a folder that is still to be made."""
    yield tmp_path / "node" / "state.json"
    simulated.uninstall()


def boot(
    path: pathlib.Path, spec: str = "A100", *, logs_calls: bool = False, **options: Any
) -> nvml_faults.SharedState:
    """Boot a node, open NVML on it and switch MIG on everywhere."""
    simulated.create(spec, path, options=states.Options(**options))
    library = nvml_faults.install(path)
    library.state.log_calls(is_on=logs_calls)
    pynvml.nvmlInit()
    for index in range(pynvml.nvmlDeviceGetCount()):
        assert pynvml.nvmlDeviceSetMigMode(gpu(index), 1) == pynvml.NVML_SUCCESS
    return library.state


def gpu(index: int = 0) -> Any:
    return pynvml.nvmlDeviceGetHandleByIndex(index)


def program(path: pathlib.Path, body: str) -> list[str]:
    """Return the command line of another process on the same node."""
    return [sys.executable, "-c", OPENING + body, str(path)]


def create_on(*indices: int) -> None:
    """Create a 1g instance on each GPU, all at once from threads of their own."""
    ready = threading.Barrier(len(indices))

    def create(index: int) -> None:
        ready.wait()
        pynvml.nvmlDeviceCreateGpuInstance(gpu(index), 19)

    with concurrent.futures.ThreadPoolExecutor(len(indices)) as pool:
        tuple(pool.map(create, indices))


def changes(path: pathlib.Path) -> list[nvml_faults.Call]:
    """Return the logged creations, in the order in which the driver began them."""
    calls = [c for c in nvml_faults.read_calls(path) if "CreateGpuInstance" in c.function]
    return sorted(calls, key=lambda call: call.entered_ns)


def test_creating_a_node_again_keeps_it_and_another_in_its_file_is_a_usage_error(
    path: pathlib.Path,
) -> None:
    boot(path, "2xA30", seed="first")
    before = path.read_bytes()
    simulated.create("2xA30", path, options=states.Options(seed="second"))
    with pytest.raises(errors.UsageError, match="2xA30"):
        simulated.create("4xA30", path)
    assert path.read_bytes() == before


def test_state_survives_the_file(path: pathlib.Path) -> None:
    state = boot(
        path,
        "2xA100",
        latency=states.Latency(query_s=0.001),
        absent_functions=("nvmlX",),
        swapped_gpus=(1,),
        linked_gpus=((0, 1),),
    )
    instance = pynvml.nvmlDeviceCreateGpuInstance(gpu(), 9)
    pynvml.nvmlGpuInstanceCreateComputeInstance(instance, 0)
    state.add_client(pynvml.nvmlDeviceGetUUID(gpu()), name="train")
    state.add_fault(nvml_faults.Fault(function="x*", gpu=1, first=2, count=None, code=19))
    assert nvml_faults.SharedState(path).faults() == state.faults()
    assert nvml_faults.SharedState(path).read() == state.read()


def test_nodes_with_other_seeds_have_other_uuids_and_each_is_served_when_installed(
    tmp_path: pathlib.Path,
) -> None:
    seen = set()
    for seed in ("a", "b"):
        simulated.create("A30", tmp_path / seed, options=states.Options(seed=seed))
        nvml_faults.install(tmp_path / seed)
        pynvml.nvmlInit()
        seen.add(pynvml.nvmlDeviceGetUUID(gpu()))
    simulated.uninstall()
    assert len(seen) == 2


def test_another_process_sees_what_this_one_did_and_the_other_way_round(
    path: pathlib.Path,
) -> None:
    state = boot(path)
    pynvml.nvmlDeviceCreateGpuInstance(gpu(), 9)
    assert state.read() is state.read()
    body = "print(pynvml.nvmlDeviceGetGpuInstanceRemainingCapacity(device, 9))\n"
    body += "pynvml.nvmlDeviceCreateGpuInstance(device, 9)"
    done = subprocess.run(program(path, body), capture_output=True, text=True, check=True)  # noqa: S603 - our own interpreter
    assert done.stdout.strip() == "1"
    assert len(state.read().gpus[0].instances) == 2
    assert pynvml.nvmlDeviceGetGpuInstanceRemainingCapacity(gpu(), 9) == 0


def test_process_killed_in_a_hung_call_leaves_gpu_and_state_usable(path: pathlib.Path) -> None:
    state = boot(path)
    state.add_fault(nvml_faults.Fault(function="nvmlDeviceCreateGpuInstance", hang_s=60))
    body = "pynvml.nvmlDeviceCreateGpuInstance(device, 9)"
    with subprocess.Popen(program(path, body)) as process:  # noqa: S603 - our own interpreter
        wait = threading.Event()
        while not state.faults()[0].fired:
            wait.wait(0.01)
        process.kill()
    pynvml.nvmlDeviceCreateGpuInstance(gpu(), 9)
    assert len(state.read().gpus[0].instances) == 1


def test_crash_fault_kills_the_process(path: pathlib.Path) -> None:
    state = boot(path)
    state.add_fault(nvml_faults.Fault(function="nvmlDeviceGetName", crashes=True))
    done = subprocess.run(  # noqa: S603 - our own interpreter
        program(path, "pynvml.nvmlDeviceGetName(device)"), capture_output=True, check=False
    )
    assert done.returncode == -signal.SIGABRT
    assert pynvml.nvmlDeviceGetName(gpu()) == "NVIDIA A100-SXM4-40GB"


def test_faults_strike_the_calls_they_are_for(path: pathlib.Path) -> None:
    state = boot(path, "2xA100")
    state.add_fault(
        nvml_faults.Fault(
            function="nvmlDeviceCreateGpuInstance*", gpu=0, first=2, count=2, code=19
        )
    )
    codes = []
    for _ in range(4):
        pynvml.nvmlDeviceCreateGpuInstance(gpu(1), 19)
        try:
            pynvml.nvmlDeviceCreateGpuInstance(gpu(0), 19)
            codes.append(0)
        except pynvml.NVMLError as error:
            codes.append(error.value)
    assert codes == [0, 19, 19, 0]
    assert (state.faults()[0].seen, state.faults()[0].fired) == (4, 2)
    state.clear_faults()
    assert state.faults() == ()


def test_changes_on_two_gpus_overlap_in_time(path: pathlib.Path) -> None:
    boot(path, "2xA100", latency=states.Latency(create_gpu_instance_s=0.3), logs_calls=True)
    create_on(0, 1)
    first, second = changes(path)
    assert second.entered_ns < first.ended_ns


@pytest.mark.parametrize(
    ("gpus", "is_one_lock"), [((0, 0, 0), False), ((0, 1), True)], ids=["one", "all"]
)
def test_changes_on_one_gpu_follow_each_other_and_on_all_when_asked(
    path: pathlib.Path, gpus: tuple[int, ...], *, is_one_lock: bool
) -> None:
    latency = states.Latency(create_gpu_instance_s=0.05)
    boot(path, "2xA100", latency=latency, logs_calls=True, serialise_all_gpus=is_one_lock)
    create_on(*gpus)
    calls = changes(path)
    assert len(calls) == len(gpus)
    for first, second in itertools.pairwise(calls):
        assert first.entered_ns + 50_000_000 <= second.entered_ns


def test_processes_changing_one_gpu_at_once_lose_nothing(path: pathlib.Path) -> None:
    state = boot(path, logs_calls=True)
    body = "for _ in range(2): pynvml.nvmlDeviceCreateGpuInstance(device, 19)"
    running = [subprocess.Popen(program(path, body)) for _ in range(3)]  # noqa: S603 - our own interpreter
    assert [process.wait() for process in running] == [0, 0, 0]
    instances = state.read().gpus[0].instances
    assert len({instance.serial for instance in instances}) == 6
    assert len({instance.placement for instance in instances}) == 6
    calls = nvml_faults.read_calls(path)
    assert len({call.pid for call in calls}) == 4
    assert {call.pid for call in calls} >= {os.getpid()}


def test_refusals_cost_no_time(path: pathlib.Path) -> None:
    latency = states.Latency(create_gpu_instance_s=60.0)
    boot(path, latency=latency)
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        pynvml.nvmlDeviceCreateGpuInstance(gpu(), 99)


@pytest.mark.parametrize(
    ("product", "mode"), [("A100", [1, 1]), ("H100", [0, 0]), ("RTX-PRO-6000", [0, 0])]
)
def test_reboot_ends_instances_and_clients_and_modes_that_do_not_persist(
    path: pathlib.Path, product: str, mode: list[int]
) -> None:
    state = boot(path, product)
    pynvml.nvmlDeviceCreateGpuInstance(gpu(), 0)
    state.add_client(pynvml.nvmlDeviceGetUUID(gpu()), name="train")
    boot_id = state.boot_id
    assert state.boot_id == boot_id
    state.reboot()
    assert pynvml.nvmlDeviceGetMigMode(gpu()) == mode
    assert state.read().gpus[0].instances == ()
    assert state.read().clients == ()
    assert state.boot_id != boot_id


def test_uninstalling_makes_pynvml_forget_the_simulation(path: pathlib.Path) -> None:
    boot(path)
    simulated.uninstall()
    with pytest.raises(pynvml.NVMLError_Uninitialized):
        pynvml.nvmlDeviceGetCount()


def test_a_thread_never_reads_half_of_a_state(path: pathlib.Path) -> None:
    state = boot(path)
    stop = threading.Event()

    def read() -> int:
        seen = 0
        while not stop.is_set():
            seen = max(seen, len(nvml_faults.SharedState(path).read().gpus[0].instances))
        return seen

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        for _ in range(30):
            instance = pynvml.nvmlDeviceCreateGpuInstance(gpu(), 0)
            pynvml.nvmlGpuInstanceDestroy(instance)
        stop.set()
        assert reading.result(timeout=10) <= 1
    assert state.read().gpus[0].instances == ()


def test_a_write_by_a_process_that_died_before_counting_it_is_seen_after_a_moment(
    path: pathlib.Path,
) -> None:
    state = boot(path)
    counted = path.with_name(f"{path.name}.writes").read_bytes()
    other = nvml_faults.SharedState(path)
    other.reboot()
    path.with_name(f"{path.name}.writes").write_bytes(counted)
    # A process that changes the node reads the file whatever the count says.
    assert state.update(lambda node: (node, node.boots)) == 1
    other.reboot()
    path.with_name(f"{path.name}.writes").write_bytes(counted)
    deadline = time.monotonic() + 10
    while state.read().boots != 2:
        assert time.monotonic() < deadline


def test_nothing_is_left_beside_a_node_that_does_not_exist(tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError):
        nvml_faults.SharedState(tmp_path / "none").read()
    assert list(tmp_path.iterdir()) == []
