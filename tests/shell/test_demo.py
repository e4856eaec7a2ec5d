"""``mig-manager demo`` as a process: what it shows at its end, and what it leaves behind."""

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence

import pytest

from mig_manager.sandbox import ending
from tests.rigs import programs, waiting
from tests.rigs.shell import plugin_rig

SPEC = "2xA100-SXM4-40GB"
DEMO = (sys.executable, "-m", "mig_manager", "demo", "--simulate", SPEC)
KEPT = "until you press Ctrl-C"
ON_A_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""
APPLIED = (
    r"kubectl wait node sandbox --timeout=180s "
    r"--for=jsonpath='{{.metadata.labels.mig-manager\.io/applied}}'={}"
)
TIMEOUT_S = 240


class Demo:
    """A demo in a session of its own, with its own home and temporary folder."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.home, self.temporary = folder / "home", folder / "my tmp"
        self.home.mkdir()
        self.temporary.mkdir()
        self.log = folder / "output.txt"
        self.errors = folder / "errors.txt"
        self.environ = {
            "HOME": str(self.home),
            "PATH": os.environ["PATH"],
            "PYTHONUTF8": "1",
            "TMPDIR": str(self.temporary),
        }
        self._exits = contextlib.ExitStack()

    def start(self, line: Sequence[str], *, stdin: int, stdout: int) -> "subprocess.Popen[str]":
        """Start a command; the streams that are not given here go to files."""
        with self.errors.open("wb") as stderr:
            process = self._exits.enter_context(
                subprocess.Popen(  # noqa: S603 - our own program
                    line,
                    env=self.environ,
                    stdin=stdin,
                    stdout=stdout,
                    stderr=stderr,
                    text=True,
                    start_new_session=True,
                )
            )
        self._exits.callback(self._kill)
        self.session = process.pid
        return process

    def start_logged(self, *line: str) -> "subprocess.Popen[str]":
        """Start a command that writes to the log."""
        with self.log.open("wb") as log:
            return self.start(line, stdin=subprocess.DEVNULL, stdout=log.fileno())

    def wait_for(self, words: str) -> None:
        waiting.until(lambda: words in self.output(), words, within_s=TIMEOUT_S)

    def output(self) -> str:
        return self.log.read_text(encoding="utf-8")

    def members(self) -> list[int]:
        """Return the processes of the demo's session that have not ended."""
        pids = []
        for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                state, _, _, session, *_ = stat.read_text().rpartition(")")[2].split()
                if int(session) == self.session and state != "Z":
                    pids.append(int(stat.parent.name))
        return pids

    def assert_nothing_left(self) -> None:
        assert self.members() == []
        assert list(self.temporary.iterdir()) == []
        assert list(self.home.iterdir()) == []
        assert self.errors.read_text() == ""

    def close(self) -> None:
        self._exits.close()

    def _kill(self) -> None:
        for pid in self.members():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def demo(tmp_path: pathlib.Path) -> Iterator[Demo]:
    with contextlib.closing(Demo(tmp_path)) as demo:
        yield demo


def commands(output: str) -> list[str]:
    """Return the lines for a shell, from the heading on."""
    _, _, end = output.partition("Try next")
    return re.findall(r"^ +((?:export|kubectl|mig-manager) .*)$", end, re.MULTILINE)


