"""What uses a GPU keeps a plan from it before a pod is evicted, also after an agent's restart."""

from typing import Any

import pytest

from mig_manager.core import steps
from mig_manager.core.node import policies
from mig_manager.core.objects import well_known
from mig_manager.reasons import Reason
from tests.pipeline import drifts
from tests.pipeline.custom_requests import custom_layout, document, request_custom
from tests.pipeline.gpu_users import WHOLE, outdated_node, process, processes_of_pods
from tests.rigs.node import agents, driver_rules, ends, moments, node_rig, nodes, strikes

RETRIES = 3  # how often a run is repeated, with a new agent each time


def run_repeatedly_to(
    rig: node_rig.NodeRig, layout: str, reason: Reason, *texts: str, **overrides: Any
) -> None:
    """Request a layout of agents that restart; check that nothing is taken or changed."""
    before, pods = rig.gpus, set(rig.pods.names)
    for _ in range(RETRIES):
        agent = agents.start(rig, layout, **overrides)
        outcome = ends.run_to(rig, layout, reason, *texts, by=agent)
        assert outcome.should_retry is reason.is_transient
        assert rig.pods.names >= pods
        assert "workloads.evict" not in rig.log
        assert rig.gpus == before


# -- kubelet does not answer ------------------------------------------------------------------


def test_a_silent_kubelet_evicts_no_pod() -> None:
    rig = nodes.busy_node()
    rig.kubelet.is_silent = True
    started_s = rig.clock.now_s
    run_repeatedly_to(
        rig, "one-slice-changed", Reason.POD_RESOURCES_UNAVAILABLE, "no socket", "default/affected"
    )
    assert 20 <= (rig.clock.now_s - started_s) / RETRIES < 22
    rig.kubelet.is_silent = False
    ends.run_to(rig, "one-slice-changed", Reason.APPLIED)
    assert "spared" in rig.pods.names


def test_a_kubelet_that_restarts_is_waited_for() -> None:
    rig = nodes.busy_node()
    rig.kubelet.is_silent = True

    rig.set_at(moments.Time(10), rig.kubelet, is_silent=False)
    ends.run_to(rig, "one-slice-changed", Reason.APPLIED)
    assert "spared" in rig.pods.names
    assert "affected" not in rig.pods.names


@pytest.mark.parametrize(
    ("layout", "drain"),
    [
        ("all-disabled", policies.DrainPolicy.AFFECTED),
        ("one-slice-changed", policies.DrainPolicy.NODE),
    ],
)
def test_a_silent_kubelet_is_not_waited_for_where_all_devices_go(
    layout: str, drain: policies.DrainPolicy
) -> None:
    rig = nodes.busy_node()
    rig.owner.policy = policies.Policy(drain=drain)
    # It answers again when its devices are verified.
    rig.callbacks.add(
        moments.Call, lambda: setattr(rig.kubelet, "is_silent", "gpus.execute" not in rig.log)
    )
    started_s = rig.clock.now_s
    ends.run_to(rig, layout, Reason.APPLIED)
    assert rig.clock.now_s - started_s < 20
    assert not {"affected", "spared"} & rig.pods.names


# -- a pod that only kubelet lists ------------------------------------------------------------


def test_no_pod_is_evicted_while_one_that_only_kubelet_lists_has_a_device() -> None:
    rig = nodes.busy_node()
    rig.kubelet.devices_of_unlisted_pods["deleted"] = frozenset({nodes.device(rig, 0, "2g.10gb")})
    run_repeatedly_to(
        rig, "one-slice-changed", Reason.DRAIN_TIMEOUT, "default/deleted", "kubelet still has it"
    )


def test_a_pod_that_only_kubelet_lists_is_waited_for() -> None:
    rig = nodes.busy_node()
    rig.kubelet.devices_of_unlisted_pods["deleted"] = frozenset({nodes.device(rig, 0, "2g.10gb")})
    rig.callbacks.add(moments.Time(5), rig.kubelet.devices_of_unlisted_pods.clear)
    ends.run_to(rig, "one-slice-changed", Reason.APPLIED)


