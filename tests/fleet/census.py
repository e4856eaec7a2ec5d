"""Counts, at every change of any node, how many nodes are unavailable at once."""

import threading

from mig_manager.core.objects import well_known
from mig_manager.sandbox.apiserver import kinds, store
from testkit import apiserver


def is_unavailable(node: store.Object) -> bool:
    spec = node.get("spec") or {}
    taints = {taint["key"] for taint in spec.get("taints") or ()}
    return bool(spec.get("unschedulable")) or well_known.RECONFIGURING_TAINT in taints


class Census:
    """What happened since the start; the store itself reports it, so that nothing is missed."""

    def __init__(self, server: apiserver.ApiServer) -> None:
        self._lock = threading.Lock()
        self._away: set[str] = set()
        self.most = 0
        """Nodes unavailable at once."""
        self.ever: set[str] = set()
        """Nodes that were unavailable at some time."""
        for node in server.objects(kinds.NODES):
            self._count(node)
        server.store.subscribe(self._take)

    def _take(self, record: store.Record) -> None:
        if record.key[0] == kinds.NODES.plural:
            with self._lock:
                self._count(record.obj)

    def _count(self, node: store.Object) -> None:
        name = node["metadata"]["name"]
        if is_unavailable(node):
            self._away.add(name)
            self.ever.add(name)
        else:
            self._away.discard(name)
        self.most = max(self.most, len(self._away))
