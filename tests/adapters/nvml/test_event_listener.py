"""MIG changes by other programs: real listeners on a simulated node, and scripted ones."""

import contextlib
import itertools
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence

import pytest
import structlog.testing
from structlog.typing import EventDict

from mig_manager.adapters.host import subprocesses
from mig_manager.adapters.nvml import event_listener, worker_client
from mig_manager.core import timing
from mig_manager.sandbox.driver import simulated_worker, state_file, states
from testkit import nvml_faults
from tests.rigs import waiting
from tests.rigs.host import processes
from tests.rigs.host.processes import children

SOON_S = 60.0
AT_ONCE = timing.Backoff(first_s=0.01, max_s=0.01)
NEVER_AGAIN = timing.Backoff(first_s=3600.0, max_s=3600.0)

pytestmark = pytest.mark.usefixtures("leaves_nothing_behind")

PREAMBLE = """
say = parent.send
watching = ("watching", 1, 1)
changed = ("events", ("GPU-1",), ())
def until_the_end():
    os.read(0, 1)
"""


class ListenerRig:
    """A watch, how often it has called back, and what was logged meanwhile."""

    def __init__(
        self,
        events: event_listener.GpuEvents,
        logs: list[EventDict],
        xids: Sequence[tuple[str, int]],
    ) -> None:
        self.events = events
        self.logs = logs
        self.calls = 0
        self.xids = xids
        self._others = children()  # A test before may have started a fork server.

    def children(self) -> set[int]:
        return children() - self._others

    def entries(self, event: str) -> list[EventDict]:
        return [entry for entry in list(self.logs) if entry["event"] == event]

    def until_listening(self, times: int = 1) -> None:
        waiting.until(lambda: len(self.entries("gpu_events_watched")) >= times, "the listener")

    def until_called(self, times: int) -> None:
        waiting.until(lambda: self.calls >= times, "the calls")


@contextlib.contextmanager
def watching(
    command: Sequence[str],
    *,
    restarts: timing.Backoff = NEVER_AGAIN,
    start_timeout_s: float = 60.0,
    on_change: Callable[[], None] = lambda: None,
    quiet_s: float = 0.1,
) -> Iterator[ListenerRig]:
    def count() -> None:
        rig.calls += 1
        on_change()

    xids: list[tuple[str, int]] = []
    events = event_listener.GpuEvents(
        command=command,
        on_change=count,
        on_xids=xids.extend,
        quiet_s=quiet_s,
        start_timeout_s=start_timeout_s,
        restarts=restarts,
    )
    with structlog.testing.capture_logs() as logs:
        rig = ListenerRig(events, logs, xids)
        events.start()
        try:
            yield rig
        finally:
            events.stop()


def listener_command(script: str) -> list[str]:
    """Return the command line of a listener that is this script."""
    return processes.worker_command(PREAMBLE + script)


# -- real listeners on a simulated node -------------------------------------------------------


class ListenedNode:
    """A simulated node, changed by processes of their own."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self.command = worker_client.worker_command(
            "listen", program=simulated_worker.program(path)
        )

    def change(self, code: str) -> None:
        """Have another process run code on the first GPU."""
        processes.run_python(f"""