@pytest.mark.parametrize("is_admitted", [True, False])
def test_a_pod_is_not_evicted_for_the_device_of_its_predecessor(*, is_admitted: bool) -> None:
    rig = nodes.busy_node()
    affected = rig.pods.uid_of("affected")
    devices = frozenset({nodes.device(rig, 1, "1g.5gb")})
    successor = rig.pods.add(
        "db-0",
        devices=devices if is_admitted else frozenset(),
        is_admitted=is_admitted,
        phase="Running" if is_admitted else "Pending",
    )
    rig.kubelet.devices_of_unlisted_pods["db-0"] = rig.kubelet.devices_by_pod[affected]

    def end() -> None:
        rig.kubelet.devices_of_unlisted_pods.clear()
        rig.pods.change(successor, is_admitted=True)
        rig.kubelet.devices_by_pod[successor] = devices

    rig.callbacks.add(moments.Time(5), end)
    ends.run_to(rig, "one-slice-changed", Reason.APPLIED)
    assert successor in rig.pods
    assert affected not in rig.pods


# -- a process on the GPU itself --------------------------------------------------------------


def test_a_process_on_a_gpu_blocks_the_destruction_of_its_instances() -> None:
    rig = nodes.busy_node()
    rig.driver.processes = {rig.gpus[0].uuid: (process(),)}
    run_repeatedly_to(rig, "whole", Reason.IN_USE, "trainer (pid 7)", layouts=WHOLE)


def test_no_pod_is_evicted_while_an_unpaused_daemon_uses_a_device() -> None:
    rig = nodes.busy_node()
    deployed = {f"{well_known.DEPLOY_LABEL_PREFIX}driver": "true"}
    rig.node_object.labels |= deployed
    uid = rig.pods.add("watcher", node_selector=deployed, owner_kind="DaemonSet")
    rig.driver.processes = {rig.gpus[0].uuid: (process(f"pod {uid}"),)}
    texts = ("trainer (pid 7, pod default/watcher)",)
    run_repeatedly_to(rig, "whole", Reason.IN_USE, *texts, layouts=WHOLE)


@pytest.mark.parametrize(
    ("layout", "text", "is_running"),
    [("one-slice-changed", agents.LAYOUTS_TEXT, True), ("whole", WHOLE, False)],
    ids=["instances stay", "only open files"],
)
def test_a_process_on_a_gpu_does_not_block_further_instances(
    layout: str, text: str, *, is_running: bool
) -> None:
    rig = nodes.busy_node()
    rig.driver.processes = {rig.gpus[0].uuid: (process(is_running=is_running),)}
    ends.run_to(rig, layout, Reason.APPLIED, layouts=text)


@pytest.mark.parametrize("is_on_demand", [False, True])
def test_an_instance_of_a_process_stays_if_another_of_its_profile_is_free(
    *, is_on_demand: bool
) -> None:
    rules = "  - {devices: [0], mig-enabled: true, mig-devices: {1g.5gb: 1, 3g.20gb: 1}}\n"
    requested = custom_layout(document(rules), is_on_demand=is_on_demand)
    undisturbed = nodes.node(layout="all-balanced")
    request_custom(undisturbed, requested)
    (kept,) = (gi for gi in undisturbed.gpus[0].gpu_instances if str(gi.profile) == "1g.5gb")
    rig = nodes.node(layout="all-balanced")
    before = rig.gpus[0].gpu_instances
    (used,) = (
        gi for gi in before if gi.profile == kept.profile and gi.placement != kept.placement
    )
    user = process("unit train.service", used.instance_id)
    rig.driver.processes = {rig.gpus[0].uuid: (user,)}

    outcome = request_custom(rig, requested)

    assert outcome.reason is Reason.APPLIED, outcome.message
    assert used in rig.gpus[0].gpu_instances


def test_a_process_of_a_pod_that_is_evicted_blocks_no_plan() -> None:
    rig = nodes.busy_node()
    affected = rig.pods.uid_of("affected")
    rig.driver.processes = {rig.gpus[0].uuid: (process(f"pod {affected}"),)}
    rig.callbacks.add(
        moments.Call, rig.driver.processes.clear, when=lambda: affected not in rig.pods, times=1
    )
    ends.run_to(rig, "whole", Reason.APPLIED, layouts=WHOLE)


