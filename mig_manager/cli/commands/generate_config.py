"""``mig-manager generate-config``."""

import pathlib

from mig_manager.cli import gpu_settings
from mig_manager.cli.toolkit import command_settings, console
from mig_manager.core.settings import node_settings, options

ABOUT = """
These are all-disabled, all-enabled, all-balanced (small, medium and large instances
that use every slice), and all-PROFILE for every profile, with as many as fit. A '+' in a
profile becomes a '.' in the name, as Kubernetes labels require.

--all-maximal adds every maximal mixed layout: no further instance fits. Names list the
instances, such as max-3g.20gb_4x1g.5gb, and are the same on every run.

$ mig-manager generate-config -f /etc/mig-manager/config.yaml
For the GPUs of this machine.

$ mig-manager generate-config --gpu H100-SXM5-80GB --gpu A30
For a cluster with these products; needs no GPU.

$ mig-manager generate-config --gpu A100-SXM4-40GB --all-maximal
With every maximal mixed layout.
"""


class Settings(
    gpu_settings.GpuSettings,
    takes=("output-file", "all-maximal", "gpu", *gpu_settings.ON_GPUS, "output-format"),
):
    """Settings of ``generate-config``."""

    output_file: pathlib.Path | None = options.path(
        "file to write atomically",
        short="f",
        variable="MIG_PARTED_OUTPUT_FILE",
        default_text="standard output",
    )
    has_all_maximal: bool = options.switch("add every maximal mixed layout", name="all-maximal")
    output_format: node_settings.OutputFormat = command_settings.output_format(
        "yaml", "json", variable="MIG_PARTED_OUTPUT_FORMAT"
    )


def run(settings: Settings, terminal: console.Console) -> int:
    """Write a layout file with the layouts that GPUs support."""
    from mig_manager.adapters.host import files
    from mig_manager.catalogue import hardware
    from mig_manager.cli import gpu_command
    from mig_manager.core.layout import generator, layout_documents

    command = gpu_command.GpuCommand(settings, terminal)
    if settings.products:
        kinds = hardware.kinds(settings.products, warn=terminal.note)
    else:
        kinds = generator.kinds_of(command.observed)
    generated = generator.layouts_of(kinds, has_all_maximal=settings.has_all_maximal)
    text = console.render(layout_documents.render(generated.values()), settings.output_format)
    if settings.output_file is None or settings.output_file == console.STANDARD_OUTPUT:
        terminal.say(text)
    else:
        files.write_output(settings.output_file, text)
    return console.DONE
