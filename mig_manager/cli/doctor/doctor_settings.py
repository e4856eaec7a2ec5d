"""Settings of ``doctor``, which ``support-bundle`` has too."""

import pathlib
from typing import Any

from mig_manager.agent import agent_settings
from mig_manager.cli import gpu_settings
from mig_manager.cli.toolkit import command_settings
from mig_manager.core.settings import host_settings, node_settings, options

_PROC = pathlib.Path("/proc")


class DoctorSettings(
    command_settings.AnswerSettings,
    node_settings.LocalSettings,
    takes=(
        "node-name",
        "kubeconfig",
        "config-file",
        "pod-resources-socket",
        "timeout-s",
        "pod-uid",
        "lenient",
        "lock-file",
        "journal-file",
        "verified-layout-file",
        *gpu_settings.GPUS,
        "color",
        "debug",
        "output-format",
    ),
):
    """Settings of ``doctor``."""

    node_name: str = options.text(
        "this node in the cluster", short="n", variable="NODE_NAME", default=""
    )
    """Empty: the node is not checked."""
    kubeconfig: pathlib.Path | None = options.path(
        "credentials",
        variable="KUBECONFIG",
        default_text="the pod's ServiceAccount; without credentials, the cluster is not checked",
    )
    config_file: pathlib.Path = options.path(
        "layout file to check", short="f", variable="CONFIG_FILE"
    )
    pod_resources_socket: pathlib.Path = options.path(
        "kubelet's PodResources socket",
        default_text="/var/lib/kubelet/pod-resources/kubelet.sock",
    )
    timeout_s: float = options.seconds("how long a check may take", default=10.0, minimum=0.1)
    own_pod_uid: str | None = options.text(
        "UID of this pod", name="pod-uid", variable="POD_UID", has_flag=False
    )
    gpus: node_settings.GpuAccess = options.declare_from(node_settings.GpuAccess)
    proc: pathlib.Path | None  # None: the kernel knows nothing of simulated GPUs
    dev: pathlib.Path = options.declare_from(
        host_settings.RootOptions, "driver-root", group=options.GPUS
    )
    has_cluster: bool  # whether a missing cluster is a failure
    has_kubelet: bool  # whether a missing kubelet is a failure

    @classmethod
    def values(cls, source: options.Source) -> dict[str, Any]:
        """Return the values of all fields."""
        values = super().values(source)
        gpus = agent_settings.gpu_access(source)
        socket = values["pod_resources_socket"]
        return {
            **values,
            **node_settings.node_files(values, gpus),
            "config_file": agent_settings.agent_config_file(source),
            "pod_resources_socket": socket or host_settings.pod_resources_socket(source),
            "gpus": gpus,
            "proc": None if gpus.is_simulated else _PROC,
            "dev": host_settings.host_roots(source).dev_here / "dev",
            "has_cluster": bool(source.parsed.get("node_name") or source.parsed.get("kubeconfig")),
            "has_kubelet": socket is not None,
        }
