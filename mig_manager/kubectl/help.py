"""``kubectl mig help``."""

from mig_manager.cli.toolkit import console, parser, settings
from mig_manager.kubectl import registry


class Settings(settings.CommandSettings):
    """Settings of ``help``."""

    topic: str | None = settings.topic(registry.PROGRAM.commands)


def run(chosen: Settings, terminal: console.Console) -> int:
    """Show the help of a command, or of the program; UnknownCommandError if it is unknown."""
    return parser.show_help(registry.PROGRAM, chosen.topic or "", terminal)