def test_a_process_of_a_service_that_is_stopped_blocks_no_plan() -> None:
    rig = nodes.hosted_node()
    rig.driver.processes = {rig.gpus[0].uuid: (process("unit nvsm.service"),)}
    rig.callbacks.add(
        moments.Call,
        rig.driver.processes.clear,
        when=lambda: not rig.host.services["nvsm.service"],
        times=1,
    )
    ends.run_to(rig, "whole", Reason.APPLIED, layouts=WHOLE)


# -- devices that no GPU has ------------------------------------------------------------------


def test_pods_whose_devices_no_gpu_has_are_evicted_with_the_others() -> None:
    rig = outdated_node()
    rig.driver.processes = {rig.gpus[0].uuid: processes_of_pods(rig, 0)}
    rig.callbacks.add(
        moments.Call,
        rig.driver.processes.clear,
        when=lambda: not processes_of_pods(rig, 0),
        times=1,
    )
    ends.run_to(rig, "all-balanced", Reason.APPLIED)
    assert not any(name.startswith("gpu0") for name in rig.pods.names)
    assert "default/gpu0-0" in rig.node_object.event_messages[0]
    assert "no GPU has its device" in rig.node_object.event_messages[0]


def test_pods_with_missing_devices_are_not_evicted_without_a_request() -> None:
    rig = outdated_node()
    rig.driver.processes = {rig.gpus[0].uuid: processes_of_pods(rig, 0)}
    texts = ("default/gpu0-0", "no GPU has its device")
    run_repeatedly_to(rig, "all-1g.5gb", Reason.DRIFTED, *texts)


def test_no_pod_is_evicted_while_a_process_outside_pods_uses_a_device() -> None:
    rig = outdated_node()
    users = (*processes_of_pods(rig, 0), process("unit train.service"))
    rig.driver.processes = {rig.gpus[0].uuid: users}
    texts = ("trainer (pid 7, unit train.service)",)
    run_repeatedly_to(rig, "all-balanced", Reason.IN_USE, *texts)


def test_pods_with_devices_lost_in_a_reboot_do_not_block_the_layout() -> None:
    rig = outdated_node()
    agent = agents.start(rig, "all-1g.5gb")
    ends.run_to(rig, "all-1g.5gb", Reason.APPLIED, by=agent)
    assert "workloads.evict" not in rig.log


@pytest.mark.parametrize("is_running", [True, False])
def test_running_pods_with_missing_devices_block_a_rollback(*, is_running: bool) -> None:
    rig = nodes.node(layout="all-1g.5gb")
    strikes.kill_before(rig, steps.DestroyGpuInstance, "all-balanced", number=6)
    interrupted = rig.gpus
    uid = rig.pods.add("outdated", devices=frozenset({driver_rules.mig_uuid("outdated")}))
    if is_running:
        rig.driver.processes = {rig.gpus[0].uuid: (process(f"pod {uid}"),)}
    agents.start(rig, None)
    if is_running:
        assert rig.gpus == interrupted
    else:
        assert [len(gpu.mig_uuids) for gpu in rig.gpus] == [7, 7]


def test_a_pod_with_a_missing_claimed_device_is_not_evicted_unrequested() -> None:
    rig = nodes.dra_node()
    uid = rig.pods.add(
        "outdated", has_claims=True, claimed_ids=frozenset({driver_rules.mig_uuid("outdated")})
    )
    rig.driver.processes = {rig.gpus[0].uuid: (process(f"pod {uid}"),)}
    rig.callbacks.add(
        moments.Call, rig.driver.processes.clear, when=lambda: uid not in rig.pods, times=1
    )
    drifts.tamper(rig)
    layout = "all-balanced"
    ends.run_to(rig, layout, Reason.DRIFTED, "default/outdated", is_heal=True)
    assert "workloads.evict" not in rig.log
    ends.run_to(rig, layout, Reason.APPLIED)
    assert "outdated" not in rig.pods.names
