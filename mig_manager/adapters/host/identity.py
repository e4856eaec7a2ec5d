"""Which pod we run in, for whoever must tell us from another pod with the same labels.

Under NVIDIA's GPU operator the agent runs in the operator's own DaemonSet, whose labels and whose
containers' names are those of NVIDIA's mig-manager, and no variable there says the pod's UID.
"""

import pathlib
import re

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
