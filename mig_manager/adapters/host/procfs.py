"""Read the kernel's ``/proc``: processes that use GPUs, this process, this boot.

NVML lists only processes with a context, which a monitor such as DCGM does not have. A driver that
hangs does not answer, and reads below ``/proc/driver`` may wait for its locks (``nv-procfs.c`` in
NVIDIA's open kernel modules). The links in ``/proc/PID/fd`` never wait for a driver. ``comm`` is
read because ``cmdline`` waits for the memory map of a process that may be stuck.

Processes of other PID namespaces and processes we may not inspect (``hidden``) are missing.
"""

import contextlib
import dataclasses
import os
import pathlib
import re
from collections.abc import Collection, Iterable, Iterator, Sequence

from mig_manager.core import messages

ROOT = pathlib.Path("/proc")

_BOOT_ID = ROOT / "sys/kernel/random/boot_id"
"""A new UUID for every boot (``proc_sys_kernel(5)``); containers see the UUID of their host."""
_CAPABILITIES = "driver/nvidia/capabilities"
_MAX_NAMED = 8
_PF_KTHREAD = 0x0020_0000
"""A thread of the kernel, in ``flags`` of ``/proc/PID/stat`` (``linux/sched.h``)."""
_PARENT_FIELD, _FLAGS_FIELD = 1, 6  # positions after the name
_SYS_ADMIN, _MKNOD = 21, 27  # numbers of capabilities (``linux/capability.h``)

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
_MINOR = re.compile(r"^DeviceFileMinor:\s*(\d+)", re.MULTILINE)
_STATUS_FIELD = re.compile(r"^(Uid|CapEff):\s*(.+)$", re.MULTILINE)
_MOUNT = re.compile(r"\d+ \d+ \d+:\d+ (?P<root>\S+) (?P<mount_point>\S+)")
"""A line's beginning: ids of the mount and its parent, device, path within it, mount point."""
_UID = r"(?P<uid>[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})"
_BY_MOUNT_POINT = {
    "/etc/hosts": re.compile(rf"(?:.*/)?pods/{_UID}/etc-hosts"),
    "/dev/termination-log": re.compile(rf"(?:.*/)?pods/{_UID}/containers/.+"),
}
"""Where kubelet mounts files of the pod's folder in every container, and their path in the file
system; surest first (``kubelet_pods.go``, ``kuberuntime_container.go``). How the path begins
depends on the node: ``/var`` may be a file system of its own, OSTree and kind prepend something.
No other mount point counts: a mount of the host's root shows the folders of other pods too."""

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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Privileges:
    """What this process may do, with the effective user (``proc_pid_status(5)``)."""

    user_id: int
    has_sys_admin: bool
    has_mknod: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ConfigRight:
    """The device node through which the driver lets a process change MIG instances."""

    path: pathlib.Path | None  # None: the driver has none
    why_not: str  # why it cannot be opened; empty if it can


def gpu_processes(
    root: pathlib.Path, *, ignore: Collection[int] = ()
) -> tuple[DeviceFileUser, ...]:
    """Return the visible GPU processes by pid, without pids in ``ignore`` and their children."""
    return tuple(
        process
        for pid in sorted(_pids(root))
        if pid not in ignore
        and (process := _gpu_process(root / str(pid), pid)) is not None
        and _stat(root / str(pid), _PARENT_FIELD) not in ignore
    )


def hidden(root: pathlib.Path) -> str:
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
    return f"not allowed to look into {count} processes (CAP_SYS_PTRACE)" if count else ""


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
    return next((place for place in roots if (place / _CAPABILITIES).is_dir()), root)


def capabilities(root: pathlib.Path, minor: int) -> dict[int, Instance]:
    """Return the instances of one GPU by ``nvidia-cap`` number; the driver must respond.

    MIG User Guide, "Device Nodes and Capabilities"; the N of ``gpuN`` is the minor number.
    """
    mig = root / _CAPABILITIES / f"gpu{minor}" / "mig"
    instances: dict[int, Instance] = {}
    for access in (*mig.glob("gi*/access"), *mig.glob("gi*/ci*/access")):
        gpu_instance, *compute = [part[2:] for part in access.relative_to(mig).parts[:-1]]
        match = _MINOR.search(text(access))
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


def boot_id(path: pathlib.Path = _BOOT_ID) -> str:
    """Return the id of this boot; empty if unknown."""
    return text(path).strip()


