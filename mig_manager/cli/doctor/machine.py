"""The checks of ``doctor`` on the machine: driver, GPUs, privileges and files."""

import collections
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from mig_manager import errors, reasons
from mig_manager.adapters.host import device_users, files, lock_file, procfs
from mig_manager.cli.doctor.doctor_facts import Check, Facts, SkippedError, adding_to
from mig_manager.cli.doctor.doctor_report import (
    Finding,
    fail,
    ok,
    persistence_off,
    skipped,
    warn,
)
from mig_manager.core import model
from mig_manager.core.display import picture
from mig_manager.core.layout import layout_parser
from mig_manager.core.records import gpu_recovery, journals, verified_layouts

_OLDEST_DRIVER = 450
"""The first branch with MIG (NVIDIA MIG User Guide, "Deployment Considerations")."""
_DAEMON = "nvidia-persiste"  # the persistence daemon's name as the kernel cuts it
_OWN_GPUS = {
    model.Virtualization.NONE: "not virtual, according to the driver",
    model.Virtualization.PASSTHROUGH: "passed through; a MIG mode change needs no reset",
}
"""GPUs whose MIG mode only this machine controls."""
_Record = TypeVar("_Record")

CHECKS: list[Check] = []
_check = adding_to(CHECKS)


@_check("driver", str(reasons.Reason.DRIVER_NOT_LOADED.remedy_at_shell))
def _driver(facts: Facts) -> Iterator[Finding]:
    """NVML's library is found, loads, and reaches the driver."""
    try:
        inspection = facts.inspection.get()
    except errors.HardwareError as error:
        yield fail(error.message, str(error.reason.remedy_at_shell))
        return
    text = f"driver {inspection.driver_version}, NVML {inspection.nvml_version}"
    branch = inspection.driver_version.partition(".")[0]
    if branch.isdecimal() and int(branch) < _OLDEST_DRIVER:
        yield fail(f"{text}: too old for MIG", "Install a newer NVIDIA driver.")
    else:
        yield ok(text)


@_check(
    "gpus",
    "Reset this GPU, or reboot the node; or request a layout with the current MIG mode.",
)
def _gpus(facts: Facts) -> Iterator[Finding]:
    """Every GPU answers; at least one supports MIG; no change of MIG mode is pending."""
    # Where the check "driver" fails, once is enough.
    gpus = facts.gpus.get() if facts.inspection.if_known() else facts.gpus.require()
    if not any(gpu.is_mig_capable for gpu in gpus):
        what = "no GPU of this node supports MIG" if gpus else "this node has no NVIDIA GPU"
        yield fail(what, "Remove the node's label nvidia.com/mig.config.")
        return
    for lost in gpus.unreachable:
        yield fail(f"{lost}: unreachable: {lost.message}", gpu_recovery.remedy(lost))
    for gpu in gpus:
        if gpu.current_mode and gpu.pending_mode and gpu.has_pending_mode:
            modes = f"MIG {gpu.current_mode.value}, {gpu.pending_mode.value} after a reset"
            remedy = f"Run 'nvidia-smi --gpu-reset -i {gpu.index}' once it is idle, or reboot."
            if gpu.virtualization is model.Virtualization.PASSTHROUGH:
                remedy = "Reboot the virtual machine: it cannot reset the GPU."
            yield warn(f"GPU {gpu.index}: {modes}", remedy)
    yield from _describe_groups((gpu for gpu in gpus if not gpu.has_pending_mode), _mode)


def _mode(gpu: model.Gpu) -> str:
    if gpu.current_mode is None:
        return f"{gpu.name}, no MIG"
    effect = "resets the GPU" if gpu.mode_change_needs_reset else "needs no reset"
    unknown = ", profiles unknown until MIG is enabled (and without the right)"
    text = f"{gpu.name}, MIG {gpu.current_mode.value}, a mode change {effect}"
    return text if gpu.profiles is not None else text + unknown


@_check("gpu-recovery", "Follow NVIDIA's guide 'GPU Memory Error Management' for this GPU.")
def _gpu_recovery(facts: Facts) -> Iterator[Finding]:
    """No GPU has a fault that needs a recovery action, according to the driver."""
    gpus = facts.gpus.require()
    for gpu in gpus:
        if fault := gpu_recovery.fault(gpu):
            yield fail(fault, gpu_recovery.remedy(gpu))
    if not any(gpu.recovery_action for gpu in gpus):
        yield skipped("the driver reports no recovery actions")
    elif healthy := [gpu for gpu in gpus if gpu.recovery_action and not gpu.needs_recovery]:
        yield ok(f"GPU {picture.indices(healthy)}: no recovery action needed")


