"""Find the processes that have device files of GPUs open, in the kernel's ``/proc``.

NVML lists only processes with a context, which a monitor such as DCGM does not have. A driver that
hangs does not answer, and reads below ``/proc/driver`` may wait for its locks (``nv-procfs.c`` in
NVIDIA's open kernel modules). The links in ``/proc/PID/fd`` never wait for a driver. ``comm`` is
read because ``cmdline`` waits for the memory map of a process that may be stuck.

Processes of other PID namespaces are missing, and those we may not inspect (``describe_hidden``).
"""

import contextlib
import dataclasses
import os
import pathlib
import re
from collections.abc import Collection, Iterable, Iterator, Sequence

from mig_manager.adapters.host import procfs
from mig_manager.core import messages

DRM_MODULE = "nvidia_drm"
"""The kernel module for displays; with kernel mode setting it is a client of every GPU."""
_MAX_NAMED = 8
_PF_KTHREAD = 0x0020_0000
"""A thread of the kernel, in ``flags`` of ``/proc/PID/stat`` (``linux/sched.h``)."""
_PARENT_FIELD, _FLAGS_FIELD = 1, 6  # positions after the name

_DEVICE = re.compile(
    r"/dev/(?:nvidia(?P<gpu>\d+)|nvidiactl|nvidia-caps/nvidia-cap(?P<cap>\d+)"
    r"|dri/(?P<drm>card\d+|renderD\d+))(?: \(deleted\))?$"
)
"""Target of a link; the node may be removed by now, or lie below a driver container's root."""
_LONG_DOMAIN = re.compile(r"^0{4}(?=[0-9a-f]{4}:)")
_POD = re.compile(
    r"[/-]pod([0-9a-f]{8}(?:[-_]?[0-9a-f]{4}){3}[-_]?[0-9a-f]{12})(?:[./]|$)", re.MULTILINE
)
"""``.../podUID/...`` of cgroupfs, or ``...-podUID.slice`` of systemd, with underscores; a static
pod's UID has no dashes. ``kubepods`` depends on where our cgroup namespace begins."""
_UNIT = re.compile(r"/([^/\n]+\.service|session-\w+\.scope)(?=/|$)", re.MULTILINE)
"""A service or a login session. The scope of a container does not show who runs it: it may be a
service that the agent stops, or kubelet without ``--cgroups-per-qos``."""

Instance = tuple[int, int | None]
"""Ids of a GPU instance, and of a compute instance in it; None: the GPU instance itself."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFileUser:
    """A process that has GPU device nodes open."""

    pid: int
    name: str  # as the kernel has it: 15 letters at most
    owner: str  # ``pod UID``, or ``unit NAME`` of a service or login session; empty if unknown
    gpus: frozenset[int]
    """The N of each ``/dev/nvidiaN``: minor numbers, which may differ from NVML's indices."""
    caps: frozenset[int]  # the N of each ``/dev/nvidia-caps/nvidia-capN``
    drm: frozenset[str]
    """Names in ``/dev/dri``, of GPUs of any vendor. The container toolkit gives a GPU's names to
    containers with a ``+gfx`` instance of it (NVIDIA/nvidia-container-toolkit#1818)."""

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid}{f', {self.owner}' if self.owner else ''})"


def find_users(root: pathlib.Path, *, ignore: Collection[int] = ()) -> tuple[DeviceFileUser, ...]:
    """Return the visible GPU processes by pid, without pids in ``ignore`` and their children."""
    return tuple(
        process
        for pid in sorted(_pids(root))
        if pid not in ignore
        and (process := _find_user(root / str(pid), pid)) is not None
        and _stat(root / str(pid), _PARENT_FIELD) not in ignore
    )


def describe_hidden(root: pathlib.Path) -> str:
    """Describe how many processes we may not inspect; empty if we may inspect all.

    Processes with another user or more capabilities require CAP_SYS_PTRACE (``ptrace(2)``).
    """
    count = 0
    for process in (root / str(pid) for pid in _pids(root)):
        try:
            os.scandir(process / "fd").close()
        except PermissionError:
            # A thread of the kernel opens no device.
            count += not _stat(process, _FLAGS_FIELD) & _PF_KTHREAD
        except OSError:
            continue
    processes = "1 process" if count == 1 else f"{count} processes"
    return f"not allowed to look into {processes} (CAP_SYS_PTRACE)" if count else ""


