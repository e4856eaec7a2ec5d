"""What a killed run leaves, and how its successor takes over."""

import contextlib
import dataclasses
import itertools
import json

import pytest

from mig_manager import errors
from mig_manager.agent import drift
from mig_manager.core import model, steps
from mig_manager.core.node import device_ids, well_known
from mig_manager.core.records import gpu_codec, journals
from mig_manager.errors import Reason
from tests.node import fakes, gpu_values, scenes, swept_scenes
from tests.node.scenes import LAYOUT
from tests.node.swept_scenes import assert_says_the_truth
from tests.pipeline import lives
from tests.unit import machine


@pytest.mark.parametrize("end", ["locked", "replaced", "stopped"])
def test_successor_without_the_lock_leaves_the_change_to_its_agent(end: str) -> None:
    rig = scenes.busy_node()
    lock = fakes.FakeExclusion(refusals=10**6)
    successor = scenes.reconciler(rig, lock=lock)

    def start_successor(_step: steps.Step) -> None:
        rig.driver.step_error = lambda _step: None
        journal, labels = rig.annotations[well_known.JOURNAL_ANNOTATION], dict(rig.labels)
        successor.recover(LAYOUT)
        if end == "locked":
            assert scenes.run(rig, by=successor).reason is Reason.LOCKED
        else:
            request = fakes.FakeRequest(rig.clock, ends_at=2, replaced=end == "replaced")
            with pytest.raises(errors.Superseded):
                scenes.run(rig, by=successor, request=request)
            successor.stop()
        labels |= {well_known.STATE_LABEL: rig.labels[well_known.STATE_LABEL]}
        assert rig.annotations[well_known.JOURNAL_ANNOTATION] == journal
        assert (rig.has_hold_taint, rig.labels) == (True, labels)

    rig.driver.step_error = start_successor
    assert scenes.run(rig).reason is Reason.APPLIED

    scenes.assert_restored(rig)
    lock.refusals = 0
    assert scenes.run(rig, by=successor).reason is Reason.ALREADY_APPLIED
    scenes.assert_restored(rig)


@pytest.mark.parametrize("wanted", [LAYOUT, "all-balanced"])
def test_successor_that_started_before_the_change_takes_over_its_journal(wanted: str) -> None:
    for index in scenes.moments(scenes.busy_node):
        rig = scenes.busy_node()
        successor = scenes.reconciler(rig)
        successor.recover(LAYOUT)
        rig.failing = {len(rig.log) + index: scenes.Killed()}
        with pytest.raises(scenes.Killed):
            scenes.run(rig)
        rig.failing = {}

        assert scenes.run(rig, wanted, by=successor).state is model.State.SUCCESS, index
        assert scenes.has_layout(rig, wanted)
        scenes.assert_restored(rig)


def test_successor_that_cannot_read_the_journal_again_undoes_nothing() -> None:
    rig = scenes.busy_node()
    successor = scenes.reconciler(rig)

    def start_successor(_step: steps.Step) -> None:
        rig.driver.step_error = lambda _step: None
        successor.recover(LAYOUT)

    rig.driver.step_error = start_successor
    assert scenes.run(rig).reason is Reason.APPLIED
    changed = rig.gpus
    rig.failing = {len(rig.log): scenes.BROKEN["node"]}

    assert scenes.run(rig, by=successor).reason is Reason.API_UNAVAILABLE
    assert rig.gpus == changed
    assert scenes.run(rig, by=successor, attempt=2).reason is Reason.ALREADY_APPLIED
    scenes.assert_restored(rig)


