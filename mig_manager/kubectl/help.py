"""``kubectl mig help``."""

from mig_manager.cli.toolkit import console, parser, settings
from mig_manager.kubectl import registry

Settings = settings.CommandSettings


def run(_chosen: Settings, terminal: console.Console) -> int:
    """Show the help."""
    terminal.say(parser.build(registry.PROGRAM).format_help())
    return console.DONE
