"""Kubelet against the real embedded API server; its clock is the number handed to ``sync``."""

from collections.abc import Iterator

import pytest

from mig_manager.sandbox.node import (
    cluster_view,
    device_manager,
    device_plugin,
    kubelet,
    manifests,
    objects,
)
from testkit import apiserver
from tests.rigs.node import fakes

_SMALL = "nvidia.com/mig-1g.5gb"
_OPTIONS = kubelet.KubeletOptions(name="n1", pod_start_s=1.0, pod_stop_s=5.0)
_POD = cluster_view.WatchedKind.POD


class Program:
    """Records what happens to it, and fails on request."""

    next_at = None

    def __init__(self) -> None:
        self.is_running = False
        self.starts = 0
        self.crashes = False

    def start(self, now: float) -> None:
        self.starts += 1
        self.is_running = True

    def poll(self, now: float) -> None:
        if self.crashes:
            raise device_plugin.ExitedError("bad layout")

    def stop(self) -> None:
        self.is_running = False


class KubeletRig:
    """A kubelet, its program, and the cluster around them."""

    def __init__(self, cluster: cluster_view.ClusterView) -> None:
        self.cluster = cluster
        self.clock = fakes.FakeClock()
        self.manager = device_manager.DeviceManager(self.clock)
        self.program = Program()
        self.kubelet = kubelet.Kubelet(
            _OPTIONS,
            cluster=cluster,
            manager=self.manager,
            program_of=lambda _pod, _allocation: self.program,
            node_labels={"kubernetes.io/hostname": "n1"},
        )

    def create(self, *, node: str = "n1", grace_s: int = 30) -> None:
        pod = manifests.gpu_pod("p1", _SMALL)
        pod["spec"] |= {"nodeName": node, "terminationGracePeriodSeconds": grace_s}
        self.cluster.create(_POD, pod)

    def pod(self) -> objects.JsonObject:
        return self.cluster.list(_POD)[0]

    def node(self) -> objects.JsonObject:
        node_object = self.cluster.node("n1")
        assert node_object is not None
        return node_object

    def container(self) -> objects.JsonObject:
        statuses: list[objects.JsonObject] = self.pod()["status"]["containerStatuses"]
        return statuses[0]

    def admit(self, *, grace_s: int = 30) -> None:
        """Give one pod the only device at second 0."""
        self.manager.register({_SMALL: ("MIG-a",)})
        self.create(grace_s=grace_s)
        self.kubelet.sync(0.0)

    def start_pod(self) -> None:
        """Start one pod at second 1."""
        self.admit()
        for _ in range(2):
            self.kubelet.sync(1.0)


@pytest.fixture
def rig() -> Iterator[KubeletRig]:
    with apiserver.serve() as server, cluster_view.ClusterView(server.url) as cluster:
        yield KubeletRig(cluster)


def test_node_is_ready_after_a_tick_and_registers_again(rig: KubeletRig) -> None:
    rig.kubelet.register()
    rig.kubelet.tick()

    assert objects.labels(rig.node()) == {"kubernetes.io/hostname": "n1"}
    assert objects.is_ready(rig.node())
    (ready,) = rig.node()["status"]["conditions"]
    assert ready["lastHeartbeatTime"] == ready["lastTransitionTime"] != ""
    rig.cluster.delete(cluster_view.WatchedKind.NODE, rig.node())
    rig.kubelet.tick()
    assert objects.is_ready(rig.node())


def test_pod_with_a_run_time_succeeds_and_releases_its_device(rig: KubeletRig) -> None:
    rig.manager.register({_SMALL: ("MIG-a",)})
    pod = manifests.gpu_pod("p1", _SMALL)
    pod["spec"]["nodeName"] = "n1"
    pod["metadata"]["annotations"] = {objects.RUN_SECONDS: "5"}
    rig.cluster.create(_POD, pod)
    for now, then, phase in ((0.0, 1.0, "Pending"), (1.0, 6.0, "Running")):
        rig.kubelet.sync(now)
        assert rig.kubelet.next_at() == then
        assert objects.phase(rig.pod()) == phase
    assert rig.program.is_running
    assert objects.is_ready(rig.pod())
    started = rig.pod()["status"]["startTime"]

    rig.kubelet.sync(6.0)

    assert objects.phase(rig.pod()) == "Succeeded"
    assert rig.pod()["status"]["startTime"] == started
    assert not rig.program.is_running
    assert rig.manager.allocations() == ()
    assert rig.kubelet.next_at() is None


def test_registering_again_keeps_the_labels_that_are_there(rig: KubeletRig) -> None:
    labels = {"kubernetes.io/hostname": "other", "mine": "1"}
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1", "labels": labels}}
    rig.cluster.create(cluster_view.WatchedKind.NODE, node)
    rig.kubelet.register()

    assert objects.labels(rig.node()) == labels


