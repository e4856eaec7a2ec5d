"""The ports of the Kubernetes API: our node, its pods and DRA devices, and slots among nodes."""

from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from mig_manager.core.fleet import slots
from mig_manager.core.node import eviction_rules
from mig_manager.core.node.devices import claims
from mig_manager.core.objects import node_object, pod_object
from mig_manager.core.records import readiness


class Node(Protocol):
    """Our own Node object; a method raises ClusterError if the API refuses or does not answer."""

    def read(self) -> node_object.NodeView:
        """Return the node as the API has it now."""

    def latest(self, *, is_at_rest: bool = False) -> node_object.NodeView:
        """Return the node from the watch if it runs, without a request; never as before our write.

        Good enough to poll, and for decisions that ``update`` repeats. At rest a watch that has
        long been silent is enough.
        """

    def patch(self, change: node_object.NodePatch) -> node_object.NodeView:
        """Write labels and annotations that only this agent writes; return the new node."""

    def announce(self, change: node_object.NodePatch) -> None:
        """Write as ``patch`` does, but in the background and without an error.

        The next read or write waits for it, to keep the order.
        """

    def update(
        self, decide: Callable[[node_object.NodeView], node_object.NodePatch]
    ) -> node_object.NodeView:
        """Write labels, annotations and taints in one patch; return the patched node.

        ``decide`` computes the patch. After a conflict it computes it again with the newer node,
        unless that node has the patch already. The answer to our own write may have been lost.

        Raises:
            ClusterError: The API refuses or does not answer, or every attempt conflicts.
        """

    def hide_devices(self) -> None:
        """Report that no GPU device is allocatable, until kubelet reports the new ones.

        A refusal is logged, never raised.
        """

    def report_devices(self, counts: Mapping[str, int]) -> None:
        """Report how many devices of some resources kubelet has, as its next heartbeat would.

        A refusal is logged, never raised.
        """

    def remove_resources(self, names: Collection[str]) -> node_object.NodeView:
        """Remove resources from the node's capacity and allocatable; return the patched node.

        Kubelet restores the resources of a running device plugin with its next status update.
        """

    @property
    def has_unwritten_condition(self) -> bool:
        """Whether a condition is still to be written."""

    def set_condition(self, condition: readiness.Condition) -> None:
        """Write a condition, unless the node has it already, or lacks the default one.

        A failure is logged, never raised; see ``retry_condition``.
        """

    def retry_condition(self) -> None:
        """Write the newest conditions after failures of ``set_condition``, if any.

        Makes no request soon after a refusal.
        """

    def emit(self, *, reason: str, message: str, is_warning: bool) -> None:
        """Publish an Event on the node, in order and in the background.

        A refusal is logged, never raised.
        """

    def flush_events(self, timeout_s: float) -> bool:
        """Wait until Events are published or refused; return False at the time-out."""


class Workloads(Protocol):
    """The pods on our node; a method raises ClusterError if the API refuses or does not answer."""

    def list(self) -> pod_object.Pods:
        """Return all pods bound to our node, finished ones included."""

    def from_watch(self) -> pod_object.Pods | None:
        """Return the pods from the watch, without a request; they may be slightly outdated.

        Good enough to poll; decisions that evict or end a wait need ``list``. None without a
        watch, and from time to time to force a ``list``.
        """

    def present(self) -> pod_object.Pods:
        """Return all pods bound to our node, from the watch if there is one.

        Good enough to publish. Requests only the data that the watch lacks.
        """

    def unbound(self, bound: pod_object.Pods) -> pod_object.Pods:
        """Return the pods, besides ``bound``, to which a device of our node is allocated.

        The scheduler allocates the devices of a pod's ResourceClaims before it binds the pod. This
        lists all ResourceClaims of the cluster; without that right, no pod is returned.
        """

    def evict(self, pod: pod_object.Pod) -> eviction_rules.EvictionResponse:
        """Evict a pod with its own grace period, guarded by its UID."""

    def can_evict(self, pod: pod_object.Pod) -> eviction_rules.EvictionResponse:
        """Return the current answer to ``evict``, by a dry run."""

    def budgets(self, namespaces: Collection[str]) -> tuple[eviction_rules.Budget, ...]:
        """Return the PodDisruptionBudgets of some namespaces."""

    def covered_by(self, budget: eviction_rules.Budget) -> pod_object.Pods:
        """Return all pods that a budget covers, on any node or unscheduled."""

    def delete(self, pod: pod_object.Pod) -> None:
        """Delete a pod with its own grace period, guarded by its UID; done when it is gone.

        Budgets do not apply: for daemons, and for workloads only with a forced drain.
        """


class PodWatch(Protocol):
    """The watch of our node's pods during a change, and beyond."""

    def expect_change(self) -> None:
        """Watch from the next list of the pods on, until the end of the attempt."""

    def keep(self) -> None:
        """Watch until ``release``, whether a change is under way or not."""

    def release(self) -> None:
        """Watch only during a change, as before ``keep``."""

    def dismiss(self) -> None:
        """End the watch with the attempt, unless it is kept."""


class ResourceSlices(Protocol):
    """The devices of our node that NVIDIA's DRA driver advertises.

    A method raises ClusterError if the API refuses or does not answer.
    """

    def list(self) -> tuple[claims.Slice, ...] | None:
        """Return the driver's slices; None if the API lacks the resource or forbids to list it."""

    def delete(self) -> tuple[claims.Slice, ...]:
        """Delete the slices, and return them; a new driver pod publishes others.

        A refusal is logged, never raised.
        """


class Slots(Protocol):
    """The cluster's slots for nodes under change; a node takes one before its drain."""

    def take(self) -> slots.Denial | None:
        """Take a free slot until ``release``; return why none is free, and None with a slot.

        The node may also have a slot after a ClusterError.
        """

    def check(self) -> None:
        """Renew the slot if the API answers.

        Raises:
            NotReadyError: SLOTS_TAKEN: another node has the slot, or may take it within 30
                seconds.
        """

    def release(self) -> None:
        """Release this node's slot; if the API does not answer, the slot expires."""
