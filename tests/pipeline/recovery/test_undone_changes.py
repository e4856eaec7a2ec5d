"""Instances that an interrupted change left: which are undone, and when."""

import dataclasses

import pytest

from mig_manager import errors
from mig_manager.agent.drift import actions
from mig_manager.core import model, steps
from mig_manager.core.fleet import slots
from mig_manager.core.objects import well_known
from mig_manager.core.records import journals, run_status
from mig_manager.reasons import Reason
from tests.rigs.node import (
    agents,
    call_errors,
    ends,
    fakes,
    gpu_values,
    local_rig,
    node_rig,
    nodes,
    strikes,
)


def cut_in_half() -> tuple[node_rig.NodeRig, tuple[model.Gpu, ...]]:
    """Return a node whose agent was killed in the middle of its steps, and its GPUs before."""
    rig = nodes.node(layout="all-balanced")
    before = rig.gpus
    strikes.kill_before(rig, steps.CreateGpuInstance, "all-1g.5gb")
    rig.forget_past()
    rig.host.refreshes = 0
    return rig, before


def test_an_interrupted_change_is_undone_only_under_the_lock() -> None:
    rig, before = cut_in_half()
    lock = fakes.FakeLock(refusals=1)
    successor = agents.new_agent(rig, lock=lock)

    with pytest.raises(errors.LockedError):
        successor.recover("all-balanced")
    assert rig.driver.executed_steps == []
    assert "gpus.observe" not in rig.log

    successor.recover("all-balanced")
    assert ends.is_as_before(rig, before)
    assert lock.descriptions == ["undoing an interrupted change to all-1g.5gb"]
    assert rig.host.refreshes == 1


@pytest.mark.parametrize(
    ("before", "killed", "applied", "label"),
    [
        ("before", "requested", "small", None),
        ("before", "requested", "small", "other"),
        ("before", "requested", "small", "requested"),
        ("before", "requested", "first-only", None),
        ("requested", "other", "before", None),  # where no former instance has room
    ],
)
def test_layout_applied_at_a_shell_since_the_kill_is_not_undone(
    before: str, killed: str, applied: str, label: str | None
) -> None:
    rig = local_rig.LocalRig(before)
    rig.start_plugin()
    text = local_rig.LAYOUTS_TEXT
    agents.run(rig, before, layouts=text)
    former = rig.gpus
    strikes.kill_before(rig, steps.CreateGpuInstance, killed, layouts=text)
    rig.change_to(applied)
    gpus = rig.gpus
    rig.failures.add(steps.CreateGpuInstance, call_errors.REFUSED, times=1)

    agent = agents.start(rig, label, layouts=text)
    if label is None:
        assert not agent.restore_without_request()
    else:
        assert agents.run(rig, label, by=agent).state is run_status.State.FAILED

    undone = former[1:] if applied == "first-only" else gpus[1:]
    assert ends.is_as_before(rig, (gpus[0], *undone))
    assert rig.node_object.labels.get(well_known.APPLIED_LABEL) is None
    ends.assert_restored(rig)


def test_instance_that_the_interrupted_change_did_not_create_stays() -> None:
    rig, before = cut_in_half()
    place = nodes.add_unowned_instance(rig, "2g.10gb", 4)
    successor = agents.start(rig, None)

    assert place in {gi.placement for gi in rig.gpus[0].gpu_instances}
    assert any(
        f"at {place} on GPU 0 is new, and is kept" in text
        for text in rig.node_object.event_messages
    )
    journal = rig.node_object.journal
    assert journal.gpus.snapshots
    assert not journal.node.has_reconfiguring_taint
    assert successor.restore_without_request()

    instances = tuple(gi for gi in rig.gpus[0].gpu_instances if gi.placement != place)
    rig.gpus = (dataclasses.replace(rig.gpus[0], gpu_instances=instances), *rig.gpus[1:])
    assert not successor.restore_without_request()
    assert ends.is_as_before(rig, before)
    assert well_known.JOURNAL_ANNOTATION not in rig.node_object.annotations


def test_instance_created_after_a_refused_rollback_stays() -> None:
    rig = nodes.busy_node()
    strikes.kill_before(rig, steps.CreateGpuInstance, "one-slice-changed", number=2)
    (created,) = (gi for gi in rig.gpus[0].gpu_instances if gi.placement.start == 0)
    uid = rig.pods.add(
        "newcomer", devices=frozenset(ci.uuid or "" for ci in created.compute_instances)
    )
    successor = agents.start(rig, None)
    assert successor.restore_without_request()
    del rig.pods[uid]
    place = nodes.add_unowned_instance(rig, "1g.5gb", 1)

    assert successor.restore_without_request()

    assert place in {gi.placement for gi in rig.gpus[0].gpu_instances}


