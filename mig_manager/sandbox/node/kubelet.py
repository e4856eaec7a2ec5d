"""Kubelet: registers the node, admits and runs the pods bound to it, reports both.

Level-triggered: ``sync`` compares the pods with what runs and acts, ``next_at`` is the time of the
next action. Nothing here waits.
"""

import dataclasses
import enum
from collections.abc import Callable, Mapping

from mig_manager.sandbox.node import (
    cluster_view,
    device_manager,
    device_plugin,
    node_options,
    objects,
)

ProgramFactory = Callable[[objects.JsonObject, device_manager.Allocation], device_plugin.Program]
"""Gives the program that the containers of a pod run."""


class _Stage(enum.Enum):
    WAITING = enum.auto()
    """For its start, or for its next start after a crash."""
    RUNNING = enum.auto()
    STOPPING = enum.auto()
    STOPPED = enum.auto()


@dataclasses.dataclass(slots=True, kw_only=True)
class _Worker:
    """One admitted pod."""

    uid: str
    program: device_plugin.Program
    stage: _Stage = _Stage.WAITING
    next_at: float | None
    """When the stage ends by itself, in monotonic seconds."""
    restarts: int = 0
    stopping_since: float | None = None
    status: objects.JsonObject | None = None
    """The status to publish; None: it is published."""


