"""A GPU with a fault is reset without a person: only its pods leave, and all devices return."""

import pytest

from tests.realnode import manifests, node_state, real_cluster
from tests.rigs import waiting

pytestmark = pytest.mark.realnode

_LAYOUTS = """
  test-two-gpus:
  - {devices: [0], mig-enabled: true, mig-devices: {1g.5gb: 7}}
  - {devices: [1], mig-enabled: true, mig-devices: {2g.10gb: 2, 3g.20gb: 1}}
"""
_RESET = 1  # ``NVML_GPU_RECOVERY_ACTION_GPU_RESET``


@pytest.fixture
def shape() -> real_cluster.ClusterShape:
    """A node whose owner lets the agent repair GPUs."""
    allowed = manifests.settings(
        MIG_MANAGER_REPAIR="reset", MIG_MANAGER_DRIFT_CHECK_INTERVAL_S="2"
    )
    return real_cluster.ClusterShape(patches=(manifests.layouts(_LAYOUTS), allowed))


def _request(cluster: real_cluster.RealCluster) -> None:
    """Make a new request: a node without a request is not repaired, whatever it has."""
    cluster.apply_layout("test-two-gpus")


def _condition(cluster: real_cluster.RealCluster) -> tuple[str, str]:
    """Return status and message of the condition; empty if the node lacks it."""
    for each in cluster.get("node", real_cluster.NODE)["status"]["conditions"]:
        if each["type"] == "GpuRecoveryNeeded":
            return each["status"], each["message"]
    return "", ""


def _events(cluster: real_cluster.RealCluster) -> set[str]:
    return {each["reason"] for each in cluster.get("events", "-A")["items"]}


def test_a_gpu_with_a_fault_is_reset_and_only_its_pods_leave(
    cluster: real_cluster.RealCluster,
) -> None:
    _request(cluster)
    cluster.deploy("kept", "mig-1g.5gb", 2)
    affected = cluster.deploy("affected", "mig-2g.10gb")
    kept, profiles = node_state.use(cluster, "kept"), cluster.driver.profiles()
    allocatable, log = cluster.allocatable(), cluster.listen()

    cluster.driver.gpus.fail_gpu(1, action=_RESET)

    waiting.until(lambda: _condition(cluster)[0] == "True", "the condition")
    waiting.until(lambda: _condition(cluster)[0] == "False", "the repair", within_s=180)
    waiting.until(lambda: cluster.is_idle(real_cluster.NODE), "the end of the run")
    waiting.until(lambda: len(cluster.running("affected")) == 1, "a successor of the pod")
    assert log.evicted_pods() == [*affected]
    assert cluster.driver.profiles() == profiles
    assert cluster.allocatable() == allocatable
    assert node_state.use(cluster, "kept") == kept
    assert cluster.status()["state"] == "success"
    assert {"GpuRepairBegun", "GpuRepaired", "GpuRecovered"} <= _events(cluster)
    assert cluster.refused_pods() == []
    node_state.assert_at_rest(cluster)


def test_a_cordon_of_another_program_defers_the_repair(cluster: real_cluster.RealCluster) -> None:
    _request(cluster)
    pods = cluster.deploy("busy", "mig-1g.5gb", 2)
    instances, log = cluster.driver.instances(), cluster.listen()
    cluster.kubectl("cordon", real_cluster.NODE)

    cluster.driver.gpus.fail_gpu(0, action=_RESET)

    waiting.until(lambda: "the node is cordoned" in _condition(cluster)[1], "the reason")
    assert cluster.driver.instances() == instances
    assert log.evicted_pods() == []
    cluster.kubectl("uncordon", real_cluster.NODE)
    waiting.until(lambda: _condition(cluster)[0] == "False", "the repair", within_s=180)
    waiting.until(lambda: len(cluster.running("busy")) == len(pods), "the successors")
    assert sorted(log.evicted_pods()) == sorted(pods)
    node_state.assert_at_rest(cluster)