@pytest.mark.parametrize("meanwhile", ["recovery", "run", "rest"])
def test_pauses_written_back_by_a_driver_manager_after_a_kill_are_resumed(meanwhile: str) -> None:
    written_back = 0
    for index, rig, _ in scenes.kills(swept_scenes.monitored_node):
        paused = [key for key, value in rig.labels.items() if value == well_known.PAUSED_VALUE]
        rig.labels |= dict.fromkeys(paused, f"{well_known.PAUSED_VALUE}_paused-for-driver-upgrade")
        agent = scenes.reconciler(rig)
        agent.recover(LAYOUT)
        if meanwhile == "rest":
            agent.rest()
        elif meanwhile == "run":
            scenes.run(rig, by=agent)
        rig.labels |= dict.fromkeys(paused, well_known.PAUSED_VALUE)
        written_back += bool(paused)
        if meanwhile == "rest":
            agent.check_without_request()
        else:
            assert scenes.run(rig, by=agent, attempt=2).state is model.State.SUCCESS, index
            assert rig.schedulable == {"nvidia.com/gpu": device_ids.expected_ids(rig.gpus)[0]}
        scenes.assert_restored(rig)
    assert written_back > 5


@pytest.mark.parametrize("part", ["all", "taint", "taint beside a journal", "state"])
@pytest.mark.parametrize("is_requested", [True, False])
def test_a_change_that_a_backup_of_the_node_puts_back_is_ended(
    part: str, *, is_requested: bool
) -> None:
    rig, backup = scenes.node(layout="all-balanced"), dict[str, dict[str, str]]()

    def save() -> None:
        if rig.has_hold_taint and well_known.PAUSED_VALUE in rig.labels.values():
            backup.update(labels=dict(rig.labels), annotations=dict(rig.annotations))

    rig.on_call = save
    agent = scenes.reconciler(rig)
    ended = scenes.run(rig, by=agent)
    rig.on_call = lambda: None

    def check() -> drift.Action:
        if is_requested:
            return agent.check_drift(LAYOUT, ended)
        return agent.check_without_request()

    if not is_requested:
        agent.rest()
    assert check() is drift.Action.REST
    rig.has_hold_taint = part != "state"
    if part == "all":
        rig.labels, rig.annotations = backup.values()
    elif part == "state":
        rig.labels[well_known.STATE_LABEL] = "pending"
    elif part != "taint":
        journal = journals.Journal(config=LAYOUT, stale_files=True)
        rig.annotations[well_known.JOURNAL_ANNOTATION] = journal.to_json()

    assert check() is not drift.Action.REST
    if is_requested:
        ended = scenes.run(rig, by=agent, may_evict=False)
        assert ended.state is model.State.SUCCESS
    else:
        assert not agent.rest()
    scenes.assert_restored(rig)
    assert rig.labels[well_known.STATE_LABEL] != "pending"
    assert check() is drift.Action.REST
    # Without a request, what the journal has is undone.
    assert scenes.has_layout(rig, "all-balanced" if part == "all" and not is_requested else LAYOUT)


@pytest.mark.parametrize("wanted", [None, "too-much"])
def test_a_change_undone_after_a_power_loss_labels_no_lost_layout(wanted: str | None) -> None:
    undone = 0
    for _, rig, _ in scenes.kills(scenes.busy_node, lambda rig: scenes.resume(rig, LAYOUT)):
        rig.restart_machine()
        if wanted is None:
            scenes.undo(rig)
        else:
            scenes.resume(rig, wanted)
        undone += bool(rig.gpus[0].gpu_instances)
        scenes.assert_restored(rig)
        assert_says_the_truth(rig)
    assert undone


def test_a_killed_run_that_is_to_be_resumed_keeps_the_node_closed() -> None:
    rig = scenes.busy_node()
    scenes.kill_at(rig, 5, LAYOUT)

    scenes.reconciler(rig).recover(LAYOUT)

    assert rig.has_hold_taint


def test_a_record_that_the_host_could_not_save_is_saved_later() -> None:
    rig = scenes.node(layout=LAYOUT)
    agent = scenes.reconciler(rig)
    rig.host.request_text = None
    rig.refusing["host.keep"] = errors.ConfigError("the disk is full")
    scenes.run(rig, LAYOUT, by=agent)
    rig.refusing.clear()

    scenes.run(rig, LAYOUT, by=agent)

    assert rig.host.request_text


