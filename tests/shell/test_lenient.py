"""``--lenient``: what NVIDIA's mig-parted passes over is a warning instead of an error."""

import pytest

from tests.rigs.shell.commandline import Shell
from tests.shell.layout_files import NOWHERE, SEVEN, layouts

DUBIOUS = layouts(x="devices: [0, 7], mig-enabled: true, mig-devices: {1g.6gb: 1, 1g.6gb: 2}")
TWICE = f"4:{DUBIOUS.splitlines()[3].rindex('1g.6gb') + 1}"
SPEC = ("--simulate", "1xA30")


@pytest.mark.slow
def test_mistakes_that_mig_parted_ignores_are_refused_unless_lenient(shell: Shell) -> None:
    file = shell.file(DUBIOUS)

    strict = shell("apply", "-f", file, *SPEC)
    lenient = shell("apply", "-f", file, "--lenient", *SPEC)

    assert strict.status == 2
    assert f"{file}:{TWICE}: key '1g.6gb' is given twice" in strict.err
    assert lenient.status == 0
    assert f"warning: {file}:{TWICE}: key '1g.6gb' is given twice" in lenient.err
    assert "names GPU 7, and this node has 1, counted from 0 (it matches no GPU)" in lenient.err


@pytest.mark.slow
@pytest.mark.parametrize("command", ["plan x", "apply x", "assert x", "validate x", "boot -c x"])
def test_a_variable_makes_every_command_lenient_and_the_doctor_warns(
    shell: Shell, command: str
) -> None:
    file = shell.file(DUBIOUS)
    shell("apply", "-f", file, "--lenient", *SPEC)
    lenient = {"MIG_MANAGER_LENIENT": "true"}

    answer = shell(*command.split(), "-f", file, *SPEC, **lenient)

    assert answer.status == 0
    report = shell("doctor", "-f", file, *SPEC, **lenient).out if "boot" in command else answer.err
    assert "key '1g.6gb' is given twice" in " ".join(report.split())


def test_a_lenient_command_warns_of_a_layout_that_matches_no_gpu(shell: Shell) -> None:
    file = shell.file(layouts(x=f'device-filter: "0x233010DE", {SEVEN}'))

    strict = shell("apply", "-f", file, *SPEC)
    lenient = shell("apply", "-f", file, "--lenient", "-o", "json", *SPEC)

    assert (strict.status, lenient.status) == (1, 0)
    (warning,) = lenient.data["warnings"]
    assert "selects none of this node's GPUs" in warning
    assert "(nothing is done)" in warning


@pytest.mark.parametrize("command", ["plan", "apply", "assert", "apply --lenient"])
def test_a_profile_the_gpus_do_not_have_is_reported_with_its_position(
    shell: Shell, command: str
) -> None:
    text = layouts(x=NOWHERE)
    file = shell.file(text)
    column = text.splitlines()[3].index("1g.7gb") + 1

    answer = shell(*command.split(), "-f", file, *SPEC)

    assert answer.status == 1
    assert f"{file}:4:{column}: GPU 0 (NVIDIA A30" in answer.err
