"""``mig-manager apply``."""

import dataclasses

from mig_manager import errors
from mig_manager.cli import gpu_settings
from mig_manager.cli.commands import plan
from mig_manager.cli.toolkit import console
from mig_manager.core.settings import options

ABOUT = """
Instances that are also in the layout keep their UUIDs and their processes. The change
is planned before any GPU is touched, verified at the end, and rolled back if it fails.
If the layout is already active, nothing is changed.

Instances that 'apply' destroys must not be in use; it destroys idle ones where it can
choose. If a process uses one, or kubelet lists it for a pod, 'apply' names them and fails
before any change; --wait-for-idle waits for them first. On a cluster node use the agent,
which drains first. If kubelet has started and gives no answer within 5 s, 'apply' fails, too.

$ mig-manager apply all-1g.5gb
A built-in layout.

$ mig-manager apply -f layouts.yaml -c night
Your own layout, in nvidia-mig-parted's spelling.

$ generate-layout | mig-manager apply -f -
The only layout of a file on standard input.

$ mig-manager apply all-1g.5gb -k hooks.yaml
With your own programs around the change: docs/hooks.md.

$ mig-manager apply all-balanced --mode-only --skip-reset
Only MIG mode; a later reset or reboot completes it where the driver does not reset the GPU itself.

exit 1: not applied; the message gives the reason and the present state of the GPUs

exit 2: wrong usage, or a file that cannot be read or used; nothing was changed
"""


class Settings(
    gpu_settings.GpuSettings,
    takes=(
        *gpu_settings.LAYOUT,
        "mode-only",
        "skip-reset",
        "dry-run",
        "hooks-file",
        "lenient",
        "hook-timeout-s",
        "wait-for-idle",
        *gpu_settings.PODS,
        *gpu_settings.CHANGE,
        *gpu_settings.ON_GPUS,
        "output-format",
    ),
):
    """Settings of ``apply``."""

    is_reset_skipped: bool = options.switch(
        "do not reset GPUs: a MIG mode change stays pending where the driver does not reset the "
        "GPU itself; with --mode-only this is no failure",
        name="skip-reset",
        short="s",
        variable="MIG_PARTED_SKIP_RESET",
    )
    is_dry_run: bool = options.switch(
        "show what would change, like 'plan', and change nothing", name="dry-run"
    )


def run(settings: Settings, terminal: console.Console) -> int:
    """Apply a layout, or show what would change."""
    from mig_manager.adapters.host import process
    from mig_manager.change import applying
    from mig_manager.cli import gpu_command
    from mig_manager.core.records import gpu_recovery

    if settings.is_dry_run:
        if settings.is_reset_skipped:
            raise errors.UsageError("--dry-run shows no effect of --skip-reset; give one")
        return plan.run(settings, terminal)
    command = gpu_command.GpuCommand(settings, terminal)
    dependencies = command.dependencies(
        {
            "MIG_PARTED_CONFIG_FILE": settings.config_file or str(process.packaged_config()),
            "MIG_PARTED_SKIP_RESET": str(settings.is_reset_skipped).lower(),
        }
    )
    result = applying.apply(
        dataclasses.replace(dependencies, may_reset=not settings.is_reset_skipped),
        command.layout,
        is_mode_only=settings.is_mode_only,
    )
    status = command.answer(result.to_data, lambda: "MIG configuration applied successfully")
    command.warn(result.lenient_warnings)
    command.warn_unreachable(result.gpus.unreachable, "the layout is not active on it")
    command.warn(gpu_recovery.faults(result.gpus))
    command.note_changes(result.executed, result.gpus)
    if not result.is_changed:
        terminal.note(f"layout '{result.layout}' is already active")
    return status
