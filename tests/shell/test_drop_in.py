"""Every flag, short flag and variable of ``nvidia-mig-parted`` (v0.15), as scripts use them."""

import dataclasses
import functools
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import pytest

from mig_manager.agent import agent_settings
from mig_manager.cli import registry
from mig_manager.cli.toolkit import parser
from mig_manager.core.settings import node_settings
from tests.rigs import programs
from tests.rigs.shell.commandline import Shell

SPEC = ("--simulate", "1xA30")
APPLIED = "MIG configuration applied successfully\n"
VALID = "Selected MIG configuration is valid\n"
MODE_ACTIVE = "Selected MIG mode settings from configuration currently applied\n"


class Flag(NamedTuple):
    """An option of nvidia-mig-parted, what it sets here, and an example; none for a switch."""

    command: str
    long: str
    short: str
    variable: str
    field: str
    value: str = ""

    def spellings(self) -> Iterator[tuple[str, list[str], dict[str, str]]]:
        """Yield the name of each spelling, its arguments and its variables."""
        own_variable = "MIG_MANAGER_" + self.long.upper().replace("-", "_")
        if not self.value:
            yield "long", [f"--{self.long}"], {}
            yield "short", [f"-{self.short}"], {}
            yield "variable", [], {self.variable: "true"}
            yield "variable 1", [], {self.variable: "1"}
            yield "own variable", [], {own_variable: "t"}
            yield "one dash", [f"-{self.long}"], {}
            yield "long with value", [f"--{self.long}=true"], {}
            yield "short with value", [f"-{self.short}=1"], {}
            yield "option over variable", [f"--{self.long}"], {self.variable: "false"}
            yield "the last decides", [f"--{self.long}=false", f"-{self.short}"], {}
            return
        yield "long", [f"--{self.long}", self.value], {}
        yield "short", [f"-{self.short}", self.value], {}
        yield "variable", [], {self.variable: self.value}
        yield "own variable", [], {own_variable: self.value}
        yield "one dash", [f"-{self.long}", self.value], {}
        yield "one dash, equals", [f"-{self.long}={self.value}"], {}
        yield "long, equals", [f"--{self.long}={self.value}"], {}
        yield "short, equals", [f"-{self.short}={self.value}"], {}
        yield "short, glued", [f"-{self.short}{self.value}"], {}
        yield "option over variable", [f"--{self.long}", self.value], {self.variable: "json"}
        yield "variable over own", [], {self.variable: self.value, own_variable: "json"}


FLAGS = [
    Flag(*row.split())
    for row in """
        apply config-file f MIG_PARTED_CONFIG_FILE config_file a.yaml
        apply selected-config c MIG_PARTED_SELECTED_CONFIG layouts night
        apply hooks-file k MIG_PARTED_HOOKS_FILE hooks_file hooks.yaml
        apply skip-reset s MIG_PARTED_SKIP_RESET is_reset_skipped
        apply mode-only m MIG_PARTED_MODE_CHANGE_ONLY is_mode_only
        apply debug d MIG_PARTED_DEBUG is_debug
        assert config-file f MIG_PARTED_CONFIG_FILE config_file a.yaml
        assert selected-config c MIG_PARTED_SELECTED_CONFIG layouts night
        assert mode-only m MIG_PARTED_MODE_CHANGE_ONLY is_mode_only
        assert valid-config a MIG_PARTED_VALID_CONFIG is_valid_config_only
        assert debug d MIG_PARTED_DEBUG is_debug
        export output-format o MIG_PARTED_OUTPUT_FORMAT output_format yaml
        export config-label l MIG_PARTED_CONFIG_LABEL config_label monday
        export debug d MIG_PARTED_DEBUG is_debug
        checkpoint checkpoint-file f MIG_PARTED_CHECKPOINT_FILE checkpoint_file c.json
        checkpoint debug d MIG_PARTED_DEBUG is_debug
        restore checkpoint-file f MIG_PARTED_CHECKPOINT_FILE checkpoint_file c.json
        restore hooks-file k MIG_PARTED_HOOKS_FILE hooks_file hooks.yaml
        restore mode-only m MIG_PARTED_MODE_CHANGE_ONLY is_mode_only
        restore debug d MIG_PARTED_DEBUG is_debug
        generate-config output-file f MIG_PARTED_OUTPUT_FILE output_file a.yaml
        generate-config output-format o MIG_PARTED_OUTPUT_FORMAT output_format yaml
        generate-config debug d MIG_PARTED_DEBUG is_debug
        """.strip().splitlines()
]
# What is no text and no switch once it is a setting.
TYPED: Mapping[str, Callable[[str], object]] = {
    "layouts": lambda value: (value,),
    "output_file": pathlib.Path,
    "output_format": node_settings.OutputFormat,
}


