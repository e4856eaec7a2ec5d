"""The GPU worker and its client: whatever becomes of the worker, an answer or an error follows."""

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator

import pytest
import structlog.testing

from mig_manager import errors
from mig_manager.adapters.host import subprocesses
from mig_manager.adapters.nvml import client as nvml_worker
from mig_manager.adapters.nvml import worker
from mig_manager.core import model, steps
from mig_manager.sandbox.driver import library as simulated
from testkit import nvml_faults
from tests import waiting
from tests.adapters import proc_tree, processes
from tests.adapters.processes import is_dead

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
PLAN = steps.Plan(gpus=(steps.GpuPlan(gpu_uuid=GPU.uuid, gpu_index=0, steps=(), target=()),))

PREAMBLE = """
import os, signal, sys, time
from mig_manager import errors
from mig_manager.adapters.host import subprocesses
from mig_manager.adapters.nvml import gpus as nvml
from mig_manager.adapters.nvml import worker
from mig_manager.core import model
from tests import waiting
parent = subprocesses.Parent()
def answer(value):
    parent.send(((value, None), ()))
"""


def _made(gpu: model.Gpu) -> str:
    """Return the expression that makes it again."""
    return re.sub(r"<(\w+\.\w+): '\w+'>", r"\1", repr(gpu))


def child(script: str, *, timeout_s: float = 30.0) -> nvml_worker.WorkerGpus:
    """Return GPUs whose worker is this script."""
    return nvml_worker.WorkerGpus(
        command=[sys.executable, "-c", PREAMBLE + script], timeout_s=timeout_s
    )


def pid_in(pid_file: pathlib.Path) -> int | None:
    """Return the pid that a worker wrote; None as long as it has not."""
    text = pid_file.read_text() if pid_file.exists() else ""
    return int(text) if text else None


def is_gone(pid_file: pathlib.Path) -> bool:
    """Return whether the process has ended and been reaped."""
    return not pathlib.Path("/proc", pid_file.read_text()).exists()


@pytest.fixture(autouse=True)
def _leaves_nothing_behind() -> Iterator[None]:
    with processes.leaving_nothing_behind():
        yield


def test_an_observation_comes_back_as_it_was_made() -> None:
    script = f"""
from mig_manager.core.model import *
answer(ObservedGpus([{_made(GPU)}]))
"""
    assert child(script).observe() == (GPU,)


def test_the_worker_is_asked_for_exactly_the_plan() -> None:
    script = """
kind, plan, known = parent.receive()
assert kind == "execute" and not known
raise SystemExit(repr(plan))
"""
    with pytest.raises(errors.HardwareError) as caught:
        child(script).execute(PLAN)
    assert repr(PLAN) in caught.value.message


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


def test_a_crash_after_the_answer_does_not_spoil_it() -> None:
    script = """
answer(model.NO_GPUS)
os.kill(os.getpid(), signal.SIGSEGV)
"""
    assert child(script).observe() == ()


def test_a_worker_that_cannot_be_started_is_a_typed_error() -> None:
    with pytest.raises(errors.HardwareError, match="cannot be started"):
        nvml_worker.WorkerGpus(command=["/does/not/exist"], timeout_s=1.0).observe()


def test_whatever_runs_out_at_the_start_is_a_typed_error_and_nothing_is_left_open() -> None:
    script = """
import os, resource, sys
from mig_manager import errors
from mig_manager.adapters.nvml import client as nvml_worker
worker = "from mig_manager.adapters.host import subprocesses; " \
    "from mig_manager.core import model; subprocesses.Parent().send(((model.NO_GPUS, None), ()))"
gpus = nvml_worker.WorkerGpus(command=[sys.executable, "-c", worker], timeout_s=60)
gpus.observe()
top = os.open("/dev/null", os.O_RDONLY)
os.close(top)
before = os.listdir("/proc/self/fd")
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
for room in range(12):
    resource.setrlimit(resource.RLIMIT_NOFILE, (top + room, hard))
    try:
        gpus.observe()
        print("good")
    except errors.HardwareError as error:
        print(error.reason.value, error)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    assert os.listdir("/proc/self/fd") == before
"""
    done = subprocess.run(  # noqa: S603 - our own interpreter
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    )
    lines = done.stdout.splitlines()
    assert lines.count("good") == len(lines) - lines.index("good"), "room enough stays enough"
    assert lines.index("good") >= 4
    for line in lines[: lines.index("good")]:
        assert line.startswith("Internal the GPU worker cannot be started: ")
        assert "Too many open files" in line


