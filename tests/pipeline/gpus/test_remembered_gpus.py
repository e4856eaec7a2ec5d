"""GPUs that answer nothing before a reset: remembered from the verified layout, and repaired."""

import json
from collections.abc import Callable

import pytest

from mig_manager.agent.drift import actions
from mig_manager.core import model
from mig_manager.core.records import run_status, verified_layouts
from tests.pipeline import repairs
from tests.rigs.node import agents, ends, gpu_values, moments, node_rig


def reboot(rig: node_rig.NodeRig) -> None:
    rig.host.boot_id = "boot-2"


def forget(rig: node_rig.NodeRig) -> None:
    rig.verified_layout_file.text = None


def spoil_inventory(rig: node_rig.NodeRig) -> None:
    data = json.loads(rig.verified_layout_file.text or "")
    data["inventory"]["gpus"][0]["devices"].pop()
    rig.verified_layout_file.text = json.dumps(data)
    assert verified_layouts.VerifiedLayout.from_json(rig.verified_layout_file.text or "").snapshots


def spoil(rig: node_rig.NodeRig) -> None:
    rig.verified_layout_file.text = "{"


def add_unknown_device(rig: node_rig.NodeRig) -> None:
    rig.pods.add("late", devices=frozenset({"MIG-00000000-0000-0000-0000-000000000000"}))


def add_foreign_id(rig: node_rig.NodeRig) -> None:
    rig.pods.add("late", devices=frozenset({"nvidia0/gi7"}))


def lose_another(rig: node_rig.NodeRig) -> None:
    rig.driver.lost.add(rig.gpus[1].uuid)


def forget_devices(rig: node_rig.NodeRig) -> None:
    rig.kubelet.devices_by_pod = dict.fromkeys(rig.kubelet.devices_by_pod, frozenset())


UNVERIFIED = "no layout was verified for GPU 0"


@pytest.mark.parametrize(
    ("prepare", "why"),
    [
        (reboot, UNVERIFIED),
        (forget, UNVERIFIED),
        (spoil_inventory, UNVERIFIED),
        (spoil, UNVERIFIED),
        (add_unknown_device, "default/late (no GPU has its device, so it may use any)"),
        (add_foreign_id, "default/late (its device ids are not UUIDs)"),
        (lose_another, "are not known either"),
        (repairs.silence_kubelet, "no socket"),
        (forget_devices, "kubelet lists no device of a running pod"),
    ],
)
def test_a_silent_gpu_whose_pods_are_not_known_is_not_reset(
    prepare: Callable[[node_rig.NodeRig], None], why: str
) -> None:
    rig = repairs.stuck_node()
    prepare(rig)
    pods = rig.pods.names

    repairs.serve(rig)
    repairs.serve(rig)

    assert repairs.resets(rig) == 0
    assert rig.pods.names == pods
    assert not {"workloads.evict", "workloads.delete"} & set(rig.log)
    assert why in repairs.message(rig)


def test_devices_that_became_unknown_after_the_decision_evict_no_pod() -> None:
    rig = repairs.stuck_node()
    agent = repairs.agent_of(rig)
    outcome = agents.run(rig, "all-balanced", by=agent)
    assert agent.check_drift("all-balanced", outcome) is actions.Action.RUN
    add_unknown_device(rig)
    pods = rig.pods.names

    agents.run(rig, "all-balanced", by=agent)

    assert (repairs.resets(rig), rig.pods.names) == (0, pods)
    assert "GpuRepairFailed" not in rig.node_object.events
    assert not rig.node_object.has_reconfiguring_taint
    assert agent.check_drift("all-balanced", outcome) is actions.Action.REST


def test_a_reset_that_leaves_the_gpu_silent_is_a_failed_repair() -> None:
    rig = repairs.stuck_node()
    rig.resets.action_after = model.RecoveryAction.GPU_RESET

    repairs.serve(rig)
    repairs.serve(rig)

    assert repairs.resets(rig) == 1
    assert "GpuRepairFailed" in rig.node_object.events
    assert "another begins at" in repairs.message(rig)
    assert "spared" in rig.pods.names
    ends.assert_restored(rig)


def test_devices_of_an_earlier_boot_are_not_remembered() -> None:
    rig = repairs.stuck_node()
    agent = repairs.agent_of(rig)
    outcome = agents.run(rig, "all-balanced", by=agent)
    data = json.loads(rig.verified_layout_file.text or "") | {"bootId": "boot-0"}
    rig.verified_layout_file.text = json.dumps(data)

    assert agent.check_drift("all-balanced", outcome) is actions.Action.REST

    assert UNVERIFIED in repairs.message(rig)


@pytest.mark.parametrize("answers_again", [True, False])
def test_a_gpu_that_needs_no_reset_after_the_drain_is_not_reset(*, answers_again: bool) -> None:
    rig = repairs.stuck_node()
    before = rig.gpus

    def recover() -> None:
        # A GPU that still does not answer has fallen off the bus.
        rig.gpus = gpu_values.with_action(rig.gpus, model.RecoveryAction.NONE, 0)
        if answers_again:
            rig.driver.lost.clear()

    rig.callbacks.add(moments.Call, recover, when=lambda: "workloads.evict" in rig.log, times=1)

    assert repairs.serve(rig).state is run_status.State.SUCCESS
    assert repairs.resets(rig) == 0
    assert gpu_values.geometry(rig.gpus) == gpu_values.geometry(before)
    ends.assert_restored(rig)
