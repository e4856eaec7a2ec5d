"""Custom layouts on a node that a program repartitions: no pod is evicted, none is waited for."""

import functools
import math
from typing import Any

import pytest

from mig_manager import errors
from mig_manager.agent.drift import actions
from mig_manager.core import gpu_processes, steps
from mig_manager.core.node import policies
from mig_manager.core.objects import well_known
from mig_manager.core.records import requests
from mig_manager.reasons import Reason
from tests.pipeline.custom_requests import (
    BALANCED,
    ON,
    ON_DEMAND,
    custom_layout,
    document,
    idle_node,
    published_status,
    request_custom,
)
from tests.rigs.node import agents, call_errors, ends, node_rig, nodes, strikes

BOTH_AND_MORE = (
    "  - {devices: [0], mig-enabled: true, mig-devices: {1g.5gb: 1, 2g.10gb: 1, 3g.20gb: 1}}\n"
)


def request_to_refusal(
    rig: node_rig.NodeRig, *texts: str, waits_s: float = 0.0, **options: Any
) -> None:
    """Request the layout on demand; check that nothing has happened beside the state."""
    before, pods = rig.gpus, set(rig.pods)
    taints = rig.note(lambda: rig.node_object.has_reconfiguring_taint)
    started_s = rig.clock.now_s
    outcome = request_custom(rig, ON_DEMAND, **options)
    assert outcome.reason is Reason.IN_USE, outcome.message
    assert not outcome.should_retry
    for text in (*texts, "the agent does not retry"):
        assert text in outcome.message
    assert rig.gpus == before
    assert not rig.driver.executed_steps
    assert set(rig.pods) == pods
    assert rig.node_object.labels[well_known.STATE_LABEL] == "failed"
    assert published_status(rig).reason == "InUse"
    assert published_status(rig).retry_at is None
    assert rig.node_object.labels.get(well_known.APPLIED_LABEL) != "custom"
    assert rig.clock.now_s == started_s + waits_s
    assert set(taints) == {False}
    ends.assert_restored(rig)


def test_on_demand_idle_instances_are_exchanged() -> None:
    rig = idle_node()
    assert request_custom(rig, ON_DEMAND).reason is Reason.APPLIED
    assert "spared" in rig.pods.names
    ends.assert_restored(rig)


@pytest.mark.parametrize("drain", list(policies.DrainPolicy))
def test_on_demand_an_affected_pod_ends_the_run_under_any_policy(
    drain: policies.DrainPolicy,
) -> None:
    rig = nodes.busy_node()
    rig.owner.policy = policies.Policy(drain=drain, is_forced=True)

    request_to_refusal(rig, "default/affected")

    assert "spared" not in rig.node_object.event_messages[-1]


def test_on_demand_a_pod_that_is_bound_and_has_no_device_yet_may_get_one() -> None:
    rig = idle_node()
    rig.pods.add("starting", gpu_resources={"nvidia.com/mig-2g.10gb": 1}, phase="Pending")
    request_to_refusal(rig, "default/starting", waits_s=3.0)


def test_on_demand_a_pod_is_awaited_that_only_the_second_plan_affects() -> None:
    """The first plan destroys the other instance, as long as no pod is known to use it."""
    rig = nodes.node(layout="all-balanced")
    apart = "  - {devices: [0], mig-enabled: true, mig-devices: {1g.5gb@6: 1, 2g.10gb@0: 1}}\n"
    assert request_custom(rig, custom_layout(document(apart))).reason is Reason.APPLIED
    rig.pods.add("running", devices=frozenset({nodes.device(rig, 0, "1g.5gb")}))
    device = frozenset({nodes.device(rig, 1, "2g.10gb")})
    resource = {"nvidia.com/mig-2g.10gb": 1}
    starting = rig.pods.add("starting", devices=device, phase="Pending", gpu_resources=resource)
    rig.kubelet.pod_listed_from_s[starting] = rig.clock.now_s + 1.5

    outcome = request_custom(rig, custom_layout(document(BOTH_AND_MORE), is_on_demand=True))

    assert outcome.reason is Reason.APPLIED, outcome.message
    assert {"running", "starting"} <= rig.pods.names


def used_by(rig: node_rig.NodeRig, owner: str, *, profile: str = "2g.10gb") -> dict[str, Any]:
    """Return the GPU processes of a node: one uses an instance of GPU 0."""
    gpu = rig.gpus[0]
    (used,) = (gi for gi in gpu.gpu_instances if str(gi.profile) == profile)
    ids = (used.instance_id,)
    user = gpu_processes.GpuProcess(pid=7, name="python", owner=owner, gpu_instances=ids)
    return {gpu.uuid: (user,)}


