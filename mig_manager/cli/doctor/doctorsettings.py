"""Settings of ``mig-manager doctor``: where to look, and how long."""

import argparse
import dataclasses
import pathlib
from collections.abc import Mapping

from mig_manager import errors
from mig_manager.agent import settings
from mig_manager.cli import command_settings, placeholders
from mig_manager.core.host import host_settings
from mig_manager.core.options import source


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


_PROC = pathlib.Path("/proc")
_LEAST_TIMEOUT_S = 0.1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DoctorSettings:
    """Where to look."""

    gpus: settings.GpuAccess
    proc: pathlib.Path | None
    """None: of simulated GPUs the kernel knows nothing."""
    dev: pathlib.Path
    config_file: pathlib.Path
    is_lenient: bool
    lock_file: pathlib.Path
    journal_file: pathlib.Path
    proven_file: pathlib.Path
    node_name: str
    """Empty: the node is not looked at."""
    kubeconfig: pathlib.Path | None
    """None: the credentials of the pod's ServiceAccount, if there is one."""
    has_cluster: bool
    """Whether the cluster is to be checked: that there is none is then a failure."""
    pod_resources_socket: pathlib.Path
    has_kubelet: bool
    """Whether kubelet is to be checked: that there is none is then a failure."""
    own_pod_uid: str | None
    timeout_s: float
    """How long each check may take."""
    output_format: command_settings.OutputFormat
    colour: settings.Colour
    is_debug: bool


def doctor_settings(options: Mapping[str, object], environ: Mapping[str, str]) -> DoctorSettings:
    """Read the settings.

    Raises:
        UsageError: A value cannot be used.
    """
    given = source.Source(options, environ)
    gpus = settings.gpu_access(options, environ)
    has_cluster = bool(options.get("node_name") or options.get("kubeconfig"))
    return DoctorSettings(
        gpus=gpus,
        proc=None if gpus.is_simulated else _PROC,
        dev=host_settings.host_roots(given).dev_here / "dev",
        config_file=settings.agent_config_file(given, environ),
        is_lenient=given.switch("lenient"),
        lock_file=settings.lock_file(given, gpus),
        journal_file=command_settings.journal_file(given, gpus),
        proven_file=settings.proven_file(given, gpus),
        node_name=given.text("node-name", variable="NODE_NAME"),
        kubeconfig=given.path("kubeconfig", variable="KUBECONFIG"),
        has_cluster=has_cluster,
        pod_resources_socket=given.path("pod-resources-socket")
        or host_settings.pod_resources_socket(given),
        has_kubelet=given.is_given("pod-resources-socket"),
        own_pod_uid=given.text("pod-uid", variable="POD_UID") or None,
        timeout_s=given.seconds("timeout-s", default=10.0, least=_LEAST_TIMEOUT_S),
        output_format=_output_format(given),
        colour=settings.colour(given, environ),
        is_debug=given.switch("debug", variable="MIG_PARTED_DEBUG"),
    )


def _output_format(given: source.Source) -> command_settings.OutputFormat:
    text = command_settings.OutputFormat.TEXT
    wanted = given.choice("output-format", command_settings.OutputFormat, default=text)
    if wanted is command_settings.OutputFormat.WIDE:
        raise errors.UsageError("doctor writes text, json or yaml, not wide")
    return wanted
