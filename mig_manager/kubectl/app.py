"""Composition root of ``kubectl mig``: arguments, then questions to the API, then an answer."""

import contextlib
import datetime as dt
import json
import traceback
from collections.abc import Callable, Mapping, Sequence

import mig_manager
from mig_manager import errors
from mig_manager.adapters import kubectl
from mig_manager.adapters.host import configfile
from mig_manager.agent import settings
from mig_manager.change import validate
from mig_manager.cli import console
from mig_manager.cli.render import gpu_report
from mig_manager.core import messages, yaml_tree
from mig_manager.core.layout import config
from mig_manager.core.options import source
from mig_manager.kubectl import arguments, history, plan, selection, status

DONE, FAILED, UNUSABLE, UNKNOWN_COMMAND = 0, 1, 2, 3
_INTERRUPTED = 128 + 2
_BROKEN_PIPE = 128 + 13
_INPUT_REASONS = frozenset(
    {errors.Reason.USAGE, errors.Reason.INVALID_CONFIG, errors.Reason.UNKNOWN_CONFIG}
)
_MAX_CHARACTERS = yaml_tree.MAX_CHARACTERS + 1
"""What to read of standard input: one more than is allowed, so that too much is seen as such."""
_REMEDIES = {
    errors.Reason.USAGE: f"See '{arguments.PROGRAM} --help'.",
    errors.Reason.FORBIDDEN: (
        "Ask the cluster's owner for the rights of a viewer; docs/kubectl-plugin.md lists them."
    ),
    errors.Reason.API_UNAVAILABLE: "Look whether 'kubectl get nodes' works with these options.",
    errors.Reason.API_ERROR: "",
    errors.Reason.INVALID_CONFIG: "Correct the document at the place named.",
    errors.Reason.UNKNOWN_CONFIG: (
        "Name a layout that the document has, or another document with -f or --config-map."
    ),
}
"""Where a person elsewhere must do something else than a person on the node."""


def main(argv: Sequence[str], terminal: console.Console) -> int:
    """Run one command line.

    Args:
        argv: The arguments without the program's name.
        terminal: Streams and environment.

    Returns:
        The exit status: 0 all is as it should be, 1 something is not or failed, 2 unusable input,
        3 unknown command.
    """
    try:
        return _run(argv, terminal)
    except errors.MigManagerError as error:
        said = messages.printable(error.message, " ")
        terminal.note(said, remedy=_REMEDIES.get(error.reason, error.reason.remedy_at_shell))
        return _status_of(error)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        terminal.forget()
        return _BROKEN_PIPE
    except console.AnswerLostError as error:
        terminal.note(str(error))
        terminal.forget()
        return FAILED
    except Exception as error:  # noqa: BLE001 - a bug must not end in a bare traceback
        terminal.note(
            f"internal error: {type(error).__name__}: {error}",
            remedy="This is a bug in kubectl-mig; please report it with these lines:",
        )
        traceback.print_exception(error, file=terminal.remarks)
        return FAILED


def _run(argv: Sequence[str], terminal: console.Console) -> int:
    try:
        with contextlib.redirect_stdout(terminal.stdout):
            options = arguments.parse(argv)
    except SystemExit:
        terminal.stdout.flush()
        return DONE
    match options["command"]:
        case None:
            terminal.say(arguments.build()[0].format_help())
            return DONE
        case "version":
            terminal.say(f"kubectl-mig {mig_manager.__version__}")
            return DONE
        case command:
            return _App(options, terminal).commands[str(command)]()


def _status_of(error: errors.MigManagerError) -> int:
    if isinstance(error, arguments.UnknownCommandError):
        return UNKNOWN_COMMAND
    return UNUSABLE if error.reason in _INPUT_REASONS else FAILED