import pathlib, pynvml
from mig_manager.sandbox.driver import simulated_nvml
simulated_nvml.install(pathlib.Path({str(self.path)!r}))
pynvml.nvmlInit()
device = pynvml.nvmlDeviceGetHandleByIndex(0)
{code}
""")


ENABLE = "pynvml.nvmlDeviceSetMigMode(device, 1)"
CREATE = "pynvml.nvmlDeviceCreateGpuInstance(device, 9)"
DESTROY = "pynvml.nvmlGpuInstanceDestroy(pynvml.nvmlDeviceGetGpuInstanceById(device, 2))"


@pytest.fixture
def node(tmp_path: pathlib.Path, mig_events: states.MigEvents) -> ListenedNode:
    path = tmp_path / "state"
    state_file.SharedState(path).create(
        "2xa100-sxm4-40gb", options=states.Options(mig_events=mig_events)
    )
    return ListenedNode(path)


@pytest.fixture
def mig_events() -> states.MigEvents:
    return states.MigEvents.ALWAYS


@pytest.mark.slow
def test_changes_by_another_process_are_reported_once_unless_suspended(node: ListenedNode) -> None:
    with watching(node.command) as rig:
        rig.until_listening()
        with rig.events.suspended():
            assert not rig.children()
            node.change(f"{ENABLE}\n{CREATE}")
        rig.until_listening(2)
        node.change(DESTROY)
        rig.until_called(1)
        node.change(CREATE)
        rig.until_called(2)
    assert rig.calls == 2
    (first, second) = rig.entries("gpu_change_heard")
    assert first["gpus"] == second["gpus"] == [nvml_faults.SharedState(node.path).boards[0].uuid]


@pytest.mark.parametrize("mig_events", [states.MigEvents.NEVER])
def test_a_driver_without_the_event_is_reported_once_and_left_alone(node: ListenedNode) -> None:
    nvml_faults.SharedState(node.path).log_calls()
    with watching(node.command, restarts=AT_ONCE) as rig:
        waiting.until(
            lambda: bool(rig.entries("gpu_events_unsupported")), "the refusal in the log"
        )
        waiting.until(lambda: not rig.children(), "the end of the listener")
        with rig.events.suspended():
            pass
        log = node.path.with_name("state.calls")
        waiting.until(lambda: log.read_text().count('"nvmlShutdown"') == 2, "the shutdown of NVML")
        waiting.until(lambda: not rig.children(), "the end of the listener")
    assert [entry["event"] for entry in rig.logs] == ["gpu_events_unsupported"]
    assert "nvmlDeviceRegisterEvents" in rig.logs[0]["error"]
    assert rig.calls == 0
    assert log.read_text().count('"nvmlDeviceRegisterEvents"') == 4


@pytest.mark.slow
@pytest.mark.parametrize("mig_events", [states.MigEvents.WHILE_ON])
def test_an_old_driver_reports_once_mig_is_on(node: ListenedNode) -> None:
    with watching(node.command) as rig:
        waiting.until(
            lambda: bool(rig.entries("gpu_events_unsupported")), "the refusal in the log"
        )
        with rig.events.suspended():
            node.change(ENABLE)
        rig.until_listening()
        node.change(CREATE)
        rig.until_called(1)


def test_an_xid_is_passed_on_and_calls_back(node: ListenedNode) -> None:
    state = nvml_faults.SharedState(node.path)
    with watching(node.command) as rig:
        rig.until_listening()
        state.fail_gpu(1, xid=79)
        rig.until_called(1)
    assert rig.xids == [(state.boards[1].uuid, 79)]
    (logged,) = rig.entries("gpu_xid")
    assert (logged["gpu"], logged["xid"]) == rig.xids[0]
    assert not rig.entries("gpu_change_heard")


@pytest.mark.slow
def test_a_listener_that_is_killed_is_replaced_and_a_change_assumed(node: ListenedNode) -> None:
    with watching(node.command, restarts=AT_ONCE) as rig:
        rig.until_listening()
        (pid,) = rig.children()
        os.kill(pid, signal.SIGKILL)
        rig.until_listening(2)
        rig.until_called(1)
        node.change(ENABLE)
        rig.until_called(2)
    (end,) = rig.entries("gpu_listener_ended")
    assert "SIGKILL" in end["error"]


@pytest.mark.slow
def test_a_driver_that_is_loaded_later_is_listened_to_then(tmp_path: pathlib.Path) -> None:
    node = ListenedNode(tmp_path / "state")
    with watching(node.command, restarts=AT_ONCE) as rig:
        waiting.until(
            lambda: bool(rig.entries("gpu_listener_ended")), "the end of the listener in the log"
        )
        state_file.SharedState(node.path).create("a30")
        rig.until_listening()
        rig.until_called(1)
    (end,) = rig.entries("gpu_listener_ended")
    assert end["reason"] == "DriverNotLoaded"


def test_a_listener_ends_when_its_stdin_does(node: ListenedNode) -> None:
    child = subprocesses.Child(node.command)
    assert child.receive(SOON_S) == ("watching", 2, 2)
    assert child._process.stdin is not None
    child._process.stdin.close()
    with pytest.raises(EOFError):
        child.receive(SOON_S)
    assert child.end()
    assert child.status == 0


def test_a_listener_dies_with_the_agent(node: ListenedNode, tmp_path: pathlib.Path) -> None:
    pid_file = tmp_path / "pid"
    agent = f"""
import os, pathlib, signal
from mig_manager.adapters.nvml import event_listener
def on_change():
    task = pathlib.Path("/proc/self/task")
    pids = [pid for each in task.iterdir() for pid in (each / "children").read_text().split()]
    pathlib.Path({str(pid_file)!r}).write_text(pids[0])
    os.kill(os.getpid(), signal.SIGKILL)
events = event_listener.GpuEvents(command={node.command!r}, on_change=on_change, quiet_s=0.0)
events.start()
signal.pause()
"""
    with subprocess.Popen([sys.executable, "-c", agent], stdout=subprocess.PIPE) as started:  # noqa: S603
        assert started.stdout is not None
        assert b"gpu_events_watched" in started.stdout.readline()
        node.change(ENABLE)
        assert started.wait(SOON_S) == -signal.SIGKILL
    waiting.until(lambda: processes.is_dead(int(pid_file.read_text())), "the end of the child")


# -- scripted listeners -----------------------------------------------------------------------


def test_a_burst_is_reported_once() -> None:
    command = listener_command("""
