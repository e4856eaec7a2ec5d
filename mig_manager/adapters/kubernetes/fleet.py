"""Many nodes at once, for commands: watch them by a selector, and label them.

Level-triggered, like the agent's own watch: after any failure all nodes are listed again.
Functions and methods raise ``ClusterError`` if the API refuses or does not answer.
"""

import random
import threading

from mig_manager.adapters.kubernetes import api, collection, kube_node, watch
from mig_manager.core import timing
from mig_manager.core.fleet import fleet_nodes, marks
from mig_manager.core.objects import node_object, well_known

_TIMES = watch.WatchTimes(
    watch_s=30.0,
    stall_s=40.0,
    steady_s=5.0,
    pauses=timing.Backoff(first_s=0.2, max_s=10.0, factor=2.0, jitter=random.random),
)
"""Short, because a connection that died unnoticed shows an old state until the watch is over."""


class Fleet(collection.Collection[fleet_nodes.FleetNode]):
    """The current nodes of a ``kubectl -l`` selector; for one reader and one writer."""

    is_strict = True

    def __init__(
        self, kube: api.KubeApi, *, selector: str, times: watch.WatchTimes = _TIMES
    ) -> None:
        self._changed = threading.Event()
        super().__init__(
            kube,
            "/api/v1/nodes",
            fleet_nodes.parse,
            lambda *_: self._changed.set(),
            selector={"labelSelector": selector},
            times=times,
        )

    def start(self) -> None:
        """List the nodes, and watch them from now on."""
        self.list()
        super().start()

    def close(self) -> None:
        self.end()

    def nodes(self) -> tuple[fleet_nodes.FleetNode, ...]:
        """Return the nodes as last reported."""
        self._changed.clear()
        return self.items()

    def wait(self, seconds: float) -> None:
        """Wait until a node has changed since ``nodes``, up to a time-out."""
        self._changed.wait(seconds)

    def request(
        self, observed: fleet_nodes.FleetNode, layout: str | None, mark: marks.Mark | None
    ) -> bool:
        """Set a node's layout label; return False if the node has changed since, or is gone.

        None removes the label, or the annotation for ``undo`` (``mark``). After an error the label
        may have been written.
        """
        patch = node_object.NodePatch(
            labels={well_known.CONFIG_LABEL: layout},
            annotations={well_known.ROLLOUT_ANNOTATION: mark.to_json() if mark else None},
        )
        after = kube_node.patch_version(self._kube, observed.name, observed.version, patch)
        return after is not None
