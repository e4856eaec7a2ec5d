"""``mig-manager boot``."""

from typing import TYPE_CHECKING, Any

from mig_manager.cli import gpu_settings
from mig_manager.cli.toolkit import console
from mig_manager.core.settings import node_settings, options

if TYPE_CHECKING:
    from mig_manager.change import boot

ABOUT = """
MIG instances do not survive a reboot. This waits for the driver, then creates the same
instances with the same placements. The unit mig-manager-boot.service runs it.

--selected-config and --config-file count only on a machine without a verified layout.
CONFIG_FILE is not read, and no hooks run. If kubelet has started already, GPUs stay as
they are where a pod has a device that must go.

$ mig-manager boot
Restores the last verified layout, if there is one.

$ mig-manager boot -c all-balanced
The same, or all-balanced on a node without a verified layout.

$ mig-manager boot --repair reset
The same, and first resets a GPU with a fault that a reset ends.

exit 1: not restored; the message gives the reason

exit 2: wrong usage, or a file that cannot be read or used; nothing was changed
"""


class Settings(
    gpu_settings.GpuSettings,
    takes=(
        "selected-config",
        "config-file",
        "hooks-file",
        "driver-timeout-s",
        "repair",
        "lenient",
        *gpu_settings.PODS,
        *gpu_settings.CHANGE,
        *gpu_settings.ON_GPUS,
        "output-format",
    ),
):
    """Settings of ``boot``."""

    driver_timeout_s: float = options.seconds(
        "how long to wait for the driver to be loaded", default=120.0
    )
    repair: node_settings.RepairPolicy = options.declare(node_settings.REPAIR)

    @classmethod
    def values(cls, source: options.Source) -> dict[str, Any]:
        """Return the values of all fields.

        A boot must not depend on another program's variable, and no person can run it again.
        """
        values = super().values(source)
        values["idle_timeout_s"] = values["in_use_timeout_s"]
        config_file = source.field(cls, "config_file")
        return values | {"config_file": config_file, "pods_layouts": None}


def run(settings: Settings, terminal: console.Console) -> int:
    """Restore the last verified layout, or the named one on a node without."""
    from mig_manager.adapters.host import line_writer
    from mig_manager.change import boot
    from mig_manager.cli import gpu_command

    command = gpu_command.GpuCommand(settings, terminal)
    if settings.hooks_file:
        terminal.note(f"{settings.hooks_file} is ignored: boot runs no hooks")
    result = boot.boot(
        command.dependencies(),
        command.layout if settings.layouts or settings.config_file else None,
        driver_timeout_s=settings.driver_timeout_s,
        resets_faulty=settings.repair is node_settings.RepairPolicy.RESET,
    )
    status = command.answer(result.to_data, lambda: _summary(result), is_good=not result.problems)
    command.note_changes(result.executed)
    if settings.repair is not node_settings.RepairPolicy.OFF:
        command.warn(result.faults)
    for problem in result.problems:
        terminal.note(problem.message, remedy=problem.remedy, priority=line_writer.Priority.ERROR)
    return status


def _summary(result: "boot.Restored") -> str:
    """Return what became of the layout, in a sentence."""
    if not result.layout:
        return "No layout is saved for the boot: nothing to do."
    is_partial = result.problems and not result.is_fallback
    if not result.executed and is_partial:
        return f"Layout {result.layout} is not restored on every GPU."
    if not result.executed:
        return f"Layout {result.layout} is already active: nothing to do."
    if result.is_fallback:
        return f"No valid layout was saved: layout {result.layout} is applied."
    return f"Layout {result.layout} is restored{' in part' if is_partial else ''}."
