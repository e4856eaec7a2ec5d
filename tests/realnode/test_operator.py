"""NVIDIA's GPU operator deploys the agent in the place of its own MIG manager."""

from collections.abc import Iterator

import pytest

from testkit import nvml_faults
from tests.realnode import gpu_operator, images, manifests, node_state, real_cluster
from tests.rigs import waiting

pytestmark = pytest.mark.realnode

MANAGER, PLUGIN = gpu_operator.MANAGER, gpu_operator.PLUGIN
USER = f"system:serviceaccount:{gpu_operator.NAMESPACE}:{MANAGER}"
HALVES = """
  halves:
  - {devices: all, mig-enabled: true, mig-devices: {3g.20gb: 2}}
"""


@pytest.fixture
def shape() -> real_cluster.ClusterShape:
    return real_cluster.ClusterShape(overlay=None)


@pytest.fixture
def operator(cluster: real_cluster.RealCluster) -> Iterator[gpu_operator.Operator]:
    """The operator with our image; afterwards the node is as it wants it."""
    installed = gpu_operator.Operator(cluster)
    if not cluster.kubectl("get", "namespace", "--ignore-not-found", gpu_operator.NAMESPACE):
        installed.install()
        installed.use_ours()
        # The operator requests this layout for a node without the label.
        cluster.outcome("all-disabled")
    yield installed
    node_state.assert_released(cluster)
    waiting.until(installed.is_ready, "a ClusterPolicy that is ready", within_s=90)


def test_a_layout_becomes_schedulable_through_the_operators_own_daemon_set(
    cluster: real_cluster.RealCluster, operator: gpu_operator.Operator
) -> None:
    agent = operator.wait_for_operand(MANAGER, images.AGENT)
    monitor, labels = operator.run_dcgm(), operands(cluster)
    requests = cluster.listen()

    cluster.apply_layout("all-1g.5gb")
    assert cluster.driver.profiles() == [["1g.5gb"] * 7] * 2
    assert cluster.allocatable() == {"mig-1g.5gb": 14}
    assert requests.evicted_pods() == []
    assert operator.wait_for_operand(MANAGER, images.AGENT)["uid"] == agent["uid"]
    assert operator.uid(gpu_operator.DCGM) != monitor
    assert operands(cluster) == labels


def test_changed_mig_strategy_leaves_pods_alone_and_serves_requests(
    cluster: real_cluster.RealCluster, operator: gpu_operator.Operator
) -> None:
    if cluster.driver.profiles() != [["1g.5gb"] * 7] * 2:
        cluster.apply_layout("all-1g.5gb")
    cluster.deploy("serve", "mig-1g.5gb", 2)
    before, requests = node_state.use(cluster, "serve"), cluster.listen()
    agent = operator.wait_for_operand(MANAGER, images.AGENT)
    cluster.apply(manifests.layouts(HALVES, "halves", gpu_operator.NAMESPACE))

    operator.upgrade({"mig": {"strategy": "single"}, "migManager": {"config": {"name": "halves"}}})

    operator.wait_for_operand(PLUGIN, images.PLUGIN, MIG_STRATEGY="single")
    assert operator.wait_for_operand(MANAGER, images.AGENT)["uid"] != agent["uid"]
    waiting.until(lambda: cluster.allocatable() == {"gpu": 14}, "strategy single")
    assert (node_state.use(cluster, "serve"), requests.evicted_pods()) == (before, [])
    cluster.apply_layout("halves")
    assert cluster.allocatable() == {"gpu": 4}
    assert sorted(requests.evicted_pods()) == sorted(before)
    assert requests.requests(USER)["create pods/eviction"] >= len(before)


def test_nvidias_image_may_return_during_a_change(
    cluster: real_cluster.RealCluster, operator: gpu_operator.Operator
) -> None:
    labels = operands(cluster)
    cluster.driver.gpus.add_fault(
        nvml_faults.Fault(function="nvmlDeviceCreateGpuInstance*", hang_s=5)
    )
    cluster.request("all-2g.10gb")
    cluster.wait_for_phase("Execute")
    uid = cluster.pods(gpu_operator.NAMESPACE, app=MANAGER)[0]["metadata"]["uid"]

    operator.use_theirs()

    waiting.until(lambda: operator.image(MANAGER).startswith("nvcr.io/"), "NVIDIA's image")
    waiting.until(lambda: uid not in uids(cluster), "the end of our agent")
    node_state.assert_released(cluster)
    assert operands(cluster) == labels
    operator.wait_for_operand(PLUGIN, images.PLUGIN, MIG_STRATEGY="mixed")
    devices = len(cluster.driver.devices())
    waiting.until(lambda: sum(cluster.allocatable().values()) == devices, "allocatable devices")
    operator.use_ours()
    waiting.until(lambda: cluster.status()["state"] == "success", "the layout that was requested")
    assert cluster.driver.profiles() == [["2g.10gb"] * 3] * 2
    assert cluster.allocatable() == {"mig-2g.10gb": 6}


def operands(cluster: real_cluster.RealCluster) -> dict[str, str]:
    """Return the labels by which the operator deploys its operands."""
    return {
        key: value
        for key, value in cluster.labels().items()
        if key.startswith("nvidia.com/gpu.deploy.")
    }


def uids(cluster: real_cluster.RealCluster) -> list[str]:
    """Return the UIDs of the MIG manager's pods."""
    return [pod["metadata"]["uid"] for pod in cluster.pods(gpu_operator.NAMESPACE, app=MANAGER)]
