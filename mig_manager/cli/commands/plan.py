"""``mig-manager plan``."""

from mig_manager import errors
from mig_manager.cli import gpu_settings
from mig_manager.cli.toolkit import command_settings, console
from mig_manager.core.settings import node_settings

ABOUT = """
The plan names the instances to destroy, to create and to keep, the GPUs to reset, and the
MIG devices that must be idle. It says so if 'apply' would refuse because of pods.

$ mig-manager plan all-balanced
With a built-in layout.

$ mig-manager plan -f layouts.yaml night -o wide
With your own layout, and every step; the placement 4:2 begins at memory slice 4 and has 2.

exit 1: does not fit, or failed
"""


class Settings(
    gpu_settings.GpuSettings,
    takes=(
        *gpu_settings.LAYOUT,
        "pod-resources-socket",
        "lenient",
        *gpu_settings.ON_GPUS,
        "output-format",
    ),
):
    """Settings of ``plan``."""

    output_format: node_settings.OutputFormat = command_settings.output_format(
        "text", "wide", "json", "yaml", default_text="text; wide lists every instance"
    )


def run(settings: gpu_settings.GpuSettings, terminal: console.Console) -> int:
    """Show what a layout would change."""
    from mig_manager.cli import gpu_command
    from mig_manager.cli.toolkit import gpu_text
    from mig_manager.core.layout import plans

    command = gpu_command.GpuCommand(settings, terminal)
    layout = command.layout()
    observed = command.observe()
    result = plans.plan(
        observed,
        layout,
        is_mode_only=settings.is_mode_only,
        usage=command.pods.usage,
        processes=command.processes,
    )
    status = command.answer(
        result.to_data,
        lambda: gpu_text.plan(result, is_wide=command.is_wide, style=command.style),
    )
    command.warn(result.warnings)
    command.note_interrupted(result)
    try:
        command.pods.require_unused(result.affected, observed)
    except errors.GpuInUseError as error:
        terminal.note(f"'apply' would refuse: {error.message}", remedy=str(error.own_remedy))
    return status
