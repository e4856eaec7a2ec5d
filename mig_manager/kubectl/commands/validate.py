"""``kubectl mig validate``."""

from collections.abc import Iterable, Sequence

from mig_manager import errors
from mig_manager.cli.toolkit import command_settings, console, validation
from mig_manager.core import model
from mig_manager.core.fleet import node_reports
from mig_manager.core.layout import layout_fit
from mig_manager.core.settings import options
from mig_manager.kubectl import cluster_command, plugin_settings, presumed_gpus


class Settings(
    plugin_settings.PluginSettings,
    takes=(
        "layout",
        "selector",
        "filename",
        "config-map",
        "must-fit",
        "output",
        *plugin_settings.COMMON,
    ),
):
    """Settings of ``validate``."""

    layouts: tuple[str, ...] = options.declare(
        options.Option(
            name="layout",
            help="layouts to check (default: all)",
            metavar=options.LAYOUT,
            is_operand=True,
            is_repeatable=True,
            default=(),
        )
    )
    must_fit: bool = options.declare(command_settings.MUST_FIT)


def run(settings: Settings, terminal: console.Console) -> int:
    """Check layouts against the GPUs that the nodes have; 1 if one does not fit."""
    command = cluster_command.ClusterCommand(settings, terminal)
    document = command.document()
    reports = command.nodes().reports
    selected = document.select(settings.layouts)
    templates, notes = _templates(reports)
    for note in notes:
        terminal.note(note)
    if not templates:
        raise errors.UsageError("the GPUs of these nodes are unknown: nothing to validate")
    from mig_manager.catalogue import hardware  # noqa: PLC0415 - reads the table of products

    result = layout_fit.against_products(
        selected,
        source=document.source,
        templates=templates,
        # Named layouts are meant for these nodes.
        others=None if settings.layouts or settings.must_fit else hardware.known_gpus,
    )
    return command.answer(
        result.to_data,
        lambda: validation.table(result, style=command.style),
        is_good=not result.misfits,
    )


def _templates(
    reports: Iterable[node_reports.NodeReport],
) -> tuple[Sequence[model.Gpu], Sequence[str]]:
    """Return one unpartitioned GPU of every product on the nodes, and notes on presumed GPUs."""
    published: dict[tuple[str, int, int], model.Gpu] = {}
    presumed: dict[str, model.Gpu] = {}
    notes: list[str] = []
    for report in reports:
        if report.gpus is None:
            gpus, note = presumed_gpus.of(report)
            notes.append(f"{report.node.name}: {note}")
            presumed.update((gpu.name, gpu) for gpu in gpus)
            continue
        for gpu in report.gpus:
            key = gpu.name, gpu.pci_device_id, gpu.pci_subsystem_id
            published.setdefault(key, gpu.unpartitioned)
    names = {gpu.name for gpu in published.values()}
    others = [gpu for name, gpu in presumed.items() if name not in names]
    # By name and position in the table, because the order of nodes has no meaning.
    templates = sorted(
        [*published.values(), *others], key=lambda gpu: (gpu.name, gpu.pci_device_id)
    )
    return templates, notes
