"""Who has the device nodes of a GPU open, without asking the driver.

NVML lists processes with a context; a monitor such as DCGM or the persistence daemon holds on
without one. And a driver that hangs cannot be asked at all, nor what it serves below
``/proc/driver``, where some reads wait for the driver's own locks (``nv-procfs.c`` in NVIDIA's
open kernel modules). The links in ``/proc/PID/fd`` are the kernel's own and never wait for a
driver; the files behind them are not touched, and ``comm`` is read instead of ``cmdline``, which
waits for the memory map of a process that may itself be stuck.

Processes of other PID namespaces are not seen, nor those that we may not look into (``hidden``
counts them): what is found is never all there is for certain.
"""

import contextlib
import dataclasses
import os
import pathlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from mig_manager.core import messages

ROOT = pathlib.Path("/proc")

_CAPABILITIES = "driver/nvidia/capabilities"

_MAX_NAMED = 8
_PF_KTHREAD = 0x0020_0000
"""Marks the kernel's own threads, in the field ``flags`` of ``/proc/PID/stat`` (proc_pid_stat(5);
``linux/sched.h``)."""
_FLAGS_FIELD = 6
"""Its place after the name."""

_DEVICE = re.compile(
    r"/dev/(?:nvidia(?P<gpu>\d+)|(?P<control>nvidiactl)|nvidia-caps/nvidia-cap(?P<cap>\d+))"
    r"(?: \(deleted\))?$"
)
"""What a link says; a node may have been removed since, or lie below a driver container's root."""

_POD = re.compile(
    r"[/-]pod([0-9a-f]{8}(?:[-_]?[0-9a-f]{4}){3}[-_]?[0-9a-f]{12})(?:[./]|$)", re.MULTILINE
)
"""A pod's UID in a cgroup's path: ``.../podUID/...`` as cgroupfs has it, ``...-podUID.slice`` with
underscores as systemd has it. Static pods have a UID without dashes. Whether ``kubepods`` is there
depends on where the reader's own cgroup namespace begins."""

_UNIT = re.compile(r"/([^/\n]+\.service)(?=/|$)", re.MULTILINE)

_MINOR = re.compile(r"^DeviceFileMinor:\s*(\d+)", re.MULTILINE)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A process that has GPU device nodes open."""

    pid: int
    name: str
    """As the kernel has it: 15 letters at most."""
    home: str
    """``pod UID`` or ``unit NAME.service``; empty when it cannot be told."""
    gpus: frozenset[int]
    """The N of each ``/dev/nvidiaN``: minor numbers, which need not be NVML's indices."""
    caps: frozenset[int]
    """The N of each ``/dev/nvidia-caps/nvidia-capN``."""
    has_control: bool
    """Whether ``/dev/nvidiactl`` is open, as it is in every client of the driver."""

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid}{f', {self.home}' if self.home else ''})"


def holders(root: pathlib.Path, *, but: Collection[int] = ()) -> tuple[Holder, ...]:
    """Return the processes that can be seen with any GPU device node open, ascending by pid.

    Args:
        root: The ``/proc`` to look into.
        but: Processes that are left out, and with them their children: our own.
    """
    return tuple(
        holder
        for pid in sorted(_pids(root))
        if pid not in but
        and (holder := _holder(root / str(pid), pid)) is not None
        and _parent(root / str(pid)) not in but
    )


def hidden(root: pathlib.Path) -> str:
    """Say how many processes we are not allowed to look into; empty when we may look into all.

    The kernel asks for CAP_SYS_PTRACE where a process has another user or more capabilities than
    we have (``ptrace(2)``, "Ptrace access mode checking").

    Args:
        root: The ``/proc`` to look into.
    """
    count = sum(_is_hidden(root / str(pid)) for pid in _pids(root))
    return f"not allowed to look into {count} processes (CAP_SYS_PTRACE)" if count else ""


def of_gpu(
    found: Sequence[Holder], minor: int, *, caps: Collection[int] = ()
) -> tuple[Holder, ...]:
    """Return those that have the device node of a GPU or of one of its instances open.

    Args:
        found: Who has any device node open.
        minor: Minor number of the GPU.
        caps: The ``nvidia-cap`` numbers of its instances.
    """
    known = frozenset(caps)
    return tuple(holder for holder in found if minor in holder.gpus or holder.caps & known)


def of_gpu_instance(
    found: Sequence[Holder], minor: int, *, caps: Mapping[int, int], gpu_instance_id: int
) -> tuple[Holder, ...]:
    """Return those that hold a GPU instance, or its GPU and none of its instances.

    Whoever uses an instance opens the GPU's node as well, so the GPU's node alone says little of a
    process that also has the nodes of other instances open.

    Args:
        found: Who has any device node open.
        minor: Minor number of the GPU.
        caps: What ``capabilities`` returned for this GPU.
        gpu_instance_id: NVML's id of the GPU instance.
    """
    held = ((holder, {caps[cap] for cap in holder.caps if cap in caps}) for holder in found)
    return tuple(
        holder
        for holder, instances in held
        if gpu_instance_id in instances or (minor in holder.gpus and not instances)
    )