def shell(demo: Demo, *lines: str) -> str:
    done = subprocess.run(  # noqa: S603 - what the demo has printed
        ["/bin/bash", "-euc", "\n".join(lines)],
        env=demo.environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, (lines, done.stderr)
    return done.stdout


@pytest.mark.slow
def test_demo_ends_with_three_commands_that_work(demo: Demo) -> None:
    # Without the folder of the console scripts, as for a reader who named the program's path.
    demo.environ["PATH"] = os.defpath
    process = demo.start_logged(*DEMO)
    assert process.wait(TIMEOUT_S) == 0
    demo.assert_nothing_left()

    _, _, end = demo.output().partition("success (Applied)")
    assert re.search(r"✓.*GPUs before and after\n.*before │.*after │.*Try next", end, re.DOTALL)
    assert "the other 7 pods kept running on the same devices" in demo.output()
    export, other_story, plan, kept = commands(demo.output())
    assert "success (Applied)" in shell(demo, export, other_story)
    assert "14 created" in shell(demo, export, plan)
    process = demo.start_logged("/bin/bash", "-euc", f"{export}\nexec {kept}")
    demo.wait_for(KEPT)
    process.terminate()


@pytest.mark.slow
def test_only_commands_and_single_words_are_wider_than_the_terminal(demo: Demo) -> None:
    demo.environ["COLUMNS"] = "60"
    process = demo.start_logged(*DEMO, "--scenario", "does-not-fit")
    assert process.wait(TIMEOUT_S) == 0

    story, _, _ = demo.output().partition("Try next")
    assert [each for each in story.splitlines() if len(each) > 60 and " " in each.strip()] == []
    assert re.search(r"^ +[0-9.]+ s  agent    failed .*\n {20}\S", story, re.MULTILINE)
    assert len(commands(demo.output())) == 3


@pytest.mark.slow
def test_kept_node_serves_its_layouts_to_the_plugin(demo: Demo) -> None:
    programs.path_or_skip("kubectl")
    demo.environ["PATH"] = os.pathsep.join([str(plugin_rig.BIN), os.environ["PATH"]])
    demo.start_logged(*DEMO, "--scenario", "first-layout", "--keep")
    demo.wait_for(KEPT)
    kubeconfig, path, layouts, rollout, label = commands(demo.output())
    assert kubeconfig.startswith(f"export KUBECONFIG='{demo.temporary}")
    # The next terminal may be outside the virtual environment.
    assert str(plugin_rig.BIN) in path

    namespaces = shell(demo, kubeconfig, "kubectl get namespaces").split()
    assert {"default", "gpu-operator", "mig-manager"} <= {*namespaces}
    listed = shell(demo, kubeconfig, layouts)
    assert "all-balanced · " in listed
    assert "its content is in no known" not in listed
    assert "demo-" not in listed
    assert re.search(r"sandbox.*(fits|instances)", shell(demo, kubeconfig, rollout), re.DOTALL)
    assert "2g.10gb" in shell(demo, kubeconfig, "kubectl mig plan all-balanced")
    assert "labeled" in shell(demo, kubeconfig, label)
    shell(demo, kubeconfig, APPLIED.format("all-balanced"))


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 3])
def test_a_reader_that_leaves_early_ends_the_demo_quietly(demo: Demo, count: int) -> None:
    process = demo.start(DEMO, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    assert process.stdout is not None
    for _ in range(count):
        process.stdout.readline()
    process.stdout.close()

    assert process.wait(TIMEOUT_S) == 128 + signal.SIGPIPE
    demo.assert_nothing_left()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("moment", ["kubectl label node", KEPT], ids=["in a change", "kept"])
def test_a_signal_ends_the_demo_and_everything_that_it_started(
    demo: Demo, number: signal.Signals, moment: str
) -> None:
    process = demo.start_logged(*DEMO, "--keep")
    demo.wait_for(moment)
    assert len(demo.members()) > 1

    process.send_signal(number)

    assert process.wait(TIMEOUT_S) == -number
    demo.assert_nothing_left()


@pytest.mark.slow
def test_a_demo_that_is_killed_leaves_nothing_behind(demo: Demo) -> None:
    process = demo.start_logged(*DEMO, "--keep")
    demo.wait_for("kubectl label node")
    assert len(demo.members()) > 1

    process.kill()

    process.wait(TIMEOUT_S)
    waiting.until(lambda: not demo.members(), "the end of the rest")
    demo.assert_nothing_left()


@pytest.mark.slow
def test_a_demo_of_five_nodes_plays_rollout_undo_and_partitioner(demo: Demo) -> None:
    process = demo.start_logged(*DEMO, "--simulate", "2xH100", "--nodes", "5", "--keep")
    demo.wait_for(KEPT)
    assert demo.output().count("✓") == 5
    # One node at a time: the second one fails, and no other one starts.
    assert "✓ it evicted one pod on each changed node: gpu-1\n" in demo.output()
    assert "│7g█████████████████████████████│" in demo.output()
    *proposed, rollout = commands(demo.output())
    exports = [line for line in proposed if line.startswith("export")]
    assert "5 fits" in shell(demo, *exports, f"{rollout} --dry-run")
    process.terminate()
    process.wait(TIMEOUT_S)
    demo.assert_nothing_left()


@pytest.mark.slow
def test_a_closed_terminal_ends_the_demo_and_everything_that_it_started(demo: Demo) -> None:
    window, terminal = os.openpty()
    line = [sys.executable, "-c", ON_A_TERMINAL, *DEMO, "--keep"]
    process = demo.start(line, stdin=terminal, stdout=terminal)
    os.close(terminal)
    shown = b""
    while KEPT.encode() not in shown:
        shown += os.read(window, 4096)

    os.close(window)

    assert process.wait(TIMEOUT_S) == -signal.SIGHUP
    demo.assert_nothing_left()


def test_further_signals_do_not_interrupt_the_removal() -> None:
    has_ended = threading.Event()
    removed: list[bool] = []

    def interrupt_again() -> None:
        with ending.on_signals(lambda _error: has_ended.set()):
            signal.raise_signal(signal.SIGINT)
            assert has_ended.wait(TIMEOUT_S)
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGINT)
            removed.append(True)

    with pytest.raises(KeyboardInterrupt):
        interrupt_again()
    assert removed == [True]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("blocks", "spec"),
    [
        pytest.param(4, SPEC, id="from-the-start"),
        # More than its layouts take, and less than the state of a node with a pod on every device.
        pytest.param(48, "16xA100-SXM4-40GB", id="while-pods-start"),
    ],
)
def test_unwritable_files_are_not_reported_as_a_bug(demo: Demo, blocks: int, spec: str) -> None:
    # Python would keep a file of bytecode that it could write only in part.
    demo.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    limited = ("sh", "-c", f'ulimit -f {blocks}; exec "$@"', "sh", *DEMO, "--simulate", spec)

    assert demo.start_logged(*limited).wait(TIMEOUT_S) == 2
    assert demo.errors.read_text() == (
        "mig-manager: cannot write the files of the simulated node: File too large\n"
        "  remedy: Set TMPDIR to a folder with room.\n"
    )
    assert not list(demo.temporary.iterdir())


@pytest.mark.slow
def test_demo_ignores_another_mig_manager_in_the_current_folder(
    demo: Demo, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "mig_manager"
    other.mkdir()
    (other / "__init__.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    program = str(plugin_rig.BIN / "mig-manager")

    process = demo.start_logged(program, "demo", "--scenario", "does-not-fit", "--simulate", SPEC)

    assert process.wait(TIMEOUT_S) == 0
    demo.assert_nothing_left()
