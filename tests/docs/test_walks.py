"""The commands of the guides give the output that the guides show."""

import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from mig_manager.core.files import hook_files, service_files
from tests.docs import pages
from tests.rigs import contract, programs, waiting

DOCS = pages.ROOT / "docs"
_TIMEOUT_S = 240.0
_READS = re.compile(r"kubectl (get|describe) ")
_EXPORT = re.compile(r"^ *(export KUBECONFIG=\S+)$", re.MULTILINE)


class Reader:
    """A reader with two terminals and a home of their own: one runs the demonstration."""

    def __init__(self, home: pathlib.Path) -> None:
        folder = pathlib.Path(sys.executable).parent
        self._exports: list[str] = []
        self._environ = {
            "HOME": str(home),
            "PATH": os.pathsep.join((str(folder), os.environ["PATH"])),
            "PYTHONUNBUFFERED": "1",
            "PYTHONUTF8": "1",
            "TERM": "dumb",
        }
        self._demo_log = home / "demonstration.txt"
        self._demo: subprocess.Popen[bytes] | None = None

    def follow(self, page: str, has: str) -> None:
        """Run the commands of a page; one of them must have these words or show them."""
        steps = pages.steps(DOCS / page)
        assert any(has in step.command + step.shown for step in steps)
        for step in steps:
            self._take(step)

    def _take(self, step: pages.Step) -> None:
        """Run one command, and compare its output with the page."""
        match step.how:
            case "not here, the test has an environment already" | "on your own cluster":
                return
            case "in the background":
                self._start(step.command)
            case "as the demonstration has printed it":
                self._exports.append(self._as_printed(step.command))
            case "":
                self._run(step)
            case other:
                raise AssertionError(f"a page says 'run: {other}', which means nothing")

    def demonstration(self) -> str:
        """Return what the demonstration has written so far."""
        return self._demo_log.read_text(encoding="utf-8")

    def _start(self, command: str) -> None:
        with self._demo_log.open("wb") as log:
            self._demo = demo = subprocess.Popen(  # noqa: S603 - from our own page
                ["/bin/bash", "-c", f"exec {command}"],
                cwd=pages.ROOT,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

        def is_there() -> bool:
            assert demo.poll() is None, self.demonstration()
            return _EXPORT.search(self.demonstration()) is not None

        waiting.until(is_there, "the demonstration", within_s=_TIMEOUT_S)

    def _as_printed(self, command: str) -> str:
        if "…" not in command:
            return command
        (printed,) = _EXPORT.findall(self.demonstration())
        assert pages.differences(command, printed) == []
        return str(printed)

    def _run(self, step: pages.Step) -> None:
        different: list[str] = []

        def is_as_shown() -> bool:
            different[:] = pages.differences(step.shown, self._output(step.command))
            return not different

        # Only commands that read are repeated until they show the expected output.
        within_s = _TIMEOUT_S if _READS.match(step.command) else 0.0
        is_shown = waiting.comes_true(is_as_shown, within_s=within_s)
        assert is_shown, "\n".join((step.command, *different))

    def _output(self, command: str) -> str:
        """Run a command, which must succeed; return what a terminal shows of it."""
        done = subprocess.run(  # noqa: S603 - from our own page
            ["/bin/bash", "-euc", "\n".join((*self._exports, command))],
            cwd=pages.ROOT,
            env=self._environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            timeout=_TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}"
        return done.stdout

    def leave(self) -> None:
        if self._demo is None or self._demo.poll() is not None:
            return
        self._demo.send_signal(signal.SIGINT)
        try:
            self._demo.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self._demo.pid, signal.SIGKILL)
            self._demo.wait()


@pytest.fixture
def reader(tmp_path: pathlib.Path) -> Iterator[Reader]:
    programs.path_or_skip("kubectl")
    reader = Reader(tmp_path)
    yield reader
    reader.leave()


@pytest.mark.slow
def test_quick_start_leads_to_a_changed_node(reader: Reader) -> None:
    reader.follow("quick-start.md", "nvidia.com/mig.config=")


@pytest.mark.slow
def test_the_guide_to_failures_leads_from_a_failed_node_to_its_remedy(reader: Reader) -> None:
    reader.follow("failed.md", "DrainTimeout")


def test_the_tags_for_an_autoscaler_are_those_that_its_page_shows(reader: Reader) -> None:
    reader.follow("many-nodes.md", "autoscaler-tags")


# -- commands and files that pages show -------------------------------------------------------

_VALID = {"systemd-services": service_files.parse, "hooks": hook_files.parse}
_FILE = re.compile(
    r"^```yaml\n(version: v1\n(?:systemd-services|hooks):.*?)^```$", re.DOTALL | re.MULTILINE
)
_NOT_CLONED = shutil.ignore_patterns(
    *(".git", ".venv", "site", "dist", "build", "*.egg-info"),
    *("__pycache__", ".*_cache", ".hypothesis", "schemas"),
)


def test_files_that_pages_show_are_valid() -> None:
    shown = [(page, text) for page in pages.SITE for text in _FILE.findall(page.read_text())]

    for page, text in shown:
        assert _VALID[text.splitlines()[1].partition(":")[0]](text, source=page.name)
    assert {page.name for page, _ in shown} >= {"hooks.md", "reconfiguration.md"}


@pytest.mark.release
def test_the_readme_leads_from_nothing_to_a_changed_node(tmp_path: pathlib.Path) -> None:
    text = (pages.ROOT / "README.md").read_text("utf-8")
    (command,) = re.findall(
        r"^```\n(python3 -m venv [^\n]*mig-manager demo)\n```$", text, re.MULTILINE
    )
    clone = tmp_path / "clone"
    shutil.copytree(pages.ROOT, clone, ignore=_NOT_CLONED)
    kept = {key: os.environ[key] for key in os.environ if key.startswith(("PATH", "SSL_", "PIP_"))}

    done = subprocess.run(  # noqa: S603 - our own README
        ["/bin/sh", "-c", command],
        cwd=clone,
        env={**kept, "HOME": str(tmp_path), "PYTHONUTF8": "1"},
        capture_output=True,
        encoding="utf-8",
        timeout=600,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert "the other 31 pods kept running on the same devices" in done.stdout
    assert done.stdout.count("✓") >= 4
    assert "✗" not in done.stdout
    schema = programs.output(clone / ".venv/bin/mig-manager", "schema", "Plan")
    assert schema == contract.installed_schemas()["Plan.json"]
