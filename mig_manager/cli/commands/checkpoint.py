"""``mig-manager checkpoint``."""

import pathlib

from mig_manager.cli.commands import gpu_settings
from mig_manager.cli.toolkit import console

ABOUT = """
The file lists every MIG-capable GPU by UUID, with its mode, its instances and their
placements, in nvidia-mig-parted's format.

$ mig-manager checkpoint -f /var/lib/mig-manager/monday.json
Replaces the file atomically.
"""


class Settings(gpu_settings.GpuSettings, takes=f"checkpoint-file {gpu_settings.ON_GPUS}"):
    """Settings of ``checkpoint``."""


def run(chosen: Settings, terminal: console.Console) -> int:
    """Write the GPUs' instances to a file."""
    from mig_manager.adapters.host import files
    from mig_manager.cli.commands import gpus
    from mig_manager.core import checkpoint

    here = gpus.GpuCommand(chosen, terminal)
    file, observed = here.checkpoint_file(), here.observed
    files.write_output(pathlib.Path(file), checkpoint.render(observed))
    here.warn_unreachable(observed.unreachable, "it is not in the checkpoint")
    terminal.say("MIG configuration checkpointed successfully")
    return console.DONE
