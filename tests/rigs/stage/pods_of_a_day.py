"""Pods that come, ask for one MIG device, run for a while, and end by themselves."""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterable
from typing import Self

from mig_manager.sandbox.node import cluster_view, manifests, objects
from testkit import day


@dataclasses.dataclass(slots=True, kw_only=True)
class Fate:
    """What became of a pod; monotonic seconds, None: not yet."""

    job: day.Job
    created_s: float
    bound_s: float | None = None
    started_s: float | None = None
    ended_s: float | None = None
    end: str = ""  # why it failed or was deleted; empty for a pod that runs, or has succeeded

    @property
    def wait_s(self) -> float | None:
        """From its creation to its node."""
        return None if self.bound_s is None else self.bound_s - self.created_s

    def ran_s(self, now_s: float) -> float:
        """Return for how long it has run."""
        if self.started_s is None:
            return 0.0
        return (now_s if self.ended_s is None else self.ended_s) - self.started_s


class Day:
    """The pods of a day, followed from ``with`` to its end."""

    def __init__(self, view: cluster_view.ClusterView) -> None:
        self._view = view
        self._lock = threading.Lock()
        self._exits = contextlib.ExitStack()
        self.fates: dict[str, Fate] = {}
        self.end_s = 0.0
        """When it was over, in monotonic seconds."""

    def __enter__(self) -> Self:
        self._exits.callback(self._view.listen(self._notice))
        return self

    def __exit__(self, *_exc: object) -> None:
        self._exits.close()
        self.end_s = time.monotonic()

    def create_on_time(self, jobs: Iterable[day.Job], *, end_s: float) -> None:
        """Create each pod at its time; return when it is so late."""
        pause, begin = threading.Event(), time.monotonic()
        for job in sorted(jobs, key=lambda job: job.at_s):
            pause.wait(max(0.0, begin + job.at_s - time.monotonic()))
            with self._lock:
                self.fates[job.name] = Fate(job=job, created_s=time.monotonic())
            self._view.create(cluster_view.WatchedKind.POD, _pod(job))
        pause.wait(max(0.0, begin + end_s - time.monotonic()))

    def has(self, holds: Callable[[Fate], bool]) -> bool:
        """Return whether something holds for every pod that has been created."""
        with self._lock:
            return all(map(holds, self.fates.values()))

    def _notice(self, kind: cluster_view.WatchedKind, item: objects.JsonObject) -> None:
        if kind is not cluster_view.WatchedKind.POD:
            return
        now = time.monotonic()
        with self._lock:
            fate = self.fates.get(objects.name(item))
            if fate is None:
                return
            if fate.bound_s is None and objects.node_name(item):
                fate.bound_s = now
            phase = objects.phase(item)
            if fate.started_s is None and phase == "Running":
                fate.started_s = now
            if fate.ended_s is None and (
                phase in ("Succeeded", "Failed") or objects.is_terminating(item)
            ):
                fate.ended_s = now
                fate.end = "" if phase == "Succeeded" else _why(item)


def _pod(job: day.Job) -> objects.JsonObject:
    pod = manifests.gpu_pod(job.name, f"nvidia.com/mig-{job.profile}")
    pod["metadata"]["annotations"] = {objects.RUN_SECONDS: f"{job.run_s:.3f}"}
    pod["spec"]["restartPolicy"] = "Never"
    return pod


def _why(pod: objects.JsonObject) -> str:
    status = pod.get("status") or {}
    return str(status.get("message") or status.get("reason") or "deleted")
