"""The shipped manifests and image on a real kubelet, containerd and NVIDIA device plugin."""

import pytest

from testkit import nvml_faults
from tests.realnode import contract_keys, images, manifests, node_state, real_cluster
from tests.rigs import waiting

pytestmark = pytest.mark.realnode


def test_a_first_layout_becomes_schedulable(cluster: real_cluster.RealCluster) -> None:
    cluster.ensure_layout("all-disabled")
    cluster.apply_layout("all-1g.5gb")
    assert cluster.driver.profiles() == [["1g.5gb"] * 7] * 2
    assert cluster.allocatable() == {"mig-1g.5gb": 14}
    node_state.assert_at_rest(cluster)


@pytest.mark.parametrize(
    ("layout", "reason"), [("all-1g.5gbb", "UnknownConfig"), ("too-much", "DoesNotFit")]
)
def test_an_impossible_layout_fails_and_touches_nothing(
    cluster: real_cluster.RealCluster, layout: str, reason: str
) -> None:
    cluster.ensure_layout("all-1g.5gb")
    cluster.deploy("busy", "mig-1g.5gb")
    before, instances = node_state.use(cluster, "busy"), cluster.driver.instances()
    log = cluster.listen()
    cluster.request(layout)

    outcome = cluster.outcome(layout)
    assert (outcome["state"], outcome["reason"]) == ("failed", reason)
    assert cluster.driver.instances() == instances
    assert node_state.use(cluster, "busy") == before
    # Not even a dry run, a taint or a restart of the plugin.
    published = {"patch nodes", "patch nodes/status", "get nodes", "create events"}
    # The list shows which instances are in use, for the published capacity.
    assert log.requests().keys() <= published | {"list pods"}
    node_state.assert_at_rest(cluster)


def test_a_gpu_with_a_fault_is_a_condition_and_disturbs_no_pod(
    cluster: real_cluster.RealCluster,
) -> None:
    cluster.ensure_layout("all-1g.5gb")
    cluster.deploy("busy", "mig-1g.5gb")
    before, instances = node_state.use(cluster, "busy"), cluster.driver.instances()
    gpus = cluster.driver.gpus

    def needs_recovery() -> str:
        conditions = cluster.get("node", real_cluster.NODE)["status"]["conditions"]
        statuses = {str(each["type"]): str(each["status"]) for each in conditions}
        return statuses.get("GpuRecoveryNeeded", "")

    # The agent observes the GPUs when a request begins and when it is withdrawn.
    cluster.withdraw()
    try:
        gpus.fail_gpu(1, action=1)
        cluster.request("all-1g.5gb")
        waiting.until(lambda: needs_recovery() == "True", "the condition")
        assert cluster.outcome("all-1g.5gb")["state"] == "success"
    finally:
        gpus.fail_gpu(1)
    cluster.withdraw()
    waiting.until(lambda: needs_recovery() == "False", "the end of the condition")
    assert cluster.driver.instances() == instances
    assert node_state.use(cluster, "busy") == before
    node_state.assert_at_rest(cluster)


@pytest.mark.parametrize("newer", ["all-1g.5gb", ""])
def test_a_request_withdrawn_in_a_blocked_drain_leaves_every_pod(
    cluster: real_cluster.RealCluster, newer: str
) -> None:
    cluster.ensure_layout("all-1g.5gb")
    guarded = cluster.deploy("guarded", "mig-1g.5gb")
    cluster.deploy("free", "mig-1g.5gb", 2)
    cluster.kubectl("annotate", "pod", *guarded, "mig-manager.io/do-not-evict=true")
    before, instances = node_state.use(cluster, "guarded", "free"), cluster.driver.instances()
    log = cluster.listen()
    cluster.request("all-3g.20gb")
    cluster.wait_for_phase("Drain")
    assert contract_keys.RECONFIGURING_TAINT in cluster.taints()

    if newer:
        cluster.request(newer)
        assert cluster.outcome(newer)["reason"] == "AlreadyApplied"
    else:
        cluster.kubectl("label", "node", real_cluster.NODE, "nvidia.com/mig.config-")
    waiting.until(
        lambda: contract_keys.RECONFIGURING_TAINT not in cluster.taints(), "an open node"
    )
    assert log.evicted_pods() == []
    assert cluster.driver.instances() == instances
    assert node_state.use(cluster, "guarded", "free") == before
    node_state.assert_at_rest(cluster)


