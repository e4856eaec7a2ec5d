"""The device nodes through which a container reaches MIG instances: ``/dev/nvidia-caps``.

They are not in devtmpfs. A program of the driver creates them when it first needs them, in its own
``/dev``; containers may have another. This module does what ``nvidia-modprobe`` does
(``modprobe-utils/nvidia-modprobe-utils.c``): nodes, mode, owner, and the links in ``/dev/char``
that runc needs with systemd's cgroups. That program knows only ``/dev``, and is not on every
machine.

A destroyed instance's node stays. The driver assigns fixed minor numbers to placements
(``nv-caps.c``), so the node is valid for the next instance. A container that is being created may
list it. A node with another major number predates a reload of the driver and is removed.
"""

import errno
import os
import pathlib
import re
import stat
from collections.abc import Sequence

import structlog

from mig_manager import errors, reasons
from mig_manager.adapters.host import cdi, device_users, files, procfs
from mig_manager.core.settings import host_settings

_MAJOR = re.compile(r"^\s*(\d+) nvidia-caps$", re.MULTILINE)
_FIELD = re.compile(r"^(DeviceFile\w+): (\d+)$", re.MULTILINE)
_NAME = re.compile(r"nvidia-cap\d+")
_FOLDER_MODE = 0o755
_TIMEOUT_S = 60.0  # for each step of ``nvidia-ctk``
_CAPABILITIES = (
    "mig/config",
    "mig/monitor",
    "gpu*/mig/gi*/access",
    "gpu*/mig/gi*/ci*/access",
)
_REFUSALS = frozenset({errno.EPERM, errno.EACCES, errno.EROFS})

_log = structlog.get_logger()


def refresh_files(
    roots: host_settings.HostRoots,
    *,
    is_cdi_enabled: bool = False,
    proc: pathlib.Path = procfs.ROOT,
) -> None:
    """Update the nodes, then the CDI specs, which name them; skip what this machine lacks.

    ``is_cdi_enabled`` is whether the GPU operator's containers get their GPUs by CDI.

    Raises:
        HostError: A node or spec cannot be created.
    """
    dev = roots.dev_here / "dev"
    proc_roots = (roots.host_here, roots.driver_here)
    refresh_nodes(proc=proc, dev=dev, roots=proc_roots)
    cdi.refresh(roots, makes_management=is_cdi_enabled, timeout_s=_TIMEOUT_S)


def refresh_nodes(
    *, proc: pathlib.Path, dev: pathlib.Path, roots: Sequence[pathlib.Path] = ()
) -> None:
    """Create missing or wrong nodes in containers' ``/dev``, and remove stale nodes.

    The driver's files are in ``proc``, or below one of the ``roots``. Reading them takes only
    system suspend's lock (``nv-caps.c``), so they are readable when a GPU hangs.

    Raises:
        HostError: A node could not be created, although permitted.
    """
    # The numbers of block devices follow, and are separate.
    characters = procfs.text(proc / "devices").partition("Block devices:")[0]
    match = _MAJOR.search(characters)
    if match is None:
        _skip("the driver has no MIG capabilities")
        return
    if not dev.is_dir():
        _skip(f"the folder {dev} is missing")
        return
    major = int(match[1])
    modes = _modes(device_users.driver_proc(proc, roots))
    if not modes:
        _log.warning("capability_files_not_seen", proc=str(proc))
    folder = dev / "nvidia-caps"
    try:
        made = [
            f"nvidia-cap{minor}"
            for minor, mode in modes.items()
            if _ensure(dev, major, minor, mode)
        ]
        stale = [
            path
            for path in (sorted(folder.iterdir()) if folder.is_dir() else ())
            if _NAME.fullmatch(path.name)
            and (node := _node(path)) is not None
            and os.major(node[0]) != major
        ]
        for path in stale:
            path.unlink(missing_ok=True)
    except OSError as error:
        failed = error.filename2 or error.filename or dev
        why = f"{failed}: {error.strerror or error}"
        if error.errno in _REFUSALS:
            _skip(f"not allowed: {why}")
            return
        raise errors.HostError(
            f"the device nodes of MIG instances cannot be created: {why}",
            reason=reasons.Reason.DEVICE_FILES_FAILED,
        ) from error
    if made or stale:
        _log.info("device_nodes_made", made=made, removed=[path.name for path in stale])


def _ensure(dev: pathlib.Path, major: int, minor: int, mode: int) -> bool:
    """Create a missing or wrong node, and its link if the machine has such links.

    Return whether the node was created.
    """
    path = dev / f"nvidia-caps/nvidia-cap{minor}"
    device = os.makedev(major, minor)
    is_wrong = _node(path) != (device, mode)
    if is_wrong:
        if not path.parent.is_dir():
            path.parent.mkdir()
            path.parent.chmod(_FOLDER_MODE)
        # Atomically, as below: a process may be opening it.
        with files.replacing(path) as new:
            os.mknod(new, stat.S_IFCHR | mode, device)
            # The umask does not count.
            new.chmod(mode)
    link = dev / f"char/{major}:{minor}"
    target = f"../nvidia-caps/{path.name}"
    is_linked = link.is_symlink() and str(link.readlink()) == target
    if link.parent.is_dir() and not is_linked:
        with files.replacing(link) as new:
            new.symlink_to(target)
    return is_wrong


def _skip(why: str) -> None:
    _log.info("device_files_skipped", what="device nodes of MIG instances", why=why)


def _modes(proc: pathlib.Path) -> dict[int, int]:
    """Return the permissions of each required node by its minor number."""
    root = proc / "driver/nvidia/capabilities"
    modes: dict[int, int] = {}
    for pattern in _CAPABILITIES:
        for path in sorted(root.glob(pattern)):
            match {name: int(value) for name, value in _FIELD.findall(procfs.text(path))}:
                case {"DeviceFileModify": modify} if modify != 1:
                    # With NVreg_ModifyDeviceFiles=0 another program creates the nodes.
                    pass
                case {"DeviceFileMinor": minor, "DeviceFileMode": mode}:
                    modes[minor] = mode & 0o777
                case _:
                    # Without devfs the driver has no numbers.
                    pass
    return modes


def _node(path: pathlib.Path) -> tuple[int, int] | None:
    """Return number and permissions of a character device; None for anything else."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    is_device = stat.S_ISCHR(status.st_mode)
    return (status.st_rdev, stat.S_IMODE(status.st_mode)) if is_device else None
