"""The GPU worker and its client: whatever becomes of the worker, an answer or an error follows."""

import os
import pathlib
import re
import signal
import sys
import textwrap
from typing import NamedTuple

import pytest
import structlog.testing

from mig_manager import errors, reasons
from mig_manager.adapters.nvml import worker_client
from mig_manager.core import steps
from tests.rigs import waiting
from tests.rigs.host import processes

pytestmark = pytest.mark.usefixtures("leaves_nothing_behind")

PREAMBLE = """
from mig_manager.core import model
def answer(value):
    parent.send(((value, None), ()))
"""

IN_A_CALL = """
from mig_manager.adapters.nvml import last_calls, library
last_calls.RECORDER.attach(int(sys.argv[-1]))
def nvmlFake(): doing()
def work():
    with last_calls.RECORDER.on_gpu(3):
        last_calls.RECORDER.set_gpu(3, "GPU-3")
        library.call(nvmlFake)
"""


def child(script: str, *, timeout_s: float = 30.0) -> worker_client.WorkerGpus:
    """Return GPUs whose worker is this script."""
    command = processes.worker_command(PREAMBLE + script)
    return worker_client.WorkerGpus(command=command, timeout_s=timeout_s)


class Place(NamedTuple):
    """Where a worker dies, and what its error says of it."""

    statement: str
    words: str = ""
    operation: str = ""
    gpu: str = ""


IN_CALL = Place("work()", " in nvmlFake on GPU 3 (GPU-3)", "nvmlFake", "GPU 3 (GPU-3)")
ELSEWHERE = Place("doing()")
SEGFAULT, KILL = (f"os.kill(os.getpid(), signal.SIG{name})" for name in ("SEGV", "KILL"))
EXIT = "ended with status 7{} and no answer"


@pytest.mark.parametrize(
    ("act", "place", "end", "reason"),
    [
        (SEGFAULT, IN_CALL, "was killed by SIGSEGV{}", reasons.Reason.NVML_ERROR),
        (KILL, ELSEWHERE, "was killed by SIGKILL{}", reasons.Reason.NVML_ERROR),
        ("os._exit(7)", IN_CALL, EXIT, reasons.Reason.NVML_ERROR),
        # No driver ended it.
        ("os._exit(7)", ELSEWHERE, EXIT, reasons.Reason.INTERNAL),
    ],
    ids=["crash in a call", "kill", "exit in a call", "exit"],
)
def test_worker_that_dies_reports_its_end_call_and_last_words(
    act: str, place: Place, end: str, reason: reasons.Reason
) -> None:
    doing = f'def doing():\n    os.write(2, b"Xid 79\\nlibnvidia-ml: oops\\n")\n    {act}\n'
    with pytest.raises(errors.HardwareError) as caught:
        child(IN_A_CALL + doing + place.statement).observe()
    words = "it last wrote: libnvidia-ml: oops"
    assert caught.value.message == f"the GPU worker {end.format(place.words)}; {words}"
    assert caught.value.reason is reason
    assert (caught.value.operation, caught.value.gpu) == (place.operation, place.gpu)


@pytest.mark.xfail(
    sys.version_info < (3, 11, 4), reason="Popen itself leaks files there (python/cpython#87474)"
)
def test_exhaustion_at_the_start_is_a_typed_error_and_leaks_nothing() -> None:
    script = f"""
import os, resource
from mig_manager import errors
from mig_manager.adapters.nvml import worker_client
worker = {processes.worker_command(PREAMBLE + "answer(model.NO_GPUS)")!r}
gpus = worker_client.WorkerGpus(command=worker, timeout_s=60)
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
    lines = processes.run_python(script).stdout.splitlines()
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


def test_worker_that_hangs_between_calls_is_killed_and_reported(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "hangs"
    script = f"""
