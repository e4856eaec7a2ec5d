"""Checks of this machine: driver, GPUs, rights, kernel modules, and files of mig-manager."""

import collections
import pathlib
from collections.abc import Callable, Iterable, Sequence

from mig_manager import errors
from mig_manager.adapters.host import files, lock_file, procfs
from mig_manager.adapters.nvml import processes as nvml_processes
from mig_manager.cli.doctor import checks
from mig_manager.core import model, picture
from mig_manager.core.layout import config
from mig_manager.core.records import status

_OLDEST_DRIVER = 450
"""The first branch with MIG (NVIDIA MIG User Guide, "Deployment Considerations")."""

_BLOCKERS = ("nvidia_drm", "nvidia_modeset")
"""Modules whose users prevent a GPU reset (mig-parted#181)."""
_DAEMON = "nvidia-persiste"
"""The persistence daemon's name as the kernel cuts it."""


Gpus = checks.Once[model.ObservedGpus]
Inspection = checks.Once[nvml_processes.Inspection]


def driver(inspection: Inspection) -> Sequence[checks.Found]:
    """Check that NVML loads, and its versions."""
    try:
        found = inspection.get()
    except errors.HardwareError as error:
        is_absent = error.reason is errors.Reason.DRIVER_NOT_LOADED
        return (checks.fail(error.message, "" if is_absent else error.reason.remedy),)
    text = f"driver {found.driver_version}, NVML {found.nvml_version}"
    branch = found.driver_version.partition(".")[0]
    if branch.isdecimal() and int(branch) < _OLDEST_DRIVER:
        return (checks.fail(f"{text}: too old for MIG", "Install a newer NVIDIA driver."),)
    return (checks.ok(text),)


def gpu_modes(gpus: Gpus) -> Sequence[checks.Found]:
    """Check which GPUs support MIG, and their MIG mode."""
    seen = gpus.get()
    lost = [
        checks.fail(f"{gpu}: unreachable: {gpu.message}", errors.Reason.GPU_UNREACHABLE.remedy)
        for gpu in seen.unreachable
    ]
    if not any(gpu.is_mig_capable for gpu in seen):
        what = "no GPU of this node supports MIG" if seen else "this node has no NVIDIA GPU"
        return (checks.fail(what, "Remove the node's label nvidia.com/mig.config."),)
    waiting = [_waiting(gpu) for gpu in seen if gpu.has_pending_mode]
    steady = [gpu for gpu in seen if not gpu.has_pending_mode]
    return (*lost, *waiting, *(checks.ok(text) for text in _grouped(steady, _mode)))


def virtualization(gpus: Gpus) -> Sequence[checks.Found]:
    """Check whether a host of virtual machines decides about the MIG mode."""
    seen = gpus.needed()
    found = [checks.ok(text) for text in _grouped((g for g in seen if _is_own(g)), _belonging)]
    for gpu in seen:
        if gpu.virtualization is model.Virtualization.VGPU:
            found.append(checks.fail(f"GPU {gpu.index} is a vGPU: its host decides about MIG"))
        elif not _is_own(gpu):
            found.append(
                checks.warn(
                    f"GPU {gpu.index} is passed through to this virtual machine, which cannot "
                    "reset it: another MIG mode needs a reboot",
                    "Enable MIG before a layout is requested, and reboot the virtual machine.",
                )
            )
    return found or [checks.skipped("no GPU")]


def instances(gpus: Gpus) -> Sequence[checks.Found]:
    """Check for GPU instances that no pod can use."""
    seen = gpus.needed()
    useless = [
        checks.warn(
            f"GPU {gpu.index}: GPU instance {gi.instance_id} ({gi.profile} at {gi.placement}) "
            "has no compute instance: it takes up space and is unusable"
        )
        for gpu in seen
        for gi in gpu.gpu_instances
        if not gi.compute_instances
    ]
    count = sum(len(gpu.gpu_instances) for gpu in seen)
    return useless or [checks.ok(f"{count} GPU instances, each with a compute instance")]


