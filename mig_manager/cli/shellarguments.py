"""The options of each command at a shell."""

import argparse
from collections.abc import Callable, Mapping

from mig_manager.cli import agentarguments, commonarguments, placeholders
from mig_manager.cli.doctor import doctorsettings


def add_hooks(parser: argparse.ArgumentParser) -> None:
    """Add the owner's programs around a change."""
    parser.add_argument(
        "-k",
        "--hooks-file",
        metavar=placeholders.FILE,
        help="programs to run before, within and after the change [MIG_PARTED_HOOKS_FILE]",
    )
    parser.add_argument(
        "--hook-timeout-s",
        metavar=placeholders.SECONDS,
        help="how long each of them may take that does not say so itself (default: 300)",
    )


def define_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``checkpoint``."""
    _add_checkpoint_file(parser, "where to write what the GPUs have")
    commonarguments.add_gpu_access(parser)
    commonarguments.add_colour(parser)
    commonarguments.add_debug(parser)


def define_restore(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``restore``."""
    _add_checkpoint_file(parser, "what 'checkpoint' has written, ours or nvidia-mig-parted's")
    commonarguments.add_mode_only(parser)
    add_hooks(parser)
    commonarguments.add_change(parser)
    commonarguments.add_gpu_access(parser)
    commonarguments.add_output(parser, "text|json|yaml", "text")


def _add_checkpoint_file(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument(
        "-f",
        "--checkpoint-file",
        metavar=placeholders.FILE,
        help=f"{what} (required) [MIG_PARTED_CHECKPOINT_FILE]",
    )


def add_validate(parser: argparse.ArgumentParser) -> None:
    """Add them."""
    parser.add_argument(
        "--must-fit",
        action="store_true",
        default=None,
        help="fail, too, for a layout that fits none of these GPUs but others; those that are "
        "named always must",
    )
    parser.add_argument(
        "--portable",
        action="store_true",
        default=None,
        help="fail for what nvidia-mig-parted would not understand, and say where; the GPUs are "
        "looked at only if named with --gpu",
    )
    parser.add_argument(
        "--files",
        action="store_true",
        default=None,
        help="the arguments are documents, not layouts, as pre-commit passes them",
    )


def add_rollout(parser: argparse.ArgumentParser) -> None:
    """Add all that 'rollout' takes, but for what every command takes."""
    parser.add_argument(
        "layout",
        nargs="?",
        metavar=placeholders.LAYOUT,
        help="the layout, or 'undo': back to what each node was asked for before",
    )
    parser.add_argument(
        "-c",
        "--selected-config",
        metavar=placeholders.LAYOUT,
        help="the layout as an option, such as for one whose name is undo",
    )
    for flags, metavar, text in _OPTIONS:
        parser.add_argument(*flags, metavar=metavar, help=text)
    parser.add_argument(
        "--pause-on-failure",
        action="store_true",
        default=None,
        help="let no further node begin once one has failed",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        default=None,
        help="tell for each node whether the layout fits and what it would cost; change nothing",
    )


_OPTIONS = (
    (["-l", "--selector"], "SELECTOR", "labels of the nodes, as for kubectl (required)"),
    (
        ["--max-unavailable"],
        "NUMBER",
        (
            "how many nodes, or which percentage of those selected, may be unavailable at once, "
            "those included that are already (default: 1)"
        ),
    ),
    (
        ["--node-timeout-s"],
        placeholders.SECONDS,
        "how long a node may take, waiting for a slot not counted (default: 1800)",
    ),
    (
        ["--silence-timeout-s"],
        placeholders.SECONDS,
        "how long an agent may take to react; then the node is given up (default: 120)",
    ),
    (
        ["-f", "--config-file"],
        placeholders.FILE,
        "config document to plan with (default: that of the ConfigMap)",
    ),
    (
        ["--config-map"],
        "NAMESPACE/NAME",
        "where the agents' config is (default: mig-manager/mig-manager-config)",
    ),
    (
        ["--kubeconfig"],
        placeholders.FILE,
        "credentials for the cluster (default: ~/.kube/config) [KUBECONFIG]",
    ),
)


def _define_status(parser: argparse.ArgumentParser) -> None:
    commonarguments.add_gpu_access(parser)
    commonarguments.add_output(
        parser, "text|wide|json|yaml", "text; wide adds ids, UUIDs and who holds the GPUs"
    )


def _define_plan(parser: argparse.ArgumentParser) -> None:
    commonarguments.add_layout(parser)
    commonarguments.add_gpu_access(parser)
    commonarguments.add_output(parser, "text|wide|json|yaml", "text; wide lists every instance")
    parser.add_argument(
        "--pod-resources-socket",
        metavar=placeholders.FILE,
        help="ask this kubelet which pods hold what would be destroyed, such as "
        "/var/lib/kubelet/pod-resources/kubelet.sock (default: ask nobody)",
    )


def _define_apply(parser: argparse.ArgumentParser) -> None:
    commonarguments.add_layout(parser)
    commonarguments.add_mode_only(parser)
    parser.add_argument(
        "-s",
        "--skip-reset",
        action="store_true",
        default=None,
        help="leave a new MIG mode waiting where the driver does not bring it about without a "
        "reset of the GPU; with --mode-only that is no failure [MIG_PARTED_SKIP_RESET]",
    )
    add_hooks(parser)
    commonarguments.add_change(parser)
    commonarguments.add_gpu_access(parser)
    commonarguments.add_output(parser, "text|json|yaml", "text")


def _define_boot(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-c",
        "--selected-config",
        metavar=placeholders.LAYOUT,
        help="layout to apply where none is kept (default: none) [MIG_PARTED_SELECTED_CONFIG]",
    )
    commonarguments.add_config_file(parser, default="")
    parser.add_argument(
        "--driver-timeout-s",
        metavar=placeholders.SECONDS,
        help="how long to wait for the driver to be loaded (default: 120)",
    )
    commonarguments.add_change(parser, has_idle_wait=False)
    commonarguments.add_gpu_access(parser)
    commonarguments.add_output(parser, "text|json|yaml", "text")


def _define_assert(parser: argparse.ArgumentParser) -> None:
    commonarguments.add_layout(parser)
    commonarguments.add_mode_only(parser)
    parser.add_argument(
        "-a",
        "--valid-config",
        action="store_true",
        default=None,
        help="only check that the file is good and has the layout [MIG_PARTED_VALID_CONFIG]",
    )
    commonarguments.add_gpu_access(parser)
    commonarguments.add_output(parser, "text|json|yaml", "text")


def _define_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-l",
        "--config-label",
        metavar=placeholders.NAME,
        help="name of the exported layout (default: current) [MIG_PARTED_CONFIG_LABEL]",
    )
    parser.add_argument(
        "--placements",
        action="store_true",
        default=None,
        help="write where each instance lies, as in 1g.5gb@4, which nvidia-mig-parted cannot read",
    )
    commonarguments.add_gpu_access(parser)
    commonarguments.add_output(parser, "yaml|json", "yaml", variable="MIG_PARTED_OUTPUT_FORMAT")


