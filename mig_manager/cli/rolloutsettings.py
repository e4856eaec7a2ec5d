"""Settings of ``rollout``."""

import dataclasses
import enum
import pathlib
import re
from collections.abc import Mapping

from mig_manager import errors
from mig_manager.agent import settings
from mig_manager.core.fleet import nodes, rollout
from mig_manager.core.options import source

_AMOUNT = re.compile(r"([1-9][0-9]{0,5})|(100|[1-9]?[0-9])%")
_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_CONFIG_MAP = re.compile(r"[a-z0-9.-]+/[a-z0-9.-]+")
_UNDO = "undo"
_DEFAULT_MAP = "mig-manager/mig-manager-config"


class OutputFormat(enum.Enum):
    """How the answer looks."""

    TEXT = "text"
    JSON = "json"
    YAML = "yaml"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSettings:
    """Settings of one rollout."""

    goal: nodes.Goal
    selector: str
    limits: rollout.Limits
    is_dry_run: bool
    config_file: pathlib.Path | None
    """Config document to plan with; None: that of the ConfigMap."""
    is_lenient: bool
    """Whether to pass in that document what NVIDIA's tool passes over in silence."""
    config_map: tuple[str, str]
    """Namespace and name of the ConfigMap that the agents serve."""
    kubeconfig: pathlib.Path
    output_format: OutputFormat
    colour: settings.Colour
    is_debug: bool


def rollout_settings(options: Mapping[str, object], environ: Mapping[str, str]) -> RolloutSettings:
    """Read the settings of a rollout.

    Raises:
        UsageError: A value is missing or cannot be used.
    """
    given = source.Source(options, environ)
    selector = given.text("selector").strip()
    if not selector:
        raise errors.UsageError("say which nodes: -l SELECTOR, as for kubectl")
    goal = _goal(given)
    is_dry_run = given.switch("dry-run")
    if is_dry_run and isinstance(goal, nodes.Back):
        raise errors.UsageError("a dry run is of a layout, not of undo")
    return RolloutSettings(
        goal=goal,
        selector=selector,
        limits=_limits(given),
        is_dry_run=is_dry_run,
        config_file=given.path("config-file"),
        is_lenient=given.switch("lenient"),
        config_map=_config_map(given),
        kubeconfig=given.path("kubeconfig", variable="KUBECONFIG") or _home_kubeconfig(environ),
        output_format=given.choice("output-format", OutputFormat, default=OutputFormat.TEXT),
        colour=settings.colour(given, environ),
        is_debug=given.switch("debug", variable="MIG_PARTED_DEBUG"),
    )


def _goal(given: source.Source) -> nodes.Goal:
    first, selected = given.text("layout"), given.text("selected-config")
    if first and selected and first != selected:
        raise errors.UsageError(f"-c names {selected!r} and the command line {first!r}; name one")
    if first == _UNDO and not selected:
        return nodes.Back()
    name = selected or first
    if not name:
        raise errors.UsageError("name a layout, or say undo")
    if not _LABEL.fullmatch(name):
        raise errors.UsageError(f"{name!r} cannot be the value of a label, so no node can have it")
    return nodes.Forward(layout=name)


def _limits(given: source.Source) -> rollout.Limits:
    amount = given.text("max-unavailable", default="1")
    if not _AMOUNT.fullmatch(amount):
        raise errors.UsageError(
            f"--max-unavailable: {amount!r} is neither a number of nodes nor a percentage"
        )
    return rollout.Limits(
        max_unavailable=amount,
        pauses=given.switch("pause-on-failure"),
        node_timeout_s=given.seconds("node-timeout-s", default=1800.0, least=1.0),
        silence_timeout_s=given.seconds("silence-timeout-s", default=120.0, least=0.1),
    )


def _config_map(given: source.Source) -> tuple[str, str]:
    text = given.text("config-map", default=_DEFAULT_MAP)
    if not _CONFIG_MAP.fullmatch(text):
        raise errors.UsageError(f"--config-map: {text!r} is not NAMESPACE/NAME")
    namespace, _, name = text.partition("/")
    return namespace, name


def _home_kubeconfig(environ: Mapping[str, str]) -> pathlib.Path:
    home = environ.get("HOME")
    if not home:
        raise errors.UsageError("neither --kubeconfig nor KUBECONFIG nor HOME says how to get in")
    return pathlib.Path(home) / ".kube" / "config"