@pytest.mark.parametrize(
    ("reason", "later"), [(Reason.NO_PERMISSION, ""), (Reason.NVML_ERROR, "all-1g.5gb")]
)
def test_outdated_copy_of_the_journal_undoes_nothing(reason: Reason, later: str) -> None:
    rig = scenes.node(layout="all-balanced")
    refusals = [errors.HardwareError("no", reason=reason)]
    rig.driver.step_error = lambda step: (
        refusals.pop() if isinstance(step, steps.CreateGpuInstance) and refusals else None
    )
    copies: list[str] = []
    rig.on_call = lambda: copies.append(rig.host.request_text or "")
    scenes.run(rig)
    if later:
        rig.refusing["gpus.observe"] = scenes.BROKEN["gpus"]
        scenes.run(rig, later)
        rig.refusing.clear()
    # The disk was full at the end of the run.
    rig.host.request_text = max(copies, key=len)
    rig.gpus = (dataclasses.replace(rig.gpus[0], gpu_instances=()), *rig.gpus[1:])
    before = rig.gpus

    scenes.undo(rig)

    assert rig.gpus == before


def test_node_that_registers_again_between_attempts_gets_its_services_back() -> None:
    rig = scenes.hosted_node()
    rig.refusing["host.start"] = scenes.BROKEN["host"]
    agent = scenes.reconciler(rig)
    assert scenes.run(rig, by=agent).should_retry
    rig.refusing.clear()
    lives.register_again(rig)

    agent.forget_node()
    agent.recover(LAYOUT)

    assert scenes.run(rig, by=agent, attempt=2).reason is Reason.APPLIED
    scenes.assert_restored(rig)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("requested", [LAYOUT, "all-1g.5gb"])
def test_agent_after_a_stopped_one_waits_for_the_plugin(requested: str, *, gated: bool) -> None:
    """Although the new pod of the plugin is not there yet, and no label says that one is due."""
    unfinished = 0
    for number in itertools.count(1):
        rig = scenes.node(layout="all-balanced", gated=gated)
        try:
            scenes.run(rig, request=fakes.FakeRequest(rig.clock, ends_at=number))
        except errors.Superseded:
            unfinished += scenes.has_layout(rig, LAYOUT)
        else:
            break
        rig.pods = {uid: pod for uid, pod in rig.pods.items() if not pod.is_terminating}

        outcome = scenes.resume(rig, requested)

        assert outcome.state is model.State.SUCCESS, number
        assert rig.schedulable == {"nvidia.com/gpu": device_ids.expected_ids(rig.gpus)[0]}
        scenes.assert_restored(rig)
    assert unfinished > 0


def cut_in_half() -> tuple[fakes.NodeRig, tuple[model.Gpu, ...]]:
    """Return a node whose agent was killed in the middle of its steps, and its GPUs before."""
    rig = scenes.node(layout="all-balanced")
    before = rig.gpus
    scenes.kill_at(rig, 5, "all-1g.5gb")
    rig.log.clear()
    rig.driver.executed.clear()
    rig.host.refreshes = 0
    return rig, before


def test_what_an_interrupted_change_left_is_undone_under_the_lock_alone() -> None:
    rig, before = cut_in_half()
    lock = fakes.FakeExclusion(refusals=1)
    successor = scenes.reconciler(rig, lock=lock)

    with pytest.raises(errors.LockedError):
        successor.recover("all-balanced")
    assert rig.driver.executed == []
    assert "gpus.observe" not in rig.log

    successor.recover("all-balanced")
    assert scenes.is_as_before(rig, before)
    assert lock.descriptions == ["undoing an interrupted change to all-1g.5gb"]
    assert rig.host.refreshes == 1


