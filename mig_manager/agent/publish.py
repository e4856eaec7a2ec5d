"""Publish on the Node: the one place that writes its labels, annotations and taint.

The record of the request is kept on the host too, for a Node object that is deleted and registered
again, for example with the label from kubelet's flags.

Labels, annotations and taint travel in one patch, so the journal always matches what it lists: the
API server takes both or neither. What a phase takes or restores is decided for the node as it is
when the API server accepts the patch, so a label that another program wrote meanwhile is kept.
"""

import dataclasses
from collections.abc import Callable, Mapping

import structlog

from mig_manager import errors
from mig_manager.core import ports
from mig_manager.core.node import cluster
from mig_manager.core.records import requests

_STEADY = (
    cluster.REQUEST_ANNOTATION,
    cluster.GPUS_ANNOTATION,
    cluster.LAYOUTS_ANNOTATION,
    cluster.CAPACITY_ANNOTATION,
)
"""Annotations that are left out where the node has them. Status and journal are always written: a
run depends on what they say, and another program may have changed them."""

Decide = Callable[[cluster.NodeView], cluster.NodePatch]

_log = structlog.get_logger()


class Publisher:
    """Writes to the Node; an annotation that the agent has written already is left out.

    Raises:
        ClusterError: From each method, where the API refuses or does not answer.
    """

    def __init__(self, node: ports.Node, request_file: ports.KeptText | None = None) -> None:
        self._node = node
        self._request_file = request_file
        self._on_host = ""
        """The record of the request as last written to the host."""
        self._written: dict[str, str | None] = {}
        """Steady annotations as last written or read."""

    def read(self) -> cluster.NodeView:
        """Return the node, and take its annotations for written."""
        view = self._node.read()
        self._written = _steady(view)
        return view

    def forget(self) -> None:
        """Write everything again: the Node was deleted and registered again."""
        self._written = {}

    def written(self, annotation: str) -> str:
        """Return an annotation as last written; empty: it was not."""
        return self._written.get(annotation) or ""

    def patch(self, change: cluster.NodePatch) -> None:
        """Write labels and annotations that only this agent writes; nothing if it has them."""
        news = _without(change, self._written)
        if news != cluster.NodePatch():
            # Whether the API made a change is not known before its answer.
            self._written = {}
            self._written = _steady(self._node.patch(news))

    def annotate(self, annotations: Mapping[str, str | None]) -> None:
        """Write annotations."""
        self.patch(cluster.NodePatch(annotations=annotations))

    def keep(self, record: requests.Request) -> None:
        """Copy a record that is published to the host; a failure is logged."""
        text = record.to_json()
        if self._request_file is None or text == self._on_host:
            return
        try:
            self._request_file.save(text)
        except errors.ConfigError as error:
            _log.warning("request_not_saved", error=error.message)
        self._on_host = text

    def announce(self, change: cluster.NodePatch) -> None:
        """Write in the background, and without an error."""
        self._written = {}
        self._node.announce(change)

    def update(self, decide: Decide) -> None:
        """Write what is decided for the node as it is then.

        An annotation that another program has removed or changed meanwhile is written again.
        """
        self._written = {}
        node = self._node.update(lambda view: _without(decide(view), _steady(view)))
        self._written = _steady(node)


def of_record(record: requests.Request) -> dict[str, str | None]:
    """Return the annotation with the record of a request; without one it is removed."""
    return {cluster.REQUEST_ANNOTATION: record.to_json() if record.config else None}


def _steady(view: cluster.NodeView) -> dict[str, str | None]:
    return {key: view.annotations.get(key) for key in _STEADY}


def _without(change: cluster.NodePatch, present: Mapping[str, str | None]) -> cluster.NodePatch:
    annotations = {
        key: text
        for key, text in change.annotations.items()
        if key not in present or present[key] != text
    }
    return dataclasses.replace(change, annotations=annotations)
