"""What the command line accepts: the commands, their options and their help.

Everything stays text here; ``settings`` gives it types, because environment variables need the
same checks. Abbreviations are refused, so that a new option never changes an old script.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import mig_manager
from mig_manager import agentarguments, doctorarguments, errors

_DESCRIPTION = """\
Partition NVIDIA GPUs with MIG: change only what differs, and say why when it cannot be done.
"""
_EPILOG = """\
Try it without a GPU:  mig-manager apply all-balanced --simulate 8xA100-SXM4-40GB
                       mig-manager status --simulate 8xA100-SXM4-40GB

Exit status: 0 done, 1 not applied or failed, 2 unusable input, 3 unknown command.
"""

COMMANDS: Mapping[str, str] = {
    "status": "show the GPUs and their MIG instances",
    "plan": "show what 'apply' would change, and change nothing",
    "apply": "bring a layout into force",
    "boot": "bring back the layout last proven in force, after a reboot",
    "assert": "tell by the exit status whether a layout is in force",
    "export": "write the GPUs' state as a config document",
    "validate": "check that layouts fit GPUs, here or by product name",
    "doctor": "check this node and say what to fix",
    "agent": "serve this Kubernetes node",
    "demo": "show the whole story on a simulated node",
    "version": "print the version",
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
        command = self.prog.removeprefix("mig-manager").strip()
        raise errors.UsageError(f"{command}: {message}" if command else message)


def parse(argv: Sequence[str]) -> dict[str, object]:
    """Parse a command line.

    Args:
        argv: The arguments without the program's name.

    Returns:
        The options by name with ``_`` for ``-``; those not given are None. ``command`` is None
        when there was none.

    Raises:
        UnknownCommandError: There is no such command.
        UsageError: The arguments make no sense.
        SystemExit: Help or version was asked for and printed.
    """
    name = next((argument for argument in argv if not argument.startswith("-")), None)
    if name is not None and name not in COMMANDS:
        import difflib  # noqa: PLC0415 - for mistakes alone

        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise UnknownCommandError(f"there is no command {name!r}{hint}")
    return vars(build().parse_args(argv))


def build() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = _Parser(
        prog="mig-manager",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "-v", "--version", action="version", version=f"mig-manager {mig_manager.__version__}"
    )
    parser.add_argument("-d", "--debug", action="store_true", help="log everything")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name, summary in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            allow_abbrev=False,
        )
        _DEFINITIONS[name](command)
    return parser


def _define_status(parser: argparse.ArgumentParser) -> None:
    _add_gpu_access(parser)
    _add_output(parser, "text|wide|json|yaml", "text; wide adds ids, UUIDs and who holds the GPUs")


def _define_plan(parser: argparse.ArgumentParser) -> None:
    _add_layout(parser)
    _add_gpu_access(parser)
    _add_output(parser, "text|wide|json|yaml", "text; wide lists every instance")
    parser.add_argument(
        "--pod-resources-socket",
        metavar="PATH",
        help="ask this kubelet which pods hold what would be destroyed, such as "
        "/var/lib/kubelet/pod-resources/kubelet.sock (default: ask nobody)",
    )


def _define_apply(parser: argparse.ArgumentParser) -> None:
    _add_layout(parser)
    _add_mode_only(parser)
    parser.add_argument(
        "-s",
        "--skip-reset",
        action="store_true",
        default=None,
        help="refuse a change that has to reset a GPU [MIG_PARTED_SKIP_RESET]",
    )
    parser.add_argument(
        "-k", "--hooks-file", metavar="FILE", help="not supported yet [MIG_PARTED_HOOKS_FILE]"
    )
    _add_change(parser)
    _add_gpu_access(parser)
    _add_output(parser, "text|json|yaml", "text")


def _define_boot(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-c",
        "--selected-config",
        metavar="LAYOUT",
        help="layout to apply where none is kept (default: none) [MIG_PARTED_SELECTED_CONFIG]",
    )
    _add_config_file(parser)
    parser.add_argument(
        "--driver-timeout-s",
        metavar="S",
        help="how long to wait for the driver to be loaded (default: 120)",
    )
    _add_change(parser)
    _add_gpu_access(parser)
    _add_output(parser, "text|json|yaml", "text")


def _add_change(parser: argparse.ArgumentParser) -> None:
    """Add what every change of the GPUs at a shell needs."""
    parser.add_argument(
        "--in-use-timeout-s",
        metavar="S",
        help="how long what is in use is tried again (default: 30)",
    )
    parser.add_argument(
        "--lock-timeout-s",
        metavar="S",
        help="how long to wait while another manager is at work; 0: not at all (default: 30)",
    )
    parser.add_argument(
        "--lock-file",
        metavar="FILE",
        help="keeps two managers from changing one node's GPUs (default: /run/mig-manager/lock)",
    )
    parser.add_argument(
        "--journal-file",
        metavar="FILE",
        help="what the GPUs had is kept here during a change, for an 'apply' after one that was "
        "killed (default: /var/lib/mig-manager/journal.json)",
    )
    parser.add_argument(
        "--proven-file",
        metavar="FILE",
        help="the layout last proven in force is kept here, for 'boot' "
        "(default: /var/lib/mig-manager/proven.json)",
    )


def _define_assert(parser: argparse.ArgumentParser) -> None:
    _add_layout(parser)
    _add_mode_only(parser)
    parser.add_argument(
        "-a",
        "--valid-config",
        action="store_true",
        default=None,
        help="only check that the file is good and has the layout [MIG_PARTED_VALID_CONFIG]",
    )
    _add_gpu_access(parser)
    _add_output(parser, "text|json|yaml", "text")


def _define_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-l",
        "--config-label",
        metavar="NAME",
        help="name of the exported layout (default: current) [MIG_PARTED_CONFIG_LABEL]",
    )
    _add_gpu_access(parser)
    _add_output(parser, "yaml|json", "yaml [MIG_PARTED_OUTPUT_FORMAT]")


def _define_validate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "layout", nargs="*", metavar="LAYOUT", help="layouts to check (default: all in the file)"
    )
    _add_config_file(parser)
    parser.add_argument(
        "--gpu",
        action="append",
        metavar="NAME",
        help="check for this product, such as 'NVIDIA H100 80GB HBM3' or '*A100*'; repeatable; "
        "needs no GPU (default: the GPUs of this machine)",
    )
    _add_gpu_access(parser)
    _add_output(parser, "text|json|yaml", "text")


def _define_doctor(parser: argparse.ArgumentParser) -> None:
    doctorarguments.add_own(parser)
    _add_gpu_access(parser, has_timeout=False)
    _add_output(parser, "text|json|yaml", "text")


def _define_agent(parser: argparse.ArgumentParser) -> None:
    agentarguments.add_own(parser)
    _add_gpu_access(parser)
    agentarguments.add_host(parser)


def _define_demo(parser: argparse.ArgumentParser) -> None:
    _add_debug(parser)
    _add_colour(parser)
    parser.add_argument(
        "--scenario",
        metavar="NAME",
        help="first-layout, one-slice, does-not-fit or budget (default: first-layout)",
    )
    parser.add_argument(
        "--simulate", metavar="SPEC", help="node to simulate (default: 8xA100-SXM4-40GB)"
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


def _define_version(parser: argparse.ArgumentParser) -> None:
    _add_debug(parser)


_DEFINITIONS: Mapping[str, Callable[[argparse.ArgumentParser], None]] = {
    "status": _define_status,
    "plan": _define_plan,
    "apply": _define_apply,
    "boot": _define_boot,
    "assert": _define_assert,
    "export": _define_export,
    "validate": _define_validate,
    "doctor": _define_doctor,
    "agent": _define_agent,
    "demo": _define_demo,
    "version": _define_version,
}


def _add_debug(parser: argparse.ArgumentParser) -> None:
    # SUPPRESS: the default of a command would overwrite what stood before it.
    parser.add_argument(
        "-d",
        "--debug",
        action="store_true",
        default=argparse.SUPPRESS,
        help="log everything [MIG_PARTED_DEBUG]",
    )


def _add_colour(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--color", metavar="WHEN", help="auto, always or never (default: auto) [NO_COLOR]"
    )


def _add_layout(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "layout",
        nargs="?",
        metavar="LAYOUT",
        help="name of the layout; may be left out when the file has only one",
    )
    parser.add_argument(
        "-c",
        "--selected-config",
        metavar="LAYOUT",
        help="the same, as an option [MIG_PARTED_SELECTED_CONFIG]",
    )
    _add_config_file(parser)


def _add_config_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-f",
        "--config-file",
        metavar="FILE",
        help="config document, '-' for standard input (default: the one that comes with the "
        "program) [MIG_PARTED_CONFIG_FILE]",
    )


def _add_mode_only(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-m",
        "--mode-only",
        action="store_true",
        default=None,
        help="look at MIG mode and at nothing else [MIG_PARTED_MODE_CHANGE_ONLY]",
    )


def _add_output(parser: argparse.ArgumentParser, formats: str, default: str) -> None:
    _add_debug(parser)
    _add_colour(parser)
    parser.add_argument(
        "-o", "--output-format", metavar="FORMAT", help=f"{formats} (default: {default})"
    )


def _add_gpu_access(parser: argparse.ArgumentParser, *, has_timeout: bool = True) -> None:
    group = parser.add_argument_group("GPUs")
    group.add_argument(
        "--simulate",
        metavar="SPEC",
        help="simulate GPUs, such as 8xA100-SXM4-40GB or 4xA100-SXM4-80GB+2xA30",
    )
    group.add_argument(
        "--simulate-state",
        metavar="FILE",
        help="file that keeps the simulated GPUs (default: one for each SPEC in the user's "
        "state directory)",
    )
    group.add_argument(
        "--fresh",
        action="store_true",
        default=None,
        help="start the simulated GPUs afresh, MIG off",
    )
    group.add_argument(
        "--library-path", metavar="FILE", help="NVML's library (default: libnvidia-ml.so.1)"
    )
    if has_timeout:
        group.add_argument(
            "--gpu-timeout-s",
            metavar="S",
            help="how long one operation on the GPUs may take (default: 120)",
        )
