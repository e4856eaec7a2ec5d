"""``mig-manager completion``, and the layouts that completion offers."""

import pathlib
from collections.abc import Iterable, Mapping

from mig_manager import errors
from mig_manager.adapters.host import process
from mig_manager.cli import completion_scripts, gpu_settings
from mig_manager.cli.toolkit import command_settings, completer, console
from mig_manager.core.settings import options

ABOUT = """
The script completes commands, options, their values and GPU products. It also completes
the layouts of the file named on the command line or in MIG_PARTED_CONFIG_FILE.

$ eval "$(mig-manager completion bash)"
For this shell; put it into ~/.bashrc for every bash.

$ mig-manager completion bash > /etc/bash_completion.d/mig-manager
For all users, loaded by every bash.

$ mig-manager completion zsh > "${fpath[1]}/_mig-manager"
For zsh with compinit.

$ mig-manager completion fish > ~/.config/fish/completions/mig-manager.fish
For fish.
"""


class Settings(command_settings.DebugSettings):
    """Settings of ``completion``."""

    shell: str | None = options.text(
        "bash, zsh or fish",
        metavar="SHELL",
        words=tuple(completion_scripts.SCRIPTS),
        has_variable=False,
        is_operand=True,
    )


def run(settings: Settings, terminal: console.Console) -> int:
    """Write the script for a shell; UsageError if the shell is unsupported."""
    if settings.shell not in completion_scripts.SCRIPTS:
        reason = f"no completion for {settings.shell!r}" if settings.shell else "name a shell"
        raise errors.UsageError(f"{reason}; supported: {', '.join(completion_scripts.SCRIPTS)}")
    terminal.say(completion_scripts.SCRIPTS[settings.shell])
    return console.DONE


def values(environ: Mapping[str, str]) -> completer.Values:
    """Return the function that completes layout names from the document on the command line."""

    def of_option(option: options.Option, line: completer.Line) -> Iterable[str]:
        if option.metavar != options.LAYOUT:
            return ()
        try:
            parsed = {"command": line.command, **line.values}
            return _layouts(_NamedDocument.read(parsed, environ))
        except (errors.MigManagerError, RuntimeError):  # RuntimeError: ~user without a home
            return ()

    return of_option


class _NamedDocument(gpu_settings.GpuSettings, takes=("config-file", "lenient")):
    """The document named on a command line, whose other options may be incomplete."""


def _layouts(settings: _NamedDocument) -> Iterable[str]:
    from mig_manager.adapters.host import files
    from mig_manager.core.layout import layout_parser

    name = settings.config_file
    # The user is still typing on standard input, and no shell has expanded the tilde.
    path = process.packaged_config() if name in (None, "-") else pathlib.Path(name)
    source = files.SourceFile(path.expanduser())
    return layout_parser.parse(source.read(), source=source.name).layouts
