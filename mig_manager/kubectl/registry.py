"""The commands of ``kubectl mig``, a row for every command."""

from collections.abc import Callable

from mig_manager.cli.toolkit import console, parser, program
from mig_manager.kubectl import commands, settings


def _row(
    name: str, act: Callable[[commands.ClusterCommands], bool], about: str
) -> program.Command:
    """Return the row of a command that returns False for a problem."""

    def run(parsed: program.Parsed, terminal: console.Console) -> int:
        chosen = settings.plugin_settings(parsed, terminal)
        is_good = act(commands.ClusterCommands(chosen, terminal))
        return console.DONE if is_good else console.FAILED

    return program.Command(
        name=name, options=lambda: settings.PluginSettings, run=run, about=about
    )


def _help(_parsed: program.Parsed, terminal: console.Console) -> int:
    terminal.say(parser.build(PROGRAM).format_help())
    return console.DONE


def _version(_parsed: program.Parsed, terminal: console.Console) -> int:
    terminal.say(PROGRAM.version)
    return console.DONE


_ROWS = (
    _row("status", lambda here: here.status(), "Show the layouts and slices of nodes."),
    _row(
        "top",
        lambda here: here.top(),
        """
        Watch nodes, GPUs and pods, and request layouts by keys.

        Without a terminal it prints a line for every change until it is interrupted; 'kubectl mig
        status' prints all nodes once.
        """,
    ),
    _row(
        "plan",
        lambda here: here.plan(),
        "Show what a layout would change on nodes, and change nothing.",
    ),
    _row("apply", lambda here: here.apply(), "Request your own layout for one node."),
    _row(
        "capacity",
        lambda here: here.capacity(),
        "Show which instances are idle, and what could be created instead.",
    ),
    _row(
        "validate",
        lambda here: here.validate(),
        "Check layouts against the GPUs that the nodes have.",
    ),
    _row("layouts", lambda here: here.layouts(), "Show the layouts available on a node."),
    _row("history", lambda here: here.history(), "Show what happened to a node's layout lately."),
    _row(
        "autoscaler-tags",
        lambda here: here.autoscaler_tags(),
        "Print the tags of a node group that scales from zero.",
    ),
    _row(
        "device-classes",
        lambda here: here.device_classes(),
        """
        Show the DeviceClasses that serve the MIG resources of nodes with the DRA driver.

        With '-o yaml' it prints them for 'kubectl apply -f -'.
        """,
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
    about="""
    See and request the MIG layouts of a cluster's nodes.

    $ kubectl mig status
    Show the layout, the state and the slices of every node.

    $ kubectl mig plan all-1g.5gb node-7
    Show what the layout would change on a node, and which pods it would evict.

    $ kubectl label node node-7 nvidia.com/mig.config=all-1g.5gb --overwrite
    Request the layout.
    """,
)
