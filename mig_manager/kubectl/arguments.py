"""What ``kubectl mig`` accepts: its commands, their options and their help."""

import argparse
import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn

import mig_manager
from mig_manager import errors
from mig_manager.adapters import kubectl
from mig_manager.cli import console
from mig_manager.kubectl import selection

PROGRAM = "kubectl mig"
FORMATS = ("text", "wide", "json", "yaml")

COMMANDS: Mapping[str, str] = {
    "status": "show the layouts and slices of nodes",
    "plan": "show what a layout would change on nodes, and change nothing",
    "validate": "check layouts against the GPUs that the nodes have",
    "history": "tell what happened to a node's layout lately",
    "version": "print the version",
}
_EPILOG = """\
Exit status: 0 all is as it should be, 1 something is not or failed, 2 unusable input,
3 unknown command.
"""
KUBECTL_VALUES = (
    "kubeconfig",
    "context",
    "cluster",
    "user",
    "as",
    "as-group",
    "server",
    "token",
    "request-timeout",
)
"""Options of kubectl's own, each with a value, that are handed on to it."""
KUBECTL_SWITCHES = ("insecure-skip-tls-verify",)
_KUBECTL_HELP = {
    "kubeconfig": "kubeconfig file",
    "context": "context of the kubeconfig",
    "cluster": "cluster of the kubeconfig",
    "user": "user of the kubeconfig",
    "as": "user to impersonate",
    "as-group": "group to impersonate; repeatable",
    "server": "address of the API server",
    "token": "bearer token",
    "request-timeout": "how long one request may take (default: 30s)",
    "insecure-skip-tls-verify": "do not check the API server's certificate",
}


class UnknownCommandError(errors.UsageError):
    """A command that does not exist; its exit status differs from other wrong usage."""


class _Parser(argparse.ArgumentParser):
    """Raises instead of printing and exiting, so that all errors look alike."""

    def error(self, message: str) -> NoReturn:
        """Raise what argparse has to say.

        Raises:
            UsageError: Always.
        """
        command = self.prog.removeprefix(PROGRAM).strip()
        raise errors.UsageError(f"{command}: {message}" if command else message)


def parse(argv: Sequence[str]) -> dict[str, object]:
    """Parse a command line.

    Args:
        argv: The arguments without the program's name.

    Returns:
        The options by name with ``_`` for ``-``; ``command`` is None when there was none.

    Raises:
        UnknownCommandError: There is no such command.
        UsageError: The arguments make no sense.
        SystemExit: Help was asked for and printed.
    """
    how, rest = _reach(argv)
    parser, commands = build()
    if not rest or rest[0].startswith("-"):
        return vars(parser.parse_args(rest))
    name, *given = rest
    if name not in commands:
        close = difflib.get_close_matches(name, commands, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise UnknownCommandError(f"there is no command {name!r}{hint}")
    # Options may stand among nodes, which subparsers cannot do.
    return {"command": name, **vars(commands[name].parse_intermixed_args(given)), **how}


def reach(words: Sequence[str]) -> Mapping[str, object]:
    """Return the options among these words that say which cluster, and as whom."""
    try:
        return _reach(words)[0]
    except errors.UsageError:
        # The word that would be its value is not there yet.
        return {}


def options_of(parser: argparse.ArgumentParser, *, with_value: bool = False) -> tuple[str, ...]:
    """Return the options of a command.

    Args:
        parser: The command's.
        with_value: Whether only those count that a value must follow.
    """
    return tuple(
        name
        for action in parser._actions  # noqa: SLF001 - argparse has no public way to them
        if not with_value or action.nargs is None
        for name in action.option_strings
    )


def _reach(words: Sequence[str]) -> tuple[dict[str, object], list[str]]:
    # As with kubectl itself, these may stand anywhere.
    parser = _Parser(prog=PROGRAM, add_help=False, allow_abbrev=False)
    _add_kubectl(parser)
    how, rest = parser.parse_known_args(words)
    return vars(how), rest


def build() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """Return the parser of the whole command line, and those of the commands."""
    parser = _Parser(
        prog=PROGRAM,
        description="See the MIG layouts of a cluster's nodes; nothing is changed.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "-v", "--version", action="version", version=f"kubectl-mig {mig_manager.__version__}"
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    of_commands = {}
    for name, summary in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            allow_abbrev=False,
        )
        _DEFINITIONS[name](command)
        of_commands[name] = command
    return parser, of_commands


def kubectl_options(options: Mapping[str, object]) -> tuple[str, ...]:
    """Return the options that are kubectl's own, as it takes them."""
    found: list[str] = []
    for name in KUBECTL_VALUES:
        given = options.get(name.replace("-", "_"))
        values = given if isinstance(given, list) else [given]
        found += [f"--{name}={value}" for value in values if value is not None]
    found += [f"--{name}" for name in KUBECTL_SWITCHES if options.get(name.replace("-", "_"))]
    if options.get("request_timeout") is None:
        found.append("--request-timeout=30s")
    return tuple(found)


def _define_status(parser: argparse.ArgumentParser) -> None:
    _add_nodes(parser)
    _add_output(parser, "text; wide draws every node, json and yaml tell all")
    _add_kubectl(parser)


def _define_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("layout", metavar="LAYOUT", help="name of the layout")
    _add_nodes(parser)
    _add_layouts(parser)
    _add_output(parser, "text; wide draws every node, json and yaml tell all")
    _add_kubectl(parser)


def _define_validate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "layout", nargs="*", metavar="LAYOUT", help="layouts to check (default: all there are)"
    )
    _add_selector(parser)
    _add_layouts(parser)
    _add_output(parser, "text")
    _add_kubectl(parser)