def add_monitor(rig: node_rig.NodeRig) -> str:
    selector = {nodes.DCGM: "true"}
    return rig.pods.add("dcgm", node_selector=selector, owner_kind="DaemonSet", is_ready=True)


@pytest.mark.parametrize("owner", ["pod uid-of-another", "unit train.service"])
def test_on_demand_a_process_ends_the_run_before_the_node_is_tainted(owner: str) -> None:
    rig = idle_node()
    rig.driver.processes = used_by(rig, owner)
    request_to_refusal(rig, f"is in use by python (pid 7, GPU instance 2, {owner})")


def test_on_demand_processes_of_gpu_clients_do_not_count() -> None:
    for owner, profile in (
        ("monitor", "2g.10gb"),
        ("unit dcgm.service", "2g.10gb"),
        ("", "2g.10gb"),
        ("pod uid-of-another", "3g.20gb"),
    ):
        rig = idle_node()
        rig.host.services["dcgm.service"] = True
        place = f"pod {add_monitor(rig)}" if owner == "monitor" else owner
        usage = used_by(rig, place, profile=profile)
        agent = agents.new_agent(rig, settings=ON, processes=lambda usage=usage: usage)
        assert request_custom(rig, ON_DEMAND, by=agent).reason is Reason.APPLIED, owner


def test_on_demand_a_driver_that_lists_no_processes_is_queried_again() -> None:
    rig = idle_node()

    def fail() -> dict[str, Any]:
        raise errors.HardwareError("no answer", reason=Reason.NVML_TIMEOUT)

    outcome = request_custom(rig, ON_DEMAND, by=agents.new_agent(rig, settings=ON, processes=fail))
    assert outcome.reason is Reason.NVML_TIMEOUT
    assert outcome.should_retry
    ends.assert_restored(rig)


@pytest.mark.parametrize("is_restarted", [True, False])
def test_node_closed_by_a_drain_is_reopened_for_on_demand(*, is_restarted: bool) -> None:
    rig = nodes.busy_node()
    rig.kubelet.all_end_from_s = math.inf
    agent = agents.new_agent(rig, settings=ON)
    request_custom(rig, custom_layout(), by=agent)
    assert rig.node_object.has_reconfiguring_taint
    if is_restarted:
        agent = agents.start(rig, "custom", custom=ON_DEMAND, settings=ON)

    outcome = request_custom(rig, ON_DEMAND, by=agent)

    assert outcome.reason is Reason.IN_USE
    assert not outcome.should_retry
    ends.assert_restored(rig)


@pytest.mark.parametrize("label_managed", [True, False])
def test_on_demand_a_pod_that_arrives_late_keeps_its_device(*, label_managed: bool) -> None:
    """Until the plugin is paused: then no pod gets a device."""
    undisturbed = idle_node(label_managed=label_managed)
    request_custom(undisturbed, ON_DEMAND)
    changed = undisturbed.log.index("gpus.execute")
    last = max(i for i in range(changed) if undisturbed.log[i] == "workloads.list")
    first = undisturbed.log.index("allocations.assigned_devices")
    assert last - first > 3
    for index in range(first, last + 1):
        rig = idle_node(label_managed=label_managed)
        before = rig.gpus
        device = nodes.device(rig, 0, "2g.10gb")

        arrive = functools.partial(rig.pods.add, "late", devices=frozenset({device}))
        rig.callbacks.add(index, arrive)
        outcome = request_custom(rig, ON_DEMAND)

        assert outcome.reason is Reason.IN_USE, (index, outcome.message)
        assert not outcome.should_retry
        # It is still paused when the run fails, so that nothing waits for it.
        assert "no new device plugin pod" not in outcome.message
        assert {"late", "spared"} <= rig.pods.names
        assert rig.gpus == before
        ends.assert_restored(rig)


def test_on_demand_a_process_that_starts_in_the_pause_ends_the_run() -> None:
    rig = idle_node()

    def start() -> None:
        rig.driver.clients = "python (pid 7)"

    rig.callbacks.add("gpus.execute", start)
    outcome = request_custom(rig, ON_DEMAND)
    assert outcome.reason is Reason.IN_USE
    assert not outcome.should_retry
    assert rig.log.count("gpus.execute") == 1
    ends.assert_restored(rig)


def test_on_demand_another_layout_drains_the_node_as_everywhere() -> None:
    rig = nodes.busy_node()
    rig.node_object.labels[well_known.PARTITIONING_LABEL] = well_known.ON_DEMAND
    ends.run_to(rig, "one-slice-changed", Reason.APPLIED)
    assert "affected" not in rig.pods.names


def test_on_demand_a_machine_is_not_rebooted() -> None:
    rig = nodes.rebooting_node()
    outcome = request_custom(rig, ON_DEMAND)
    assert outcome.reason is Reason.REBOOT_REQUIRED
    assert "does not reboot" in outcome.message
    assert not rig.host.reboots


