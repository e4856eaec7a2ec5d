"""The partitioner beside the stock scheduler, on a real kubelet and device plugin."""

import time

import pytest

from mig_manager.sandbox.driver import states
from tests import waiting
from tests.realnode import audit, judging, progress, rig

pytestmark = pytest.mark.realnode

PODS = 6
PARTITIONER = "mig-manager-partitioner"


@pytest.fixture
def shape() -> rig.Shape:
    container = {"name": "partitioner", "env": [{"name": "MIG_MANAGER_MODE", "value": "act"}]}
    acts = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": PARTITIONER, "namespace": "mig-manager"},
        "spec": {"template": {"spec": {"containers": [container]}}},
    }
    return rig.Shape(overlay="partitioner", patches=(acts,), latency=states.REALISTIC)


def leader(cluster: rig.Cluster) -> str:
    """Return the pod that decides; empty while there is none."""
    lease = cluster.get("lease", "-n", "mig-manager", PARTITIONER)
    return str(lease["spec"].get("holderIdentity", "")).partition("_")[0]


def test_pods_that_need_other_devices_run_after_one_change(cluster: rig.Cluster) -> None:
    cluster.ensure_layout("all-1g.5gb")
    cluster.kubectl("label", "node", rig.NODE, "mig-manager.io/partitioning=on-demand")
    # A leader that saw the change would let the node rest.
    before = leader(cluster)
    cluster.kubectl("rollout", "restart", "-n", "mig-manager", f"deployment/{PARTITIONER}")
    waiting.until(lambda: leader(cluster) not in {"", before}, "another leader", within_s=60)
    log, begin_s = cluster.listen(), time.monotonic()

    cluster.deploy("asked-for", "mig-2g.10gb", PODS)

    progress.note(f"{PODS} pods run after {time.monotonic() - begin_s:.1f} s")
    assert [each.count("2g.10gb") for each in cluster.driver.profiles()] == [3, 3]
    requests = log.requests(audit.AGENT) + log.requests(
        f"system:serviceaccount:mig-manager:{PARTITIONER}"
    )
    leases = sum(count for name, count in requests.items() if name.endswith(" leases"))
    assert requests.total() - leases <= 4 * PODS, requests
    assert log.evicted() == []
    judging.assert_at_rest(cluster)
