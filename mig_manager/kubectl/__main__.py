"""The console scripts ``kubectl-mig`` and ``kubectl_complete-mig``, in one file if need be."""

import dataclasses
import datetime as dt
import pathlib
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence

import mig_manager
from mig_manager import errors
from mig_manager.change import validate
from mig_manager.cli import console, gpu_report
from mig_manager.core import messages
from mig_manager.core.layout import config
from mig_manager.kubectl import arguments, plan, selection, status

_COMPLETER = "kubectl_complete-mig"
"""What kubectl looks for on the PATH to complete the arguments of the plugin ``mig``."""
_REMEDIES = {
    errors.Reason.USAGE: f"See '{arguments.PROGRAM} --help'.",
    errors.Reason.FORBIDDEN: (
        "Ask the cluster's owner for the rights of a viewer; docs/kubectl-plugin.md lists them."
    ),
    errors.Reason.API_UNAVAILABLE: "Check that 'kubectl get nodes' works with these options.",
    errors.Reason.API_ERROR: "",
    errors.Reason.INVALID_CONFIG: "Correct the layout file at the place named.",
    errors.Reason.UNKNOWN_CONFIG: (
        "Name a layout of this file, or another file with -f or --config-map."
    ),
}
"""Where the remedy on the node is another."""


def main() -> None:
    """Run the command line of this process and exit with its status."""
    if pathlib.Path(sys.argv[0]).name.startswith(_COMPLETER):
        complete()
    sys.exit(run(sys.argv[1:], console.Console.of_process("kubectl-mig")))


def complete() -> None:
    """Answer kubectl's question how the command line may go on."""
    sys.exit(arguments.complete(sys.argv[1:], console.Console.of_process("kubectl-mig")))


def run(argv: Sequence[str], terminal: console.Console) -> int:
    """Run one command line.

    Returns:
        The exit status: 0 all is in order, 1 something is not or failed, 2 unusable input,
        3 unknown command.
    """

    def report_bug(error: Exception) -> None:
        terminal.note(
            f"internal error: {type(error).__name__}: {error}",
            remedy="This is a bug in kubectl-mig; please report it with these lines:",
        )
        traceback.print_exception(error, file=terminal.remarks)

    return terminal.exit_status(
        lambda: _run(argv, terminal),
        on_error=lambda error: terminal.note(
            messages.printable(error.message, " "),
            remedy=_REMEDIES.get(error.reason, error.reason.remedy_at_shell),
        ),
        on_bug=report_bug,
    )


def _run(argv: Sequence[str], terminal: console.Console) -> int:
    options = terminal.parsed(lambda: arguments.parse(argv))
    if options is None:
        return console.DONE
    match options["command"]:
        case None:
            terminal.say(arguments.build().format_help())
            return console.DONE
        case "version":
            terminal.say(f"kubectl-mig {mig_manager.__version__}")
            return console.DONE
        case command:
            is_good = _Command(options, terminal).run(str(command))
            return console.DONE if is_good else console.FAILED


class _Command:
    """One command line; each command returns whether all is in order."""

    def __init__(self, options: Mapping[str, object], terminal: console.Console) -> None:
        self._options = options
        self._terminal = terminal
        self._style = terminal.style(arguments.colour(options, terminal.environ))
        self._format = str(options.get("output"))
        self._now = dt.datetime.now(tz=dt.UTC)
        self._cluster = selection.Cluster(arguments.kubectl_options(options), note=terminal.note)

    def run(self, command: str) -> bool:
        commands = {
            "status": self._status,
            "plan": self._plan,
            "validate": self._validate,
            "history": self._history,
        }
        return commands[command]()

    def _status(self) -> bool:
        nodes = self._nodes()
        is_drawn = self._is_drawn(nodes)
        pods = selection.Pods(by_node=None)
        # A table has no room for the pods of many nodes, and listing them is slow.
        if is_drawn or self._format != "text":
            pods = self._cluster.pods(nodes.names)
        result = status.Status(reports=nodes.reports, pods=pods, now=self._now)
        draw = status.pictures if is_drawn else status.table
        self._answer(result.to_data, lambda: draw(result, style=self._style))
        return result.is_good and not nodes.missing

    def _plan(self) -> bool:
        document = self._document()
        layout = _printable(document.layout(str(self._options["layout"])))
        nodes = self._nodes()
        pods = self._cluster.pods(nodes.names)
        result = plan.plan(layout, nodes.reports, source=document.source, pods=pods)
        draw = plan.pictures if self._is_drawn(nodes) else plan.table
        self._answer(result.to_data, lambda: draw(result, style=self._style))
        return result.is_good and not nodes.missing

    def _validate(self) -> bool:
        document = self._document()
        names = self._names("layout")
        layouts = [document.layout(name) for name in names or document.layouts]
        templates, notes = plan.products(self._nodes().reports)
        for note in notes:
            self._terminal.note(note)
        if not templates:
            raise errors.UsageError("the GPUs of these nodes are not known: nothing to validate")
        from mig_manager.catalogue import hardware  # noqa: PLC0415 - reads the table of products

        result = validate.against_products(
            list(map(_printable, layouts)),
            source=document.source,
            templates=templates,
            # A layout that is named is meant for these nodes.
            others=None if names else hardware.known_gpus,
        )
        self._answer(result.to_data, lambda: gpu_report.validated(result, style=self._style))
        return not result.misfits

    def _history(self) -> bool:
        name = str(self._options["node"])
        (report,) = self._cluster.find([name], None, now=self._now).reports
        result = status.history(self._cluster, report, now=self._now)
        self._answer(result.to_data, lambda: status.page(result, style=self._style))
        return True

    def _answer(self, data: Callable[[], Mapping[str, object]], text: Callable[[], str]) -> None:
        self._terminal.answer(self._format, data, text)

    def _names(self, option: str) -> tuple[str, ...]:
        names = self._options.get(option)
        return tuple(map(str, names)) if isinstance(names, list) else ()

    def _nodes(self) -> selection.Found:
        selector = self._options.get("selector")
        text = None if selector is None else str(selector)
        found = self._cluster.find(self._names("node"), text, now=self._now)
        for message in found.missing:
            self._terminal.note(message)
        return found

    def _is_drawn(self, nodes: selection.Found) -> bool:
        return len(nodes.reports) == 1 or self._format == "wide"

    def _document(self) -> config.Document:
        file, config_map = self._options.get("filename"), self._options.get("config_map")
        if file is not None and config_map is not None:
            raise errors.UsageError("name a file or a ConfigMap with layouts, not both")
        if file is not None:
            document = self._terminal.layout_file(str(file))
        elif config_map is None:
            document = self._cluster.document(None)
        else:
            namespace, slash, name = str(config_map).partition("/")
            if not (namespace and slash and name):
                raise errors.UsageError(f"--config-map {config_map}: write NAMESPACE/NAME")
            document = self._cluster.document((namespace, name))
        for remark in document.warnings:
            self._terminal.note(f"warning: {messages.printable(str(remark), ' ')}")
        return document


def _printable(layout: config.Layout) -> config.Layout:
    """Return a layout whose name can be printed."""
    return dataclasses.replace(layout, name=messages.printable(layout.name))


if __name__ == "__main__":
    main()
