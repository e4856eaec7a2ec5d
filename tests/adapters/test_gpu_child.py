"""The process around the GPU work: whatever becomes of it, an answer or a typed error follows."""

import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest
import structlog.testing

from mig_manager import errors, gpu_worker
from mig_manager.adapters import gpu_child, gpu_protocol
from mig_manager.core import model
from mig_manager.sandbox import nvml as simulated
from mig_manager.sandbox.driver import states

GPU = model.Gpu(
    index=0,
    uuid="GPU-00000000-0000-0000-0000-000000000000",
    name="NVIDIA A100-SXM4-40GB",
    architecture=model.Architecture.AMPERE,
    pci_address="00000000:07:00.0",
    pci_device_id=0x20B010DE,
    pci_subsystem_id=0x134F10DE,
    memory_mib=40960,
    current_mode=model.MigMode.DISABLED,
    pending_mode=model.MigMode.DISABLED,
    mode_change_needs_reset=True,
    profiles=None,
    gpu_instances=(),
)
PLAN = model.Plan(gpus=(model.GpuPlan(gpu_uuid=GPU.uuid, gpu_index=0, steps=(), target=()),))

PREAMBLE = """
import os, signal, sys, time
from mig_manager import errors, gpu_worker
from mig_manager.adapters import gpu_protocol, nvml
def answer(message):
    sys.stdout.buffer.write(gpu_protocol.encode(message))
    sys.stdout.buffer.flush()
"""


def child(script: str, *, timeout_s: float = 30.0) -> gpu_child.ChildGpus:
    """Return GPUs whose worker is this script."""
    return gpu_child.ChildGpus(
        command=[sys.executable, "-c", PREAMBLE + script], timeout_s=timeout_s
    )


def wait_for(condition: Callable[[], bool], *, within_s: float = 20.0) -> None:
    """Wait for a condition, and fail if it does not come true."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        os.sched_yield()


def descriptors() -> set[str]:
    """Return the numbers of the open descriptors, that of the listing itself included."""
    return {entry.name for entry in pathlib.Path("/proc/self/fd").iterdir()}


def is_gone(pid_file: pathlib.Path) -> bool:
    """Tell whether the process has ended and been reaped."""
    return not pathlib.Path("/proc", pid_file.read_text()).exists()


def is_dead(pid_file: pathlib.Path) -> bool:
    """Tell whether the process, which is not ours to reap, has ended."""
    try:
        stat = pathlib.Path("/proc", pid_file.read_text(), "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"


@pytest.fixture(autouse=True)
def _leaves_no_descriptor_open() -> Iterator[None]:
    # Servers of tests that ran before may still be closing theirs, so only new ones count.
    before = descriptors()
    yield
    wait_for(lambda: descriptors() <= before)


def test_an_observation_comes_back_as_it_was_made() -> None:
    script = f"""
from mig_manager.core.model import *
answer(gpu_protocol.Observed(gpus=({GPU!r},)))
""".replace("<Architecture.AMPERE: 'ampere'>", "Architecture.AMPERE").replace(
        "<MigMode.DISABLED: 'disabled'>", "MigMode.DISABLED"
    )
    assert child(script).observe() == (GPU,)


def test_the_worker_is_asked_for_exactly_the_plan(tmp_path: pathlib.Path) -> None:
    asked = tmp_path / "asked"
    script = f"""
open({str(asked)!r}, "wb").write(sys.stdin.buffer.read())
answer(gpu_protocol.Executed())
"""
    child(script).execute(PLAN)
    assert gpu_protocol.decode_request(asked.read_bytes()) == gpu_protocol.Execute(plan=PLAN)


def test_a_failure_in_the_worker_is_raised_with_all_it_knows() -> None:
    script = """
answer(gpu_protocol.Failed.of(errors.HardwareError(
    "held", reason=errors.Reason.IN_USE, operation="nvmlGpuInstanceDestroy", gpu="GPU 3", code=19
)))
"""
    with pytest.raises(errors.HardwareError, match=r"^held$") as caught:
        child(script).execute(PLAN)
    assert caught.value.reason is errors.Reason.IN_USE
    assert caught.value.operation == "nvmlGpuInstanceDestroy"
    assert caught.value.gpu == "GPU 3"
    assert caught.value.code == 19


def test_a_worker_that_hangs_is_killed_at_the_deadline(tmp_path: pathlib.Path) -> None:
    pid_file = tmp_path / "pid"
    script = f"""
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open({str(pid_file)!r}, "w").write(str(os.getpid()))
signal.pause()
"""
    start = time.monotonic()
    with pytest.raises(errors.HardwareError, match="no answer within 2 s") as caught:
        child(script, timeout_s=2.0).observe()
    assert caught.value.reason is errors.Reason.NVML_TIMEOUT
    assert time.monotonic() - start < 2.0 + 3.0
    assert is_gone(pid_file)


def test_what_a_hung_worker_has_started_is_killed_with_it(tmp_path: pathlib.Path) -> None:
    pid_file = tmp_path / "pid"
    script = f"""
