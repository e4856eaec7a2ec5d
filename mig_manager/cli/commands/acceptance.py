"""``mig-manager acceptance``."""

import pathlib

from mig_manager.cli import gpu_settings
from mig_manager.cli.toolkit import console
from mig_manager.core.display import styles
from mig_manager.core.settings import node_settings, options

ABOUT = """
It calls the NVML functions that mig-manager uses and changes nothing on a GPU. It compares
the answers with the product in the catalogue and with the simulated driver, and names
every difference and its consequence. The file has no UUID, serial number, PCI address or
host name: attach it to a report.

--change-gpu also runs a course of changes on one idle GPU: every profile at every
placement, full layouts, an instance in use through CUDA, one of another program, a reset
by nvidia-smi, and a killed worker. It asks first, and restores the GPU at the end. After
a kill the next 'apply' or 'restore' does.

$ mig-manager acceptance
As root, on a machine with GPUs.

$ mig-manager acceptance --simulate 8xA100-SXM4-40GB
See what it does without a GPU.

$ mig-manager acceptance --change-gpu GPU-a8af8a77-5ba8-f7ca-b4f2-d97e0c1c3d4f
With the course on this GPU.

exit 0: no difference

exit 1: the GPUs differ, or could not be observed
"""
_FILE = pathlib.Path("mig-manager-acceptance.json")


class Settings(
    gpu_settings.GpuSettings,
    takes=(
        "output-file",
        "as-catalogue-row",
        "change-gpu",
        "yes",
        *gpu_settings.PODS,
        *gpu_settings.CHANGE,
        "gpu-timeout-s",
        *gpu_settings.GPUS,
        "color",
        "debug",
    ),
):
    """Settings of ``acceptance``."""

    answer_file: pathlib.Path | None = options.path(
        "file to write, '-' for standard output",
        name="output-file",
        default_text="mig-manager-acceptance.json in this folder",
        has_variable=False,
    )
    row_source: pathlib.Path | None = options.path(
        "only print the catalogue's rows for the GPUs of such a FILE, for a review",
        name="as-catalogue-row",
        has_variable=False,
    )
    changed_gpu: str | None = options.text(
        "also run a course of changes on this idle GPU, and restore it",
        name="change-gpu",
        metavar="UUID",
        has_variable=False,
        group=options.CHANGE,
    )
    is_confirmed: bool = options.switch(
        "do not ask before the course", name="yes", has_variable=False, group=options.CHANGE
    )


def run(settings: Settings, terminal: console.Console) -> int:
    """Survey the GPUs, write the file, and summarize it; 1 if there are differences.

    Raises:
        HardwareError: The driver does not answer.
        UsageError: The file cannot be written.
        MigManagerError: As ``confirmed_course.run``.
    """
    from mig_manager.adapters.host import files
    from mig_manager.change import journal_file
    from mig_manager.cli import gpu_access
    from mig_manager.cli.acceptance import acceptance_report, confirmed_course

    terminal.configure_log(node_settings.LogLevel.ERROR, is_debug=settings.is_debug)
    if settings.row_source is not None:
        terminal.say(acceptance_report.catalogue_rows(settings.row_source))
        return console.DONE
    access = gpu_access.CommandAdapters(settings, terminal)
    deps = access.dependencies()
    survey = access.worker_gpus.survey()
    course = None
    if settings.changed_gpu is None:
        if interrupted := journal_file.what_follows(deps.journal):
            terminal.note(interrupted)
    else:
        asked_at = None if settings.is_confirmed else terminal
        course = confirmed_course.run(settings.changed_gpu, survey, deps, access, asked_at)
    answer = acceptance_report.report(
        survey,
        course,
        is_simulated=settings.gpus.is_simulated,
        timeout_s=settings.gpu_timeout_s,
    )
    text = console.render_answer(answer)
    if settings.answer_file == console.STANDARD_OUTPUT:
        terminal.say(text)
    else:
        path = settings.answer_file or _FILE
        files.write_output(path, text)
        summary = acceptance_report.summary(answer, path, terminal.style(settings.colour))
        terminal.say(styles.harmless(summary))
    return console.FAILED if answer["differences"] else console.DONE
