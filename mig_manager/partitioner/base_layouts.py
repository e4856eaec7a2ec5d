"""The base layout on the GPUs of nodes."""

from collections.abc import Iterable, Mapping

import structlog

from mig_manager import errors
from mig_manager.core import model
from mig_manager.core.layout import available_layouts, layout_documents
from mig_manager.core.partitioning.nodes import partitioned_nodes

Base = Mapping[str, model.DesiredGpu]  # instances of a node's GPUs, by UUID

_log = structlog.get_logger()


class BaseLayouts:
    """Selects the base layout of every node, once for the same GPUs."""

    def __init__(self, name: str | None, document: layout_documents.Document | None) -> None:
        """Build it; without a document, the layout is generated from the GPUs."""
        self._name = name
        self._document = document
        self._bases: dict[str, tuple[tuple[model.Gpu, ...], Base]] = {}
        """By node: its GPUs, and the base layout on them."""

    def of(self, nodes: Iterable[partitioned_nodes.PartitionedNode]) -> Mapping[str, Base]:
        """Return the base layout for every opted-in node; empty if it does not fit."""
        before, self._bases = self._bases, {}
        for node in nodes if self._name else ():
            if node.is_opted_in and node.gpus:
                gpus, base = before.get(node.name, ((), {}))
                is_same = gpus == node.gpus
                self._bases[node.name] = node.gpus, base if is_same else self._base(node)
        return {name: base for name, (_, base) in self._bases.items()}

    def _base(self, node: partitioned_nodes.PartitionedNode) -> Base:
        try:
            return available_layouts.desired_gpus(self._name or "", self._document, node.gpus)
        except errors.LayoutError as error:
            _log.warning("base_layout_does_not_fit", node=node.name, detail=error.message)
            return {}
