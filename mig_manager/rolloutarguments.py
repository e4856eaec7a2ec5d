"""The options of ``rollout`` and their help."""

import argparse


def add_own(parser: argparse.ArgumentParser) -> None:
    """Add all that 'rollout' takes, but for what every command takes."""
    parser.add_argument(
        "layout",
        nargs="?",
        metavar="LAYOUT|undo",
        help="the layout, or 'undo': back to what each node was asked for before",
    )
    parser.add_argument(
        "-c",
        "--selected-config",
        metavar="LAYOUT",
        help="the layout as an option, such as for one whose name is undo",
    )
    parser.add_argument(
        "-l", "--selector", metavar="SELECTOR", help="labels of the nodes, as for kubectl (needed)"
    )
    parser.add_argument(
        "--max-unavailable",
        metavar="N",
        help="how many nodes, or which percentage of those selected, may be unavailable at once, "
        "those included that are already (default: 1)",
    )
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
    parser.add_argument(
        "-f",
        "--config-file",
        metavar="FILE",
        help="config document to plan with (default: that of the ConfigMap)",
    )
    for flag, metavar, text in _OPTIONS:
        parser.add_argument(flag, metavar=metavar, help=text)


_OPTIONS = (
    (
        "--node-timeout-s",
        "S",
        "how long a node may take, waiting for a slot not counted (default: 1800)",
    ),
    (
        "--silence-timeout-s",
        "S",
        "how long an agent may take to react; then the node is given up (default: 120)",
    ),
    (
        "--config-map",
        "NAMESPACE/NAME",
        "where the agents' config is (default: mig-manager/mig-manager-config)",
    ),
    ("--kubeconfig", "FILE", "credentials (default: ~/.kube/config) [KUBECONFIG]"),
)
