"""``mig-manager help``."""

from mig_manager.cli import registry
from mig_manager.cli.toolkit import console, parser, settings

ABOUT = """
$ mig-manager help apply
As 'mig-manager apply --help'.
"""


class Settings(settings.CommandSettings):
    """Settings of ``help``."""

    topic: str | None = settings.topic(registry.COMMANDS)


def run(chosen: Settings, terminal: console.Console) -> int:
    """Show the help of a command, or of the program; UnknownCommandError if it is unknown."""
    return parser.show_help(registry.PROGRAM, chosen.topic or "", terminal)
