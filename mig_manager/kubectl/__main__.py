"""The console scripts ``kubectl-mig`` and ``kubectl_complete-mig``, in one file if need be."""

import dataclasses
import datetime as dt
import pathlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence

import mig_manager
from mig_manager import errors
from mig_manager.cli.commands import settings as command_settings
from mig_manager.cli.toolkit import console, help_pages, parser, validation
from mig_manager.core import options
from mig_manager.core.fleet import nodes
from mig_manager.core.layout import config
from mig_manager.kubectl import apply, autoscaler, capacity, layouts, plan, selection, status

PROGRAM = "kubectl mig"
COMMANDS: Mapping[str, str] = {
    "status": "show the layouts and slices of nodes",
    "plan": "show what a layout would change on nodes, and change nothing",
    "apply": "request a layout of your own of one node",
    "capacity": "show which instances are idle, and what could be created instead",
    "validate": "check layouts against the GPUs that the nodes have",
    "layouts": "show the layouts that a node can be asked for",
    "history": "show what happened to a node's layout lately",
    "autoscaler-tags": "print the tags of a node group that scales from zero",
    "version": "print the version",
}
_EPILOG = "Exit status: 0 in order, 1 not in order or failed, 2 unusable input, 3 unknown command."
_COMPLETER = "kubectl_complete-mig"
"""What kubectl looks for on the PATH to complete the arguments of the plugin ``mig``."""
_REMEDIES = {
    errors.Reason.FORBIDDEN: (
        "Ask the cluster's owner for the rights of a viewer; docs/kubectl-plugin.md lists them."
    ),
    errors.Reason.API_UNAVAILABLE: "Check that 'kubectl get nodes' works with these options.",
    errors.Reason.API_ERROR: "",
    errors.Reason.UNKNOWN_CONFIG: (
        "Name a layout of this file, or another file with -f or --config-map."
    ),
}
"""Where the remedy on the node is another."""
_NO_FILES, _FILES = 4, 0  # cobra's ShellCompDirectiveNoFileComp and ShellCompDirectiveDefault
_COMPLETION_TIMEOUT_S = 5.0  # how long a prompt may hang while a person waits for completion


def main() -> None:
    """Run the command line of this process and exit with its status."""
    if pathlib.Path(sys.argv[0]).name.startswith(_COMPLETER):
        complete()
    sys.exit(run(sys.argv[1:], console.Console.of_process("kubectl-mig")))


def complete() -> None:
    """Answer kubectl's question how the command line may go on."""
    sys.exit(answer_completion(sys.argv[1:], console.Console.of_process("kubectl-mig")))


def run(argv: Sequence[str], terminal: console.Console) -> int:
    """Run one command line.

    Returns:
        The exit status: 0 all is in order, 1 something is not or failed, 2 unusable input,
        3 unknown command.
    """

    def run_parsed() -> int:
        parsed = terminal.parsed(lambda: parse(argv))
        if parsed is None:
            return console.DONE
        match parsed["command"]:
            case None:
                terminal.say(build().format_help())
                return console.DONE
            case "version":
                terminal.say(f"kubectl-mig {mig_manager.__version__}")
                return console.DONE
            case command:
                is_good = _Command(parsed, terminal).run(str(command))
                return console.DONE if is_good else console.FAILED

    return terminal.exit_status(
        run_parsed,
        remedy=lambda error: (
            error.own_remedy
            or parser.usage_remedy(error, PROGRAM, argv, COMMANDS)
            or _REMEDIES.get(error.reason, error.reason.remedy_at_shell)
        ),
        bug_remedy="This is a bug in kubectl-mig; please report it with these lines:",
        has_traceback=True,
    )


