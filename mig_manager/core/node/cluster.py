"""The cluster's vocabulary: keys of the contract, pods, and the node as far as we care.

The keys are the contract with users and with NVIDIA's GPU operator; see docs/labels.md.
"""

import dataclasses
from collections.abc import Mapping

CONFIG_LABEL = "nvidia.com/mig.config"
STATE_LABEL = "nvidia.com/mig.config.state"
APPLIED_LABEL = "mig-manager.io/applied"
STATUS_ANNOTATION = "mig-manager.io/status"
GPUS_ANNOTATION = "mig-manager.io/gpus"
"""The node's GPUs as far as a planner elsewhere must know them; see ``inventory``."""
ROLLOUT_ANNOTATION = "mig-manager.io/rollout"
"""Written by ``mig-manager rollout``: which layout it asked for, and what was asked for before."""
JOURNAL_ANNOTATION = "mig-manager.io/journal"
UNREADABLE_JOURNAL_ANNOTATION = "mig-manager.io/journal-unreadable"
"""Where a journal that makes no sense is kept for whoever looks into it."""
CORDON_ANNOTATION = "mig-manager.io/cordoned-for"
"""On a node that an agent of an older version cordoned: the layout it was cordoned for."""
DEPLOY_LABEL_PREFIX = "nvidia.com/gpu.deploy."
PLUGIN_DEPLOY_LABEL = "nvidia.com/gpu.deploy.device-plugin"
PAUSED_VALUE = "paused-for-mig-change"
HOLD_TAINT = "mig-manager.io/reconfiguring"
"""NoSchedule: keeps new pods off the node during a change, also those of DaemonSets.

The scheduler and the DaemonSet controller honour it, and it evicts no pod. A cordon would be
somebody's: ``kubectl drain`` writes nothing on a node that is cordoned already, and so a manager
that uncordons afterwards undoes that drain.
"""
RESOURCE_PREFIX = "nvidia.com/"
PLUGIN_CONFIG_LABEL = "nvidia.com/device-plugin.config"
"""Names the entry of the device plugin's ConfigMap that this node's plugin reads."""
KEEP_ANNOTATION = "mig-manager.io/do-not-evict"
"""``"true"`` on a pod: its owner wants it to end by itself, whatever waits for it."""
GPU_CLAIM_DRIVER = "gpu.nvidia.com"
"""The DRA driver that hands out GPUs and MIG devices by ResourceClaim."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """A pod on our node."""

    namespace: str
    name: str
    uid: str
    phase: str
    labels: Mapping[str, str]
    node_selector: Mapping[str, str]
    owner_kind: str | None
    """Kind of the controlling owner, such as ``DaemonSet``; None for a bare pod."""
    is_mirror: bool
    """A static pod's shadow: the API cannot evict it."""
    is_ready: bool
    is_terminating: bool
    gpu_resources: Mapping[str, int]
    """``nvidia.com/*`` extended resources over all containers, init containers included."""
    container_names: tuple[str, ...]
    node_name: str = ""
    """Empty: not scheduled yet."""
    is_kept: bool = False
    """Whether ``KEEP_ANNOTATION`` forbids its eviction."""
    grace_s: int = 30
    """How long it may take to end once it is asked to."""
    has_claims: bool = False
    """Whether it has ResourceClaims for GPUs, or for what is not known."""
    claims: tuple[str, ...] = ()
    """Names of its ResourceClaims in its namespace, as far as they exist."""
    may_run_gpu_init: bool = False
    """Whether an ordinary init container with a GPU may be running: kubelet hides its devices."""
    mounts_plugin_sockets: bool = False
    """Whether it mounts the directory of the host where device plugins register with kubelet."""
    images: tuple[str, ...] = ()
    """As its author wrote them, in the order of ``container_names``."""
    mig_strategy: str = ""
    """What a container's variable ``MIG_STRATEGY`` or option ``--mig-strategy`` says."""
    feature_gates: Mapping[str, bool] = dataclasses.field(default_factory=dict)
    """What its containers' variable ``FEATURE_GATES`` switches on and off."""

    @property
    def key(self) -> str:
        """``namespace/name``."""
        return f"{self.namespace}/{self.name}"

    @property
    def is_finished(self) -> bool:
        """Whether its containers have ended for good and hold nothing."""
        return self.phase in ("Succeeded", "Failed")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """What the API says of our own node."""

    name: str
    uid: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    is_unschedulable: bool
    taint_keys: frozenset[str]
    allocatable: Mapping[str, int]
    """``nvidia.com/*`` extended resources only."""
    capacity: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """The same with unhealthy devices, which are not allocatable."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodePatch:
    """One write to our node; None as a value removes the key, absent keys stay as they are."""

    labels: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    annotations: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    unschedulable: bool | None = None
    """False undoes the cordon of an older version's agent; None leaves ``spec`` as it is."""
    hold_taint: bool | None = None
    """True adds, False removes ``HOLD_TAINT``; None leaves it as it is."""

    def is_in(self, view: NodeView) -> bool:
        """Tell whether the node has everything that the patch writes."""
        return (
            all(view.labels.get(key) == value for key, value in self.labels.items())
            and all(view.annotations.get(key) == value for key, value in self.annotations.items())
            and self.unschedulable in (None, view.is_unschedulable)
            and self.hold_taint in (None, HOLD_TAINT in view.taint_keys)
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PodDevices:
    """The devices that kubelet has given to one pod."""

    namespace: str
    name: str
    device_ids: frozenset[str]
    """Without the ``::n`` of shared devices."""
    claim_drivers: frozenset[str] = frozenset()
    """DRA drivers of its ResourceClaims; kubelet gives such a device a name, but no UUID."""

    @property
    def key(self) -> str:
        """``namespace/name``."""
        return f"{self.namespace}/{self.name}"
