"""The commands of ``kubectl mig``: each is one row."""

from collections.abc import Callable

from mig_manager.cli.toolkit import console, parser, program
from mig_manager.kubectl import commands, settings


def _on_cluster(
    act: Callable[[commands.ClusterCommands], bool],
) -> Callable[[program.Parsed, console.Console], int]:
    """Return what runs a command that returns whether all is in order."""

    def run(parsed: program.Parsed, terminal: console.Console) -> int:
        chosen = settings.plugin_settings(parsed, terminal)
        is_good = act(commands.ClusterCommands(chosen, terminal))
        return console.DONE if is_good else console.FAILED

    return run


def _help(_parsed: program.Parsed, terminal: console.Console) -> int:
    terminal.say(parser.build(PROGRAM).format_help())
    return console.DONE


def _version(_parsed: program.Parsed, terminal: console.Console) -> int:
    terminal.say(PROGRAM.version)
    return console.DONE


_ROWS = (
    program.Command(
        name="status",
        options=lambda: settings.PluginSettings,
        run=_on_cluster(lambda here: here.status()),
        about="Show the layouts and slices of nodes.",
    ),
    program.Command(
        name="plan",
        options=lambda: settings.PluginSettings,
        run=_on_cluster(lambda here: here.plan()),
        about="Show what a layout would change on nodes, and change nothing.",
    ),
    program.Command(
        name="apply",
        options=lambda: settings.PluginSettings,
        run=_on_cluster(lambda here: here.apply()),
        about="Request a layout of your own of one node.",
    ),
    program.Command(
        name="capacity",
        options=lambda: settings.PluginSettings,
        run=_on_cluster(lambda here: here.capacity()),
        about="Show which instances are idle, and what could be created instead.",
    ),
    program.Command(
        name="validate",
        options=lambda: settings.PluginSettings,
        run=_on_cluster(lambda here: here.validate()),
        about="Check layouts against the GPUs that the nodes have.",
    ),
    program.Command(
        name="layouts",
        options=lambda: settings.PluginSettings,
        run=_on_cluster(lambda here: here.layouts()),
        about="Show the layouts available on a node.",
    ),
    program.Command(
        name="history",
        options=lambda: settings.PluginSettings,
        run=_on_cluster(lambda here: here.history()),
        about="Show what happened to a node's layout lately.",
    ),
    program.Command(
        name="autoscaler-tags",
        options=lambda: settings.PluginSettings,
        run=_on_cluster(lambda here: here.autoscaler_tags()),
        about="Print the tags of a node group that scales from zero.",
    ),
    program.Command(name="help", options=lambda: (), run=_help, about="Show this help."),
    program.Command(name="version", options=lambda: (), run=_version, about="Print the version."),
)
PROGRAM = program.Program(
    name="kubectl mig",
    title="kubectl-mig",
    rows=_ROWS,
    anywhere=settings.KUBECTL_OPTIONS,
    refuses_empty=False,
    statuses={
        "0": "OK",
        "1": "problem found, or failed",
        "2": "unusable input",
        "3": "unknown command",
    },
    about="See and request the MIG layouts of a cluster's nodes.",
)