pid = os.fork()
if pid:
    open({str(pid_file)!r}, "w").write(str(pid))
signal.pause()
"""
    with pytest.raises(errors.HardwareError):
        child(script, timeout_s=2.0).observe()
    wait_for(lambda: is_dead(pid_file))


def test_a_crash_names_the_signal_and_the_last_words() -> None:
    script = """
os.write(2, b"Xid 79\\nlibnvidia-ml: oops\\n")
os.kill(os.getpid(), signal.SIGSEGV)
"""
    with pytest.raises(errors.HardwareError, match=r"SIGSEGV.*libnvidia-ml: oops") as caught:
        child(script).observe()
    assert caught.value.reason is errors.Reason.NVML_ERROR


def test_a_worker_that_ends_without_an_answer_is_our_own_fault() -> None:
    with pytest.raises(errors.HardwareError, match=r"status 3.*ZeroDivisionError") as caught:
        child(
            "import traceback\ntry: 1/0\nexcept Exception: traceback.print_exc(); exit(3)"
        ).observe()
    assert caught.value.reason is errors.Reason.INTERNAL


def test_half_an_answer_is_no_answer() -> None:
    script = """
sys.stdout.buffer.write(gpu_protocol.encode(gpu_protocol.Observed(gpus=()))[:20])
sys.stdout.flush()
os.kill(os.getpid(), signal.SIGBUS)
"""
    with pytest.raises(errors.HardwareError, match="SIGBUS"):
        child(script).observe()


def test_a_crash_after_the_answer_does_not_spoil_it() -> None:
    script = """
answer(gpu_protocol.Observed(gpus=()))
os.kill(os.getpid(), signal.SIGSEGV)
"""
    assert child(script).observe() == ()


def test_an_answer_to_another_question_is_our_own_fault() -> None:
    with pytest.raises(errors.HardwareError, match="Executed") as caught:
        child("answer(gpu_protocol.Executed())").observe()
    assert caught.value.reason is errors.Reason.INTERNAL
    with pytest.raises(errors.HardwareError, match="Observed"):
        child("answer(gpu_protocol.Observed(gpus=()))").execute(PLAN)


def test_a_worker_that_cannot_be_started_is_a_typed_error() -> None:
    with pytest.raises(errors.HardwareError, match="cannot be started"):
        gpu_child.ChildGpus(command=["/does/not/exist"], timeout_s=1.0).observe()


def test_a_flood_of_stderr_is_passed_on_in_part_and_delays_nothing() -> None:
    script = """
for _ in range(2000):
    os.write(2, b"x" * 4096)
os.write(2, b" the end")
answer(gpu_protocol.Observed(gpus=()))
"""
    with structlog.testing.capture_logs() as logs:
        assert child(script).observe() == ()
    (entry,) = logs
    assert len(entry["stderr"]) <= 16 * 1024
    assert entry["stderr"].endswith("the end")


def test_an_interrupted_call_leaves_no_worker_behind(tmp_path: pathlib.Path) -> None:
    pid_file = tmp_path / "pid"
    script = f"""
open({str(pid_file)!r}, "w").write(str(os.getpid()))
os.kill(os.getppid(), signal.SIGUSR1)
signal.pause()
"""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            child(script).observe()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert is_gone(pid_file)


def test_one_client_serves_call_after_call() -> None:
    gpus = child("answer(gpu_protocol.Observed(gpus=()))")
    assert [gpus.observe(), gpus.observe()] == [(), ()]


def test_the_agents_side_does_not_load_the_nvml_binding() -> None:
    script = "import sys, mig_manager.adapters.gpu_child; sys.exit('pynvml' in sys.modules)"
    assert (
        subprocess.run(  # noqa: S603 - our own interpreter
            [sys.executable, "-c", script], check=False
        ).returncode
        == 0
    )


# The worker's own side.

FAKE_GPUS = """
class FakeGpus:
    def __init__(self, **settings): pass
    def observe(self): return observe()
nvml.NvmlGpus = FakeGpus
"""


def test_a_library_that_prints_does_not_corrupt_the_answer() -> None:
    script = (
        FAKE_GPUS
        + """
def observe():
    os.write(1, b"NVRM: hello")
    print("hello")
    return ()
sys.exit(gpu_worker.main([]))
"""
    )
    with structlog.testing.capture_logs() as logs:
        assert child(script).observe() == ()
    assert "NVRM: hello" in logs[0]["stderr"]


def test_the_worker_turns_hardware_errors_into_answers() -> None:
    script = (
        FAKE_GPUS
        + """
def observe():
    raise errors.HardwareError("gone", reason=errors.Reason.GPU_LOST, code=15)
