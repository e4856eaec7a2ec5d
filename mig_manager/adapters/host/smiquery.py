"""What ``nvidia-smi -q -x`` says of one GPU: its XML, in our words.

The elements are those of NVIDIA's ``nvsmi_device`` DTD. Where one is absent nothing is assumed.
"""

import dataclasses
import xml.etree.ElementTree as ET

from mig_manager.core.host import holders
from mig_manager.core.text import messages

MAX_BYTES = 4 * 2**20
"""A GPU cut in seven with hundreds of processes needs a tenth of it."""

_NO_NAME = "process"
_END = "</nvidia_smi_log>"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process that has a context on the GPU."""

    pid: int
    name: str

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid})"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What there is on a GPU."""

    uuid: str
    minor: int | None
    """The N of its ``/dev/nvidiaN``; None when it is not told."""
    is_pending: bool
    """Whether a switch of MIG mode is."""
    is_persistent: bool
    """Whether persistence mode is on: the driver itself then keeps the GPU open."""
    has_instances: bool
    """Whether it has MIG devices; GPU instances without a compute instance are not told of."""
    processes: tuple[Process, ...]


def parse(text: str) -> Look | None:
    """Return what is said of the one GPU; None when it is not one, or not to be made sense of."""
    # Warnings, such as that of a corrupt infoROM, follow the document.
    document, end, _ = text.partition(_END)
    try:
        # Of the driver's own tool, whose output is bounded; expat bounds what entities make of it.
        root = ET.fromstring(document + end)  # noqa: S314
    except ET.ParseError:
        return None
    gpus = root.findall("gpu")
    if len(gpus) != 1:
        return None
    gpu = gpus[0]
    current, pending = (_said(gpu, f"mig_mode/{which}_mig") for which in ("current", "pending"))
    minor = _said(gpu, "minor_number")
    return Look(
        uuid=_said(gpu, "uuid"),
        minor=int(minor) if minor.isdecimal() else None,
        is_pending=bool(current and pending) and current != pending,
        is_persistent=_said(gpu, "persistence_mode") == "Enabled",
        has_instances=gpu.find("mig_devices/mig_device") is not None,
        processes=tuple(
            Process(pid=int(pid), name=_name(each))
            for each in gpu.iterfind("processes/process_info")
            if (pid := _said(each, "pid")).isdecimal()
        ),
    )


def _name(process: ET.Element) -> str:
    return messages.printable(holders.program(_said(process, "process_name")) or _NO_NAME)


def _said(element: ET.Element, path: str) -> str:
    return (element.findtext(path) or "").strip()
