"""The options of ``rollout``."""

import pathlib
import shlex
from typing import Any

from mig_manager import errors
from mig_manager.cli.toolkit import command_settings
from mig_manager.core.fleet import goals, node_amounts
from mig_manager.core.objects import selectors, well_known
from mig_manager.core.settings import node_settings, options


class RolloutSettings(command_settings.AnswerSettings, node_settings.DocumentSettings):
    """Settings of one rollout."""

    layout_operand: str | None = options.text(
        "the layout, or 'undo' to restore every node's previous request",
        name="layout",
        metavar=options.LAYOUT,
        has_variable=False,
        is_operand=True,
    )
    selector: str = options.text(
        "label selector of the nodes, as for kubectl (required)",
        short="l",
        metavar="SELECTOR",
        default="",
        parse=selectors.validate_selector,
    )
    max_unavailable: str = options.text(
        "max nodes unavailable at once (number or %), counting those already unavailable",
        metavar="NUMBER",
        default="1",
        parse=node_amounts.parse,
    )
    node_timeout_s: float = options.seconds(
        "how long a node may take, not counting its wait for a slot", default=1800.0, minimum=1.0
    )
    silence_timeout_s: float = options.seconds(
        "how long an agent may take to react before its node counts as failed",
        default=120.0,
        minimum=0.1,
    )
    config_file: pathlib.Path | None = options.path(
        "layout file to plan with", short="f", default_text="from the ConfigMap"
    )
    config_map: tuple[str, str] | None = options.declare(command_settings.CONFIG_MAP)
    kubeconfig: pathlib.Path = options.path(
        "credentials for the cluster", variable="KUBECONFIG", default_text="~/.kube/config"
    )
    context: str | None = options.text(
        "context of the kubeconfig",
        metavar="CONTEXT",
        default_text="the current one",
        has_variable=False,
    )
    pauses_on_failure: bool = options.switch(
        "start no more nodes after a failure", name="pause-on-failure"
    )
    is_dry_run: bool = options.switch(
        "show for every node whether the layout fits and what it would cost; change nothing",
        name="dry-run",
    )
    undo: str  # the arguments of the command that undoes it
    goal: goals.RolloutGoal
    limits: goals.RolloutLimits

    @classmethod
    def values(cls, source: options.Source) -> dict[str, Any]:
        """Return the values of all fields."""
        values = super().values(source)
        sources = ("config_file", "config_map")
        if any(map(source.parsed.get, sources)):
            # The command line overrides a variable, also the one for the other source.
            values |= {key: None for key in sources if not source.parsed.get(key)}
        values["selector"] = values["selector"].strip()
        if not values["selector"]:
            raise errors.UsageError("name the nodes: -l SELECTOR, as for kubectl")
        undo = ["undo", "-l", values["selector"]]
        if values["kubeconfig"] is not None:
            undo += ["--kubeconfig", str(values["kubeconfig"])]
        else:
            if not source.environ.get("HOME"):
                raise errors.UsageError("no kubeconfig: name one with --kubeconfig or KUBECONFIG")
            values["kubeconfig"] = pathlib.Path(source.environ["HOME"]) / ".kube" / "config"
        if values["context"] is not None:
            undo += ["--context", values["context"]]
        return values | {
            "undo": shlex.join(undo),
            "goal": _goal(values["layout_operand"]),
            "limits": goals.RolloutLimits(
                max_unavailable=values["max_unavailable"],
                pauses=values["pauses_on_failure"],
                node_timeout_s=values["node_timeout_s"],
                silence_timeout_s=values["silence_timeout_s"],
            ),
        }


def _goal(operand: str | None) -> goals.RolloutGoal:
    if not operand:
        raise errors.UsageError("name a layout, or 'undo'")
    if operand == "undo":
        return goals.RolloutGoal(layout=None)
    if not well_known.LABEL_VALUE.fullmatch(operand):
        problem = f"{operand!r} is not a valid label value; write LAYOUT -l SELECTOR"
        raise errors.UsageError(problem)
    return goals.RolloutGoal(layout=operand)
