"""What a killed run leaves, and how its successor takes over."""

from collections.abc import Callable

import pytest

from mig_manager import errors
from mig_manager.agent.drift import actions
from mig_manager.core import steps
from mig_manager.core.objects import well_known
from mig_manager.core.records import journals, node_entries, run_status
from mig_manager.reasons import Reason
from tests.pipeline import agent_loop
from tests.rigs.node import (
    agents,
    call_errors,
    ends,
    fakes,
    gpu_values,
    moments,
    node_rig,
    nodes,
    strikes,
)


@pytest.mark.parametrize("end", ["locked", "replaced", "stopped"])
def test_successor_without_the_lock_leaves_the_change_to_its_agent(end: str) -> None:
    rig = nodes.busy_node()
    lock = fakes.FakeLock(refusals=10**6)
    successor = agents.new_agent(rig, lock=lock)

    def start_successor() -> None:
        journal = rig.node_object.annotations[well_known.JOURNAL_ANNOTATION]
        labels = dict(rig.node_object.labels)
        successor.recover("one-slice-changed")
        if end == "locked":
            assert agents.run(rig, "one-slice-changed", by=successor).reason is Reason.LOCKED
        else:
            ends.supersede(
                rig, "one-slice-changed", by=successor, ends_at=2, is_replaced=end == "replaced"
            )
            successor.stop()
        labels |= {well_known.STATE_LABEL: rig.node_object.labels[well_known.STATE_LABEL]}
        assert rig.node_object.annotations[well_known.JOURNAL_ANNOTATION] == journal
        assert (rig.node_object.has_reconfiguring_taint, rig.node_object.labels) == (True, labels)

    rig.callbacks.add(steps.Step, start_successor, times=1)
    assert agents.run(rig, "one-slice-changed").reason is Reason.APPLIED

    ends.assert_restored(rig)
    lock.refusals = 0
    assert agents.run(rig, "one-slice-changed", by=successor).reason is Reason.ALREADY_APPLIED
    ends.assert_restored(rig)


@pytest.mark.parametrize("requested", ["one-slice-changed", "all-balanced"])
def test_successor_that_started_before_the_change_takes_over_its_journal(requested: str) -> None:
    for index in strikes.indices(
        nodes.busy_node, lambda rig: agents.run(rig, "one-slice-changed")
    ):
        rig = nodes.busy_node()
        successor = agents.start(rig, "one-slice-changed")
        rig.failures.add(len(rig.log) + index, strikes.Killed())
        with pytest.raises(strikes.Killed):
            agents.run(rig, "one-slice-changed")

        assert agents.run(rig, requested, by=successor).state is run_status.State.SUCCESS, index
        assert ends.has_layout(rig, requested)
        ends.assert_restored(rig)


def test_successor_that_cannot_read_the_journal_again_undoes_nothing() -> None:
    rig = nodes.busy_node()
    successor = agents.new_agent(rig)
    rig.callbacks.add(steps.Step, lambda: successor.recover("one-slice-changed"), times=1)
    ends.run_to(rig, "one-slice-changed", Reason.APPLIED)
    changed = rig.gpus
    rig.failures.add(len(rig.log), call_errors.broken("node"))

    ends.run_to(rig, "one-slice-changed", Reason.API_UNAVAILABLE, by=successor)
    assert rig.gpus == changed
    ends.run_to(rig, "one-slice-changed", Reason.ALREADY_APPLIED, by=successor, attempt=2)


def run_again(rig: node_rig.NodeRig, agent: agents.AgentInMemory) -> None:
    assert (
        agents.run(rig, "one-slice-changed", by=agent, attempt=2).state is run_status.State.SUCCESS
    )
    assert rig.kubelet.schedulable == rig.plugin_devices


Act = Callable[[node_rig.NodeRig, agents.AgentInMemory], object]