def _define_generate_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-f",
        "--output-file",
        metavar=placeholders.FILE,
        help="where to write, replaced as a whole (default: standard output) "
        "[MIG_PARTED_OUTPUT_FILE]",
    )
    parser.add_argument(
        "--all-maximal",
        action="store_true",
        default=None,
        help="add every mixed layout to which no further instance can be added",
    )
    commonarguments.add_products(
        parser,
        "write for this product, such as 'NVIDIA H100 80GB HBM3' or '*A100*'; repeatable; "
        "needs no GPU (default: the GPUs of this machine)",
    )
    commonarguments.add_gpu_access(parser)
    commonarguments.add_output(parser, "yaml|json", "yaml", variable="MIG_PARTED_OUTPUT_FORMAT")


def _define_validate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "layout",
        nargs="*",
        metavar=placeholders.LAYOUT,
        help="layouts to check (default: all in the file)",
    )
    commonarguments.add_config_file(parser)
    commonarguments.add_products(
        parser,
        "check for this product, such as 'NVIDIA H100 80GB HBM3' or '*A100*'; repeatable; "
        "needs no GPU (default: the GPUs of this machine)",
    )
    add_validate(parser)
    commonarguments.add_gpu_access(parser)
    commonarguments.add_output(parser, "text|json|yaml", "text")


def _define_doctor(parser: argparse.ArgumentParser) -> None:
    doctorsettings.add_own(parser)
    commonarguments.add_lenient(parser)
    commonarguments.add_gpu_access(parser, has_timeout=False)
    commonarguments.add_output(parser, "text|json|yaml", "text")


def _define_agent(parser: argparse.ArgumentParser) -> None:
    agentarguments.add_own(parser)
    commonarguments.add_lenient(parser)
    commonarguments.add_gpu_access(parser, has_driver_root=False)
    agentarguments.add_host(parser)


def _define_rollout(parser: argparse.ArgumentParser) -> None:
    add_rollout(parser)
    commonarguments.add_lenient(parser)
    commonarguments.add_output(parser, "text|json|yaml", "text")


def _define_demo(parser: argparse.ArgumentParser) -> None:
    commonarguments.add_debug(parser)
    commonarguments.add_colour(parser)
    parser.add_argument(
        "--scenario",
        metavar=placeholders.one_of("NAME", "first-layout", "one-slice", "does-not-fit", "budget"),
        help="first-layout, one-slice, does-not-fit or budget (default: first-layout)",
    )
    parser.add_argument(
        "--simulate",
        metavar=placeholders.SPEC,
        help="node to simulate (default: 8xA100-SXM4-40GB)",
    )
    parser.add_argument(
        "--real-time",
        action="store_true",
        default=None,
        help="let the simulated driver take as long as a real one",
    )
    parser.add_argument(
        "--keep",
        action="store_true",
        default=None,
        help="keep the node up at the end, for kubectl, until Ctrl-C",
    )


def _define_completion(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "shell",
        nargs="?",
        metavar=placeholders.one_of("SHELL", "bash", "zsh", "fish"),
        help="bash, zsh or fish",
    )
    parser.add_argument(
        "--layouts",
        action="store_true",
        default=None,
        help="list the document's layouts instead, one a line: what the scripts ask for",
    )
    commonarguments.add_config_file(parser)
    commonarguments.add_debug(parser)


def _define_help(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "topic", nargs="?", metavar="COMMAND", help="the command (default: the program)"
    )


def _define_version(parser: argparse.ArgumentParser) -> None:
    commonarguments.add_debug(parser)


DEFINITIONS: Mapping[str, Callable[[argparse.ArgumentParser], None]] = {
    "status": _define_status,
    "plan": _define_plan,
    "apply": _define_apply,
    "boot": _define_boot,
    "assert": _define_assert,
    "export": _define_export,
    "generate-config": _define_generate_config,
    "checkpoint": define_checkpoint,
    "restore": define_restore,
    "validate": _define_validate,
    "doctor": _define_doctor,
    "agent": _define_agent,
    "rollout": _define_rollout,
    "demo": _define_demo,
    "completion": _define_completion,
    "help": _define_help,
    "version": _define_version,
}
