"""Calls that fail, requests that end and other programs that write, at any point of a run."""

import contextlib

import pytest

from mig_manager import errors, reasons
from mig_manager.core import steps
from mig_manager.core.objects import well_known
from mig_manager.core.records import run_status
from tests.pipeline.swept_changes import CHANGES, SWEPT
from tests.rigs.node import agents, call_errors, ends, fakes, moments, node_rig, nodes
from tests.rigs.node.nodes import DCGM, EXPORTER, GFD, monitored_node

UPGRADING = f"{well_known.PAUSED_VALUE}_paused-for-driver-upgrade"
"""What NVIDIA's driver manager makes of our pause, which it writes back at its end."""


@pytest.mark.parametrize("ends_well", [True, False])
def test_label_that_another_program_writes_keeps_its_value(*, ends_well: bool) -> None:
    key = "nvidia.com/gpu.deploy.dcgm"
    rig = nodes.node()
    rig.node_object.labels[key] = "true"
    rig.plugin.is_broken = not ends_well

    def upgrade_driver() -> None:
        if rig.node_object.labels[key] == well_known.PAUSED_VALUE:
            nodes.write_deploy_label(rig, key, UPGRADING)

    rig.callbacks.add(moments.Wait, upgrade_driver)

    assert (agents.run(rig, "all-1g.5gb").state is run_status.State.SUCCESS) is ends_well
    assert rig.node_object.labels[key] == UPGRADING
    ends.assert_restored(rig)


@pytest.mark.parametrize("ends_after_s", [1, 30, 1000])
@pytest.mark.parametrize("upgraded", [(well_known.PLUGIN_DEPLOY_LABEL,), (GFD, DCGM, EXPORTER)])
def test_clients_run_again_after_a_driver_upgrade_that_met_our_pause(
    upgraded: tuple[str, ...], ends_after_s: float
) -> None:
    rig = monitored_node()
    agent = agents.new_agent(rig)
    began_s: list[float] = []

    def manage_driver() -> None:
        if not began_s and {rig.node_object.labels[key] for key in upgraded} == {
            well_known.PAUSED_VALUE
        }:
            began_s.append(rig.clock.now_s)
            rig.node_object.labels |= dict.fromkeys(upgraded, UPGRADING)
        elif began_s and rig.clock.now_s > began_s[0] + ends_after_s:
            rig.callbacks.clear()
            rig.node_object.labels |= dict.fromkeys(upgraded, well_known.PAUSED_VALUE)

    rig.callbacks.add(moments.Wait, manage_driver)
    while (outcome := agents.run(rig, "one-slice-changed", by=agent)).should_retry:
        assert outcome.reason is reasons.Reason.PLUGIN_NOT_READY
        assert f"label {well_known.PLUGIN_DEPLOY_LABEL}=paused" in outcome.message

    assert outcome.state is run_status.State.SUCCESS
    assert rig.kubelet.schedulable == rig.plugin_devices
    rig.clock.wait(1000)
    agent.check_drift("one-slice-changed", outcome)
    assert {rig.node_object.labels[key] for key in upgraded} == {"true"}


@pytest.mark.parametrize("step", [steps.CreateGpuInstance, steps.CreateComputeInstance])
def test_a_step_that_fails_restores_the_former_instances(step: type) -> None:
    rig = nodes.busy_node()
    before = rig.gpus
    rig.failures.add(step, call_errors.REFUSED, times=1)

    back = "the former instances are restored"
    ends.run_to(rig, "one-slice-changed", reasons.Reason.INSUFFICIENT_RESOURCES, back)

    assert rig.driver.executed_steps
    assert ends.is_as_before(rig, before)
    assert "spared" in rig.pods.names


def test_failing_api_does_not_block_the_rollback() -> None:
    def failing_node() -> node_rig.NodeRig:
        rig = nodes.busy_node()
        rig.failures.add(steps.CreateGpuInstance, call_errors.REFUSED, times=1)
        return rig

    rig = failing_node()
    agents.run(rig, "one-slice-changed")
    executes_at = rig.log.index("gpus.execute")
    call_indices = [
        i for i, call in enumerate(rig.log) if call.startswith("node.") and i > executes_at
    ]
    reported = 0

    for index in call_indices:
        rig = failing_node()
        before = rig.gpus
        rig.failures.add(index, call_errors.broken("node"))

        with contextlib.suppress(errors.ClusterError):
            ends.run_to(rig, "one-slice-changed", reasons.Reason.INSUFFICIENT_RESOURCES)
            reported += 1
        assert not rig.failures, index
        assert ends.is_as_before(rig, before), index
    assert reported > 2


@pytest.mark.parametrize("name", [*SWEPT, "on demand, devices in use"])
def test_node_is_restored_after_any_failed_call_and_the_retry_ends_alike(name: str) -> None:
    change = CHANGES[name]
    undisturbed, before = change.calls(), change.make()
    kept = {
        uid for uid in before.kubelet.devices_by_pod if before.pods[uid].name not in change.evicted
    }
    assert len(undisturbed) > 8
    for index, call in enumerate(undisturbed):
        rig = change.make()
        agent = change.agent(rig)
        rig.failures.add(index, call_errors.broken(call))
        try:
            change.run(rig, agent)
        except errors.ClusterError:
            agent.recover(change.layout, change.custom)
        else:
            assert rig.node_object.labels[well_known.STATE_LABEL] in ("success", "failed"), index
            ends.assert_restored_or_in_drain(rig, undisturbed[:index])

        assert not rig.failures, index
        assert change.run(rig, agent).state.value == change.end.state, index
        ends.assert_restored(rig)
        assert kept <= rig.pods.keys(), index
        assert rig.pods.has_dra_driver is rig.dra_driver.is_installed, index
        assert bool(rig.pods.plugins) is not rig.dra_driver.is_installed, index


