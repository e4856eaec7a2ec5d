"""``kubectl mig apply``: request a layout that a node lists, or a custom one from a file."""

import dataclasses

from mig_manager import errors
from mig_manager.cli.toolkit import console
from mig_manager.core.display import styles
from mig_manager.core.fleet import listed_layouts
from mig_manager.core.layout import layout_documents, layouts
from mig_manager.core.settings import options
from mig_manager.kubectl import cluster_command, layout_requests, node_plans, plugin_settings

ABOUT = """
Refused if the layout cannot fit. One from your file needs an agent with --custom-layouts.

$ kubectl mig apply all-1g.5gb node-7
Request a layout that 'kubectl mig layouts' lists.

$ kubectl mig apply node-7 -f layout.yaml --dry-run
Show what your layout would change.
"""


class Settings(
    plugin_settings.NodeCommandSettings,
    takes=("layout", "node", "filename", "dry-run", "output", *plugin_settings.COMMON),
):
    """Settings of ``apply``."""

    layout: str | None = options.declare(
        dataclasses.replace(
            plugin_settings.LAYOUT,
            help="a layout that the node lists, or which of a file with several",
            is_required=False,
        )
    )
    is_dry_run: bool = options.switch(
        "show what would change, and request nothing", name="dry-run"
    )


def run(settings: Settings, terminal: console.Console) -> int:
    """Request a layout for one node; 1 if the node cannot have it."""
    if settings.layout is None and settings.filename is None:
        raise errors.UsageError(
            "name a layout that 'kubectl mig layouts' lists, or the file with yours: -f FILE"
        )
    command = cluster_command.ClusterCommand(settings, terminal)
    document = command.document(listed_layouts.NO_FILE)
    with command.layout_first("apply", settings.layout, [settings.node]):
        report = command.node(settings.node)
    custom = None if settings.filename is None else select(document, settings.layout)
    requested = custom or str(settings.layout)
    result = layout_requests.apply(
        command, report, requested, document, is_dry_run=settings.is_dry_run
    )
    return command.answer(
        result.to_data, lambda: text(result, style=command.style), is_good=result.is_good
    )


def select(document: layout_documents.Document, name: str | None) -> layouts.Layout:
    """Return the layout to apply: by name, or the only one.

    Raises:
        LayoutError: The name is unknown (UNKNOWN_CONFIG).
        UsageError: The document has no layout, or several and ``name`` is None.
    """
    if name is not None:
        return document.layout(name)
    if len(document.layouts) != 1:
        names = ", ".join(map(repr, document.layouts)) or "none"
        raise errors.UsageError(
            f"{document.source} has {len(document.layouts)} layouts ({names}); choose one: "
            "kubectl mig apply LAYOUT NODE -f FILE"
        )
    (only,) = document.layouts.values()
    return only


def text(result: layout_requests.RequestedPlan, *, style: styles.Style) -> str:
    """Draw the change, and say whether it was requested."""
    return f"{node_plans.pictures(result.plans, style=style)}\n\n{style.wrap(result.outcome)}"
