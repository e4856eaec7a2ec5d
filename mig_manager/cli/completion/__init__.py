"""Completion of command lines in bash, zsh and fish.

The scripts are made of the definitions of the command line, so that they know every option there
is. What only a file knows, the layouts, they ask the program for when somebody wants one.
"""

import re
from collections.abc import Mapping

from mig_manager import errors
from mig_manager.catalogue import products
from mig_manager.cli import commandline
from mig_manager.cli.completion import bash, fish, zsh

_SCRIPTS = {"bash": bash.script, "zsh": zsh.script, "fish": fish.script}
_SAFE = re.compile(r"[A-Za-z0-9._-]+")
"""Names that no shell takes for anything else, and Kubernetes takes as label values."""


def answer(options: Mapping[str, object], environ: Mapping[str, str]) -> str:
    """Return the script, or the layouts that a script asks for.

    Args:
        options: As parsed.
        environ: The environment.

    Raises:
        ConfigError: The document cannot be read.
        UsageError: No shell is named, or one that there is no script for.
    """
    if options.get("layouts"):
        return _layouts(options, environ)
    shell = options.get("shell")
    if shell not in _SCRIPTS:
        known = ", ".join(_SCRIPTS)
        asked = f"there is no completion for {shell!r}" if shell else "name a shell"
        raise errors.UsageError(f"{asked}; there is one for {known}")
    return _SCRIPTS[shell](commandline.program(), commandline.commands(), products.names())


def _layouts(options: Mapping[str, object], environ: Mapping[str, str]) -> str:
    from mig_manager.adapters.host import files  # noqa: PLC0415 - only for layouts
    from mig_manager.agent import settings  # noqa: PLC0415 - only for layouts
    from mig_manager.cli import command_settings  # noqa: PLC0415 - only for layouts
    from mig_manager.core.layout import config  # noqa: PLC0415 - only for layouts

    name = command_settings.command_settings(options, environ).config_file
    # Standard input is the user's, who is still typing.
    source = files.ConfigFile(settings.packaged_config() if name in (None, "-") else name)
    found = config.parse(source.read(), source=source.name).layouts
    return "".join(f"{each}\n" for each in found if _SAFE.fullmatch(each))