def test_new_devices_show_at_a_tick_and_an_idle_tick_writes_nothing(rig: KubeletRig) -> None:
    rig.kubelet.tick()
    before = objects.version(rig.node())
    rig.kubelet.tick()
    rig.manager.register({_SMALL: ("MIG-a", "MIG-b")})
    rig.kubelet.sync(1.0)

    assert objects.version(rig.node()) == before
    rig.kubelet.tick()
    assert rig.node()["status"]["allocatable"][_SMALL] == "2"


@pytest.mark.parametrize(
    ("is_lost", "advertised"), [(False, "0"), (True, "1")], ids=["reported", "update lost"]
)
def test_a_resource_of_an_ended_plugin_is_forgotten_with_one_update(
    rig: KubeletRig, *, is_lost: bool, advertised: str
) -> None:
    rig.manager.register({_SMALL: ("MIG-a",)})
    rig.kubelet.tick()
    rig.manager.disconnect([_SMALL])
    rig.kubelet.tick()
    status = rig.node()["status"]
    assert (status["capacity"][_SMALL], status["allocatable"][_SMALL]) == ("1", "0")

    rig.clock.now_s = device_manager.FORGET_S
    if is_lost:
        rig.manager.status()
    rig.kubelet.tick()

    assert rig.node()["status"]["allocatable"][_SMALL] == advertised
    rig.create()
    rig.kubelet.sync(0.0)
    rig.kubelet.sync(1.0)
    assert objects.phase(rig.pod()) == "Running"
    assert not rig.manager.allocations()[0].device_ids


def test_a_pod_that_finds_no_devices_fails_for_good(rig: KubeletRig) -> None:
    rig.create()
    rig.kubelet.sync(0.0)
    rig.manager.register({_SMALL: ("MIG-a",)})
    rig.kubelet.sync(100.0)

    assert objects.phase(rig.pod()) == "Failed"
    assert rig.pod()["status"]["reason"] == "UnexpectedAdmissionError"
    assert not rig.program.starts


@pytest.mark.parametrize(("grace_s", "expected_s"), [(30, 5), (3, 3)], ids=["own-time", "grace"])
def test_a_deleted_pod_stops_within_its_grace_period(
    rig: KubeletRig, grace_s: int, expected_s: float
) -> None:
    rig.admit(grace_s=grace_s)
    rig.kubelet.sync(1.0)
    rig.cluster.delete(_POD, rig.pod())
    rig.kubelet.sync(10.0)

    assert rig.kubelet.next_at() == 10.0 + expected_s
    assert rig.program.is_running
    assert rig.manager.allocations()
    rig.kubelet.sync(10.0 + expected_s)

    assert not rig.program.is_running
    assert not rig.manager.allocations()
    assert not rig.cluster.list(_POD)


def test_a_pod_deleted_without_grace_releases_its_devices_at_once(rig: KubeletRig) -> None:
    rig.start_pod()
    rig.cluster.delete(_POD, rig.pod(), now=True)
    rig.kubelet.sync(2.0)

    assert not rig.program.is_running
    assert not rig.manager.allocations()


def test_a_pod_that_is_deleted_before_its_start_is_removed_at_once(rig: KubeletRig) -> None:
    rig.admit()
    rig.cluster.delete(_POD, rig.pod())
    rig.kubelet.sync(0.5)

    assert not rig.cluster.list(_POD)
    assert not rig.program.starts


def test_crashing_program_is_restarted_with_backoff_until_it_recovers(rig: KubeletRig) -> None:
    rig.program.crashes = True
    rig.start_pod()

    assert not objects.is_ready(rig.pod())
    assert rig.container()["restartCount"] == 1
    expected = {"reason": "CrashLoopBackOff", "message": "bad layout"}
    assert rig.container()["state"]["waiting"] == expected
    pauses = []
    for _ in range(3):
        now = rig.kubelet.next_at()
        assert now is not None
        rig.kubelet.sync(now)
        rig.kubelet.sync(now)
        pauses.append((rig.kubelet.next_at() or 0.0) - now)

    assert pauses == [20.0, 40.0, 80.0]
    assert rig.container()["restartCount"] == 4
    rig.program.crashes = False
    rig.kubelet.sync(rig.kubelet.next_at() or 0.0)
    assert objects.is_ready(rig.pod())


def test_pods_of_other_nodes_are_left_alone(rig: KubeletRig) -> None:
    rig.create(node="n2")
    rig.kubelet.sync(0.0)

    assert objects.phase(rig.pod()) == "Pending"
    assert rig.kubelet.next_at() is None


def test_after_a_reboot_a_pod_is_unready_until_it_has_restarted(rig: KubeletRig) -> None:
    rig.start_pod()
    rig.kubelet.stop()
    rig.kubelet.sync(3.0)

    assert not objects.is_ready(rig.pod())
    assert rig.container()["state"]["waiting"]["reason"] == "ContainerCreating"

    rig.kubelet.sync(4.0)

    assert objects.is_ready(rig.pod())
    assert rig.container()["restartCount"] == 1
