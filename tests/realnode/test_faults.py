"""Whatever dies during a change: it ends well, and only the affected pods are evicted, once."""

import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterable, Mapping

import pytest

from testkit import nvml_faults
from tests.realnode import contract_keys, manifests, node_state, real_cluster
from tests.rigs import api_objects, waiting

pytestmark = pytest.mark.realnode

_LAYOUTS = """
  test-quarters:
  - {devices: [0], mig-enabled: true, mig-devices: {2g.10gb: 2, 3g.20gb: 1}}
  - {devices: [1], mig-enabled: true, mig-devices: {7g.40gb: 1}}
  test-half:
  - {devices: [0], mig-enabled: true, mig-devices: {4g.20gb: 1, 3g.20gb: 1}}
  - {devices: [1], mig-enabled: true, mig-devices: {7g.40gb: 1}}
"""
_KEPT = {"beside": "3g.20gb", "elsewhere": "7g.40gb"}
"""Workloads that no change affects: on the GPU that changes, and on the other."""
_HANG_S = 3.0
"""How long the driver takes to create an instance: the change is in Execute meanwhile."""


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """One of two layouts that the stories change between."""

    name: str
    profiles: tuple[str, ...]  # of the first GPU, in the order of their placements
    app: str  # the workload that runs on this layout only
    own_profile: str  # the profile that it uses, which the other layout lacks

    @property
    def allocatable(self) -> dict[str, int]:
        """How many devices of each resource the node advertises."""
        every = (*self.profiles, "7g.40gb")
        return {f"mig-{profile}": every.count(profile) for profile in every}

    @property
    def count(self) -> int:
        """How many pods its own workload has."""
        return self.profiles.count(self.own_profile)


_QUARTERS = Layout("test-quarters", ("2g.10gb", "2g.10gb", "3g.20gb"), "quarters", "2g.10gb")
_HALF = Layout("test-half", ("4g.20gb", "3g.20gb"), "half", "4g.20gb")


def _kill_agent(cluster: real_cluster.RealCluster) -> None:
    _kill(cluster, node_state.agents)


def _delete_agent(cluster: real_cluster.RealCluster) -> None:
    cluster.kubectl("delete", "pods", "-n", "mig-manager", "--all", "--wait=false")


def _kill_plugin(cluster: real_cluster.RealCluster) -> None:
    _kill(cluster, node_state.plugins)


def _kill(
    cluster: real_cluster.RealCluster,
    pods: Callable[[real_cluster.RealCluster], list[api_objects.Object]],
) -> None:
    """Kill the containers of some pods; return when kubelet has reported their end."""
    killed: set[str] = set()

    def has_killed() -> bool:
        for container in node_state.containers(pods(cluster)):
            # One that is ending may be gone before kubelet reports it.
            with contextlib.suppress(RuntimeError):
                cluster.node.kill_container(container)
                killed.add(container)
        return bool(killed)

    waiting.until(has_killed, "a running container")
    waiting.until(
        lambda: killed.isdisjoint(node_state.containers(pods(cluster))), "the end of a container"
    )


def _kill_kubelet(cluster: real_cluster.RealCluster) -> None:
    cluster.node.kill("kubelet")
    _stay_down(3.0)
    cluster.node.start_kubelet()


def _stop_kubelet(cluster: real_cluster.RealCluster) -> None:
    """Kill kubelet, and start it once the control plane has noted that its node is not ready."""
    cluster.node.kill("kubelet")
    waiting.until(
        lambda: not cluster.is_ready(real_cluster.NODE), "a node that is not ready", within_s=90
    )
    cluster.node.start_kubelet()


def _kill_containerd(cluster: real_cluster.RealCluster) -> None:
    cluster.node.kill("containerd")
    _stay_down(3.0)
    cluster.node.start_containerd()


def _kill_api(cluster: real_cluster.RealCluster) -> None:
    cluster.plane.kill_api()
    _stay_down(4.0)
    cluster.plane.start_api()


def _stay_down(seconds: float) -> None:
    """Be without a program for as long as its supervisor takes to start it again."""
    threading.Event().wait(seconds)


