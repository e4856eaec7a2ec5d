"""What the pipeline works with: the ports it reaches, and what the node's owner allows."""

import dataclasses
from collections.abc import Callable

from mig_manager.change import instrumentation
from mig_manager.core import ports, timing
from mig_manager.core.node import policy as policies


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Dependencies:
    """Everything the pipeline reaches."""

    gpus: ports.Gpus
    node: ports.Node
    workloads: ports.Workloads
    allocations: ports.DeviceAllocations
    configs: ports.ConfigSource
    clock: timing.Clock
    telemetry: instrumentation.Telemetry = dataclasses.field(
        default_factory=instrumentation.Telemetry
    )
    standby: ports.Standby = dataclasses.field(default_factory=ports.Standby)
    """Told when the GPUs are going to be asked, or changed."""
    exclusion: ports.NodeLock | None = None
    """Keeps other managers off while this one works; None: nothing does."""
    boot_id: str = ""
    """Another one after each reboot."""
    reset: ports.GpuReset | None = None
    """None: a mode that waits for a reset goes on waiting."""
    reboot: ports.Reboot | None = None
    """None: nobody reboots this machine for us."""
    services: ports.HostServices | None = None
    """None: the machine's own services are let be."""
    service_names: Callable[[], tuple[str, ...]] = tuple
    """The services that hold GPUs, in the order in which they are stopped."""
    device_files: ports.DeviceFiles | None = None
    """None: the driver and others look after them."""
    proven: ports.VerifiedLayouts | None = None
    """None: nothing is kept for the next boot."""
    hooks: ports.Hooks | None = None
    """The owner's programs around a change; None: there are none."""
    own_pod_uid: str | None = None
    """None: this is not a pod."""
    slots: ports.Slots | None = None
    """None: any number of nodes may be under change at once."""
    extra_clients: ports.ConfigSource | None = None
    """The table of the owner's own daemons; None: there are none."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the node's owner allows: how long to wait for others, and whom to send away."""

    drain_timeout_s: float = 300.0
    plugin_timeout_s: float = 300.0
    monitor_timeout_s: float = 60.0
    """For each monitor."""
    reboot_timeout_s: float = 600.0
    """How long the machine may take to go down once a reboot was asked for."""
    lock_timeout_s: float = 30.0
    """How long another manager on this node is waited for."""
    in_use_timeout_s: float = 30.0
    """How long to wait, after the drain, for processes that still use what a change destroys."""
    allows_foreign_managers: bool = False
    """Whether to work beside other managers that are known to change MIG instances."""
    is_lenient: bool = False
    """Whether what the peer passes over in silence in a config document passes here."""
    heals_drift: bool = False
    """Whether a layout that somebody changed is brought back, if nobody must leave for it."""
    policy: policies.Policy = dataclasses.field(default_factory=policies.Policy)
    pace: timing.Backoff = dataclasses.field(default_factory=timing.Backoff)
