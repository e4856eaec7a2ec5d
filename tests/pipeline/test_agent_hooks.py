"""Hooks of the real agent process on a sandbox node: real programs, real HTTP, real pynvml."""

import pathlib
import signal

import pytest

from mig_manager.core import model
from mig_manager.core.node import well_known
from mig_manager.sandbox.node import objects
from tests.stage import agent_stage

LAYOUT = "all-1g.5gb"
POINTS = ("apply-start", "pre-apply-mode", "pre-apply-config", "apply-exit")


class Hooks:
    """A hooks file whose hooks note that they ran, and what they could see then."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.file = folder / "hooks.yaml"
        self.write()

    def write(self, *, at: str = "", script: str = ":") -> None:
        """Write the hooks; one of them also does something else."""
        lines = ["hooks:"]
        for point in POINTS:
            own = script if point == at else ":"
            lines += [
                f"  {point}:",
                "  - command: /bin/sh",
                f"    args: [-c, 'echo {point} $MIG_PARTED_SELECTED_CONFIG >> log; {own}']",
                "    envs: {PATH: /usr/bin:/bin}",
                f"    workdir: {self.folder}",
            ]
        fresh = self.folder / "hooks.new"
        fresh.write_text("\n".join(lines), encoding="utf-8")
        fresh.replace(self.file)

    @property
    def ran(self) -> list[str]:
        log = self.folder / "log"
        lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
        return [line.split()[0] for line in lines]


@pytest.fixture
def hooks(tmp_path: pathlib.Path) -> Hooks:
    return Hooks(tmp_path)


def stage(hooks: Hooks) -> agent_stage.Stage:
    return agent_stage.Stage("2xA100-SXM4-40GB", "--hooks-file", str(hooks.file))


@pytest.mark.slow
def test_agent_runs_every_hook_and_serves_a_changed_hooks_file(hooks: Hooks) -> None:
    with stage(hooks) as rig:
        rig.assert_ends(LAYOUT)
        assert hooks.ran == list(POINTS)
        assert (hooks.folder / "log").read_text().split()[1] == LAYOUT
        rig.assert_restored()

        hooks.write(at="apply-start", script="echo new content >> log")
        # A changed file causes a check, and runs no hook.
        rig.wait(lambda: rig.status()["reason"] == "AlreadyApplied", "the check")
        rig.assert_ends("all-balanced")
        assert hooks.ran[len(POINTS) :] == [
            *("apply-start", "new", "pre-apply-config", "apply-exit")
        ]


@pytest.mark.slow
def test_malformed_hooks_file_is_served_once_it_is_corrected(hooks: Hooks) -> None:
    good = hooks.file.read_text()
    hooks.file.write_text(good.replace("apply-exit", "apply-end"))
    with stage(hooks) as rig:
        status = rig.failure(LAYOUT)
        assert status["reason"] == "InvalidConfig"
        assert f"{hooks.file}:17:3: unexpected key 'apply-end'" in status["message"]

        hooks.write()

        rig.wait(lambda: rig.status()["state"] == "success", "success", timeout_s=120)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "number"),
    [
        ("apply-start", signal.SIGTERM),
        ("pre-apply-mode", signal.SIGHUP),
        ("pre-apply-config", signal.SIGQUIT),
    ],
)
def test_a_signal_during_a_hook_ends_it_and_restores_the_node(
    hooks: Hooks, point: str, number: signal.Signals
) -> None:
    hooks.write(at=point, script="sleep 600")
    with stage(hooks) as rig:
        rig.label(LAYOUT)
        rig.wait(lambda: hooks.ran[-1:] == [point], f"the hook of {point}", timeout_s=120)

        assert rig.stop_agent(number) == 0

        assert hooks.ran[-1] == "apply-exit"
        assert {gpu.current_mode for gpu in rig.gpus.observe()} == {model.MigMode.DISABLED}
        rig.assert_restored(is_stopped=True)
        assert objects.labels(rig.node())[well_known.STATE_LABEL] == "failed"


@pytest.mark.slow
def test_what_an_agent_owes_that_was_killed_in_a_hook_the_next_one_pays(hooks: Hooks) -> None:
    hooks.write(at="pre-apply-config", script="test -e go || sleep 600")
    with stage(hooks) as rig:
        rig.label(LAYOUT)
        rig.wait(
            lambda: hooks.ran[-1:] == ["pre-apply-config"],
            "the hook of the instances",
            timeout_s=120,
        )
        rig.stop_agent(signal.SIGKILL)
        assert well_known.JOURNAL_ANNOTATION in objects.annotations(rig.node())
        (hooks.folder / "go").touch()

        rig.start_agent()

        rig.wait(lambda: rig.status().get("state") == "success", "success", timeout_s=120)
        assert hooks.ran[-1] == "apply-exit"
        assert hooks.ran.count("apply-exit") == 1
        rig.assert_restored()
