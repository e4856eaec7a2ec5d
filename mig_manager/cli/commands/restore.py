"""``mig-manager restore``."""

from mig_manager.cli import gpu_settings
from mig_manager.cli.toolkit import console

ABOUT = """
GPUs are matched by UUID and get the same instances with the same placements. Instances
that match stay, and GPUs missing from the checkpoint are not touched. As with 'apply',
the change is checked first, verified, and rolled back if it fails. Devices in use by
processes or pods are not destroyed.

$ mig-manager restore -f /var/lib/mig-manager/monday.json
From a checkpoint by mig-manager or nvidia-mig-parted.

$ mig-manager restore -f monday.json --mode-only
Only MIG mode.

exit 1: not restored; the message gives the reason and the present state of the GPUs

exit 2: wrong usage, or a checkpoint of other GPUs; nothing was changed
"""


class Settings(
    gpu_settings.GpuSettings,
    takes=(
        "mode-only",
        "checkpoint-file",
        "hooks-file",
        "hook-timeout-s",
        "wait-for-idle",
        *gpu_settings.PODS,
        *gpu_settings.CHANGE,
        *gpu_settings.ON_GPUS,
        "output-format",
    ),
):
    """Settings of ``restore``."""


def run(settings: Settings, terminal: console.Console) -> int:
    """Restore the instances of a checkpoint."""
    from mig_manager.adapters.host import files
    from mig_manager.change import applying
    from mig_manager.cli import gpu_command

    command = gpu_command.GpuCommand(settings, terminal)
    file = command.checkpoint_file()
    source = files.SourceFile(file)
    dependencies = command.dependencies({"MIG_PARTED_CHECKPOINT_FILE": file})
    result = applying.restore(dependencies, source, is_mode_only=settings.is_mode_only)
    status = command.answer(result.to_data, lambda: "MIG configuration restored successfully")
    command.warn_unreachable(result.gpus.unreachable, "nothing was restored on it")
    command.note_changes(result.executed)
    if not result.is_changed:
        terminal.note(f"{source.name} is already active; nothing to do")
    return status
