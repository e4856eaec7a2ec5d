"""What a killed run leaves, and how its successor takes over."""

import dataclasses
import json
from collections.abc import Callable

import pytest

from mig_manager import errors
from mig_manager.agent import drift
from mig_manager.core import model, steps
from mig_manager.core.layout import config
from mig_manager.core.node import cluster
from mig_manager.core.planner import planner
from mig_manager.core.records import gpu_codec, status
from tests import fakes, scenes
from tests.shell import applying_rig

IMPOSSIBLE = ("too-much", "no-such-layout", "no-such-profile")


def steadfast(world: fakes.World) -> fakes.FakeWish:
    return fakes.FakeWish(world.clock, replaced=False)


def is_in_force(world: fakes.World, layout: str) -> bool:
    document = config.parse(scenes.CONFIG, source="test")
    wanted = config.select(document.layout(layout), world.gpus)
    return planner.plan(world.gpus, wanted).is_empty


def assert_as_before(world: fakes.World, before: tuple[model.Gpu, ...]) -> None:
    assert planner.restore(world.gpus, [gpu.snapshot for gpu in before]).is_empty


def assert_says_the_truth(world: fakes.World) -> None:
    """The label names a layout that is in force, or there is none."""
    applied = world.labels.get(cluster.APPLIED_LABEL)
    assert applied is None or is_in_force(world, applied)


def killed(
    make: Callable[[], fakes.World], layout: str, index: int
) -> tuple[fakes.World, tuple[model.Gpu, ...]]:
    """Return a node whose agent was killed before its call number ``index``, and its old GPUs."""
    world = make()
    before = world.gpus
    world.failing = {index: scenes.Killed()}  # type: ignore[dict-item]
    with pytest.raises(scenes.Killed):
        scenes.run(world, layout)
    world.failing = {}
    return world, before


def calls(scenario: str) -> tuple[Callable[[], fakes.World], str, range]:
    make, layout = scenes.SCENARIOS[scenario]
    return make, layout, range(scenes.count_calls(make, layout))


@pytest.mark.parametrize("scenario", scenes.SWEPT)
def test_a_run_killed_at_any_call_is_carried_on_and_succeeds(scenario: str) -> None:
    make, layout, indices = calls(scenario)
    for index in indices:
        world, _ = killed(make, layout, index)
        assert_says_the_truth(world)

        successor = scenes.reconciler(world)
        successor.recover(layout)
        outcome = successor.run(layout, steadfast(world))

        assert outcome.state is model.State.SUCCESS, index
        assert is_in_force(world, layout)
        scenes.assert_nothing_taken(world)
        assert_says_the_truth(world)


def test_while_a_killed_run_is_carried_on_nothing_is_given_back_in_between() -> None:
    make, layout, indices = calls("one-slice-on-a-busy-node")
    carried_on = 0
    for index in indices:
        world, _ = killed(make, layout, index)
        was_closed = world.has_hold_taint
        successor = scenes.reconciler(world)

        successor.recover(layout)

        assert world.has_hold_taint is was_closed
        carried_on += was_closed
    assert carried_on > 5


@pytest.mark.parametrize("scenario", scenes.SWEPT)
def test_after_a_kill_a_removed_label_brings_everything_back_to_where_it_was(
    scenario: str,
) -> None:
    make, layout, indices = calls(scenario)
    for index in indices:
        world, before = killed(make, layout, index)
        is_proven = is_in_force(world, layout)

        successor = scenes.reconciler(world)
        successor.recover(None)
        successor.rest()

        scenes.assert_nothing_taken(world)
        if not is_proven:
            assert_as_before(world, before)
        assert world.labels.get(cluster.STATE_LABEL) != "pending"
        assert_says_the_truth(world)


@pytest.mark.parametrize(
    ("scenario", "wanted"),
    [
        ("one-slice-on-a-busy-node", "too-much"),
        ("first-layout", "all-balanced"),
        pytest.param("first-layout", "too-much", marks=pytest.mark.slow),
        pytest.param("mode-off", "all-1g.5gb", marks=pytest.mark.slow),
        pytest.param("mode-off", "too-much", marks=pytest.mark.slow),
        pytest.param("one-slice-on-a-busy-node", "all-1g.5gb", marks=pytest.mark.slow),
    ],
)
def test_after_a_kill_another_wish_starts_from_where_the_first_one_did(
    scenario: str, wanted: str
) -> None:
    make, layout, indices = calls(scenario)
    for index in indices:
        world, before = killed(make, layout, index)

        successor = scenes.reconciler(world)
        successor.recover(wanted)
        outcome = successor.run(wanted, steadfast(world))

        scenes.assert_nothing_taken(world)
        assert_says_the_truth(world)
        if wanted in IMPOSSIBLE:
            assert outcome.state is model.State.FAILED
            assert (
                is_in_force(world, layout)
                or planner.restore(world.gpus, [gpu.snapshot for gpu in before]).is_empty
            )
        else:
            assert outcome.state is model.State.SUCCESS
            assert is_in_force(world, wanted)


