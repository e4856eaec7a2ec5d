"""The programs ``kubectl-mig`` and ``kubectl_complete-mig``; one file can be both."""

import contextlib
import pathlib
import sys
from collections.abc import Iterable, Sequence

from mig_manager import errors, reasons
from mig_manager.adapters import cluster_reader, kubectl
from mig_manager.cli.toolkit import completer, console, documents, parser
from mig_manager.core.fleet import listed_layouts
from mig_manager.core.settings import options
from mig_manager.kubectl import plugin_registry, plugin_settings

_COMPLETER = "kubectl_complete-mig"
"""The program that kubectl runs to complete the arguments of the plugin ``mig``."""
_REMEDIES = {
    reasons.Reason.FORBIDDEN: (
        "Ask the cluster's owner for the viewer's rights, listed in docs/kubectl-plugin.md."
    ),
    reasons.Reason.API_UNAVAILABLE: "Check that 'kubectl get nodes' works with these options.",
    reasons.Reason.API_ERROR: "",
    reasons.Reason.UNKNOWN_CONFIG: (
        "Name a layout of this file, or another file with -f or --config-map."
    ),
    reasons.Reason.UNKNOWN_PROFILE: "Use a profile that the message lists.",
}
"""Remedies that differ from those on the node."""
_COMPLETION_TIMEOUT_S = 5.0  # how long a prompt may hang while a person waits for completion


def main() -> None:
    """Run the command line of this process and exit with its status."""
    if pathlib.Path(sys.argv[0]).name.startswith(_COMPLETER):
        complete()
    sys.exit(run(sys.argv[1:], console.Console.of_process("kubectl-mig")))


def complete() -> None:
    """Complete a command line for kubectl."""
    sys.exit(answer_completion(sys.argv[1:], console.Console.of_process("kubectl-mig")))


def run(argv: Sequence[str], terminal: console.Console) -> int:
    """Run one command line.

    Returns:
        The exit status: 0 OK, 1 problem found or failed, 2 unusable input, 3 unknown command.
    """
    return terminal.exit_status(
        lambda: parser.run(plugin_registry.PROGRAM, argv, terminal),
        remedy=lambda error: str(
            error.own_remedy
            or plugin_registry.PROGRAM.usage_remedy(error, argv)
            or _REMEDIES.get(error.reason, error.reason.remedy_at_shell)
        ),
    )


def answer_completion(argv: Sequence[str], terminal: console.Console) -> int:
    """Complete the last word after ``mig``; return 0, because kubectl expects no error."""

    def of_option(option: options.Option, line: completer.Line) -> Iterable[str]:
        try:
            return _values(option, line, terminal)
        except (errors.MigManagerError, RuntimeError):  # RuntimeError: ~user without a home
            return ()

    terminal.say(completer.answer(plugin_registry.PROGRAM, argv, of_option))
    return console.DONE


def _values(
    option: options.Option, line: completer.Line, terminal: console.Console
) -> Iterable[str]:
    """Return completions that need the cluster or a file."""
    timeout = line.values.get("request_timeout") or f"{_COMPLETION_TIMEOUT_S:g}s"
    cluster = terminal.replace_adapter(
        kubectl.Kubectl(
            plugin_settings.kubectl_options({**line.values, "request_timeout": timeout}),
            note=lambda _: None,
            timeout_s=_COMPLETION_TIMEOUT_S,
        )
    )
    reader = cluster_reader.ClusterReader(cluster.get)
    match option.metavar:
        case options.LAYOUT:
            return _layouts(line, reader, terminal)
        case "NODE":
            return [node.name for node in reader.select_nodes(None)]
        case "CONTEXT":
            return cluster.contexts()
        case _:
            return ()


def _layouts(
    line: completer.Line, reader: cluster_reader.ClusterReader, terminal: console.Console
) -> Iterable[str]:
    """Return the layouts of the chosen document and, if the command takes them, of nodes."""
    settings = plugin_registry.PROGRAM.settings({**line.values, "command": line.command}, {})
    # The user is still typing on standard input, and no shell has expanded the tilde.
    file = settings.filename and str(pathlib.Path(settings.filename).expanduser())
    names: tuple[str, ...] = ()
    # One source may be forbidden or invalid.
    with contextlib.suppress(errors.MigManagerError):
        if file != "-":
            names += tuple(
                documents.document(
                    terminal,
                    reader,
                    file=file,
                    config_map=settings.config_map,
                    default=listed_layouts.NO_FILE,
                ).layouts
            )
    with contextlib.suppress(errors.MigManagerError):
        if line.command == "plan" or (line.command == "apply" and not file):
            nodes = reader.select_nodes(settings.selector)
            names += tuple(entry.name for node in nodes for entry in node.listed.layouts)
    return dict.fromkeys(names)
