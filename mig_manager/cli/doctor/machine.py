"""Checks of this machine: rights, kernel modules, and the files that mig-manager keeps."""

import pathlib
from collections.abc import Callable, Sequence

from mig_manager import errors
from mig_manager.adapters.host import files, lock_file, procfs
from mig_manager.cli.doctor import findings
from mig_manager.cli.doctor import gpus as gpu_checks
from mig_manager.core.layout import config
from mig_manager.core.records import status

_BLOCKERS = ("nvidia_drm", "nvidia_modeset")
"""Modules whose users keep the driver from resetting a GPU (mig-parted#181)."""
_DAEMON = "nvidia-persiste"
"""The persistence daemon's name as the kernel cuts it."""


def privileges(proc: pathlib.Path, dev: pathlib.Path) -> Sequence[findings.Found]:
    """Tell what this process may do.

    Args:
        proc: The kernel's ``/proc``.
        dev: Where device nodes would be made. In a container's own ``/dev`` none are: they are for
            NVIDIA's container toolkit to make on the host.
    """
    told = procfs.privileges(proc)
    if told is None:
        raise findings.NotAskedError(f"{proc}/self/status does not tell")
    lacking = [
        name
        for name, is_there in (("SYS_ADMIN", told.has_sys_admin), ("MKNOD", told.has_mknod))
        if not is_there
    ]
    who = f"user id {told.user_id}"
    if told.user_id == 0 and lacking == ["MKNOD"] and procfs.is_own_dev(proc, dev):
        what = "the container toolkit makes the device nodes of instances"
        return (findings.ok(f"{who}, with SYS_ADMIN; without MKNOD: {what}"),)
    if told.user_id != 0 or lacking:
        without = f" without {' and '.join(lacking)}" if lacking else ""
        return (findings.warn(f"{who}{without}: may look, but may not change everything"),)
    return (findings.ok(f"{who}, with SYS_ADMIN and MKNOD"),)


def mig_config_right(proc: pathlib.Path, dev: pathlib.Path) -> Sequence[findings.Found]:
    """Tell whether the driver would let this process change instances."""
    right = procfs.config_right(proc, dev)
    told = procfs.privileges(proc)
    if told is not None and told.has_sys_admin:
        note = "" if not right.why_not else f" ({right.path or 'its node'}: {right.why_not})"
        return (findings.ok(f"SYS_ADMIN is enough for the driver{note}"),)
    if right.path is None:
        return (findings.fail(f"no SYS_ADMIN, and {right.why_not}"),)
    if right.why_not:
        return (findings.fail(f"no SYS_ADMIN, and {right.path}: {right.why_not}"),)
    return (findings.ok(f"{right.path} can be opened"),)


def kernel_modules(proc: pathlib.Path, gpus: gpu_checks.Gpus) -> Sequence[findings.Found]:
    """Tell which modules are loaded, and what may hold off a reset."""
    loaded = procfs.modules(proc)
    if loaded is None:
        raise findings.NotAskedError(f"{proc}/modules cannot be read")
    if "nvidia" not in loaded:
        return (
            findings.fail("the kernel module nvidia is not loaded", "Load the NVIDIA driver."),
        )
    names = [name for name in loaded if name == "nvidia" or name.startswith("nvidia_")]
    found = [findings.ok(f"loaded: {', '.join(sorted(names))}")]
    if "nvidia_uvm" not in loaded:
        found.append(
            findings.warn("nvidia_uvm is not loaded: CUDA needs it", "modprobe nvidia-uvm")
        )
    hindrances = [
        f"{name} has {loaded[name]} users" for name in _BLOCKERS if loaded.get(name, 0) > 0
    ]
    daemons = [each for each in procfs.gpu_processes(proc) if each.name == _DAEMON]
    hindrances += [f"{each} keeps GPUs open" for each in daemons]
    if not hindrances:
        return found
    seen = gpus.if_told()
    what = "; ".join(hindrances)
    if seen is not None and not any(gpu.mode_change_needs_reset for gpu in seen):
        return (*found, findings.ok(f"{what}; no matter, as no GPU here is reset for MIG"))
    return (*found, findings.warn(f"{what}: may hold off a reset"))


def lock(path: pathlib.Path) -> Sequence[findings.Found]:
    """Tell who is at work."""
    try:
        holder = lock_file.holder(path)
    except OSError as error:
        return (findings.warn(f"{path}: {error.strerror or error}"),)
    if holder:
        return (findings.warn(f"held by {holder}"),)
    return (findings.ok(f"{path}: held by nobody"),)


def config_file(path: pathlib.Path, *, is_lenient: bool) -> Sequence[findings.Found]:
    """Tell whether the config document is good."""
    source = files.ConfigFile(path)
    document = config.parse(source.read(), source=source.name, is_lenient=is_lenient)
    if document.warnings:
        first, *others = document.warnings
        more = f"; and {len(others)} more" if others else ""
        return (findings.warn(f"{first}{more}", "Correct the place named; --lenient passes it."),)
    if not document.layouts:
        return (findings.warn(f"{path} has no layouts", "Add layouts, or name another file."),)
    return (findings.ok(f"{path}: {len(document.layouts)} layouts"),)


def proven_file(path: pathlib.Path) -> Sequence[findings.Found]:
    """Tell what comes back at the next boot."""
    text = _read(files.VerifiedLayoutFile(path).read)
    if text is None:
        return (findings.ok(f"{path}: nothing is kept for the next boot"),)
    try:
        proven = status.VerifiedLayout.from_json(text)
    except ValueError as error:
        return (findings.fail(f"{path}: {error}"),)
    return (findings.ok(f"{path}: layout {proven.config!r} of {len(proven.snapshot)} GPUs"),)


def journal_file(path: pathlib.Path) -> Sequence[findings.Found]:
    """Tell whether a command was killed in the middle of a change."""
    text = _read(files.JournalFile(path).read)
    if text is None:
        return (findings.ok(f"{path}: no change is under way"),)
    try:
        journal = status.Journal.from_json(text)
    except ValueError as error:
        return (findings.fail(f"{path}: {error}"),)
    return (findings.warn(f"{path}: the change to layout {journal.config!r} has not ended"),)


def _read(read: Callable[[], str | None]) -> str | None:
    try:
        return read()
    except errors.ConfigError as error:
        if isinstance(error.__cause__, PermissionError):
            raise findings.NotAskedError(error.message) from error
        raise
