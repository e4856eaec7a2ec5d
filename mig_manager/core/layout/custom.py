"""The layout in a node's annotation, for which the request ``custom`` stands on that node."""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping

from mig_manager import errors
from mig_manager.core import model, yaml_tree
from mig_manager.core.layout import config, layouts
from mig_manager.core.node import cluster
from mig_manager.core.records import requests

_MARK = f"{cluster.ON_DEMAND} "
"""How the name of a layout begins that evicts no pod, whatever the node's label says later."""
MOST_BYTES = 32 << 10
"""Of the annotation. The API server allows a node 256 KiB of annotations, and the agent's own
must have room."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Custom:
    """A request for ``custom``; what differs in any member is another request."""

    node_name: str
    text: str | None  # of the annotation; None: it is missing or empty
    is_on_demand: bool = False
    """Whether programs repartition the node: then no pod is evicted, and none is waited for."""

    @staticmethod
    def of(view: cluster.NodeView) -> "Custom":
        """Return what ``custom`` stands for on a node."""
        return Custom(
            node_name=view.name,
            text=view.annotations.get(cluster.LAYOUT_ANNOTATION) or None,
            is_on_demand=view.labels.get(cluster.PARTITIONING_LABEL) == cluster.ON_DEMAND,
        )

    @property
    def annotation_hash(self) -> str:
        """12 hexadecimal digits that change with the annotation, valid or not."""
        text = (self.text or "").encode(errors="surrogatepass")
        return hashlib.sha256(text).hexdigest()[:12]

    def layout(
        self, *, is_lenient: bool = False
    ) -> tuple[config.Layout, tuple[yaml_tree.Diagnostic, ...]]:
        """Return the layout, under the name ``custom``, and the warnings about it.

        Raises:
            ConfigError: The annotation is invalid, too long, or has not exactly one layout.
            LayoutError: The annotation is missing (NO_CUSTOM_LAYOUT).
        """
        if self.text is None:
            raise errors.LayoutError(
                f"node {self.node_name} has no annotation {cluster.LAYOUT_ANNOTATION}, from which "
                f"layout '{cluster.CUSTOM_LAYOUT}' is taken",
                reason=errors.Reason.NO_CUSTOM_LAYOUT,
            )
        source = f"annotation {cluster.LAYOUT_ANNOTATION} of node {self.node_name}"
        return single(self.text, source=source, is_lenient=is_lenient)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A document for the annotation."""

    text: str
    content_hash: str  # of its layout, as in the agent's status


def written(wanted: Mapping[str, model.DesiredGpu], *, addition: str = "") -> Written:
    """Return the document that requests this of GPUs by UUID and evicts no pod.

    It has one rule for GPUs alike.

    An ``addition`` to the layout's name makes it another request for the same.
    """
    alike: dict[model.DesiredGpu, list[str]] = {}
    for uuid, goal in wanted.items():
        alike.setdefault(goal, []).append(uuid)
    nowhere = errors.Location(source="partitioner", line=0, column=0)
    rules = tuple(
        config.Rule(
            filters=(),
            indices=(),
            identities=tuple(sorted(uuids)),
            wanted=goal,
            location=nowhere,
        )
        for goal, uuids in sorted(alike.items(), key=lambda item: min(item[1]))
    )
    name = " ".join(filter(None, (cluster.ON_DEMAND, addition)))
    layout = config.Layout(name=name, rules=rules, location=nowhere)
    return Written(text=json.dumps(layouts.render([layout])), content_hash=layout.content_hash)


@functools.lru_cache(maxsize=1)
def is_marked(text: str) -> bool:
    """Check whether a document says that it evicts no pod; False if it is invalid.

    The mark is the layout's name, because agents that do not know the mark accept any name.
    """
    try:
        layout, _ = _only(text, source="", is_lenient=True)
    except errors.ConfigError:
        return False
    return f"{layout.name} ".startswith(_MARK)


def requested(view: cluster.NodeView) -> Custom | None:
    """Return what a node's request stands for; None: another layout is requested, or none."""
    is_custom = view.labels.get(cluster.CONFIG_LABEL) == cluster.CUSTOM_LAYOUT
    return Custom.of(view) if is_custom else None


def asked(name: str, custom: Custom | None) -> requests.Request:
    """Return the request for a layout; ``custom`` is what that name stands for, if it does."""
    if custom is None:
        return requests.Request(config=name)
    is_program = is_marked(custom.text or "")
    return requests.Request(
        config=name,
        annotation_hash=custom.annotation_hash,
        origin=requests.Origin.PARTITIONER if is_program else requests.Origin.CUSTOM,
        may_evict=not (custom.is_on_demand or is_program),
    )


def single(
    text: str, *, source: str, is_lenient: bool = False
) -> tuple[config.Layout, tuple[yaml_tree.Diagnostic, ...]]:
    """Parse a document with one layout; return it under the name ``custom``, and the warnings.

    Raises:
        ConfigError: It is invalid, too long, or has not exactly one layout.
    """
    layout, warnings = _only(text, source=source, is_lenient=is_lenient)
    return dataclasses.replace(layout, name=cluster.CUSTOM_LAYOUT), warnings


def _only(
    text: str, *, source: str, is_lenient: bool
) -> tuple[config.Layout, tuple[yaml_tree.Diagnostic, ...]]:
    size = len(text.encode(errors="surrogatepass"))
    if size > MOST_BYTES:
        raise errors.ConfigError(f"{source} has {size} bytes, more than {MOST_BYTES}")
    document = config.parse(text, source=source, is_lenient=is_lenient)
    first, *others = document.layouts.values() or (None,)
    if first is None:
        raise errors.ConfigError(f"{source} has no layout; write exactly one below mig-configs")
    if others:
        raise errors.ConfigError(
            f"layout '{others[0].name}' is one too many: write exactly one",
            location=others[0].location,
        )
    return first, document.warnings
