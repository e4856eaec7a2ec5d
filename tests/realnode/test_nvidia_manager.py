"""Our agent beside NVIDIA's mig-manager on one real node, and in its place."""

import pytest

from tests.realnode import nvidia_manager, operator, real_cluster
from tests.rigs import waiting

pytestmark = [pytest.mark.realnode, pytest.mark.slow]

_TOUCHES = {"create pods/eviction", "delete pods"}
_PLUGIN_LABEL = f"{operator.DEPLOY}device-plugin"


def test_agent_yields_to_nvidias_manager_and_then_takes_over(
    expendable_cluster: real_cluster.RealCluster,
) -> None:
    cluster, log = expendable_cluster, expendable_cluster.listen()
    nvidia_manager.install_plugin(cluster)
    nvidia_manager.install(cluster)
    cluster.request("all-1g.5gb")
    waiting.until(lambda: _is_refused(cluster, "all-1g.5gb"), "our agent's refusal")
    _until_logged(cluster, "Successfully updated to MIG config: all-1g.5gb")
    waiting.until(lambda: cluster.allocatable() == {"mig-1g.5gb": 14}, "14 devices")
    busy = cluster.deploy("busy", "mig-1g.5gb")

    cluster.request("all-2g.10gb")
    _until_logged(cluster, "Error: failed to apply MIG configuration")
    waiting.until(lambda: _is_refused(cluster, "all-2g.10gb"), "our agent's refusal")
    instances = cluster.driver.instances()

    # NVIDIA's manager pauses the plugin for good; ours has neither mended nor changed anything.
    assert cluster.labels()[_PLUGIN_LABEL] == "paused-for-mig-change"
    assert cluster.running("busy") == busy
    assert cluster.taints() == []
    assert not _TOUCHES & log.requests().keys()

    nvidia_manager.remove(cluster)
    assert cluster.driver.instances() == instances
    assert cluster.outcome("all-2g.10gb")["state"] == "success"
    assert cluster.driver.profiles() == [["2g.10gb"] * 3] * 2
    assert cluster.labels()[_PLUGIN_LABEL] == "true"
    assert cluster.allocatable() == {"mig-2g.10gb": 6}
    assert log.evicted_pods() == list(busy)
    assert cluster.taints() == []


def _is_refused(cluster: real_cluster.RealCluster, layout: str) -> bool:
    status = cluster.status()
    return status.get("config") == layout and status.get("reason") == "ForeignManager"


def _until_logged(cluster: real_cluster.RealCluster, text: str) -> None:
    waiting.until(lambda: text in nvidia_manager.log(cluster), text, within_s=120)
