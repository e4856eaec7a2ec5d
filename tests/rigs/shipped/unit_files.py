"""What the unit files say, and what the program makes of it."""

import pathlib
import re
import shlex
from collections.abc import Mapping
from typing import Any

from mig_manager.agent import agent_settings
from mig_manager.cli import registry
from mig_manager.cli.toolkit import parser
from mig_manager.kubectl import plugin_registry

ROOT = pathlib.Path(__file__).parents[3]
SYSTEMD = ROOT / "systemd"
BOOT = "mig-manager-boot.service"
UNITS = ["mig-manager.service", BOOT]
MANUAL = ["mig-manager.1", *(f"mig-manager-{command}.1" for command in registry.PROGRAM.commands)]
"""The pages for man about the program."""
PLUGIN_MANUAL = [
    "kubectl-mig.1",
    *(f"kubectl-mig-{row.name}.1" for row in plugin_registry.PROGRAM.rows),
]


class RecordedEnvironment(dict[str, str]):
    """An environment that records the variables that are read."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        super().__init__(variables)
        self.names: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return super().get(name, default)


def settings_of_agent(
    command_line: list[str], environ: Mapping[str, str]
) -> agent_settings.AgentSettings:
    parsed = parser.parse(registry.PROGRAM, command_line)
    assert parsed["command"] == "agent"
    return agent_settings.AgentSettings.read(parsed, environ)


def longest_stop_s(agent: agent_settings.AgentSettings) -> float:
    """How long an agent may take to end: a change is finished or undone, which takes another."""
    return 2 * agent.gpu_timeout_s


def directives(name: str) -> dict[str, list[str]]:
    """Return the values of a unit's directives; systemd allows several of each."""
    values: dict[str, list[str]] = {}
    for line in (ROOT / "systemd" / name).read_text(encoding="utf-8").splitlines():
        key, separator, value = line.partition("=")
        if separator and not line.startswith("#"):
            values.setdefault(key, []).append(value)
    return values


def unit_command_line(name: str = "mig-manager.service") -> list[str]:
    (command,) = directives(name)["ExecStart"]
    program, *rest = shlex.split(command)[:2]
    assert [program, *rest] == ["/usr/bin/env", "mig-manager"]
    return shlex.split(command)[2:]


def unit_environ() -> dict[str, str]:
    pairs = directives("mig-manager.service")["Environment"]
    return dict(pair.replace("%H", "node-1").split("=", 1) for pair in pairs)


def example_environ() -> dict[str, str]:
    text = (ROOT / "systemd" / "mig-manager.env").read_text(encoding="utf-8")
    return dict(re.findall(r"^#?([A-Z_]+)=(.*)$", text, re.MULTILINE))