def test_after_a_kill_a_layout_that_has_become_impossible_is_undone_before_it_is_refused() -> None:
    """The same name, but the file means something else now."""
    make, layout, indices = calls("one-slice-on-a-busy-node")
    undone = 0
    for index in indices:
        world, before = killed(make, layout, index)
        was_changed = not planner.restore(world.gpus, [g.snapshot for g in before]).is_empty
        text = scenes.CONFIG.replace("{1g.5gb: 4, 3g.20gb: 1}", "{1g.5gb: 9}")

        successor = scenes.reconciler(world, text)
        successor.recover(layout)
        outcome = successor.run(layout, steadfast(world))

        assert outcome.reason is errors.Reason.DOES_NOT_FIT
        scenes.assert_nothing_taken(world)
        if world.labels.get(cluster.APPLIED_LABEL) == "all-balanced":
            assert_as_before(world, before)
            undone += was_changed
        assert_says_the_truth(world)
    assert undone > 0


def test_a_change_that_fails_and_is_killed_at_any_call_ends_as_it_would_have_undisturbed() -> None:
    def failing_node() -> fakes.World:
        world = scenes.busy_node()
        world.step_error = scenes.refuse(steps.CreateComputeInstance, times=1)
        return world

    world = failing_node()
    scenes.run(world, "one-slice-changed")
    for index in range(len(world.log)):
        world, before = killed(failing_node, "one-slice-changed", index)
        world.step_error = scenes.refuse(steps.CreateComputeInstance, times=1)

        successor = scenes.reconciler(world)
        successor.recover("one-slice-changed")
        outcome = successor.run("one-slice-changed", steadfast(world))

        assert outcome.reason is errors.Reason.INSUFFICIENT_RESOURCES
        assert_as_before(world, before)
        assert world.labels.get(cluster.APPLIED_LABEL) == "all-balanced", index
        scenes.assert_nothing_taken(world)


def unlucky_node() -> tuple[fakes.World, tuple[model.Gpu, ...]]:
    """A change has failed, and so has its way back."""
    world = scenes.busy_node()
    before = world.gpus
    world.step_error = scenes.refuse(steps.CreateGpuInstance, times=9)
    outcome = scenes.run(world, "one-slice-changed")
    assert outcome.is_unfinished
    assert outcome.should_retry
    world.step_error = lambda _step: None
    return world, before


def test_a_way_back_that_fails_is_told_to_the_last_instance_and_keeps_nothing_else() -> None:
    world, _ = unlucky_node()

    told = world.told[-1]
    assert "still due: GPU 0" in told
    assert "create GPU instance 2g.10gb at" in told
    assert cluster.APPLIED_LABEL not in world.labels
    journal = status.Journal.from_json(world.annotations.pop(cluster.JOURNAL_ANNOTATION))
    assert journal == journal.remaining
    scenes.assert_nothing_taken(world)


def test_after_a_failed_way_back_the_next_try_at_the_wish_succeeds() -> None:
    world, _ = unlucky_node()
    successor = scenes.reconciler(world)
    successor.recover("one-slice-changed")

    outcome = successor.run("one-slice-changed", steadfast(world), attempt=2)

    assert outcome.reason is errors.Reason.APPLIED
    scenes.assert_nothing_taken(world)
    assert_says_the_truth(world)


@pytest.mark.parametrize("wanted", [*IMPOSSIBLE, None])
def test_a_failed_way_back_is_gone_once_the_wish_turns_out_impossible_or_ends(
    wanted: str | None,
) -> None:
    world, before = unlucky_node()
    successor = scenes.reconciler(world)

    successor.recover(wanted)
    if wanted:
        successor.run(wanted, steadfast(world))
    else:
        successor.rest()

    assert_as_before(world, before)
    assert world.labels[cluster.APPLIED_LABEL] == "all-balanced"
    scenes.assert_nothing_taken(world)


