"""Options by variables: of a shell, of a unit, and of the agent's pod."""

import json
import pathlib

import pytest

from mig_manager.cli import registry
from tests.rigs.shell.commandline import ONE_LAYOUT, SPEC, Shell


@pytest.fixture
def layouts(shell: Shell) -> str:
    return shell.file(ONE_LAYOUT)


@pytest.mark.parametrize("command", registry.PROGRAM.commands)
def test_an_unset_variable_of_a_script_is_not_taken_for_the_default(
    shell: Shell, command: str
) -> None:
    for option in registry.PROGRAM.options_of(command):
        for flag in option.flags if option.metavar else ():
            answer = shell(command, flag, "")

            assert answer.status == 2
            assert flag in answer.err
            assert "the value is empty" in answer.err


def test_the_agent_logs_a_variable_that_no_option_has(shell: Shell) -> None:
    answer = shell("agent", "-n", "n1", MIG_MANAGER_DRAIN_TIMEOUT="5")

    logged = json.loads(answer.err.splitlines()[0])
    assert logged["event"] == "variable_unknown"
    assert logged["name"] == "MIG_MANAGER_DRAIN_TIMEOUT"
    assert logged["did_you_mean"] == "MIG_MANAGER_DRAIN_TIMEOUT_S"


def test_an_unknown_variable_is_warned_about_once(shell: Shell) -> None:
    mistaken = shell("status", *SPEC, MIG_MANAGER_GPU_TIMEOUT="5", MIG_MANAGER_NODE_NAME="n1")
    # Of Services called mig-manager and mig-manager-metrics, in the pod's namespace.
    of_services = {
        "SERVICE_HOST": "10.0.0.1",
        "SERVICE_PORT": "9400",
        "SERVICE_PORT_METRICS": "9400",
        "PORT": "tcp://10.0.0.1:9400",
        "METRICS_PORT_9400_TCP": "tcp://10.0.0.1:9400",
        "METRICS_PORT_9400_TCP_ADDR": "10.0.0.1",
    }
    quiet = shell(
        "status", *SPEC, **{f"MIG_MANAGER_{key}": of_services[key] for key in of_services}
    )

    assert (mistaken.status, quiet.status) == (0, 0)
    assert mistaken.err.count("warning") == 1
    assert (
        "warning: MIG_MANAGER_GPU_TIMEOUT is ignored: no option has this variable; did you mean "
        "MIG_MANAGER_GPU_TIMEOUT_S?"
    ) in mistaken.err
    assert "warning" not in quiet.err


def test_at_a_shell_our_own_variables_go_before_the_agents(
    shell: Shell, layouts: str, tmp_path: pathlib.Path
) -> None:
    agents = {"CONFIG_FILE": "/nonexistent"}

    plan = ("plan", "one", *SPEC)
    files = [f"--{name}-file={tmp_path / name}" for name in ("journal", "verified-layout")]

    assert shell(*plan, "-f", layouts, **agents).status == 0
    assert shell(*plan, MIG_PARTED_CONFIG_FILE=layouts, **agents).status == 0
    assert shell(*plan, MIG_MANAGER_CONFIG_FILE=layouts, **agents).status == 0
    # What a boot restores must not depend on a variable that other programs use as well.
    assert shell("boot", *SPEC, *files, **agents).status == 0


@pytest.mark.parametrize("variable", ["CONFIG_FILE", "DEFAULT_CONFIG_FILE"])
@pytest.mark.parametrize("command", ["plan", "apply", "assert", "validate"])
def test_in_the_agents_pod_the_commands_read_the_agents_document(
    shell: Shell, layouts: str, command: str, variable: str
) -> None:
    answer = shell(command, "no-such", *SPEC, **{variable: layouts})

    assert layouts in answer.err
    assert "unknown layout 'no-such'" in answer.err


@pytest.mark.parametrize(
    ("name", "variables", "origin"),
    [
        ("all-1g.5gb", {"CONFIG_FILE": "layouts"}, "generated for NVIDIA A100-SXM4-40GB"),
        ("all-balanced", {"CONFIG_FILE": "layouts"}, "layouts:"),
        (
            "all-balanced",
            {"DEFAULT_CONFIG_FILE": "layouts"},
            "generated for NVIDIA A100-SXM4-40GB",
        ),
        ("one", {"DEFAULT_CONFIG_FILE": "layouts"}, "layouts:"),
        (
            "all-balanced",
            {"CONFIG_FILE": "layouts", "MIG_MANAGER_GENERATED_LAYOUTS": "only"},
            "generated for NVIDIA A100-SXM4-40GB",
        ),
        ("one", {"CONFIG_FILE": "layouts", "MIG_MANAGER_GENERATED_LAYOUTS": "only"}, None),
        ("all-1g.5gb", {"CONFIG_FILE": "layouts", "MIG_MANAGER_GENERATED_LAYOUTS": "off"}, None),
    ],
)
def test_in_the_agents_pod_a_layout_is_the_one_that_the_agent_serves(
    shell: Shell, tmp_path: pathlib.Path, name: str, variables: dict[str, str], origin: str | None
) -> None:
    layouts = tmp_path / "layouts"
    layouts.write_text(
        "version: v1\n"
        "mig-configs:\n"
        "  all-balanced: [{devices: all, mig-enabled: true, mig-devices: {3g.20gb: 2}}]\n"
        "  one: [{devices: all, mig-enabled: true, mig-devices: {1g.5gb: 1}}]\n"
    )
    environ = {key: value.replace("layouts", str(layouts)) for key, value in variables.items()}

    answer = shell("plan", name, "-o", "json", "--simulate", "1xA100-SXM4-40GB", **environ)

    if origin is None:
        assert f"unknown layout '{name}'" in answer.err
    else:
        assert answer.data["origin"].startswith(origin.replace("layouts", str(layouts)))


def test_in_the_agents_pod_an_unusable_default_document_is_a_warning(
    shell: Shell, tmp_path: pathlib.Path
) -> None:
    answer = shell("plan", "all-1g.5gb", *SPEC, DEFAULT_CONFIG_FILE=str(tmp_path / "missing"))

    assert answer.status == 0
    assert "warning: the default layouts are not served: " in answer.err


@pytest.mark.parametrize(
    ("command", "files", "status"), [("apply", {"journal-file"}, 0), ("assert", set(), 1)]
)
def test_in_the_agents_pod_generated_layouts_can_be_applied_and_asserted(
    shell: Shell, layouts: str, tmp_path: pathlib.Path, command: str, files: set[str], status: int
) -> None:
    options = [f"--{name}={tmp_path / name}" for name in ("simulate-state", *files)]

    simulated = ("--simulate", "1xA100-SXM4-40GB", *options)
    answer = shell(command, "all-2g.10gb", *simulated, CONFIG_FILE=layouts)

    assert "unknown layout" not in answer.err
    assert answer.status == status
