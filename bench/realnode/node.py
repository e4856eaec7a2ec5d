"""Play one story on the real node: prepare it, change the label, and observe from outside."""

import collections
import contextlib
import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from testkit import matrix, nvml_faults
from tests.realnode import manifests, node_state, nvidia_manager, operator, real_cluster
from tests.rigs import waiting
from tests.rigs.node import simulated_rig

_CONFIG, _STATE = "nvidia.com/mig.config", "nvidia.com/mig.config.state"
_PLUGIN_LABEL = f"{operator.DEPLOY}device-plugin"
_BUSY, _RESOURCE = "busy", "mig-1g.5gb"
_OUTCOME_WITHIN_S = 60.0
_START_WITHIN_S = 180.0  # enough for a start on a busy machine
_FOLLOWS_WITHIN_S = 2.0  # a manager may write Events after the state; a retry comes later
_RESUMES_WITHIN_S = 25.0  # a manager may publish the state before the device plugin runs again
_RETRIES_WITHIN_S = 60.0  # the wait for the manager's own retry after a failure
_UNKNOWN = 999
_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Manager:
    """A DaemonSet that serves the label."""

    title: str
    install: Callable[[real_cluster.RealCluster], contextlib.AbstractContextManager[None]]
    """Installs it for the body."""
    namespace: str
    name: str
    labels: Mapping[str, str]  # labels of its pods

    @property
    def user(self) -> str:
        """Its name in the audit log."""
        return f"system:serviceaccount:{self.namespace}:{self.name}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """One change of the label."""

    name: str
    before: tuple[matrix.Devices, ...]  # the devices of each GPU at the start
    layout: str  # the requested layout
    pods: int = 0  # number of pods that use one 1g.5gb each
    has_budget: bool = False  # whether a PodDisruptionBudget allows no eviction
    fails_creation: int = 0
    """The number of the GPU instance whose creation fails with an unknown error; 0: none."""
    is_killed: bool = False
    """Whether the manager's container is killed once the first GPU instance has changed."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of a story with a manager."""

    state: str
    state_s: float | None
    """Seconds from the label to ``success`` or ``failed``; None: neither was published."""
    schedulable_s: float | None
    """Seconds from the label until the node is schedulable and advertises the devices of its GPUs;
    None: the GPUs are as before, or the node does not advertise them."""
    evictions: int
    other_ends: int  # pods that ended or restarted without an eviction
    on_missing_devices: int  # running pods with a device that kubelet reports and the driver lacks
    requests: collections.Counter[str]
    """From the label to two seconds after the state, by verb and resource."""
    afterwards: str


@dataclasses.dataclass(frozen=True, slots=True)
class _Version:
    """One version of the node object."""

    at_s: float
    labels: Mapping[str, str]
    allocatable: Mapping[str, int]
    is_open: bool

    @property
    def state(self) -> str:
        return self.labels.get(_STATE, "")


def watch(cluster: real_cluster.RealCluster) -> list[_Version]:
    """Return a list that a thread extends with every version of the node object."""
    versions: list[_Version] = []

    def read() -> None:
        # The API server ends watches from time to time, and at its own end.
        with contextlib.suppress(RuntimeError):
            while True:
                for event in cluster.plane.watch("/api/v1/nodes"):
                    versions.append(_version(event["object"]))  # noqa: PERF401 - it never ends

    threading.Thread(target=read, daemon=True).start()
    return versions


def _version(node: dict[str, Any]) -> _Version:
    effects = {taint["effect"] for taint in node["spec"].get("taints", ())}
    return _Version(
        at_s=time.monotonic(),
        labels=node["metadata"]["labels"],
        allocatable=real_cluster.devices(node),
        is_open=not effects & {"NoSchedule", "NoExecute"},
    )