def test_without_a_restart_too_a_failed_way_back_is_remembered() -> None:
    world = scenes.busy_node()
    before = world.gpus
    world.step_error = scenes.refuse(steps.CreateGpuInstance, times=9)
    ours = scenes.reconciler(world)
    ours.run("one-slice-changed", steadfast(world))
    world.step_error = scenes.refuse(steps.CreateComputeInstance, times=1)

    outcome = ours.run("one-slice-changed", steadfast(world), attempt=2)

    assert outcome.state is model.State.FAILED
    assert not outcome.is_unfinished
    assert_as_before(world, before)
    assert world.labels[cluster.APPLIED_LABEL] == "all-balanced"
    scenes.assert_nothing_taken(world)


def test_a_layout_about_another_gpu_does_not_leave_half_of_an_older_change_behind() -> None:
    world, before = unlucky_node()
    text = f"{scenes.CONFIG}  second-only:\n  - {{devices: [1], mig-enabled: false}}\n"
    ours = scenes.reconciler(world, text)
    ours.recover("one-slice-changed")

    outcome = ours.run("second-only", steadfast(world))

    assert outcome.reason is errors.Reason.APPLIED
    assert world.gpus[1].current_mode is model.MigMode.DISABLED
    assert_as_before(world, before[:1])
    scenes.assert_nothing_taken(world)


def test_a_run_that_is_stopped_says_what_an_older_change_still_has_to_get_back() -> None:
    world, _ = unlucky_node()
    ours = scenes.reconciler(world)
    ours.recover("one-slice-changed")
    error = errors.ClusterError("no pods", reason=errors.Reason.API_UNAVAILABLE)
    stopped = steadfast(world)

    def stop() -> bool:
        world.refusing = {"workloads.list": error}
        return True

    stopped.ends_when = stop

    with pytest.raises(errors.Superseded):
        ours.run("one-slice-changed", stopped)

    assert "the interrupted change could not be rolled back: no pods" in world.told[-1]


def broken_after_one_creation() -> Callable[[steps.Step], Exception | None]:
    """Return a driver that creates one compute instance and then refuses whatever it is told."""
    done: list[steps.Step] = []

    def answer(step: steps.Step) -> Exception | None:
        if done:
            return errors.HardwareError("no", reason=errors.Reason.INSUFFICIENT_RESOURCES)
        if isinstance(step, steps.CreateComputeInstance):
            done.append(step)
        return None

    return answer


def test_a_way_back_that_would_take_a_pods_device_is_not_taken() -> None:
    world = scenes.busy_node()
    world.step_error = broken_after_one_creation()
    assert scenes.run(world, "one-slice-changed").is_unfinished
    world.step_error = lambda _step: None
    journal = status.Journal.from_json(world.annotations[cluster.JOURNAL_ANNOTATION])
    (odd,) = planner.restore(world.gpus, journal.snapshot).destroyed_uuids
    world.add_pod("newcomer", devices=frozenset({odd}))
    gpus = world.gpus
    successor = scenes.reconciler(world)

    successor.recover("too-much")
    outcome = successor.run("too-much", steadfast(world))

    assert world.gpus == gpus
    assert "default/newcomer" in outcome.message
    assert outcome.should_retry
    assert "newcomer" in {pod.name for pod in world.pods.values()}


def test_the_status_says_when_the_next_try_is() -> None:
    world = scenes.node()
    world.plugin_is_broken = True
    world.pods.clear()
    ours = scenes.reconciler(world)

    ours.run("all-1g.5gb", steadfast(world), attempt=3, retry_after_s=40)

    told = json.loads(world.annotations[cluster.STATUS_ANNOTATION])
    assert told["attempt"] == 3
    assert told["retryAt"] == f"T{world.clock.now_s + 40:.2f}"


def test_a_failure_that_does_not_pass_has_no_next_try() -> None:
    world = scenes.node()

    scenes.reconciler(world).run("too-much", steadfast(world), retry_after_s=40)

    assert "retryAt" not in json.loads(world.annotations[cluster.STATUS_ANNOTATION])


# -- journals of other versions, and none --------------------------------------------------------

V1 = (
    '{"version": 1, "config": "all-1g.5gb", "cordoned": true, "holdTaint": true, '
    '"pausedLabels": {"nvidia.com/gpu.deploy.device-plugin": "true"}}'
)


