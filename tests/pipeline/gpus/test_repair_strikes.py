"""Repairs that are killed, superseded, delayed, or overtaken by other changes."""

import json
from collections.abc import Callable

import pytest

from mig_manager import reasons
from mig_manager.agent.drift import actions
from mig_manager.core.fleet import slots
from mig_manager.core.objects import well_known
from mig_manager.core.records import change_failures, run_status
from mig_manager.core.settings import node_settings
from tests.pipeline import custom_requests, repairs
from tests.rigs.node import agents, ends, fakes, gpu_values, node_rig, nodes, strikes

USED_BY_B = slots.Denial(limit=1, changing=("node-b",))


def test_another_request_supersedes_a_repair_which_then_begins_again() -> None:
    rig = repairs.faulty_node()
    agent = repairs.begun(rig)
    ends.supersede(
        rig,
        "all-balanced",
        by=agent,
        ends_when=lambda: rig.node_object.has_reconfiguring_taint,
        is_replaced=True,
    )
    assert repairs.resets(rig) == 0

    repairs.request_other(rig, agent)
    repairs.request_other(rig, agent, attempt=2)

    assert repairs.resets(rig) == 1
    assert ends.has_layout(rig, "all-1g.5gb")
    ends.assert_restored(rig)


HALF = """
version: v1
mig-configs:
  half:
  - {{devices: [0], mig-enabled: true, mig-devices: {{{}}}}}
  - {{devices: [1], mig-enabled: false}}
"""


def rewrite(_rig: node_rig.NodeRig, source: fakes.FakeTextSource) -> None:
    source.text = HALF.format("1g.5gb: 7")


def drift_with_pod(rig: node_rig.NodeRig, _configs: fakes.FakeTextSource) -> None:
    nodes.add_pod_on_unowned_instances(rig, "2g.10gb", 3)


@pytest.mark.parametrize(
    ("change", "restarts"),
    [(rewrite, True), (rewrite, False), (drift_with_pod, True)],
    ids=["new agent", "new content", "drift"],
)
def test_a_repair_changes_no_gpu_whose_pods_it_has_not_drained(
    change: Callable[[node_rig.NodeRig, fakes.FakeTextSource], None], *, restarts: bool
) -> None:
    rig = nodes.node()
    source = fakes.FakeTextSource(HALF.format("1g.5gb: 2, 2g.10gb: 2"))
    agent = repairs.agent_of(rig, layout_source=source)
    outcome = agents.run(rig, "half", by=agent)
    rig.pods.add("elsewhere", devices=frozenset({nodes.device(rig, 0, "2g.10gb")}))
    rig.pods.add("affected", devices=frozenset({rig.gpus[1].uuid}))
    repairs.break_gpus(rig, 1)
    assert agent.check_drift("half", outcome) is actions.Action.RUN
    rig.disruptions.refusals["affected"] = "budget"
    ends.supersede(
        rig, "half", by=agent, ends_when=lambda: rig.clock.now_s > 8, is_replaced=not restarts
    )
    rig.disruptions.refusals.clear()
    change(rig, source)
    if restarts:
        agent.stop()
        agent = repairs.agent_of(rig, layout_source=source)
        agent.recover("half")

    agents.run(rig, "half", by=agent)

    assert "GpuRepairFailed" not in rig.node_object.events
    assert repairs.resets(rig) == 1
    present = {*rig.gpus[0].mig_uuids, *(gpu.uuid for gpu in rig.gpus)}
    assert all(devices <= present for devices in rig.kubelet.devices_by_pod.values())


def test_a_repair_takes_a_slot_as_other_changes_do() -> None:
    rig = repairs.faulty_node()
    rig.slots.are_limited = True
    agent = repairs.begun(rig)
    rig.log.clear()
    rig.slots.denials = [USED_BY_B] * 2

    agents.run(rig, "all-balanced", by=agent)

    calls = [call for call in rig.log if call in ("slots.take", "slots.release")]
    assert calls == ["slots.take"] * 3 + ["slots.release"] * 2
    assert repairs.resets(rig) == 1


def test_a_repair_that_waited_for_the_lock_leaves_no_node_pending() -> None:
    rig = repairs.faulty_node()
    lock = fakes.FakeLock()
    rig.slots.are_limited = True
    agent = repairs.begun(rig, lock=lock)
    rig.log.clear()
    rig.slots.denials = [USED_BY_B]

    def lock_meanwhile() -> None:
        lock.refusals = 1000

    rig.callbacks.add("slots.take", lock_meanwhile, when=lambda: bool(rig.slots.denials))

    assert agents.run(rig, "all-balanced", by=agent).reason is reasons.Reason.LOCKED

    assert rig.node_object.labels[well_known.STATE_LABEL] == "failed"
    # The manager with the lock may be another agent of this node, whose slot it is then.
    assert rig.slots.is_taken
    lock.refusals = 0
    agents.run(rig, "all-balanced", by=agent, attempt=2)
    assert not rig.slots.is_taken


