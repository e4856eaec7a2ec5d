"""``mig-manager export``."""

from mig_manager.cli import gpu_settings
from mig_manager.cli.toolkit import command_settings, console
from mig_manager.core.settings import node_settings, options

ABOUT = """
The file has one layout, which 'apply' and nvidia-mig-parted accept. Identical GPUs
share a rule; rules have a device filter only if they need one.

$ mig-manager export > now.yaml
As YAML, named 'current'.

$ mig-manager export -l monday -o json
As JSON, under another name.
"""


class Settings(
    gpu_settings.GpuSettings,
    takes=("config-label", "placements", *gpu_settings.ON_GPUS, "output-format"),
):
    """Settings of ``export``."""

    config_label: str = options.text(
        "name of the exported layout",
        short="l",
        variable="MIG_PARTED_CONFIG_LABEL",
        default="current",
    )
    has_placements: bool = options.switch(
        "write each instance's placement, as in 1g.5gb@4, which nvidia-mig-parted cannot read",
        name="placements",
    )
    output_format: node_settings.OutputFormat = command_settings.output_format(
        "yaml", "json", variable="MIG_PARTED_OUTPUT_FORMAT"
    )


def run(settings: Settings, terminal: console.Console) -> int:
    """Write the GPUs' state as a layout file."""
    from mig_manager.cli import gpu_command
    from mig_manager.core.layout import layout_documents, layouts

    command = gpu_command.GpuCommand(settings, terminal)
    command.warn_half_changed()
    observed = command.observed
    layout = layouts.export(
        observed,
        name=settings.config_label,
        has_placements=settings.has_placements,
        is_complete=not observed.unreachable,
    )
    command.warn_unreachable(observed.unreachable, "it is not in the file")
    terminal.say(console.render(layout_documents.render([layout]), settings.output_format))
    return console.DONE
