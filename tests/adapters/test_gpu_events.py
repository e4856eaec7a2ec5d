"""Hearing of changes that others make: real listeners on a simulated node, and scripted ones."""

import contextlib
import itertools
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
import structlog.testing
from structlog.typing import EventDict

from mig_manager.adapters.nvml_worker import event_listener, gpu_talker
from mig_manager.core import timing
from mig_manager.sandbox import nvml as simulated
from mig_manager.sandbox.driver import states

SOON_S = 20.0
AT_ONCE = timing.Backoff(first_s=0.01, max_s=0.01)
NEVER_AGAIN = timing.Backoff(first_s=3600.0, max_s=3600.0)

PREAMBLE = """
import os, signal, sys, time
from mig_manager import errors
from mig_manager.adapters.nvml_worker import gpu_news
def say(news):
    os.write(1, gpu_news.encode(news))
watching = gpu_news.Watching(gpus=1, of=1)
changed = gpu_news.Changed(gpus=("GPU-1",))
def until_the_end():
    os.read(0, 1)
"""


def until(condition: Callable[[], bool], *, within_s: float = SOON_S) -> None:
    """Wait for a condition, and fail if it does not come true."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        threading.Event().wait(0.005)


def children() -> set[int]:
    """Return the processes that this one has started and not reaped."""
    found: set[int] = set()
    for task in pathlib.Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found |= set(map(int, (task / "children").read_text().split()))
    return found


def descriptors() -> set[str]:
    """Return the numbers of the open descriptors, that of the listing itself included."""
    return {entry.name for entry in pathlib.Path("/proc/self/fd").iterdir()}


@pytest.fixture(autouse=True)
def _leaves_nothing_behind() -> Iterator[None]:
    # What tests that ran before have left is none of ours.
    before = descriptors(), children(), set(threading.enumerate())
    yield
    until(lambda: descriptors() <= before[0])
    assert children() <= before[1]
    assert set(threading.enumerate()) <= before[2]


class Rig:
    """A watch, how often it has called back, and what was logged meanwhile."""

    def __init__(self, events: event_listener.GpuEvents, logs: list[EventDict]) -> None:
        self.events = events
        self.logs = logs
        self.calls = 0

    def logged(self, event: str) -> list[EventDict]:
        return [entry for entry in list(self.logs) if entry["event"] == event]

    def until_listening(self, times: int = 1) -> None:
        until(lambda: len(self.logged("gpu_events_watched")) >= times)

    def until_called(self, times: int, *, within_s: float = SOON_S) -> None:
        until(lambda: self.calls >= times, within_s=within_s)


@contextlib.contextmanager
def watching(
    command: Sequence[str],
    *,
    restarts: timing.Backoff = NEVER_AGAIN,
    first_word_s: float = 60.0,
    on_change: Callable[[], None] = lambda: None,
) -> Iterator[Rig]:
    """Listen for the body."""

    def count() -> None:
        rig.calls += 1
        on_change()

    events = event_listener.GpuEvents(
        command=command,
        on_change=count,
        quiet_s=0.1,
        first_word_s=first_word_s,
        restarts=restarts,
    )
    with structlog.testing.capture_logs() as logs:
        rig = Rig(events, logs)
        events.start()
        try:
            yield rig
        finally:
            events.stop()


def scripted(script: str) -> list[str]:
    """Return the command line of a listener that is this script."""
    return [sys.executable, "-c", PREAMBLE + script]


# Real listeners on a simulated node.


class Node:
    """A simulated node, changed by processes of their own."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path

    def command(self) -> tuple[str, ...]:
        return event_listener.listener_command(simulate_state=str(self.path))

    def change(self, code: str) -> None:
        """Have another process run code on the first GPU."""
        script = f"""
import pathlib, pynvml
from mig_manager.sandbox import nvml
nvml.install(pathlib.Path({str(self.path)!r}))
pynvml.nvmlInit()
device = pynvml.nvmlDeviceGetHandleByIndex(0)
{code}
"""
        subprocess.run([sys.executable, "-c", script], check=True)  # noqa: S603 - our own