def test_a_flood_of_stderr_is_passed_on_in_part_and_delays_nothing() -> None:
    script = """
for _ in range(2000):
    os.write(2, b"x" * 4096)
os.write(2, b" the end")
answer(model.NO_GPUS)
"""
    with structlog.testing.capture_logs() as logs:
        assert child(script).observe() == ()
    (entry,) = logs
    assert len(entry["stderr"]) <= 16 * 1024
    assert entry["stderr"].endswith("the end")


def test_an_interrupted_call_leaves_no_worker_behind() -> None:
    script = """
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


def test_one_client_serves_call_after_call() -> None:
    gpus = child("answer(model.NO_GPUS)")
    assert [gpus.observe(), gpus.observe()] == [(), ()]


def answering_with_pid(pid_file: pathlib.Path) -> nvml_worker.WorkerGpus:
    """Return GPUs whose worker says who it is when it starts, and answers when asked."""
    return child(f"""
open({str(pid_file)!r}, "w").write(str(os.getpid()))
parent.receive()
answer(model.NO_GPUS)
""")


def test_a_worker_that_was_started_ahead_is_the_one_that_is_asked(tmp_path: pathlib.Path) -> None:
    gpus = answering_with_pid(tmp_path / "pid")
    gpus.prepare()
    waiting.until(lambda: pid_in(tmp_path / "pid") is not None)
    ahead = pid_in(tmp_path / "pid")
    gpus.prepare()
    assert gpus.observe() == ()
    assert pid_in(tmp_path / "pid") == ahead
    assert gpus.observe() == ()
    assert pid_in(tmp_path / "pid") != ahead


def test_a_worker_that_is_not_needed_is_ended(tmp_path: pathlib.Path) -> None:
    gpus = answering_with_pid(tmp_path / "pid")
    gpus.prepare()
    waiting.until(lambda: pid_in(tmp_path / "pid") is not None)
    gpus.dismiss()
    assert is_gone(tmp_path / "pid")
    gpus.dismiss()


def test_a_worker_that_died_while_it_waited_is_replaced(tmp_path: pathlib.Path) -> None:
    gpus = answering_with_pid(tmp_path / "pid")
    gpus.prepare()
    waiting.until(lambda: pid_in(tmp_path / "pid") is not None)
    ahead = pid_in(tmp_path / "pid")
    assert ahead is not None
    os.kill(ahead, signal.SIGKILL)
    os.waitid(os.P_PID, ahead, os.WEXITED | os.WNOWAIT)
    assert gpus.observe() == ()
    assert pid_in(tmp_path / "pid") != ahead


def test_getting_ready_never_fails() -> None:
    gpus = nvml_worker.WorkerGpus(command=["/does/not/exist"], timeout_s=1.0)
    gpus.prepare()
    with pytest.raises(errors.HardwareError, match="cannot be started"):
        gpus.observe()
    gpus.dismiss()


def test_the_agents_side_does_not_load_the_nvml_binding() -> None:
    script = "import sys, mig_manager.adapters.nvml.client; sys.exit('pynvml' in sys.modules)"
    assert (
        subprocess.run(  # noqa: S603 - our own interpreter
            [sys.executable, "-c", script], check=False
        ).returncode
        == 0
    )


def test_the_worker_loads_nothing_that_it_seldom_needs() -> None:
    modules = [
        "ctypes.util",
        "datetime",
        "json",
        "yaml",
        "ipaddress",
        "subprocess",
        "tempfile",
        "tenacity",
        "urllib.parse",
    ]
    if sys.version_info < (3, 12):
        # From then on dataclasses asks it for annotations.
        modules.append("inspect")
    script = (
        "import sys; from mig_manager.adapters.nvml import worker\n"
        "print(worker.main(['serve']))\n"
        f"print(*(name for name in {modules!r} if sys.modules.get(name)))"
    )
    done = subprocess.run(  # noqa: S603 - our own interpreter
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, input=""
    )
    # The worker keeps stdout for messages.
    assert done.stderr.split() == ["1"]


# The worker's own side.

FAKE_GPUS = """
class FakeGpus:
    def __init__(self, **settings): pass
    def observe(self): return observe()
