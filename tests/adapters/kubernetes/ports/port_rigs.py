"""The ports of a node twice: the fakes in memory, and the adapters on servers of their own.

Both rigs arrange the same, so that each test plays on both: ``node-a`` with two GPUs that a
device plugin has registered, four devices that no plugin has, and a slice of one device.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

from mig_manager import errors, reasons
from mig_manager.adapters import pod_resources
from mig_manager.adapters.host import lock_file
from mig_manager.adapters.kubernetes import api, kube_node, lease_slots, pod_claims, pods
from mig_manager.core import ports
from mig_manager.core.fleet import slots
from mig_manager.core.node.devices import claims
from mig_manager.core.objects import pod_object, pod_parser
from mig_manager.sandbox.apiserver import kinds
from testkit import apiserver
from tests.rigs import api_objects
from tests.rigs.cluster import apirig, kubelet_rig
from tests.rigs.node import cluster_parts, fake_cluster, fakes, node_rig, samples

NODE = "node-a"
GPU, OTHER = "nvidia.com/gpu", "nvidia.com/hostdev"
DEVICES = {GPU: 2, OTHER: 4}
UUIDS = {GPU: frozenset({"GPU-0", "GPU-1"})}
LABELS = {"app": "train"}  # of all pods; the budgets select them
SLICE = api_objects.a_resource_slice(api_objects.a_device("gpu-0", uuid="GPU-0"), node=NODE)


class InMemory:
    """The fakes."""

    def __init__(self) -> None:
        rig = node_rig.NodeRig(gpus=())
        rig.node_object.taints.add("dedicated")
        rig.kubelet.schedulable = UUIDS
        rig.dra_driver.slices = (claims.parse_slice(SLICE),)
        rig.kubelet.phantoms = {OTHER: DEVICES[OTHER]}
        # As in a cluster in which kubelet's next heartbeat never comes.
        rig.kubelet.reports_from_s, rig.kubelet.reported_devices = math.inf, {GPU: DEVICES[GPU]}
        self._rig = rig
        self._lock = fakes.FakeLock()
        self.node: ports.Node = fake_cluster.FakeNode(rig)
        self.workloads: ports.Workloads = fake_cluster.FakeWorkloads(rig)
        self.allocations: ports.DeviceAllocations = fake_cluster.FakeAllocations(rig)
        self.slices: ports.ResourceSlices = fake_cluster.FakeSlices(rig)
        self.slots: ports.Slots = fake_cluster.FakeSlots(rig)
        self.lock: ports.NodeLock = self._lock

    def label(self, key: str, value: str) -> None:
        """Label the node as another program."""
        self._rig.node_object.labels[key] = value

    def conditions(self) -> dict[str, str]:
        """Return the status of the agent's conditions, by type."""
        entries = (self._rig.node_object.ready_condition, self._rig.node_object.recovery_condition)
        return {entry["type"]: entry["status"] for entry in entries if entry}

    def add_pod(
        self, name: str, *, on: str = NODE, devices: frozenset[str] = frozenset(), **facts: Any
    ) -> pod_object.Pod:
        """Add a pod, or an unscheduled one; kubelet lists it with its devices."""
        if on == NODE:
            uid = self._rig.pods.add(name, devices=devices, labels=LABELS, **facts)
            return self._rig.pods[uid]
        pod = samples.pod(name, node_name=on, labels=LABELS, is_ready=bool(on))
        self._rig.pods.elsewhere[pod.uid] = pod
        return pod

    def unlabel(self, pod: pod_object.Pod) -> None:
        """Remove the labels of a pod."""
        self._rig.pods.change(pod.uid, labels={})

    def end(self, pod: pod_object.Pod) -> None:
        """Remove a pod, as kubelet at its end."""
        self._rig.pods.remove(pod.uid)

    def add_budget(self, name: str, max_unavailable: int, *, namespace: str = "default") -> None:
        """Add a budget for as many pods as its namespace has."""
        replicas = sum(pod.namespace == namespace for pod in self._rig.pods.everywhere)
        budget = cluster_parts.Budget(name, LABELS["app"], replicas, max_unavailable, namespace)
        self._rig.disruptions.budgets.append(budget)

    def end_kubelet(self) -> None:
        self._rig.kubelet.is_silent = True

    def forbid_slices(self) -> None:
        self._rig.dra_driver.slices = None

    def occupy_slot(self, node_name: str) -> None:
        """Give the only slot to another node."""
        self._rig.slots.denials = [slots.Denial(limit=1, changing=(node_name,))]

    @contextlib.contextmanager
    def another_manager(self) -> Iterator[None]:
        """Have another manager lock the GPUs, at the next attempt of ours."""
        self._lock.refusals = 1
        yield

    def fail(self) -> None:
        """Have the API server fail at each request."""
        error = errors.ClusterError("broken", reason=reasons.Reason.API_UNAVAILABLE, status=500)
        calls = {
            "node": "read patch hide_devices report_devices remove_resources",
            "workloads": "list evict can_evict budgets covered_by delete",
            "slices": "list delete",
        }
        self._rig.failures.add_all(
            {f"{port}.{call}": error for port, names in calls.items() for call in names.split()}
        )


