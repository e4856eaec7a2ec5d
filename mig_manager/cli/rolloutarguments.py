"""The options of ``rollout`` and their help."""

import argparse

from mig_manager.cli import placeholders


def add_own(parser: argparse.ArgumentParser) -> None:
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