@pytest.mark.parametrize(
    ("act", "act_again"),
    [
        pytest.param(lambda _rig, _agent: None, run_again, id="recovery"),
        pytest.param(
            lambda rig, agent: agents.run(rig, "one-slice-changed", by=agent), run_again, id="run"
        ),
        pytest.param(
            lambda _rig, agent: agent.restore_without_request(),
            lambda _rig, agent: agent.check_without_request(),
            id="rest",
        ),
    ],
)
def test_pauses_written_back_by_a_driver_manager_after_a_kill_are_resumed(
    act: Act, act_again: Act
) -> None:
    written_back = 0
    for _, rig, _ in strikes.kills(
        nodes.monitored_node, lambda rig: agents.run(rig, "one-slice-changed")
    ):
        labels, value = rig.node_object.labels, well_known.PAUSED_VALUE
        paused = [key for key in labels if labels[key] == value]
        labels |= dict.fromkeys(paused, f"{value}_paused-for-driver-upgrade")
        agent = agents.start(rig, "one-slice-changed")
        act(rig, agent)
        rig.node_object.labels |= dict.fromkeys(paused, well_known.PAUSED_VALUE)
        written_back += bool(paused)
        act_again(rig, agent)
        ends.assert_restored(rig)
    assert written_back > 5


def restore_all(rig: node_rig.NodeRig) -> None:
    """Put back what the node had when its GPUs were changed."""
    saved = nodes.node(layout="all-balanced")
    strikes.kill_before(saved, "gpus.execute", "one-slice-changed")
    rig.node_object.labels, rig.node_object.annotations = (
        saved.node_object.labels,
        saved.node_object.annotations,
    )
    rig.node_object.has_reconfiguring_taint = True


def restore_taint(rig: node_rig.NodeRig) -> None:
    rig.node_object.has_reconfiguring_taint = True


def restore_taint_and_journal(rig: node_rig.NodeRig) -> None:
    restore_taint(rig)
    journal = journals.Journal(
        layout="one-slice-changed", gpus=journals.GpuEntries(has_stale_files=True)
    )
    rig.node_object.annotations[well_known.JOURNAL_ANNOTATION] = journal.to_json()


def restore_state(rig: node_rig.NodeRig) -> None:
    rig.node_object.labels[well_known.STATE_LABEL] = "pending"


PARTS = {
    "all": restore_all,
    "taint": restore_taint,
    "taint beside a journal": restore_taint_and_journal,
    "state": restore_state,
}


@pytest.mark.parametrize("part", PARTS)
def test_a_change_that_a_backup_of_the_node_restores_is_ended(part: str) -> None:
    rig = nodes.node(layout="all-balanced")
    agent = agents.new_agent(rig)
    outcome = agents.run(rig, "one-slice-changed", by=agent)
    assert agent.check_drift("one-slice-changed", outcome) is actions.Action.REST

    PARTS[part](rig)

    assert agent.check_drift("one-slice-changed", outcome) is not actions.Action.REST
    outcome = agents.run(rig, "one-slice-changed", by=agent, is_heal=True)
    assert outcome.state is run_status.State.SUCCESS
    ends.assert_restored(rig)
    assert agent.check_drift("one-slice-changed", outcome) is actions.Action.REST
    assert ends.has_layout(rig, "one-slice-changed")


@pytest.mark.parametrize("part", PARTS)
def test_a_change_that_a_backup_restores_is_ended_without_a_request(part: str) -> None:
    rig = nodes.node(layout="all-balanced")
    agent = agents.new_agent(rig)
    agents.run(rig, "one-slice-changed", by=agent)
    agent.restore_without_request()
    assert agent.check_without_request() is actions.Action.REST

    PARTS[part](rig)

    assert agent.check_without_request() is not actions.Action.REST
    assert not agent.restore_without_request()
    ends.assert_restored(rig)
    assert rig.node_object.labels[well_known.STATE_LABEL] != "pending"
    assert agent.check_without_request() is actions.Action.REST
    # The whole backup has the GPUs before the change, but the layout was verified since.
    assert ends.has_layout(rig, "one-slice-changed")