class OnServers:
    """The adapters, on the embedded API server, a kubelet that speaks gRPC, and a lock file."""

    def __init__(
        self, server: apiserver.ApiServer, kubelet: kubelet_rig.GrpcKubelet, kube: api.KubeApi
    ) -> None:
        self._server, self._kubelet = server, kubelet
        clock = fakes.FakeClock()
        counts = {name: str(count) for name, count in DEVICES.items()}
        taint = {"key": "dedicated", "effect": "NoSchedule"}
        status = {"allocatable": counts, "capacity": counts}
        server.create(
            api_objects.a_node(NODE) | {"spec": {"taints": [taint]}, "status": status},
            SLICE,
        )
        kubelet.devices = [kubelet_rig.devices(name, *ids) for name, ids in UUIDS.items()]
        kubelet.start()
        self.node: ports.Node = kube_node.KubeNode(kube, name=NODE, clock=clock)
        self.workloads: ports.Workloads = pods.KubeWorkloads(kube, node_name=NODE, clock=clock)
        self.allocations: ports.DeviceAllocations = pod_resources.PodResources(str(kubelet.path))
        self.slices: ports.ResourceSlices = pod_claims.KubeSlices(kube, node_name=NODE)
        self.slots: ports.Slots = lease_slots.LeaseSlots(
            kube, namespace="mig-manager", node_name=NODE, limit=1, clock=clock
        )
        self._other_lock, self.lock = (
            lock_file.LockFile(
                kubelet.path.with_name("lock"), program=name, clock=clock, is_required=True
            )
            for name in ("other", "agent")
        )

    def label(self, key: str, value: str) -> None:
        self._server.merge(kinds.NODES, NODE, {"metadata": {"labels": {key: value}}})

    def conditions(self) -> dict[str, str]:
        stored = self._server.get(kinds.NODES, NODE)["status"].get("conditions", ())
        return {entry["type"]: entry["status"] for entry in stored}

    def add_pod(
        self,
        name: str,
        *,
        on: str = NODE,
        devices: frozenset[str] = frozenset(),
        namespace: str = "default",
        phase: str = "",
        is_ready: bool = True,
    ) -> pod_object.Pod:
        limits = {GPU: len(devices)} if devices else None
        pod = api_objects.a_pod(
            name, LABELS, node=on, namespace=namespace, phase=phase, limits=limits
        )
        if not is_ready:
            del pod["status"]["conditions"]
        self._server.create(pod)
        if on == NODE:
            entries = [kubelet_rig.devices(GPU, *devices)] if devices else []
            self._kubelet.pods.append(kubelet_rig.pod(name, *entries, namespace=namespace))
        return pod_parser.parse(pod)

    def unlabel(self, pod: pod_object.Pod) -> None:
        change = {"metadata": {"labels": None}}
        self._server.merge(kinds.PODS, pod.name, change, namespace=pod.namespace)

    def end(self, pod: pod_object.Pod) -> None:
        self._server.delete(kinds.PODS, pod.name, pod.namespace)

    def add_budget(self, name: str, max_unavailable: int, *, namespace: str = "default") -> None:
        selector = {"matchLabels": LABELS}
        self._server.create(
            api_objects.a_budget(
                name, selector, namespace=namespace, maxUnavailable=max_unavailable
            )
        )

    def end_kubelet(self) -> None:
        self._kubelet.stop()

    def forbid_slices(self) -> None:
        self._server.inject(apiserver.Fault(resource="resourceslices", status=403, times=None))

    def occupy_slot(self, node_name: str) -> None:
        spec = {"holderIdentity": node_name, "leaseDurationSeconds": 90}
        self._server.create(api_objects.a_lease(slots.name_of(0), **spec))

    @contextlib.contextmanager
    def another_manager(self) -> Iterator[None]:
        with self._other_lock.hold("apply"):
            yield

    def fail(self) -> None:
        self._server.inject(apiserver.Fault(status=500, times=None))


Rig = InMemory | OnServers


@contextlib.contextmanager
def in_memory() -> Iterator[Rig]:
    yield InMemory()


@contextlib.contextmanager
def on_servers() -> Iterator[Rig]:
    with (
        apiserver.serve() as server,
        kubelet_rig.a_kubelet() as kubelet,
        apirig.quick_client(server) as kube,
    ):
        rig = OnServers(server, kubelet, kube)
        yield rig
        server.clear_faults()
        rig.slots.release()
