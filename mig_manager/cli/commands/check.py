"""``mig-manager assert``: the word itself cannot name a module."""

from typing import Any

from mig_manager import errors, reasons
from mig_manager.cli import gpu_settings
from mig_manager.cli.toolkit import console
from mig_manager.core.settings import node_settings, options

ABOUT = """
GPUs that the layout does not select are ignored.

$ mig-manager assert all-1g.5gb || echo not yet
Modes and instances of all GPUs.

$ mig-manager assert all-enabled --mode-only
Only MIG mode.

$ mig-manager assert -f layouts.yaml -c night --valid-config
Only that the file is valid and has the layout; needs neither GPU nor driver.

exit 0: active

exit 1: not active, or the GPUs could not be read
"""


class Settings(
    gpu_settings.GpuSettings,
    takes=(
        *gpu_settings.LAYOUT,
        "mode-only",
        "valid-config",
        "lenient",
        *gpu_settings.ON_GPUS,
        "output-format",
    ),
):
    """Settings of ``assert``."""

    is_valid_config_only: bool = options.switch(
        "only check that the file is valid and has the layout",
        name="valid-config",
        short="a",
        variable="MIG_PARTED_VALID_CONFIG",
    )

    @classmethod
    def values(cls, source: options.Source) -> dict[str, Any]:
        """Return the values of all fields."""
        values = super().values(source)
        if values["is_valid_config_only"]:
            is_text = values["output_format"] is node_settings.OutputFormat.TEXT
            # A variable sets the format of the commands that have a choice.
            if source.parsed.get("output_format") and not is_text:
                raise errors.UsageError(
                    "--valid-config answers with text",
                    remedy=reasons.CommandRemedy("{} has data.", "validate"),
                )
        return values


def run(settings: Settings, terminal: console.Console) -> int:
    """Compare the GPUs with a layout; 1 if they differ."""
    from mig_manager.cli import gpu_command
    from mig_manager.cli.toolkit import gpu_text
    from mig_manager.core.layout import plans

    command = gpu_command.GpuCommand(settings, terminal)
    layout = command.layout()
    if settings.is_valid_config_only:
        terminal.say("Selected MIG configuration is valid")
        return console.DONE
    result = plans.plan(command.observe(), layout, is_mode_only=settings.is_mode_only)
    command.warn(result.lenient_warnings)
    command.warn_unreachable(result.gpus.unreachable, "it was not compared")
    command.note_interrupted(result)
    if result.is_applied:
        kind = "mode settings from configuration" if settings.is_mode_only else "configuration"
        return command.answer(result.to_data, lambda: f"Selected MIG {kind} currently applied")
    if settings.output_format is not node_settings.OutputFormat.TEXT:
        command.answer(result.to_data, lambda: "")
    terminal.note(
        f"layout '{layout.name}' is not applied: {gpu_text.difference(result)}",
        remedy="'plan' in place of 'assert' shows all differences, 'apply' removes them.",
    )
    return console.FAILED