def gpu_processes(gpus: Gpus, inspection: Inspection) -> Sequence[checks.Found]:
    """List the processes of each GPU."""
    by_uuid = dict(inspection.needed().processes)
    seen = gpus.needed()
    used = [(gpu, by_uuid[gpu.uuid]) for gpu in seen if by_uuid.get(gpu.uuid)]
    found = []
    for gpu, processes in used:
        text = f"GPU {gpu.index}: {', '.join(map(str, processes))}"
        if gpu.has_pending_mode:
            found.append(checks.warn(f"{text}; the reset for the new MIG mode must wait"))
        else:
            found.append(checks.ok(text))
    free = [gpu for gpu in seen if gpu.uuid in by_uuid and not by_uuid[gpu.uuid]]
    if free:
        found.append(checks.ok(f"GPU {picture.indices(free)}: no process visible from here"))
    return found or [checks.skipped("NVML lists no processes of any GPU")]


def privileges(proc: pathlib.Path, dev: pathlib.Path) -> Sequence[checks.Found]:
    """Check what this process may do.

    Args:
        proc: The kernel's ``/proc``.
        dev: Where device nodes would be made. In a container's own ``/dev`` none are: they are for
            NVIDIA's container toolkit to make on the host.
    """
    own = procfs.privileges(proc)
    if own is None:
        raise checks.NotAskedError(f"{proc}/self/status does not list capabilities")
    lacking = [
        name
        for name, is_there in (("SYS_ADMIN", own.has_sys_admin), ("MKNOD", own.has_mknod))
        if not is_there
    ]
    who = f"user id {own.user_id}"
    if own.user_id == 0 and lacking == ["MKNOD"] and procfs.is_own_dev(proc, dev):
        what = "the container toolkit makes the device nodes of instances"
        return (checks.ok(f"{who}, with SYS_ADMIN; without MKNOD: {what}"),)
    if own.user_id != 0 or lacking:
        without = f" without {' and '.join(lacking)}" if lacking else ""
        return (checks.warn(f"{who}{without}: may read, but may not change everything"),)
    return (checks.ok(f"{who}, with SYS_ADMIN and MKNOD"),)


def mig_config_right(proc: pathlib.Path, dev: pathlib.Path) -> Sequence[checks.Found]:
    """Check whether the driver lets this process change instances."""
    right = procfs.config_right(proc, dev)
    own = procfs.privileges(proc)
    if own is not None and own.has_sys_admin:
        note = "" if not right.why_not else f" ({right.path or 'its node'}: {right.why_not})"
        return (checks.ok(f"SYS_ADMIN is enough for the driver{note}"),)
    if right.path is None:
        return (checks.fail(f"no SYS_ADMIN, and {right.why_not}"),)
    if right.why_not:
        return (checks.fail(f"no SYS_ADMIN, and {right.path}: {right.why_not}"),)
    return (checks.ok(f"{right.path} can be opened"),)


def kernel_modules(proc: pathlib.Path, gpus: Gpus) -> Sequence[checks.Found]:
    """Check which modules are loaded, and what may delay a reset."""
    loaded = procfs.modules(proc)
    if loaded is None:
        raise checks.NotAskedError(f"{proc}/modules cannot be read")
    if "nvidia" not in loaded:
        return (checks.fail("the kernel module nvidia is not loaded", "Load the NVIDIA driver."),)
    names = [name for name in loaded if name == "nvidia" or name.startswith("nvidia_")]
    found = [checks.ok(f"loaded: {', '.join(sorted(names))}")]
    if "nvidia_uvm" not in loaded:
        found.append(checks.warn("nvidia_uvm is not loaded: CUDA needs it", "modprobe nvidia-uvm"))
    obstacles = [
        f"{name} has {loaded[name]} users" for name in _BLOCKERS if loaded.get(name, 0) > 0
    ]
    daemons = [each for each in procfs.gpu_processes(proc) if each.name == _DAEMON]
    obstacles += [f"{each} keeps GPUs open" for each in daemons]
    if not obstacles:
        return found
    seen = gpus.if_known()
    what = "; ".join(obstacles)
    if seen is not None and not any(gpu.mode_change_needs_reset for gpu in seen):
        return (*found, checks.ok(f"{what}; irrelevant, as no GPU here is reset for MIG"))
    return (*found, checks.warn(f"{what}: may delay a reset"))