ENABLE = "pynvml.nvmlDeviceSetMigMode(device, 1)"
CREATE = "pynvml.nvmlDeviceCreateGpuInstance(device, 9)"
DESTROY = "pynvml.nvmlGpuInstanceDestroy(pynvml.nvmlDeviceGetGpuInstanceById(device, 2))"


@pytest.fixture
def node(tmp_path: pathlib.Path) -> Node:
    path = tmp_path / "state"
    simulated.create("2xa100-sxm4-40gb", path)
    return Node(path)


def test_an_instance_destroyed_by_another_process_is_told_once_and_at_once(node: Node) -> None:
    node.change(f"{ENABLE}\n{CREATE}")
    with watching(node.command()) as rig:
        rig.until_listening()
        node.change(DESTROY)
        rig.until_called(1, within_s=1.0)
        node.change(CREATE)
        rig.until_called(2)
    assert rig.calls == 2
    (first, second) = rig.logged("gpu_change_heard")
    assert first["gpus"] == second["gpus"] == [simulated.SharedState(node.path).boards[0].uuid]


def test_what_is_changed_during_a_suspension_is_not_told(node: Node) -> None:
    with watching(node.command()) as rig:
        rig.until_listening()
        with rig.events.suspended():
            assert not children()
            node.change(f"{ENABLE}\n{CREATE}")
        rig.until_listening(2)
        node.change(DESTROY)
        rig.until_called(1)
    assert rig.calls == len(rig.logged("gpu_change_heard")) == 1