sys.exit(gpu_worker.main([]))
"""
    )
    with pytest.raises(errors.HardwareError, match="gone") as caught:
        child(script).observe()
    assert caught.value.reason is errors.Reason.GPU_LOST
    assert caught.value.code == 15


def test_the_worker_does_nothing_when_nothing_is_asked() -> None:
    command = gpu_child.worker_command()
    done = subprocess.run(  # noqa: S603 - our own interpreter
        command, input=b"", capture_output=True, check=False
    )
    assert (done.returncode, done.stdout) == (1, b"")


def test_the_worker_takes_the_command_line_that_is_built_for_it() -> None:
    command = gpu_child.worker_command(
        library_path="/lib/x.so", simulate_state="/x/state", in_use_timeout_s=1.5
    )
    arguments = gpu_worker._parser().parse_args(command[4:])
    assert arguments.library_path == "/lib/x.so"
    assert arguments.simulate_state == "/x/state"
    assert arguments.in_use_timeout_s == 1.5


def test_the_worker_dies_with_the_agent(tmp_path: pathlib.Path) -> None:
    pid_file = tmp_path / "pid"
    worker = f"""
gpu_worker._end_with_parent()
open({str(pid_file)!r}, "w").write(str(os.getpid()))
os.kill(os.getppid(), signal.SIGKILL)
signal.pause()
"""
    agent = f"""
from mig_manager.adapters import gpu_child
gpu_child.ChildGpus(command={[sys.executable, "-c", PREAMBLE + worker]!r}, timeout_s=60).observe()
"""
    done = subprocess.run(  # noqa: S603 - our own interpreter
        [sys.executable, "-c", agent], check=False, capture_output=True
    )
    assert done.returncode == -signal.SIGKILL
    wait_for(lambda: is_dead(pid_file))


# Both sides together, on a simulated node.


@pytest.fixture
def state(tmp_path: pathlib.Path) -> simulated.SharedState:
    path = tmp_path / "state"
    simulated.create("2xa100-sxm4-40gb", path)
    return simulated.SharedState(path)


def simulating(state: simulated.SharedState, *, timeout_s: float = 60.0) -> gpu_child.ChildGpus:
    command = gpu_child.worker_command(simulate_state=str(state.path), in_use_timeout_s=0.0)
    return gpu_child.ChildGpus(command=command, timeout_s=timeout_s)


def switch_on(gpu: model.Gpu) -> model.Plan:
    step = model.SetMode(gpu_uuid=gpu.uuid, mode=model.MigMode.ENABLED, needs_reset=True)
    plan = model.GpuPlan(gpu_uuid=gpu.uuid, gpu_index=gpu.index, steps=(step,), target=())
    return model.Plan(gpus=(plan,))


def test_a_node_is_observed_and_changed_through_workers(state: simulated.SharedState) -> None:
    gpus = simulating(state)
    gpus.execute(switch_on(gpus.observe()[1]))
    assert [gpu.current_mode for gpu in gpus.observe()] == [
        model.MigMode.DISABLED,
        model.MigMode.ENABLED,
    ]


def test_a_step_that_fails_in_a_worker_is_told_in_full(state: simulated.SharedState) -> None:
    gpus = simulating(state)
    gpu = gpus.observe()[0]
    state.add_client(gpu.uuid, name="python3", pid=4711)
    with pytest.raises(errors.HardwareError, match=r"held by python3 \(pid 4711\)") as caught:
        gpus.execute(switch_on(gpu))
    assert caught.value.reason is errors.Reason.IN_USE
    assert caught.value.operation == "nvmlDeviceSetMigMode"


def test_a_driver_that_hangs_is_given_up_at_the_deadline(state: simulated.SharedState) -> None:
    state.add_fault(states.Fault(function="nvmlDeviceGetMigMode", hang_s=600.0))
    start = time.monotonic()
    with pytest.raises(errors.HardwareError) as caught:
        simulating(state, timeout_s=3.0).observe()
    assert caught.value.reason is errors.Reason.NVML_TIMEOUT
    assert time.monotonic() - start < 3.0 + 3.0
    assert len(simulating(state).observe()) == 2


def test_a_driver_that_crashes_takes_only_the_worker_along(state: simulated.SharedState) -> None:
    state.add_fault(states.Fault(function="nvmlDeviceSetMigMode", crashes=True))
    gpus = simulating(state)
    with pytest.raises(errors.HardwareError, match="SIGABRT") as caught:
        gpus.execute(switch_on(gpus.observe()[0]))
    assert caught.value.reason is errors.Reason.NVML_ERROR
    gpus.execute(switch_on(gpus.observe()[0]))


def test_a_missing_driver_is_a_typed_error(tmp_path: pathlib.Path) -> None:
    with pytest.raises(errors.HardwareError) as caught:
        simulating(simulated.SharedState(tmp_path / "none")).observe()
    assert caught.value.reason is errors.Reason.DRIVER_NOT_LOADED