say(watching)
os.write(parent._out, 50 * worker_messages.encode(changed))
until_the_end()
""")
    with watching(command, quiet_s=2.0) as rig:
        waiting.until(lambda: len(rig.entries("gpu_change_heard")) == 50, "the changes in the log")
        rig.until_called(1)
        with rig.events.suspended():
            assert rig.calls == 1


def test_a_burst_that_is_not_over_is_dropped_by_a_suspension(tmp_path: pathlib.Path) -> None:
    # The first listener never falls silent, so that its burst is not over when it is suspended.
    once = tmp_path / "once"
    command = listener_command(f"""
say(watching)
if not os.path.exists({str(once)!r}):
    open({str(once)!r}, "w").close()
    while True:
        say(changed)
        time.sleep(0.02)
until_the_end()
""")
    with watching(command, quiet_s=60.0) as rig:
        waiting.until(lambda: bool(rig.entries("gpu_change_heard")), "the changes in the log")
        with rig.events.suspended():
            before = rig.calls
        rig.until_listening(2)
    assert before == rig.calls == 0


@pytest.mark.parametrize(
    ("command", "error"),
    [
        (["/does/not/exist"], "cannot be started"),
        (listener_command("os.write(2, b'x' * 200_000 + b' the end'); sys.exit(3)"), "status 3"),
        (listener_command("os.write(parent._out, b'hello'); until_the_end()"), "hello"),
        (listener_command("say(('watching', '8', 8)); until_the_end()"), "invalid message"),
        (listener_command("say(('failed', 'Whatever', 'so')); until_the_end()"), "Whatever"),
        (listener_command("say(('failed', 'GpuLost', 'gone'))"), "gone"),
        (listener_command("signal.pause()"), "not ready within 0.3 s"),
    ],
)
def test_a_broken_listener_is_replaced_after_a_pause(command: list[str], error: str) -> None:
    with watching(command, start_timeout_s=0.3 if "0.3" in error else 60.0) as rig:
        waiting.until(
            lambda: bool(rig.entries("gpu_listener_ended")), "the end of the listener in the log"
        )
        waiting.until(lambda: not rig.children(), "the end of the listener")
    (end,) = rig.entries("gpu_listener_ended")
    assert error in end["error"]
    assert end["delay_s"] == 3600.0
    for words in rig.entries("gpu_listener_stderr"):
        assert len(words["stderr"]) <= 16 * 1024
        assert words["stderr"].endswith("the end")
    assert bool(rig.entries("gpu_listener_stderr")) is (error == "status 3")


@pytest.mark.slow
def test_pauses_grow_and_the_same_failure_is_logged_once(tmp_path: pathlib.Path) -> None:
    starts = tmp_path / "starts"
    command = listener_command(f"""
with open({str(starts)!r}, "a") as file:
    file.write(f"{{time.monotonic()}}\\n")
sys.exit(3)
""")
    with watching(command, restarts=timing.Backoff(first_s=0.05, max_s=0.4, factor=2.0)) as rig:
        waiting.until(
            lambda: starts.exists() and starts.read_text().count("\n") >= 5,
            "the starts of the listener",
        )
    times = list(map(float, starts.read_text().split()[:5]))
    pauses = [after - before for before, after in itertools.pairwise(times)]
    least = (0.05, 0.1, 0.2, 0.4)
    assert all(pause >= floor for pause, floor in zip(pauses, least, strict=True))
    assert len(rig.entries("gpu_listener_ended")) == 1


def test_a_bug_in_the_callback_does_not_end_listening() -> None:
    def fail_once() -> None:
        if rig.calls == 1:
            raise ZeroDivisionError

    command = listener_command("say(watching); say(changed); until_the_end()")
    with watching(command, restarts=AT_ONCE, on_change=fail_once) as rig:
        rig.until_called(2)
    assert len(rig.entries("gpu_events_error")) == 1


def test_suspensions_nest_and_interrupt_a_pause(tmp_path: pathlib.Path) -> None:
    starts = tmp_path / "starts"
    command = listener_command(f"open({str(starts)!r}, 'a').write('x'); sys.exit(3)")
    with watching(command) as rig:
        waiting.until(
            lambda: bool(rig.entries("gpu_listener_ended")), "the end of the listener in the log"
        )
        with rig.events.suspended(), rig.events.suspended():
            pass
        waiting.until(lambda: starts.read_text() == "xx", "the starts of the listener")


def test_without_a_start_there_is_nothing_to_suspend_or_to_stop() -> None:
    events = event_listener.GpuEvents(command=["/does/not/exist"], on_change=lambda: None)
    with events.suspended():
        pass
    events.stop()


def test_stop_kills_a_hung_listener_and_start_replaces_it() -> None:
    command = listener_command("""
signal.signal(signal.SIGTERM, signal.SIG_IGN)
say(watching)
while True:
    signal.pause()
""")
    with watching(command) as rig:
        rig.until_listening()
        rig.events.stop()
        assert not rig.children()
        rig.events.start()
        rig.until_listening(2)