class _Command:
    """One command line; each command returns whether all is in order."""

    def __init__(self, parsed: Mapping[str, object], terminal: console.Console) -> None:
        self._parsed = parsed
        self._terminal = terminal
        source = options.Source(parsed, terminal.environ)
        self._colour = command_settings.colour(source)
        self._style = terminal.style(self._colour)
        self._format = str(parsed.get("output"))
        self._now = dt.datetime.now(tz=dt.UTC)
        self._cluster = selection.Cluster(selection.kubectl_options(parsed), note=terminal.note)

    def run(self, command: str) -> bool:
        commands = {
            "status": self._status,
            "plan": self._plan,
            "apply": self._apply,
            "capacity": self._capacity,
            "validate": self._validate,
            "layouts": self._layouts,
            "history": self._history,
            "autoscaler-tags": self._autoscaler_tags,
        }
        return commands[command]()

    def _status(self) -> bool:
        if self._parsed.get("watch"):
            return self._watch()
        found = self._nodes()
        result = self._seen(found)
        draw = status.pictures if self._is_drawn(found) else status.table
        self._answer(result.to_data, lambda: draw(result, style=self._style))
        return result.is_good and not found.missing

    def _seen(self, found: selection.Found) -> status.Status:
        pods = selection.Pods(by_node=None)
        # A table has no room for the pods of many nodes, and listing them is slow.
        if self._is_drawn(found) or self._format != "text":
            pods = self._cluster.pods(found.names)
        return status.Status(reports=found.reports, pods=pods, now=self._now)

    def _watch(self) -> bool:
        from mig_manager.cli.toolkit import live  # noqa: PLC0415 - rarely used

        live.require_text(self._format)

        def refresh() -> live.View:
            self._now = dt.datetime.now(tz=dt.UTC)
            self._style = self._terminal.style(self._colour)
            found = self._found()
            result = self._seen(found)
            draw = status.pictures if self._is_drawn(found) else status.table
            blocks = [draw(result, style=self._style)]
            # Events cost a request for each node, and the table does not name it.
            if len(found.reports) == 1:
                past = status.history(self._cluster, found.reports[0], now=self._now)
                blocks += status.last_run(past, style=self._style)
            blocks += [self._style.wrapped(message) for message in found.missing]
            lines = {report.node.name: status.line(report) for report in found.reports}
            # Under one name, which stays: what is not missing any more is not gone.
            lines["not found"] = "; ".join(found.missing)
            return live.View("\n\n".join(blocks), lines)

        return live.run(self._terminal, refresh) == console.DONE

    def _plan(self) -> bool:
        name, found = str(self._parsed["layout"]), self._nodes()
        is_listed = nodes.is_listed((each.node for each in found.reports), name)
        document = self._document(nodes.NO_FILE if is_listed else None)
        pods = self._cluster.pods(found.names)
        result = plan.plan(name, found.reports, document=document, pods=pods)
        draw = plan.pictures if self._is_drawn(found) else plan.table
        self._answer(result.to_data, lambda: draw(result, style=self._style))
        return result.is_good and not found.missing

    def _apply(self) -> bool:
        if self._parsed.get("filename") is None:
            raise errors.UsageError("name the file with the layout: -f FILE")
        name, now = self._parsed.get("layout"), self._now
        layout = apply.chosen(self._document(), None if name is None else str(name))
        is_dry_run = bool(self._parsed.get("dry_run"))
        result = apply.apply(self._cluster, self._node(), layout, is_dry_run=is_dry_run, now=now)
        self._answer(result.to_data, lambda: apply.text(result, style=self._style))
        return result.is_good

    def _capacity(self) -> bool:
        found = self._nodes()
        result = capacity.capacity(found.reports, now=self._now)
        self._answer(result.to_data, lambda: capacity.table(result, style=self._style))
        return result.is_good and not found.missing

    def _validate(self) -> bool:
        document, names = self._document(), self._names("layout")
        result = plan.validated(document, names, self._nodes().reports, note=self._terminal.note)
        self._answer(result.to_data, lambda: validation.table(result, style=self._style))
        return not result.misfits

    def _layouts(self) -> bool:
        report = self._node()
        own = selection.OPERATOR_NAMESPACE, f"{report.node.name}-mig-config"
        if self._parsed.get("filename") or self._parsed.get("config_map"):
            document = self._document()
            result = layouts.layouts(report, [lambda: document])
        else:
            usual = [self._document, lambda: self._cluster.document(own)]
            result = layouts.layouts(report, usual)
        self._answer(result.to_data, lambda: layouts.pictures(result, style=self._style))
        return bool(result.layouts)

    def _history(self) -> bool:
        report = self._node()
        result = status.history(self._cluster, report, now=self._now)
        self._answer(result.to_data, lambda: status.page(result, style=self._style))
        return True

    def _autoscaler_tags(self) -> bool:
        layout = self._document().layout(str(self._parsed["layout"]))
        result = autoscaler.tags(plan.printable(layout), self._parsed)
        self._answer(result.to_data, lambda: autoscaler.text(result))
        return True

    def _answer(self, data: Callable[[], Mapping[str, object]], text: Callable[[], str]) -> None:
        self._terminal.answer(self._format, data, text)

    def _names(self, option: str) -> tuple[str, ...]:
        names = self._parsed.get(option)
        return tuple(map(str, names)) if isinstance(names, list) else ()

    def _nodes(self) -> selection.Found:
        found = self._found()
        for message in found.missing:
            self._terminal.note(message)
        return found

    def _found(self) -> selection.Found:
        selector = str(self._parsed.get("selector") or "") or None
        return self._cluster.find(self._names("node"), selector, now=self._now)

    def _node(self) -> nodes.Report:
        (report,) = self._cluster.find([str(self._parsed["node"])], None, now=self._now).reports
        return report

    def _is_drawn(self, nodes: selection.Found) -> bool:
        return len(nodes.reports) == 1 or self._format == "wide"

    def _document(self, default: config.Document | None = None) -> config.Document:
        file, config_map = self._parsed.get("filename"), self._parsed.get("config_map")
        if file is not None and config_map is not None:
            raise errors.UsageError("name a file or a ConfigMap with layouts, not both")
        if file is not None:
            document = self._terminal.layout_file(str(file))
        elif config_map is None:
            document = self._cluster.document(None, default)
        else:
            namespace, slash, name = str(config_map).partition("/")
            if not (namespace and slash and name):
                raise errors.UsageError(f"--config-map {config_map}: write NAMESPACE/NAME")
            document = self._cluster.document((namespace, name))
        for remark in document.warnings:
            self._terminal.note(f"warning: {remark}")
        return document


