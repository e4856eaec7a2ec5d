"""``apply`` and ``restore`` with hooks as processes: theirs and ours; on simulated GPUs."""

import pathlib
import signal

import pytest

from tests.rigs import waiting
from tests.rigs.shell.shell_node import ShellNode

POINTS = ("apply-start", "pre-apply-mode", "pre-apply-config", "apply-exit")
SCRIPT = "echo $POINT >> log; env | grep ^MIG_ | sort > env.$POINT; {}"


class HookedNode(ShellNode):
    """A node with MIG off, and a hooks file whose hooks note that they ran."""

    def __init__(self, folder: pathlib.Path) -> None:
        super().__init__(folder, "1xA100-SXM4-40GB")
        self.folder = folder
        self.file = folder / "hooks.yaml"
        self.before = self.geometry
        self.write()

    def write(self, *, at: str = "", script: str = "") -> None:
        """Write the hooks; one of them also does something else."""
        lines = ["version: v1", "hooks:"]
        for point in POINTS:
            text = SCRIPT.format(script if point == at else ":")
            lines += [
                f"  {point}:",
                "  - command: /bin/sh",
                f"    args: [-c, '{text}']",
                f"    envs: {{POINT: {point}, PATH: /usr/bin:/bin}}",
                f"    workdir: {self.folder}",
            ]
        self.file.write_text("\n".join(lines), encoding="utf-8")

    @property
    def argv(self) -> tuple[str, ...]:
        return "apply", "requested", "-k", str(self.file)

    @property
    def ran(self) -> list[str]:
        log = self.folder / "log"
        return log.read_text(encoding="utf-8").split() if log.exists() else []

    def variables(self, point: str) -> dict[str, str]:
        """Return the variables that a hook had."""
        lines = (self.folder / f"env.{point}").read_text(encoding="utf-8").splitlines()
        return dict(line.split("=", 1) for line in lines)


@pytest.fixture
def hooked_node(tmp_path: pathlib.Path) -> HookedNode:
    return HookedNode(tmp_path)


@pytest.mark.slow
def test_every_hook_gets_the_variables_that_mig_parted_sets(hooked_node: HookedNode) -> None:
    answer = hooked_node.run(*hooked_node.argv, "--skip-reset")

    assert (answer.status, answer.out) == (
        0,
        "MIG configuration applied successfully\n",
    ), answer.err
    assert hooked_node.ran == list(POINTS)
    for point in POINTS:
        assert hooked_node.variables(point) == {
            "MIG_PARTED_CONFIG_FILE": str(hooked_node.layouts),
            "MIG_PARTED_SELECTED_CONFIG": "requested",
            "MIG_PARTED_HOOKS_FILE": str(hooked_node.file),
            "MIG_PARTED_SKIP_RESET": "true",
            "MIG_PARTED_MODE_CHANGE_ONLY": "false",
        }


@pytest.mark.slow
def test_the_hooks_of_a_restore_get_the_name_of_the_checkpoint(hooked_node: HookedNode) -> None:
    file = hooked_node.folder / "c.json"
    assert hooked_node.run("apply", "requested").status == 0
    assert hooked_node.run("checkpoint", "-f", str(file)).status == 0
    hooked_node.state.reboot()

    assert hooked_node.run("restore", "-f", str(file), "-k", str(hooked_node.file)).status == 0

    assert hooked_node.ran == ["apply-start", "pre-apply-config", "apply-exit"]
    assert hooked_node.variables("apply-start") == {
        "MIG_PARTED_CHECKPOINT_FILE": str(file),
        "MIG_PARTED_HOOKS_FILE": str(hooked_node.file),
        "MIG_PARTED_MODE_CHANGE_ONLY": "false",
    }


def test_failed_hook_is_reported_with_its_printable_output(hooked_node: HookedNode) -> None:
    hooked_node.write(
        at="apply-start", script=r'echo first; printf "\033[2J\007no way\377\n" >&2; exit 7'
    )

    answer = hooked_node.run(*hooked_node.argv)

    assert (answer.status, answer.out) == (1, "")
    assert "the apply-start hook /bin/sh ended with status 7: " in answer.err
    assert "no way" in answer.err
    assert "stdout=first" in answer.err
    assert not {"\033", "\007"} & set(answer.err)
    # What a failure costs at each point is tested in memory.
    assert hooked_node.geometry == hooked_node.before


def test_failed_hook_is_reported_once(hooked_node: HookedNode) -> None:
    hooked_node.write(at="pre-apply-mode", script="echo no way >&2; exit 7")

    assert hooked_node.run(*hooked_node.argv).err.count("no way") == 1


@pytest.mark.parametrize(
    ("point", "number"),
    [
        pytest.param(*(POINTS[0], signal.SIGTERM), marks=pytest.mark.slow),
        (POINTS[1], signal.SIGINT),
    ],
)
def test_a_signal_ends_the_running_hook_and_rolls_back(
    hooked_node: HookedNode, point: str, number: signal.Signals
) -> None:
    hooked_node.write(at=point, script="sleep 600")
    with hooked_node.start(*hooked_node.argv) as process:
        waiting.until(lambda: hooked_node.ran[-1:] == [point], "the hook")
        process.send_signal(number)
        _, stderr = process.communicate(timeout=120)

    # As a shell has it: ended by the signal, which for Ctrl-C is a status of ours.
    assert process.returncode == (130 if number is signal.SIGINT else -number), stderr
    assert "Traceback" not in stderr
    assert f"mig-manager: ended by {number.name}" in stderr
    assert hooked_node.ran[-1] == "apply-exit"
    assert hooked_node.geometry == hooked_node.before
    assert not hooked_node.journal.exists()


@pytest.mark.slow
def test_a_signal_in_the_last_hook_lets_it_finish(hooked_node: HookedNode) -> None:
    hooked_node.write(
        at="apply-exit", script="while [ ! -e go ]; do sleep 0.05; done; echo done >> log"
    )
    with hooked_node.start(*hooked_node.argv) as process:
        waiting.until(lambda: hooked_node.ran[-1:] == ["apply-exit"], "the hook")
        process.send_signal(signal.SIGTERM)
        (hooked_node.folder / "go").touch()
        _, stderr = process.communicate(timeout=120)

    assert process.returncode == -signal.SIGTERM
    assert stderr.endswith("mig-manager: the change has finished\n")
    assert hooked_node.ran[-1] == "done"
    assert hooked_node.run("assert", "requested").status == 0


@pytest.mark.slow
def test_debug_shows_lock_steps_and_output_of_hooks(hooked_node: HookedNode) -> None:
    hooked_node.write(at="apply-start", script="echo hello from the hook")
    at_debug = (
        "hello from the hook",
        "debug lock_acquired doing='apply requested'",
        "debug step_planned gpu=GPU-",
        "index=0 step='create GPU instance 1g.5gb at 0:1'",
        "debug plan_executed gpus=",
    )

    usual = hooked_node.run(*hooked_node.argv).err
    hooked_node.run("apply", "before")
    full = hooked_node.run(*hooked_node.argv, "--debug").err

    assert [text for text in at_debug if text in usual] == []
    assert [text for text in at_debug if text not in full] == []
