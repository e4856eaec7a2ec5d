"""Drifts that the agent heals: no pod is evicted for them."""

import contextlib

import pytest

from mig_manager import errors
from mig_manager.agent.drift import actions
from mig_manager.core.objects import well_known
from mig_manager.core.records import run_status
from mig_manager.reasons import Reason
from tests.pipeline.drifts import tamper
from tests.rigs.node import (
    agents,
    call_errors,
    ends,
    gpu_values,
    moments,
    node_rig,
    nodes,
)


def test_on_request_a_drift_is_healed() -> None:
    rig, agent, outcome = nodes.at_rest("all-balanced", heals_drift=True)
    before = tamper(rig)

    assert agent.check_drift("all-balanced", outcome) is actions.Action.HEAL
    ends.run_to(rig, "all-balanced", Reason.APPLIED, by=agent, is_heal=True)

    assert ends.is_as_before(rig, before)


def restarted_beside_unowned_instances() -> tuple[node_rig.NodeRig, agents.AgentInMemory]:
    """Return a node that drifted while its agent was down, and the agent that started again."""
    rig, _, _ = nodes.at_rest("all-balanced")
    nodes.add_pod_on_unowned_instances(rig)
    return rig, agents.start(rig, "all-balanced")


def test_healing_waits_until_no_pod_uses_the_devices() -> None:
    rig, agent, outcome = nodes.at_rest("all-balanced", heals_drift=True)
    nodes.add_pod_on_unowned_instances(rig)

    assert agent.check_drift("all-balanced", outcome) is actions.Action.REST
    assert "default/foreign" in rig.node_object.status_messages[-1]
    assert agent.check_drift("all-balanced", outcome) is actions.Action.REST
    assert rig.node_object.events == ["Drifted", "DestroyedDevices"]

    rig.pods.remove(rig.pods.uid_of("foreign"))
    assert agent.check_drift("all-balanced", outcome) is actions.Action.HEAL


def test_a_pod_that_comes_while_a_drift_is_healed_is_spared() -> None:
    rig, agent, _ = nodes.at_rest("all-balanced", heals_drift=True)
    nodes.add_pod_on_unowned_instances(rig)
    gpus = rig.gpus

    ends.run_to(rig, "all-balanced", Reason.DRIFTED, "default/foreign", by=agent, is_heal=True)

    assert rig.gpus == gpus
    assert "workloads.evict" not in rig.log


def test_healing_refuses_a_pod_that_gets_a_device_after_the_plan() -> None:
    rig, agent, _ = nodes.at_rest("all-balanced", heals_drift=True)
    nodes.add_pod_on_unowned_instances(rig)
    gpus = rig.gpus
    uid = rig.pods.uid_of("foreign")
    late = rig.pods.pop(uid)

    rig.callbacks.add(
        moments.Call,
        lambda: rig.pods.update({uid: late}),
        when=lambda: rig.node_object.has_reconfiguring_taint,
        times=1,
    )
    ends.run_to(rig, "all-balanced", Reason.DRIFTED, "default/foreign", by=agent, is_heal=True)

    assert rig.gpus == gpus
    assert "workloads.evict" not in rig.log


def test_an_extra_client_does_not_block_the_healing_of_drift() -> None:
    rig, agent, outcome = nodes.at_rest("all-balanced", heals_drift=True)
    nodes.add_pod_on_unowned_instances(rig)
    uid = rig.pods.uid_of("foreign")
    labels, owner = {"app": "watcher"}, "DaemonSet"
    rig.pods.change(uid, labels=labels, owner_kind=owner)
    rig.owner.extra_clients = nodes.EXTRA_CLIENTS

    assert agent.check_drift("all-balanced", outcome) is actions.Action.HEAL
    ends.run_to(rig, "all-balanced", Reason.APPLIED, by=agent, is_heal=True)


def test_no_pod_is_evicted_for_a_drift_that_could_not_be_healed_before() -> None:
    rig, agent, _ = nodes.at_rest("all-balanced", heals_drift=True)
    nodes.add_pod_on_unowned_instances(rig)
    rig.failures.add("gpus.observe", errors.HardwareError("no", reason=Reason.NO_PERMISSION))
    agents.run(rig, "all-balanced", by=agent, is_heal=True)
    rig.failures.clear()

    # As the loop does when the hardware has changed since a failure for good.
    ends.run_to(rig, "all-balanced", Reason.DRIFTED, by=agent)

    assert "workloads.evict" not in rig.log


def test_restarted_agent_evicts_no_pod_for_an_applied_layout() -> None:
    rig, restarted = restarted_beside_unowned_instances()

    ends.run_to(rig, "all-balanced", Reason.DRIFTED, by=restarted)

    assert "workloads.evict" not in rig.log
    # The label requests it again, so eviction is allowed.
    restarted.recover(None)
    restarted.restore_without_request()
    ends.run_to(rig, "all-balanced", Reason.APPLIED, by=restarted)


@pytest.mark.parametrize(
    "failures",
    [
        {"gpus.observe": call_errors.NO_DRIVER},
        {"node.patch": errors.ClusterError("503", reason=Reason.API_UNAVAILABLE)},
    ],
    ids=["driver", "API"],
)
def test_a_retry_after_a_failure_at_the_start_evicts_no_pod(
    failures: dict[str, Exception],
) -> None:
    rig, restarted = restarted_beside_unowned_instances()
    rig.failures.add("gpus.observe", call_errors.NO_DRIVER)
    assert agents.run(rig, "all-balanced", by=restarted).should_retry
    rig.failures.clear()
    rig.failures.add_all(failures)
    with contextlib.suppress(errors.ClusterError):
        agents.run(rig, "all-balanced", by=restarted, attempt=2)
    rig.failures.clear()
    # As the agent's loop does after an API that did not answer.
    restarted.recover("all-balanced")

    ends.run_to(rig, "all-balanced", Reason.DRIFTED, by=restarted, attempt=3)

    assert "workloads.evict" not in rig.log


def test_a_starting_agent_restores_the_instances_lost_in_a_reboot() -> None:
    rig, _, _ = nodes.at_rest("all-balanced")
    rig.gpus = gpu_values.without_instances(rig.gpus, 0, 1)

    assert agents.resume(rig, "all-balanced").state is run_status.State.SUCCESS

    assert rig.node_object.labels[well_known.APPLIED_LABEL] == "all-balanced"
