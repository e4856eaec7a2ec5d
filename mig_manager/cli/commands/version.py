"""``mig-manager version``."""

from mig_manager.cli import registry
from mig_manager.cli.toolkit import console, settings

ABOUT = """
$ mig-manager version
Also: mig-manager --version.
"""
Settings = settings.DebugSettings


def run(_chosen: Settings, terminal: console.Console) -> int:
    """Print the version."""
    terminal.say(registry.PROGRAM.version)
    return console.DONE