@pytest.mark.parametrize("ends_at", [4, 6])
def test_a_superseded_repair_that_meets_the_lock_leaves_no_node_pending(ends_at: int) -> None:
    rig = repairs.faulty_node()
    lock = fakes.FakeLock()
    agent = repairs.begun(rig, lock=lock)
    ends.supersede(rig, "all-balanced", by=agent, ends_at=ends_at, is_replaced=True)
    assert rig.node_object.labels[well_known.STATE_LABEL] == "pending"
    lock.refusals = 1000

    assert agents.run(rig, "all-balanced", by=agent).reason is reasons.Reason.LOCKED

    assert rig.node_object.labels[well_known.STATE_LABEL] == "failed"


@pytest.mark.parametrize("change", ["report", "off", "no reset", "cordon"])
def test_a_begun_repair_is_undone_once_the_agent_may_not_repair(change: str) -> None:
    rig = repairs.faulty_node()
    strikes.kill_when(rig, lambda: rig.node_object.has_reconfiguring_taint, repairs.serve)
    how = node_settings.RepairPolicy(change if change in ("report", "off") else "reset")
    rig.resets.are_available = change != "no reset"
    rig.node_object.is_unschedulable = change == "cordon"
    agent = repairs.agent_of(rig, settings={"repair": how})
    agent.recover("all-balanced")

    assert agents.run(rig, "all-balanced", by=agent).state is run_status.State.SUCCESS
    assert {"affected", "spared"} <= rig.pods.names
    assert repairs.resets(rig) == 0
    assert "GpuRepairFailed" not in rig.node_object.events
    rig.node_object.is_unschedulable = False
    ends.assert_restored(rig)


@pytest.mark.parametrize("call", ["workloads.evict", "gpus.execute"])
@pytest.mark.parametrize("is_cordoned", [False, True])
def test_only_a_cordon_ends_a_repair_that_evicted_the_tolerating_pods(
    call: str, *, is_cordoned: bool
) -> None:
    rig = repairs.faulty_node()
    before = gpu_values.geometry(rig.gpus)
    rig.node_object.taints = {"dedicated"}
    rig.pods.remove(rig.pods.uid_of("spared"))
    rig.pods.change(rig.pods.uid_of("affected"), tolerated=frozenset(rig.node_object.taints))
    strikes.kill_when(rig, lambda: call in rig.log[:-1], repairs.serve)
    rig.node_object.is_unschedulable = is_cordoned

    outcome = repairs.serve(rig)

    assert repairs.resets(rig) == (0 if is_cordoned else 1)
    assert outcome.state is run_status.State.SUCCESS, outcome.message
    assert gpu_values.geometry(rig.gpus) == before


@pytest.mark.parametrize("pods_at_kill", [{"affected", "spared"}, {"spared"}])
def test_a_resumed_repair_has_failed_only_if_a_pod_was_evicted(pods_at_kill: set[str]) -> None:
    rig = repairs.faulty_node()
    others = rig.pods.names - {"affected", "spared"}
    strikes.kill_when(
        rig,
        lambda: (
            rig.node_object.has_reconfiguring_taint and rig.pods.names - others == pods_at_kill
        ),
        repairs.serve,
    )
    rig.kubelet.is_silent = True
    repairs.serve(rig)

    was_evicted = "affected" not in pods_at_kill
    assert ("GpuRepairFailed" in rig.node_object.events) is was_evicted
    rig.kubelet.is_silent = False
    repairs.serve(rig)
    assert repairs.resets(rig) == (0 if was_evicted else 1)


def test_a_repair_evicts_whatever_the_origin_of_the_layout() -> None:
    rig = custom_requests.idle_node()
    agent = repairs.agent_of(rig, settings=repairs.RESET | custom_requests.ON)
    on_demand = custom_requests.custom_layout(custom_requests.BALANCED, is_on_demand=True)
    outcome = custom_requests.request_custom(rig, on_demand, by=agent)
    rig.pods.add("affected", devices=frozenset({nodes.device(rig, 0, "1g.5gb")}))
    repairs.break_gpus(rig, 0)

    assert agent.check_drift("custom", outcome, on_demand) is actions.Action.RUN
    outcome = custom_requests.request_custom(rig, on_demand, by=agent)

    assert outcome.state is run_status.State.SUCCESS
    assert repairs.resets(rig) == 1
    assert "affected" not in rig.pods.names
    assert rig.node_object.request_record["mayEvict"] is False


def test_a_repair_evicts_whatever_the_layout_has_cost_since_a_reboot() -> None:
    """Only then the status of a repair has the hash of a layout, as its failed changes have."""
    rig = repairs.faulty_node()
    outcome = repairs.request_other(rig, repairs.agent_of(rig))
    assert outcome.reason is reasons.Reason.GPU_NEEDS_RESET
    failed = change_failures.FailedChanges(
        content_hash="x",
        boot_id=rig.host.boot_id,
        reason=reasons.Reason.HOOK_FAILED,
        problem="it fails",
        count=3,
    )
    past = {"rebootedHash": "x", "failedChanges": failed.to_data()}
    record = json.dumps(rig.node_object.request_record | past)
    rig.node_object.annotations[well_known.REQUEST_ANNOTATION] = record
    restarted = repairs.agent_of(rig)
    restarted.recover("all-1g.5gb")

    outcome = agents.run(rig, "all-1g.5gb", by=restarted)

    assert outcome.state is run_status.State.SUCCESS, outcome.message
    assert repairs.resets(rig) == 1
