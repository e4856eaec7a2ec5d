"""The layouts that nodes list, take from their annotation, or share with a layout file."""

from collections.abc import Iterable

from mig_manager import errors, reasons
from mig_manager.core import messages, model
from mig_manager.core.fleet import fleet_nodes
from mig_manager.core.layout import available_layouts, custom_layouts, layout_documents, layouts
from mig_manager.core.objects import well_known

NO_FILE = layout_documents.Document(source="the node's list", layouts={}, is_presumed=True)
"""In place of a layout file: generated layouts need none."""
_REMEDY = (
    "Name a layout that 'kubectl mig layouts' lists. If this one was just added, name its "
    "ConfigMap with --config-map."
)


def is_listed(members: Iterable[fleet_nodes.FleetNode], name: str) -> bool:
    """Return whether any node lists a layout, or takes it from its annotation."""
    return any(
        is_from_annotation(node, name) or node.listed.find(name) is not None for node in members
    )


def is_from_annotation(node: fleet_nodes.FleetNode, name: str) -> bool:
    """Return whether a node's agent takes a layout of this name from the node's annotation."""
    return name == well_known.CUSTOM_LAYOUT and bool(node.listed.takes_custom)


def require_layout(
    members: Iterable[fleet_nodes.FleetNode], document: layout_documents.Document, name: str
) -> None:
    """Raise LayoutError (UNKNOWN_CONFIG) if neither document nor any node has the layout."""
    every = tuple(members)
    if is_listed(every, name):
        return
    if document is NO_FILE:
        names = (each.name for node in every for each in node.listed.layouts)
        hint = messages.did_you_mean(name, names)
        raise errors.LayoutError(
            f"no node lists layout {name!r}{hint}",
            reason=reasons.Reason.UNKNOWN_CONFIG,
            remedy=_REMEDY,
        )
    published = [gpus for node in every if (gpus := fleet_nodes.published_gpus(node)[0])]
    document.layout(name, published, remedy=_REMEDY if document.is_presumed else "")


def layout_of(
    node: fleet_nodes.FleetNode,
    gpus: Iterable[model.Gpu],
    document: layout_documents.Document,
    name: str,
) -> layouts.Layout | None:
    """Return the layout that a node with these GPUs serves under a name; None if unknown.

    It is from the document, unless the node lists the content of a generated layout, or takes it
    from its annotation. A layout is unknown if the node lists it, or may have it unlisted, and the
    document lacks its content. A document that a person named may be newer than the list.

    Raises:
        ConfigError: The annotation is invalid.
        LayoutError: The annotation is missing (NO_CUSTOM_LAYOUT), or the layout is unknown
            (UNKNOWN_CONFIG).
    """
    if is_from_annotation(node, name):
        return custom_layouts.CustomRequest.of(node.view).layout()[0]
    listed = node.listed.find(name)
    in_document = document.layouts.get(name)
    if listed and (in_document is None or in_document.content_hash != listed.content_hash):
        made = available_layouts.generate(gpus).get(name)
        if made and made.content_hash == listed.content_hash:
            return made
        if in_document is None or document.is_presumed:
            return None
    if in_document is None and document.is_presumed and not node.listed.is_complete:
        return None
    return document.layout(name)
