"""The partitioner's view of the cluster: all nodes, all pods, one write, and Events.

Watches keep only the facts that a decision needs, and drop most objects. Facts are trusted only
while their watch works: if a watch is lost, ``is_current`` says so.
"""

import dataclasses
import hashlib
import threading
from collections.abc import Collection
from typing import Protocol

from mig_manager import errors
from mig_manager.adapters.kubernetes import (
    api,
    collection,
    device_claims,
    events,
    kube_node,
    watch,
)
from mig_manager.core import timing
from mig_manager.core.objects import node_object, well_known
from mig_manager.core.partitioning import demand
from mig_manager.core.partitioning.batch import arrivals
from mig_manager.core.partitioning.decision import decisions
from mig_manager.core.partitioning.nodes import node_requests, partitioned_nodes

_NAME_DIGITS = 24


class Listener(Protocol):
    """Learns in the watches' threads what a decision may depend on."""

    def record_demand(self) -> None:
        """Receive the message that the pods' demand has changed."""

    def record_node(self) -> None:
        """Receive the message that a node with MIG devices has changed."""

    def wake(self) -> None:
        """Receive the message that a watch has opened, maybe the last one."""


class PartitionerCluster:
    """The partitioner's access to the cluster; its methods are for one thread."""

    def __init__(
        self,
        kube: api.KubeApi,
        *,
        clock: timing.Clock,
        reporter: str,
        listener: Listener,
        times: watch.WatchTimes | None = None,
    ) -> None:
        """Prepare, without a request; Events name the ``reporter``."""
        self._kube = kube
        self._clock = clock
        self._reporter = reporter
        self._listener = listener
        self.reported: collection.Collection[partitioned_nodes.PartitionedNode] = (
            collection.Collection(
                kube,
                "/api/v1/nodes",
                partitioned_nodes.parse,
                self._node_changed,
                on_current=listener.wake,
                times=times,
            )
        )
        """The nodes as last reported."""
        self.pods: collection.Collection[demand.PendingPod | demand.PodOfNode] = (
            collection.Collection(
                kube,
                "/api/v1/pods",
                demand.parse,
                self._pod_changed,
                on_current=listener.wake,
                selector={"fieldSelector": "status.phase!=Succeeded,status.phase!=Failed"},
                times=times,
            )
        )
        """The pods that have not ended and that a decision needs."""
        self.requests = node_requests.Requests(lock=threading.Lock())
        """Requests of the pods that have a node."""
        self.arrivals = arrivals.Arrivals(lock=threading.Lock())
        """Arrivals of pods with MIG devices, since the first list."""
        self._claims = device_claims.DeviceClaims(
            kube, listener.record_demand, listener.wake, times=times
        )
        self._written: dict[str, tuple[str, partitioned_nodes.PartitionedNode]] = {}
        """By name: the version that a node had before our last write, and the node after it."""

    def start(self) -> None:
        """List and watch from now on."""
        self.reported.start()
        self.pods.start()
        self._claims.start()

    def close(self) -> None:
        """Stop watching."""
        self.reported.end(timeout_s=0.0)
        self.pods.end(timeout_s=0.0)
        self._claims.close()

    @property
    def is_current(self) -> bool:
        """Whether changes of nodes and pods arrive."""
        return self.reported.is_current and self.pods.is_current and self._claims.is_current

    @property
    def last_contact_s(self) -> float:
        """How long ago the API server last sent data about nodes or pods."""
        parts = self.reported, self.pods, self._claims
        return max(each.last_contact_s for each in parts)

    def nodes(self) -> tuple[partitioned_nodes.PartitionedNode, ...]:
        """Return the nodes as last reported, or as changed by our own write."""
        nodes = {each.name: each for each in self.reported.items()}
        # A write requires the reported version, so the next reported version includes it.
        self._written = {
            name: (before, after)
            for name, (before, after) in self._written.items()
            if name in nodes and nodes[name].version == before
        }
        nodes |= {name: after for name, (_, after) in self._written.items()}
        return self._claims.with_claims(nodes.values())

    def pending_and_bound(
        self, uids: Collection[str]
    ) -> tuple[tuple[demand.PendingPod, ...], set[str]]:
        """Return the pods that wait for MIG devices, and which pods, by UID, have a node.

        Both at one moment, so that a pod which is bound meanwhile is in one of them.
        """
        pods = self.pods.items()
        pending = tuple(pod for pod in pods if isinstance(pod, demand.PendingPod))
        bound = {pod.uid for pod in pods if isinstance(pod, demand.BoundPod) and pod.uid in uids}
        return pending, bound

    def request(self, change: decisions.NodeChange) -> bool:
        """Request a layout of a node; return False if the node has changed since, or is gone.

        Raises:
            ClusterError: The API refused, does not answer, or did not keep the layout; unless
                it refused, the layout may have been requested.
        """
        patch = node_object.NodePatch(
            labels={well_known.CONFIG_LABEL: well_known.CUSTOM_LAYOUT},
            annotations={well_known.LAYOUT_ANNOTATION: change.layout},
        )
        item = kube_node.patch_version(self._kube, change.node, change.version, patch)
        if item is None:
            return False
        after = partitioned_nodes.parse(item)
        if after is not None and after.version != change.version:
            self._written[change.node] = change.version, after
        return True

    def publish(self, event: events.Event, *, about: str) -> None:
        """Publish an Event, unless a replica has published an equal one with this ``about``.

        Raises:
            ClusterError: The API refused or does not answer; it may have been published.
        """
        parts = (event.subject.uid, event.reason, about)
        unique = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:_NAME_DIGITS]
        body = event.body(unique, now=self._clock.now_iso(), host=self._reporter)
        try:
            self._kube.post(events.path(body), body)
        except errors.ClusterError as error:
            if not error.is_conflict:
                raise

    def _node_changed(
        self,
        before: partitioned_nodes.PartitionedNode | None,
        now: partitioned_nodes.PartitionedNode | None,
    ) -> None:
        # Kubelet writes a node every few minutes without changing anything.
        if (
            before is None
            or now is None
            or before != dataclasses.replace(now, version=before.version)
        ):
            self._listener.record_node()

    def _pod_changed(
        self,
        before: demand.PendingPod | demand.PodOfNode | None,
        now: demand.PendingPod | demand.PodOfNode | None,
    ) -> None:
        self.requests.replace(
            None if isinstance(before, demand.PendingPod) else before,
            None if isinstance(now, demand.PendingPod) else now,
        )
        is_new = before is None and self.pods.is_current
        if is_new and isinstance(now, demand.PendingPod | demand.BoundPod) and now.needs:
            self.arrivals.add(now.needs, self._clock.monotonic())
        # A pod that was bound, or has ended, is no new demand.
        if isinstance(now, demand.PendingPod):
            self._listener.record_demand()
