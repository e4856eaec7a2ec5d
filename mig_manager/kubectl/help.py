"""``kubectl mig help``."""

from mig_manager.cli.toolkit import console, parser, settings
from mig_manager.core import options
from mig_manager.kubectl import registry


class Settings(settings.CommandSettings):
    """Settings of ``help``."""

    topic: str | None = options.text(
        "the command (default: the program)",
        metavar="COMMAND",
        words=tuple(registry.PROGRAM.commands),
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