nvml.NvmlGpus = FakeGpus
subprocesses.Parent = lambda: parent
"""


def test_a_library_that_prints_does_not_corrupt_the_answer() -> None:
    script = (
        FAKE_GPUS
        + """
def observe():
    os.write(1, b"NVRM: hello")
    print("hello")
    return model.NO_GPUS
sys.exit(worker.main(["serve"]))
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
sys.exit(worker.main(["serve"]))
"""
    )
    with pytest.raises(errors.HardwareError, match="gone") as caught:
        child(script).observe()
    assert caught.value.reason is errors.Reason.GPU_LOST
    assert caught.value.code == 15


def test_the_worker_does_nothing_when_nothing_is_asked() -> None:
    command = nvml_worker.worker_command()
    done = subprocess.run(  # noqa: S603 - our own interpreter
        command, input=b"", capture_output=True, check=False
    )
    assert (done.returncode, done.stdout) == (1, b"")


def test_the_worker_takes_the_command_line_that_is_built_for_it() -> None:
    command = nvml_worker.worker_command(
        library_path="/lib/x.so", simulate_state="/x/state", in_use_timeout_s=1.5
    )
    arguments = worker._parser().parse_args(command[4:])
    assert arguments.library_path == "/lib/x.so"
    assert arguments.simulate_state == "/x/state"
    assert arguments.in_use_timeout_s == 1.5


def test_the_worker_dies_with_the_agent(tmp_path: pathlib.Path) -> None:
    pid_file = tmp_path / "pid"
    script = f"""
open({str(pid_file)!r}, "w").write(str(os.getpid()))
os.kill(os.getppid(), signal.SIGKILL)
signal.pause()
"""
    agent = f"""
from mig_manager.adapters.nvml import client as nvml_worker
command = {[sys.executable, "-c", PREAMBLE + script]!r}
nvml_worker.WorkerGpus(command=command, timeout_s=60).observe()
"""
    done = subprocess.run(  # noqa: S603 - our own interpreter
        [sys.executable, "-c", agent], check=False, capture_output=True
    )
    assert done.returncode == -signal.SIGKILL
    waiting.until(lambda: is_dead(int(pid_file.read_text())))


# Both sides together, on a simulated node.


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
    step = steps.SetMode(gpu_uuid=gpu.uuid, mode=model.MigMode.ENABLED, needs_reset=True)
    plan = steps.GpuPlan(gpu_uuid=gpu.uuid, gpu_index=gpu.index, steps=(step,), target=())
    return steps.Plan(gpus=(plan,))


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


# What the worker was doing when it ended.

IN_A_CALL = """
from mig_manager.adapters.nvml import hung_call, library
hung_call.RECORDER.attach(int(sys.argv[-1]))
def nvmlFake(): doing()
def work():
    with hung_call.RECORDER.on_gpu(3):
        hung_call.RECORDER.set_gpu(3, "GPU-3")
        library.call(nvmlFake)
