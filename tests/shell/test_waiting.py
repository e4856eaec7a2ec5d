"""MIG modes that wait for a reset or a reboot, as NVIDIA's unit for bare metal goes about it."""

import pathlib

import pytest

from mig_manager.core import model
from mig_manager.sandbox.driver import states
from tests.rigs.shell.shell_node import ShellNode

APPLIED = "MIG configuration applied successfully\n"
FOR_A_RESET = states.Options(resets_itself=False)
FOR_A_REBOOT = states.Options(virtualization=model.Virtualization.PASSTHROUGH)
LAYOUTS = """
version: v1
mig-configs:
  mine: [{devices: all, mig-enabled: true, mig-devices: {2g.12gb: 1, 1g.6gb: 2}}]
  'off': [{devices: all, mig-enabled: false}]
"""


def node_with_pending_modes(tmp_path: pathlib.Path, options: states.Options) -> ShellNode:
    """Simulate GPUs whose driver does not switch the mode by itself."""
    return ShellNode(tmp_path, "2xA30", layouts=LAYOUTS, options=options)


def pending(shell_node: ShellNode) -> list[bool]:
    return [each.is_pending for each in shell_node.state.read().gpus]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "argv"),
    [
        pytest.param(FOR_A_RESET, ["--mode-only", "--skip-reset"], id="long, for a reset"),
        pytest.param(FOR_A_REBOOT, ["-ms"], id="short, for a reboot"),
    ],
)
def test_a_mode_can_be_requested_and_left_to_a_reboot(
    tmp_path: pathlib.Path, options: states.Options, argv: list[str]
) -> None:
    gpus = node_with_pending_modes(tmp_path, options)

    for _asked_for_and_asked_for_again in range(2):
        answer = gpus.run("apply", "mine", *argv)
        assert (answer.status, answer.out) == (0, APPLIED)
        assert answer.err.count("waits for a reset or a reboot") == 2
        assert "0 kept; 2 MIG modes pending; no reset" in answer.err

    assert pending(gpus) == [True, True]
    # There is nothing that the next boot has to restore.
    file_names = " ".join(path.name for path in tmp_path.iterdir())
    assert "verified" not in file_names
    assert "journal" not in file_names
    assert gpus.run("assert", "-m", "mine").status == 1
    gpus.state.reboot()
    assert gpus.run("assert", "-m", "mine").status == 0
    assert gpus.run("apply", "mine").status == 0


@pytest.mark.slow
def test_a_mode_that_needs_no_reset_is_active_despite_skip_reset(tmp_path: pathlib.Path) -> None:
    answer = node_with_pending_modes(tmp_path, states.Options()).run(
        "apply", "--skip-reset", "mine"
    )

    assert (answer.status, answer.out) == (0, APPLIED)
    assert "waits" not in answer.err