@_check("virtualization", "Change the MIG mode on the host of the virtual machine.")
def _virtualization(facts: Facts) -> Iterator[Finding]:
    """This machine controls every GPU's MIG mode, and shares no GPU with virtual machines."""
    gpus = facts.gpus.require()
    if not gpus:
        yield skipped("no GPU")
    bound = [
        gpu
        for gpu in gpus
        if gpu.virtualization in (model.Virtualization.VGPU, model.Virtualization.HOST)
        or (gpu.virtualization is model.Virtualization.PASSTHROUGH and gpu.mode_change_needs_reset)
    ]
    own_gpus = (gpu for gpu in gpus if gpu not in bound)
    yield from _describe_groups(own_gpus, lambda gpu: _OWN_GPUS[gpu.virtualization])
    for gpu in bound:
        if gpu.virtualization is model.Virtualization.VGPU:
            yield fail(f"GPU {gpu.index} is a vGPU: its host controls MIG")
        elif gpu.virtualization is model.Virtualization.HOST:
            yield warn(
                f"GPU {gpu.index} is shared with virtual machines (vGPU host): a reset or MIG "
                "mode change ends its virtual functions and vGPUs; the driver restores neither",
                "Stop the virtual machines before a change. Afterwards run 'sriov-manage -e "
                f"{gpu.pci_address[-12:]}' and create the vGPUs, for example in a hook.",
            )
        else:
            yield warn(
                f"GPU {gpu.index} is passed through to this virtual machine, which cannot "
                "reset it: a MIG mode change needs a reboot",
                "Enable MIG before a layout is requested, and reboot the virtual machine.",
            )


@_check("instances", "Apply a layout ('mig-manager apply'): it removes unusable instances.")
def _instances(facts: Facts) -> Iterator[Finding]:
    """Every GPU instance has a compute instance."""
    instances = [(gpu, gi) for gpu in facts.gpus.require() for gi in gpu.gpu_instances]
    unusable = [(gpu, gi) for gpu, gi in instances if not gi.compute_instances]
    for gpu, gi in unusable:
        yield warn(
            f"GPU {gpu.index}: GPU instance {gi.instance_id} ({gi.profile} at {gi.placement}) "
            "has no compute instance: it takes up space and is unusable"
        )
    if not unusable:
        yield ok(f"{len(instances)} GPU instances, each with a compute instance")


@_check("gpu-processes", "Stop this process; a GPU in use cannot be reset.")
def _gpu_processes(facts: Facts) -> Iterator[Finding]:
    """No process uses a GPU that waits for a reset; lists the processes of every GPU."""
    by_uuid = dict(facts.inspection.require().processes)
    listed = [gpu for gpu in facts.gpus.require() if gpu.uuid in by_uuid]
    if not listed:
        yield skipped("NVML lists no processes of any GPU")
    free = [gpu for gpu in listed if not by_uuid[gpu.uuid]]
    for gpu in listed:
        text = f"GPU {gpu.index}: {', '.join(map(str, by_uuid[gpu.uuid]))}"
        if gpu not in free and gpu.has_pending_mode:
            yield warn(f"{text}; the reset for the new MIG mode must wait")
        elif gpu not in free:
            yield ok(text)
    if free:
        yield ok(f"GPU {picture.indices(free)}: no process visible from here")


@_check("privileges", "Run as root, with the capabilities SYS_ADMIN and MKNOD.")
def _privileges(facts: Facts) -> Iterator[Finding]:
    """This user has the privileges to change the GPUs."""
    privileges = procfs.privileges(facts.proc)
    if privileges is None:
        raise SkippedError(f"{facts.proc}/self/status does not list capabilities")
    capabilities = {"SYS_ADMIN": privileges.has_sys_admin, "MKNOD": privileges.has_mknod}
    missing = [name for name, is_present in capabilities.items() if not is_present]
    who = f"user id {privileges.user_id}"
    is_root = privileges.user_id == 0
    # In a container's own /dev, NVIDIA's container toolkit makes the device nodes on the host.
    if is_root and missing == ["MKNOD"] and procfs.is_own_dev(facts.proc, facts.settings.dev):
        what = "the container toolkit makes the device nodes of instances"
        yield ok(f"{who}, with SYS_ADMIN; without MKNOD: {what}")
    elif not is_root or missing:
        without = f" without {' and '.join(missing)}" if missing else ""
        yield warn(f"{who}{without}: may read, but not change everything")
    else:
        yield ok(f"{who}, with SYS_ADMIN and MKNOD")


@_check(
    "mig-config-right",
    "Run as root, or have the container toolkit give NVIDIA_MIG_CONFIG_DEVICES=all.",
)
def _mig_config_right(facts: Facts) -> Iterator[Finding]:
    """The driver lets this process change MIG instances."""
    right = procfs.config_right(facts.proc, facts.settings.dev)
    privileges = procfs.privileges(facts.proc)
    if privileges is not None and privileges.has_sys_admin:
        note = f" ({right.path}: {right.why_not})" if right.path and right.why_not else ""
        yield ok(f"SYS_ADMIN is enough for the driver{note}")
    elif right.path is None:
        yield fail(f"no SYS_ADMIN, and {right.why_not}")
    elif right.why_not:
        yield fail(f"no SYS_ADMIN, and {right.path}: {right.why_not}")
    else:
        yield ok(f"{right.path} can be opened")


