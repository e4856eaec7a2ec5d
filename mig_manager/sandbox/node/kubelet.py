"""Kubelet of a sandbox node: admits and runs pods, and reports them and the node."""

import dataclasses
from collections.abc import Callable, Mapping

from mig_manager.sandbox.apiserver import store
from mig_manager.sandbox.node import (
    cluster_view,
    device_manager,
    device_plugin,
    manifests,
    objects,
    pod_worker,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KubeletOptions:
    """How kubelet runs pods; durations in seconds."""

    name: str = "sandbox-node"  # the node's name
    pod_start_s: float = 0.2  # from the binding of a pod to its containers running
    pod_stop_s: float = 0.1  # how long a pod needs to stop, unless its annotation has another time


ProgramFactory = Callable[
    [objects.JsonObject, device_manager.Allocation], device_plugin.PodProgram
]


class Kubelet:
    """Kubelet: registers the node, admits and runs its pods, and reports both.

    Level-triggered: ``sync`` compares the pods with the workers and acts; ``next_at`` is the time
    of the next action. No method waits. Used by one thread.
    """

    def __init__(
        self,
        options: KubeletOptions,
        *,
        cluster: cluster_view.ClusterView,
        manager: device_manager.DeviceManager,
        program_of: ProgramFactory,
        node_labels: Mapping[str, str],
    ) -> None:
        self._options = options
        self._cluster = cluster
        self._manager = manager
        self._program_of = program_of
        self._node_labels = node_labels
        self._workers: dict[str, pod_worker.PodWorker] = {}
        """By UID of an admitted pod."""
        self._unpublished: dict[str, objects.JsonObject] = {}
        """By UID of an admitted pod: the status to write."""

    def register(self) -> None:
        """Create the Node object, or add missing labels.

        Existing labels stay: a pause of the device plugin must survive kubelet.
        """
        kind = cluster_view.WatchedKind.NODE
        node = self._cluster.node(self._options.name)
        if node is None:
            metadata = {"name": self._options.name, "labels": dict(self._node_labels)}
            node = {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "spec": {}}
            self._cluster.create(kind, node)
        elif missing := self._node_labels.keys() - objects.labels(node).keys():
            labels = {key: self._node_labels[key] for key in missing}
            self._cluster.patch(kind, node, {"metadata": {"labels": labels}})

    def tick(self) -> None:
        """Write the node's status if it differs; register a deleted node again."""
        if self._cluster.node(self._options.name) is None:
            self.register()
        node = self._cluster.node(self._options.name)
        status = manifests.node_status(
            *self._manager.status(objects.devices(node or {}, "capacity"))
        )
        have = (node or {}).get("status") or {}
        # Others write conditions too, and ours has times, and empty fields by the API server.
        (ready,), conditions = status["conditions"], have.get("conditions") or ()
        reported = [each for each in conditions if ready.items() <= each.items()]
        info, had = status["nodeInfo"], have.get("nodeInfo") or {}
        have = have | {
            "conditions": [ready] * len(reported),
            "nodeInfo": {key: had.get(key) for key in info},
        }
        if node is not None and any(have.get(key) != value for key, value in status.items()):
            now = store.timestamp()
            since = reported[0].get("lastTransitionTime", now) if reported else now
            status["conditions"] = [
                ready | {"lastHeartbeatTime": now, "lastTransitionTime": since}
            ]
            self._cluster.patch_status(cluster_view.WatchedKind.NODE, node, status)

    def next_at(self) -> float | None:
        """Return the time of the next action, in monotonic seconds; None: no action is due."""
        times = (worker.next_at for worker in self._workers.values())
        return min((at for at in times if at is not None), default=None)

    def sync(self, now: float) -> None:
        """Admit, start, report and end the pods of the node.

        After ``stop`` this is kubelet's start on a booted machine: it admits and starts pods that
        ran. A pod with devices fails if no plugin has registered them by then, as after a real
        reboot (kubernetes/kubernetes#125579).
        """
        pods = {
            objects.uid(pod): pod
            for pod in self._cluster.list(cluster_view.WatchedKind.POD)
            if objects.node_name(pod) == self._options.name
        }
        for uid in self._workers.keys() - pods.keys():
            self._forget(uid)
        for uid, pod in pods.items():
            worker = self._workers.get(uid) or self._admit(pod, now)
            if worker is None:
                continue
            if objects.is_terminating(pod):
                worker.terminate(pod, now)
                if worker.has_stopped:
                    self._manager.release(uid)
                    self._unpublished.pop(uid, None)
                    self._cluster.delete(cluster_view.WatchedKind.POD, pod, now=True)
            elif status := worker.advance(pod, now):
                self._unpublished[uid] = status
                if worker.has_stopped:
                    self._manager.release(uid)
            if uid in self._unpublished:
                status = self._unpublished[uid]
                self._cluster.patch_status(cluster_view.WatchedKind.POD, pod, status)
                del self._unpublished[uid]

    def stop(self) -> None:
        """End every program at once without a write to the API, as if the power failed."""
        for uid in tuple(self._workers):
            self._forget(uid)

    def _forget(self, uid: str) -> None:
        """End a pod's program, and release its devices."""
        self._workers.pop(uid).stop()
        self._manager.release(uid)
        self._unpublished.pop(uid, None)

    def _admit(self, pod: objects.JsonObject, now: float) -> pod_worker.PodWorker | None:
        """Admit a pod; None if it does not run."""
        if objects.is_terminating(pod):
            self._cluster.delete(cluster_view.WatchedKind.POD, pod, now=True)
            return None
        if objects.is_finished(pod):
            return None
        try:
            allocation = self._manager.admit(pod)
        except device_manager.ShortageError as error:
            status = {
                "phase": "Failed",
                "reason": "UnexpectedAdmissionError",
                "message": f"Pod was rejected: {error}",
                "startTime": store.timestamp(),
            }
            self._cluster.patch_status(cluster_view.WatchedKind.POD, pod, status)
            return None
        restarts = objects.restart_count(pod)
        worker = pod_worker.PodWorker(
            self._program_of(pod, allocation),
            start_at=now + self._options.pod_start_s,
            stop_s=self._options.pod_stop_s,
            restarts=0 if restarts is None else restarts + 1,
        )
        if restarts is not None:
            self._unpublished[objects.uid(pod)] = manifests.waiting(
                pod, reason="ContainerCreating", message="", restarts=restarts + 1
            )
        self._workers[objects.uid(pod)] = worker
        return worker