_KILLS: Mapping[str, Callable[[real_cluster.RealCluster], None]] = {
    "agent": _kill_agent,
    "pod of the agent": _delete_agent,
    "kubelet": _kill_kubelet,
    "containerd": _kill_containerd,
    "api": _kill_api,
    "plugin": _kill_plugin,
}
_TOGETHER = (
    {"Drain": "api", "Pause": "plugin", "Execute": "agent", "Verify": "containerd"},
    {"Drain": "plugin", "Pause": "agent", "Execute": "containerd", "Verify": "kubelet"},
    {"Drain": "agent", "Pause": "containerd", "Execute": "kubelet", "Verify": "api"},
    {"Drain": "containerd", "Pause": "kubelet", "Execute": "api"},
    {"Drain": "kubelet", "Pause": "api", "Execute": "pod of the agent", "Verify": "agent"},
    {"Verify": "plugin"},
)
"""Up to four kills in each change. Clients of Kubernetes wait up to a minute before they connect
again if the API server dies twice within two minutes, so kubelet is killed between the two. If it
dies in Execute, the attempt may fail, and the next may find that all is well, without Verify."""
_PROGRAMS = ("agent", "kubelet", "containerd", "api", "plugin")
_PHASES = ("Drain", "Pause", "Execute", "Verify")
_NOT_RUNNING = {("plugin", "Execute")}
"""A change ends the plugin in Pause, and starts it after Execute."""


def test_each_program_dies_in_each_phase_that_it_runs_in() -> None:
    played = {(program, phase) for kills in _TOGETHER for phase, program in kills.items()}
    assert played >= {*itertools.product(_PROGRAMS, _PHASES)} - _NOT_RUNNING


def _name(kills: Mapping[str, str]) -> str:
    return ", ".join(f"{phase}: {program}" for phase, program in kills.items())


@pytest.mark.parametrize("kills", _TOGETHER, ids=_name)
def test_a_change_ends_well_whatever_dies_in_whichever_phase(
    busy: real_cluster.RealCluster, kills: Mapping[str, str]
) -> None:
    change = StruckChange(busy)
    change.request_with_kills({phase: _KILLS[program] for phase, program in kills.items()})
    change.assert_good_end(awaits_plugin=kills.get("Verify") == "plugin")


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["Drain", "Execute"])
def test_a_change_ends_well_if_kubelet_is_down_until_its_node_is_not_ready(
    busy: real_cluster.RealCluster, phase: str
) -> None:
    change = StruckChange(busy)
    change.request_with_kills({phase: _stop_kubelet})
    change.assert_good_end()


