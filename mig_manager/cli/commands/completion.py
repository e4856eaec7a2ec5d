"""``mig-manager completion``, and the layouts that completion offers."""

import pathlib
from collections.abc import Iterable, Mapping

from mig_manager import errors
from mig_manager.adapters.host import process
from mig_manager.cli.commands import settings
from mig_manager.cli.toolkit import completion, console, program
from mig_manager.core import options


def run(parsed: program.Parsed, terminal: console.Console) -> int:
    """Write the script for a shell, or the names of layouts.

    Raises:
        ConfigError: The document cannot be read.
        UsageError: The shell is missing or unsupported.
    """
    shell = parsed["shell"]
    if parsed["layouts"]:
        names = filter(completion.SAFE_WORD.fullmatch, _layouts(parsed, terminal.environ))
        terminal.write("".join(f"{name}\n" for name in names))
    elif shell in completion.SCRIPTS:
        terminal.say(completion.SCRIPTS[str(shell)])
    else:
        reason = f"no completion for {shell!r}" if shell else "name a shell"
        known = ", ".join(completion.SCRIPTS)
        raise errors.UsageError(f"{reason}; supported: {known}")
    return console.DONE


def values(environ: Mapping[str, str]) -> completion.Values:
    """Return the function that completes layout names from the document on the command line."""

    def of_option(option: options.Option, line: completion.Line) -> Iterable[str]:
        if option.metavar != options.LAYOUT:
            return ()
        try:
            return _layouts({"command": line.command, **line.values}, environ)
        except errors.MigManagerError:
            return ()

    return of_option


def _layouts(parsed: program.Parsed, environ: Mapping[str, str]) -> Iterable[str]:
    from mig_manager.adapters.host import files  # noqa: PLC0415 - only for layouts
    from mig_manager.core.layout import config  # noqa: PLC0415 - loads YAML

    name = settings.command_settings(parsed, environ).config_file
    # The user is still typing on standard input, and no shell has expanded the tilde.
    path = process.packaged_config() if name in (None, "-") else pathlib.Path(name)
    source = files.ConfigFile(path.expanduser())
    return config.parse(source.read(), source=source.name).layouts
