"""The layout ``custom``: a node's annotation has its content."""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping

from mig_manager import errors, reasons
from mig_manager.core import model
from mig_manager.core.files import yaml_diagnostics
from mig_manager.core.layout import layout_documents, layout_parser, layouts
from mig_manager.core.objects import node_object, well_known
from mig_manager.core.records import requests

_MARK = f"{well_known.ON_DEMAND} "
"""Prefix of the names of layouts that evict no pod, regardless of later labels."""
MAX_BYTES = 32 << 10
"""Limit of the annotation. The API server allows a node 256 KiB of annotations, and the agent's
own must have room."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CustomRequest:
    """The content of a request for ``custom``; a different member means another request."""

    node_name: str
    text: str | None  # text of the annotation; None: it is missing or empty
    is_on_demand: bool = False
    """Whether programs repartition the node: then no pod is evicted or awaited."""

    @staticmethod
    def of(view: node_object.NodeView) -> "CustomRequest":
        """Return the content of ``custom`` on a node."""
        return CustomRequest(
            node_name=view.name,
            text=view.annotations.get(well_known.LAYOUT_ANNOTATION) or None,
            is_on_demand=view.labels.get(well_known.PARTITIONING_LABEL) == well_known.ON_DEMAND,
        )

    @property
    def annotation_hash(self) -> str:
        """12 hexadecimal digits that change with the annotation, valid or not."""
        text = (self.text or "").encode(errors="surrogatepass")
        return hashlib.sha256(text).hexdigest()[:12]

    def layout(
        self, *, is_lenient: bool = False
    ) -> tuple[layouts.Layout, tuple[yaml_diagnostics.Diagnostic, ...]]:
        """Return the layout, under the name ``custom``, and the warnings about it.

        Raises:
            ConfigError: The annotation is invalid, too long, or has not exactly one layout.
            LayoutError: The annotation is missing (NO_CUSTOM_LAYOUT).
        """
        if self.text is None:
            raise errors.LayoutError(
                f"node {self.node_name} has no annotation {well_known.LAYOUT_ANNOTATION} with the "
                f"layout '{well_known.CUSTOM_LAYOUT}'",
                reason=reasons.Reason.NO_CUSTOM_LAYOUT,
            )
        source = f"annotation {well_known.LAYOUT_ANNOTATION} of node {self.node_name}"
        return single(self.text, source=source, is_lenient=is_lenient)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayoutAnnotation:
    """The value of the annotation with a layout."""

    text: str
    content_hash: str  # hash of its layout, as in the agent's status


def render(desired: Mapping[str, model.DesiredGpu], *, addition: str = "") -> LayoutAnnotation:
    """Return a document that requests these states of GPUs, by UUID, and evicts no pod.

    GPUs with equal states share a rule. An ``addition`` to the layout's name makes a new request
    for the same states.
    """
    uuids_of: dict[model.DesiredGpu, list[str]] = {}
    for uuid, goal in desired.items():
        uuids_of.setdefault(goal, []).append(uuid)
    nowhere = errors.Location(source="partitioner", line=0, column=0)
    rules = tuple(
        layouts.Rule(
            filters=(),
            indices=(),
            identities=tuple(sorted(uuids)),
            desired=goal,
            location=nowhere,
        )
        for goal, uuids in sorted(uuids_of.items(), key=lambda item: min(item[1]))
    )
    name = " ".join(filter(None, (well_known.ON_DEMAND, addition)))
    layout = layouts.Layout(name=name, rules=rules, location=nowhere)
    return LayoutAnnotation(
        text=json.dumps(layout_documents.render([layout])), content_hash=layout.content_hash
    )


@functools.lru_cache(maxsize=1)
def is_marked(text: str) -> bool:
    """Return whether a document's layout is marked to evict no pod; False if it is invalid.

    The mark is in the layout's name, because a document has no other place for it.
    """
    try:
        layout, _ = _only(text, source="", is_lenient=True)
    except errors.ConfigError:
        return False
    return f"{layout.name} ".startswith(_MARK)


def of_request(view: node_object.NodeView) -> CustomRequest | None:
    """Return the content of a node's request for ``custom``; None without such a request."""
    is_custom = view.labels.get(well_known.CONFIG_LABEL) == well_known.CUSTOM_LAYOUT
    return CustomRequest.of(view) if is_custom else None


def request_for(name: str, custom: CustomRequest | None) -> requests.RequestRecord:
    """Return the request for a layout, with the content of ``custom`` if that is requested."""
    if custom is None:
        return requests.RequestRecord(layout=name)
    is_program = is_marked(custom.text or "")
    return requests.RequestRecord(
        layout=name,
        annotation_hash=custom.annotation_hash,
        origin=requests.Origin.PARTITIONER if is_program else requests.Origin.CUSTOM,
        may_evict=not (custom.is_on_demand or is_program),
    )


def single(
    text: str, *, source: str, is_lenient: bool = False
) -> tuple[layouts.Layout, tuple[yaml_diagnostics.Diagnostic, ...]]:
    """Parse a document with one layout; return it under the name ``custom``, and the warnings.

    Raises:
        ConfigError: It is invalid, too long, or has not exactly one layout.
    """
    layout, warnings = _only(text, source=source, is_lenient=is_lenient)
    return dataclasses.replace(layout, name=well_known.CUSTOM_LAYOUT), warnings


def _only(
    text: str, *, source: str, is_lenient: bool
) -> tuple[layouts.Layout, tuple[yaml_diagnostics.Diagnostic, ...]]:
    size = len(text.encode(errors="surrogatepass"))
    if size > MAX_BYTES:
        raise errors.ConfigError(f"{source} has {size} bytes, more than {MAX_BYTES}")
    document = layout_parser.parse(text, source=source, is_lenient=is_lenient)
    first, *others = document.layouts.values() or (None,)
    if first is None:
        raise errors.ConfigError(f"{source} has no layout; write exactly one below mig-configs")
    if others:
        raise errors.ConfigError(
            f"unexpected second layout '{others[0].name}': write exactly one",
            location=others[0].location,
        )
    return first, document.warnings