def of_driver(root: pathlib.Path, others: Iterable[pathlib.Path]) -> pathlib.Path:
    """Return the ``/proc`` in which the driver shows the capabilities of MIG.

    NVIDIA's legacy container runtime hook mounts a tmpfs over ``/proc/driver/nvidia`` of a
    container (``libnvidia-container``); the host's has them.

    Args:
        root: The ``/proc`` of this process; the answer where none has them.
        others: Roots of file systems whose ``proc`` is looked into next.
    """
    places = (root, *(other / "proc" for other in others))
    return next((place for place in places if (place / _CAPABILITIES).is_dir()), root)


def capabilities(root: pathlib.Path, minor: int) -> dict[int, int]:
    """Return the GPU instances of one GPU by ``nvidia-cap`` number, compute instances' included.

    The driver serves these files, so it must be well. Their place and form are those of the MIG
    User Guide, "Device Nodes and Capabilities"; the number in ``gpuN`` is the minor number.

    Args:
        root: The ``/proc`` to look into.
        minor: Minor number of the GPU.
    """
    return {cap: ids[0] for cap, ids in _capabilities(root, minor).items()}


def compute_capabilities(root: pathlib.Path, minor: int) -> dict[int, tuple[int, int]]:
    """Return GPU instance and compute instance by the ``nvidia-cap`` number of the latter.

    Args:
        root: The ``/proc`` to look into.
        minor: Minor number of the GPU.
    """
    return {
        cap: (gpu_instance, inside[0])
        for cap, (gpu_instance, *inside) in _capabilities(root, minor).items()
        if inside
    }


def _capabilities(root: pathlib.Path, minor: int) -> dict[int, tuple[int, ...]]:
    """Return the ids of a GPU instance, and of a compute instance in it, by capability."""
    mig = root / _CAPABILITIES / f"gpu{minor}" / "mig"
    found: dict[int, tuple[int, ...]] = {}
    for pattern in ("gi*/access", "gi*/ci*/access"):
        for access in mig.glob(pattern):
            ids = [part[2:] for part in access.relative_to(mig).parts[:-1]]
            told = _MINOR.search(text(access))
            if told and all(each.isdecimal() for each in ids):
                found[int(told[1])] = tuple(map(int, ids))
    return found


def named(found: Sequence[Holder]) -> str:
    """Return the first of them in words; empty when there are none."""
    return listed([str(holder) for holder in found])


def listed(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are; empty when there are none."""
    return messages.listed(names, most=_MAX_NAMED)


def _pids(root: pathlib.Path) -> Iterator[int]:
    with contextlib.suppress(OSError), os.scandir(root) as entries:
        yield from (int(entry.name) for entry in entries if entry.name.isdecimal())


def _holder(process: pathlib.Path, pid: int) -> Holder | None:
    devices = [device for link in _links(process / "fd") if (device := _DEVICE.search(link))]
    if not devices:
        return None
    return Holder(
        pid=pid,
        name=_name(process),
        home=_home(process),
        gpus=frozenset(int(device["gpu"]) for device in devices if device["gpu"]),
        caps=frozenset(int(device["cap"]) for device in devices if device["cap"]),
        has_control=any(device["control"] for device in devices),
    )


def _links(folder: pathlib.Path) -> Iterator[str]:
    # One that has ended meanwhile, or that we may not look into, has none.
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                yield os.readlink(entry)  # noqa: PTH115 - there may be very many


def _is_hidden(process: pathlib.Path) -> bool:
    try:
        with os.scandir(process / "fd"):
            return False
    except PermissionError:
        # A thread of the kernel opens no device.
        return not _is_kernel_thread(process)
    except OSError:
        return False


def _name(process: pathlib.Path) -> str:
    return messages.printable(text(process / "comm").strip()) or "process"


def _home(process: pathlib.Path) -> str:
    groups = text(process / "cgroup")
    if pod := _POD.search(groups):
        return f"pod {pod[1].replace('_', '-')}"
    if units := _UNIT.findall(groups):
        # The innermost: user@1000.service is around the units of that user.
        return f"unit {messages.printable(units[-1])}"
    return ""


def _is_kernel_thread(process: pathlib.Path) -> bool:
    fields = text(process / "stat").rpartition(")")[2].split()
    return len(fields) > _FLAGS_FIELD and bool(int(fields[_FLAGS_FIELD]) & _PF_KTHREAD)


def _parent(process: pathlib.Path) -> int | None:
    """Return the parent's pid; None when it cannot be told."""
    # The name in brackets may hold anything, brackets included.
    fields = text(process / "stat").rpartition(")")[2].split()
    return int(fields[1]) if len(fields) > 1 and fields[1].isdecimal() else None


def text(path: pathlib.Path) -> str:
    """Return what a file of the kernel says; empty when it says nothing to us."""
    try:
        return path.read_bytes().decode(errors="replace")
    except OSError:
        return ""
