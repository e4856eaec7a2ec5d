"""Every flag, short flag and variable of ``nvidia-mig-parted`` (v0.15), as scripts use them."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from mig_manager.cli import command_settings, parser
from mig_manager.core import yaml_tree
from tests.shell.commandline import Answer, Shell

SPEC = ("--simulate", "1xA30")
APPLIED = "MIG configuration applied successfully\n"
VALID = "Selected MIG configuration is valid\n"
MODE_ACTIVE = "Selected MIG mode settings from configuration currently applied\n"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """An option of nvidia-mig-parted."""

    command: str
    long: str
    short: str
    variable: str
    field: str
    """What it sets."""
    value: str = ""
    """An example; none for a switch."""

    def spellings(self) -> Iterator[tuple[str, list[str], dict[str, str]]]:
        """Yield the name of each spelling, its arguments and its variables."""
        own = "MIG_MANAGER_" + self.long.upper().replace("-", "_")
        if not self.value:
            yield "long", [f"--{self.long}"], {}
            yield "short", [f"-{self.short}"], {}
            yield "variable", [], {self.variable: "true"}
            yield "variable 1", [], {self.variable: "1"}
            yield "own variable", [], {own: "t"}
            yield "one dash", [f"-{self.long}"], {}
            yield "long with value", [f"--{self.long}=true"], {}
            yield "short with value", [f"-{self.short}=1"], {}
            yield "option over variable", [f"--{self.long}"], {self.variable: "false"}
            yield "the last decides", [f"--{self.long}=false", f"-{self.short}"], {}
            return
        yield "long", [f"--{self.long}", self.value], {}
        yield "short", [f"-{self.short}", self.value], {}
        yield "variable", [], {self.variable: self.value}
        yield "own variable", [], {own: self.value}
        yield "one dash", [f"-{self.long}", self.value], {}
        yield "one dash, equals", [f"-{self.long}={self.value}"], {}
        yield "long, equals", [f"--{self.long}={self.value}"], {}
        yield "short, equals", [f"-{self.short}={self.value}"], {}
        yield "short, glued", [f"-{self.short}{self.value}"], {}
        yield "option over variable", [f"--{self.long}", self.value], {self.variable: "json"}
        yield "variable over own", [], {self.variable: self.value, own: "json"}


def flag(row: str, field: str, value: str = "") -> Flag:
    command, long, short, variable = row.split()
    return Flag(
        command=command,
        long=long,
        short=short,
        variable=f"MIG_PARTED_{variable}",
        field=field,
        value=value,
    )


FLAGS = (
    flag("apply config-file f CONFIG_FILE", "config_file", "a.yaml"),
    flag("apply selected-config c SELECTED_CONFIG", "layouts", "night"),
    flag("apply hooks-file k HOOKS_FILE", "hooks_file", "hooks.yaml"),
    flag("apply skip-reset s SKIP_RESET", "is_reset_skipped"),
    flag("apply mode-only m MODE_CHANGE_ONLY", "is_mode_only"),
    flag("apply debug d DEBUG", "is_debug"),
    flag("assert config-file f CONFIG_FILE", "config_file", "a.yaml"),
    flag("assert selected-config c SELECTED_CONFIG", "layouts", "night"),
    flag("assert mode-only m MODE_CHANGE_ONLY", "is_mode_only"),
    flag("assert valid-config a VALID_CONFIG", "is_valid_config_only"),
    flag("assert debug d DEBUG", "is_debug"),
    flag("export output-format o OUTPUT_FORMAT", "output_format", "yaml"),
    flag("export config-label l CONFIG_LABEL", "config_label", "monday"),
    flag("export debug d DEBUG", "is_debug"),
    flag("checkpoint checkpoint-file f CHECKPOINT_FILE", "checkpoint_file", "c.json"),
    flag("checkpoint debug d DEBUG", "is_debug"),
    flag("restore checkpoint-file f CHECKPOINT_FILE", "checkpoint_file", "c.json"),
    flag("restore hooks-file k HOOKS_FILE", "hooks_file", "hooks.yaml"),
    flag("restore mode-only m MODE_CHANGE_ONLY", "is_mode_only"),
    flag("restore debug d DEBUG", "is_debug"),
    flag("generate-config output-file f OUTPUT_FILE", "output_file", "a.yaml"),
    flag("generate-config output-format o OUTPUT_FORMAT", "output_format", "yaml"),
    flag("generate-config debug d DEBUG", "is_debug"),
)
SPELLINGS = [
    pytest.param(row, argv, environ, id=f"{row.command} {row.long}: {name}")
    for row in FLAGS
    for name, argv, environ in row.spellings()
]
# What is no text and no switch once it is a setting.
TYPED: Mapping[str, Callable[[str], object]] = {
    "layouts": lambda value: (value,),
    "output_file": pathlib.Path,
    "output_format": command_settings.OutputFormat,
}
RUN_SPELLINGS = ("long", "short", "variable")


def settings_of(argv: list[str], environ: Mapping[str, str]) -> command_settings.CommandSettings:
    return command_settings.command_settings(parser.parse(argv), {"HOME": "/"} | dict(environ))


@pytest.mark.parametrize(("row", "argv", "environ"), SPELLINGS)
def test_every_spelling_sets_what_it_stands_for(
    row: Flag, argv: list[str], environ: dict[str, str]
) -> None:
    plain = settings_of([row.command], {})
    found = settings_of([row.command, *argv], environ)

    to_setting = TYPED.get(row.field)
    expected = to_setting(row.value) if to_setting else row.value or True
    assert getattr(found, row.field) == expected
    assert dataclasses.replace(found, **{row.field: getattr(plain, row.field)}) == plain


@pytest.mark.parametrize("row", [row for row in FLAGS if not row.value], ids=str)
def test_a_switch_can_be_switched_off_over_its_variable(row: Flag) -> None:
    for off in (f"--{row.long}=false", f"-{row.long}=0", f"-{row.short}=F"):
        assert not getattr(settings_of([row.command, off], {row.variable: "true"}), row.field)
    assert not getattr(settings_of([row.command], {row.variable: ""}), row.field)


@pytest.mark.parametrize("command", ["apply", "export", "status"])
def test_debug_may_stand_before_the_command(command: str) -> None:
    assert settings_of(["-d", command], {}).is_debug
    assert settings_of(["--debug=1", command], {}).is_debug


# -- effects: real runs --------------------------------------------------------------------------


Check = Callable[[Shell, Answer], None]


def applied(shell: Shell, answer: Answer) -> None:
    assert (answer.status, answer.out) == (0, APPLIED)
    assert instances(shell) == ["2g.12gb", "1g.6gb", "1g.6gb"]


def mode_applied(shell: Shell, answer: Answer) -> None:
    assert (answer.status, answer.out) == (0, APPLIED)
    assert instances(shell) == []
    assert gpu(shell)["mig_mode"] == "enabled"


def valid(_shell: Shell, answer: Answer) -> None:
    assert (answer.status, answer.out) == (0, VALID)


def gpu(shell: Shell) -> dict[str, Any]:
    (found,) = json.loads(shell("status", "-o", "json", *SPEC).out)["gpus"]
    assert isinstance(found, dict)
    return found


def instances(shell: Shell) -> list[str]:
    return [each["profile"] for each in gpu(shell)["gpu_instances"]]


def effects() -> Iterator[Any]:
    wanted: dict[tuple[str, str], tuple[list[str], Check]] = {
        ("apply", "config-file"): (["-c", "mine"], applied),
        ("apply", "selected-config"): (["-f", "FILE"], applied),
        ("apply", "mode-only"): (["-f", "FILE", "-c", "mine"], mode_applied),
        ("assert", "config-file"): (["-c", "mine", "-a"], valid),
        ("assert", "selected-config"): (["-f", "FILE", "-a"], valid),
        ("assert", "valid-config"): (["-f", "FILE", "-c", "mine"], valid),
    }
    for row in FLAGS:
        if (row.command, row.long) in wanted:
            rest, check = wanted[row.command, row.long]
            value = {"config-file": "FILE", "selected-config": "mine"}.get(row.long, "")
            for name, argv, environ in dataclasses.replace(row, value=value).spellings():
                if name in RUN_SPELLINGS:
                    yield pytest.param(
                        [row.command, *rest, *argv],
                        environ,
                        check,
                        id=f"{row.command} {row.long}: {name}",
                    )


@pytest.mark.parametrize(("argv", "environ", "check"), list(effects()))
def test_every_flag_of_apply_and_assert_does_what_it_says(
    shell: Shell, layouts: str, argv: list[str], environ: dict[str, str], check: Check
) -> None:
    line = [layouts if word == "FILE" else word for word in argv]
    variables = {name: layouts if value == "FILE" else value for name, value in environ.items()}

    check(shell, shell(*line, *SPEC, **variables))


def test_assert_of_the_mode_alone_and_of_everything(shell: Shell, layouts: str) -> None:
    line = ("assert", "-f", layouts, "-c", "mine", *SPEC)
    shell("apply", "-mf", layouts, "-c", "mine", *SPEC)

    answer = shell(*line, "--mode-only")
    assert (answer.status, answer.out) == (0, MODE_ACTIVE)

    everything = shell(*line)
    assert (everything.status, everything.out) == (1, "")


@pytest.mark.parametrize("command", ["export", "generate-config"])
def test_documents_are_written_as_json_or_yaml(shell: Shell, command: str) -> None:
    as_json = shell(command, "-o", "json", *SPEC)
    as_yaml = shell(command, *SPEC)

    parsed = yaml_tree.plain(yaml_tree.parse(as_yaml.out, source="out"))
    assert (as_json.status, as_yaml.status) == (0, 0)
    assert as_yaml.out.startswith("version: v1\nmig-configs:\n")
    assert json.loads(as_json.out) == parsed


def test_the_exported_layout_has_the_requested_name(shell: Shell) -> None:
    assert json.loads(shell("export", "-ojson", "-l", "monday", *SPEC).out) == {
        "version": "v1",
        "mig-configs": {"monday": [{"devices": "all", "mig-enabled": False, "mig-devices": {}}]},
    }
    assert "current" in shell("export", *SPEC).out


def test_a_generated_document_goes_into_a_file(shell: Shell, tmp_path: pathlib.Path) -> None:
    target = tmp_path / "generated.yaml"

    answer = shell("generate-config", "-f", str(target), *SPEC)

    assert (answer.status, answer.out) == (0, "")
    assert target.read_text() == shell("generate-config", *SPEC).out
    assert shell("assert", "-af", str(target), "-c", "all-balanced").status == 0


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

    rules = json.loads(shell("export", "-o", "json", *node).out)["mig-configs"]["current"]

    filters = ["0x20B010DE", "0x20B710DE"]
    assert rules == [
        {
            "device-filter": filters,
            "devices": [0, 2],
            "mig-enabled": False,
            "mig-devices": {},
        },
        {"device-filter": filters, "devices": [1, 3], "mig-enabled": True, "mig-devices": {}},
    ]


# -- exit statuses -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "status", "as_mig_parted"),
    [
        ((), 0, 0),
        (("--help",), 0, 0),
        (("-h",), 0, 0),
        (("help",), 0, 0),
        (("help", "apply"), 0, 0),
        (("h",), 0, 0),
        (("h", "export"), 0, 0),
        (("apply", "--help"), 0, 0),
        (("apply", "-help"), 0, 0),
        (("--version",), 0, 0),
        (("-v",), 0, 0),
        (("-version",), 0, 0),
        (("frobnicate",), 3, 3),
        (("help", "frobnicate"), 3, 3),
        (("apply", "--frobnicate"), 2, 1),
        (("apply", "-f", "/nonexistent", "-c", "x"), 2, 1),
        (("apply", "-f"), 2, 1),
        (("assert", "-f", "FILE", "-c", "no-such", "-a"), 2, 1),
        (("assert", "-f", "FILE", "-a"), 2, 1),
        (("export", "-o", "xml", *SPEC), 2, 1),
        (("generate-config", "-o", "text", *SPEC), 2, 1),
        (("status", "--skip-reset=true"), 2, 1),
        (("assert", "-f", "FILE", "-c", "mine", *SPEC), 1, 1),
        (("export", "--library-path", "/nonexistent.so"), 1, 1),
        (("generate-config", "--gpu", "T4"), 1, 1),
        (("generate-config", "--simulate", "1xT4"), 1, 1),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value),
)
def test_exit_statuses(
    shell: Shell, layouts: str, argv: tuple[str, ...], status: int, as_mig_parted: int
) -> None:
    line = [layouts if word == "FILE" else word for word in argv]

    assert shell(*line).status == status
    assert shell(*line, program="nvidia-mig-parted").status == as_mig_parted


@pytest.mark.parametrize("value", ["yes", "on", "2", "TrUe"])
def test_a_variable_that_is_neither_true_nor_false_is_an_error_as_for_mig_parted(
    shell: Shell, layouts: str, value: str
) -> None:
    answer = shell("assert", "-f", layouts, "-c", "mine", *SPEC, MIG_PARTED_VALID_CONFIG=value)

    assert answer.status == 2
    assert "MIG_PARTED_VALID_CONFIG" in answer.err


def test_options_go_before_variables_and_these_before_defaults(shell: Shell, layouts: str) -> None:
    environ = {"MIG_PARTED_CONFIG_FILE": "/nonexistent", "MIG_PARTED_SELECTED_CONFIG": "off"}

    answer = shell("assert", "-af", layouts, "-c", "mine", **environ)

    assert (answer.status, answer.out) == (0, VALID)
    assert shell("assert", "-a", "-c", "mine", **environ).status == 2


def test_a_link_named_nvidia_mig_parted_serves_its_scripts(
    tmp_path: pathlib.Path, layouts: str
) -> None:
    script = tmp_path / "mig-manager"
    script.write_text(f"#!{sys.executable}\nfrom mig_manager.__main__ import main\nmain()\n")
    script.chmod(0o755)
    link = tmp_path / "nvidia-mig-parted"
    link.symlink_to(script)

    def run(*command: str | pathlib.Path, **environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(  # noqa: S603 - our own program
            command,
            env={"HOME": str(tmp_path), "PATH": os.environ["PATH"]} | environ,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    good = run(link, "assert", "-a", "-f", layouts, "-c", "mine")
    assert (good.returncode, good.stdout) == (0, VALID)
    assert run(link, "assert", "-a", "-f", "/nonexistent").returncode == 1
    assert run(script, "assert", "-a", "-f", "/nonexistent").returncode == 2
    # As the installer's program does it, which is no Python itself.
    called = run(script, "assert", "-f", "/nonexistent", MIG_MANAGER_CALLED=str(link))
    assert called.returncode == 1
