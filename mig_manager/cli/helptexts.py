"""What help and manual say beside the options: what each command is for, and examples.

Loaded when somebody asks for help. The manual (``docs/generate.py``) is made of the same texts.
"""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A command line and what it does."""

    line: str
    told: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """What there is to say about a command."""

    operands: str = ""
    """What stands behind the options in the usage."""
    paragraphs: tuple[str, ...]
    """The first says in a sentence what the command does."""
    examples: tuple[Example, ...]
    statuses: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Exit statuses that mean something of their own here."""


STATUSES: Mapping[str, str] = {
    "0": "done, or: yes",
    "1": "not applied, does not fit, or failed",
    "2": "wrong usage, or a file that cannot be read or used; nothing was changed",
    "3": "there is no such command",
}
"""Exit statuses of every command."""

OTHER_STATUSES = (
    "A command that SIGINT or a closed pipe ended has 130 or 141, as in any shell. Called "
    "nvidia-mig-parted, by a link of that name, the program has 1 instead of 2, as NVIDIA's."
)

ENVIRONMENT = (
    "Each option but --gpu can be set by a variable of the environment instead: by the one named "
    "in brackets where there is one, which is that of NVIDIA's tool, or by MIG_MANAGER_ and the "
    "option's name in capitals, such as MIG_MANAGER_LOCK_FILE for --lock-file. A switch takes 1, "
    "t, true, 0, f or false. The command line goes before the variables, the variable in "
    "brackets before the other, and both before the default. An empty variable counts as none; an "
    "empty value of an option is an error. SECONDS may have a fraction: 0.5."
)

PROGRAM = Text(
    operands="COMMAND",
    paragraphs=(
        (
            "Partition NVIDIA GPUs with MIG: change only what differs, and say why when it "
            "cannot be done."
        ),
        (
            "A layout is a named wish for the GPUs of a node, such as all-1g.5gb; config "
            "documents are those of NVIDIA's mig-parted, and so are the names of commands and "
            "options."
        ),
    ),
    examples=(
        Example(
            line="mig-manager apply all-balanced --simulate 8xA100-SXM4-40GB",
            told="Try it without a GPU: simulated ones remember what was done.",
        ),
        Example(line="mig-manager status --simulate 8xA100-SXM4-40GB", told="Look at them."),
        Example(line="mig-manager help apply", told="Everything about one command."),
    ),
)

