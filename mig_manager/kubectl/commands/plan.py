"""``kubectl mig plan``: show the changes of a layout, even on nodes without an agent."""

from mig_manager.cli.toolkit import console, layout_files, plan_table
from mig_manager.core.fleet import listed_layouts
from mig_manager.core.settings import node_settings, options
from mig_manager.kubectl import cluster_command, node_plans, plugin_settings


class Settings(
    plugin_settings.NodesSettings,
    takes=(
        "layout",
        "node",
        "selector",
        "filename",
        "config-map",
        "output",
        *plugin_settings.COMMON,
    ),
):
    """Settings of ``plan``."""

    layout: str = options.declare(plugin_settings.LAYOUT)
    output_format: node_settings.OutputFormat = plugin_settings.drawn_output()


def run(settings: Settings, terminal: console.Console) -> int:
    """Show what a layout would change on nodes; 1 if a node cannot have it."""
    command = cluster_command.ClusterCommand(settings, terminal)
    with command.layout_first("plan", settings.layout, settings.nodes):
        search = command.nodes(settings.nodes)
    is_listed = listed_layouts.is_listed((each.node for each in search.reports), settings.layout)
    document = command.document(listed_layouts.NO_FILE if is_listed else None)
    pods = command.reader.pods(search.names)
    with layout_files.explaining_names([settings.layout]):
        result = node_plans.plan(settings.layout, search.reports, document=document, pods=pods)
    draw = node_plans.pictures if command.is_drawn(search) else plan_table.table
    return command.answer(
        result.to_data,
        lambda: draw(result, style=command.style),
        is_good=result.is_good and not search.missing,
    )
