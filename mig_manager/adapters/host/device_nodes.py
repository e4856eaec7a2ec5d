"""The device nodes through which a container reaches MIG instances: ``/dev/nvidia-caps``.

They are not in devtmpfs: a program of the driver creates them when it first needs them, in its own
``/dev``, which may differ from the one that containers get their devices from. This module does
what ``nvidia-modprobe`` does, which knows only ``/dev`` and is not on every machine: nodes, mode,
owner, and the links in ``/dev/char`` that runc needs with systemd's cgroups
(``modprobe-utils/nvidia-modprobe-utils.c``).

The node of a destroyed instance stays. The driver assigns minor numbers to placements once and for
all (``nv-caps.c`` in NVIDIA's open kernel modules, ``/proc/driver/nvidia-caps/mig-minors``): the
node cannot be opened without an instance, is valid again for the next one, and a container that is
being created may have it on its list. A node is removed if its major number is not the driver's,
because it is from before the driver was reloaded and never becomes valid again.
"""

import contextlib
import dataclasses
import errno
import os
import pathlib
import re
import stat
from collections.abc import Callable, Iterator, Sequence

import structlog

from mig_manager import errors
from mig_manager.adapters.host import cdi, procfs
from mig_manager.core import host_settings

_MAJOR = re.compile(r"^\s*(\d+) nvidia-caps$", re.MULTILINE)
_FIELD = re.compile(r"^(DeviceFile\w+): (\d+)$", re.MULTILINE)
_NAME = re.compile(r"nvidia-cap\d+")
_FOLDER_MODE = 0o755
_CAPABILITIES = (
    "mig/config",
    "mig/monitor",
    "gpu*/mig/gi*/access",
    "gpu*/mig/gi*/ci*/access",
)
_REFUSALS = frozenset({errno.EPERM, errno.EACCES, errno.EROFS})

_log = structlog.get_logger()


def make_node(path: pathlib.Path, mode: int, device: int) -> None:
    """Create the node of a character device."""
    os.mknod(path, stat.S_IFCHR | mode, device)
    # Whatever the umask.
    path.chmod(mode)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Node:
    """A required device node."""

    minor: int
    mode: int

    @property
    def name(self) -> str:
        return f"nvidia-cap{self.minor}"


class CapabilityNodes:
    """Creates the missing nodes.

    Args:
        proc: Our ``/proc``. The driver's files in it take no lock but that of system suspend
            (``nv-caps.c``), so that they are readable when a GPU hangs.
        dev: The ``/dev`` that containers get their devices from.
        roots: File systems whose ``proc`` has the driver's files if ours lacks them.
        make: Creates a node.
    """

    def __init__(
        self,
        *,
        proc: pathlib.Path,
        dev: pathlib.Path,
        roots: Sequence[pathlib.Path] = (),
        make: Callable[[pathlib.Path, int, int], None] = make_node,
    ) -> None:
        self._proc = proc
        self._dev = dev
        self._roots = tuple(roots)
        self._make = make

    def refresh(self) -> None:
        """Create each node that is missing or wrong, and remove outdated ones.

        Raises:
            HostError: DEVICE_FILES_FAILED: a node could not be created, for another reason than
                missing permission.
        """
        major = _major(self._proc)
        if major is None:
            self._skip("the driver has no MIG capabilities")
            return
        if not self._dev.is_dir():
            self._skip(f"the folder {self._dev} is missing")
            return
        nodes = tuple(_required(procfs.driver_proc(self._proc, self._roots)))
        if not nodes:
            _log.warning("capability_files_not_seen", proc=str(self._proc))
        try:
            made = [each.name for each in nodes if self._ensure(each, major)]
            removed = [path.name for path in self._outdated(major) if _removed(path)]
        except OSError as error:
            path = error.filename2 or error.filename or self._dev
            why = f"{path}: {error.strerror or error}"
            if error.errno in _REFUSALS:
                self._skip(f"not allowed: {why}")
                return
            raise errors.HostError(
                f"the device nodes of MIG instances cannot be created: {why}",
                reason=errors.Reason.DEVICE_FILES_FAILED,
            ) from error
        if made or removed:
            _log.info("device_nodes_made", made=made, removed=removed)

    def _skip(self, why: str) -> None:
        _log.info("device_files_skipped", what="device nodes of MIG instances", why=why)

    @property
    def _folder(self) -> pathlib.Path:
        return self._dev / "nvidia-caps"

    def _ensure(self, node: _Node, major: int) -> bool:
        """Create a node if needed; return whether it was."""
        path = self._folder / node.name
        device = os.makedev(major, node.minor)
        is_missing = _device(path) != device
        if is_missing:
            if not self._folder.is_dir():
                self._folder.mkdir()
                self._folder.chmod(_FOLDER_MODE)
            # Replaced atomically: a process may be opening it.
            fresh = path.with_name(f".{path.name}.new")
            fresh.unlink(missing_ok=True)
            try:
                self._make(fresh, node.mode, device)
                fresh.replace(path)
            except OSError:
                with contextlib.suppress(OSError):
                    fresh.unlink(missing_ok=True)
                raise
        self._link(path, f"{major}:{node.minor}")
        return is_missing

    def _link(self, path: pathlib.Path, number: str) -> None:
        """Link the device by its number, on machines that have such links."""
        link = self._dev / "char" / number
        target = f"../nvidia-caps/{path.name}"
        if not link.parent.is_dir() or (link.is_symlink() and str(link.readlink()) == target):
            return
        fresh = link.with_name(f".{number}.new")
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(target)
        fresh.replace(link)

    def _outdated(self, major: int) -> Iterator[pathlib.Path]:
        """Return the nodes of a driver that is no longer loaded."""
        if not self._folder.is_dir():
            return
        for path in sorted(self._folder.iterdir()):
            device = _device(path) if _NAME.fullmatch(path.name) else None
            if device is not None and os.major(device) != major:
                yield path


