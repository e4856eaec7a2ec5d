"""The commands of ``mig-manager``; ``command_line.Command`` says what a row is."""

from mig_manager.cli import go_spellings
from mig_manager.cli.toolkit import command_line
from mig_manager.core.settings import node_settings

_ENVIRONMENT = (
    "Most options have a variable, such as MIG_MANAGER_LOCK_FILE for --lock-file. The command "
    "line overrides the variable in brackets (NVIDIA's name), and that overrides ours."
)
_VALUES = (
    "A switch takes 1, t, true, 0, f or false. An empty variable counts as unset; an empty value "
    "of an option is an error. SECONDS may have a fraction: 0.5. Answers fit the terminal; "
    "COLUMNS sets another width."
)
_OTHER_STATUSES = (
    "A command ended by SIGINT or by a closed pipe exits with 130 or 141, as in any shell. Run as "
    "nvidia-mig-parted, through a link of that name, the program exits with 1 instead of 2, as "
    "NVIDIA's does."
)
_ROWS = (
    command_line.Command("status", "Show the GPUs and their MIG instances.", "status"),
    command_line.Command("plan", "Show what 'apply' would change, and change nothing.", "plan"),
    command_line.Command("apply", "Apply a layout.", "apply"),
    command_line.Command("boot", "Restore the last verified layout after a reboot.", "boot"),
    command_line.Command(
        "assert", "Check whether a layout is active, and report it as the exit status.", "check"
    ),
    command_line.Command("export", "Write the GPUs' state as a layout file.", "export"),
    command_line.Command(
        "generate-config",
        "Write a layout file with the layouts that GPUs support.",
        "generate_config",
    ),
    command_line.Command(
        "checkpoint", "Write the GPUs' instances to a file, for 'restore'.", "checkpoint"
    ),
    command_line.Command("restore", "Restore the instances of a checkpoint.", "restore"),
    command_line.Command(
        "validate", "Check that layouts fit GPUs, here or by product name.", "validate"
    ),
    command_line.Command("doctor", "Check this node and say what to fix.", "doctor"),
    command_line.Command(
        "acceptance", "Check GPUs before you trust mig-manager with them.", "acceptance"
    ),
    command_line.Command(
        "support-bundle",
        "Write an archive about this node, to attach to a report.",
        "support_bundle",
    ),
    command_line.Command("agent", "Serve this Kubernetes node.", "agent", notes_variables=False),
    command_line.Command(
        "rollout",
        "Apply a layout to many nodes, a few at a time, or undo it.",
        "rollout",
        operands="LAYOUT|undo",
    ),
    command_line.Command(
        "partitioner",
        "Repartition nodes for the MIG devices that pending pods request.",
        "partitioner",
    ),
    command_line.Command(
        "demo", "Show a reconfiguration from label to success on a simulated node.", "demo"
    ),
    command_line.Command(
        "schema",
        "Print the JSON Schema of an answer, of an annotation, or of layout files.",
        "schema",
        notes_variables=False,
    ),
    command_line.Command(
        "completion",
        "Write a script that completes command lines in a shell.",
        "completion",
        notes_variables=False,
    ),
    command_line.Command(
        "help",
        "Show the help of the program or of a command.\n\n"
        "$ mig-manager help apply\nAs 'mig-manager apply --help'.",
        notes_variables=False,
    ),
    command_line.Command(
        "version",
        "Print the version.\n\n$ mig-manager version\nAlso: mig-manager --version.",
        notes_variables=False,
    ),
)
PROGRAM = command_line.Program(
    name="mig-manager",
    title="mig-manager",
    rows=_ROWS,
    folder=f"{__package__}.commands",
    aliases={"h": "help"},  # as nvidia-mig-parted has it
    elsewhere={
        word: f"; run 'kubectl mig {word}'"
        for word in ("layouts", "capacity", "top", "history", "autoscaler-tags", "device-classes")
    },
    leading=(command_line.VERSION, node_settings.DEBUG),
    statuses={
        "0": "success",
        "1": "failed",
        "2": "wrong usage, or a file that cannot be read or used",
        "3": "unknown command",
    },
    other_statuses=_OTHER_STATUSES,
    environment=_ENVIRONMENT,
    values=_VALUES,
    respell=go_spellings.respell,
    about="""
    Partition NVIDIA GPUs with MIG: change only what differs, and explain every failure.

    A layout is a named partitioning of a node's GPUs, such as all-1g.5gb. Layout files,
    commands and options are compatible with NVIDIA's mig-parted.

    $ mig-manager demo
    Watch a whole change on a simulated node.

    $ mig-manager apply all-balanced --simulate 8xA100-SXM4-40GB
    Try it without a GPU; state persists between commands.

    $ mig-manager status --simulate 8xA100-SXM4-40GB
    Show the simulated GPUs.

    $ mig-manager help apply
    Everything about one command.
    """,
)