COMMANDS: Mapping[str, Text] = {
    "status": Text(
        paragraphs=(
            "Show the GPUs and their MIG instances.",
            (
                "GPUs that are alike are drawn once. Nothing is changed, and no rights are "
                "needed but to ask the driver."
            ),
        ),
        examples=(
            Example(line="mig-manager status", told="A picture of each GPU's slices."),
            Example(
                line="mig-manager status -o wide",
                told="Also instance ids, UUIDs, PCI ids and who holds the GPUs.",
            ),
            Example(
                line="mig-manager status -o json | jq '.gpus[].profiles | keys'",
                told="The profiles that each GPU offers.",
            ),
        ),
    ),
    "plan": Text(
        operands="[LAYOUT]",
        paragraphs=(
            "Show what 'apply' would change, and change nothing.",
            (
                "The plan says which instances would go, come and stay, which GPUs would be "
                "reset, and which MIG devices must have no user for it."
            ),
        ),
        examples=(
            Example(line="mig-manager plan all-balanced", told="With the program's own layouts."),
            Example(
                line="mig-manager plan -f layouts.yaml night -o wide",
                told="With your own, and every step.",
            ),
        ),
    ),
    "apply": Text(
        operands="[LAYOUT]",
        paragraphs=(
            "Bring a layout into force.",
            (
                "Instances that the layout has too stay, with their UUIDs and their users. The "
                "change is planned in memory before anything is touched, proven when it is done, "
                "and taken back when it fails. A layout that is in force already is left alone."
            ),
            (
                "Instances that 'apply' must destroy must not be in use. If a process uses one, "
                "'apply' names the process, touches nothing and fails; --wait-for-idle waits for "
                "it first. On a node of a cluster the agent does this better: it drains first."
            ),
        ),
        examples=(
            Example(line="mig-manager apply all-1g.5gb", told="A layout of the program's own."),
            Example(
                line="mig-manager apply -f layouts.yaml -c night",
                told="One of your own, as nvidia-mig-parted spells it.",
            ),
            Example(
                line="generate-layout | mig-manager apply -f -",
                told="The only layout of a document on standard input.",
            ),
            Example(
                line="mig-manager apply all-1g.5gb -k hooks.yaml",
                told="With programs of your own around the change: docs/hooks.md.",
            ),
            Example(
                line="mig-manager apply all-balanced --mode-only --skip-reset",
                told="MIG mode alone, for a reset or a reboot to come where it takes one.",
            ),
        ),
        statuses={"1": "the layout is not in force: the message says why, and what became of it"},
    ),
    "boot": Text(
        paragraphs=(
            "Bring back the layout last proven in force, after a reboot.",
            (
                "MIG instances do not survive a reboot. This waits for the driver, then makes "
                "the same instances in the same places. The unit mig-manager-boot.service runs "
                "it."
            ),
        ),
        examples=(
            Example(line="mig-manager boot", told="What was last proven, if anything was."),
            Example(
                line="mig-manager boot -c all-balanced",
                told="The same, or all-balanced on a node that has kept nothing yet.",
            ),
        ),
    ),
    "assert": Text(
        operands="[LAYOUT]",
        paragraphs=(
            "Tell by the exit status whether a layout is in force.",
            "GPUs that the layout is not about do not count.",
        ),
        examples=(
            Example(
                line="mig-manager assert all-1g.5gb || echo not yet",
                told="Modes and instances of all GPUs.",
            ),
            Example(line="mig-manager assert all-enabled --mode-only", told="MIG mode alone."),
            Example(
                line="mig-manager assert -f layouts.yaml -c night --valid-config",
                told="Whether the file is good and has the layout; needs neither GPU nor driver.",
            ),
        ),
        statuses={"0": "in force", "1": "not in force, or it could not be found out"},
    ),
    "export": Text(
        paragraphs=(
            "Write the GPUs' state as a config document.",
            (
                "The document has one layout, which 'apply' and nvidia-mig-parted take. GPUs in "
                "the same state share a rule; models are told apart only where that is needed."
            ),
        ),
        examples=(
            Example(line="mig-manager export > now.yaml", told="As YAML, named 'current'."),
            Example(
                line="mig-manager export -l monday -o json",
                told="As JSON, under another name.",
            ),
        ),
    ),
    "checkpoint": Text(
        paragraphs=(
            "Write what the GPUs have to a file, for 'restore'.",
            (
                "The file has each GPU that can do MIG, by UUID, with its mode, its instances and "
                "their places. It is that of nvidia-mig-parted, which takes it too."
            ),
        ),
        examples=(
            Example(
                line="mig-manager checkpoint -f /var/lib/mig-manager/monday.json",
                told="Replaces the file as a whole.",
            ),
        ),
    ),
    "restore": Text(
        paragraphs=(
            "Bring the GPUs back to a checkpoint.",
            (
                "Each GPU of the checkpoint is found by its UUID and gets the same instances in "
                "the same places; what is right already stays, and GPUs that it does not tell of "
                "are left alone. It is done as 'apply' is: checked before anything is touched, "
                "proven, and taken back when it fails."
            ),
        ),
        examples=(
            Example(
                line="mig-manager restore -f /var/lib/mig-manager/monday.json",
                told="Ours or nvidia-mig-parted's.",
            ),
            Example(
                line="mig-manager restore -f monday.json --mode-only",
                told="MIG mode alone.",
            ),
        ),
        statuses={"2": "wrong usage, or a checkpoint that is not one of these GPUs"},
    ),
    "generate-config": Text(
        paragraphs=(
            "Write a config document with the layouts that GPUs can have.",
            (
                "These are all-disabled, all-enabled, all-balanced (small, medium and large "
                "instances without a slice left over), and for each profile all-PROFILE with as "
                "many as fit. A '+' in a profile is a '.' in the name, for Kubernetes' sake."
            ),
            (
                "--all-maximal adds mixed layouts: everything a GPU can hold so that not one "
                "more instance fits, but what the others have already. Their names tell what is "
                "in them, such as max-3g.20gb_4x1g.5gb, and are always the same for the same "
                "instances."
            ),
        ),
        examples=(
            Example(
                line="mig-manager generate-config -f /etc/mig-manager/config.yaml",
                told="For the GPUs of this machine.",
            ),
            Example(
                line="mig-manager generate-config --gpu H100-SXM5-80GB --gpu A30",
                told="For a cluster with these products; needs no GPU.",
            ),
            Example(
                line="mig-manager generate-config --gpu A100-SXM4-40GB --all-maximal",
                told="With every mixed layout.",
            ),
        ),
    ),
    "validate": Text(
        operands="[LAYOUT]...",
        paragraphs=("Check that layouts fit GPUs, here or by product name.",),
        examples=(
            Example(
                line="mig-manager validate -f layouts.yaml --gpu 'NVIDIA H100 80GB HBM3'",
                told="In a pipeline without a GPU.",
            ),
            Example(
                line="mig-manager validate -f layouts.yaml --gpu '*A100*' --gpu A30 -o json",
                told="For several products, for machines to read.",
            ),
            Example(
                line="mig-manager validate all-balanced", told="For the GPUs of this machine."
            ),
        ),
        statuses={"1": "a layout does not fit a GPU that it is about"},
    ),
    "doctor": Text(
        paragraphs=(
            "Check this node and say what to fix.",
            (
                "Driver, GPUs, leftovers, rights, files, services and, where credentials are "
                "found, the cluster. Nothing is changed."
            ),
        ),
        examples=(
            Example(line="mig-manager doctor", told="All checks, with a remedy for each fault."),
            Example(line="mig-manager doctor -o json", told="The same for machines."),
        ),
        statuses={"0": "nothing has to be fixed", "1": "something has to be fixed"},
    ),
    "agent": Text(
        paragraphs=(
            "Serve this Kubernetes node.",
            (
                "The agent watches the node's label nvidia.com/mig.config and brings the layout "
                "named there into force: drains who must leave, pauses GPU daemons, changes the "
                "GPUs, and says 'success' once the new devices are schedulable. It runs until it "
                "is told to stop, and then finishes or undoes first what it is at."
            ),
            "Options and variables of NVIDIA's nvidia-mig-manager are accepted.",
        ),
        examples=(
            Example(
                line="mig-manager agent --node-name node-1 --kubeconfig /etc/kubernetes/agent",
                told="On a host, with credentials of its own.",
            ),
            Example(
                line="mig-manager agent --drain-policy none --heal-drift",
                told="In a pod: evict nobody, and bring back what others changed.",
            ),
        ),
    ),
    "rollout": Text(
        operands="LAYOUT|undo",
        paragraphs=(
            "Bring many nodes to a layout, a few at a time, or back.",
            (
                "Runs with a person's credentials for the cluster. It labels nodes, waits for "
                "what their agents say, and never has more of them unavailable than it may. All "
                "state lives on the nodes: after an interruption the same command goes on."
            ),
        ),
        examples=(
            Example(
                line="mig-manager rollout all-balanced -l pool=a100 --dry-run",
                told="What it would cost each node: pods, instances, resets.",
            ),
            Example(
                line="mig-manager rollout all-balanced -l pool=a100 --max-unavailable 10% "
                "--pause-on-failure",
                told="A tenth of the nodes at a time, until one fails.",
            ),
            Example(
                line="mig-manager rollout undo -l pool=a100",
                told="Each node back to what it was asked for before, one at a time.",
            ),
        ),
        statuses={
            "0": "every node has the layout; of a dry run: can have it",
            "1": "not every node has it, or can have it",
        },
    ),
    "demo": Text(
        paragraphs=(
            "Show the whole story on a simulated node.",
            (
                "An embedded Kubernetes API, a node with its daemons, simulated GPUs and the "
                "real agent. Needs neither GPU nor cluster."
            ),
        ),
        examples=(
            Example(line="mig-manager demo", told="The first layout of a node in use."),
            Example(
                line="mig-manager demo --scenario budget --keep",
                told="A PodDisruptionBudget in the way; the node stays up for kubectl.",
            ),
        ),
    ),
    "completion": Text(
        operands="[SHELL]",
        paragraphs=(
            "Write a script that completes command lines in a shell.",
            (
                "Commands, options, their words and the products are in the script. Layouts are "
                "asked of the document that the command line or MIG_PARTED_CONFIG_FILE names."
            ),
        ),
        examples=(
            Example(
                line='eval "$(mig-manager completion bash)"',
                told="For this bash; put it into ~/.bashrc for every one.",
            ),
            Example(
                line="mig-manager completion bash"
                " > /usr/share/bash-completion/completions/mig-manager",
                told="For all users, loaded at the first use.",
            ),
            Example(
                line='mig-manager completion zsh > "${fpath[1]}/_mig-manager"',
                told="For zsh with compinit.",
            ),
            Example(
                line="mig-manager completion fish > ~/.config/fish/completions/mig-manager.fish",
                told="For fish.",
            ),
        ),
    ),
    "help": Text(
        operands="[COMMAND]",
        paragraphs=("Show the help of the program or of a command.",),
        examples=(Example(line="mig-manager help apply", told="As 'mig-manager apply --help'."),),
    ),
    "version": Text(
        paragraphs=("Print the version.",),
        examples=(Example(line="mig-manager version", told="Also: mig-manager --version."),),
    ),
}


def text(command: str) -> Text:
    """Return what there is to say about a command; about the program when it is empty."""
    return COMMANDS[command] if command else PROGRAM