"""


@pytest.mark.parametrize(
    ("act", "end"),
    [
        pytest.param("os.kill(os.getpid(), signal.SIGSEGV)", "was killed by SIGSEGV", id="segv"),
        pytest.param("os.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL", id="kill"),
        pytest.param("os._exit(7)", "ended with status 7", id="exit"),
    ],
)
def test_a_worker_that_ends_within_a_call_names_it(act: str, end: str) -> None:
    with pytest.raises(errors.HardwareError) as caught:
        child(f"{IN_A_CALL}\ndef doing(): {act}\nwork()").observe()
    expected = f"the GPU worker {end} in nvmlFake on GPU 3 (GPU-3)"
    assert caught.value.message in (expected, f"{expected} and no answer")
    assert caught.value.reason is errors.Reason.NVML_ERROR
    assert (caught.value.operation, caught.value.gpu) == ("nvmlFake", "GPU 3 (GPU-3)")


def test_a_worker_that_ends_between_calls_blames_none() -> None:
    with pytest.raises(errors.HardwareError) as caught:
        child(f"{IN_A_CALL}\ndef doing(): pass\nwork()\nos._exit(7)").observe()
    assert caught.value.message == "the GPU worker ended with status 7 and no answer"
    assert caught.value.reason is errors.Reason.INTERNAL


def test_a_worker_that_hangs_between_calls_is_reported_with_the_last_one() -> None:
    with pytest.raises(errors.HardwareError) as caught:
        child(
            f"{IN_A_CALL}\ndef doing(): pass\nhung_call.RECORDER.began('nvmlInit', 1.0)\n"
            "hung_call.RECORDER.returned()\nsignal.pause()",
            timeout_s=2.0,
        ).observe()
    assert caught.value.message == (
        "the GPU worker gave no answer within 2 s and was killed; "
        "no NVML call was under way, the last was nvmlInit"
    )


# A process that is traced is not given to its parent to reap: as if the kernel kept it.

TRACED = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long] * 4
PTRACE_SEIZE, PR_SET_PTRACER, ANY = 0x4206, 0x59616D61, ctypes.c_ulong(-1)
libc.prctl(PR_SET_PTRACER, ANY, 0, 0, 0)
reader, writer = os.pipe()
pid = os.fork()
if pid == 0:
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
    failed = libc.ptrace(PTRACE_SEIZE, os.getppid(), 0, 0)
    os.write(writer, b"n" if failed else b"y")
    signal.pause()
open({pid_file!r}, "w").write(str(pid))
if os.read(reader, 1) == b"n":
    os._exit(99)
def doing(): signal.pause()
work()
"""


@pytest.mark.slow
def test_a_worker_that_cannot_be_killed_is_reported_until_the_kernel_releases_it(
    tmp_path: pathlib.Path,
) -> None:
    pid_file = tmp_path / "pid"
    number = tmp_path / "number"
    script = f"""
with open({str(number)!r}, "a+") as file:
    file.write("x")
    file.seek(0)
    number = len(file.read())
if number == 1:
{textwrap.indent(IN_A_CALL + TRACED.format(pid_file=str(pid_file)), "    ")}
if number == 2:
    signal.pause()
answer(model.NO_GPUS)
"""
    gpus = child(script, timeout_s=6.0)
    with structlog.testing.capture_logs() as logs:
        try:
            with pytest.raises(errors.HardwareError) as caught:
                gpus.observe()
            if "status 99" in caught.value.message:
                pytest.skip("processes may not be traced here")
            match = re.fullmatch(
                r"nvmlFake on GPU 3 \(GPU-3\) has not returned for [\d.]+ s; "
                r"the GPU worker \(pid (\d+)\) cannot be killed and was left behind",
                caught.value.message,
            )
            assert match, caught.value.message
            with pytest.raises(errors.HardwareError) as caught:
                gpus.execute(PLAN)
        finally:
            os.kill(int(pid_file.read_text()), signal.SIGKILL)
        pid = match[1]
        stuck = (
            rf"; an earlier GPU worker \(pid {pid}\) is still stuck in nvmlFake on GPU 3 "
            r"\(GPU-3\), [\d.]+ s after it was given up"
        )
        assert re.fullmatch(
            rf"the GPU worker gave no answer within 6 s and was killed{stuck}",
            caught.value.message,
        ), caught.value.message
        waiting.until(lambda: is_dead(int(pid_file.read_text())))
        assert gpus.observe() == ()
    assert [(each["event"], each["pid"], each["doing"]) for each in logs] == [
        ("gpu_worker_unkillable", int(pid), "nvmlFake on GPU 3 (GPU-3)"),
        ("gpu_worker_still_stuck", int(pid), "nvmlFake on GPU 3 (GPU-3)"),
    ]


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