def test_instance_that_the_interrupted_change_did_not_create_stays() -> None:
    rig, before = cut_in_half()
    spec = next(p for p in rig.gpus[0].profiles or () if str(p.profile) == "2g.10gb")
    had = [gi.placement for gi in (*before[0].gpu_instances, *rig.gpus[0].gpu_instances)]
    place = next(
        free
        for free in spec.placements
        if free not in had
        and not any(
            gi.placement.start < free.end and free.start < gi.placement.end
            for gi in rig.gpus[0].gpu_instances
        )
    )
    foreign = steps.CreateGpuInstance(
        gpu_uuid=rig.gpus[0].uuid,
        profile=spec.profile,
        profile_id=spec.profile_id,
        placement=place,
    )
    rig.gpus = (machine.run(rig.gpus[0], [foreign]), *rig.gpus[1:])
    successor = scenes.reconciler(rig)

    successor.recover(None)

    assert place in {gi.placement for gi in rig.gpus[0].gpu_instances}
    assert any(f"at {place} on GPU 0 is new, and is kept" in text for text in rig.messages)
    journal = journals.Journal.from_json(rig.annotations[well_known.JOURNAL_ANNOTATION])
    assert journal.snapshot
    assert not journal.hold_taint
    assert successor.rest()

    instances = tuple(gi for gi in rig.gpus[0].gpu_instances if gi.placement != place)
    rig.gpus = (dataclasses.replace(rig.gpus[0], gpu_instances=instances), *rig.gpus[1:])
    assert not successor.rest()
    assert scenes.is_as_before(rig, before)
    assert well_known.JOURNAL_ANNOTATION not in rig.annotations


def test_instance_created_after_a_refused_rollback_stays() -> None:
    rig = scenes.busy_node()
    scenes.kill_at(rig, 5, LAYOUT)
    (created,) = (gi for gi in rig.gpus[0].gpu_instances if gi.placement.start == 0)
    uid = rig.add_pod(
        "newcomer", devices=frozenset(ci.uuid or "" for ci in created.compute_instances)
    )
    successor = scenes.reconciler(rig)
    successor.recover(None)
    assert successor.rest()
    del rig.pods[uid]
    place = model.Placement(1, 1)
    spec = next(p for p in rig.gpus[0].profiles or () if p.profile == created.profile)
    rig.gpus = (
        machine.run(
            rig.gpus[0],
            [
                steps.CreateGpuInstance(
                    gpu_uuid=rig.gpus[0].uuid,
                    profile=spec.profile,
                    profile_id=spec.profile_id,
                    placement=place,
                )
            ],
        ),
        *rig.gpus[1:],
    )

    assert successor.rest()

    assert place in {gi.placement for gi in rig.gpus[0].gpu_instances}


def node_with_lost_gpu() -> tuple[fakes.NodeRig, model.GpuSnapshot]:
    """Return a node whose journal has what an unreachable GPU had before a failed change."""
    rig = scenes.node(layout="all-balanced")
    lost = rig.gpus[0]
    rig.driver.lost.add(lost.uuid)
    # As a reset leaves it.
    rig.gpus = (dataclasses.replace(lost, gpu_instances=()), *rig.gpus[1:])
    journal = journals.Journal(config="all-1g.5gb", snapshot=(lost.snapshot,))
    rig.annotations[well_known.JOURNAL_ANNOTATION] = journal.to_json()
    return rig, lost.snapshot


ONE_OF_THEM = """
version: v1
mig-configs:
  second-alone:
  - {devices: [1], mig-enabled: true, mig-devices: {1g.5gb: 7}}
"""


def pending(rig: fakes.NodeRig) -> tuple[str, ...]:
    text = rig.annotations.get(well_known.JOURNAL_ANNOTATION)
    return tuple(gpu.uuid for gpu in journals.Journal.from_json(text).snapshot) if text else ()


