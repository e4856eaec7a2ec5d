"""Resources that the node advertises and no GPU has: kubelet forgot them, not the API server."""

import json
from typing import Any

import pytest

from mig_manager import errors
from mig_manager.agent import outcomes
from mig_manager.agent.drift import actions
from mig_manager.agent.reports import metrics
from mig_manager.core.objects import well_known
from mig_manager.reasons import Reason
from tests.rigs.node import agents, ends, node_rig, nodes

PHANTOM = "nvidia.com/mig-3g.20gb"
FORBIDDEN = errors.ClusterError("403", reason=Reason.FORBIDDEN)


def node_at_rest(
    **overrides: Any,
) -> tuple[node_rig.NodeRig, agents.AgentInMemory, outcomes.Outcome]:
    """Return a node whose layout is active, and which has four devices of the one before."""
    rig, agent, outcome = nodes.at_rest("all-1g.5gb", **overrides)
    rig.kubelet.phantoms = {PHANTOM: 4}
    return rig, agent, outcome


def test_phantom_devices_after_a_change_are_removed_before_success() -> None:
    rig = nodes.node(layout="all-balanced")
    rig.kubelet.phantoms = {"nvidia.com/mig-7g.40gb": 2}

    ends.run_to(rig, "all-1g.5gb", Reason.APPLIED)

    assert rig.kubelet.phantoms == {}
    assert "PhantomDevicesRemoved" in rig.node_object.events


def test_phantom_devices_of_an_active_layout_do_not_delay_success() -> None:
    rig, agent, _ = node_at_rest()
    began, pods = rig.clock.monotonic(), dict(rig.pods)

    ends.run_to(rig, "all-1g.5gb", Reason.ALREADY_APPLIED, by=agent)

    assert rig.kubelet.phantoms == {}
    assert rig.clock.monotonic() == began
    assert rig.pods == pods


@pytest.mark.parametrize(
    "resource",
    [PHANTOM, "nvidia.com/gpu.shared", "nvidia.com/mig-1g.5gb"],
    ids=["former layout", "former name", "former strategy"],
)
def test_phantom_devices_at_rest_are_removed_by_the_drift_check(resource: str) -> None:
    rig, agent, outcome = node_at_rest()
    rig.kubelet.phantoms = {resource: 4}

    assert agent.check_drift("all-1g.5gb", outcome) is actions.Action.REST

    assert rig.kubelet.phantoms == {}
    assert rig.node_object.states == []
    assert rig.node_object.events == ["PhantomDevicesRemoved"]
    assert f"4 {resource}" in rig.node_object.event_messages[0]


def test_phantom_devices_that_the_agent_may_not_remove_are_reported_once() -> None:
    rig, agent, outcome = node_at_rest()
    rig.failures.add("node.remove_resources", FORBIDDEN)

    for _ in range(3):
        agent.check_drift("all-1g.5gb", outcome)

    assert rig.node_object.labels[well_known.STATE_LABEL] == "failed"
    assert rig.node_object.labels[well_known.APPLIED_LABEL] == "all-1g.5gb"
    assert rig.node_object.events == ["PhantomDevices"]
    assert rig.node_object.ready_reasons[-1] == "PhantomDevices"
    command = "kubectl patch node node-a --subresource=status --type=merge -p "
    patch = rig.node_object.status["message"].partition(command)[2].split("'")[1]
    assert json.loads(patch) == {"status": {"capacity": {PHANTOM: None}}}
    # As a person does.
    rig.kubelet.phantoms.clear()
    agent.check_drift("all-1g.5gb", outcome)
    assert rig.node_object.labels[well_known.STATE_LABEL] == "success"


def test_phantom_devices_after_a_drift_that_is_over_are_reported() -> None:
    rig, agent, outcome = node_at_rest()
    rig.failures.add("node.remove_resources", FORBIDDEN)
    reasons = []
    for gpus in (rig.gpus, nodes.node(layout="all-balanced").gpus, rig.gpus, rig.gpus):
        rig.gpus = gpus
        agent.check_drift("all-1g.5gb", outcome)
        reasons.append(rig.node_object.status["reason"])

    assert reasons == ["PhantomDevices", "Drifted", "AlreadyApplied", "PhantomDevices"]