def test_one_slice_of_a_full_node_changes_and_only_its_pods_are_evicted(
    cluster: real_cluster.RealCluster,
) -> None:
    cluster.ensure_layout("all-1g.5gb")
    cluster.deploy("busy", "mig-1g.5gb", 14)
    assert set().union(*cluster.node.devices_by_uid().values()) == cluster.driver.devices()
    before, instances = node_state.use(cluster, "busy"), cluster.driver.instances()
    log = cluster.listen()
    cluster.apply_layout("one-slice")
    assert cluster.allocatable() == {"mig-1g.5gb": 12, "mig-2g.10gb": 1}
    assert len(cluster.driver.instances() & instances) == 12
    after, devices = node_state.use(cluster, "busy"), cluster.driver.devices()
    gone = {
        name for name, use in before.items() if not {uuid for uuid, _ in use.devices} & devices
    }
    assert len(gone) == 2
    assert set(log.evicted_pods()) == gone
    stayed = before.keys() - gone
    assert {name: after[name] for name in stayed} == {name: before[name] for name in stayed}
    node_state.assert_at_rest(cluster)


def test_a_budget_of_one_pod_keeps_all_from_eviction_until_it_is_gone(
    cluster: real_cluster.RealCluster,
) -> None:
    cluster.ensure_layout("one-slice")
    cluster.deploy("guarded", "mig-1g.5gb")
    cluster.deploy("free", "mig-1g.5gb", 11)
    cluster.apply(manifests.budget("guarded"))
    pods, instances = node_state.use(cluster, "guarded", "free"), cluster.driver.instances()
    log = cluster.listen()
    cluster.request("all-3g.20gb")
    waiting.until(lambda: log.requests()["list poddisruptionbudgets"] > 0, "a look at budgets")
    cluster.wait_for_phase("Drain")
    assert node_state.use(cluster, "guarded", "free") == pods

    assert cluster.driver.instances() == instances
    assert log.evicted_pods() == []
    cluster.kubectl("delete", "poddisruptionbudget", "guarded")
    assert cluster.outcome("all-3g.20gb")["state"] == "success"
    assert sorted(log.evicted_pods()) == sorted(pods)
    # Those that replace them are still pending: kubelet had none of the former devices for them.
    assert cluster.refused_pods() == []
    assert cluster.driver.profiles() == [["3g.20gb"] * 2] * 2
    node_state.assert_at_rest(cluster)


def test_a_newer_label_while_gpus_change_waits_for_the_end_of_the_change(
    cluster: real_cluster.RealCluster,
) -> None:
    cluster.ensure_layout("all-3g.20gb")
    cluster.driver.gpus.add_fault(
        nvml_faults.Fault(function="nvmlGpuInstanceDestroy", gpu=0, hang_s=3)
    )
    cluster.request("all-7g.40gb")
    cluster.wait_for_phase("Execute")
    cluster.request("all-2g.10gb")

    first, last = [["7g.40gb"]] * 2, [["2g.10gb"] * 3] * 2
    waiting.until(lambda: cluster.driver.profiles() == first, "the layout asked for first")
    assert cluster.outcome("all-2g.10gb")["state"] == "success"
    assert cluster.driver.profiles() == last
    assert cluster.allocatable() == {"mig-2g.10gb": 6}
    node_state.assert_at_rest(cluster)


def test_mig_is_disabled_despite_a_pod_that_ignores_sigterm(
    cluster: real_cluster.RealCluster,
) -> None:
    cluster.ensure_layout("all-2g.10gb")
    # A first process without a handler does not get the signal.
    deaf = {
        "name": "main",
        "image": images.PLUGIN,
        "command": ["sleep", "infinity"],
        "resources": {"limits": {"nvidia.com/mig-2g.10gb": 1}},
    }
    pods = cluster.deploy("deaf", "mig-2g.10gb", containers=[deaf])
    opted_out = "nvidia.com/gpu.deploy.dcgm"
    cluster.kubectl("label", "node", real_cluster.NODE, f"{opted_out}=false")
    cluster.kubectl("cordon", real_cluster.NODE)
    log = cluster.listen()
    cluster.apply_layout("all-disabled")
    assert log.evicted_pods() == list(pods)
    assert cluster.driver.profiles() == [[], []]
    assert cluster.allocatable() == {"gpu": 2}
    assert cluster.get("node", real_cluster.NODE)["spec"]["unschedulable"]
    assert cluster.labels()[opted_out] == "false"
    cluster.kubectl("uncordon", real_cluster.NODE)
    cluster.kubectl("label", "node", real_cluster.NODE, f"{opted_out}-")
    node_state.assert_at_rest(cluster)
