"""Hooks as real processes: what they get, what is kept of what they say, and how they end."""

import os
import pathlib
from collections.abc import Callable, Mapping

import pytest
import structlog

from mig_manager import errors, reasons
from mig_manager.adapters.host import hooks
from mig_manager.core.files import hook_files
from mig_manager.core.files.hook_files import Point
from tests.rigs import programs, waiting
from tests.rigs.host import processes

PATH = os.defpath


class Over(Exception):  # noqa: N818 - stands for whatever ends a run
    pass


class HooksRig:
    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.file = folder / "hooks.yaml"
        self.timeout_s = 60.0
        self.search_path = PATH

    @property
    def port(self) -> hooks.HookPrograms:
        return hooks.HookPrograms(
            self.file,
            variables={"MIG_PARTED_CONFIG_FILE": "c.yaml"},
            search_path=self.search_path,
            timeout_s=self.timeout_s,
        )

    def hook(self, **fields: object) -> hook_files.Hook:
        defaults: dict[str, object] = {"args": (), "envs": {}, "workdir": "", "timeout_s": None}
        place = errors.Location(source=str(self.file), line=4, column=7)
        return hook_files.Hook(location=place, **(defaults | fields))  # type: ignore[arg-type]

    def sh(self, script: str, **fields: object) -> hook_files.Hook:
        return self.hook(command="/bin/sh", args=("-c", script), **fields)

    def run(
        self,
        hook: hook_files.Hook,
        environment: Mapping[str, str] | None = None,
        *,
        check: Callable[[], object] = lambda: None,
    ) -> list[Mapping[str, object]]:
        """Run a hook; return what was logged of its end."""
        with structlog.testing.capture_logs() as logged:
            self.port.run(Point.PRE_APPLY_MODE, hook, environment or {}, check=check)
        return [line for line in logged if line["event"] == "hook_ended"]

    def fails(self, hook: hook_files.Hook) -> tuple[str, Mapping[str, object]]:
        """Run a hook that fails; return reason and log line."""
        with structlog.testing.capture_logs() as logged, pytest.raises(errors.HostError) as caught:
            self.port.run(Point.PRE_APPLY_MODE, hook, {}, check=lambda: None)
        assert caught.value.reason is reasons.Reason.HOOK_FAILED
        ends = [line for line in logged if line["event"] == "hook_ended"]
        return caught.value.message, ends[0] if ends else {}


@pytest.fixture
def rig(tmp_path: pathlib.Path) -> HooksRig:
    return HooksRig(tmp_path)


def test_the_output_of_a_hook_is_logged_and_its_input_is_empty(rig: HooksRig) -> None:
    (line,) = rig.run(rig.sh("cat; echo Hello; echo there >&2"))

    assert (line["stdout"], line["stderr"]) == ("Hello", "there")
    assert (line["point"], line["command"], line["how"]) == ("pre-apply-mode", "/bin/sh", "well")


def test_a_missing_program_is_detected_before_and_an_error_when_run(rig: HooksRig) -> None:
    hook = rig.hook(command="/doesnotexist")

    for command in ("/", "/etc/passwd", "/dev/null", ".", "a" * 5000):
        assert rig.port.missing(rig.hook(command=command))
    assert rig.port.missing(hook) == (f"{rig.file}:4:7: program /doesnotexist is not found")
    message, _ = rig.fails(hook)
    assert message.endswith("cannot be run: program not found")