def drm_module(root: pathlib.Path) -> str:
    """Describe the module that can keep a GPU open without a process; empty if not loaded.

    It prevents a reset and an Ampere GPU's change of MIG mode (mig-parted#181).
    """
    is_loaded = DRM_MODULE in (procfs.modules(root) or ())
    return f"unload {DRM_MODULE}, which can keep a GPU open without a process" if is_loaded else ""


def using_gpu(
    processes: Sequence[DeviceFileUser],
    minor: int | None,
    *,
    caps: Collection[int] = (),
    drm: Collection[str] = (),
) -> tuple[DeviceFileUser, ...]:
    """Return the processes that have a device node of a GPU or of its instances open.

    A user of an instance also opens the GPU's node.
    """
    cap_minors, nodes = frozenset(caps), frozenset(drm)
    return tuple(
        each
        for each in processes
        if minor in each.gpus or each.caps & cap_minors or each.drm & nodes
    )


def driver_proc(root: pathlib.Path, others: Iterable[pathlib.Path]) -> pathlib.Path:
    """Return the ``/proc`` in which the driver shows the capabilities of MIG; else our own.

    NVIDIA's legacy runtime hook hides them from a container by a tmpfs (``libnvidia-container``);
    the host's ``/proc``, below one of the ``others``, has them.
    """
    roots = (root, *(other / "proc" for other in others))
    return next((place for place in roots if (place / procfs.CAPABILITIES).is_dir()), root)


def capabilities(root: pathlib.Path, minor: int) -> dict[int, Instance]:
    """Return the instances of one GPU by ``nvidia-cap`` number; the driver must respond.

    MIG User Guide, "Device Nodes and Capabilities"; the N of ``gpuN`` is the minor number.
    """
    mig = root / procfs.CAPABILITIES / f"gpu{minor}" / "mig"
    instances: dict[int, Instance] = {}
    for access in (*mig.glob("gi*/access"), *mig.glob("gi*/ci*/access")):
        gpu_instance, *compute = [part[2:] for part in access.relative_to(mig).parts[:-1]]
        match = procfs.MINOR.search(procfs.text(access))
        if match and all(each.isdecimal() for each in (gpu_instance, *compute)):
            instances[int(match[1])] = int(gpu_instance), int(compute[0]) if compute else None
    return instances


def drm_nodes(root: pathlib.Path, pci_address: str) -> frozenset[str]:
    """Return the names that a GPU has in ``/dev/dri``, from the sysfs beside ``/proc``.

    The kernel writes a PCI domain with four digits, NVML with eight.
    """
    device = _LONG_DOMAIN.sub("", pci_address.lower())
    folder = root.parent / "sys/bus/pci/devices" / device / "drm"
    return frozenset(each.name for each in folder.iterdir()) if folder.is_dir() else frozenset()


def name_users(users: Iterable[object]) -> str:
    """Name the first users, and count the rest; empty without users."""
    return messages.list_names(list(map(str, users)), limit=_MAX_NAMED)


def _pids(root: pathlib.Path) -> Iterator[int]:
    with contextlib.suppress(OSError), os.scandir(root) as entries:
        yield from (int(entry.name) for entry in entries if entry.name.isdecimal())


def _find_user(process: pathlib.Path, pid: int) -> DeviceFileUser | None:
    devices = []
    # A process that has ended meanwhile, or that we may not inspect, has no links.
    with contextlib.suppress(OSError), os.scandir(process / "fd") as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                link = os.readlink(entry)  # noqa: PTH115 - there may be very many
                if device := _DEVICE.search(link):
                    devices.append(device)
    if not devices:
        return None
    groups = procfs.text(process / "cgroup")
    owner = ""
    if pod := _POD.search(groups):
        owner = f"pod {pod[1].replace('_', '-')}"
    elif units := _UNIT.findall(groups):
        # The innermost: user@1000.service contains the units of that user.
        owner = f"unit {messages.printable(units[-1])}"
    return DeviceFileUser(
        pid=pid,
        name=messages.printable(procfs.text(process / "comm").strip()) or "process",
        owner=owner,
        gpus=frozenset(int(device["gpu"]) for device in devices if device["gpu"]),
        caps=frozenset(int(device["cap"]) for device in devices if device["cap"]),
        drm=frozenset(device["drm"] for device in devices if device["drm"]),
    )


def _stat(process: pathlib.Path, field: int) -> int:
    """Return a field by its position after the name; 0 if unknown."""
    # The name may contain any characters, also brackets.
    fields = procfs.text(process / "stat").rpartition(")")[2].split()
    return int(fields[field]) if len(fields) > field and fields[field].isdecimal() else 0
