"""The command line of ``kubectl mig``: its commands, their options, and completion for kubectl."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import mig_manager
from mig_manager import errors
from mig_manager.agent import settings
from mig_manager.cli import command_settings, console, parser
from mig_manager.core import options
from mig_manager.kubectl import selection

PROGRAM = "kubectl mig"

COMMANDS: Mapping[str, str] = {
    "status": "show the layouts and slices of nodes",
    "plan": "show what a layout would change on nodes, and change nothing",
    "validate": "check layouts against the GPUs that the nodes have",
    "history": "show what happened to a node's layout lately",
    "version": "print the version",
}
_EPILOG = """\
Exit status: 0 all is as it should be, 1 something is not or failed, 2 unusable input,
3 unknown command.
"""
_ANSWERING = "status plan validate history"


_CLUSTER = tuple(
    options.Option(
        name=name,
        metavar=metavar,
        help=meaning,
        short="s" if name == "server" else "",
        default_text="30s" if name == "request-timeout" else "",
        is_repeatable=name == "as-group",
        group="the cluster, as kubectl's own options",
        has_variable=False,
    )
    for name, metavar, meaning in (
        ("kubeconfig", options.FILE, "kubeconfig file"),
        ("context", "CONTEXT", "context of the kubeconfig"),
        ("cluster", options.NAME, "cluster of the kubeconfig"),
        ("user", options.NAME, "user of the kubeconfig"),
        ("as", options.NAME, "user to impersonate"),
        ("as-group", options.NAME, "group to impersonate; repeatable"),
        ("server", "ADDRESS", "address of the API server"),
        ("token", "TOKEN", "bearer token"),
        ("request-timeout", "TIME", "how long one request may take"),
        ("insecure-skip-tls-verify", "", "do not check the API server's certificate"),
    )
)
"""Options of kubectl's own, which are passed to it and may stand anywhere, as with kubectl."""
_CLUSTER_PARSER = parser.Parser(PROGRAM, "", _CLUSTER, lambda: parser.Page(None, "", ""))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PluginOptions:
    """The options of all commands, as text."""

    layout: str = options.declared(
        options.Option(
            help="name of the layout",
            metavar=options.LAYOUT,
            commands="plan",
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
    )
    node: str = options.declared(
        options.Option(
            help="nodes (default: all with NVIDIA GPUs)",
            metavar="NODE",
            commands="status plan",
            is_operand=True,
            is_repeatable=True,
        ),
        options.Option(
            help="the node",
            metavar="NODE",
            commands="history",
            is_operand=True,
            is_required=True,
        ),
    )
    selector: str = options.text(
        "nodes with these labels, as kubectl's",
        short="l",
        metavar="SELECTOR",
        commands="status plan validate",
    )
    filename: str = options.text(
        "config document, '-' for standard input",
        short="f",
        metavar=options.FILE,
        commands="plan validate",
    )
    config_map: str = options.text(
        "ConfigMap with the config document",
        metavar="NAMESPACE/NAME",
        default_text="that of mig-manager, then that of the GPU operator",
        commands="plan validate",
    )
    output: command_settings.OutputFormat = options.choice(
        "text|wide|json|yaml",
        short="o",
        metavar="FORMAT",
        default=command_settings.OutputFormat.TEXT,
        default_text="text; wide draws every node, json and yaml have everything",
        commands=_ANSWERING,
    )
    colour: str = options.nested(command_settings.TerminalSettings, "color")
    cluster: str = options.nested(_CLUSTER)


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
    summary = COMMANDS.get(command, "see the MIG layouts of a cluster's nodes; nothing is changed")
    commands = "\n".join(f"  {name:<10} {text}" for name, text in COMMANDS.items())
    page = parser.Page(
        usage=None if command else f"{PROGRAM} [OPTION]... COMMAND",
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog="" if command else f"commands:\n{commands}\n\n{_EPILOG}",
    )
    return parser.Parser(
        PROGRAM,
        command,
        options_of(command),
        lambda: page,
        version=f"kubectl-mig {mig_manager.__version__}",
    )


def options_of(command: str) -> tuple[options.Option, ...]:
    """Return the options and operands of a command; of the program without one."""
    if not command:
        return (parser.HELP, parser.VERSION)
    return (parser.HELP, *(options.of(PluginOptions, command) if command != "version" else ()))


def colour(parsed: Mapping[str, object], environ: Mapping[str, str]) -> settings.Colour:
    """Return when to use colours."""
    return command_settings.colour(options.Source(parsed, environ))


def kubectl_options(parsed: Mapping[str, object]) -> tuple[str, ...]:
    """Return the options that are kubectl's own, as it takes them."""
    found: list[str] = []
    for option in _CLUSTER:
        value = parsed.get(option.key)
        if not option.metavar:
            found += [f"--{option.name}"] if value else []
            continue
        values = value if isinstance(value, list) else [value]
        found += [f"--{option.name}={each}" for each in values if each is not None]
    if parsed.get("request_timeout") is None:
        found.append("--request-timeout=30s")
    return tuple(found)


# -- completion ----------------------------------------------------------------------------------

_NO_FILES, _FILES = 4, 0
"""cobra's ShellCompDirectiveNoFileComp and ShellCompDirectiveDefault."""
_TIMEOUT_S = 5.0
"""How long a prompt may hang while a person waits for completion."""


def complete(argv: Sequence[str], terminal: console.Console) -> int:
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
    if command == "validate" or (command == "plan" and not named):
        # The author of a document must not control the terminal.
        return [name for name in _cluster(before).document(None).layouts if name.isprintable()]
    if command == "version":
        return ()
    return [node.name for node in _cluster(before).selected(None) if node.name not in named]


def _cluster(before: Sequence[str]) -> selection.Cluster:
    try:
        cluster = vars(_CLUSTER_PARSER.parse_known_args(before)[0])
    except errors.UsageError:
        cluster = {}  # the value of the last option is not typed yet
    timeout = cluster.get("request_timeout") or f"{_TIMEOUT_S:g}s"
    return selection.Cluster(
        kubectl_options(cluster | {"request_timeout": timeout}),
        note=lambda _: None,
        timeout_s=_TIMEOUT_S,
    )
