"""The options of ``mig-manager doctor``."""

import argparse


def add_own(parser: argparse.ArgumentParser) -> None:
    """Add what says where to look."""
    for flags, metavar, text in _OPTIONS:
        parser.add_argument(*flags, metavar=metavar, help=text)


_OPTIONS = (
    (["-n", "--node-name"], "NAME", "this node in the cluster [NODE_NAME]"),
    (
        ["--kubeconfig"],
        "FILE",
        "credentials (default: the pod's ServiceAccount; no cluster without) [KUBECONFIG]",
    ),
    (["-f", "--config-file"], "FILE", "config document to check [CONFIG_FILE]"),
    (
        ["--pod-resources-socket"],
        "FILE",
        "kubelet's socket (default: /var/lib/kubelet/pod-resources/kubelet.sock)",
    ),
    (["--lock-file"], "FILE", "the node's lock (default: /run/mig-manager/lock)"),
    (
        ["--journal-file"],
        "FILE",
        "journal of the commands (default: /var/lib/mig-manager/journal.json)",
    ),
    (
        ["--proven-file"],
        "FILE",
        "what is kept for the next boot (default: /var/lib/mig-manager/proven.json)",
    ),
    (["--driver-root"], "FOLDER", "file system with the driver [DRIVER_ROOT]"),
    (["--timeout-s"], "S", "how long each check may take (default: 10)"),
)