class Node:
    """The real node with one manager."""

    def __init__(
        self, cluster: real_cluster.RealCluster, manager: Manager, versions: list[_Version]
    ) -> None:
        self._cluster = cluster
        self._manager = manager
        self._versions = versions

    def play(self, story: Story, start: nvml_faults.SharedState) -> Outcome:
        """Play a story, which begins with the GPUs of ``start``."""
        cluster = self._cluster
        self._prepare(story, start)
        pods, profiles = self._pods(), cluster.driver.profiles()
        log, first = cluster.listen(), len(self._versions)
        cluster.request(story.layout)
        if story.is_killed:
            waiting.until(lambda: cluster.driver.profiles() != profiles, "a change")
            manager = self._manager
            for container in node_state.containers(
                cluster.pods(manager.namespace, **manager.labels)
            ):
                cluster.node.kill_container(container)
        final = self._await(
            lambda: self._versions_in(first, "success", "failed"), _OUTCOME_WITHIN_S
        )
        result = cluster.driver.profiles()
        threading.Event().wait(_FOLLOWS_WITHIN_S)
        requests = log.requests(self._manager.user)
        self._await(self._is_back, _RESUMES_WITHIN_S)
        evicted, after = log.evicted_pods(), self._pods()
        same = result == profiles
        afterwards = "GPUs as before" if same else f"GPUs with {_text_of(result)}"
        afterwards += self._afterwards()
        if story.fails_creation and final and final[0].state == "failed":
            mended = self._await(lambda: self._versions_in(first, "success"), _RETRIES_WITHIN_S)
            later_s = mended[0].at_s - final[0].at_s if mended else _RETRIES_WITHIN_S
            afterwards += f"; {later_s:.0f} s later {'`success`' if mended else 'the same'}"
        return Outcome(
            state=(final or self._versions[-1:])[0].state,
            state_s=self._seconds(first, final),
            schedulable_s=self._seconds(first, self._schedulable(first, profiles)),
            evictions=len(evicted),
            other_ends=len(pods - after) - len(evicted),
            on_missing_devices=self._on_missing_devices(),
            requests=requests,
            afterwards=afterwards,
        )

    # -- the start

    def _prepare(self, story: Story, start: nvml_faults.SharedState) -> None:
        cluster, gpus, manager = self._cluster, self._cluster.driver.gpus, self._manager
        # First withdraw the request: a blocked drain must not continue when its pods end.
        cluster.withdraw()
        cluster.reset()
        waiting.until(lambda: not cluster.pods(), "the end of pods", within_s=_START_WITHIN_S)
        cluster.kubectl("label", "node", real_cluster.NODE, f"{_STATE}-")
        if story.is_killed:
            # kubelet delays further restarts of a container.
            self._delete_pods(manager.namespace, manager.labels)
            cluster.wait_for_daemons(manager.namespace, manager.name)
        if simulated_rig.driver_geometry(gpus) != simulated_rig.driver_geometry(start):
            waiting.until(lambda: not gpus.read().clients, "idle GPUs")
            before = start.read().gpus
            gpus.update(lambda node: dataclasses.replace(node, gpus=before))
            self._delete_pods(nvidia_manager.NAMESPACE, {"app": nvidia_manager.PLUGIN})
        cluster.kubectl("label", "--overwrite", "node", real_cluster.NODE, f"{_PLUGIN_LABEL}=true")
        waiting.until(self._is_back, "the plugin's devices", within_s=_START_WITHIN_S)
        if story.has_budget:
            cluster.apply(manifests.budget(_BUSY))
        if story.pods:
            cluster.deploy(_BUSY, _RESOURCE, story.pods)
        if story.fails_creation:
            gpus.add_fault(
                nvml_faults.Fault(
                    function="nvmlDeviceCreateGpuInstance*",
                    first=story.fails_creation,
                    code=_UNKNOWN,
                )
            )

    def _delete_pods(self, namespace: str, labels: Mapping[str, str]) -> None:
        selector = ",".join(f"{key}={value}" for key, value in labels.items())
        self._cluster.kubectl("delete", "pods", "-n", namespace, f"--selector={selector}")

    # -- the observation

    def _await(self, read: Callable[[], _T], within_s: float) -> _T:
        """Wait for a value that is not empty; return the last value."""
        with contextlib.suppress(AssertionError):
            waiting.until(lambda: bool(read()), "an answer", within_s=within_s)
        return read()

    def _seconds(self, first: int, versions: Sequence[_Version]) -> float | None:
        """Return the time from the label to the first of some versions."""
        return versions[0].at_s - self._versions_since_request(first)[0].at_s if versions else None

    def _versions_since_request(self, first: int) -> Sequence[_Version]:
        """Return the versions with the requested label."""
        later = self._versions[first:]
        return list(itertools.dropwhile(lambda each: _CONFIG not in each.labels, later))

    def _versions_in(self, first: int, *states: str) -> list[_Version]:
        return [each for each in self._versions_since_request(first) if each.state in states]

    def _is_back(self) -> bool:
        cluster = self._cluster
        return nvidia_manager.plugin_runs(cluster) and cluster.allocatable() == self._devices()

    def _schedulable(self, first: int, profiles: list[list[str]]) -> Sequence[_Version]:
        if self._cluster.driver.profiles() == profiles or not self._is_back():
            return ()
        devices = self._devices()
        return [
            v
            for v in self._versions_since_request(first)
            if v.is_open and v.allocatable == devices
        ]

    def _afterwards(self) -> str:
        """Describe the node besides its GPUs."""
        labels = self._cluster.labels().items()
        problems = {
            "no device plugin": not nvidia_manager.plugin_runs(self._cluster),
            "plugin's label paused": (_PLUGIN_LABEL, "paused-for-mig-change") in labels,
            "tainted": bool(self._cluster.taints()),
        }
        return "".join(f", {problem}" for problem, exists in problems.items() if exists)

    def _pods(self) -> set[tuple[str, int]]:
        """Return UID and restarts of each running pod."""
        return {
            (
                pod["metadata"]["uid"],
                sum(each["restartCount"] for each in pod["status"]["containerStatuses"]),
            )
            for pod in self._cluster.pods(app=_BUSY)
            if real_cluster.is_running(pod)
        }

    def _on_missing_devices(self) -> int:
        assigned, devices = self._cluster.node.devices_by_uid(), self._cluster.driver.devices()
        return sum(bool(assigned.get(uid, set()) - devices) for uid, _ in self._pods())

    def _devices(self) -> dict[str, int]:
        """Return the devices of the GPUs, which kubelet advertises after the plugin's restart."""
        names = simulated_rig.devices(self._cluster.driver.gpus).values()
        return dict(collections.Counter(name.removeprefix("nvidia.com/") for name in names))


def _text_of(profiles: list[list[str]]) -> str:
    every = [
        " + ".join(f"{n}x {name}" for name, n in collections.Counter(gpu).items()) or "nothing"
        for gpu in profiles
    ]
    return every[0] if len(set(every)) == 1 else " and ".join(every)
