"""The partitioner beside the stock scheduler, on a real kubelet and device plugin."""

import collections
import time

import pytest

from mig_manager.sandbox.driver import states
from tests.realnode import node_state, progress, real_cluster
from tests.rigs import waiting
from tests.rigs.cluster import audit

pytestmark = pytest.mark.realnode

PODS = 6
PARTITIONER = "mig-manager-partitioner"
ACCOUNT = f"system:serviceaccount:mig-manager:{PARTITIONER}"
LABEL = f"app.kubernetes.io/name={PARTITIONER}"


@pytest.fixture
def shape() -> real_cluster.ClusterShape:
    container = {"name": "partitioner", "env": [{"name": "MIG_MANAGER_MODE", "value": "act"}]}
    acts = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": PARTITIONER, "namespace": "mig-manager"},
        "spec": {"template": {"spec": {"containers": [container]}}},
    }
    return real_cluster.ClusterShape(
        overlay="partitioner", patches=(acts,), latency=states.REALISTIC
    )


def test_pods_that_need_other_devices_run_after_one_change(
    cluster: real_cluster.RealCluster,
) -> None:
    cluster.ensure_layout("all-1g.5gb")
    cluster.kubectl("label", "node", real_cluster.NODE, "mig-manager.io/partitioning=on-demand")
    # A leader that saw the change would let the node rest.
    deployment = f"deployment/{PARTITIONER}"
    cluster.kubectl("scale", "-n", "mig-manager", deployment, "--replicas=0")
    cluster.kubectl("wait", "-n", "mig-manager", "pod", "-l", LABEL, "--for=delete")
    start = cluster.listen()
    cluster.kubectl("scale", "-n", "mig-manager", deployment, "--replicas=2")
    # Both replicas watch, so that the other one knows the cluster when it has to lead.
    watches = collections.Counter(
        {f"watch {name}": 2 for name in ("deviceclasses", "nodes", "pods")}
    )
    waiting.until(lambda: watches <= start.requests(ACCOUNT), "their watches", within_s=60)
    log, begin_s = cluster.listen(), time.monotonic()

    cluster.deploy("asked-for", "mig-2g.10gb", PODS)

    progress.note(f"{PODS} pods run after {time.monotonic() - begin_s:.1f} s")
    assert [each.count("2g.10gb") for each in cluster.driver.profiles()] == [3, 3]
    requests = log.requests(audit.AGENT) + log.requests(ACCOUNT)
    leases = sum(count for name, count in requests.items() if name.endswith(" leases"))
    assert requests.total() - leases <= 4 * PODS, requests
    assert log.evicted_pods() == []
    node_state.assert_at_rest(cluster)
