"""The options of hooks, and of ``checkpoint`` and ``restore``."""

import argparse

from mig_manager.cli import commonarguments, placeholders


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
