"""The ports of agent and command line, as protocols: ``ports.Gpus`` and so on, in one vocabulary.

Every method may block until a deadline from the adapter's settings, and raises only errors of
``mig_manager.errors``.
"""

from mig_manager.core.ports.cluster import Node, PodWatch, ResourceSlices, Slots, Workloads
from mig_manager.core.ports.gpus import GpuReset, Gpus, RecordPersistence
from mig_manager.core.ports.host import (
    Hooks,
    HostServices,
    NodeLock,
    Reboot,
    SavedFile,
    SavedText,
    TextSource,
)
from mig_manager.core.ports.kubelet import DeviceAllocations
from mig_manager.core.ports.pipeline import Cancellation, Dependencies
from mig_manager.core.ports.telemetry import Telemetry

__all__ = [
    "Cancellation",
    "Dependencies",
    "DeviceAllocations",
    "GpuReset",
    "Gpus",
    "Hooks",
    "HostServices",
    "Node",
    "NodeLock",
    "PodWatch",
    "Reboot",
    "RecordPersistence",
    "ResourceSlices",
    "SavedFile",
    "SavedText",
    "Slots",
    "Telemetry",
    "TextSource",
    "Workloads",
]