def _major(proc: pathlib.Path) -> int | None:
    # Block devices, which follow, have numbers of their own.
    characters = procfs.text(proc / "devices").partition("Block devices:")[0]
    match = _MAJOR.search(characters)
    return int(match[1]) if match else None


def _required(proc: pathlib.Path) -> Iterator[_Node]:
    root = proc / "driver/nvidia/capabilities"
    for pattern in _CAPABILITIES:
        for path in sorted(root.glob(pattern)):
            fields = {name: int(value) for name, value in _FIELD.findall(procfs.text(path))}
            # Without devfs the driver has no numbers; and with NVreg_ModifyDeviceFiles=0 another
            # program creates the nodes.
            if {"DeviceFileMinor", "DeviceFileMode"} <= fields.keys() and fields.get(
                "DeviceFileModify", 1
            ) == 1:
                yield _Node(minor=fields["DeviceFileMinor"], mode=fields["DeviceFileMode"] & 0o777)


def _device(path: pathlib.Path) -> int | None:
    """Return the number of a character device; None for anything else."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    return status.st_rdev if stat.S_ISCHR(status.st_mode) else None


def _removed(path: pathlib.Path) -> bool:
    path.unlink(missing_ok=True)
    return True


_TIMEOUT_S = 60.0


class DeviceFiles:
    """Implements ``ports.DeviceFiles``: device nodes of instances first, then CDI specs.

    In this order, because a spec names the nodes that exist when it is generated.

    Args:
        roots: Where driver, devices and the host's files are.
        is_cdi_enabled: Whether the GPU operator's containers get their GPUs by CDI.
        timeout_s: How long ``nvidia-ctk`` may take for each step.
        proc: The ``/proc`` with the driver's files.
    """

    def __init__(
        self,
        roots: host_settings.HostRoots,
        *,
        is_cdi_enabled: bool = False,
        timeout_s: float = _TIMEOUT_S,
        proc: pathlib.Path = procfs.ROOT,
    ) -> None:
        self._nodes = CapabilityNodes(
            proc=proc,
            dev=roots.dev_here / "dev",
            roots=(roots.host_here, roots.driver_here),
        )
        self._specs = cdi.CdiSpecs(roots, makes_management=is_cdi_enabled, timeout_s=timeout_s)

    def refresh(self) -> None:
        """Update both; what this machine does not have is skipped.

        Raises:
            HostError: DEVICE_FILES_FAILED: a node or a spec could not be created.
        """
        self._nodes.refresh()
        self._specs.refresh()