signal.signal(signal.SIGTERM, signal.SIG_IGN)
last_calls.RECORDER.began("nvmlInit", 1.0)
last_calls.RECORDER.record_return()
open({str(file)!r}, "w").close()
signal.pause()
"""
    gpus = child(IN_A_CALL + script, timeout_s=2.0)
    with gpus.kept_ready():
        waiting.until(file.exists, "a worker that hangs")
        with pytest.raises(errors.HardwareError) as caught:
            gpus.observe()
    assert caught.value.message == (
        "the GPU worker gave no answer within 2 s and was killed; "
        "no NVML call was under way, the last was nvmlInit"
    )


def test_an_interrupted_call_leaves_no_worker_behind() -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            child("os.kill(os.getppid(), signal.SIGUSR1); signal.pause()").observe()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_kept_workers_are_used_replaced_and_ended(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "pid"

    def await_worker() -> int:
        waiting.until(lambda: file.exists() and bool(file.read_text()), "a worker started ahead")
        pid = int(file.read_text())
        file.unlink()
        return pid

    def is_waiting(pid: int) -> bool:
        return pathlib.Path(f"/proc/{pid}").exists()

    gpus = child(f"""
open({str(file)!r}, "w").write(str(os.getpid()))
parent.receive()
answer(model.NO_GPUS)
""")
    with gpus.kept_ready():
        first = await_worker()
        assert gpus.observe() == ()
        assert not is_waiting(first)
        killed = await_worker()
        os.kill(killed, signal.SIGKILL)
        os.waitid(os.P_PID, killed, os.WEXITED | os.WNOWAIT)
        assert gpus.observe() == ()
        assert await_worker() != killed
        last = await_worker()
        assert is_waiting(last)
    assert not is_waiting(last)


def test_no_worker_is_started_ahead_after_a_plan_was_executed() -> None:
    before = processes.children()
    gpus = child("parent.receive(); answer(model.NO_GPUS)")
    with gpus.kept_ready():
        assert len(processes.children() - before) == 1
        gpus.execute(steps.Plan(gpus=()))
        assert processes.children() <= before


def test_worker_that_cannot_start_is_an_error_only_when_needed() -> None:
    gpus = worker_client.WorkerGpus(command=["/does/not/exist"], timeout_s=1.0)
    with gpus.kept_ready(), pytest.raises(errors.HardwareError, match="cannot be started"):
        gpus.observe()


# -- the worker's own side --------------------------------------------------------------------


def test_the_worker_answers_a_hardware_error_though_the_library_prints() -> None:
    script = """
from mig_manager.adapters.nvml import nvml_gpus, worker
class FakeGpus:
    def __init__(self, **settings): pass
    def observe(self):
        os.write(1, b"NVRM: hello")
        print("hello")
        raise errors.HardwareError("gone", reason=reasons.Reason.GPU_LOST, code=15)
nvml_gpus.NvmlGpus = FakeGpus
worker_parent.Parent = lambda: parent
sys.exit(worker.main(["serve"]))
"""
    with (
        structlog.testing.capture_logs() as logs,
        pytest.raises(errors.HardwareError, match="gone") as caught,
    ):
        child(script).observe()
    assert (caught.value.reason, caught.value.code) == (reasons.Reason.GPU_LOST, 15)
    assert "NVRM: hello" in logs[0]["stderr"]


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
def test_unkillable_worker_is_reported_until_the_kernel_releases_it(
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
            with gpus.kept_ready():
                waiting.until(pid_file.exists, "a worker that is traced")
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
                gpus.execute(steps.Plan(gpus=()))
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
        waiting.until(lambda: processes.is_dead(int(pid_file.read_text())), "the end of the child")
        assert gpus.observe() == ()
    assert [(each["event"], each["pid"], each["doing"]) for each in logs] == [
        ("gpu_worker_unkillable", int(pid), "nvmlFake on GPU 3 (GPU-3)"),
        ("gpu_worker_still_stuck", int(pid), "nvmlFake on GPU 3 (GPU-3)"),
    ]