def test_a_driver_without_the_event_is_told_once_and_left_alone(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "state"
    options = simulated.Options(mig_events=states.MigEvents.NEVER, logs_calls=True)
    simulated.create("a100-sxm4-40gb", path, options=options)
    with watching(Node(path).command(), restarts=AT_ONCE) as rig:
        until(lambda: bool(rig.logged("gpu_events_unsupported")))
        until(lambda: not children())
        with rig.events.suspended():
            pass
        log = path.with_name("state.calls")
        until(lambda: log.read_text().count('"nvmlShutdown"') == 2)
        until(lambda: not children())
    assert [entry["event"] for entry in rig.logs] == ["gpu_events_unsupported"]
    assert "nvmlDeviceRegisterEvents" in rig.logs[0]["error"]
    assert rig.calls == 0
    assert log.read_text().count('"nvmlDeviceRegisterEvents"') == 2


@pytest.mark.slow
def test_an_old_driver_is_heard_once_mig_is_on(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "state"
    options = simulated.Options(mig_events=states.MigEvents.WHILE_ON)
    simulated.create("a100-sxm4-40gb", path, options=options)
    node = Node(path)
    with watching(node.command()) as rig:
        until(lambda: bool(rig.logged("gpu_events_unsupported")))
        with rig.events.suspended():
            node.change(ENABLE)
        rig.until_listening()
        node.change(CREATE)
        rig.until_called(1)


def test_a_listener_that_is_killed_is_replaced_and_a_look_is_due(node: Node) -> None:
    with watching(node.command(), restarts=AT_ONCE) as rig:
        rig.until_listening()
        (pid,) = children()
        os.kill(pid, signal.SIGKILL)
        rig.until_listening(2)
        rig.until_called(1)
        node.change(ENABLE)
        rig.until_called(2)
    (ended,) = rig.logged("gpu_listener_ended")
    assert "signal 9" in ended["error"]


@pytest.mark.slow
def test_a_driver_that_is_loaded_later_is_listened_to_then(tmp_path: pathlib.Path) -> None:
    node = Node(tmp_path / "state")
    with watching(node.command(), restarts=AT_ONCE) as rig:
        until(lambda: bool(rig.logged("gpu_listener_ended")))
        simulated.create("a30", node.path)
        rig.until_listening()
        rig.until_called(1)
    (ended,) = rig.logged("gpu_listener_ended")
    assert ended["reason"] == "DriverNotLoaded"


def test_a_listener_ends_when_its_stdin_does(node: Node) -> None:
    with subprocess.Popen(  # noqa: S603 - our own command line
        node.command(), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as listener:
        assert listener.stdout is not None
        assert listener.stdin is not None
        assert b'"watching": 2' in listener.stdout.readline()
        listener.stdin.close()
        assert listener.wait(SOON_S) == 0


def test_a_listener_dies_with_the_agent(node: Node, tmp_path: pathlib.Path) -> None:
    pid_file = tmp_path / "pid"
    agent = f"""
import os, pathlib, signal
from mig_manager.adapters.nvml_worker import event_listener
def told():
    task = pathlib.Path("/proc/self/task")
    pids = [pid for each in task.iterdir() for pid in (each / "children").read_text().split()]
    pathlib.Path({str(pid_file)!r}).write_text(pids[0])
    os.kill(os.getpid(), signal.SIGKILL)
events = event_listener.GpuEvents(command={node.command()!r}, on_change=told, quiet_s=0.0)
events.start()
signal.pause()
"""
    with subprocess.Popen([sys.executable, "-c", agent], stdout=subprocess.PIPE) as started:  # noqa: S603
        assert started.stdout is not None
        assert b"gpu_events_watched" in started.stdout.readline()
        node.change(ENABLE)
        assert started.wait(SOON_S) == -signal.SIGKILL
    until(lambda: is_dead(pid_file.read_text()))


def is_dead(pid: str) -> bool:
    """Tell whether a process, which is not ours to reap, has ended."""
    try:
        stat = pathlib.Path("/proc", pid, "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"


def test_a_listener_carries_neither_the_agent_nor_the_planner() -> None:
    script = (
        "import sys, mig_manager.adapters.nvml_worker.gpu_listener; print(*sorted("
        "name for name in sys.modules if name.startswith('mig_manager.') or name in"
        " ('kubernetes', 'structlog', 'tenacity', 'yaml', 'subprocess', 'concurrent.futures')))"
    )
    loaded = subprocess.run(  # noqa: S603 - our own interpreter
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    )
    modules = set(loaded.stdout.split())
    assert "mig_manager.adapters.nvml_worker.gpu_listener" in modules
    assert not modules & {"kubernetes", "structlog", "tenacity", "yaml", "concurrent.futures"}
    assert not any(
        name.startswith(("mig_manager.agent", "mig_manager.change", "mig_manager.sandbox"))
        for name in modules
    )
    ours = {name for name in modules if name.startswith("mig_manager.core")}
    assert ours == {f"mig_manager.core{part}" for part in ("", ".text", ".text.safetext")}


# Scripted listeners.


def test_a_burst_is_told_once() -> None:
    command = scripted("""
say(watching)
for _ in range(50):
    say(changed)
until_the_end()
""")
    with watching(command) as rig:
        until(lambda: len(rig.logged("gpu_change_heard")) == 50)
        rig.until_called(1)
        with rig.events.suspended():
            assert rig.calls == 1


def test_news_are_put_together_from_pieces() -> None:
    command = scripted("""
line = gpu_news.encode(watching) + gpu_news.encode(changed)
for byte in line:
    os.write(1, bytes([byte]))
until_the_end()
""")
    with watching(command) as rig:
        rig.until_called(1)


def test_a_change_that_is_about_to_be_told_is_dropped_by_a_suspension(
    tmp_path: pathlib.Path,
) -> None:
    # The first listener never falls silent, so that its burst is not over when it is suspended.
    once = tmp_path / "once"
    command = scripted(f"""
say(watching)
if not os.path.exists({str(once)!r}):
    open({str(once)!r}, "w").close()
    while True:
        say(changed)
        time.sleep(0.02)
until_the_end()
""")
    with watching(command) as rig:
        until(lambda: bool(rig.logged("gpu_change_heard")))
        with rig.events.suspended():
            before = rig.calls
        rig.until_listening(2)
    assert before == rig.calls == 0


def test_a_listener_that_says_nothing_is_killed_in_time() -> None:
    with watching(scripted("signal.pause()"), first_word_s=0.3) as rig:
        until(lambda: bool(rig.logged("gpu_listener_ended")))
        assert not children()
    (ended,) = rig.logged("gpu_listener_ended")
    assert ended["reason"] == "NvmlTimeout"


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("sys.exit(3)", "status 3"),
        ("print('hello', flush=True); until_the_end()", "hello"),
        ("os.close(1); until_the_end()", "signal 9"),
        ("os.write(1, b'x' * 200_000); until_the_end()", ""),
        ("say(gpu_news.Failed(reason=errors.Reason.GPU_LOST, message='gone'))", "gone"),
    ],
)
def test_a_listener_that_is_no_good_is_replaced_after_a_pause(script: str, error: str) -> None:
    with watching(scripted(script)) as rig:
        until(lambda: bool(rig.logged("gpu_listener_ended")))
        until(lambda: not children())
    (ended,) = rig.logged("gpu_listener_ended")
    assert error in ended["error"]
    assert ended["delay_s"] == 3600.0


def test_a_listener_that_cannot_be_started_is_tried_again() -> None:
    with watching(["/does/not/exist"]) as rig:
        until(lambda: bool(rig.logged("gpu_listener_ended")))
    assert "cannot be started" in rig.logged("gpu_listener_ended")[0]["error"]


@pytest.mark.slow
def test_pauses_grow_and_the_same_trouble_is_told_once(tmp_path: pathlib.Path) -> None:
    starts = tmp_path / "starts"
    command = scripted(f"""
with open({str(starts)!r}, "a") as file:
    file.write(f"{{time.monotonic()}}\\n")
sys.exit(3)
""")
    with watching(command, restarts=timing.Backoff(first_s=0.05, max_s=0.4, factor=2.0)) as rig:
        until(lambda: starts.exists() and starts.read_text().count("\n") == 5)
    times = list(map(float, starts.read_text().split()))
    pauses = [after - before for before, after in itertools.pairwise(times)]
    least = (0.05, 0.1, 0.2, 0.4)
    assert all(pause >= floor for pause, floor in zip(pauses, least, strict=True))
    assert len(rig.logged("gpu_listener_ended")) == 1


def test_what_a_listener_writes_to_stderr_is_logged_in_part() -> None:
    script = "os.write(2, b'x' * 200_000 + b' the end'); sys.exit(3)"
    with watching(scripted(script)) as rig:
        until(lambda: bool(rig.logged("gpu_listener_ended")))
    (words,) = rig.logged("gpu_listener_stderr")
    assert len(words["stderr"]) <= 16 * 1024
    assert words["stderr"].endswith("the end")


def test_a_bug_in_who_is_called_does_not_end_the_listening() -> None:
    def fail_once() -> None:
        if rig.calls == 1:
            raise ZeroDivisionError

    command = scripted("say(watching); say(changed); until_the_end()")
    with watching(command, restarts=AT_ONCE, on_change=fail_once) as rig:
        rig.until_called(2)
    assert len(rig.logged("gpu_events_error")) == 1


def test_suspensions_nest_and_interrupt_a_pause(tmp_path: pathlib.Path) -> None:
    starts = tmp_path / "starts"
    command = scripted(f"open({str(starts)!r}, 'a').write('x'); sys.exit(3)")
    with watching(command) as rig:
        until(lambda: bool(rig.logged("gpu_listener_ended")))
        with rig.events.suspended(), rig.events.suspended():
            pass
        until(lambda: starts.read_text() == "xx")


def test_without_a_start_there_is_nothing_to_suspend_or_to_stop() -> None:
    events = event_listener.GpuEvents(command=["/does/not/exist"], on_change=lambda: None)
    since = time.monotonic()
    with events.suspended():
        pass
    events.stop()
    assert time.monotonic() - since < 1.0


def test_stopping_ends_a_listener_that_ignores_everything_but_a_kill() -> None:
    command = scripted("""
signal.signal(signal.SIGTERM, signal.SIG_IGN)
say(watching)
while True:
    signal.pause()
""")
    with watching(command) as rig:
        rig.until_listening()
        since = time.monotonic()
        rig.events.stop()
        assert time.monotonic() - since < 2.0
        assert not children()


def test_after_a_stop_it_can_be_started_again() -> None:
    command = scripted("say(watching); until_the_end()")
    with watching(command) as rig:
        rig.until_listening()
        rig.events.stop()
        assert not children()
        rig.events.start()
        rig.until_listening(2)


def test_closing_tells_how_a_listener_has_ended() -> None:
    talker = gpu_talker.Talker(scripted("until_the_end()"))
    try:
        talker.kill()
        until(lambda: talker.hear(SOON_S) is None)
    finally:
        assert talker.close()
    assert "signal 9" in talker.epitaph().message