def node_with_lost_gpu() -> tuple[node_rig.NodeRig, model.GpuSnapshot]:
    """Return a node whose journal has what an unreachable GPU had before a failed change."""
    rig = nodes.node(layout="all-balanced")
    lost = rig.gpus[0]
    rig.driver.lost.add(lost.uuid)
    # As a reset leaves it.
    rig.gpus = gpu_values.without_instances(rig.gpus, 0)
    journal = journals.Journal(
        layout="all-1g.5gb", gpus=journals.GpuEntries(snapshots=(lost.snapshot,))
    )
    rig.node_object.annotations[well_known.JOURNAL_ANNOTATION] = journal.to_json()
    return rig, lost.snapshot


ONE_OF_THEM = """
version: v1
mig-configs:
  second-alone:
  - {devices: [1], mig-enabled: true, mig-devices: {1g.5gb: 7}}
"""


def pending(rig: node_rig.NodeRig) -> tuple[str, ...]:
    text = rig.node_object.annotations.get(well_known.JOURNAL_ANNOTATION)
    return (
        tuple(gpu.uuid for gpu in journals.Journal.from_json(text).gpus.snapshots) if text else ()
    )


@pytest.mark.parametrize("is_restarted", [False, True])
def test_unreachable_gpu_outside_the_layout_is_restored_later(*, is_restarted: bool) -> None:
    rig, before = node_with_lost_gpu()
    agent = agents.start(rig, "second-alone", layouts=ONE_OF_THEM)

    outcome = agents.run(rig, "second-alone", by=agent)

    assert outcome.state is run_status.State.SUCCESS, outcome.message
    assert pending(rig) == (before.uuid,)
    plugin = dict(rig.pods)
    assert agents.run(rig, "second-alone", by=agent).state is run_status.State.SUCCESS
    assert agent.check_drift("second-alone", outcome) is actions.Action.REST
    assert pending(rig) == (before.uuid,)
    assert dict(rig.pods) == plugin

    rig.driver.lost.clear()
    if is_restarted:
        agent = agents.start(rig, "second-alone", layouts=ONE_OF_THEM)
    assert agents.run(rig, "second-alone", by=agent).state is run_status.State.SUCCESS
    assert ends.is_as_before(rig, [before])
    assert pending(rig) == ()


@pytest.mark.parametrize(
    "layouts",
    [None, ONE_OF_THEM, agents.LAYOUTS_TEXT],
    ids=["the same agent", "a new agent", "the file lacks it"],
)
def test_an_active_layout_stays_so_beside_an_unreachable_gpu(layouts: str | None) -> None:
    rig, before = node_with_lost_gpu()
    rig.slots.are_limited = True
    agent = agents.start(rig, "second-alone", layouts=ONE_OF_THEM)
    assert agents.run(rig, "second-alone", by=agent).reason is Reason.APPLIED
    rig.slots.denials = [slots.Denial(limit=1, changing=("node-b",))]
    rig.forget_past()
    if layouts is not None:
        agent = agents.start(rig, "second-alone", layouts=layouts)

    outcome = agents.run(rig, "second-alone", by=agent)

    assert outcome.reason is Reason.ALREADY_APPLIED, outcome.message
    assert "slots.take" not in rig.log
    assert "pending" not in rig.node_object.states
    assert "Recovered" not in rig.node_object.events
    assert pending(rig) == (before.uuid,)

    rig.driver.lost.clear()
    agents.run(rig, "second-alone", by=agent)
    assert "slots.take" in rig.log
    assert ends.is_as_before(rig, [before])


def test_a_failed_request_is_retried_once_an_unreachable_gpu_is_back() -> None:
    rig, before = node_with_lost_gpu()
    agent = agents.start(rig, "second-alone", layouts=ONE_OF_THEM)
    agents.run(rig, "second-alone", by=agent)

    outcome = agents.run(rig, "missing", by=agent)

    assert outcome.reason is Reason.UNKNOWN_CONFIG
    assert not outcome.should_retry
    assert agent.check_drift("missing", outcome) is actions.Action.REST
    rig.driver.lost.clear()
    assert agent.check_drift("missing", outcome) is actions.Action.RUN
    agents.run(rig, "missing", by=agent)
    assert ends.is_as_before(rig, [before])


def test_a_gpu_that_a_command_set_up_leaves_another_to_be_restored() -> None:
    rig = local_rig.LocalRig("before")
    rig.start_plugin()
    former = rig.gpus
    journal = journals.Journal(
        layout="requested",
        gpus=journals.GpuEntries(
            snapshots=tuple(gpu.snapshot for gpu in former), is_verified=True
        ),
    )
    rig.node_object.annotations[well_known.JOURNAL_ANNOTATION] = journal.to_json()
    rig.change_to("first-only")
    rig.driver.lost.add(former[1].uuid)
    agent = agents.start(rig, "missing", layouts=local_rig.LAYOUTS_TEXT)

    outcome = agents.run(rig, "missing", by=agent)

    assert outcome.reason is Reason.UNKNOWN_CONFIG
    assert pending(rig) == (former[1].uuid,)
    assert not outcome.should_retry


