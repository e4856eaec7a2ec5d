"""Capacity that kubelet has forgotten and the API server has not: no pod is to be given of it."""

import json
import os
import shlex
import threading
import time
from collections.abc import Iterator

import pytest

from tests.realnode import manifests, node_state, real_cluster
from tests.rigs import waiting

pytestmark = pytest.mark.realnode

_FORGETS_S = 300.0  # kubelet forgets the resources of a plugin this long after it has stopped
_OUTAGE_S = 36.0  # kubelet writes the node's status every 10 s, so it misses several writes
_KUBELET_WRITES_S = 16.0  # longer than kubelet's pause between two updates, with some chance in it
_MINUTES = [int(each) for each in os.environ.get("OUTAGE_MINUTES", "5").split(",")]
"""When the API server is away, of the five after a plugin has stopped. Each takes seven minutes;
kubelet's update is lost in the fifth."""
_OLD, _NEW = "all-3g.20gb", "all-7g.40gb"
_OLD_DEVICE = "mig-3g.20gb"
_RESOURCE = f"nvidia.com/{_OLD_DEVICE}"
_ACTIVE = {"mig-7g.40gb": 2}


@pytest.fixture
def shape() -> real_cluster.ClusterShape:
    """A node whose agent checks for drift every few seconds."""
    settings = manifests.settings(MIG_MANAGER_DRIFT_CHECK_INTERVAL_S="5")
    return real_cluster.ClusterShape(patches=(settings,))


def be_at_rest(cluster: real_cluster.RealCluster) -> None:
    """Have the new layout requested and active."""
    cluster.apply_layout(_NEW)


def keep_capacity(cluster: real_cluster.RealCluster) -> None:
    """Bring the node into the state that a lost update of kubelet leaves."""
    patch = json.dumps({"status": {"capacity": {_RESOURCE: "4"}}})
    options = ("--subresource=status", "--type=merge", f"--patch={patch}")
    cluster.kubectl("patch", "node", real_cluster.NODE, *options)


def removals(cluster: real_cluster.RealCluster) -> Iterator[str]:
    """Return what the Events about removed devices say."""
    for event in cluster.get("events", "-n", "default")["items"]:
        if event["reason"] == "PhantomDevicesRemoved":
            yield event["message"]


def assert_clean(cluster: real_cluster.RealCluster) -> None:
    """Check that phantom devices are gone, and stay so with kubelet's next update."""
    # Kubelet writes the status when something in it differs.
    cluster.kubectl(
        "label", "--overwrite", "node", real_cluster.NODE, f"test={time.monotonic_ns()}"
    )
    dirty_s = time.monotonic()

    def stays_clean() -> bool:
        # After an outage kubelet writes from its cache, which lags up to a minute behind.
        nonlocal dirty_s
        node = cluster.get("node", real_cluster.NODE)
        if _OLD_DEVICE in real_cluster.capacity(node) or real_cluster.devices(node) != _ACTIVE:
            dirty_s = time.monotonic()
        return time.monotonic() - dirty_s > _KUBELET_WRITES_S

    waiting.until(stays_clean, "a node without phantom devices", within_s=180)
    assert cluster.status()["state"] == "success"
    node_state.assert_at_rest(cluster)


def test_devices_that_no_gpu_has_are_removed_at_rest(cluster: real_cluster.RealCluster) -> None:
    be_at_rest(cluster)
    keep_capacity(cluster)

    assert_clean(cluster)

    assert any(_RESOURCE in message for message in removals(cluster))


def test_a_change_beside_devices_that_no_gpu_has_succeeds(
    cluster: real_cluster.RealCluster,
) -> None:
    cluster.ensure_layout("all-1g.5gb")
    keep_capacity(cluster)

    cluster.apply_layout(_NEW)
    assert_clean(cluster)


def test_devices_that_may_not_be_removed_are_published_with_the_command(
    expendable_cluster: real_cluster.RealCluster,
) -> None:
    cluster = expendable_cluster
    be_at_rest(cluster)
    role = cluster.get("clusterrole", "mig-manager")
    rules = [rule for rule in role["rules"] if rule["resources"] != ["nodes/status"]]
    cluster.kubectl("replace", "--filename=-", document=role | {"rules": rules})
    keep_capacity(cluster)
    waiting.until(lambda: cluster.status().get("reason") == "PhantomDevices", "the state failed")
    assert cluster.allocatable() == _ACTIVE | {_OLD_DEVICE: 4}

    message = cluster.status()["message"]
    _, *command = shlex.split(message[message.index("kubectl patch") :].partition(". ")[0])
    cluster.kubectl(*command)

    waiting.until(lambda: cluster.status()["state"] == "success", "success")
    assert_clean(cluster)


@pytest.mark.parametrize("minute", _MINUTES)
def test_an_outage_after_a_change_leaves_no_device_that_no_gpu_has(
    expendable_cluster: real_cluster.RealCluster, minute: int
) -> None:
    cluster = expendable_cluster
    cluster.ensure_layout(_OLD)
    began, count = time.monotonic(), len(list(removals(cluster)))
    cluster.request(_NEW)
    cluster.wait_for_phase("Pause")
    stopped = time.monotonic()
    assert cluster.outcome(_NEW)["state"] == "success"

    _wait_until(began + _FORGETS_S * minute / 5 - 10)
    cluster.plane.kill_api()
    _wait_until(stopped + _FORGETS_S * minute / 5 + _OUTAGE_S - 10)
    cluster.plane.start_api()
    _wait_until(stopped + _FORGETS_S + _OUTAGE_S)

    assert_clean(cluster)
    if minute == 5:
        # Without it the outage has missed kubelet's one update.
        assert len(list(removals(cluster))) > count


def _wait_until(at_s: float) -> None:
    threading.Event().wait(max(0.0, at_s - time.monotonic()))