@pytest.mark.parametrize("environment", [{"B": "", "A": "1 2"}, {}])
def test_a_hook_gets_its_own_environment_and_none_of_ours(
    rig: HooksRig, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OURS", "x")
    (line,) = rig.run(rig.hook(command="/usr/bin/env"), environment)

    assert str(line["stdout"]).splitlines() == [f"{k}={v}" for k, v in environment.items()]


def test_arguments_are_passed_without_a_shell(rig: HooksRig) -> None:
    (line,) = rig.run(rig.hook(command="/bin/echo", args=("$HOME", "a  b", "*", ";", "")))

    assert line["stdout"] == "$HOME a  b * ; "


def test_a_program_without_a_slash_is_searched_on_our_path_not_the_hooks(rig: HooksRig) -> None:
    programs.write_script(rig.folder / "own-tool", "echo found")
    rig.search_path = f".:{rig.folder}:{PATH}"

    (line,) = rig.run(rig.hook(command="own-tool"), {"PATH": "/nowhere"})
    assert line["stdout"] == "found"
    rig.search_path = ""
    assert rig.port.missing(rig.hook(command="own-tool"))
    assert not rig.port.missing(rig.hook(command="sh"))


def test_hook_runs_in_its_folder_where_relative_programs_are_searched(rig: HooksRig) -> None:
    place = rig.folder / "place"
    script = programs.write_script(place / "tool.sh", "pwd")

    (line,) = rig.run(rig.hook(command="./tool.sh", workdir=str(place)))
    assert line["stdout"] == str(place)
    assert rig.port.missing(rig.hook(command="./tool.sh"))
    (line,) = rig.run(rig.hook(command=str(script)))
    assert line["stdout"] == str(pathlib.Path.cwd())


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda rig: rig.sh("true", workdir="/no/such/folder"), "No such file or directory"),
        (lambda rig: rig.hook(command=str(rig.folder / "broken")), "Exec format error"),
        (lambda rig: rig.sh("x" * 3_000_000), "Argument list too long"),
        (lambda rig: rig.sh("exit 3"), "/bin/sh ended with status 3"),
        (lambda rig: rig.sh("kill -USR1 $$"), "was killed by SIGUSR1"),
        (lambda rig: rig.sh("sleep 600"), "was killed after 0.5 s"),
    ],
)
def test_hook_that_cannot_start_or_fails_is_an_error(
    rig: HooksRig, make: Callable[[HooksRig], hook_files.Hook], why: str
) -> None:
    broken = rig.folder / "broken"
    broken.write_bytes(b"\x7fELF nonsense")
    broken.chmod(0o755)
    rig.timeout_s = 0.5 if "killed after" in why else 60.0

    message, _ = rig.fails(make(rig))

    assert message.startswith(f"{rig.file}:4:7: the pre-apply-mode hook ")
    assert why in message


def test_failing_hook_is_reported_with_its_last_line(rig: HooksRig) -> None:
    message, line = rig.fails(rig.sh("echo one; echo two >&2; echo last words >&2; exit 3"))

    assert message.endswith("ended with status 3: last words")
    assert (line["log_level"], line["stderr"]) == ("warning", "two\nlast words")


def test_only_the_end_of_long_output_is_kept(rig: HooksRig) -> None:
    script = "i=0; while [ $i -lt 20000 ]; do echo line $i; i=$((i+1)); done; exit 1"
    message, line = rig.fails(rig.sh(script))

    assert message.endswith("line 19999")
    assert len(str(line["stdout"])) <= 4096


def child_of(rig: HooksRig) -> int:
    return int((rig.folder / "pid").read_text(encoding="utf-8"))


def test_a_hook_that_times_out_is_killed_with_its_children(rig: HooksRig) -> None:
    script = "sleep 600 & echo $! > pid; echo waiting; wait"
    message, line = rig.fails(rig.sh(script, workdir=str(rig.folder), timeout_s=3.0))

    assert message.endswith("the pre-apply-mode hook /bin/sh was killed after 3 s: waiting")
    assert line["stdout"] == "waiting"
    waiting.until(lambda: processes.is_dead(child_of(rig)), "the end of the child")


def test_an_error_of_the_check_kills_the_hook_with_its_children(rig: HooksRig) -> None:
    script = "sleep 600 & echo $! > pid.new; mv pid.new pid; wait"

    def check() -> None:
        if (rig.folder / "pid").exists():
            raise Over

    with pytest.raises(Over):
        rig.run(rig.sh(script, workdir=str(rig.folder)), check=check)

    waiting.until(lambda: processes.is_dead(child_of(rig)), "the end of the child")


def test_hooks_have_given_variables_and_one_with_the_name_of_their_file(rig: HooksRig) -> None:
    assert rig.port.variables == {
        "MIG_PARTED_CONFIG_FILE": "c.yaml",
        "MIG_PARTED_HOOKS_FILE": str(rig.file),
    }
