"""``apply`` and ``restore`` at a shell: lock, journal, change, then verified or rolled back.

The verified layout is saved for the next boot.
"""

import contextlib
import dataclasses
import functools
import hashlib
from collections.abc import Callable

from mig_manager import errors
from mig_manager.change import hook_points, journal_file, layout_change, shell
from mig_manager.core import gpu_processes, model, ports
from mig_manager.core.files import checkpoint
from mig_manager.core.layout import layouts, plans, selection
from mig_manager.core.planner import planner


def apply(
    deps: shell.ShellDependencies,
    resolve: Callable[[], layouts.Layout],
    *,
    is_mode_only: bool = False,
    is_locked: bool = False,
) -> plans.ApplyResult:
    """Apply a layout, and verify it.

    Rolls back an interrupted ``apply`` on idle GPUs outside this layout, on all GPUs if
    the layout does not fit. With ``is_mode_only`` GPUs in the right MIG mode keep their instances.
    Without the right to reset, a mode that needs a reset stays pending: a failure, unless only
    the mode counts. ``is_locked`` is whether the caller holds the node's lock.

    Raises:
        ConfigError: The layout or hooks file is invalid.
        HostError: A reset was refused, device files are not up to date, or a hook failed.
        GpuInUseError: Processes or pods use devices to be destroyed; nothing was changed.
        HardwareError: NVML refused or failed; RESET_REQUIRED or REBOOT_REQUIRED when the new mode
            is pending; VERIFY_FAILED when the layout is not active afterwards.
        LayoutError: The layout is unknown, or impossible on these GPUs.
        LockedError: Another manager had the lock until the deadline; nothing was changed.
        UsageError: Lock or journal cannot be written; nothing was changed.
    """
    # An invalid request fails before the GPUs are observed, and is no reason to undo anything.
    layout = resolve()
    variables = {"MIG_PARTED_SELECTED_CONFIG": layout.name}
    points = hook_points.HookPoints(deps.hooks, variables=variables)
    deps = _aware_of_hooks(deps, points)
    requested = layout_change.RequestedLayout(
        name=layout.name,
        content_hash=layout.content_hash,
        is_mode_only=is_mode_only,
        gpu_uuids=lambda gpus: frozenset(selection.select(layout, gpus)),
        plan=lambda gpus: plans.plan(
            gpus,
            layout,
            is_mode_only=is_mode_only,
            usage=deps.pods.usage,
            processes=lambda: _known_processes(deps),
        ),
        unrestored_snapshots=functools.partial(selection.unrestored_elsewhere, layout),
    )
    lock = (
        contextlib.nullcontext() if is_locked else deps.hold_lock(f"apply {requested.full_name}")
    )
    return _run(deps, requested, points, lock)


def restore(
    deps: shell.ShellDependencies,
    source: ports.TextSource,
    *,
    is_mode_only: bool = False,
) -> plans.ApplyResult:
    """Restore the instances in a checkpoint, and verify them.

    Existing instances of the checkpoint stay. GPUs outside it are not touched.

    Raises:
        CheckpointError: It is invalid, or for other GPUs; nothing was changed.
        MigManagerError: As ``apply``.
    """
    text = source.read()
    saved = checkpoint.parse(text, source=source.name)
    name = f"checkpoint {source.name}"

    def plan(gpus: model.ObservedGpus) -> plans.Planned:
        restored = planner.restore_checkpoint(saved, gpus, is_mode_only=is_mode_only)
        return plans.Planned(layout=name, gpus=gpus, desired={}, plan=restored, users={})

    requested = layout_change.RequestedLayout(
        name=name,
        content_hash=hashlib.sha256(text.encode(errors="replace")).hexdigest(),
        is_mode_only=is_mode_only,
        gpu_uuids=lambda _: frozenset(gpu.uuid for gpu in saved),
        plan=plan,
        # A checkpoint does not cover unreachable GPUs.
        unrestored_snapshots=model.ObservedGpus.unreachable_snapshots,
    )
    points = hook_points.HookPoints(deps.hooks)
    lock = deps.hold_lock(f"restore {requested.full_name}")
    return _run(_aware_of_hooks(deps, points), requested, points, lock)


def _aware_of_hooks(
    deps: shell.ShellDependencies, points: hook_points.HookPoints
) -> shell.ShellDependencies:
    """Accept kubelet's last answer once a hook has run, which may stop kubelet."""
    pods = dataclasses.replace(deps.pods, has_hook_run=lambda: points.has_run)
    return dataclasses.replace(deps, pods=pods)


def _known_processes(deps: shell.ShellDependencies) -> gpu_processes.Processes | None:
    """Return the processes that use each GPU; None if the driver refuses."""
    # What blocks the change is asked again when it begins.
    with contextlib.suppress(errors.HardwareError):
        return deps.processes()
    return None


def _run(
    deps: shell.ShellDependencies,
    requested: layout_change.RequestedLayout,
    points: hook_points.HookPoints,
    lock: contextlib.AbstractContextManager[None],
) -> plans.ApplyResult:
    points.load()
    with lock:
        observed = deps.observe_when_loaded()
        recorder = journal_file.open_recorder(deps, observed, layout=requested.full_name)
        change = layout_change.LayoutChange(
            deps=deps,
            requested=requested,
            points=points,
            recorder=recorder,
            interrupted=recorder.journal,
        )
        return change.run(observed)
