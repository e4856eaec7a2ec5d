"""How a sandbox node behaves: names, strategies and how long things take."""

import dataclasses
import enum
import pathlib
from collections.abc import Mapping


class Strategy(enum.Enum):
    """``MIG_STRATEGY`` of NVIDIA's device plugin: how GPUs and MIG devices become resources."""

    NONE = "none"
    SINGLE = "single"
    MIXED = "mixed"


class DeployStyle(enum.Enum):
    """How the device plugin came to the cluster, which decides how it can be paused."""

    GPU_OPERATOR = "gpu-operator"
    """A DaemonSet that the label ``nvidia.com/gpu.deploy.device-plugin=true`` lets in."""
    PLAIN = "plain"
    """NVIDIA's static manifest: no label, a toleration for ``nvidia.com/gpu`` and no other."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """Options of one sandbox node; durations in seconds."""

    name: str = "sandbox-node"
    strategy: Strategy = Strategy.MIXED
    deploy_style: DeployStyle = DeployStyle.GPU_OPERATOR
    tick_s: float = 10.0
    """How often kubelet writes the node's status; 10 is kubelet's nodeStatusUpdateFrequency."""
    pod_start_s: float = 0.2
    """From the binding of a pod to its containers running."""
    pod_stop_s: float = 0.1
    """What a pod needs to stop unless its annotation says otherwise."""
    plugin_start_s: float = 0.3
    """From the start of the plugin's container to its look at the GPUs and its registration."""
    crash_backoff_s: float = 10.0
    """First pause before a crashed container starts again; doubles up to ``crash_backoff_max_s``.
    10 and 300 are kubelet's."""
    crash_backoff_max_s: float = 300.0
    forget_resource_s: float = 300.0
    """How long after the plugin went its resources keep their capacity; 300 is kubelet's."""
    pod_resources_socket: pathlib.Path | None = None
    """Where to serve PodResources; at most 107 bytes. None: do not serve."""
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Node labels beside those of kubelet and GPU feature discovery."""
    is_control_plane: bool = True
    """Whether it also plays scheduler and DaemonSet controller, as one node per cluster does."""
