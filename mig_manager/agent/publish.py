"""Publish on the Node: only this module writes its labels, annotations and taint.

The record of the request is also saved on the host, with the journal's entries of the host. It is
read if the Node object is deleted and registered again, for example with the label from kubelet's
flags.

Labels, annotations and taint go in one patch, which the API server accepts as a whole or not at
all. So the journal always matches its entries. A phase decides its changes for the version of the
Node that the API server patches, so it keeps labels that another program wrote meanwhile.
"""

import dataclasses
from collections.abc import Callable, Mapping

import structlog

from mig_manager import errors
from mig_manager.core import ports
from mig_manager.core.objects import node_object, well_known
from mig_manager.core.records import host_copy, journals, requests

_STEADY = (
    well_known.REQUEST_ANNOTATION,
    well_known.GPUS_ANNOTATION,
    well_known.LAYOUTS_ANNOTATION,
    well_known.CAPACITY_ANNOTATION,
)
"""Annotations that are not written again if unchanged. Status and journal are always written: a
run depends on them, and another program may have changed them."""

Decide = Callable[[node_object.NodeView], node_object.NodePatch]

_log = structlog.get_logger()


class Publisher:
    """Writes to the Node; skips unchanged annotations.

    Raises:
        ClusterError: From every method: the API refused or does not answer.
    """

    def __init__(self, node: ports.Node, host_copy_file: ports.SavedText) -> None:
        self._node = node
        self._host_copy_file = host_copy_file
        self._on_host = ""
        """The text as last written to the host."""
        self._written: dict[str, str | None] = {}
        """Steady annotations as last written or read."""

    def read(self) -> node_object.NodeView:
        """Return the node, and treat its annotations as written."""
        view = self._node.read()
        self.assume_written(view)
        return view

    def assume_written(self, view: node_object.NodeView) -> None:
        """Treat a view's annotations as written: another program may have changed them."""
        self._written = _steady(view)

    def forget(self) -> None:
        """Write everything again: the Node was deleted and registered again."""
        self._written = {}

    def written(self, annotation: str) -> str:
        """Return an annotation as last written; empty if never."""
        return self._written.get(annotation) or ""

    def patch(self, change: node_object.NodePatch) -> None:
        """Write labels and annotations that only this agent writes, if they changed."""
        news = _without(change, self._written)
        if news != node_object.NodePatch():
            # Until the API answers, it is unknown whether the change was made.
            self._written = {}
            self._written = _steady(self._node.patch(news))

    def annotate(self, annotations: Mapping[str, str | None]) -> None:
        """Write annotations."""
        self.patch(node_object.NodePatch(annotations=annotations))

    def save_on_host(self, record: requests.RequestRecord, journal: journals.Journal) -> None:
        """Copy a published record and journal to the host; the next call repeats a failed save."""
        text = host_copy.to_json(record, journal)
        if text == self._on_host:
            return
        try:
            self._host_copy_file.save(text)
        except errors.ConfigError as error:
            _log.warning("request_not_saved", error=error.message)
        else:
            self._on_host = text

    def announce(self, change: node_object.NodePatch) -> None:
        """Write in the background, and ignore errors."""
        self._written = {}
        self._node.announce(change)

    def update(self, decide: Decide) -> node_object.NodeView:
        """Write the change decided for the Node's current version; return that version.

        An annotation that another program has removed or changed meanwhile is written again.
        """
        self._written = {}
        versions: list[node_object.NodeView] = []

        def change(view: node_object.NodeView) -> node_object.NodePatch:
            versions.append(view)
            return _without(decide(view), _steady(view))

        self._written = _steady(self._node.update(change))
        return versions[-1]


def _steady(view: node_object.NodeView) -> dict[str, str | None]:
    return {key: view.annotations.get(key) for key in _STEADY}


def _without(
    change: node_object.NodePatch, present: Mapping[str, str | None]
) -> node_object.NodePatch:
    annotations = {
        key: text
        for key, text in change.annotations.items()
        if key not in present or present[key] != text
    }
    return dataclasses.replace(change, annotations=annotations)
