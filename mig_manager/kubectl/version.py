"""``kubectl mig version``."""

from mig_manager.cli.toolkit import console, settings
from mig_manager.kubectl import registry

Settings = settings.CommandSettings


def run(_chosen: Settings, terminal: console.Console) -> int:
    """Print the version."""
    terminal.say(registry.PROGRAM.version)
    return console.DONE
