"""What the settings of all commands share, in both programs."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, ClassVar, Self, dataclass_transform

from mig_manager.core.settings import node_settings, options

OUTPUT = "output"  # heading in help
WATCH = options.Option(
    name="watch",
    help="refresh until q is pressed; in a pipe, a line for each change",
    short="w",
    parse=options.parse_switch,
    default=False,
)

MUST_FIT = options.Option(
    name="must-fit",
    help="also fail for layouts that fit only other GPU models; named layouts must always fit",
    parse=options.parse_switch,
    default=False,
)


def _namespace_and_name(text: str) -> tuple[str, ...]:
    match = re.fullmatch(r"([a-z0-9.-]+)/([a-z0-9.-]+)", text)
    if match is None:
        raise ValueError("is not NAMESPACE/NAME")
    return match.groups()


CONFIG_MAP = options.Option(
    name="config-map",
    help="ConfigMap with the layout file",
    metavar="NAMESPACE/NAME",
    default_text="mig-manager's, then the GPU operator's",
    parse=_namespace_and_name,
)


def output_format(*words: str, **more: Any) -> Any:
    """Declare the format of the answer: one of these words, by default the first."""
    default = node_settings.OutputFormat(words[0])
    shown = {"short": "o", "metavar": "FORMAT", "group": OUTPUT} | more
    return options.choice("|".join(words), words=words, default=default, **shown)


@dataclass_transform(frozen_default=True, kw_only_default=True)
@dataclasses.dataclass(frozen=True, kw_only=True)
class CommandSettings:
    """Settings of a command; the class ``Settings`` of its module extends it.

    Extensions are frozen dataclasses. ``takes`` names the options that the command takes, in the
    order of help; without it, the command takes all that are declared.
    """

    takes: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, *, takes: tuple[str, ...] = ()) -> None:
        cls.takes = takes
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)

    @classmethod
    def read(cls, parsed: Mapping[str, object], environ: Mapping[str, str]) -> Self:
        """Read the settings from a parsed command line and variables.

        Raises:
            UsageError: A value is missing, cannot be used, or contradicts another.
        """
        return cls(**cls.values(options.Source(parsed, environ)))

    @classmethod
    def values(cls, source: options.Source) -> dict[str, Any]:
        """Return the values of all fields."""
        return source.values(cls)


class DebugSettings(CommandSettings):
    """Settings of a command with a plain answer."""

    is_debug: bool = options.declare(node_settings.DEBUG)


class TerminalSettings(CommandSettings):
    """Settings of a command that draws for people."""

    colour: node_settings.Colour = options.declare(
        dataclasses.replace(node_settings.COLOUR, group=OUTPUT)
    )
    is_debug: bool = options.declare(dataclasses.replace(node_settings.DEBUG, group=OUTPUT))

    @classmethod
    def values(cls, source: options.Source) -> dict[str, Any]:
        """Return the values of all fields; by default, colours only if the terminal has them."""
        values, environ = super().values(source), source.environ
        is_plain = environ.get("NO_COLOR") or environ.get("TERM") == "dumb"
        if is_plain and not source.is_set(node_settings.COLOUR):
            values["colour"] = node_settings.Colour.NEVER
        return values


class AnswerSettings(TerminalSettings):
    """Settings of a command that also answers programs."""

    output_format: node_settings.OutputFormat = output_format("text", "json", "yaml")