@pytest.mark.parametrize("is_restarted", [False, True])
def test_unreachable_gpu_outside_the_layout_is_restored_later(*, is_restarted: bool) -> None:
    rig, before = node_with_lost_gpu()
    agent = scenes.reconciler(rig, ONE_OF_THEM)
    agent.recover("second-alone")

    outcome = scenes.run(rig, "second-alone", by=agent)

    assert outcome.state is model.State.SUCCESS, outcome.message
    assert pending(rig) == (before.uuid,)
    plugin = dict(rig.pods)
    assert scenes.run(rig, "second-alone", by=agent).state is model.State.SUCCESS
    assert agent.check_drift("second-alone", outcome) is drift.Action.REST
    assert pending(rig) == (before.uuid,)
    assert dict(rig.pods) == plugin

    rig.driver.lost.clear()
    if is_restarted:
        agent = scenes.reconciler(rig, ONE_OF_THEM)
        agent.recover("second-alone")
    assert scenes.run(rig, "second-alone", by=agent).state is model.State.SUCCESS
    assert scenes.is_as_before(rig, [before])
    assert pending(rig) == ()


def test_without_a_request_an_unreachable_gpu_is_restored_later() -> None:
    rig, before = node_with_lost_gpu()
    agent = scenes.reconciler(rig)
    agent.recover(None)

    assert agent.rest()
    assert pending(rig) == (before.uuid,)

    rig.driver.lost.clear()
    assert not agent.rest()
    assert scenes.is_as_before(rig, [before])


def test_a_pod_on_new_instances_leaves_the_restore_of_an_unreachable_gpu() -> None:
    rig = scenes.node(layout="all-balanced")
    first, lost = rig.gpus
    scenes.kill_at(rig, 12, "all-1g.5gb")
    rig.driver.lost.add(lost.uuid)
    created = {*rig.gpus[0].mig_uuids} - {*first.mig_uuids}
    rig.add_pod("new", devices=frozenset({min(created)}))
    agent = scenes.reconciler(rig, ONE_OF_THEM.replace("[1]", "[0]"))
    agent.recover("second-alone")

    assert scenes.run(rig, "second-alone", by=agent).state is model.State.SUCCESS

    assert "new" in rig.pod_names
    assert pending(rig) == (lost.uuid,)


def test_a_rollback_that_is_refused_again_emits_no_event() -> None:
    rig = scenes.busy_node()
    scenes.kill_at(rig, 5, LAYOUT)
    rig.add_pod("newcomer", devices=frozenset({scenes.device_at(rig, 0)}))
    assert scenes.undo(rig)
    assert rig.events.count("Recovered") == 1
    journal = journals.Journal.from_json(rig.annotations[well_known.JOURNAL_ANNOTATION])
    first, *others = journal.snapshot
    gone = model.Creation(rig.gpus[0].gpu_instances[0].profile, model.Placement(6, 1))
    first = dataclasses.replace(first, created=(*(first.created or ()), gone))
    rig.annotations[well_known.JOURNAL_ANNOTATION] = dataclasses.replace(
        journal, snapshot=(first, *others)
    ).to_json()

    assert scenes.undo(rig)

    assert rig.events.count("Recovered") == 1


def test_a_rollback_that_a_pod_prevents_pauses_no_device_plugin() -> None:
    rig = scenes.node(layout="all-1g.5gb")
    before = scenes.node(layout="all-balanced").gpus[0].snapshot
    journal = journals.Journal(config="all-1g.5gb", snapshot=(before,))
    rig.annotations = {well_known.JOURNAL_ANNOTATION: journal.to_json()}
    rig.add_pod("new", devices=frozenset({rig.gpus[0].mig_uuids[0]}))
    pods = dict(rig.pods)

    scenes.reconciler(rig).recover(None)

    assert pending(rig)
    assert dict(rig.pods) == pods


