"""``kubectl mig validate``."""

from mig_manager.cli.toolkit import console, validation
from mig_manager.cli.toolkit import settings as toolkit_settings
from mig_manager.core import options
from mig_manager.kubectl import cluster, plan, settings


class Settings(
    settings.PluginSettings,
    takes=f"layout selector filename config-map must-fit output {settings.COMMON}",
):
    """Settings of ``validate``."""

    layouts: tuple[str, ...] = options.declared(
        options.Option(
            name="layout",
            help="layouts to check (default: all)",
            metavar=options.LAYOUT,
            is_operand=True,
            is_repeatable=True,
            default=(),
        )
    )
    must_fit: bool = options.declared(toolkit_settings.MUST_FIT)


def run(chosen: Settings, terminal: console.Console) -> int:
    """Check layouts against the GPUs that the nodes have; 1 if one does not fit."""
    here = cluster.ClusterCommand(chosen, terminal)
    document = here.document()
    result = plan.validated(
        document,
        chosen.layouts,
        here.nodes().reports,
        must_fit=chosen.must_fit,
        note=terminal.note,
    )
    return here.answer(
        result.to_data,
        lambda: validation.table(result, style=here.style),
        is_good=not result.misfits,
    )
