"""The pods of our node, from Pod objects, and the devices that kubelet allocated to them."""

import dataclasses
import math
from collections.abc import Iterable, Mapping


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ContainerWaiting:
    """Why kubelet cannot start a container."""

    reason: str  # such as ``ImagePullBackOff``
    message: str = ""

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}" if self.message else self.reason


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """A pod on our node."""

    namespace: str
    name: str
    uid: str
    phase: str
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    node_selector: Mapping[str, str] = dataclasses.field(default_factory=dict)
    owner_kind: str | None = None
    """Kind of the controlling owner, such as ``DaemonSet``; None for a bare pod."""
    owner_name: str = ""
    is_mirror: bool = False  # a static pod's shadow: the API cannot evict it
    is_ready: bool = False
    is_terminating: bool = False
    ends_by_s: float = math.inf
    """When a terminating pod's grace period ends, in Unix time by the API server's clock."""
    is_admitted: bool = True
    """Whether kubelet has reported that it admitted it. Before, it has no device."""
    gpu_resources: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """``nvidia.com/*`` extended resources over all containers, init containers included."""
    container_names: tuple[str, ...] = ()
    node_name: str = ""  # empty: not scheduled yet
    is_kept: bool = False  # whether ``well_known.KEEP_ANNOTATION`` forbids its eviction
    grace_s: int = 30  # its termination grace period
    has_claims: bool = False  # whether it has ResourceClaims for GPUs, or for unknown devices
    claims: tuple[str, ...] = ()  # names of its existing ResourceClaims, in its namespace
    claimed_ids: frozenset[str] | None = None
    """UUIDs of the GPUs and MIG devices of its ResourceClaims; None: unknown."""
    claimed_resources: frozenset[str] = frozenset()
    """The names in ``gpu_resources`` that a ResourceClaim provides instead of a device plugin."""
    completed_resources: frozenset[str] = frozenset()
    """The names in ``gpu_resources`` that only completed ordinary init containers request."""
    has_gpu_init: bool = False
    """Whether an ordinary init container may have a GPU that kubelet does not list: it has not
    completed, and requests more than the app containers."""
    has_claim_init: bool = False
    """Whether an ordinary init container that has not completed has a ResourceClaim alone, which
    kubelet does not list."""
    mounts_plugin_sockets: bool = False
    """Whether it mounts the directory of the host where device plugins register with kubelet."""
    mounts_driver_sockets: bool = False
    """Whether it mounts the directory of the host where DRA drivers register with kubelet."""
    images: tuple[str, ...] = ()  # as its author wrote them, in the order of ``container_names``
    mig_strategy: str = ""
    """The value of a container's option ``--mig-strategy`` or variable ``MIG_STRATEGY``."""
    feature_gates: Mapping[str, bool] = dataclasses.field(default_factory=dict)
    """The feature gates in its containers' ``FEATURE_GATES`` or ``--feature-gates``."""
    waiting: ContainerWaiting | None = None  # its first container that cannot start
    tolerated: frozenset[str] = frozenset()  # keys of the taints that it names and tolerates
    is_unbound: bool = False  # whether it has a device of our node, and is not bound to it yet
    is_unlisted: bool = False
    """Whether kubelet lists it and the API does not, so that it cannot be evicted."""

    @property
    def key(self) -> str:
        """``namespace/name``."""
        return f"{self.namespace}/{self.name}"

    @property
    def controller(self) -> str:
        """The controlling owner as ``kind namespace/name``; empty for a bare pod."""
        return f"{self.owner_kind} {self.namespace}/{self.owner_name}" if self.owner_name else ""

    @property
    def may_claim(self) -> bool:
        """Whether it has, or may have, a GPU by a ResourceClaim."""
        return self.has_claims or bool(self.claimed_ids)

    @property
    def is_finished(self) -> bool:
        """Whether its containers have ended for good and use no device."""
        return self.phase in ("Succeeded", "Failed")


Pods = tuple[Pod, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PodDevices:
    """The devices that kubelet allocated to one pod."""

    namespace: str
    name: str
    device_ids: frozenset[str]  # without the ``::n`` of shared devices
    claim_drivers: frozenset[str] = frozenset()
    """DRA drivers of its ResourceClaims; kubelet gives such a device a name, but no UUID."""
    gpu_resources: frozenset[str] = frozenset()  # the ``nvidia.com/*`` resources of ``device_ids``

    @property
    def key(self) -> str:
        """``namespace/name``."""
        return f"{self.namespace}/{self.name}"


def by_device(assigned: Iterable[PodDevices]) -> Mapping[str, tuple[str, ...]]:
    """Return the pods, as ``namespace/name``, by the id of the device they have."""
    pods: dict[str, tuple[str, ...]] = {}
    for pod in assigned:
        for device_id in pod.device_ids:
            pods[device_id] = (*pods.get(device_id, ()), pod.key)
    return pods