def test_a_resumed_run_that_rolls_back_publishes_the_restored_gpus() -> None:
    rig = scenes.busy_node()
    before = rig.gpus
    scenes.kill_at(rig, 4, LAYOUT)
    text = scenes.CONFIG.replace("{1g.5gb: 4, 3g.20gb: 1}", "{1g.5gb: 9}")

    assert scenes.resume(rig, LAYOUT, text).reason is Reason.DOES_NOT_FIT

    published = gpu_codec.from_json(rig.annotations[well_known.GPUS_ANNOTATION])
    assert gpu_values.geometry(published) == gpu_values.geometry(before)
    assert rig.labels[well_known.APPLIED_LABEL] == "all-balanced"


def test_layout_for_all_gpus_replaces_a_pending_restore() -> None:
    rig, _ = node_with_lost_gpu()
    assert scenes.resume(rig, "all-1g.5gb").state is model.State.SUCCESS

    assert pending(rig) == ()


def test_services_start_after_the_rollback_of_a_resumed_run() -> None:
    """They would hold the GPUs that are still to be rolled back."""

    def killed() -> fakes.NodeRig:
        rig = scenes.hosted_node()
        scenes.kill_at(rig, 3, "one-slice-changed")
        rig.log.clear()
        return rig

    undisturbed = killed()
    scenes.resume(undisturbed, "one-slice-changed")
    calls = undisturbed.log[: undisturbed.log.index("gpus.execute")]
    last = max(at for at, call in enumerate(calls) if call == "workloads.list")
    rig = killed()
    rig.failing[last] = scenes.broken("workloads.list")

    def occupy() -> None:
        rig.driver.clients = "nvsm (pid 7)" if rig.host.services["nvsm.service"] else ""

    rig.on_call = occupy
    outcome = scenes.resume(rig, "one-slice-changed")

    assert outcome.reason is not Reason.APPLIED
    assert "the former instances are restored" in outcome.message
    assert scenes.has_layout(rig, "all-balanced")
    assert all(rig.host.services[name] for name in ("dcgm.service", "nvsm.service"))


def test_failed_read_does_not_keep_a_stopping_agent_from_reopening() -> None:
    rig = scenes.busy_node()
    agent = scenes.reconciler(rig)
    rig.has_hold_taint = True
    journal = journals.Journal(config=LAYOUT, hold_taint=True, draining=True)
    rig.annotations[well_known.JOURNAL_ANNOTATION] = journal.to_json()
    agent.recover(LAYOUT)
    rig.refusing = {"node.read": scenes.BROKEN["node"]}
    with pytest.raises(errors.ClusterError):
        agent.recover(LAYOUT)
    rig.refusing = {}

    agent.stop()

    assert not rig.has_hold_taint
    assert json.loads(rig.annotations[well_known.STATUS_ANNOTATION])["config"] == LAYOUT


@pytest.mark.parametrize("lost", ["run", "service", "hook"])
def test_an_agent_that_stops_before_a_retry_restores_node_and_host(lost: str) -> None:
    rig = scenes.hooked(scenes.hosted_node())
    agent = scenes.reconciler(rig)

    def fail() -> None:
        if lost == "run" and rig.log[-1] == "node.patch" and rig.log.count("node.patch") > 1:
            raise scenes.BROKEN["workloads"]
        if rig.log[-1] == "gpus.execute":
            rig.host.broken_services = {"dcgm.service"} if lost == "service" else set()
            rig.hooks.broken = {"exit"} if lost == "hook" else set()

    rig.on_call = fail
    with contextlib.suppress(errors.ClusterError):
        assert scenes.run(rig, by=agent).should_retry
    rig.on_call = lambda: None
    rig.host.broken_services, rig.hooks.broken = set(), set()

    agent.stop()

    assert rig.labels[well_known.STATE_LABEL] == "failed"
    assert well_known.JOURNAL_ANNOTATION not in rig.annotations
    assert not rig.hooks.pending_exit
    scenes.assert_restored(rig, is_stopped=True)
