"""The state of GPUs, as ``nvidia-smi -q -x`` shows it (NVIDIA's ``nvsmi_device`` DTD)."""

import dataclasses
import xml.etree.ElementTree as ET
from collections.abc import Mapping

from mig_manager.core import gpu_processes, messages

_END = "</nvidia_smi_log>"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SmiStatus:
    """The state of a GPU, as ``nvidia-smi`` shows it."""

    uuid: str
    minor: int | None
    is_pending: bool
    is_persistent: bool
    """Whether persistence mode is on, with which the driver itself keeps the GPU open."""
    has_instances: bool
    """Whether it has MIG devices; GPU instances without compute instances are not shown."""
    processes: Mapping[int, str]  # name and pid of the processes with a context, by pid


def parse(document: str) -> tuple[SmiStatus, ...]:
    """Parse the XML of some GPUs; none if it is malformed."""
    # Warnings, for example about a corrupt infoROM, follow the document.
    document, end, _ = document.partition(_END)
    try:
        # The driver's own tool wrote it, with bounded size; expat bounds entity expansion.
        root = ET.fromstring(document + end)  # noqa: S314
    except ET.ParseError:
        return ()
    return tuple(map(_status, root.findall("gpu")))


def _status(gpu: ET.Element) -> SmiStatus:
    def text(element: ET.Element, path: str) -> str:
        return (element.findtext(path) or "").strip()

    current, pending = (text(gpu, f"mig_mode/{which}_mig") for which in ("current", "pending"))
    minor = text(gpu, "minor_number")
    processes = {}
    for each in gpu.iterfind("processes/process_info"):
        if (pid := text(each, "pid")).isdecimal():
            name = messages.printable(
                gpu_processes.program_name(text(each, "process_name")) or "process"
            )
            processes[int(pid)] = f"{name} (pid {pid})"
    return SmiStatus(
        uuid=text(gpu, "uuid"),
        minor=int(minor) if minor.isdecimal() else None,
        is_pending=bool(current and pending) and current != pending,
        is_persistent=text(gpu, "persistence_mode") == "Enabled",
        has_instances=gpu.find("mig_devices/mig_device") is not None,
        processes=processes,
    )