def test_the_journal_of_the_version_before_is_given_back() -> None:
    assert status.JOURNAL_VERSION == 2
    world = scenes.node()
    world.annotations[cluster.JOURNAL_ANNOTATION] = V1
    world.labels[cluster.PLUGIN_DEPLOY_LABEL] = cluster.PAUSED_VALUE
    world.is_unschedulable = world.has_hold_taint = True

    scenes.reconciler(world).recover(None)

    scenes.assert_nothing_taken(world)
    assert world.labels[cluster.PLUGIN_DEPLOY_LABEL] == "true"


def test_the_journal_of_the_version_after_is_understood_as_far_as_it_is_known() -> None:
    world, before = unlucky_node()
    newer = json.loads(world.annotations[cluster.JOURNAL_ANNOTATION])
    newer |= {"version": status.JOURNAL_VERSION + 1, "unheardOf": ["x"]}
    world.annotations[cluster.JOURNAL_ANNOTATION] = json.dumps(newer)

    scenes.reconciler(world).recover(None)

    assert_as_before(world, before)
    scenes.assert_nothing_taken(world)


NONSENSE = [
    '{"version": 99}',
    "",
    "[]",
    "{" * 100_000,
    V1.replace("true,", "7,", 1),
    V1.replace('"version": 1', '"version": 2, "snapshot": [{"uuid": 7}]'),
    V1.replace('"version": 1', '"version": 2, "snapshot": [{"uuid": "G", "instances": [[1]]}]'),
    V1.replace('"version": 1', '"version": 2, "snapshot": [{"uuid": "G", "mode": "odd"}]'),
]


@pytest.mark.parametrize("text", NONSENSE, ids=range(len(NONSENSE)))
@pytest.mark.parametrize("is_ours", [True, False])
def test_a_journal_that_makes_no_sense_is_set_aside_and_what_is_marked_as_ours_given_back(
    text: str, *, is_ours: bool
) -> None:
    world = scenes.node()
    world.annotations[cluster.JOURNAL_ANNOTATION] = text
    world.labels[cluster.PLUGIN_DEPLOY_LABEL] = cluster.PAUSED_VALUE
    world.is_unschedulable = world.has_hold_taint = True
    if is_ours:
        world.annotations[cluster.CORDON_ANNOTATION] = "all-1g.5gb"

    scenes.reconciler(world).recover("all-1g.5gb")

    assert world.labels[cluster.PLUGIN_DEPLOY_LABEL] == "true"
    assert not world.has_hold_taint
    assert world.is_unschedulable is not is_ours
    assert cluster.JOURNAL_ANNOTATION not in world.annotations
    assert cluster.CORDON_ANNOTATION not in world.annotations
    kept = world.annotations[cluster.UNREADABLE_JOURNAL_ANNOTATION]
    assert text.startswith(kept)
    assert len(kept) == min(len(text), 16 * 1024)
    assert "JournalUnreadable" in world.events


def test_the_snapshot_of_a_journal_outlives_its_text() -> None:
    world = scenes.busy_node()
    journal = status.Journal(
        config="a",
        boot_id="b",
        applied="c",
        has_plugin=True,
        snapshot=tuple(gpu.snapshot for gpu in world.gpus),
    )

    again = status.Journal.from_json(journal.to_json())

    assert dataclasses.replace(again, snapshot=()) == dataclasses.replace(journal, snapshot=())
    assert planner.restore(world.gpus, again.snapshot).is_empty
    assert len(journal.to_json()) < 1024 * len(world.gpus)


def test_what_another_manager_left_paused_is_given_back_although_there_is_no_journal() -> None:
    world = scenes.node(layout="all-balanced")
    world.labels[cluster.PLUGIN_DEPLOY_LABEL] = cluster.PAUSED_VALUE
    world.labels["nvidia.com/gpu.deploy.dcgm"] = "paused-for-driver-upgrade"
    world.pods.clear()
    ours = scenes.reconciler(world)

    ours.recover("all-balanced")
    outcome = ours.run("all-balanced", steadfast(world))

    assert outcome.state is model.State.SUCCESS
    scenes.assert_nothing_taken(world)
    assert world.labels["nvidia.com/gpu.deploy.dcgm"] == "paused-for-driver-upgrade"