class StruckChange:
    """A change of a busy node, which pauses in phases for something to be killed there."""

    def __init__(self, cluster: real_cluster.RealCluster) -> None:
        self._cluster = cluster
        self._source, self._target = _source_and_target(cluster)
        self._kept = node_state.use(cluster, *_KEPT)
        self._affected_pods = cluster.running(self._source.app)
        self._log = cluster.listen()

    def request_with_kills(
        self, kills: Mapping[str, Callable[[real_cluster.RealCluster], None]]
    ) -> None:
        """Request the other layout, and kill something in each of some phases."""
        cluster, gpus = self._cluster, self._cluster.driver.gpus
        pods = node_state.containers(cluster.pods(app=self._source.app))
        if "Drain" in kills:
            self._signal(pods, "SIGSTOP")
        if "Execute" in kills:
            create = "nvmlDeviceCreateGpuInstance*"
            gpus.add_fault(nvml_faults.Fault(function=create, hang_s=_HANG_S))
        cluster.request(self._target.name)
        if "Drain" in kills:
            waiting.until(self._is_draining, "the evictions")
            kills["Drain"](cluster)
        plugin = self._stop_plugin() if "Pause" in kills else []
        if "Drain" in kills:
            self._signal(pods, "SIGCONT")
        if "Pause" in kills:
            waiting.until(self._is_pausing, "the end of the plugin")
            kills["Pause"](cluster)
            with contextlib.suppress(RuntimeError):
                # The plugin may be what has died.
                self._signal(plugin, "SIGCONT")
        if "Execute" in kills:
            waiting.until(lambda: gpus.faults()[0].strikes > 0, "the driver to hang")
            kills["Execute"](cluster)
        if "Verify" in kills:
            cluster.wait_for_phase("Verify")
            kills["Verify"](cluster)

    def assert_good_end(self, *, awaits_plugin: bool = False) -> None:
        """Check that the change succeeded and disturbed nothing but the affected pods.

        With ``awaits_plugin`` the plugin may have died right after the agent's last look at it:
        until it is back, kubelet advertises nothing, and refuses what is already bound.
        """
        cluster, target = self._cluster, self._target
        waiting.until(self._has_succeeded, "success", within_s=240)
        if awaits_plugin:
            waiting.until(lambda: cluster.allocatable() == target.allocatable, "the plugin")
        assert cluster.allocatable() == target.allocatable
        assert cluster.driver.profiles() == [[*target.profiles], ["7g.40gb"]]
        assert sorted(self._log.evicted_pods()) == sorted(self._affected_pods)
        node_state.assert_at_rest(cluster)
        assert awaits_plugin or cluster.refused_pods() == []
        waiting.until(self._is_target_used, "the pods that waited")
        assert node_state.use(cluster, *_KEPT) == self._kept

    def _stop_plugin(self) -> list[str]:
        """Stop the plugin's processes, which SIGTERM does not end then."""
        cluster = self._cluster
        waiting.until(lambda: bool(node_state.containers(node_state.plugins(cluster))), "a plugin")
        containers = node_state.containers(node_state.plugins(cluster))
        self._signal(containers, "SIGSTOP")
        return containers

    def _is_draining(self) -> bool:
        pods = self._cluster.pods(app=self._source.app)
        return all(
            node_state.is_terminating(pod)
            for pod in pods
            if pod["metadata"]["name"] in self._affected_pods
        )

    def _has_succeeded(self) -> bool:
        """An agent whose pod is deleted publishes a failure, and its successor continues."""
        status = self._cluster.status()
        return (status.get("config"), status.get("state")) == (self._target.name, "success")

    def _is_target_used(self) -> bool:
        return len(self._cluster.running(self._target.app)) == self._target.count

    def _is_pausing(self) -> bool:
        return any(map(node_state.is_terminating, node_state.plugins(self._cluster)))

    def _signal(self, containers: Iterable[str], name: str) -> None:
        for container in containers:
            self._cluster.node.signal(container, name)


@pytest.fixture
def shape() -> real_cluster.ClusterShape:
    """A node whose agent knows the two layouts."""
    return real_cluster.ClusterShape(patches=(manifests.layouts(_LAYOUTS),))


@pytest.fixture
def busy(cluster: real_cluster.RealCluster) -> real_cluster.RealCluster:
    """A node with one of the two layouts, all of whose devices are in use."""
    # They connect at once, whatever the API server did in the change before.
    cluster.plane.restart_clients()
    _renew_agent(cluster)
    if cluster.labels().get(contract_keys.APPLIED_LABEL) != _HALF.name:
        cluster.ensure_layout(_QUARTERS.name)
    source, target = _source_and_target(cluster)
    counts = dict.fromkeys(_KEPT, 1) | {source.app: source.count}
    profiles = _KEPT | {source.app: source.own_profile, target.app: target.own_profile}
    for app, profile in profiles.items():
        replicas = counts.get(app, target.count)
        workload = manifests.workload(
            app, f"mig-{profile}", replicas, terminationGracePeriodSeconds=30
        )
        cluster.apply(workload)
    waiting.until(
        lambda: all(len(cluster.running(app)) == count for app, count in counts.items()),
        "pods on all devices",
    )
    return cluster


def _source_and_target(cluster: real_cluster.RealCluster) -> tuple[Layout, Layout]:
    """Return the layout that the node has, and the other."""
    applied = cluster.labels()[contract_keys.APPLIED_LABEL]
    return (_QUARTERS, _HALF) if applied == _QUARTERS.name else (_HALF, _QUARTERS)


def _renew_agent(cluster: real_cluster.RealCluster) -> None:
    """Have an agent that was never restarted: kubelet waits longer after each restart of a pod."""
    restarts = [
        each["restartCount"]
        for pod in node_state.agents(cluster)
        for each in pod["status"].get("containerStatuses", ())
    ]
    if any(restarts):
        cluster.kubectl("delete", "pods", "-n", "mig-manager", "--all")
        waiting.until(lambda: node_state.is_served(cluster), "a new agent")
