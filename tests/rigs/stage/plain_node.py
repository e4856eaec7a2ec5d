"""A node without GPUs and device plugin on the embedded API server, for agents that simulate."""

import json
from collections.abc import Mapping
from typing import Any

from mig_manager.core.objects import well_known
from mig_manager.sandbox.apiserver import kinds
from mig_manager.sandbox.node import objects
from testkit import apiserver
from tests.rigs import waiting


class PlainNode:
    """The only node of a server."""

    name = "plain"

    def __init__(self, server: apiserver.ApiServer) -> None:
        self._server = server
        self.register()

    def register(self, *taints: Mapping[str, str], **labels: str) -> None:
        """Create the Node; one that is there is deleted, as by ``kubectl delete node``."""
        if self._server.objects(kinds.NODES):
            self._server.delete(kinds.NODES, self.name)
        metadata = {"name": self.name, "labels": labels}
        node = {"apiVersion": "v1", "kind": "Node", "metadata": metadata}
        self._server.create(node | {"spec": {"taints": [*taints]}})

    def node(self) -> dict[str, Any]:
        return self._server.get(kinds.NODES, self.name)

    def schedulable(self) -> dict[str, str]:
        """Return the devices that pods can be scheduled on."""
        status = self.node().get("status") or {}
        assert status.get("capacity") == status.get("allocatable")
        return dict(status.get("capacity") or {})

    def status(self) -> Mapping[str, Any]:
        text = objects.annotations(self.node()).get(well_known.STATUS_ANNOTATION, "{}")
        status: Mapping[str, Any] = json.loads(text)
        return status

    def label(self, layout: str) -> None:
        labels = {well_known.CONFIG_LABEL: layout}
        self._server.merge(kinds.NODES, self.name, {"metadata": {"labels": labels}})

    def wait_for_end(self, layout: str) -> str:
        """Return the state in which the run for a layout ended."""

        def has_ended() -> bool:
            status = self.status()
            return status.get("config") == layout and "finishedAt" in status

        waiting.until(has_ended, f"the end of the run for {layout}")
        return objects.labels(self.node())[well_known.STATE_LABEL]
