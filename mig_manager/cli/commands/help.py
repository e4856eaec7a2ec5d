"""``mig-manager help``."""

from mig_manager.cli import registry
from mig_manager.cli.toolkit import console, parser, settings
from mig_manager.core import options

ABOUT = """
$ mig-manager help apply
As 'mig-manager apply --help'.
"""


class Settings(settings.CommandSettings):
    """Settings of ``help``."""

    topic: str | None = options.text(
        "the command (default: the program)",
        metavar="COMMAND",
        words=registry.COMMANDS,
        has_variable=False,
        is_operand=True,
    )


def run(chosen: Settings, terminal: console.Console) -> int:
    """Show the help of a command, or of the program; UnknownCommandError if it is unknown."""
    topic = chosen.topic or ""
    if topic:
        registry.PROGRAM.command(topic)
    terminal.say(parser.build(registry.PROGRAM, topic).format_help())
    return console.DONE
