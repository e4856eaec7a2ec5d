"""The commands of ``mig-manager``, a row for every command."""

from collections.abc import Sequence

from mig_manager.cli import go_spellings, loading
from mig_manager.cli.commands import schema, settings
from mig_manager.cli.toolkit import console, parser, program
from mig_manager.core import node_settings, options

_ENVIRONMENT = (
    "Every option except --gpu has a variable, such as MIG_MANAGER_LOCK_FILE for --lock-file. The "
    "command line overrides the variable in brackets (NVIDIA's name), and that overrides ours."
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


def _help(parsed: program.Parsed, terminal: console.Console) -> int:
    topic = str(parsed["topic"] or "")
    if topic:
        PROGRAM.command(topic)
    terminal.say(parser.build(PROGRAM, topic).format_help())
    return console.DONE


def _version(_parsed: program.Parsed, terminal: console.Console) -> int:
    terminal.say(PROGRAM.version)
    return console.DONE


def parse(argv: Sequence[str]) -> dict[str, object]:
    """Parse a command line, without the program's name; see ``parser.parse``."""
    return parser.parse(PROGRAM, argv)


def _agent(parsed: program.Parsed, terminal: console.Console) -> int:
    return loading.agent(parsed, terminal, PROGRAM.unknown_variables(terminal.environ))


def _support_bundle(parsed: program.Parsed, terminal: console.Console) -> int:
    return loading.support_bundle(parsed, terminal, parse)


def _agent_settings() -> type:
    from mig_manager.agent import settings  # noqa: PLC0415 - each command loads its own

    return settings.AgentSettings


def _rollout_settings() -> type:
    from mig_manager.cli.commands import rollout_settings  # noqa: PLC0415 - as above

    return rollout_settings.RolloutSettings


def _partitioner_settings() -> type:
    from mig_manager.partitioner import settings  # noqa: PLC0415 - as above

    return settings.PartitionerSettings


def _topic() -> Sequence[options.Option]:
    return (
        options.Option(
            name="topic",
            help="the command (default: the program)",
            metavar="COMMAND",
            words=COMMANDS,
            has_variable=False,
            is_operand=True,
        ),
    )


_ROWS = (
    program.Command(
        name="status",
        options=lambda: settings.CommandSettings,
        run=loading.on_gpus(lambda here: here.status()),
        about="""
        Show the GPUs and their MIG instances.

        Identical GPUs are drawn once. It changes nothing and needs only access to the driver.

        $ mig-manager status
        A picture of every GPU's slices.

        $ mig-manager status -o wide
        Also instance ids, UUIDs, PCI ids and the processes using the GPUs.

        $ mig-manager status -o json | jq '.gpus[].profiles | keys'
        The profiles of every GPU.
        """,
    ),
    program.Command(
        name="plan",
        options=lambda: settings.CommandSettings,
        run=loading.on_gpus(lambda here: here.plan()),
        about="""
        Show what 'apply' would change, and change nothing.

        The plan names the instances to destroy, to create and to keep, the GPUs to reset, and the
        MIG devices that must be idle.

        $ mig-manager plan all-balanced
        With a built-in layout.

        $ mig-manager plan -f layouts.yaml night -o wide
        With your own layout, and every step.
        """,
    ),
    program.Command(
        name="apply",
        options=lambda: settings.CommandSettings,
        run=loading.on_gpus(lambda here: here.apply()),
        about="""
        Apply a layout.

        Instances that are also in the layout keep their UUIDs and their processes. The change
        is planned before any GPU is touched, verified at the end, and rolled back if it fails.
        If the layout is already active, nothing is changed.

        Instances that 'apply' destroys must not be in use. If a process uses one, 'apply' names
        the process and fails before any change; --wait-for-idle waits for it first. On a cluster
        node use the agent instead: it drains first.

        $ mig-manager apply all-1g.5gb
        A built-in layout.

        $ mig-manager apply -f layouts.yaml -c night
        Your own layout, in nvidia-mig-parted's spelling.

        $ generate-layout | mig-manager apply -f -
        The only layout of a document on standard input.

        $ mig-manager apply all-1g.5gb -k hooks.yaml
        With your own programs around the change: docs/hooks.md.

        $ mig-manager apply all-balanced --mode-only --skip-reset
        Only MIG mode, to be completed by a later reset or reboot.

        exit 1: not applied; the message gives the reason and the present state of the GPUs
        """,
    ),
    program.Command(
        name="boot",
        options=lambda: settings.CommandSettings,
        run=loading.on_gpus(lambda here: here.boot()),
        about="""
        Restore the last verified layout after a reboot.

        MIG instances do not survive a reboot. This waits for the driver, then creates the same
        instances with the same placements. The unit mig-manager-boot.service runs it.

        $ mig-manager boot
        Restores the last verified layout, if there is one.

        $ mig-manager boot -c all-balanced
        The same, or all-balanced on a node without a verified layout.
        """,
    ),
    program.Command(
        name="assert",
        options=lambda: settings.CommandSettings,
        run=loading.on_gpus(lambda here: here.check()),
        about="""
        Check whether a layout is active, and report it as the exit status.

        GPUs that the layout does not select are ignored.

        $ mig-manager assert all-1g.5gb || echo not yet
        Modes and instances of all GPUs.

        $ mig-manager assert all-enabled --mode-only
        Only MIG mode.

        $ mig-manager assert -f layouts.yaml -c night --valid-config
        Only that the file is valid and has the layout; needs neither GPU nor driver.

        exit 0: active

        exit 1: not active, or the GPUs could not be read
        """,
    ),
    program.Command(
        name="export",
        options=lambda: settings.CommandSettings,
        run=loading.on_gpus(lambda here: here.export()),
        about="""
        Write the GPUs' state as a config document.

        The document has one layout, which 'apply' and nvidia-mig-parted accept. Identical GPUs
        share a rule; rules have a device filter only if they need one.

        $ mig-manager export > now.yaml
        As YAML, named 'current'.

        $ mig-manager export -l monday -o json
        As JSON, under another name.
        """,
    ),
    program.Command(
        name="generate-config",
        options=lambda: settings.CommandSettings,
        run=loading.on_gpus(lambda here: here.generate_config()),
        about="""
        Write a config document with the layouts that GPUs support.

        These are all-disabled, all-enabled, all-balanced (small, medium and large instances
        that use every slice), and all-PROFILE for every profile, with as many as fit. A '+' in a
        profile becomes a '.' in the name, as Kubernetes labels require.

        --all-maximal adds every maximal mixed layout: no further instance fits. Names list the
        instances, such as max-3g.20gb_4x1g.5gb, and are the same on every run.

        $ mig-manager generate-config -f /etc/mig-manager/config.yaml
        For the GPUs of this machine.

        $ mig-manager generate-config --gpu H100-SXM5-80GB --gpu A30
        For a cluster with these products; needs no GPU.

        $ mig-manager generate-config --gpu A100-SXM4-40GB --all-maximal
        With every maximal mixed layout.
        """,
    ),
    program.Command(
        name="checkpoint",
        options=lambda: settings.CommandSettings,
        run=loading.on_gpus(lambda here: here.checkpoint()),
        about="""
        Write the GPUs' instances to a file, for 'restore'.

        The file lists every MIG-capable GPU by UUID, with its mode, its instances and their
        placements, in nvidia-mig-parted's format.

        $ mig-manager checkpoint -f /var/lib/mig-manager/monday.json
        Replaces the file atomically.
        """,
    ),
    program.Command(
        name="restore",
        options=lambda: settings.CommandSettings,
        run=loading.on_gpus(lambda here: here.restore()),
        about="""
        Restore the instances of a checkpoint.

        GPUs are matched by UUID and get the same instances with the same placements. Instances
        that match stay, and GPUs missing from the checkpoint are not touched. As with 'apply',
        the change is checked first, verified, and rolled back if it fails.

        $ mig-manager restore -f /var/lib/mig-manager/monday.json
        From a checkpoint by mig-manager or nvidia-mig-parted.

        $ mig-manager restore -f monday.json --mode-only
        Only MIG mode.

        exit 2: wrong usage, or a checkpoint of other GPUs
        """,
    ),
    program.Command(
        name="validate",
        options=lambda: settings.CommandSettings,
        run=loading.on_gpus(lambda here: here.validate()),
        about="""
        Check that layouts fit GPUs, here or by product name.

        $ mig-manager validate -f layouts.yaml --gpu 'NVIDIA H100 80GB HBM3'
        In a pipeline without a GPU.

        $ mig-manager validate -f layouts.yaml --gpu '*A100*' --gpu A30 -o json
        For several products, as JSON.

        $ mig-manager validate all-balanced
        For the GPUs of this machine.

        exit 1: a layout does not fit a GPU that it selects
        """,
    ),
    program.Command(
        name="doctor",
        options=lambda: settings.DoctorSettings,
        run=loading.doctor,
        about="""
        Check this node and say what to fix.

        Checks the driver, GPUs, leftovers, rights, files and services and, with credentials, the
        cluster. It changes nothing.

        $ mig-manager doctor
        All checks, with a remedy for every problem.

        $ mig-manager doctor -o json
        The same as JSON.

        exit 0: OK

        exit 1: problem found
        """,
    ),
    program.Command(
        name="acceptance",
        options=lambda: settings.AcceptanceSettings,
        run=loading.acceptance,
        about="""
        Check GPUs before you trust mig-manager with them.

        It calls the NVML functions that mig-manager uses and changes nothing on a GPU. It compares
        the answers with the product in the catalogue and with the simulated driver, and names
        every difference and its consequence. The file has no UUID, serial number, PCI address or
        host name: attach it to a report.

        --change-gpu also plays a course of changes on one idle GPU: every profile at every
        placement, full layouts, an instance in use through CUDA, one of another program, a reset
        by nvidia-smi, and a killed worker. It asks first, and restores the GPU at the end. After
        a kill the next 'apply' or 'restore' does.

        $ mig-manager acceptance
        As root, on a machine with GPUs.

        $ mig-manager acceptance --simulate 8xA100-SXM4-40GB
        See what it does without a GPU.

        $ mig-manager acceptance --change-gpu GPU-a8af8a77-5ba8-f7ca-b4f2-d97e0c1c3d4f
        With the course on this GPU.

        exit 0: no difference

        exit 1: the GPUs differ, or could not be observed
        """,
    ),
    program.Command(
        name="support-bundle",
        options=lambda: settings.BundleSettings,
        run=_support_bundle,
        about="""
        Write an archive about this node, to attach to a report.

        It has versions, status, doctor's report, settings, layouts, journal and logs; with
        credentials also the node's labels, annotations and Events, and its agent's log. Every
        source has a deadline; manifest.json lists what is missing, and why. Everything that is
        named or looks like a credential is removed, but some may be missed: review the archive
        before you share it. Other programs' variables, labels and annotations are not read;
        names of nodes, pods and processes stay. It changes nothing.

        $ mig-manager support-bundle
        On the node, as root.

        $ mig-manager support-bundle -n node-1
        From elsewhere, with your kubeconfig: what the agent has published, and its log.

        $ mig-manager support-bundle -o - > bundle.tar.gz
        In the agent's pod, with 'kubectl exec': uses its rights and leaves no file there.

        exit 0: the archive is written, even if it is incomplete
        """,
    ),
    program.Command(
        name="agent",
        options=_agent_settings,
        run=_agent,
        notes_variables=False,  # it logs them
        about="""
        Serve this Kubernetes node.

        The agent watches the node label nvidia.com/mig.config and applies the layout named there:
        it drains the affected pods, pauses the GPU clients, changes the GPUs, and reports
        'success' once the new devices are schedulable. It runs until SIGTERM, and completes or
        undoes a change before it exits.

        Options and variables of NVIDIA's nvidia-mig-manager are accepted.

        $ mig-manager agent --node-name node-1 --kubeconfig /etc/kubernetes/agent
        On a host, with its own credentials.

        $ mig-manager agent --drain-policy none --heal-drift
        In a pod: evict no pod, and restore the layout after another program changed it.
        """,
    ),
    program.Command(
        name="rollout",
        options=_rollout_settings,
        run=loading.rollout,
        operands="LAYOUT|undo",
        about="""
        Apply a layout to many nodes, a few at a time, or undo it.

        Uses your credentials for the cluster. It labels nodes, waits for their agents, and
        respects the limit of unavailable nodes. All state is on the nodes: after an
        interruption the same command continues.

        $ mig-manager rollout all-balanced -l pool=a100 --dry-run
        The cost on every node: pods, instances, resets.

        $ mig-manager rollout all-balanced -l pool=a100 --max-unavailable 10% --pause-on-failure
        A tenth of the nodes at a time, until one fails.

        $ mig-manager rollout undo -l pool=a100
        Restore every node's previous request, one node at a time.

        exit 0: every node has the layout; with --dry-run: can have it

        exit 1: a node does not have it; with --dry-run: cannot have it
        """,
    ),
    program.Command(
        name="partitioner",
        options=_partitioner_settings,
        run=loading.partitioner,
        about="""
        Repartition nodes for the MIG devices that pending pods request.

        One Deployment for the cluster. It watches pods that wait for nvidia.com/mig-* resources,
        and requests layouts for nodes labelled mig-manager.io/partitioning=on-demand. It never
        destroys an instance in use: the node's agent, which needs --custom-layouts, decides. By
        default it only recommends, in Events and metrics.

        $ mig-manager partitioner --kubeconfig ~/.kube/config
        Report what it would do; change nothing.

        $ mig-manager partitioner --mode act --reserve 1g.5gb=2 --max-unavailable 25%
        Do it on a tenth of the opted-in nodes at a time, and keep two 1g.5gb on every node.

        $ mig-manager partitioner --simulate nodes.json pods.json
        Print what it would do, for files from 'kubectl get -o json'.

        $ mig-manager partitioner --simulate nodes.json pods.json --replay
        Replay the last week's pods with it, and without it on the present layouts.
        """,
    ),
    program.Command(
        name="demo",
        options=lambda: settings.DemoSettings,
        run=loading.demo,
        about="""
        Show a reconfiguration from label to success on a simulated node.

        Runs an embedded Kubernetes API, a node with its daemons, simulated GPUs and the real
        agent. Needs neither GPU nor cluster. Ends with the GPUs before and after, and three
        commands to try next. A signal or a closed terminal stops all its processes.

        $ mig-manager demo
        The first layout on a busy node.

        $ mig-manager demo --scenario budget --keep
        A PodDisruptionBudget blocks the drain; the node stays up for kubectl.
        """,
    ),
    program.Command(
        name="schema",
        options=lambda: (schema.KIND, node_settings.DEBUG),
        run=schema.run,
        notes_variables=False,
        about="""
        Print the JSON Schema of an answer, of an annotation, or of layout files.

        Every answer of '-o json' and '-o yaml', also by 'kubectl mig', has its schema's name in
        'kind'. Node annotations have names such as StatusAnnotation. Within an 'apiVersion' or
        'version' keys are only added.

        $ mig-manager schema
        List the names.

        $ mig-manager schema LayoutFile > layout-file.json
        For an editor: docs/config-file.md.

        $ mig-manager schema Plan > plan.json
        For a program that reads 'mig-manager plan -o json'.
        """,
    ),
    program.Command(
        name="completion",
        options=lambda: settings.CompletionSettings,
        run=loading.completion,
        notes_variables=False,
        about="""
        Write a script that completes command lines in a shell.

        The script completes commands, options, their values and GPU products. It also completes
        the layouts of the document named on the command line or in MIG_PARTED_CONFIG_FILE.

        $ eval "$(mig-manager completion bash)"
        For this shell; put it into ~/.bashrc for every bash.

        $ mig-manager completion bash > /etc/bash_completion.d/mig-manager
        For all users, loaded by every bash.

        $ mig-manager completion zsh > "${fpath[1]}/_mig-manager"
        For zsh with compinit.

        $ mig-manager completion fish > ~/.config/fish/completions/mig-manager.fish
        For fish.
        """,
    ),
    program.Command(
        name="help",
        options=_topic,
        run=_help,
        notes_variables=False,
        about="""
        Show the help of the program or of a command.

        $ mig-manager help apply
        As 'mig-manager apply --help'.
        """,
    ),
    program.Command(
        name="version",
        options=lambda: (node_settings.DEBUG,),
        run=_version,
        notes_variables=False,
        about="""
        Print the version.

        $ mig-manager version
        Also: mig-manager --version.
        """,
    ),
)
COMMANDS = tuple(row.name for row in _ROWS)
PROGRAM = program.Program(
    name="mig-manager",
    title="mig-manager",
    rows=_ROWS,
    aliases={"h": "help"},  # as nvidia-mig-parted has it
    leading=(program.VERSION, node_settings.DEBUG),
    statuses={
        "0": "success",
        "1": "not applied, does not fit, or failed",
        "2": "wrong usage, or a file that cannot be read or used; nothing was changed",
        "3": "unknown command",
    },
    other_statuses=_OTHER_STATUSES,
    environment=_ENVIRONMENT,
    values=_VALUES,
    respell=go_spellings.respelled,
    about="""
    Partition NVIDIA GPUs with MIG: change only what differs, and explain every failure.

    A layout is a named partitioning of a node's GPUs, such as all-1g.5gb. Config documents,
    commands and options are compatible with NVIDIA's mig-parted.

    $ mig-manager apply all-balanced --simulate 8xA100-SXM4-40GB
    Try it without a GPU; state persists between commands.

    $ mig-manager status --simulate 8xA100-SXM4-40GB
    Show the simulated GPUs.

    $ mig-manager help apply
    Everything about one command.
    """,
)
