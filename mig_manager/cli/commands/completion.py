"""``mig-manager completion``, and the layouts that completion offers."""

import pathlib
from collections.abc import Iterable, Mapping

from mig_manager import errors
from mig_manager.adapters.host import process
from mig_manager.cli.commands import gpu_settings
from mig_manager.cli.toolkit import completion, console
from mig_manager.core import node_settings, options

ABOUT = """
The script completes commands, options, their values and GPU products. It also completes
the layouts of the document named on the command line or in MIG_PARTED_CONFIG_FILE.

$ eval "$(mig-manager completion bash)"
For this shell; put it into ~/.bashrc for every bash.

$ mig-manager completion bash > /etc/bash_completion.d/mig-manager
For all users, loaded by every bash.

$ mig-manager completion zsh > "${fpath[1]}/_mig-manager"
For zsh with compinit.

$ mig-manager completion fish > ~/.config/fish/completions/mig-manager.fish
For fish.
"""


class Settings(gpu_settings.GpuSettings, takes="shell layouts config-file lenient debug"):
    """Settings of ``completion``."""

    shell: str | None = options.text(
        "bash, zsh or fish",
        metavar="SHELL",
        words=tuple(completion.SCRIPTS),
        has_variable=False,
        is_operand=True,
    )
    lists_layouts: bool = options.switch(
        "list the document's layouts instead, one a line, as the scripts do",
        name="layouts",
        has_variable=False,
    )
    is_debug: bool = options.declared(node_settings.DEBUG)


def run(chosen: Settings, terminal: console.Console) -> int:
    """Write the script for a shell, or the names of layouts.

    Raises:
        ConfigError: The document cannot be read.
        UsageError: The shell is missing or unsupported.
    """
    shell = chosen.shell
    if chosen.lists_layouts:
        names = filter(completion.SAFE_WORD.fullmatch, _layouts(chosen))
        terminal.write("".join(f"{name}\n" for name in names))
    elif shell in completion.SCRIPTS:
        terminal.say(completion.SCRIPTS[shell])
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
            return _layouts(Settings.read({"command": line.command, **line.values}, environ))
        except errors.MigManagerError:
            return ()

    return of_option


def _layouts(chosen: Settings) -> Iterable[str]:
    from mig_manager.adapters.host import files
    from mig_manager.core.layout import config

    name = chosen.config_file
    # The user is still typing on standard input, and no shell has expanded the tilde.
    path = process.packaged_config() if name in (None, "-") else pathlib.Path(name)
    source = files.ConfigFile(path.expanduser())
    return config.parse(source.read(), source=source.name).layouts