# -- the command line ----------------------------------------------------------------------------

_CLUSTER_PARSER = parser.Parser(
    PROGRAM, "", selection.KUBECTL_OPTIONS, lambda: parser.Page(None, "", "")
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PluginOptions:
    """The options of all commands, as text."""

    layout: str = options.declared(
        options.Option(
            help="name of the layout",
            metavar=options.LAYOUT,
            commands="plan autoscaler-tags",
            is_operand=True,
            is_required=True,
        ),
        options.Option(
            help="layouts to check (default: all)",
            metavar=options.LAYOUT,
            commands="validate",
            is_operand=True,
            is_repeatable=True,
        ),
        options.Option(
            help="which layout of a file with several", metavar=options.LAYOUT, commands="apply"
        ),
    )
    node: str = options.declared(
        options.Option(
            help="nodes (default: all with NVIDIA GPUs)",
            metavar="NODE",
            commands="status plan capacity",
            is_operand=True,
            is_repeatable=True,
        ),
        options.Option(
            help="the node",
            metavar="NODE",
            commands="apply layouts history",
            is_operand=True,
            is_required=True,
        ),
    )
    selector: str = options.text(
        "nodes with these labels, as kubectl's",
        short="l",
        metavar="SELECTOR",
        commands="status plan capacity validate",
    )
    is_watched: bool = options.declared(command_settings.WATCH)
    filename: str = options.text(
        "config document, '-' for standard input",
        short="f",
        metavar=options.FILE,
        commands="plan apply validate layouts autoscaler-tags",
    )
    is_dry_run: bool = options.switch(
        "show what would change, and request nothing",
        name="dry-run",
        commands="apply",
        has_variable=False,
    )
    config_map: str = options.text(
        "ConfigMap with the config document",
        metavar="NAMESPACE/NAME",
        default_text="that of mig-manager, then that of the GPU operator",
        commands="plan validate layouts autoscaler-tags",
    )
    output: command_settings.OutputFormat = options.choice(
        "text|wide|json|yaml",
        short="o",
        metavar="FORMAT",
        default=command_settings.OutputFormat.TEXT,
        default_text="text; wide draws every node, json and yaml have everything",
        commands="status plan apply capacity validate layouts history autoscaler-tags",
    )
    autoscaler: str = options.nested(autoscaler.OPTIONS)
    colour: str = options.nested(command_settings.TerminalSettings, "color")
    cluster: str = options.nested(selection.KUBECTL_OPTIONS)


def parse(argv: Sequence[str]) -> dict[str, object]:
    """Parse a command line.

    Returns:
        The options by name with ``_`` for ``-``; ``command`` is None when there was none.

    Raises:
        UnknownCommandError: The command is unknown; see ``parser``.
        UsageError: The arguments are invalid.
        SystemExit: Help was requested and printed.
    """
    cluster, rest = _CLUSTER_PARSER.parse_known_args(argv)
    if not rest or rest[0].startswith("-"):
        return {"command": None, **vars(build().parse_args(rest))}
    command, *words = rest
    parser.check_command(command, COMMANDS)
    # Options may stand between nodes.
    parsed = vars(build(command).parse_intermixed_args(words))
    source = options.Source(parsed, {}, command=command)
    return {
        **parsed,
        **vars(cluster),
        "command": command,
        "output": source.field(PluginOptions, "output").value,
    }


def build(command: str = "") -> parser.Parser:
    """Return the parser of a command; of the program without one."""
    summary = COMMANDS.get(command, "see and request the MIG layouts of a cluster's nodes")

    def page() -> parser.Page:
        commands = "\n".join(
            help_pages.wrapped(f"  {name:<15} {text}", further=" " * 18)
            for name, text in COMMANDS.items()
        )
        epilog = f"commands:\n{commands}\n\n{help_pages.wrapped(_EPILOG)}"
        description = help_pages.wrapped(f"{summary[0].upper()}{summary[1:]}.")
        usage = f"{PROGRAM} [OPTION]... COMMAND"
        return parser.Page(*((None, description, "") if command else (usage, description, epilog)))

    return parser.Parser(
        PROGRAM,
        command,
        options_of(command),
        page,
        version=f"kubectl-mig {mig_manager.__version__}",
    )


def options_of(command: str) -> tuple[options.Option, ...]:
    """Return the options and operands of a command; of the program without one."""
    if not command:
        return (parser.HELP, parser.VERSION)
    return (parser.HELP, *(options.of(PluginOptions, command) if command != "version" else ()))


# -- completion ----------------------------------------------------------------------------------


def answer_completion(argv: Sequence[str], terminal: console.Console) -> int:
    """Complete the last word after ``mig``; return 0, because kubectl expects no error."""
    *before, word = argv or ("",)
    last = before[-1] if before else ""
    found = (each for each in options.of(PluginOptions) if last in each.flags and each.metavar)
    option = next(found, None)
    if option is not None and option.metavar == options.FILE:
        terminal.say(f":{_FILES}")
        return 0
    try:
        candidates = [each for each in _candidates(before, option, word) if each.startswith(word)]
    except errors.MigManagerError:
        candidates = []
    terminal.say("\n".join([*candidates, f":{_NO_FILES}"]))
    return 0


def _candidates(before: Sequence[str], option: options.Option | None, word: str) -> Iterable[str]:
    if option is not None:
        return _cluster(before).contexts() if option.name == "context" else option.words
    command = next((each for each in before if each in COMMANDS), None)
    if command is None:
        return [f"{each}\t{text}" for each, text in COMMANDS.items()]
    if word.startswith("-"):
        return [flag for each in options_of(command) for flag in each.flags]
    rest = before[list(before).index(command) + 1 :]
    named = [each for each in rest if not each.startswith("-")]
    if command == "validate" or (command in ("plan", "autoscaler-tags") and not named):
        # The author of a document must control neither the terminal nor the shell.
        return filter(parser.SAFE_WORD.fullmatch, _cluster(before).document(None).layouts)
    if command in ("version", "autoscaler-tags"):
        return ()
    return [node.name for node in _cluster(before).selected(None) if node.name not in named]


def _cluster(before: Sequence[str]) -> selection.Cluster:
    try:
        cluster = vars(_CLUSTER_PARSER.parse_known_args(before)[0])
    except errors.UsageError:
        cluster = {}  # the value of the last option is not typed yet
    timeout = cluster.get("request_timeout") or f"{_COMPLETION_TIMEOUT_S:g}s"
    return selection.Cluster(
        selection.kubectl_options(cluster | {"request_timeout": timeout}),
        note=lambda _: None,
        timeout_s=_COMPLETION_TIMEOUT_S,
    )


if __name__ == "__main__":
    main()
