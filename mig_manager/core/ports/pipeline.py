"""What a run of the agent's pipeline works with."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Protocol

from mig_manager.core import gpu_processes, timing
from mig_manager.core.node.daemons import client_table
from mig_manager.core.ports.cluster import Node, PodWatch, ResourceSlices, Slots, Workloads
from mig_manager.core.ports.gpus import GpuReset, Gpus
from mig_manager.core.ports.host import (
    Hooks,
    HostServices,
    NodeLock,
    Reboot,
    SavedText,
    TextSource,
)
from mig_manager.core.ports.kubelet import DeviceAllocations
from mig_manager.core.ports.telemetry import Telemetry


class Cancellation(Protocol):
    """Interrupts a run by ``Superseded``; only phases that can be undone check it."""

    def check(self) -> None:
        """Raise ``Superseded`` if the run is superseded."""

    def wait(self, seconds: float) -> None:
        """Sleep, and wake at once if the run is superseded."""

    def pause(self, seconds: float) -> None:
        """Sleep between two polls of the cluster; may wake early after a change."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Dependencies:
    """The adapters that the agent's pipeline works with."""

    gpus: Gpus
    node: Node
    workloads: Workloads
    allocations: DeviceAllocations
    slices: ResourceSlices
    pod_watch: PodWatch
    processes: Callable[[], gpu_processes.Processes]
    """Returns the GPU processes by UUID; HardwareError if the driver does not list them."""
    layout_source: TextSource
    clock: timing.Clock
    lock: NodeLock
    verified_layout_file: SavedText  # the verified layout, for the next boot
    host_copy_file: SavedText  # a copy of the request's record and the journal
    telemetry: Telemetry = dataclasses.field(default_factory=Telemetry)
    workers_ready: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    """Starts worker processes for the GPUs and kubelet ahead of the calls in its context."""
    boot_id: str = ""  # differs after each reboot
    reset: GpuReset | None = None  # None: the agent may not reset GPUs
    reboot: Reboot | None = None  # None: the agent may not reboot the node
    services: HostServices | None = None  # None: the agent may not stop host services
    service_names: Callable[[], tuple[str, ...]] = tuple
    """The host services that use GPUs, in the order in which they are stopped."""
    refresh_files: Callable[[], object] = lambda: None
    """Brings device nodes and CDI specs up to date, if no other program writes them; raises
    HostError DEVICE_FILES_FAILED."""
    hooks: Hooks | None = None
    own_pod_uid: str | None = None  # None: the agent does not run in a pod
    advertises_simulated: bool = False
    """Whether ``gpus`` advertises the devices on the node; kubelet does not know them."""
    write_layouts: Callable[[str], bool] | None = None
    """Publishes the document of the node's layouts; None: only an annotation lists them."""
    slots: Slots | None = None  # None: no limit on the nodes that change at the same time
    extra_clients: Callable[[], tuple[client_table.ExtraClient, ...]] = tuple
    """Returns the GPU clients beside NVIDIA's; raises ConfigError if their file is invalid."""
