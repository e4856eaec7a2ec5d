"""Kubelet of a sandbox node: admits and runs pods, and reports them and the node."""

import dataclasses
import enum
from collections.abc import Callable, Mapping

from mig_manager.core import timing
from mig_manager.sandbox.apiserver import store
from mig_manager.sandbox.node import (
    cluster_view,
    device_manager,
    device_plugin,
    manifests,
    objects,
)

_CRASH_BACKOFF = timing.Backoff(first_s=10.0, max_s=300.0, factor=2.0)
"""The pauses before a crashed container restarts."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KubeletOptions:
    """How kubelet runs pods; durations in seconds."""

    name: str = "sandbox-node"  # the node's name
    pod_start_s: float = 0.2  # from the binding of a pod to its containers running
    pod_stop_s: float = 0.1  # how long a pod needs to stop, unless its annotation has another time


ProgramFactory = Callable[
    [objects.JsonObject, device_manager.Allocation], device_plugin.PodProgram
]


class _PodState(enum.Enum):
    WAITING = enum.auto()  # for its start, or for its next start after a crash
    RUNNING = enum.auto()
    STOPPING = enum.auto()
    STOPPED = enum.auto()


@dataclasses.dataclass(slots=True, kw_only=True)
class _AdmittedPod:
    """One admitted pod."""

    uid: str
    program: device_plugin.PodProgram
    state: _PodState = _PodState.WAITING
    next_at: float | None  # when the state ends, in monotonic seconds
    restarts: int = 0
    stopping_since: float = 0.0
    status: objects.JsonObject | None = None  # the status to publish; None: published


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
        self._workers: dict[str, _AdmittedPod] = {}

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
        times = [at for w in self._workers.values() for at in (w.next_at, w.program.next_at)]
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
            self._end(self._workers.pop(uid))
        for uid, pod in pods.items():
            worker = self._workers.get(uid) or self._admit(pod, now)
            if worker is None:
                continue
            self._advance(worker, pod, now)
            if worker.status is not None:
                self._cluster.patch_status(cluster_view.WatchedKind.POD, pod, worker.status)
                worker.status = None

    def stop(self) -> None:
        """End every program at once without a write to the API, as if the power failed."""
        for worker in self._workers.values():
            self._end(worker)
        self._workers.clear()

    def _admit(self, pod: objects.JsonObject, now: float) -> _AdmittedPod | None:
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
        worker = _AdmittedPod(
            uid=objects.uid(pod),
            program=self._program_of(pod, allocation),
            next_at=now + self._options.pod_start_s,
        )
        restarts = objects.restart_count(pod)
        if restarts is not None:
            worker.restarts = restarts + 1
            worker.status = manifests.waiting(
                pod, reason="ContainerCreating", message="", restarts=worker.restarts
            )
        self._workers[worker.uid] = worker
        return worker

    def _advance(self, worker: _AdmittedPod, pod: objects.JsonObject, now: float) -> None:
        if objects.is_terminating(pod):
            self._terminate(worker, pod, now)
            return
        is_due = worker.next_at is not None and now >= worker.next_at
        try:
            if worker.state is _PodState.RUNNING and is_due:
                self._end(worker)
                worker.status = manifests.success(pod)
            elif worker.state is _PodState.RUNNING:
                worker.program.poll(now)
            elif worker.state is _PodState.WAITING and is_due:
                worker.program.start(now)
                run_s = objects.annotations(pod).get(objects.RUN_SECONDS)
                worker.state = _PodState.RUNNING
                worker.next_at = None if run_s is None else now + float(run_s)
                worker.status = manifests.running(pod, restarts=worker.restarts)
        except device_plugin.NotStartedError as error:
            self._back_off(worker, pod, now, reason="RunContainerError", message=str(error))
        except device_plugin.ExitedError as error:
            self._back_off(worker, pod, now, reason="CrashLoopBackOff", message=str(error))

    def _back_off(
        self,
        worker: _AdmittedPod,
        pod: objects.JsonObject,
        now: float,
        *,
        reason: str,
        message: str,
    ) -> None:
        worker.program.stop()
        worker.next_at = now + _CRASH_BACKOFF.delay_s(worker.restarts)
        worker.restarts += 1
        worker.state = _PodState.WAITING
        worker.status = manifests.waiting(
            pod, reason=reason, message=message, restarts=worker.restarts
        )

    def _terminate(self, worker: _AdmittedPod, pod: objects.JsonObject, now: float) -> None:
        if worker.state is _PodState.RUNNING:
            worker.state, worker.stopping_since = _PodState.STOPPING, now
        if worker.state is _PodState.STOPPING:
            # Computed every time: a second deletion may shorten the grace period.
            grace_s = pod["metadata"]["deletionGracePeriodSeconds"]
            own_s = objects.annotations(pod).get(objects.STOP_SECONDS, self._options.pod_stop_s)
            worker.next_at = worker.stopping_since + min(float(own_s), float(grace_s))
            if now < worker.next_at:
                return
        self._end(worker)
        worker.status = None
        self._cluster.delete(cluster_view.WatchedKind.POD, pod, now=True)

    def _end(self, worker: _AdmittedPod) -> None:
        worker.state, worker.next_at = _PodState.STOPPED, None
        worker.program.stop()
        self._manager.release(worker.uid)
