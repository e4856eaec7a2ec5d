"""Settings of ``rollout``."""

import dataclasses
import pathlib
import re
from collections.abc import Mapping

from mig_manager import errors
from mig_manager.cli.commands import settings as command_settings
from mig_manager.core import node_settings, options
from mig_manager.core.fleet import rollout
from mig_manager.core.node import well_known

_AMOUNT = re.compile(r"([1-9][0-9]{0,5})|(100|[1-9]?[0-9])%")
_CONFIG_MAP = re.compile(r"([a-z0-9.-]+)/([a-z0-9.-]+)")


def _amount(text: str) -> str:
    if not _AMOUNT.fullmatch(text):
        raise ValueError("is neither a number of nodes nor a percentage")
    return text


def _config_map(text: str) -> tuple[str, ...]:
    match = _CONFIG_MAP.fullmatch(text)
    if match is None:
        raise ValueError("is not NAMESPACE/NAME")
    return match.groups()


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutSettings(command_settings.AnswerSettings, node_settings.DocumentSettings):
    """Settings of one rollout."""

    layout_operand: str | None = options.text(
        "the layout, or 'undo' to restore every node's previous request",
        name="layout",
        metavar=options.LAYOUT,
        has_variable=False,
        is_operand=True,
    )
    selected_config: str | None = options.text(
        "the layout as an option, for example a layout named undo",
        short="c",
        metavar=options.LAYOUT,
    )
    selector: str = options.text(
        "label selector of the nodes, as for kubectl (required)",
        short="l",
        metavar="SELECTOR",
        default="",
    )
    max_unavailable: str = options.text(
        "max nodes unavailable at once (number or %), counting those already unavailable",
        metavar="NUMBER",
        default="1",
        parse=_amount,
    )
    node_timeout_s: float = options.seconds(
        "how long a node may take, not counting its wait for a slot", default=1800.0, least=1.0
    )
    silence_timeout_s: float = options.seconds(
        "how long an agent may take to react before its node counts as failed",
        default=120.0,
        least=0.1,
    )
    config_file: pathlib.Path | None = options.path(
        "config document to plan with", short="f", default_text="from the ConfigMap"
    )
    config_map: tuple[str, str] = options.declared(
        options.Option(
            help="ConfigMap with the agents' config",
            metavar="NAMESPACE/NAME",
            parse=_config_map,
            default=("mig-manager", "mig-manager-config"),
            default_text="mig-manager/mig-manager-config",
        )
    )
    kubeconfig: pathlib.Path = options.path(
        "credentials for the cluster", variable="KUBECONFIG", default_text="~/.kube/config"
    )
    pauses_on_failure: bool = options.switch(
        "start no more nodes after a failure", name="pause-on-failure"
    )
    is_dry_run: bool = options.switch(
        "show for every node whether the layout fits and what it would cost; change nothing",
        name="dry-run",
    )
    goal: rollout.Goal
    limits: rollout.RolloutLimits


def rollout_settings(parsed: Mapping[str, object], environ: Mapping[str, str]) -> RolloutSettings:
    """Read the settings of a rollout.

    Raises:
        UsageError: A value is missing or cannot be used.
    """
    source = options.Source(parsed, environ, command="rollout")
    values = source.values(RolloutSettings)
    values["colour"] = command_settings.colour(source)
    values["selector"] = values["selector"].strip()
    if not values["selector"]:
        raise errors.UsageError("name the nodes: -l SELECTOR, as for kubectl")
    if values["layout_operand"] and parsed.get("selected_config") is None:
        values["selected_config"] = None  # the command line overrides the variable
    goal = _goal(values["layout_operand"], values["selected_config"])
    if values["kubeconfig"] is None:
        if not environ.get("HOME"):
            raise errors.UsageError("no kubeconfig: name one with --kubeconfig or KUBECONFIG")
        values["kubeconfig"] = pathlib.Path(environ["HOME"]) / ".kube" / "config"
    limits = rollout.RolloutLimits(
        max_unavailable=values["max_unavailable"],
        pauses=values["pauses_on_failure"],
        node_timeout_s=values["node_timeout_s"],
        silence_timeout_s=values["silence_timeout_s"],
    )
    return RolloutSettings(**values, goal=goal, limits=limits)


def _goal(operand: str | None, selected: str | None) -> rollout.Goal:
    if operand and selected and operand != selected:
        raise errors.UsageError(
            f"-c names {selected!r} and the command line {operand!r}; name one"
        )
    if operand == "undo" and not selected:
        return rollout.Goal(layout=None)
    name = selected or operand
    if not name:
        raise errors.UsageError("name a layout, or 'undo'")
    if not well_known.LABEL_VALUE.fullmatch(name):
        raise errors.UsageError(f"{name!r} is not a valid label value")
    return rollout.Goal(layout=name)