def settings_of(argv: list[str], environ: Mapping[str, str]) -> Any:
    return registry.PROGRAM.settings(
        parser.parse(registry.PROGRAM, argv), {"HOME": "/"} | dict(environ)
    )


@pytest.mark.parametrize("row", FLAGS, ids=lambda row: f"{row.command} {row.long}")
def test_every_spelling_of_an_option_sets_its_field(row: Flag) -> None:
    plain = settings_of([row.command], {})
    to_setting = TYPED.get(row.field)
    expected = to_setting(row.value) if to_setting else row.value or True
    for name, argv, environ in row.spellings():
        spelt = settings_of([row.command, *argv], environ)

        assert getattr(spelt, row.field) == expected, name
        assert dataclasses.replace(spelt, **{row.field: getattr(plain, row.field)}) == plain, name


@pytest.mark.parametrize("row", [row for row in FLAGS if not row.value], ids=str)
def test_a_switch_can_be_switched_off_over_its_variable(row: Flag) -> None:
    for off in (f"--{row.long}=false", f"-{row.long}=0", f"-{row.short}=F"):
        assert not getattr(settings_of([row.command, off], {row.variable: "true"}), row.field)
    assert not getattr(settings_of([row.command], {row.variable: ""}), row.field)


@pytest.mark.parametrize("command", ["apply", "export", "status"])
def test_debug_may_stand_before_the_command(command: str) -> None:
    assert settings_of(["-d", command], {}).is_debug
    assert settings_of(["--debug=1", command], {}).is_debug


# -- effects: real runs -----------------------------------------------------------------------


def gpu(shell: Shell) -> dict[str, Any]:
    (only_gpu,) = shell("status", "-o", "json", *SPEC).data["gpus"]
    assert isinstance(only_gpu, dict)
    return only_gpu


@pytest.mark.parametrize(
    ("line", "out", "instances"),
    [
        ("apply -c mine --config-file FILE", APPLIED, ["2g.12gb", "1g.6gb", "1g.6gb"]),
        pytest.param(
            *("apply -f FILE --selected-config mine", APPLIED, ["2g.12gb", "1g.6gb", "1g.6gb"]),
            marks=pytest.mark.slow,
        ),
        ("assert -c mine -a --config-file FILE", VALID, []),
        ("assert -f FILE -a --selected-config mine", VALID, []),
        ("assert -f FILE -c mine --valid-config", VALID, []),
    ],
)
def test_every_flag_of_apply_and_assert_has_its_effect(
    shell: Shell, layouts: str, line: str, out: str, instances: list[str]
) -> None:
    answer = shell(*line.replace("FILE", layouts).split(), *SPEC)

    assert (answer.status, answer.out) == (0, out)
    assert [each["profile"] for each in gpu(shell)["gpuInstances"]] == instances


@pytest.mark.slow
def test_the_mode_alone_is_applied_and_asserted(shell: Shell, layouts: str) -> None:
    line = ("-f", layouts, "-c", "mine", *SPEC)

    applied = shell("apply", "--mode-only", *line)
    mode, everything = shell("assert", "--mode-only", *line), shell("assert", *line)

    assert (applied.status, applied.out) == (0, APPLIED)
    assert (gpu(shell)["migMode"], gpu(shell)["gpuInstances"]) == ("enabled", [])
    assert (mode.status, mode.out) == (0, MODE_ACTIVE)
    assert (everything.status, everything.out) == (1, "")


def test_the_exported_layout_has_the_requested_name(shell: Shell) -> None:
    assert shell("export", "-ojson", "-l", "monday", *SPEC).data == {
        "version": "v1",
        "mig-configs": {"monday": [{"devices": "all", "mig-enabled": False, "mig-devices": {}}]},
    }
    assert "current" in shell("export", *SPEC).out


@pytest.mark.slow
def test_exported_mixed_nodes_are_merged_as_mig_parted_merges_them(shell: Shell) -> None:
    node = ("--simulate", "2xA30+2xA100-SXM4-40GB")
    text = """
        version: v1
        mig-configs:
          x:
          - {devices: all, mig-enabled: false}
          - {devices: [1, 3], mig-enabled: true, mig-devices: {}}
    """
    shell("apply", "-f", "-", *node, stdin=text)

    rules = shell("export", "-o", "json", *node).data["mig-configs"]["current"]

    filters = ["0x20B010DE", "0x20B710DE"]
    assert rules == [
        {"device-filter": filters, "devices": each, "mig-enabled": is_on, "mig-devices": {}}
        for each, is_on in (([0, 2], False), ([1, 3], True))
    ]