class Kubelet:
    """The kubelet of one node; used by one thread."""

    def __init__(
        self,
        opts: node_options.NodeOptions,
        *,
        cluster: cluster_view.ClusterView,
        manager: device_manager.DeviceManager,
        program_of: ProgramFactory,
        node_labels: Mapping[str, str],
    ) -> None:
        self._opts = opts
        self._cluster = cluster
        self._manager = manager
        self._program_of = program_of
        self._node_labels = node_labels
        self._workers: dict[str, _Worker] = {}

    def register(self) -> None:
        """Create the Node object; where it exists, add the labels that it lacks.

        Labels that it has stay: a pause of the device plugin must survive kubelet.
        """
        node = self._cluster.node(self._opts.name)
        if node is None:
            self._cluster.create(
                cluster_view.Kind.NODE, objects.node(self._opts, self._node_labels)
            )
            return
        have = objects.labels(node)
        missing = {key: value for key, value in self._node_labels.items() if key not in have}
        if missing:
            self._cluster.patch(cluster_view.Kind.NODE, node, {"metadata": {"labels": missing}})

    def tick(self, now: float) -> None:
        """Write the node's status where it differs; registers a node that has gone."""
        if self._cluster.node(self._opts.name) is None:
            self.register()
        node = self._cluster.node(self._opts.name)
        status = objects.node_status(*self._manager.status(now))
        have = (node or {}).get("status") or {}
        if node is not None and any(have.get(key) != value for key, value in status.items()):
            self._cluster.patch_status(cluster_view.Kind.NODE, node, status)

    def next_at(self) -> float | None:
        """Return when the next pod has something to do, in monotonic seconds; None: none has."""
        times = [
            next_at for w in self._workers.values() for next_at in (w.next_at, w.program.next_at)
        ]
        return min((next_at for next_at in times if next_at is not None), default=None)

    def sync(self, now: float) -> None:
        """Admit, start, report and end the pods of the node.

        After ``stop`` this is kubelet's start on a machine that has booted: pods that ran are
        admitted and started again. One with devices fails if no plugin has registered them by
        then, as happens after a reboot (kubernetes/kubernetes#125579).
        """
        pods = {
            objects.uid(pod): pod
            for pod in self._cluster.list(cluster_view.Kind.POD)
            if objects.node_name(pod) == self._opts.name
        }
        for uid in self._workers.keys() - pods.keys():
            self._end(self._workers.pop(uid), now)
        for uid, pod in pods.items():
            worker = self._workers.get(uid) or self._meet(pod, now)
            if worker is not None:
                self._advance(worker, pod, now)
                self._report(worker, pod)

    def stop(self, now: float) -> None:
        """End every program at once without a write to the API: the machine is powered off."""
        for worker in self._workers.values():
            self._end(worker, now)
        self._workers.clear()

    def _meet(self, pod: objects.JsonObject, now: float) -> _Worker | None:
        """Admit a pod; None if there is nothing to run."""
        if objects.is_terminating(pod):
            self._cluster.delete(cluster_view.Kind.POD, pod, now=True)
            return None
        if objects.is_finished(pod):
            return None
        try:
            allocation = self._manager.admit(pod)
        except device_manager.ShortageError as error:
            status = objects.admission_failure(str(error))
            self._cluster.patch_status(cluster_view.Kind.POD, pod, status)
            return None
        worker = _Worker(
            uid=objects.uid(pod),
            program=self._program_of(pod, allocation),
            next_at=now + self._opts.pod_start_s,
        )
        had_run = objects.restart_count(pod)
        if had_run is not None:
            worker.restarts = had_run + 1
            worker.status = objects.waiting(
                pod, reason="ContainerCreating", message="", restarts=worker.restarts
            )
        self._workers[worker.uid] = worker
        return worker

    def _advance(self, worker: _Worker, pod: objects.JsonObject, now: float) -> None:
        if objects.is_terminating(pod):
            self._terminate(worker, pod, now)
        elif (
            worker.stage is _Stage.WAITING and worker.next_at is not None and now >= worker.next_at
        ):
            self._start(worker, pod, now)
        elif worker.stage is _Stage.RUNNING:
            try:
                worker.program.poll(now)
            except device_plugin.ExitedError as error:
                self._back_off(worker, pod, now, reason="CrashLoopBackOff", message=str(error))

    def _start(self, worker: _Worker, pod: objects.JsonObject, now: float) -> None:
        try:
            worker.program.start(now)
        except device_plugin.NotStartedError as error:
            self._back_off(worker, pod, now, reason="RunContainerError", message=str(error))
            return
        worker.stage, worker.next_at = _Stage.RUNNING, None
        worker.status = objects.running(pod, restarts=worker.restarts)

    def _back_off(
        self, worker: _Worker, pod: objects.JsonObject, now: float, *, reason: str, message: str
    ) -> None:
        worker.program.stop(now)
        delay = min(
            self._opts.crash_backoff_s * 2.0**worker.restarts, self._opts.crash_backoff_max_s
        )
        worker.restarts += 1
        worker.stage, worker.next_at = _Stage.WAITING, now + delay
        worker.status = objects.waiting(
            pod, reason=reason, message=message, restarts=worker.restarts
        )

    def _terminate(self, worker: _Worker, pod: objects.JsonObject, now: float) -> None:
        if worker.stopping_since is None:
            is_running = worker.stage is _Stage.RUNNING
            worker.stopping_since = now
            worker.stage = _Stage.STOPPING if is_running else _Stage.STOPPED
        if worker.stage is _Stage.STOPPING:
            # Computed each time: a second deletion may shorten the grace period.
            worker.next_at = worker.stopping_since + _stop_s(pod, self._opts.pod_stop_s)
            if now < worker.next_at:
                return
        worker.stage, worker.next_at = _Stage.STOPPED, None
        self._end(worker, now)
        self._cluster.delete(cluster_view.Kind.POD, pod, now=True)

    def _end(self, worker: _Worker, now: float) -> None:
        worker.program.stop(now)
        self._manager.release(worker.uid)

    def _report(self, worker: _Worker, pod: objects.JsonObject) -> None:
        if worker.status is not None and worker.stage is not _Stage.STOPPED:
            self._cluster.patch_status(cluster_view.Kind.POD, pod, worker.status)
            worker.status = None


def _stop_s(pod: objects.JsonObject, default_s: float) -> float:
    """Return how long a pod takes to stop: its own time, but never more than its grace."""
    try:
        own = float(objects.annotations(pod).get(objects.STOP_SECONDS, default_s))
    except ValueError:
        own = default_s
    grace = pod["metadata"].get("deletionGracePeriodSeconds")
    return own if grace is None else min(own, float(grace))