def test_what_somebody_else_wrote_since_the_crash_is_not_written_over() -> None:
    world = scenes.node()
    dcgm = "nvidia.com/gpu.deploy.dcgm"
    paused = {cluster.PLUGIN_DEPLOY_LABEL: "true", dcgm: "true"}
    journal = status.Journal(config="all-1g.5gb", paused_labels=paused)
    world.annotations[cluster.JOURNAL_ANNOTATION] = journal.to_json()
    world.labels |= {cluster.PLUGIN_DEPLOY_LABEL: cluster.PAUSED_VALUE, dcgm: "false"}

    scenes.reconciler(world).recover(None)

    assert world.labels[cluster.PLUGIN_DEPLOY_LABEL] == "true"
    assert world.labels[dcgm] == "false"
    scenes.assert_nothing_taken(world)


def test_a_node_without_a_wish_does_not_stay_pending() -> None:
    world = scenes.node()
    world.labels[cluster.STATE_LABEL] = "pending"

    scenes.reconciler(world).rest()

    assert world.labels[cluster.STATE_LABEL] == "failed"
    assert "Interrupted" in world.annotations[cluster.STATUS_ANNOTATION]


@pytest.mark.parametrize("state", ["success", "failed", None])
def test_a_node_without_a_wish_keeps_how_its_last_run_ended(state: str | None) -> None:
    world = scenes.node()
    if state:
        world.labels[cluster.STATE_LABEL] = state

    scenes.reconciler(world).rest()

    assert world.labels.get(cluster.STATE_LABEL) == state
    assert world.states == world.told == []


def test_a_node_without_a_wish_tells_its_gpus_once() -> None:
    world = scenes.node()
    reconciler = scenes.reconciler(world)

    reconciler.rest()
    assert gpu_codec.from_json(world.annotations[cluster.GPUS_ANNOTATION]) == world.gpus
    world.log.clear()
    reconciler.rest()

    assert "node.patch" not in world.log


def test_gpus_that_cannot_be_told_keep_no_node_from_resting() -> None:
    world = scenes.node()
    world.refusing["gpus.observe"] = errors.HardwareError(
        "no driver", reason=errors.Reason.DRIVER_NOT_LOADED
    )

    reconciler = scenes.reconciler(world)

    assert reconciler.rest()
    assert world.annotations == {}
    world.refusing.clear()
    assert not reconciler.rest()
    assert cluster.GPUS_ANNOTATION in world.annotations


def cut_in_half(layout: str = "all-1g.5gb") -> tuple[fakes.World, tuple[model.Gpu, ...]]:
    """Return a node whose agent was killed in the middle of its steps, and its GPUs before."""
    world = scenes.node(layout="all-balanced")
    before = world.gpus
    scenes.kill_at(world, 5, layout)
    world.log.clear()
    world.executed.clear()
    world.refreshed = 0
    return world, before


def test_what_an_interrupted_change_left_is_undone_under_the_lock_alone() -> None:
    world, before = cut_in_half()
    lock = applying_rig.FakeExclusion(refusals=1)
    successor = scenes.reconciler(world, lock=lock)

    with pytest.raises(errors.LockedError):
        successor.recover("all-balanced")
    assert world.executed == []
    assert "gpus.observe" not in world.log

    successor.recover("all-balanced")
    assert_as_before(world, before)
    assert lock.told == ["undoing an interrupted change to all-1g.5gb"]


def test_device_files_are_refreshed_after_the_rollback_of_an_interrupted_change() -> None:
    world, before = cut_in_half()

    scenes.reconciler(world).recover("all-balanced")

    assert_as_before(world, before)
    assert world.refreshed == 1


def test_an_instance_that_the_interrupted_change_did_not_create_is_named_and_kept() -> None:
    world, before = cut_in_half()
    spec = next(p for p in world.gpus[0].profiles or () if str(p.profile) == "2g.10gb")
    live = [gi.placement for gi in world.gpus[0].gpu_instances]
    had = {gi.placement for gi in before[0].gpu_instances}
    place = next(
        place
        for place in spec.placements
        if place not in had
        and not any(each.start < place.end and place.start < each.end for each in live)
    )
    foreign = steps.CreateGpuInstance(
        gpu_uuid=world.gpus[0].uuid,
        profile=spec.profile,
        profile_id=spec.profile_id,
        placement=place,
    )
    world.gpus = model.ObservedGpus((fakes.apply_step(world.gpus[0], foreign), *world.gpus[1:]))
    successor = scenes.reconciler(world)

    successor.recover(None)

    assert place in {gi.placement for gi in world.gpus[0].gpu_instances}
    assert any(f"at {place} on GPU 0 was not there before" in text for text in world.messages)
    left = status.Journal.from_json(world.annotations[cluster.JOURNAL_ANNOTATION])
    assert left.snapshot
    assert not left.cordoned
    assert successor.rest()

    instances = tuple(gi for gi in world.gpus[0].gpu_instances if gi.placement != place)
    changed = dataclasses.replace(world.gpus[0], gpu_instances=instances)
    world.gpus = model.ObservedGpus((changed, *world.gpus[1:]))
    assert not successor.rest()
    assert_as_before(world, before)
    assert cluster.JOURNAL_ANNOTATION not in world.annotations


