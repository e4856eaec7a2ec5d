"""The options that ``validate`` has to itself."""

import argparse


def add_own(parser: argparse.ArgumentParser) -> None:
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
