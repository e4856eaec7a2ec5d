"""The ports of agent and command line, as protocols: ``ports.Gpus`` and so on, in one vocabulary.

Every method may block until a deadline from the adapter's settings, and raises only errors of
``mig_manager.errors``.
"""

from mig_manager.core.ports.cluster import Node, PodWatch, ResourceSlices, Slots, Workloads
from mig_manager.core.ports.gpus import GpuReset, Gpus, RecordPersistence
from mig_manager.core.ports.host import (
    ConfigSource,
    Hooks,
    HostServices,
    KeptFile,
    KeptText,
    NodeLock,
    Reboot,
)
from mig_manager.core.ports.kubelet import DeviceAllocations
from mig_manager.core.ports.pipeline import Cancellation, Dependencies
from mig_manager.core.ports.telemetry import Telemetry

__all__ = [
    "Cancellation",
    "ConfigSource",
    "Dependencies",
    "DeviceAllocations",
    "GpuReset",
    "Gpus",
    "Hooks",
    "HostServices",
    "KeptFile",
    "KeptText",
    "Node",
    "NodeLock",
    "PodWatch",
    "Reboot",
    "RecordPersistence",
    "ResourceSlices",
    "Slots",
    "Telemetry",
    "Workloads",
]
