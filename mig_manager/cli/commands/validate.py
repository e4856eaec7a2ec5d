"""``mig-manager validate``."""

import functools
from collections.abc import Sequence

from mig_manager import errors
from mig_manager.cli import gpu_settings
from mig_manager.cli.toolkit import command_settings, console
from mig_manager.core.settings import options

ABOUT = """
$ mig-manager validate -f layouts.yaml --gpu 'NVIDIA H100 80GB HBM3'
In a pipeline without a GPU.

$ mig-manager validate -f layouts.yaml --gpu '*A100*' --gpu A30 -o json
For several products, as JSON.

$ mig-manager validate all-balanced
For the GPUs of this machine.

exit 1: a layout does not fit a GPU that it selects
"""


class Settings(
    gpu_settings.GpuSettings,
    takes=(
        "layout",
        "config-file",
        "gpu",
        "must-fit",
        "portable",
        "files",
        "lenient",
        *gpu_settings.ON_GPUS,
        "output-format",
    ),
):
    """Settings of ``validate``."""

    layouts: tuple[str, ...] = options.declare_from(
        (
            options.Option(
                name="layout",
                help="layouts to check (default: all in the file)",
                metavar=options.LAYOUT,
                is_operand=True,
                has_variable=False,
                is_repeatable=True,
            ),
        )
    )
    must_fit: bool = options.declare(command_settings.MUST_FIT)
    is_portable: bool = options.switch(
        "fail if nvidia-mig-parted does not understand the file, and show where; checks only GPUs "
        "named with --gpu",
        name="portable",
    )
    has_files: bool = options.switch(
        "the operands are layout files, not layouts, as pre-commit passes them", name="files"
    )


def run(settings: Settings, terminal: console.Console) -> int:
    """Check layouts of one file, or with ``--files`` all layouts of several."""
    from mig_manager.catalogue import hardware
    from mig_manager.cli import gpu_command
    from mig_manager.cli.toolkit import layout_files, validation
    from mig_manager.core.layout import layout_fit

    command = gpu_command.GpuCommand(settings, terminal)
    templates = functools.cache(lambda: hardware.templates(settings.products, warn=terminal.note))

    def validate_file(file: str | None, names: Sequence[str]) -> validation.ValidatedFile:
        """Compare layouts with the named products, or else with this machine's GPUs."""
        document = command.read(file)
        for diagnostic in (*document.warnings, *validation.unknown_names(document)):
            terminal.note(f"warning: {diagnostic}")
        with layout_files.explaining_names(names):
            selected = document.select(names)
        # Named layouts must fit these GPUs; the others may be for other known products.
        others = None if names or settings.must_fit else hardware.known_gpus
        source = document.source
        fits = None
        if settings.products:
            fits = layout_fit.against_products(
                selected, source=source, templates=templates(), others=others
            )
        elif not settings.is_portable:
            fits = layout_fit.against_node(
                selected, source=source, gpus=command.observed, others=others
            )
        return validation.ValidatedFile(
            document=document, fits=fits, checks_portability=settings.is_portable
        )

    if not settings.has_files:
        result = validate_file(settings.config_file, settings.layouts)
        return command.answer(
            result.to_data, lambda: result.text(command.style), is_good=result.is_good
        )
    if not settings.layouts:
        raise errors.UsageError("--files: name the layout files to check")
    results: list[validation.ValidatedFile | validation.InvalidFile] = []
    for file in settings.layouts:
        try:
            results.append(validate_file(file, ()))
        except errors.ConfigError as error:
            terminal.note_error(error, str(error.remedy_at_shell))
            results.append(validation.InvalidFile(source=file, error=error))
    is_good = all(each.is_good for each in results)
    status = command.answer(
        lambda: {
            "kind": "Validations",
            "is_valid": is_good,
            "files": [each.to_data() for each in results],
        },
        lambda: validation.files_text(results, command.style),
        is_good=is_good,
    )
    is_invalid = any(isinstance(each, validation.InvalidFile) for each in results)
    return console.UNUSABLE if is_invalid else status
