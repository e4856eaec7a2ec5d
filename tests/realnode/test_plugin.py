"""NVIDIA's device plugin and GPU feature discovery, as their owners configure them."""

import re

import pytest

from tests.realnode import manifests, node_state, nvidia, real_cluster
from tests.rigs import api_objects, waiting

pytestmark = pytest.mark.realnode


def _serve(cluster: real_cluster.RealCluster, *objects: api_objects.Object) -> None:
    """Have a plugin serve the node, and wait until it does."""
    cluster.apply(*objects)
    cluster.wait_for_daemons("kube-system", manifests.PLUGIN)


@pytest.mark.parametrize(
    ("plugin", "before", "layout", "devices"),
    [
        pytest.param(
            manifests.plugin(tolerates_all=True),
            "all-7g.40gb",
            "all-balanced",
            {"mig-1g.5gb": 4, "mig-2g.10gb": 2, "mig-3g.20gb": 2},
            id="tolerates all taints",
        ),
        pytest.param(
            manifests.plugin(MIG_STRATEGY="none"),
            "all-balanced",
            "all-3g.20gb",
            {"gpu": 2},
            id="none",
        ),
        pytest.param(
            manifests.plugin(MIG_STRATEGY="single"),
            # The plugin would end on GPUs with different instances.
            "all-3g.20gb",
            "all-7g.40gb",
            {"gpu": 2},
            id="single",
        ),
    ],
)
def test_every_way_to_run_the_plugin_serves_a_new_layout(
    cluster: real_cluster.RealCluster,
    plugin: api_objects.Object,
    before: str,
    layout: str,
    devices: dict[str, int],
) -> None:
    cluster.ensure_layout(before)
    _serve(cluster, plugin)
    cluster.apply_layout(layout)
    assert cluster.allocatable() == devices
    node_state.assert_at_rest(cluster)


def test_a_layout_that_would_end_the_plugin_waits_for_another_strategy(
    cluster: real_cluster.RealCluster,
) -> None:
    cluster.ensure_layout("all-7g.40gb")
    _serve(cluster, manifests.plugin(MIG_STRATEGY="single"))
    plugins = node_state.containers(node_state.plugins(cluster))
    instances = cluster.driver.instances()
    cluster.request("all-balanced")
    waiting.until(lambda: cluster.status().get("reason") == "StrategyMismatch", "a refusal")

    assert cluster.driver.instances() == instances
    assert node_state.containers(node_state.plugins(cluster)) == plugins
    node_state.assert_at_rest(cluster)
    cluster.apply(manifests.plugin())
    assert cluster.outcome("all-balanced")["state"] == "success"
    assert cluster.allocatable() == {"mig-1g.5gb": 4, "mig-2g.10gb": 2, "mig-3g.20gb": 2}
    node_state.assert_at_rest(cluster)


def test_plugin_that_does_not_start_is_named_and_the_layout_stays(
    cluster: real_cluster.RealCluster,
) -> None:
    cluster.apply(manifests.plugin(DEVICE_LIST_STRATEGY="none-of-them"))
    cluster.request("all-3g.20gb")
    why = f"kube-system/{manifests.PLUGIN}.* \\(CrashLoopBackOff"
    waiting.until(
        lambda: bool(re.search(why, cluster.status().get("message", ""))), "the pod's own reason"
    )
    waiting.until(lambda: cluster.status().get("reason") == "PluginNotReady", "a failure")

    assert f"kube-system/{manifests.PLUGIN}" in cluster.status()["message"]
    assert cluster.driver.profiles() == [["3g.20gb"] * 2] * 2
    instances = cluster.driver.instances()
    cluster.apply(manifests.plugin())
    assert cluster.outcome("all-3g.20gb")["state"] == "success"
    assert cluster.driver.instances() == instances
    assert cluster.allocatable() == {"mig-3g.20gb": 4}
    node_state.assert_at_rest(cluster)


def test_each_layout_has_the_sharing_of_its_own_plugin_config(
    cluster: real_cluster.RealCluster,
) -> None:
    _serve(cluster, *nvidia.plugin_with_configs("mig-1g.10gb", replicas=4))
    cluster.apply_layout("all-1g.10gb")
    assert cluster.allocatable() == {"mig-1g.10gb": 32}

    pods = cluster.deploy("sharing", "mig-1g.10gb", 7)
    log = cluster.listen()
    cluster.apply_layout("all-4g.20gb")
    assert cluster.allocatable() == {"mig-4g.20gb": 2}
    assert sorted(log.evicted_pods()) == sorted(pods)
    node_state.assert_at_rest(cluster)
    cluster.kubectl("label", "node", real_cluster.NODE, "nvidia.com/device-plugin.config-")


def test_feature_discovery_labels_the_devices_that_pods_can_get(
    cluster: real_cluster.RealCluster,
) -> None:
    def labelled_counts() -> dict[str, int]:
        return {
            key.removesuffix(".count"): int(value)
            for key, value in nvidia.features(cluster.node).items()
            if key.startswith("mig-") and key.endswith(".count")
        }

    _serve(cluster, manifests.plugin())
    cluster.apply(nvidia.feature_discovery())
    cluster.kubectl("label", "node", real_cluster.NODE, f"{nvidia.DISCOVERY_LABEL}=true")
    cluster.wait_for_daemons("kube-system", nvidia.DISCOVERY)
    cluster.apply_layout("all-balanced")
    # Its pod is ready before it has written.
    waiting.until(
        lambda: labelled_counts() == cluster.allocatable(), "the labels of the new devices"
    )
    features = nvidia.features(cluster.node)
    assert {features[f"{name}.product"] for name in labelled_counts()} == {
        f"NVIDIA-A100-SXM4-40GB-MIG-{name.removeprefix('mig-')}" for name in labelled_counts()
    }
    node_state.assert_at_rest(cluster)
    assert cluster.labels()[nvidia.DISCOVERY_LABEL] == "true"
    cluster.kubectl("delete", "-n", "kube-system", f"ds/{nvidia.DISCOVERY}")
    cluster.kubectl("label", "node", real_cluster.NODE, f"{nvidia.DISCOVERY_LABEL}-")