@pytest.mark.parametrize("requested", [None, "too-much"])
def test_a_change_undone_after_a_power_loss_labels_no_lost_layout(requested: str | None) -> None:
    undone = 0
    for _, rig, _ in strikes.kills(
        nodes.busy_node, lambda rig: agents.resume(rig, "one-slice-changed")
    ):
        rig.reboot()
        agents.take_over(rig, requested)
        undone += bool(rig.gpus[0].gpu_instances)
        ends.assert_restored(rig)
        ends.assert_applied_label_is_true(rig)
    assert undone


def test_a_killed_run_that_is_to_be_resumed_keeps_the_node_closed() -> None:
    rig = nodes.busy_node()
    strikes.kill_before(rig, steps.CreateGpuInstance, "one-slice-changed", number=2)

    agents.start(rig, "one-slice-changed")

    assert rig.node_object.has_reconfiguring_taint


def test_a_record_that_the_host_could_not_save_is_saved_later() -> None:
    rig = nodes.node(layout="one-slice-changed")
    agent = agents.new_agent(rig)
    rig.host_copy_file.saved.clear()
    rig.failures.add("host_copy_file.save", errors.ConfigError("the disk is full"))
    agents.run(rig, "one-slice-changed", by=agent)
    rig.failures.clear()

    for _ in range(2):
        agents.run(rig, "one-slice-changed", by=agent)

    assert len(rig.host_copy_file.saved) == 1


@pytest.mark.parametrize(
    ("reason", "later"), [(Reason.NO_PERMISSION, ""), (Reason.NVML_ERROR, "all-1g.5gb")]
)
def test_outdated_copy_of_the_journal_undoes_nothing(reason: Reason, later: str) -> None:
    rig = nodes.node(layout="all-balanced")
    rig.failures.add(steps.CreateGpuInstance, errors.HardwareError("no", reason=reason), times=1)
    copies = rig.note(lambda: rig.host_copy_file.text or "")
    agents.run(rig, "one-slice-changed")
    if later:
        rig.failures.add("gpus.observe", call_errors.broken("gpus"))
        agents.run(rig, later)
        rig.failures.clear()
    # The disk was full at the end of the run.
    rig.host_copy_file.text = max(copies, key=len)
    rig.gpus = gpu_values.without_instances(rig.gpus, 0)
    before = rig.gpus

    agents.undo(rig)

    assert rig.gpus == before


def test_node_that_registers_again_between_attempts_gets_its_services_back() -> None:
    rig = nodes.hosted_node()
    rig.failures.add("services.start", call_errors.broken("services"))
    agent = agents.new_agent(rig)
    assert agents.run(rig, "one-slice-changed", by=agent).should_retry
    rig.failures.clear()
    agent_loop.register_again(rig)

    agent.forget_node()
    agent.recover("one-slice-changed")

    ends.run_to(rig, "one-slice-changed", Reason.APPLIED, by=agent, attempt=2)


@pytest.mark.parametrize("label_managed", [True, False])
@pytest.mark.parametrize("requested", ["one-slice-changed", "all-1g.5gb"])
def test_agent_after_a_stopped_one_waits_for_the_plugin(
    requested: str, *, label_managed: bool
) -> None:
    """Although the new pod of the plugin is not there yet, and no label says that one is due."""
    unfinished = 0

    def begin() -> ends.NodeAndAgent:
        rig = nodes.node(layout="all-balanced", label_managed=label_managed)
        return rig, agents.new_agent(rig)

    for rig, _ in ends.supersede_at_checks(begin, "one-slice-changed"):
        unfinished += ends.has_layout(rig, "one-slice-changed")
        rig.pods.remove_if(lambda pod: pod.is_terminating)

        assert agents.resume(rig, requested).state is run_status.State.SUCCESS
        assert rig.kubelet.schedulable == rig.plugin_devices
        ends.assert_restored(rig)
    assert unfinished > 0


