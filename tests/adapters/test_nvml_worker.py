"""The GPU worker and its client: whatever becomes of the worker, an answer or an error follows."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator

import pytest
import structlog.testing

from mig_manager import errors
from mig_manager.adapters.nvml import client as nvml_worker
from mig_manager.adapters.nvml import worker
from mig_manager.catalogue import hardware
from mig_manager.core import steps
from tests import waiting
from tests.adapters import processes
from tests.adapters.processes import is_dead

GPU = hardware.template(hardware.find("A100-SXM4-40GB"), 0)
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


IN_A_CALL = """
from mig_manager.adapters.nvml import hung_call, library
hung_call.RECORDER.attach(int(sys.argv[-1]))
def nvmlFake(): doing()
def work():
    with hung_call.RECORDER.on_gpu(3):
        hung_call.RECORDER.set_gpu(3, "GPU-3")
        library.call(nvmlFake)
"""


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
    script = """
from mig_manager.catalogue import hardware
answer(model.ObservedGpus([hardware.template(hardware.find("A100-SXM4-40GB"), 0)]))
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


ENDS = """
def doing():
    os.write(2, b"Xid 79\\nlibnvidia-ml: oops\\n")
    {act}
"""


@pytest.mark.parametrize(
    ("act", "where", "end"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "in a call", "was killed by SIGSEGV{}; {}"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "", "was killed by SIGKILL{}; {}"),
        ("os._exit(7)", "in a call", "ended with status 7{} and no answer; {}"),
        ("os._exit(7)", "", "ended with status 7{} and no answer; {}"),
    ],
)
def test_a_worker_that_ends_without_an_answer_names_its_end_its_call_and_its_last_words(
    act: str, where: str, end: str
) -> None:
    script = IN_A_CALL + ENDS.format(act=act) + ("work()" if where else "doing()")
    with pytest.raises(errors.HardwareError) as caught:
        child(script).observe()
    call = " in nvmlFake on GPU 3 (GPU-3)" if where else ""
    words = "it last wrote: libnvidia-ml: oops"
    assert caught.value.message == f"the GPU worker {end.format(call, words)}"
    is_ours = not where and "status" in end
    reason = errors.Reason.INTERNAL if is_ours else errors.Reason.NVML_ERROR
    assert caught.value.reason is reason
    expected = ("nvmlFake", "GPU 3 (GPU-3)") if where else ("", "")
    assert (caught.value.operation, caught.value.gpu) == expected


def test_a_crash_after_the_answer_does_not_spoil_it() -> None:
    script = """
answer(model.NO_GPUS)
os.kill(os.getpid(), signal.SIGSEGV)
"""
    assert child(script).observe() == ()


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


def started_ahead(pid_file: pathlib.Path) -> tuple[nvml_worker.WorkerGpus, int]:
    """Start a worker ahead that writes its pid and answers when asked; return GPUs and pid."""
    gpus = child(f"""
open({str(pid_file)!r}, "w").write(str(os.getpid()))
parent.receive()
answer(model.NO_GPUS)
""")
    gpus.prepare()
    waiting.until(lambda: pid_in(pid_file) is not None)
    return gpus, pid_in(pid_file) or 0


def test_a_worker_that_was_started_ahead_is_the_one_that_is_asked(tmp_path: pathlib.Path) -> None:
    gpus, ahead = started_ahead(tmp_path / "pid")
    gpus.prepare()
    assert gpus.observe() == ()
    assert pid_in(tmp_path / "pid") == ahead
    assert gpus.observe() == ()
    assert pid_in(tmp_path / "pid") != ahead


def test_a_worker_that_is_not_needed_is_ended(tmp_path: pathlib.Path) -> None:
    gpus, _ = started_ahead(tmp_path / "pid")
    gpus.dismiss()
    assert is_gone(tmp_path / "pid")
    gpus.dismiss()


def test_a_worker_that_died_while_it_waited_is_replaced(tmp_path: pathlib.Path) -> None:
    gpus, ahead = started_ahead(tmp_path / "pid")
    os.kill(ahead, signal.SIGKILL)
    os.waitid(os.P_PID, ahead, os.WEXITED | os.WNOWAIT)
    assert gpus.observe() == ()
    assert pid_in(tmp_path / "pid") != ahead


def test_a_worker_that_cannot_be_started_is_an_error_only_when_it_is_needed() -> None:
    gpus = nvml_worker.WorkerGpus(command=["/does/not/exist"], timeout_s=1.0)
    gpus.prepare()
    with pytest.raises(errors.HardwareError, match="cannot be started"):
        gpus.observe()
    gpus.dismiss()


def test_the_agents_side_does_not_load_the_nvml_binding() -> None:
    script = "import sys, mig_manager.adapters.nvml.client; sys.exit('pynvml' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)  # noqa: S603 - our own interpreter


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
def observe():
    os.write(1, b"NVRM: hello")
    print("hello")
    {end}
sys.exit(worker.main(["serve"]))
"""


def test_a_library_that_prints_does_not_corrupt_the_answer() -> None:
    with structlog.testing.capture_logs() as logs:
        assert child(FAKE_GPUS.format(end="return model.NO_GPUS")).observe() == ()
    assert "NVRM: hello" in logs[0]["stderr"]


def test_the_worker_turns_hardware_errors_into_answers() -> None:
    end = "raise errors.HardwareError('gone', reason=errors.Reason.GPU_LOST, code=15)"
    with pytest.raises(errors.HardwareError, match="gone") as caught:
        child(FAKE_GPUS.format(end=end)).observe()
    assert (caught.value.reason, caught.value.code) == (errors.Reason.GPU_LOST, 15)


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