def lock(path: pathlib.Path) -> Sequence[checks.Found]:
    """Check whether another manager is changing this node."""
    try:
        owner = lock_file.owner(path)
    except OSError as error:
        return (checks.warn(f"{path}: {error.strerror or error}"),)
    if owner:
        return (checks.warn(f"in use by {owner}"),)
    return (checks.ok(f"{path}: free"),)


def config_file(path: pathlib.Path, *, is_lenient: bool) -> Sequence[checks.Found]:
    """Check the layout file."""
    source = files.ConfigFile(path)
    document = config.parse(source.read(), source=source.name, is_lenient=is_lenient)
    if document.warnings:
        first, *others = document.warnings
        more = f"; and {len(others)} more" if others else ""
        return (
            checks.warn(f"{first}{more}", "Correct the place named, or accept it with --lenient."),
        )
    if not document.layouts:
        return (checks.warn(f"{path} has no layouts", "Add layouts, or name another file."),)
    return (checks.ok(f"{path}: {len(document.layouts)} layouts"),)


def verified_layout(path: pathlib.Path) -> Sequence[checks.Found]:
    """Check the layout that the next boot restores."""
    text = _read(files.VerifiedLayoutFile(path).read)
    if text is None:
        return (checks.ok(f"{path}: no layout is kept for the next boot"),)
    try:
        layout = status.VerifiedLayout.from_json(text)
    except ValueError as error:
        return (checks.fail(f"{path}: {error}"),)
    return (checks.ok(f"{path}: layout {layout.config!r} of {len(layout.snapshot)} GPUs"),)


def journal_file(path: pathlib.Path) -> Sequence[checks.Found]:
    """Check whether a command was killed during a change."""
    text = _read(files.JournalFile(path).read)
    if text is None:
        return (checks.ok(f"{path}: no change is in progress"),)
    try:
        journal = status.Journal.from_json(text)
    except ValueError as error:
        return (checks.fail(f"{path}: {error}"),)
    return (checks.warn(f"{path}: the change to layout {journal.config!r} has not finished"),)


def _waiting(gpu: model.Gpu) -> checks.Found:
    current, pending = gpu.current_mode, gpu.pending_mode
    assert current  # noqa: S101 - a GPU without MIG waits for no mode
    assert pending  # noqa: S101 - as above
    text = f"GPU {gpu.index}: MIG {current.value}, to be {pending.value} after a reset"
    if gpu.virtualization is model.Virtualization.PASSTHROUGH:
        return checks.warn(text, "Reboot the virtual machine: it cannot reset the GPU.")
    return checks.warn(
        text, f"Run 'nvidia-smi --gpu-reset -i {gpu.index}' once it is idle, or reboot."
    )


def _mode(gpu: model.Gpu) -> str:
    if gpu.current_mode is None:
        return f"{gpu.name}, no MIG"
    effect = "resets the GPU" if gpu.mode_change_needs_reset else "needs no reset"
    text = f"{gpu.name}, MIG {gpu.current_mode.value}, a change of mode {effect}"
    if gpu.profiles is None:
        text += ", profiles are known only with MIG enabled (and with the right)"
    return text


def _is_own(gpu: model.Gpu) -> bool:
    """Return whether this machine alone decides about the GPU's MIG mode."""
    match gpu.virtualization:
        case model.Virtualization.NONE | model.Virtualization.HOST:
            return True
        case model.Virtualization.PASSTHROUGH:
            return not gpu.mode_change_needs_reset
        case model.Virtualization.VGPU:
            return False


def _belonging(gpu: model.Gpu) -> str:
    match gpu.virtualization:
        case model.Virtualization.PASSTHROUGH:
            return "passed through; a change of MIG mode needs no reset"
        case model.Virtualization.HOST:
            return "shared by this host with its virtual machines"
        case model.Virtualization.NONE | model.Virtualization.VGPU:
            return "not virtual, according to the driver"


