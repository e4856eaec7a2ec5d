"""The agent's options and their help, beside those that it has in common with the commands."""

import argparse

from mig_manager.cli import placeholders
from mig_manager.core.options import peer


def add_own(parser: argparse.ArgumentParser) -> None:
    """Add what concerns the node and the change."""
    parser.add_argument(
        "--debug",
        action="store_true",
        default=argparse.SUPPRESS,
        help="log everything [MIG_PARTED_DEBUG]",
    )
    ours = parser.add_argument_group("options")
    for flags, metavar, text in _AGENT_OPTIONS:
        ours.add_argument(*flags, metavar=metavar, help=text)
    ours.add_argument(
        "--force-drain",
        action="store_true",
        default=None,
        help="delete pods that are still there at the drain's deadline, whatever their "
        "PodDisruptionBudgets say",
    )
    for flag, text in _AGENT_SWITCHES:
        ours.add_argument(flag, action="store_true", default=None, help=text)
    ours.add_argument(
        "--advertise-simulated",
        action="store_true",
        default=None,
        help="with --simulate: have the node offer the simulated GPUs to the scheduler, as a "
        "device plugin would",
    )


def add_host(parser: argparse.ArgumentParser) -> None:
    """Add what concerns the machine, and the options of NVIDIA's agent."""
    group = parser.add_argument_group("the machine; see also the options of NVIDIA's agent")
    # Texts, because a False would count as not given.
    group.add_argument(
        "--gpu-reset",
        action="store_const",
        const="true",
        help="reset the GPUs whose new MIG mode waits for that, where nvidia-smi is found "
        "(the default)",
    )
    group.add_argument(
        "--no-gpu-reset",
        dest="gpu_reset",
        action="store_const",
        const="false",
        help="never reset a GPU; fail with ResetRequired, or reboot if that is allowed",
    )
    for flag, metavar, text in _HOST_OPTIONS:
        group.add_argument(flag, metavar=metavar, help=text)
    peers = parser.add_argument_group(
        "options of NVIDIA's agent",
        "all are accepted, so that its manifests keep working",
    )
    for option in peer.OPTIONS:
        flags = [f"--{option.name}"] + ([f"-{option.short}"] if option.short else [])
        effect = f"{option.effect or 'without effect here'} [{option.variable}]"
        if option.is_switch:
            peers.add_argument(*flags, nargs="?", const="true", metavar="BOOL", help=effect)
        else:
            peers.add_argument(*flags, metavar="X", help=effect)


_HOST_OPTIONS = (
    (
        "--dbus-address",
        "ADDRESS",
        "the host's system bus (default: its usual socket) [DBUS_SYSTEM_BUS_ADDRESS]",
    ),
    (
        "--proven-file",
        placeholders.FILE,
        "keeps the last proven layout for a reboot (default: /var/lib/mig-manager/proven.json)",
    ),
    (
        "--reboot-timeout-s",
        placeholders.SECONDS,
        "how long the machine may take to go down after it agreed to reboot (default: 600)",
    ),
    (
        "--service-stop-timeout-s",
        placeholders.SECONDS,
        "how long a service may take to stop; its own TimeoutStopSec= if longer (default: 30)",
    ),
    (
        "--service-start-timeout-s",
        placeholders.SECONDS,
        "how long each service of the host may take to start (default: 120)",
    ),
)


_AGENT_OPTIONS = (
    (["-n", "--node-name"], "NAME", "the node to serve (required) [NODE_NAME]"),
    (
        ["-f", "--config-file"],
        placeholders.FILE,
        "config document (default: the one that comes with the program) [CONFIG_FILE]",
    ),
    (
        ["--kubeconfig"],
        placeholders.FILE,
        "credentials (default: the pod's ServiceAccount) [KUBECONFIG]",
    ),
    (
        ["--pod-resources-socket"],
        placeholders.FILE,
        "kubelet's socket (default: /var/lib/kubelet/pod-resources/kubelet.sock)",
    ),
    (
        ["--drain-policy"],
        placeholders.one_of("WHO", "affected", "node", "none"),
        "evict the affected pods, all GPU pods of the node, or none (default: affected)",
    ),
    (
        ["--drain-strategy"],
        placeholders.one_of("HOW", "rolling", "whole"),
        "budgets grant a part: rolling evicts it, whole waits for all of it (default: rolling)",
    ),
    (
        ["--max-concurrent-nodes"],
        "NUMBER",
        "how many nodes of the cluster may be under change at once (default: any number)",
    ),
    (
        ["--slots-namespace"],
        placeholders.NAME,
        "where the Leases for that are (default: mig-manager) [POD_NAMESPACE]",
    ),
    (
        ["--drain-timeout-s"],
        placeholders.SECONDS,
        "how long evicted pods may take to leave (default: 300)",
    ),
    (
        ["--plugin-timeout-s"],
        placeholders.SECONDS,
        "how long the device plugin may take to stop or start (default: 300)",
    ),
    (
        ["--monitor-timeout-s"],
        placeholders.SECONDS,
        "how long each monitor may take to be ready before the next one starts (default: 60)",
    ),
    (
        ["--extra-clients-file"],
        placeholders.FILE,
        "YAML table of your own GPU daemons that must be gone during a change",
    ),
    (
        ["--plugin-configs"],
        "MAP",
        "device-plugin config by layout, such as all-1g.5gb=sliced,*=whole (default: left alone)",
    ),
    (
        ["--hooks-file"],
        placeholders.FILE,
        "programs to run around each change, in the format of nvidia-mig-parted's (default: none)",
    ),
    (
        ["--hook-timeout-s"],
        placeholders.SECONDS,
        "how long each hook may take that does not say so itself (default: 300)",
    ),
    (
        ["--in-use-timeout-s"],
        placeholders.SECONDS,
        "how long what is in use is tried again (default: 30)",
    ),
    (
        ["--lock-file"],
        placeholders.FILE,
        "keeps two managers from changing one node's GPUs (default: /run/mig-manager/lock)",
    ),
    (
        ["--lock-timeout-s"],
        placeholders.SECONDS,
        "how long to wait while another manager is at work (default: 30)",
    ),
    (
        ["--drift-check-interval-s"],
        placeholders.SECONDS,
        "pause between two looks whether the layout is still in force; 0: none (default: 300)",
    ),
    (["--retry-initial-s"], placeholders.SECONDS, "pause before the first retry (default: 5)"),
    (["--retry-max-s"], placeholders.SECONDS, "longest pause between retries (default: 300)"),
    (
        ["--poll-interval-s"],
        placeholders.SECONDS,
        "longest pause between two looks while waiting (default: 1)",
    ),
    (["--health-port"], "PORT", "serve /metrics, /healthz and /readyz here (default: nowhere)"),
    (["--health-address"], "ADDRESS", "where to serve them (default: on all addresses)"),
    (
        ["--log-level"],
        placeholders.one_of("LEVEL", "debug", "info", "warning", "error"),
        "debug, info, warning or error (default: info)",
    ),
    (
        ["--log-format"],
        placeholders.one_of("FORMAT", "json", "console"),
        "json or console (default: json)",
    ),
)

_AGENT_SWITCHES = (
    (
        "--allow-foreign-managers",
        "go on although another program manages MIG on this node",
    ),
    ("--heal-drift", "bring the layout back when somebody else has changed it"),
    ("--watch-gpu-events", "have NVML tell at once when the MIG configuration changes"),
)