def test_without_a_request_an_unreachable_gpu_is_restored_later() -> None:
    rig, before = node_with_lost_gpu()
    agent = agents.start(rig, None)

    assert agent.restore_without_request()
    assert pending(rig) == (before.uuid,)

    rig.driver.lost.clear()
    assert not agent.restore_without_request()
    assert ends.is_as_before(rig, [before])


def test_a_pod_on_new_instances_leaves_the_restore_of_an_unreachable_gpu() -> None:
    rig = nodes.node(layout="all-balanced")
    first, lost = rig.gpus
    strikes.kill_before(rig, steps.CreateComputeInstance, "all-1g.5gb", number=4)
    rig.driver.lost.add(lost.uuid)
    created = {*rig.gpus[0].mig_uuids} - {*first.mig_uuids}
    rig.pods.add("new", devices=frozenset({min(created)}))

    assert (
        agents.resume(rig, "second-alone", layouts=ONE_OF_THEM.replace("[1]", "[0]")).state
        is run_status.State.SUCCESS
    )

    assert "new" in rig.pods.names
    assert pending(rig) == (lost.uuid,)


def test_a_rollback_that_is_refused_again_emits_no_event() -> None:
    rig = nodes.busy_node()
    strikes.kill_before(rig, steps.CreateGpuInstance, "one-slice-changed", number=2)
    rig.pods.add("newcomer", devices=frozenset({nodes.device_at(rig, 0)}))
    assert agents.undo(rig)
    assert rig.node_object.events.count("Recovered") == 1
    journal = rig.node_object.journal
    first, *others = journal.gpus.snapshots
    gone = model.Creation(rig.gpus[0].gpu_instances[0].profile, model.Placement(6, 1))
    first = dataclasses.replace(first, created=(*(first.created or ()), gone))
    journal = dataclasses.replace(journal, gpus=journal.gpus.with_snapshots((first, *others)))
    rig.node_object.annotations[well_known.JOURNAL_ANNOTATION] = journal.to_json()

    assert agents.undo(rig)

    assert rig.node_object.events.count("Recovered") == 1


def test_a_rollback_that_a_pod_prevents_pauses_no_device_plugin() -> None:
    rig = nodes.node(layout="all-1g.5gb")
    before = nodes.node(layout="all-balanced").gpus[0].snapshot
    journal = journals.Journal(layout="all-1g.5gb", gpus=journals.GpuEntries(snapshots=(before,)))
    rig.node_object.annotations = {well_known.JOURNAL_ANNOTATION: journal.to_json()}
    rig.verified_layout_file.clear()  # The killed agent verified nothing.
    rig.pods.add("new", devices=frozenset({rig.gpus[0].mig_uuids[0]}))
    pods = dict(rig.pods)

    agents.start(rig, None)

    assert pending(rig)
    assert dict(rig.pods) == pods


def test_a_resumed_run_that_fails_keeps_the_device_of_a_new_pod() -> None:
    rig = nodes.busy_node()
    strikes.kill_before(rig, steps.CreateGpuInstance, "one-slice-changed", number=2)
    device = nodes.device_at(rig, 0)
    rig.pods.add("newcomer", devices=frozenset({device}))
    rig.kubelet.schedulable = rig.plugin_devices
    rig.failures.add(steps.CreateGpuInstance, call_errors.REFUSED, times=1)

    assert agents.resume(rig, "one-slice-changed").state is run_status.State.FAILED

    assert device in rig.gpus[0].mig_uuids


def test_a_resumed_run_that_rolls_back_publishes_the_restored_gpus() -> None:
    rig = nodes.busy_node()
    before = rig.gpus
    strikes.kill_before(rig, steps.CreateComputeInstance, "one-slice-changed")
    text = agents.LAYOUTS_TEXT.replace("{1g.5gb: 4, 3g.20gb: 1}", "{1g.5gb: 9}")

    assert agents.resume(rig, "one-slice-changed", layouts=text).reason is Reason.DOES_NOT_FIT

    assert gpu_values.geometry(rig.node_object.published_gpus) == gpu_values.geometry(before)
    assert rig.node_object.labels[well_known.APPLIED_LABEL] == "all-balanced"


def test_layout_for_all_gpus_replaces_a_pending_restore() -> None:
    rig, _ = node_with_lost_gpu()
    assert agents.resume(rig, "all-1g.5gb").state is run_status.State.SUCCESS

    assert pending(rig) == ()
