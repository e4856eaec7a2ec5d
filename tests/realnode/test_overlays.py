"""Each way of installing the agent, from an empty cluster to a layout and back."""

import pathlib

import pytest

from mig_manager.sandbox.driver import state_file
from tests.realnode import contract_keys, images, manifests, node_state, real_cluster
from tests.rigs import programs, waiting
from tests.rigs.cluster import deploy_files

pytestmark = pytest.mark.realnode

SIMULATED = "node-b"
LIBRARIES = "/usr/lib/x86_64-linux-gnu"
KINDS = "namespaces,clusterroles,clusterrolebindings,validatingadmissionpolicies"
RUNC = {
    "apiVersion": "node.k8s.io/v1",
    "kind": "RuntimeClass",
    "metadata": {"name": "runc"},
    "handler": "runc",
}
"""For pods that get nothing from NVIDIA's container runtime, which is the default."""


@pytest.fixture
def shape() -> real_cluster.ClusterShape:
    return real_cluster.ClusterShape(nodes=(real_cluster.NODE, SIMULATED), overlay=None)


@pytest.fixture
def plugin(cluster: real_cluster.RealCluster) -> real_cluster.RealCluster:
    """NVIDIA's device plugin from its static manifest."""
    daemons = manifests.plugin()
    daemons["spec"]["template"]["spec"]["nodeName"] = real_cluster.NODE
    cluster.apply(daemons)
    return cluster


def apply_and_serve(
    cluster: real_cluster.RealCluster, layout: str, profile: str, count: int
) -> None:
    """Apply a layout; check that a pod gets one of its devices."""
    cluster.apply_layout(layout)
    assert cluster.driver.profiles() == [[profile] * count] * 2
    assert cluster.allocatable() == {f"mig-{profile}": 2 * count}
    cluster.deploy("one", f"mig-{profile}")
    cluster.kubectl("delete", "deployment", "one", "--wait=false")


def assert_nothing_is_left(
    cluster: real_cluster.RealCluster, name: str = real_cluster.NODE
) -> None:
    assert "mig-manager" not in cluster.kubectl("get", KINDS, "--output=name")
    assert cluster.taints(name) == []
    annotations = cluster.get("node", name)["metadata"]["annotations"]
    assert contract_keys.JOURNAL_ANNOTATION not in annotations


@pytest.mark.parametrize(
    ("overlay", "layout", "profile", "count"),
    [("privileged", "all-1g.5gb", "1g.5gb", 7), ("budget", "all-2g.10gb", "2g.10gb", 3)],
)
def test_an_overlay_serves_a_layout_and_leaves_nothing_when_it_is_deleted(
    plugin: real_cluster.RealCluster, overlay: str, layout: str, profile: str, count: int
) -> None:
    plugin.install(overlay)
    apply_and_serve(plugin, layout, profile, count)
    node_state.assert_at_rest(plugin)
    leases = plugin.get("leases", "-n", "mig-manager")["items"]
    owners = [lease["spec"].get("holderIdentity", "") for lease in leases]
    assert owners == ([""] if overlay == "budget" else [])

    plugin.withdraw()
    plugin.uninstall(overlay)

    assert_nothing_is_left(plugin)
    assert plugin.driver.profiles() == [[profile] * count] * 2


def test_privileged_overlay_uses_the_hosts_driver_without_a_runtime(
    plugin: real_cluster.RealCluster,
) -> None:
    plugin.apply(RUNC)
    plugin.install("privileged", manifests.agent({"runtimeClassName": "runc"}))
    inside = ("exec", "-n", "mig-manager", "ds/mig-manager", "--", "ls")
    library = "libnvidia-ml.so.1"
    assert library not in plugin.kubectl(*inside, LIBRARIES)
    assert library in plugin.kubectl(*inside, f"/host{LIBRARIES}")

    apply_and_serve(plugin, "all-1g.10gb", "1g.10gb", 4)
    node_state.assert_at_rest(plugin)

    plugin.withdraw()
    plugin.uninstall("privileged")
    plugin.kubectl("delete", "runtimeclass", "runc")
    assert_nothing_is_left(plugin)


def test_chart_serves_a_layout_and_uninstalls_without_a_trace(
    plugin: real_cluster.RealCluster, tmp_path: pathlib.Path
) -> None:
    helm = programs.path_or_skip("helm")
    repository, _, tag = images.AGENT.partition(":")
    where = ("--namespace=mig-manager", f"--kubeconfig={plugin.plane.kubeconfig('admin')}")
    values = f"--set=image.repository={repository},image.tag={tag}"
    chart = deploy_files.ROOT / "charts" / "mig-manager"
    install = ("install", "mig-manager", chart, "--create-namespace", "--wait", values)
    programs.output(helm, *install, *where, cwd=tmp_path)

    apply_and_serve(plugin, "all-3g.20gb", "3g.20gb", 2)
    node_state.assert_at_rest(plugin)

    plugin.withdraw()
    programs.output(helm, "uninstall", "mig-manager", "--wait", *where, cwd=tmp_path)
    plugin.kubectl("delete", "namespace", "mig-manager")
    assert_nothing_is_left(plugin)


def test_the_simulated_overlay_offers_gpus_on_a_node_without_any(
    cluster: real_cluster.RealCluster,
) -> None:
    cluster.kubectl("label", "node", SIMULATED, "mig-manager.io/simulated=true")
    cluster.install("simulated")
    waiting.until(lambda: cluster.allocatable(SIMULATED) == {"gpu": 8}, "simulated GPUs")
    log = cluster.listen()
    cluster.apply_layout("all-3g.20gb", SIMULATED)
    assert cluster.allocatable(SIMULATED) == {"mig-3g.20gb": 16}
    pods = cluster.deploy(
        "train", "mig-3g.20gb", nodeSelector={"mig-manager.io/simulated": "true"}
    )

    cluster.apply_layout("all-1g.5gb", SIMULATED)
    assert cluster.allocatable(SIMULATED) == {"mig-1g.5gb": 56}
    assert log.evicted_pods() == list(pods)
    state = cluster.machines[SIMULATED].node.folder / "var/lib/mig-manager/gpus.json"
    gpus = state_file.SharedState(state).read().gpus
    assert [len(gpu.instances) for gpu in gpus] == [7] * 8
    assert cluster.machines[SIMULATED].driver.profiles() == [[], []]

    cluster.withdraw(SIMULATED)
    cluster.uninstall("simulated")
    assert_nothing_is_left(cluster, SIMULATED)
