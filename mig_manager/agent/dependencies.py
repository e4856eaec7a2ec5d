"""What the pipeline works with: the adapters behind its ports."""

import dataclasses
from collections.abc import Callable

from mig_manager.core import ports, timing


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Dependencies:
    """The ports of the pipeline."""

    gpus: ports.Gpus
    node: ports.Node
    workloads: ports.Workloads
    allocations: ports.DeviceAllocations
    configs: ports.ConfigSource
    clock: timing.Clock
    telemetry: ports.Telemetry = dataclasses.field(default_factory=ports.Telemetry)
    standby: ports.Standby = dataclasses.field(default_factory=ports.Standbys)
    """Prepares worker processes before the GPUs are observed or changed."""
    lock: ports.NodeLock | None = None
    """The node's lock; None: no other program changes MIG instances."""
    boot_id: str = ""
    """Differs after each reboot."""
    reset: ports.GpuReset | None = None
    """None: the agent may not reset GPUs."""
    reboot: ports.Reboot | None = None
    """None: the agent may not reboot the node."""
    services: ports.HostServices | None = None
    """None: the agent may not stop host services."""
    service_names: Callable[[], tuple[str, ...]] = tuple
    """The host services that use GPUs, in the order in which they are stopped."""
    device_files: ports.DeviceFiles | None = None
    """None: another program writes device nodes and CDI specs."""
    boot_layout: ports.VerifiedLayouts | None = None
    """Keeps the layout for the next boot."""
    hooks: ports.Hooks | None = None
    own_pod_uid: str | None = None
    """None: the agent does not run in a pod."""
    slots: ports.Slots | None = None
    """None: no limit on the nodes that change at the same time."""
    extra_clients: ports.ConfigSource | None = None
    """The file of GPU clients beside NVIDIA's."""