@pytest.mark.parametrize("name", SWEPT)
def test_api_outage_after_the_change_neither_fails_nor_rolls_back(name: str) -> None:
    change = CHANGES[name]
    undisturbed = change.calls()
    after = range(undisturbed.index("gpus.execute"), len(undisturbed))
    call_indices = [
        i for i in after if undisturbed[i].startswith(("node.", "workloads.", "slices."))
    ]
    assert len(call_indices) > 2
    for index in call_indices:
        rig = change.make()
        agent = change.agent(rig)
        rig.failures.add(index, call_errors.broken("node"))
        try:
            outcome = change.run(rig, agent)
        except errors.ClusterError:
            agent.recover(change.layout, change.custom)
            outcome = change.run(rig, agent, attempt=2)
        assert not rig.failures, index
        assert outcome.state is run_status.State.SUCCESS, index
        assert "failed" not in rig.node_object.states, index
        assert "restoring the previous instances" not in rig.node_object.status_messages, index
        ends.assert_restored(rig)


@pytest.mark.parametrize("name", SWEPT)
def test_an_agent_that_stops_after_an_outage_in_mid_change_ends_the_run(name: str) -> None:
    change = CHANGES[name]
    undisturbed = change.calls()
    struck = 0
    for index in range(undisturbed.index("gpus.execute"), len(undisturbed)):
        rig = change.make()
        agent = change.agent(rig)
        rig.failures.add(index, call_errors.broken(undisturbed[index]))
        try:
            change.run(rig, agent)
        except errors.ClusterError:
            struck += 1
            assert not rig.failures, index
            agent.stop()
            assert rig.node_object.labels[well_known.STATE_LABEL] == "failed", index
            assert not rig.node_object.has_reconfiguring_taint, index
            assert well_known.PAUSED_VALUE not in rig.node_object.labels.values(), index
            successor = change.agent(rig)
            successor.recover(change.layout, change.custom)
            assert change.run(rig, successor).state is run_status.State.SUCCESS, index
    assert struck > 2


def stop_in_a_drain(rig: node_rig.NodeRig, agent: agents.AgentInMemory) -> None:
    stop = fakes.FakeCancellation(
        rig.clock, ends_when=lambda: rig.node_object.has_reconfiguring_taint
    )
    with contextlib.suppress(errors.Superseded, errors.ClusterError):
        agents.run(rig, "one-slice-changed", by=agent, cancel=stop)


def test_an_agent_stopped_in_a_drain_restores_despite_a_failed_call() -> None:
    undisturbed = nodes.busy_node()
    stop_in_a_drain(undisturbed, agents.new_agent(undisturbed))
    assert len(undisturbed.log) > 8
    for index in range(len(undisturbed.log)):
        rig = nodes.busy_node()
        agent = agents.new_agent(rig)
        rig.failures.add(index, call_errors.broken("node"))
        stop_in_a_drain(rig, agent)
        assert not rig.failures, index

        agent.stop()

        assert rig.node_object.labels[well_known.STATE_LABEL] == "failed", index
        assert not rig.node_object.has_reconfiguring_taint, index


@pytest.mark.parametrize(
    "name", ["first layout, plugin without label", "monitors", "plugin's config"]
)
@pytest.mark.parametrize("is_carried_out", [True, False])
def test_a_patch_whose_answer_is_lost_leaves_nothing_behind(
    name: str, *, is_carried_out: bool
) -> None:
    change = CHANGES[name]
    patches = [index for index, call in enumerate(change.calls()) if call == "node.patch"]
    assert len(patches) > 4
    for index in patches:
        rig = change.make()
        agent = change.agent(rig)
        error = errors.ClusterError("lost", reason=reasons.Reason.API_ERROR, status=500)
        (rig.lost_answers if is_carried_out else rig.failures).add(index, error)
        try:
            change.run(rig, agent)
        except errors.ClusterError:
            agent.recover(None)
        assert not rig.failures, index
        assert not rig.lost_answers, index
        ends.assert_restored(rig)


@pytest.mark.parametrize("name", SWEPT)
@pytest.mark.parametrize("replaced", [True, False])
def test_the_node_is_restored_whenever_a_request_is_superseded(
    name: str, *, replaced: bool
) -> None:
    change = CHANGES[name]
    rig = change.make()
    patient = fakes.FakeCancellation(rig.clock, is_replaced=replaced)
    change.run(rig, cancel=patient)
    assert patient.checks > 0
    after = rig.gpus
    for ends_at in range(1, patient.checks + 1):
        rig = change.make()
        before = rig.gpus
        cancel = fakes.FakeCancellation(rig.clock, ends_at=ends_at, is_replaced=replaced)

        try:
            outcome = change.run(rig, cancel=cancel)
        except errors.Superseded:
            # The run for the next request says how that ends.
            is_failed = rig.node_object.labels.get(well_known.STATE_LABEL) == "failed"
            assert is_failed is not replaced
        else:
            # It is verified; only the monitors were still pending.
            assert outcome.reason is reasons.Reason.APPLIED
            assert rig.daemons.is_ready_by_label

        # Between the mode and the instances there are hooks, and a newer request ends them.
        is_undone = "restoring the previous instances" in rig.node_object.status_messages
        is_executed = "gpus.execute" in rig.log and not is_undone
        assert rig.gpus == (after if is_executed else before)
        ends.assert_restored(rig, is_stopped=not replaced)
