"""Read the kernel's ``/proc`` about this process, its rights and its pod, and about this boot."""

import dataclasses
import os
import pathlib
import re

ROOT = pathlib.Path("/proc")

_BOOT_ID = ROOT / "sys/kernel/random/boot_id"
"""A new UUID for every boot (``proc_sys_kernel(5)``); containers see the UUID of their host."""
CAPABILITIES = "driver/nvidia/capabilities"
_SYS_ADMIN, _MKNOD = 21, 27  # numbers of capabilities (``linux/capability.h``)

MINOR = re.compile(r"^DeviceFileMinor:\s*(\d+)", re.MULTILINE)
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
    match = MINOR.search(text(proc / CAPABILITIES / "mig/config"))
    if match is None:
        return ConfigRight(path=None, why_not="the driver offers no right to change instances")
    path = dev / "nvidia-caps" / f"nvidia-cap{match[1]}"
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
    except OSError as error:
        return ConfigRight(path=path, why_not=error.strerror or str(error))
    return ConfigRight(path=path, why_not="")


def modules(proc: pathlib.Path) -> frozenset[str] | None:
    """Return the names of the loaded modules (``proc_modules(5)``); None if unknown."""
    try:
        lines = (proc / "modules").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    return frozenset(line.partition(" ")[0] for line in lines)


def text(path: pathlib.Path) -> str:
    """Return the content of one of the kernel's files; empty if it is unreadable."""
    try:
        return path.read_bytes().decode(errors="replace")
    except OSError:
        return ""
