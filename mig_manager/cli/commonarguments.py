"""Options that several commands have in common."""

import argparse

from mig_manager.cli import placeholders


def add_debug(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add ``--debug``, which may stand before the command or behind it."""
    # SUPPRESS: the default of a command would overwrite what stood before it.
    parser.add_argument(
        "-d",
        "--debug",
        action="store_true",
        default=argparse.SUPPRESS,
        help="log everything [MIG_PARTED_DEBUG]",
    )


def add_colour(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add ``--color``."""
    parser.add_argument(
        "--color",
        metavar=placeholders.one_of("WHEN", "auto", "always", "never"),
        help="auto, always or never; auto is never where NO_COLOR is set (default: auto)",
    )


def add_layout(parser: argparse.ArgumentParser) -> None:
    """Add the layout, by position and by option, and the document that has it."""
    parser.add_argument(
        "layout",
        nargs="?",
        metavar=placeholders.LAYOUT,
        help="name of the layout; may be left out when the file has only one",
    )
    parser.add_argument(
        "-c",
        "--selected-config",
        metavar=placeholders.LAYOUT,
        help="the same, as an option [MIG_PARTED_SELECTED_CONFIG]",
    )
    add_config_file(parser)


def add_config_file(
    parser: argparse.ArgumentParser, *, default: str = "the agent's, by CONFIG_FILE, or "
) -> None:
    """Add the document.

    Args:
        parser: The command's.
        default: What is taken before the one that comes with the program.
    """
    parser.add_argument(
        "-f",
        "--config-file",
        metavar=placeholders.FILE,
        help=f"config document, '-' for standard input (default: {default}the one that comes with "
        "the program) [MIG_PARTED_CONFIG_FILE]",
    )
    add_lenient(parser)


def add_lenient(parser: argparse.ArgumentParser) -> None:
    """Add ``--lenient``."""
    parser.add_argument(
        "--lenient",
        action="store_true",
        default=None,
        help="pass what nvidia-mig-parted passes over in silence, with a warning: keys given "
        "twice, filters and indices that match nothing [MIG_MANAGER_LENIENT]",
    )


def add_mode_only(parser: argparse.ArgumentParser) -> None:
    """Add ``--mode-only``."""
    parser.add_argument(
        "-m",
        "--mode-only",
        action="store_true",
        default=None,
        help="look at MIG mode and at nothing else [MIG_PARTED_MODE_CHANGE_ONLY]",
    )


def add_products(parser: argparse.ArgumentParser, help_text: str) -> None:
    """Add GPUs by name, which need not be here."""
    parser.add_argument("--gpu", action="append", metavar=placeholders.PRODUCT, help=help_text)


def add_output(
    parser: argparse.ArgumentParser, formats: str, default: str, *, variable: str = ""
) -> None:
    """Add how to answer, and what every command at a shell has.

    Args:
        parser: The command's.
        formats: The formats there are, with ``|`` between them.
        default: The default and what there is to say about it.
        variable: The peer's variable of the environment for it.
    """
    group = parser.add_argument_group("output")
    group.add_argument(
        "-o",
        "--output-format",
        metavar=placeholders.one_of(placeholders.FORMAT, *formats.split("|")),
        help=f"{formats} (default: {default})" + (f" [{variable}]" if variable else ""),
    )
    add_colour(group)
    add_debug(group)


def add_gpu_access(
    parser: argparse.ArgumentParser, *, has_timeout: bool = True, has_driver_root: bool = True
) -> None:
    """Add which GPUs, real or simulated."""
    group = parser.add_argument_group("GPUs")
    group.add_argument(
        "--simulate",
        metavar=placeholders.SPEC,
        help="simulate GPUs, such as 8xA100-SXM4-40GB or 4xA100-SXM4-80GB+2xA30",
    )
    group.add_argument(
        "--simulate-state",
        metavar=placeholders.FILE,
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
        "--library-path",
        metavar=placeholders.FILE,
        help="NVML's library (default: libnvidia-ml.so.1)",
    )
    if has_driver_root:
        group.add_argument(
            "--driver-root",
            metavar=placeholders.FOLDER,
            help="file system with the driver, where the loader does not find the library "
            "[DRIVER_ROOT]",
        )
    if has_timeout:
        group.add_argument(
            "--gpu-timeout-s",
            metavar=placeholders.SECONDS,
            help="how long one operation on the GPUs may take (default: 120)",
        )


def add_change(parser: argparse.ArgumentParser, *, has_idle_wait: bool = True) -> None:
    """Add what every change of the GPUs at a shell needs.

    Args:
        parser: Of the command.
        has_idle_wait: Whether people say how long processes are waited for.
    """
    group = parser.add_argument_group("the change")
    group.add_argument(
        "--in-use-timeout-s",
        metavar=placeholders.SECONDS,
        help="how long what is in use is tried again (default: 30)",
    )
    if has_idle_wait:
        group.add_argument(
            "--wait-for-idle",
            metavar=placeholders.SECONDS,
            help="how long to wait for processes that use what the change destroys, before "
            "anything is destroyed (default: 0)",
        )
    group.add_argument(
        "--lock-timeout-s",
        metavar=placeholders.SECONDS,
        help="how long to wait while another manager is at work; 0: not at all (default: 30)",
    )
    group.add_argument(
        "--lock-file",
        metavar=placeholders.FILE,
        help="keeps two managers from changing one node's GPUs (default: /run/mig-manager/lock)",
    )
    group.add_argument(
        "--journal-file",
        metavar=placeholders.FILE,
        help="what the GPUs had is kept here during a change, for an 'apply' after one that was "
        "killed (default: /var/lib/mig-manager/journal.json)",
    )
    group.add_argument(
        "--proven-file",
        metavar=placeholders.FILE,
        help="the layout last proven in force is kept here, for 'boot' "
        "(default: /var/lib/mig-manager/proven.json)",
    )