def own_pod_uid(environ_value: str | None, mountinfo: pathlib.Path) -> str | None:
    """Return the UID of the pod that this process runs in.

    None outside of a pod, if unknown, and in a static pod, whose mirror pod in the API has another
    UID. The downward API's value (``metadata.uid``) has precedence over ``/proc/self/mountinfo``.
    """
    if value := (environ_value or "").strip():
        return value
    # Of several mounts at one path the last one covers the others.
    mounts = filter(None, map(_MOUNT.match, text(mountinfo).splitlines()))
    roots = {mount["mount_point"]: mount["root"] for mount in mounts}
    for mount_point, pattern in _BY_MOUNT_POINT.items():
        if match := pattern.fullmatch(roots.get(mount_point, "")):
            return match["uid"]
    return None


def privileges(proc: pathlib.Path) -> Privileges | None:
    """Return what this process may do; None if unknown."""
    fields = dict(_STATUS_FIELD.findall(text(proc / "self/status")))
    try:
        effective = int(fields["CapEff"], 16)
        user_id = int(fields["Uid"].split()[1])
    except (KeyError, ValueError, IndexError):
        return None
    return Privileges(
        user_id=user_id,
        has_sys_admin=bool(effective >> _SYS_ADMIN & 1),
        has_mknod=bool(effective >> _MKNOD & 1),
    )


def is_own_dev(proc: pathlib.Path, dev: pathlib.Path) -> bool:
    """Return whether a ``/dev`` is a container's own and not the host's.

    Container runtimes mount a tmpfs there; the host's is a devtmpfs also where it is mounted into
    a container (``proc_pid_mountinfo(5)``, OCI runtime specification, "Default Filesystems").
    """
    for line in reversed(text(proc / "self/mountinfo").splitlines()):
        mount, _, source = line.partition(" - ")
        if mount.split()[4:5] == [str(dev)]:
            return source.split()[:1] == ["tmpfs"]
    return False


def config_right(proc: pathlib.Path, dev: pathlib.Path) -> ConfigRight:
    """Open and close the device node of ``mig/config`` (MIG User Guide, "Device Nodes").

    Opening it changes nothing, and unlike its mode shows a container's device rules.
    """
    match = _MINOR.search(text(proc / _CAPABILITIES / "mig/config"))
    if match is None:
        return ConfigRight(path=None, why_not="the driver offers no right to change instances")
    path = dev / "nvidia-caps" / f"nvidia-cap{match[1]}"
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
    except OSError as error:
        return ConfigRight(path=path, why_not=error.strerror or str(error))
    return ConfigRight(path=path, why_not="")


def modules(proc: pathlib.Path) -> dict[str, int] | None:
    """Return how often each loaded module is used (``proc_modules(5)``); None if unknown."""
    try:
        lines = (proc / "modules").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    counts: dict[str, int] = {}
    for line in lines:
        name, _, rest = line.partition(" ")
        with contextlib.suppress(ValueError, IndexError):
            counts[name] = int(rest.split()[1])
    return counts


def text(path: pathlib.Path) -> str:
    """Return the content of one of the kernel's files; empty if it is unreadable."""
    try:
        return path.read_bytes().decode(errors="replace")
    except OSError:
        return ""


def _pids(root: pathlib.Path) -> Iterator[int]:
    with contextlib.suppress(OSError), os.scandir(root) as entries:
        yield from (int(entry.name) for entry in entries if entry.name.isdecimal())


def _gpu_process(process: pathlib.Path, pid: int) -> DeviceFileUser | None:
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
    groups = text(process / "cgroup")
    owner = ""
    if pod := _POD.search(groups):
        owner = f"pod {pod[1].replace('_', '-')}"
    elif units := _UNIT.findall(groups):
        # The innermost: user@1000.service contains the units of that user.
        owner = f"unit {messages.printable(units[-1])}"
    return DeviceFileUser(
        pid=pid,
        name=messages.printable(text(process / "comm").strip()) or "process",
        owner=owner,
        gpus=frozenset(int(device["gpu"]) for device in devices if device["gpu"]),
        caps=frozenset(int(device["cap"]) for device in devices if device["cap"]),
        drm=frozenset(device["drm"] for device in devices if device["drm"]),
    )


def _stat(process: pathlib.Path, field: int) -> int:
    """Return a field by its position after the name; 0 if unknown."""
    # The name may contain any characters, also brackets.
    fields = text(process / "stat").rpartition(")")[2].split()
    return int(fields[field]) if len(fields) > field and fields[field].isdecimal() else 0
