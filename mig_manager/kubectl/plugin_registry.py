"""The commands of ``kubectl mig``; ``command_line.Command`` says what a row is."""

from mig_manager.cli.toolkit import command_line
from mig_manager.kubectl import plugin_settings

_ROWS = (
    command_line.Command("status", "Show the layouts and slices of nodes.", "status"),
    command_line.Command("top", "Watch nodes, GPUs and pods, and request layouts by keys.", "top"),
    command_line.Command(
        "plan", "Show what a layout would change on nodes, and change nothing.", "plan"
    ),
    command_line.Command("apply", "Request a layout for one node.", "apply"),
    command_line.Command(
        "capacity", "Show which instances are idle, and what could be created instead.", "capacity"
    ),
    command_line.Command(
        "validate", "Check layouts against the GPUs that the nodes have.", "validate"
    ),
    command_line.Command("layouts", "Show the layouts available on a node.", "node_layouts"),
    command_line.Command("history", "Show what happened to a node's layout lately.", "history"),
    command_line.Command(
        "autoscaler-tags", "Print the tags of a node group that scales from zero.", "autoscaler"
    ),
    command_line.Command(
        "device-classes",
        "Show the DeviceClasses that serve the MIG resources of nodes with the DRA driver.",
        "device_classes",
    ),
    command_line.Command("help", "Show the help of the plugin or of a command."),
    command_line.Command("version", "Print the version."),
)
PROGRAM = command_line.Program(
    name="kubectl mig",
    title="kubectl-mig",
    rows=_ROWS,
    folder=f"{__package__}.commands",
    elsewhere={
        "rollout": "; run 'mig-manager rollout', which mig-manager's Python package has",
        **dict.fromkeys(("-n", "--namespace"), "; nodes have no namespace"),
    },
    anywhere=plugin_settings.KUBECTL_OPTIONS,
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
