"""MIG modes that wait for a reset or a reboot, as NVIDIA's unit for bare metal goes about it."""

import pathlib

import pytest

from mig_manager.sandbox.driver import library as simulated
from mig_manager.sandbox.driver import states
from testkit import nvml_faults
from tests.shell.commandline import Shell

APPLIED = "MIG configuration applied successfully\n"
FOR_A_RESET = states.Options(resets_itself=False)
FOR_A_REBOOT = states.Options(virtualization=states.Virtualization.PASSTHROUGH)


def node(
    tmp_path: pathlib.Path, options: states.Options
) -> tuple[nvml_faults.SharedState, list[str]]:
    """Simulate GPUs whose driver does not switch the mode by itself."""
    path = tmp_path / "gpus.json"
    simulated.create("2xA30", path, options=options)
    return nvml_faults.SharedState(path), ["--simulate-state", str(path)]


@pytest.mark.parametrize(
    ("options", "argv"),
    [
        pytest.param(FOR_A_RESET, ["--mode-only", "--skip-reset"], id="long, for a reset"),
        pytest.param(FOR_A_REBOOT, ["-ms"], id="short, for a reboot"),
    ],
)
def test_a_mode_can_be_asked_for_and_left_to_a_reboot(
    shell: Shell, tmp_path: pathlib.Path, layouts: str, options: states.Options, argv: list[str]
) -> None:
    state, gpus = node(tmp_path, options)
    line = ("apply", "-f", layouts, "-c", "mine", *gpus)

    for _asked_for_and_asked_for_again in range(2):
        asked = shell(*line, *argv)
        assert (asked.status, asked.out) == (0, APPLIED)
        assert asked.err.count("waits for a reset or a reboot") == 2

    assert [each.is_pending for each in state.read().gpus] == [True, True]
    # There is nothing that the next boot has to restore.
    left = " ".join(path.name for path in tmp_path.iterdir())
    assert "verified" not in left
    assert "journal" not in left
    assert shell("assert", "-m", "-f", layouts, "-c", "mine", *gpus).status == 1
    state.reboot()
    assert shell("assert", "-m", "-f", layouts, "-c", "mine", *gpus).status == 0
    assert shell(*line).status == 0


@pytest.mark.parametrize("options", [FOR_A_RESET, FOR_A_REBOOT], ids=["reset", "reboot"])
def test_without_its_mode_a_layout_is_not_applied(
    shell: Shell, tmp_path: pathlib.Path, layouts: str, options: states.Options
) -> None:
    state, gpus = node(tmp_path, options)

    answer = shell("apply", "--skip-reset", "-f", layouts, "-c", "mine", *gpus)

    assert (answer.status, answer.out) == (1, "")
    assert "only the new mode stays pending" in answer.err
    assert [each.is_pending for each in state.read().gpus] == [True, True]
    # It can be called off.
    assert shell("apply", "all-disabled", *gpus).status == 0
    assert [each.is_pending for each in state.read().gpus] == [False, False]


def test_what_the_driver_switches_by_itself_needs_no_reset_to_skip(
    shell: Shell, tmp_path: pathlib.Path, layouts: str
) -> None:
    _, gpus = node(tmp_path, states.Options())

    answer = shell("apply", "--skip-reset", "-f", layouts, "-c", "mine", *gpus)

    assert (answer.status, answer.out) == (0, APPLIED)
    assert "waits" not in answer.err


def test_a_failure_of_another_kind_is_one_although_modes_may_wait(
    shell: Shell, tmp_path: pathlib.Path, layouts: str
) -> None:
    state, gpus = node(tmp_path, states.Options())
    state.add_client(state.boards[0].uuid, name="dcgm", kind=states.ClientKind.MONITOR)

    answer = shell("apply", "-ms", "-f", layouts, "-c", "mine", "--in-use-timeout-s", "0", *gpus)

    assert (answer.status, answer.out) == (1, "")
    assert [each.is_pending for each in state.read().gpus] == [False, False]
