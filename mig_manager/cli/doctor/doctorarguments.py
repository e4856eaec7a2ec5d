"""The options of ``mig-manager doctor``."""

import argparse

from mig_manager.cli import placeholders


def add_own(parser: argparse.ArgumentParser) -> None:
    """Add what says where to look."""
    for flags, metavar, text in _OPTIONS:
        parser.add_argument(*flags, metavar=metavar, help=text)


_OPTIONS = (
    (["-n", "--node-name"], "NAME", "this node in the cluster [NODE_NAME]"),
    (
        ["--kubeconfig"],
        placeholders.FILE,
        "credentials (default: the pod's ServiceAccount; no cluster without) [KUBECONFIG]",
    ),
    (["-f", "--config-file"], placeholders.FILE, "config document to check [CONFIG_FILE]"),
    (
        ["--pod-resources-socket"],
        placeholders.FILE,
        "kubelet's socket (default: /var/lib/kubelet/pod-resources/kubelet.sock)",
    ),
    (["--lock-file"], placeholders.FILE, "the node's lock (default: /run/mig-manager/lock)"),
    (
        ["--journal-file"],
        placeholders.FILE,
        "journal of the commands (default: /var/lib/mig-manager/journal.json)",
    ),
    (
        ["--proven-file"],
        placeholders.FILE,
        "what is kept for the next boot (default: /var/lib/mig-manager/proven.json)",
    ),
    (["--timeout-s"], placeholders.SECONDS, "how long each check may take (default: 10)"),
)