# -- exit statuses ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "status", "as_mig_parted"),
    [
        ("", 0, 0),
        *((line, 0, 0) for line in ("--help", "-h", "help", "help apply", "h", "h export")),
        *((line, 0, 0) for line in ("apply --help", "apply -help", "--version", "-v", "-version")),
        ("frobnicate", 3, 3),
        ("help frobnicate", 3, 3),
        ("apply --frobnicate", 2, 1),
        ("apply -f /nonexistent -c x", 2, 1),
        ("apply -f", 2, 1),
        ("assert -f FILE -c no-such -a", 2, 1),
        ("assert -f FILE -a", 2, 1),
        ("export -o xml --simulate 1xA30", 2, 1),
        ("generate-config -o text --simulate 1xA30", 2, 1),
        ("status --skip-reset=true", 2, 1),
        ("assert -f FILE -c mine --simulate 1xA30", 1, 1),
        ("export --library-path /nonexistent.so", 1, 1),
        ("generate-config --gpu T4", 2, 1),
        ("generate-config --simulate 1xT4", 1, 1),
    ],
)
def test_exit_statuses_are_ours_or_those_of_mig_parted(
    shell: Shell, layouts: str, line: str, status: int, as_mig_parted: int
) -> None:
    argv = line.replace("FILE", layouts).split()

    assert shell(*argv).status == status
    assert shell(*argv, program="nvidia-mig-parted").status == as_mig_parted


def test_variable_that_is_neither_true_nor_false_is_an_error(shell: Shell) -> None:
    for value in ("yes", "on", "2", "TrUe"):
        answer = shell("assert", "-c", "mine", *SPEC, MIG_PARTED_VALID_CONFIG=value)

        assert answer.status == 2
        assert "MIG_PARTED_VALID_CONFIG" in answer.err


def test_options_go_before_variables_and_these_before_defaults(shell: Shell, layouts: str) -> None:
    environ = {"MIG_PARTED_CONFIG_FILE": "/nonexistent", "MIG_PARTED_SELECTED_CONFIG": "off"}

    assert shell("assert", "-af", layouts, "-c", "mine", **environ).out == VALID
    assert shell("assert", "-a", "-c", "mine", **environ).status == 2


@pytest.mark.slow
def test_a_link_named_nvidia_mig_parted_serves_its_scripts(
    tmp_path: pathlib.Path, layouts: str
) -> None:
    script = tmp_path / "mig-manager"
    script.write_text(f"#!{sys.executable}\nfrom mig_manager.__main__ import main\nmain()\n")
    script.chmod(0o755)
    link = tmp_path / "nvidia-mig-parted"
    link.symlink_to(script)

    run = functools.partial(programs.run, HOME=str(tmp_path))
    good = run(link, "assert", "-a", "-f", layouts, "-c", "mine")
    assert (good.returncode, good.stdout) == (0, VALID)
    assert run(link, "assert", "-a", "-f", "/nonexistent").returncode == 1
    # As the installer's program does it, which is no Python itself.
    called = run(script, "assert", "-f", "/nonexistent", MIG_MANAGER_CALLED=str(link))
    assert called.returncode == 1


def test_nvidias_agent_options_are_all_understood() -> None:
    argv = ["agent", "-n", "n1", "-f", "/c", "-s", "x", "-m", "/host", "-i", "/n", "-o", "/o"]
    argv += ["-k", "kubelet.service", "-g", "/g", "-r", "-d", "-p", "ns", "-t", "/t", "-a", "/a"]
    argv += ["--cdi-enabled", "-b", "/b", "-j", "/j", "--nvidia-cdi-hook-path", "/h"]

    of_agent = agent_settings.AgentSettings.read(parser.parse(registry.PROGRAM, argv), {})

    assert of_agent.node_name == "n1"
    assert len(of_agent.not_needed) == 5
    assert of_agent.gpus.driver_roots == ("/a", "/t")
    assert of_agent.host.with_reboot
    assert of_agent.host.shuts_host_clients
    assert of_agent.host.cdi_enabled
    assert of_agent.host.gpu_clients_file == pathlib.Path("/g")