@_check(
    "kernel-modules",
    "For the change, unload nvidia_drm (stop its display server), and stop persistence daemons.",
)
def _kernel_modules(facts: Facts) -> Iterator[Finding]:
    """The driver's modules are loaded, and none in use can delay a reset."""
    loaded = procfs.modules(facts.proc)
    if loaded is None:
        raise SkippedError(f"{facts.proc}/modules cannot be read")
    if "nvidia" not in loaded:
        yield fail("the kernel module nvidia is not loaded", "Load the NVIDIA driver.")
        return
    names = [name for name in loaded if name == "nvidia" or name.startswith("nvidia_")]
    yield ok(f"loaded: {', '.join(sorted(names))}")
    if "nvidia_uvm" not in loaded:
        yield warn("nvidia_uvm is not loaded: CUDA needs it", "modprobe nvidia-uvm")
    drm_module = device_users.DRM_MODULE
    obstacles = [f"{drm_module} is loaded"] if drm_module in loaded else []
    daemons = [each for each in device_users.find_users(facts.proc) if each.name == _DAEMON]
    obstacles += [f"{each} keeps GPUs open" for each in daemons]
    if not obstacles:
        return
    what = "; ".join(obstacles)
    gpus = facts.gpus.if_known()
    if gpus is not None and not any(gpu.mode_change_needs_reset for gpu in gpus):
        yield ok(f"{what}; irrelevant, as no GPU here is reset for MIG")
    else:
        yield warn(f"{what}: may delay a reset")


@_check("lock", "Wait for the other manager to finish, or stop it.")
def _lock(facts: Facts) -> Iterator[Finding]:
    """No other MIG manager is changing this node."""
    path = facts.settings.lock_file
    try:
        manager = lock_file.manager(path)
    except OSError as error:
        yield warn(f"{path}: {error.strerror or error}")
    else:
        yield (
            _file(path, "free", is_replaced=False)
            if manager is None
            else warn(f"in use by {manager.description}")
        )


@_check("config-file", "Correct the file at this place.")
def _config_file(facts: Facts) -> Iterator[Finding]:
    """The layout file is valid and has layouts."""
    path = facts.settings.config_file
    file = files.SourceFile(path)
    is_lenient = facts.settings.is_lenient
    document = layout_parser.parse(file.read(), source=file.name, is_lenient=is_lenient)
    if document.warnings:
        first, *others = document.warnings
        more = f"; and {len(others)} more" if others else ""
        yield warn(f"{first}{more}")
    elif not document.layouts:
        yield warn(f"{path} has no layouts", "Add layouts, or name another file.")
    else:
        yield ok(f"{path}: {len(document.layouts)} layouts")


@_check("verified-layout", "Remove the file; the next 'apply' that succeeds writes it again.")
def _verified_layout(facts: Facts) -> Iterator[Finding]:
    """The layout saved for the next boot is readable."""
    path = facts.settings.verified_layout_file
    layout = _record(
        path, files.VerifiedLayoutFile(path).read, verified_layouts.VerifiedLayout.from_json
    )
    if layout is None:
        yield _file(path, "no layout saved for the next boot")
    else:
        yield _file(path, f"layout {layout.layout!r} of {len(layout.snapshots)} GPUs")


@_check(
    "journal-file",
    "Check the GPUs' layout: the next 'apply' or 'boot' renames the file and ignores it.",
)
def _journal_file(facts: Facts) -> Iterator[Finding]:
    """No 'apply' was interrupted."""
    path = facts.settings.journal_file
    journal = _record(path, files.JournalFile(path).read, journals.Journal.from_json)
    if journal is None:
        yield _file(path, "no change is in progress")
    elif journal.remainder is journals.Remainder.PERSISTENCE:
        yield persistence_off(journal.gpus.persistent_gpus)
    else:
        yield warn(
            f"{path}: the change to layout {journal.layout!r} has not finished",
            "Run 'mig-manager apply' or 'mig-manager boot': it first resumes or rolls back.",
        )


def _file(path: pathlib.Path, content: str, *, is_replaced: bool = True) -> Finding:
    """Return the finding about a file that 'apply' replaces in its folder, or else opens."""
    candidates = (path, *path.parents)[is_replaced:]
    existing = next(each for each in candidates if os.access(each, os.F_OK))
    if os.access(existing, os.W_OK):
        return ok(f"{path}: {content}")
    return warn(f"{path}: {content}; user id {os.geteuid()} may not write it", "Run as root.")


def _record(
    path: pathlib.Path, read: Callable[[], str | None], parse: Callable[[str], _Record]
) -> _Record | None:
    try:
        text = read()
        return None if text is None else parse(text)
    except errors.ConfigError as error:
        if isinstance(error.__cause__, PermissionError):
            raise SkippedError(error.message) from error
        raise
    except ValueError as error:
        raise errors.ConfigError(f"{path}: {error}") from error


def _describe_groups(
    gpus: Iterable[model.Gpu], describe: Callable[[model.Gpu], str]
) -> Iterator[Finding]:
    """Describe GPUs, grouped by description."""
    groups: dict[str, list[model.Gpu]] = collections.defaultdict(list)
    for gpu in gpus:
        groups[describe(gpu)].append(gpu)
    for text, group in groups.items():
        yield ok(f"GPU {picture.indices(group)}: {text}")