def test_services_start_after_the_rollback_of_a_resumed_run() -> None:
    """They would hold the GPUs that are still to be rolled back."""

    def node_after_kill() -> node_rig.NodeRig:
        rig = nodes.hosted_node()
        strikes.kill_before(rig, steps.CreateGpuInstance, "one-slice-changed")
        rig.log.clear()
        return rig

    undisturbed = node_after_kill()
    agents.resume(undisturbed, "one-slice-changed")
    calls = undisturbed.log[: undisturbed.log.index("gpus.execute")]
    last = max(at for at, call in enumerate(calls) if call == "workloads.list")
    rig = node_after_kill()
    rig.failures.add(last, call_errors.broken("workloads.list"))

    def occupy() -> None:
        rig.driver.clients = "nvsm (pid 7)" if rig.host.services["nvsm.service"] else ""

    rig.callbacks.add(moments.Call, occupy)
    outcome = agents.resume(rig, "one-slice-changed")

    assert outcome.reason is not Reason.APPLIED
    assert "the former instances are restored" in outcome.message
    assert ends.has_layout(rig, "all-balanced")
    assert all(rig.host.services[name] for name in ("dcgm.service", "nvsm.service"))


def test_failed_read_does_not_keep_a_stopping_agent_from_reopening() -> None:
    rig = nodes.busy_node()
    agent = agents.new_agent(rig)
    rig.node_object.has_reconfiguring_taint = True
    journal = journals.Journal(
        layout="one-slice-changed",
        is_draining=True,
        node=node_entries.NodeEntries(has_reconfiguring_taint=True),
    )
    rig.node_object.annotations[well_known.JOURNAL_ANNOTATION] = journal.to_json()
    agent.recover("one-slice-changed")
    agent.mark_outdated()
    rig.failures.add("node.read", call_errors.broken("node"))
    with pytest.raises(errors.ClusterError):
        agent.recover("one-slice-changed")
    rig.failures.clear()

    agent.stop()

    assert not rig.node_object.has_reconfiguring_taint
    assert rig.node_object.status["config"] == "one-slice-changed"


def stop_and_restore(rig: node_rig.NodeRig, agent: agents.AgentInMemory) -> None:
    """Stop an agent whose host works again; check that it restores node and host."""
    rig.host.broken_services, rig.hooks.broken = set(), set()

    agent.stop()

    assert rig.node_object.labels[well_known.STATE_LABEL] == "failed"
    assert well_known.JOURNAL_ANNOTATION not in rig.node_object.annotations
    assert not rig.hooks.pending_exit
    ends.assert_restored(rig, is_stopped=True)


@pytest.mark.parametrize("lost", ["service", "hook"])
def test_an_agent_that_stops_before_a_retry_restores_node_and_host(lost: str) -> None:
    rig = nodes.add_hooks(nodes.hosted_node())
    agent = agents.new_agent(rig)

    def fail() -> None:
        rig.host.broken_services = {"dcgm.service"} if lost == "service" else set()
        rig.hooks.broken = {"exit"} if lost == "hook" else set()

    with rig.callbacks.adding("gpus.execute", fail):
        assert agents.run(rig, "one-slice-changed", by=agent).should_retry

    stop_and_restore(rig, agent)


def test_an_agent_stopped_after_an_unreported_run_restores_node_and_host() -> None:
    rig = nodes.add_hooks(nodes.hosted_node())
    agent = agents.new_agent(rig)
    rig.failures.add(
        "node.patch",
        call_errors.broken("workloads"),
        when=lambda: rig.log.count("node.patch") > 1,
    )
    with pytest.raises(errors.ClusterError):
        agents.run(rig, "one-slice-changed", by=agent)
    rig.failures.clear()

    stop_and_restore(rig, agent)