def _define_history(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("node", metavar="NODE", help="the node")
    _add_output(parser, "text")
    _add_kubectl(parser)


def _define_version(_parser: argparse.ArgumentParser) -> None:
    pass


_DEFINITIONS = {
    "status": _define_status,
    "plan": _define_plan,
    "validate": _define_validate,
    "history": _define_history,
    "version": _define_version,
}


def _add_nodes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "node", nargs="*", metavar="NODE", help="nodes (default: all that have NVIDIA GPUs)"
    )
    _add_selector(parser)


def _add_selector(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-l", "--selector", metavar="SELECTOR", help="nodes with these labels, as kubectl's"
    )


def _add_layouts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-f", "--filename", metavar="FILE", help="config document, '-' for standard input"
    )
    parser.add_argument(
        "--config-map",
        metavar="NAMESPACE/NAME",
        help="ConfigMap with the config document (default: that of mig-manager, then that of "
        "the GPU operator)",
    )


def _add_output(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "-o",
        "--output",
        metavar="FORMAT",
        choices=FORMATS,
        default="text",
        help=f"{'|'.join(FORMATS)} (default: {default})",
    )
    parser.add_argument(
        "--color", metavar="WHEN", help="auto, always or never (default: auto) [NO_COLOR]"
    )


def _add_kubectl(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the cluster, as kubectl's own options")
    for name in KUBECTL_VALUES:
        short = ("-s",) if name == "server" else ()
        action = "append" if name == "as-group" else "store"
        group.add_argument(
            *short, f"--{name}", metavar="VALUE", action=action, help=_KUBECTL_HELP[name]
        )
    for name in KUBECTL_SWITCHES:
        group.add_argument(
            f"--{name}", action="store_true", default=None, help=_KUBECTL_HELP[name]
        )


_NO_FILES, _FILES = 4, 0
"""cobra's ShellCompDirectiveNoFileComp and ShellCompDirectiveDefault."""
_TIMEOUT_S = 5.0
"""For how long a person may look at a prompt that does nothing."""
_FILE_OPTIONS = ("-f", "--filename", "--kubeconfig")
_CHOICES: Mapping[str, Sequence[str]] = {
    "-o": FORMATS,
    "--output": FORMATS,
    "--color": ("auto", "always", "never"),
}


def main(argv: Sequence[str], terminal: console.Console) -> int:
    """Answer with candidates.

    Args:
        argv: The words after ``mig``; the last is what is being typed.
        terminal: Where the answer goes.

    Returns:
        0: a completion that fails says nothing.
    """
    *before, word = argv or ("",)
    last = before[-1] if before else ""
    if last in _FILE_OPTIONS:
        terminal.say(f":{_FILES}")
        return 0
    try:
        found = [each for each in _candidates(before, last, word) if each.startswith(word)]
    except errors.MigManagerError:
        found = []
    terminal.say("\n".join([*found, f":{_NO_FILES}"]))
    return 0


def _candidates(before: Sequence[str], last: str, word: str) -> Iterable[str]:
    if last in _CHOICES:
        return _CHOICES[last]
    _, commands = build()
    name = next((each for each in before if each in commands), None)
    if last == "--context":
        return _api(before).contexts()
    if name is None:
        return [f"{each}\t{text}" for each, text in COMMANDS.items()]
    if last in options_of(commands[name], with_value=True):
        return ()
    if word.startswith("-"):
        return options_of(commands[name])
    return _words(name, before)


def _words(name: str, before: Sequence[str]) -> Iterable[str]:
    """Return nodes or layouts, whichever come next."""
    rest = before[list(before).index(name) + 1 :]
    given = [each for each in rest if not each.startswith("-")]
    seen = selection.Cluster(_api(before))
    match name:
        case "validate":
            return _layouts(seen)
        case "plan" if not given:
            return _layouts(seen)
        case "status" | "plan" | "history":
            return [node.name for node in seen.selected(None) if node.name not in given]
        case _:
            return ()


def _layouts(seen: selection.Cluster) -> Iterable[str]:
    # Whoever wrote the document must not drive the terminal.
    return [name for name in seen.document(None).layouts if name.isprintable()]


def _api(before: Sequence[str]) -> kubectl.Kubectl:
    how = reach(before)
    patience = {"request_timeout": how.get("request_timeout") or f"{_TIMEOUT_S:g}s"}
    options = kubectl_options({**how, **patience})
    return kubectl.Kubectl(options, tell=lambda _said: None, timeout_s=_TIMEOUT_S)