def test_phantom_devices_that_stay_end_the_proof_of_a_change_soon() -> None:
    rig = nodes.node()
    rig.kubelet.phantoms = {PHANTOM: 4}
    rig.failures.add("node.remove_resources", FORBIDDEN)
    agent = agents.new_agent(rig, settings={"plugin_timeout_s": 3000})

    ends.run_to(rig, "all-1g.5gb", Reason.PHANTOM_DEVICES, PHANTOM, by=agent)

    assert rig.clock.monotonic() < 300
    # Not as often as the proof asks.
    assert rig.log.count("node.remove_resources") < 6


@pytest.mark.parametrize("last", ["requested", "without a request"])
def test_phantom_devices_are_counted_until_they_are_gone(last: str) -> None:
    counts = metrics.AgentMetrics(contact_age_s=lambda: 0.0)
    rig, agent, outcome = node_at_rest(telemetry=counts)
    rig.failures.add("node.remove_resources", FORBIDDEN)
    samples = []
    for is_last in (False, True):
        if is_last and last == "without a request":
            agent.restore_without_request()
        else:
            agent.check_drift("all-1g.5gb", outcome)
        samples.append(counts.registry.get_sample_value("mig_manager_phantom_devices"))
        rig.kubelet.phantoms.clear()

    assert samples == [4, 0]


def test_a_run_retries_after_a_person_removed_phantom_devices() -> None:
    rig, agent, _ = node_at_rest()
    rig.failures.add("node.remove_resources", FORBIDDEN)
    assert agents.run(rig, "all-1g.5gb", by=agent).should_retry

    rig.kubelet.phantoms.clear()

    ends.run_to(rig, "all-1g.5gb", Reason.ALREADY_APPLIED, by=agent, attempt=2)


def test_an_agent_that_restarts_beside_phantom_devices_evicts_no_pod() -> None:
    rig, agent, outcome = node_at_rest()
    rig.failures.add("node.remove_resources", FORBIDDEN)
    agent.check_drift("all-1g.5gb", outcome)
    rig.gpus = nodes.node(layout="all-balanced").gpus
    rig.pods.add("worker", devices=frozenset(rig.gpus[0].mig_uuids))
    restarted = agents.start(rig, "all-1g.5gb")

    ends.run_to(rig, "all-1g.5gb", Reason.DRIFTED, by=restarted)

    assert "worker" in rig.pods.names


def test_phantom_devices_without_a_plugin_do_not_mean_a_lost_plugin() -> None:
    rig, agent, _ = node_at_rest()
    nodes.write_deploy_label(rig, well_known.PLUGIN_DEPLOY_LABEL, None)
    rig.pods.clear()
    rig.kubelet.schedulable = {}

    ends.run_to(rig, "all-1g.5gb", Reason.ALREADY_APPLIED, by=agent)


@pytest.mark.parametrize("others", [{}, {"nvidia.com/hostdev": frozenset({"nic"})}])
def test_a_plugin_that_has_just_ended_is_awaited_beside_phantom_devices(
    others: dict[str, frozenset[str]],
) -> None:
    rig, agent, _ = node_at_rest()
    nodes.write_deploy_label(rig, well_known.PLUGIN_DEPLOY_LABEL, None)
    rig.pods.clear()
    rig.plugin.unhealthy = dict(rig.kubelet.schedulable)
    rig.kubelet.schedulable = {"nvidia.com/gpu": frozenset(), **others}

    ends.run_to(rig, "all-1g.5gb", Reason.PLUGIN_NOT_READY, by=agent)


@pytest.mark.parametrize("resource", ["nvidia.com/hostdev", "nvidia.com/mig-1g.5gb"])
def test_resources_of_others_and_of_the_gpus_stay(resource: str) -> None:
    rig, agent, outcome = node_at_rest()
    rig.kubelet.phantoms = {resource: 4}
    # The plugin restarts, so it may register any devices of the GPUs.
    rig.kubelet.schedulable = {}

    agent.check_drift("all-1g.5gb", outcome)

    assert rig.kubelet.phantoms == {resource: 4}
    assert "node.remove_resources" not in rig.log


def test_a_drift_check_without_phantoms_requests_nothing() -> None:
    rig, agent, outcome = node_at_rest()
    rig.kubelet.phantoms = {}
    rig.node_object.labels["nvidia.com/mig.strategy"] = "single"
    rig.log.clear()

    agent.check_drift("all-1g.5gb", outcome)

    assert rig.log == ["gpus.observe"]