def _grouped(gpus: Iterable[model.Gpu], describe: Callable[[model.Gpu], str]) -> list[str]:
    """Describe GPUs, those with the same description together."""
    groups: dict[str, list[model.Gpu]] = collections.defaultdict(list)
    for gpu in gpus:
        groups[describe(gpu)].append(gpu)
    return [f"GPU {picture.indices(group)}: {text}" for text, group in groups.items()]


def _read(read: Callable[[], str | None]) -> str | None:
    try:
        return read()
    except errors.ConfigError as error:
        if isinstance(error.__cause__, PermissionError):
            raise checks.NotAskedError(error.message) from error
        raise


def _proc(facts: checks.Facts) -> pathlib.Path:
    if facts.settings.proc is None:
        raise checks.NotAskedError("the GPUs are simulated")
    return facts.settings.proc


CHECKS = (
    checks.Check(
        "driver",
        "NVML's library is found, loads, and reaches the driver.",
        "Load the NVIDIA driver, or say where its library is (--library-path, --driver-root).",
        lambda facts: driver(facts.inspection),
    ),
    checks.Check(
        "gpus",
        "Every GPU answers; at least one supports MIG; no change of MIG mode is pending.",
        "Reset the GPU named, or reboot the node; or request a layout with the current MIG mode.",
        lambda facts: gpu_modes(facts.gpus),
    ),
    checks.Check(
        "virtualization",
        "The GPUs are not those of a virtual machine that cannot change their MIG mode.",
        "Change the MIG mode on the host of the virtual machine.",
        lambda facts: virtualization(facts.gpus),
    ),
    checks.Check(
        "instances",
        "No GPU instance is without a compute instance.",
        "Apply a layout ('mig-manager apply'): it removes unusable instances.",
        lambda facts: instances(facts.gpus),
    ),
    checks.Check(
        "gpu-processes",
        "No process uses a GPU that waits for a reset; lists the processes of each GPU.",
        "Stop the process named; a GPU in use cannot be reset.",
        lambda facts: gpu_processes(facts.gpus, facts.inspection),
    ),
    checks.Check(
        "privileges",
        "This user may do what a change of the GPUs needs.",
        "Run as root, with the capabilities SYS_ADMIN and MKNOD.",
        lambda facts: privileges(_proc(facts), facts.settings.dev),
    ),
    checks.Check(
        "mig-config-right",
        "The driver lets this process change MIG instances.",
        "Run as root, or have the container toolkit give NVIDIA_MIG_CONFIG_DEVICES=all.",
        lambda facts: mig_config_right(_proc(facts), facts.settings.dev),
    ),
    checks.Check(
        "kernel-modules",
        "The driver's modules are loaded, and none in use can delay a reset.",
        "Stop users of nvidia_drm (a display server) or the persistence daemon for the change.",
        lambda facts: kernel_modules(_proc(facts), facts.gpus),
    ),
    checks.Check(
        "lock",
        "No other MIG manager is changing this node.",
        "Wait for the other manager to finish, or stop it.",
        lambda facts: lock(facts.settings.lock_file),
    ),
    checks.Check(
        "config-file",
        "The layout file is valid and has layouts.",
        "Correct the file at the place named.",
        lambda facts: config_file(
            facts.settings.config_file, is_lenient=facts.settings.is_lenient
        ),
    ),
    checks.Check(
        "verified-layout",
        "The layout kept for the next boot can be read.",
        "Remove the file; the next 'apply' that succeeds writes it again.",
        lambda facts: verified_layout(facts.settings.verified_layout_file),
    ),
    checks.Check(
        "journal-file",
        "No 'apply' was interrupted.",
        "Run 'mig-manager apply' or 'mig-manager boot': it first resumes or rolls back.",
        lambda facts: journal_file(facts.settings.journal_file),
    ),
)
"""In the order of the report."""
