"""What the operating system tells of itself."""

import contextlib
import dataclasses
import os
import pathlib
import re

from mig_manager.adapters.host import procfs

_BOOT_ID = pathlib.Path("/proc/sys/kernel/random/boot_id")
"""Another UUID after each boot (``proc_sys_kernel(5)``); containers see that of their host."""


def boot_id(path: pathlib.Path = _BOOT_ID) -> str:
    """Return what tells this boot from others; empty where the system does not say."""
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeError):
        return ""


_MOUNT = re.compile(r"\d+ \d+ \d+:\d+ (?P<root>\S+) (?P<mount_point>\S+)")
"""A line's beginning: ids of the mount and its parent, device, path within it, and where."""
_UID = r"(?P<uid>[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})"
_BY_MOUNT_POINT = {
    "/etc/hosts": re.compile(rf"(?:.*/)?pods/{_UID}/etc-hosts"),
    "/dev/termination-log": re.compile(rf"(?:.*/)?pods/{_UID}/containers/.+"),
}
"""Where kubelet mounts a file of the pod's folder, and what is mounted there, the surest first.

Both are in every container of every runtime (``kubelet_pods.go`` and ``kuberuntime_container.go``
of Kubernetes). The folder's path begins differently on each node: it is that within the file
system, so that ``/var`` is missing where it is one of its own, and OSTree and kind put something
before it. No other mount point counts: below a mount of the host's root other pods' lie as well.
"""


def own_pod_uid(environ_value: str | None, mountinfo: pathlib.Path) -> str | None:
    """Return the UID of the pod that this process runs in.

    Args:
        environ_value: What the manifest says by the downward API (``metadata.uid``), if it does.
        mountinfo: The kernel's list of this process' mounts, ``/proc/self/mountinfo`` (proc(5)).

    Returns:
        None outside of a pod, and where neither tells. A static pod counts as none: the API knows
        its mirror by another UID.
    """
    told = (environ_value or "").strip()
    return told or _mounted(mountinfo)


def _mounted(mountinfo: pathlib.Path) -> str | None:
    try:
        lines = mountinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    # Of several mounts at one place the last one covers the others.
    roots = {found["mount_point"]: found["root"] for found in map(_MOUNT.match, lines) if found}
    for mount_point, pattern in _BY_MOUNT_POINT.items():
        match = pattern.fullmatch(roots.get(mount_point, ""))
        if match:
            return match["uid"]
    return None


_SYS_ADMIN, _MKNOD = 21, 27
"""Numbers of capabilities (``linux/capability.h``)."""
_FIELD = re.compile(r"^(Uid|CapEff):\s*(.+)$", re.MULTILINE)
_MINOR = re.compile(r"^DeviceFileMinor:\s*(\d+)", re.MULTILINE)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Privileges:
    """What this process may do (``proc_pid_status(5)``)."""

    user_id: int
    """The effective one."""
    has_sys_admin: bool
    has_mknod: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ConfigRight:
    """The node through which the driver lets a process change MIG instances."""

    path: pathlib.Path | None
    """None: the driver offers none."""
    why_not: str
    """Why it cannot be opened; empty when it can."""


def privileges(proc: pathlib.Path) -> Privileges | None:
    """Return what this process may do; None when the kernel does not tell."""
    fields = dict(_FIELD.findall(procfs.text(proc / "self/status")))
    try:
        rights = int(fields["CapEff"], 16)
        user_id = int(fields["Uid"].split()[1])
    except (KeyError, ValueError, IndexError):
        return None
    return Privileges(
        user_id=user_id,
        has_sys_admin=bool(rights >> _SYS_ADMIN & 1),
        has_mknod=bool(rights >> _MKNOD & 1),
    )


def is_own_dev(proc: pathlib.Path, dev: pathlib.Path) -> bool:
    """Tell whether a ``/dev`` is a container's own and not the host's.

    Container runtimes mount a tmpfs there; the host's is a devtmpfs also where it is mounted into
    a container (``proc_pid_mountinfo(5)``, OCI runtime specification, "Default Filesystems").
    """
    for line in reversed(procfs.text(proc / "self/mountinfo").splitlines()):
        mount, _, source = line.partition(" - ")
        if mount.split()[4:5] == [str(dev)]:
            return source.split()[:1] == ["tmpfs"]
    return False


def config_right(proc: pathlib.Path, dev: pathlib.Path) -> ConfigRight:
    """Try the node of ``mig/config`` (MIG User Guide, "Device Nodes and Capabilities").

    It is opened for reading and closed again, which changes nothing and says more than its mode:
    a container's device rules count too.
    """
    told = _MINOR.search(procfs.text(proc / "driver/nvidia/capabilities/mig/config"))
    if told is None:
        return ConfigRight(path=None, why_not="the driver offers no right to change instances")
    path = dev / "nvidia-caps" / f"nvidia-cap{told[1]}"
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
    except OSError as error:
        return ConfigRight(path=path, why_not=error.strerror or str(error))
    return ConfigRight(path=path, why_not="")


def modules(proc: pathlib.Path) -> dict[str, int] | None:
    """Return how often each loaded module is used (``proc_modules(5)``); None: not told."""
    try:
        text = (proc / "modules").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found: dict[str, int] = {}
    for line in text.splitlines():
        name, _, rest = line.partition(" ")
        with contextlib.suppress(ValueError, IndexError):
            found[name] = int(rest.split()[1])
    return found
