"""The device nodes through which a container reaches MIG instances: ``/dev/nvidia-caps``.

They are not in devtmpfs: a program of the driver's makes them when it first needs them, and in its
own ``/dev``, which need not be the one that containers get their devices from. What is done here
is what ``nvidia-modprobe`` does, which knows ``/dev`` alone and is not on every machine: which
nodes, their mode and owner, and the links in ``/dev/char`` that runc needs with systemd's cgroups
(``modprobe-utils/nvidia-modprobe-utils.c``).

A node whose instance has gone stays. The driver numbers the places for instances once and for all
(``nv-caps.c`` in NVIDIA's open kernel modules, ``/proc/driver/nvidia-caps/mig-minors``): nobody
can open that node while there is no such instance, and it is right again for the next one, while a
container that is just being made may have it on its list. What goes is a node with another major
number than the driver has now, from before it was loaded anew: it can never be right again.
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
from mig_manager.core.host import host_settings

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
    """Make the node of a character device.

    Raises:
        OSError: It cannot be made.
    """
    os.mknod(path, stat.S_IFCHR | mode, device)
    # Whatever the umask has taken away.
    path.chmod(mode)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """A node that there must be."""

    minor: int
    mode: int

    @property
    def name(self) -> str:
        return f"nvidia-cap{self.minor}"


class CapabilityNodes:
    """Makes the nodes that are missing.

    Args:
        proc: Our ``/proc``. The driver's files in it take no lock but that of a machine going to
            sleep (``nv-caps.c``), so that they answer when a GPU does not.
        roots: File systems whose ``proc`` has the driver's files where ours lacks them.
        dev: The ``/dev`` that containers get their devices from.
        make: Makes a node.
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
        """Make each node that is missing or leads elsewhere, and remove those of no use.

        Raises:
            HostError: DEVICE_FILES_FAILED: one could not be made, for another cause than that we
                are not allowed to.
        """
        major = _major(self._proc)
        if major is None:
            self._skip("the driver offers no capabilities")
            return
        if not self._dev.is_dir():
            self._skip(f"there is no folder {self._dev}")
            return
        wanted = tuple(_wanted(procfs.driver_proc(self._proc, self._roots)))
        if not wanted:
            _log.warning("capability_files_not_seen", proc=str(self._proc))
        try:
            made = [each.name for each in wanted if self._ensure(each, major)]
            removed = [path.name for path in self._dead(major) if _removed(path)]
        except OSError as error:
            place = error.filename2 or error.filename or self._dev
            why = f"{place}: {error.strerror or error}"
            if error.errno in _REFUSALS:
                self._skip(f"not allowed: {why}")
                return
            raise errors.HostError(
                f"the device nodes of MIG instances cannot be made: {why}",
                reason=errors.Reason.DEVICE_FILES_FAILED,
            ) from error
        if made or removed:
            _log.info("device_nodes_made", made=made, removed=removed)

    def _skip(self, why: str) -> None:
        _log.info("device_files_skipped", what="device nodes of MIG instances", why=why)

    @property
    def _folder(self) -> pathlib.Path:
        return self._dev / "nvidia-caps"

    def _ensure(self, wanted: _Wanted, major: int) -> bool:
        """Return whether the node had to be made."""
        path = self._folder / wanted.name
        device = os.makedev(major, wanted.minor)
        is_missing = _device(path) != device
        if is_missing:
            if not self._folder.is_dir():
                self._folder.mkdir()
                self._folder.chmod(_FOLDER_MODE)
            # Replaced as a whole: somebody may be opening it.
            fresh = path.with_name(f".{path.name}.new")
            fresh.unlink(missing_ok=True)
            try:
                self._make(fresh, wanted.mode, device)
                fresh.replace(path)
            except OSError:
                with contextlib.suppress(OSError):
                    fresh.unlink(missing_ok=True)
                raise
        self._link(path, f"{major}:{wanted.minor}")
        return is_missing

    def _link(self, path: pathlib.Path, number: str) -> None:
        """Have the device found by its number, where this machine has such links."""
        link = self._dev / "char" / number
        target = f"../nvidia-caps/{path.name}"
        if not link.parent.is_dir() or (link.is_symlink() and str(link.readlink()) == target):
            return
        fresh = link.with_name(f".{number}.new")
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(target)
        fresh.replace(link)

    def _dead(self, major: int) -> Iterator[pathlib.Path]:
        """Return the nodes of a driver that is not loaded any more."""
        if not self._folder.is_dir():
            return
        for path in sorted(self._folder.iterdir()):
            device = _device(path) if _NAME.fullmatch(path.name) else None
            if device is not None and os.major(device) != major:
                yield path


def _major(proc: pathlib.Path) -> int | None:
    # Block devices, which follow, have numbers of their own.
    characters = procfs.text(proc / "devices").partition("Block devices:")[0]
    told = _MAJOR.search(characters)
    return int(told[1]) if told else None


def _wanted(proc: pathlib.Path) -> Iterator[_Wanted]:
    root = proc / "driver/nvidia/capabilities"
    for pattern in _CAPABILITIES:
        for path in sorted(root.glob(pattern)):
            fields = {name: int(value) for name, value in _FIELD.findall(procfs.text(path))}
            # Without devfs the driver tells no numbers; and where somebody else makes the nodes
            # (NVreg_ModifyDeviceFiles=0) it says that they are not ours.
            if {"DeviceFileMinor", "DeviceFileMode"} <= fields.keys() and fields.get(
                "DeviceFileModify", 1
            ) == 1:
                yield _Wanted(
                    minor=fields["DeviceFileMinor"], mode=fields["DeviceFileMode"] & 0o777
                )


def _device(path: pathlib.Path) -> int | None:
    """Return the number of a character device; None for anything else."""
    try:
        told = path.lstat()
    except FileNotFoundError:
        return None
    return told.st_rdev if stat.S_ISCHR(told.st_mode) else None


def _removed(path: pathlib.Path) -> bool:
    path.unlink(missing_ok=True)
    return True


_TIMEOUT_S = 60.0


class DeviceFiles:
    """Implements ``ports.DeviceFiles``: device nodes of instances first, then CDI specs.

    In this order, because a spec names the nodes that are there when it is made.

    Args:
        roots: Where driver, devices and the host's files are.
        is_cdi_enabled: Whether the GPU operator's containers get their GPUs by CDI.
        timeout_s: How long ``nvidia-ctk`` may take for each step.
        proc: The ``/proc`` with what the driver tells.
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
        """Bring them up to date with the GPUs; what this machine does not have is skipped.

        Raises:
            HostError: DEVICE_FILES_FAILED: a node or a spec could not be made, with what the
                system or the tool said.
        """
        self._nodes.refresh()
        self._specs.refresh()