def test_on_demand_other_failures_are_retried() -> None:
    rig = idle_node()
    rig.plugin.is_broken = True
    assert request_custom(rig, ON_DEMAND).should_retry


def test_on_demand_a_pod_that_gets_a_claim_late_ends_the_run() -> None:
    """A DRA driver hands out devices until it is paused, which is last."""
    requested = custom_layout(
        document("  - {devices: [1], mig-enabled: true, mig-devices: {2g.10gb: 3}}\n"),
        is_on_demand=True,
    )
    undisturbed = nodes.dra_node()
    request_custom(undisturbed, requested)
    first = undisturbed.log.index("allocations.assigned_devices")

    def arrive(rig: node_rig.NodeRig, device: str) -> None:
        if rig.pods.has_dra_driver:
            rig.pods.add("late", has_claims=True, claimed_ids=frozenset({device}))

    late_at = 0
    for index in range(first, undisturbed.log.index("gpus.execute")):
        rig = nodes.dra_node()
        before = rig.gpus
        device = rig.gpus[1].gpu_instances[0].compute_instances[0].uuid or ""

        rig.callbacks.add(index, functools.partial(arrive, rig, device))
        outcome = request_custom(rig, requested)

        if "late" in rig.pods.names:
            late_at = index
            assert outcome.reason is Reason.IN_USE, (index, outcome.message)
            assert not outcome.should_retry
            assert rig.gpus == before
        ends.assert_restored(rig)
    assert "workloads.delete" not in undisturbed.log[:late_at]
    assert late_at > undisturbed.log.index("node.patch")


def test_on_demand_a_plugin_that_does_not_stop_is_retried() -> None:
    rig = idle_node()
    rig.kubelet.all_end_from_s = math.inf
    outcome = request_custom(rig, ON_DEMAND)
    assert outcome.reason is Reason.IN_USE
    assert "default/nvidia-device-plugin" in outcome.message
    assert outcome.message.endswith("the agent retries.")
    assert outcome.should_retry
    ends.assert_restored(rig)


def test_on_demand_a_silent_kubelet_is_queried_again() -> None:
    rig = idle_node()
    before = rig.gpus
    rig.failures.add("allocations.assigned_devices", call_errors.broken("allocations"))
    outcome = request_custom(rig, ON_DEMAND)
    assert outcome.reason is Reason.POD_RESOURCES_UNAVAILABLE
    assert "default/spared" in outcome.message
    assert outcome.should_retry
    assert rig.gpus == before
    assert "spared" in rig.pods.names
    ends.assert_restored(rig)


def test_on_demand_a_retried_rollback_is_announced() -> None:
    retried = 0
    for index in range(1, 7):
        rig = idle_node()
        agent = agents.new_agent(rig, settings=ON)
        strikes.kill_before(rig, steps.Step, "custom", number=index, by=agent, custom=ON_DEMAND)
        rig.pods.add("late", devices=frozenset(rig.gpus[0].mig_uuids))
        requested = custom_layout(BALANCED, is_on_demand=True)
        successor = agents.start(rig, "custom", custom=requested, settings=ON)

        outcome = request_custom(rig, requested, by=successor)

        retried += outcome.should_retry
        assert not (outcome.should_retry and "does not retry" in outcome.message)
    assert retried


def test_on_demand_a_drift_is_healed_once_no_process_uses_the_instances() -> None:
    rig = idle_node()
    agent = agents.new_agent(rig, settings=ON, heals_drift=True)
    outcome = request_custom(rig, ON_DEMAND, by=agent)
    agents.run(rig, "all-1g.5gb")
    assert agent.check_drift("custom", outcome, ON_DEMAND) is actions.Action.HEAL
    rig.driver.clients = "python (pid 7)"

    outcome = request_custom(rig, ON_DEMAND, by=agent, is_heal=True)

    assert outcome.reason is Reason.IN_USE
    assert outcome.should_retry  # no program chooses another layout: none was requested
    rig.driver.clients = ""
    assert (
        request_custom(rig, ON_DEMAND, by=agent, attempt=2, is_heal=True).reason is Reason.APPLIED
    )
    ends.assert_restored(rig)


def test_a_decision_to_evict_no_pod_is_published_before_anything_else() -> None:
    """Its text does not show that, and the owner may take the label away meanwhile."""
    rig = idle_node()
    records = rig.note(
        lambda: rig.node_object.annotations.get(well_known.REQUEST_ANNOTATION),
        at="gpus.observe",
    )

    request_custom(rig, ON_DEMAND)

    assert not requests.RequestRecord.from_json(records[0] or "").may_evict