class _App:
    """One command line."""

    def __init__(self, options: Mapping[str, object], terminal: console.Console) -> None:
        given = source.Source(options, terminal.environ)
        self._options = options
        self._terminal = terminal
        self._style = terminal.style(settings.colour(given, terminal.environ))
        self._format = str(options.get("output"))
        self._now = dt.datetime.now(tz=dt.UTC)
        self._seen = selection.Cluster(
            kubectl.Kubectl(arguments.kubectl_options(options), tell=terminal.note)
        )

    @property
    def commands(self) -> Mapping[str, Callable[[], int]]:
        """Every command by name."""
        return {
            "status": self._status,
            "plan": self._plan,
            "validate": self._validate,
            "history": self._history,
        }

    def _status(self) -> int:
        nodes = self._nodes()
        is_drawn = self._is_drawn(nodes)
        # The table has no room for them, and the pods of many nodes are much to list.
        is_asked = is_drawn or self._format != "text"
        pods = selection.pods(self._seen, nodes.names) if is_asked else None
        result = status.Status(
            reports=nodes.reports, pods=pods or selection.Pods(by_node=None), now=self._now
        )
        draw = status.pictures if is_drawn else status.table
        self._answer(result.to_data, lambda: draw(result, style=self._style))
        return DONE if result.is_good and not nodes.missing else FAILED

    def _plan(self) -> int:
        found = self._document()
        layout = plan.harmless(found.layout(str(self._options["layout"])))
        nodes = self._nodes()
        pods = selection.pods(self._seen, nodes.names)
        result = plan.plan(layout, nodes.reports, source=found.source, pods=pods)
        draw = plan.pictures if self._is_drawn(nodes) else plan.table
        self._answer(result.to_data, lambda: draw(result, style=self._style))
        return DONE if result.is_good and not nodes.missing else FAILED

    def _validate(self) -> int:
        source_ = self._document()
        given = self._options.get("layout")
        names = [str(name) for name in given] if isinstance(given, list) else []
        layouts = [source_.layout(name) for name in names or source_.layouts]
        found = plan.of_nodes(self._nodes().reports)
        for note in found.notes:
            self._terminal.note(note)
        if not found.templates:
            raise errors.UsageError("no node tells which GPUs it has, so nothing can be checked")
        result = validate.against_products(
            [plan.harmless(layout) for layout in layouts],
            source=source_.source,
            templates=found.templates,
            # Who names a layout means it for these nodes.
            others=None if names else plan.known,
        )
        self._answer(result.to_data, lambda: gpu_report.validated(result, style=self._style))
        return FAILED if result.misfits else DONE

    def _history(self) -> int:
        named = selection.Selection(names=(str(self._options["node"]),), selector=None)
        (told,) = selection.find(self._seen, named, now=self._now).reports
        result = history.history(self._seen, told, now=self._now)
        self._answer(result.to_data, lambda: history.page(result, style=self._style))
        return DONE

    def _answer(self, data: Callable[[], Mapping[str, object]], text: Callable[[], str]) -> None:
        match self._format:
            case "json":
                self._terminal.say(json.dumps(data(), indent=2))
            case "yaml":
                self._terminal.say(yaml_tree.dump(data()))
            case _:
                self._terminal.say(text())

    def _nodes(self) -> selection.Found:
        given = self._options.get("node")
        selector = self._options.get("selector")
        asked = selection.Selection(
            names=tuple(str(name) for name in given) if isinstance(given, list) else (),
            selector=None if selector is None else str(selector),
        )
        found = selection.find(self._seen, asked, now=self._now)
        for said in found.missing:
            self._terminal.note(said)
        return found

    def _is_drawn(self, nodes: selection.Found) -> bool:
        return len(nodes.reports) == 1 or self._format == "wide"

    def _document(self) -> config.Document:
        found = self._found_document()
        for remark in found.warnings:
            self._terminal.note(f"warning: {messages.printable(str(remark), ' ')}")
        return found

    def _found_document(self) -> config.Document:
        file, config_map = self._options.get("filename"), self._options.get("config_map")
        if file is not None and config_map is not None:
            raise errors.UsageError("name a file or a ConfigMap with layouts, not both")
        if file == "-":
            return config.parse(self._standard_input(), source="<stdin>")
        if file is not None:
            found = configfile.ConfigFile(str(file))
            return config.parse(found.read(), source=found.name)
        if config_map is None:
            return self._seen.document(None)
        namespace, slash, name = str(config_map).partition("/")
        if not (namespace and slash and name):
            raise errors.UsageError(f"--config-map {config_map}: write NAMESPACE/NAME")
        return self._seen.document((namespace, name))

    def _standard_input(self) -> str:
        try:
            return self._terminal.stdin.read(_MAX_CHARACTERS)
        except (OSError, UnicodeError) as error:
            raise errors.ConfigError(f"cannot read standard input: {error}") from error
