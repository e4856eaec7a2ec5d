"""``mig-manager checkpoint``."""

import pathlib

from mig_manager.cli import gpu_settings
from mig_manager.cli.toolkit import console

ABOUT = """
The file lists every MIG-capable GPU by UUID, with its mode, its instances and their
placements, in nvidia-mig-parted's format.

$ mig-manager checkpoint -f /var/lib/mig-manager/monday.json
Replaces the file atomically.
"""


class Settings(gpu_settings.GpuSettings, takes=("checkpoint-file", *gpu_settings.ON_GPUS)):
    """Settings of ``checkpoint``."""


def run(settings: Settings, terminal: console.Console) -> int:
    """Write the GPUs' instances to a file."""
    from mig_manager.adapters.host import files
    from mig_manager.cli import gpu_command
    from mig_manager.core.files import checkpoint

    command = gpu_command.GpuCommand(settings, terminal)
    command.warn_half_changed()
    file = command.checkpoint_file()
    observed = command.observed
    files.write_output(pathlib.Path(file), checkpoint.render(observed))
    command.warn_unreachable(observed.unreachable, "it is not in the checkpoint")
    terminal.say("MIG configuration checkpointed successfully")
    return console.DONE
