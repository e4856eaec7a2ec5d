"""What the command line says of wrong usage, and ``apply --dry-run``."""

import pathlib

import pytest

from tests.shell import commandline


@pytest.mark.parametrize("rest", [(), ("-o", "json")])
def test_a_dry_run_of_apply_is_plan_and_changes_nothing(
    shell: commandline.Shell, rest: tuple[str, ...]
) -> None:
    argv = ("all-balanced", "--simulate", "1xA30", *rest)
    before = shell("status", "--simulate", "1xA30").out

    dry, plan = shell("apply", "--dry-run", *argv), shell("plan", *argv)

    assert (dry.status, dry.out) == (plan.status, plan.out)
    assert "all-balanced" in dry.out
    assert shell("status", "--simulate", "1xA30").out == before


@pytest.mark.parametrize(
    ("argv", "status", "message"),
    [
        (("apply", "--frob"), 2, "--frob\n  remedy: See 'mig-manager apply --help'."),
        (("apply", "--skip-rest"), 2, "--skip-rest; did you mean '--skip-reset'?"),
        (("status", "--simulat=1xA30"), 2, "--simulat=1xA30; did you mean '--simulate'?"),
        (("rollout", "--max-unavailible", "2"), 2, "did you mean '--max-unavailable'?"),
        (("frobnicate", "status"), 3, "remedy: See 'mig-manager --help'."),
        (("apply", "x", "--dry-run", "--skip-reset"), 2, "--dry-run shows no effect"),
        (("validate", "-f", "/no/file"), 2, "remedy: Check the file's path and rights, or"),
        (("validate", "-f", "/"), 2, "remedy: Check the file's path and rights, or"),
    ],
)
def test_unusable_input_names_what_was_meant_and_a_remedy_that_helps(
    shell: commandline.Shell, argv: tuple[str, ...], status: int, message: str
) -> None:
    answer = shell(*argv)

    assert (answer.status, answer.out) == (status, "")
    assert message in answer.err


@pytest.mark.parametrize(
    ("argv", "is_named"),
    [(("status",), True), (("plan", "all-disabled"), True), (("apply", "all-disabled"), False)],
)
def test_without_a_driver_a_command_that_reads_names_simulated_gpus(
    shell: commandline.Shell, tmp_path: pathlib.Path, argv: tuple[str, ...], *, is_named: bool
) -> None:
    # Not the machine's own.
    files = {f"MIG_MANAGER_{name}_FILE": str(tmp_path / name) for name in ("LOCK", "JOURNAL")}

    answer = shell(*argv, "--library-path", "/nonexistent.so", **files)

    assert answer.status == 1
    assert "Load the NVIDIA driver" in answer.err
    assert ("add --simulate 1xA100-SXM4-40GB." in answer.err) is is_named