def test_what_is_still_due_when_the_label_is_removed_is_tried_again() -> None:
    world = scenes.hosted_node()
    world.broken_services.clear()
    host_start = "host.start"
    world.refusing[host_start] = errors.HostError(
        "the service did not start", reason=errors.Reason.HOST_SERVICE_FAILED
    )
    reconciler = scenes.reconciler(world)
    assert reconciler.run("one-slice-changed", steadfast(world)).is_unfinished

    assert reconciler.rest()
    assert not world.services["dcgm.service"]

    del world.refusing[host_start]
    assert not reconciler.rest()

    assert world.services["dcgm.service"]
    assert cluster.JOURNAL_ANNOTATION not in world.annotations


# -- what is due on an unreachable GPU ------------------------------------------------------------


def due_on_lost_gpu() -> tuple[fakes.World, model.GpuSnapshot]:
    """Return a node whose journal has what an unreachable GPU had before a failed change."""
    world = scenes.node(layout="all-balanced")
    lost = world.gpus[0]
    world.lost.add(lost.uuid)
    # As a reset leaves it.
    world.gpus = (dataclasses.replace(lost, gpu_instances=()), *world.gpus[1:])
    journal = status.Journal(config="all-1g.5gb", snapshot=(lost.snapshot,))
    world.annotations[cluster.JOURNAL_ANNOTATION] = journal.to_json()
    return world, lost.snapshot


ONE_OF_THEM = """
version: v1
mig-configs:
  second-alone:
  - {devices: [1], mig-enabled: true, mig-devices: {1g.5gb: 7}}
"""


def due(world: fakes.World) -> tuple[str, ...]:
    text = world.annotations.get(cluster.JOURNAL_ANNOTATION)
    return tuple(gpu.uuid for gpu in status.Journal.from_json(text).snapshot) if text else ()


@pytest.mark.parametrize("is_restarted", [False, True])
def test_what_is_due_on_an_unreachable_gpu_is_restored_after_a_layout_that_is_not_about_it(
    *, is_restarted: bool
) -> None:
    world, before = due_on_lost_gpu()
    agent = scenes.reconciler(world, ONE_OF_THEM)
    agent.recover("second-alone")

    outcome = agent.run("second-alone", steadfast(world))

    assert outcome.state is model.State.SUCCESS, outcome.message
    assert due(world) == (before.uuid,)
    plugin = dict(world.pods)
    assert agent.run("second-alone", steadfast(world)).state is model.State.SUCCESS
    assert agent.check_drift("second-alone", outcome) is drift.Action.REST
    assert due(world) == (before.uuid,)
    assert dict(world.pods) == plugin

    world.lost.clear()
    if is_restarted:
        agent = scenes.reconciler(world, ONE_OF_THEM)
        agent.recover("second-alone")
    assert agent.run("second-alone", steadfast(world)).state is model.State.SUCCESS
    assert planner.restore(world.gpus, [before]).is_empty
    assert due(world) == ()


def test_a_layout_for_all_gpus_ends_what_was_due_on_an_unreachable_one() -> None:
    world, _ = due_on_lost_gpu()
    agent = scenes.reconciler(world)
    agent.recover("all-1g.5gb")

    assert agent.run("all-1g.5gb", steadfast(world)).state is model.State.SUCCESS

    assert due(world) == ()


def test_a_retry_that_can_observe_no_gpu_says_which_attempt_it_is() -> None:
    messages = []
    for attempt in (1, 7):
        world = scenes.node()
        world.refusing["gpus.observe"] = errors.HardwareError(
            "GPU 0: nvmlDeviceGetHandleByIndex answered 'Unknown Error'",
            reason=errors.Reason.NVML_ERROR,
        )
        outcome = scenes.reconciler(world).run("all-balanced", steadfast(world), attempt=attempt)
        assert outcome.should_retry
        messages.append(outcome.message)

    first, seventh = messages
    assert "attempt" not in first
    assert "'Unknown Error'; no GPU can be observed at attempt 7 either" in seventh
