"""The layout ``custom``, which is in the node's annotation."""

import dataclasses
import json
from typing import Any

import pytest

from mig_manager import errors
from mig_manager.agent import drift, reconcile, record
from mig_manager.core import model
from mig_manager.core.layout import custom, served
from mig_manager.core.node import cluster
from mig_manager.core.node import policy as policies
from mig_manager.core.planner import planner
from mig_manager.core.records import status
from mig_manager.errors import Reason
from tests import fakes, scenes

ON = {"has_custom_layouts": True}


def document(rules: str, name: str = "mine") -> str:
    return f"version: v1\nmig-configs:\n  {name}:\n{rules}"


CHANGED = document("  - {devices: [0], mig-enabled: true, mig-devices: {1g.5gb: 4, 3g.20gb: 1}}\n")
"""For it the device ``2g.10gb`` of GPU 0 goes on a balanced node, and nothing else."""
BALANCED = document(
    "  - {devices: [0], mig-enabled: true, mig-devices: {1g.5gb: 2, 2g.10gb: 1, 3g.20gb: 1}}\n"
)


def wish(text: str | None = CHANGED, *, is_on_demand: bool = False) -> custom.Custom:
    return custom.Custom(node_name="node-a", text=text, is_on_demand=is_on_demand)


def run(
    rig: fakes.NodeRig,
    wanted: custom.Custom | None = None,
    *,
    by: reconcile.Reconciler | None = None,
    limits: dict[str, Any] | None = None,
    **options: Any,
) -> record.Outcome:
    """Request ``custom`` of a node whose agent allows it."""
    ours = by or scenes.reconciler(rig, limits=ON if limits is None else limits)
    return scenes.run(rig, "custom", by=ours, custom=wanted or wish(), **options)


def published(rig: fakes.NodeRig) -> status.PublishedStatus:
    return status.read(rig.annotations[cluster.STATUS_ANNOTATION])


def test_the_layout_of_the_annotation_is_applied_to_the_gpus_that_it_names() -> None:
    rig = scenes.busy_node()
    second = rig.gpus[1]

    outcome = run(rig)

    assert outcome.reason is Reason.APPLIED
    assert rig.gpus[1] == second
    assert rig.labels[cluster.APPLIED_LABEL] == "custom"
    layout, _ = wish().layout()
    assert published(rig).layout == ("custom", layout.content_hash)
    assert published(rig).annotation_hash == wish().annotation_hash
    assert published(rig).origin == "annotation mig-manager.io/layout of node node-a:3"
    assert f"Layout custom ({layout.content_hash}) is active." in outcome.message
    scenes.assert_nothing_taken(rig)


@pytest.mark.parametrize(
    ("text", "reason", "message"),
    [
        (None, Reason.NO_CUSTOM_LAYOUT, "node node-a has no annotation mig-manager.io/layout"),
        ("version: v1", Reason.INVALID_CONFIG, "of node node-a has no layout"),
        ("version: [", Reason.INVALID_CONFIG, "of node node-a:2:1: not readable as YAML"),
        (
            CHANGED + "  second:\n  - {devices: all, mig-enabled: false}\n",
            Reason.INVALID_CONFIG,
            "of node node-a:5:3: layout 'second' is one too many",
        ),
        (
            document("  - {devices: [7], mig-enabled: true, mig-devices: {}}\n"),
            Reason.NO_GPU_MATCHES,
            "of node node-a:4:5: layout 'custom' names GPU 7",
        ),
        (
            document("  - {devices: [0], mig-enabled: true, mig-devices: {9g.99gb: 1}}\n"),
            Reason.UNKNOWN_PROFILE,
            "of node node-a:4:",
        ),
        (
            document("  - {devices: [0], mig-enabled: true, mig-devices: {3g.20gb: 3}}\n"),
            Reason.DOES_NOT_FIT,
            "of node node-a:4:",
        ),
        ("#" * (custom.MOST_BYTES + 1), Reason.INVALID_CONFIG, "more than 32768"),
    ],
)
def test_an_unusable_annotation_changes_nothing_and_says_where_and_why(
    text: str | None, reason: Reason, message: str
) -> None:
    rig = scenes.busy_node()
    before = rig.gpus

    outcome = run(rig, wish(text))

    assert outcome.reason is reason
    assert not outcome.should_retry
    assert message in outcome.message
    assert outcome.message.endswith(reason.remedy)
    assert rig.gpus == before
    assert {"affected", "spared"} <= rig.pod_names
    assert published(rig).annotation_hash == wish(text).annotation_hash
    scenes.assert_nothing_taken(rig)


OWN = scenes.CONFIG + "  custom:\n  - {devices: all, mig-enabled: false}\n"


def test_while_the_setting_is_off_an_owners_layout_of_that_name_is_served() -> None:
    rig = scenes.busy_node()

    outcome = scenes.run(rig, "custom", OWN)

    assert outcome.reason is Reason.APPLIED
    assert outcome.message.startswith("Layout custom is active.")
    assert published(rig).annotation_hash == ""
    assert all(gpu.current_mode is model.MigMode.DISABLED for gpu in rig.gpus)


def test_while_the_setting_is_off_and_the_file_has_none_the_request_says_so() -> None:
    rig = scenes.busy_node()

    outcome = scenes.run(rig, "custom")

    assert outcome.reason is Reason.CUSTOM_LAYOUTS_OFF
    assert "custom layouts are switched off" in outcome.message
    assert "--custom-layouts" in outcome.message
    assert not outcome.should_retry


def test_while_the_setting_is_on_the_annotation_precedes_an_owners_layout_of_that_name() -> None:
    rig = scenes.busy_node()
    ours = scenes.reconciler(rig, OWN, limits=ON)

    assert run(rig, by=ours).reason is Reason.APPLIED
    listed = rig.annotations[cluster.LAYOUTS_ANNOTATION]
    assert "custom" not in {each.name for each in served.from_json(listed)}
    assert run(rig, wish(None), by=ours).reason is Reason.NO_CUSTOM_LAYOUT


@pytest.mark.parametrize("is_on", [True, False])
def test_the_list_of_layouts_says_whether_custom_ones_are_taken(*, is_on: bool) -> None:
    rig = scenes.node()
    by = scenes.reconciler(rig, limits={"has_custom_layouts": is_on})

    scenes.run(rig, "all-1g.5gb", by=by)

    assert served.takes_custom(rig.annotations[cluster.LAYOUTS_ANNOTATION]) is is_on


def test_a_file_that_is_invalid_does_not_keep_a_custom_layout_from_the_node() -> None:
    rig = scenes.busy_node()
    assert run(rig, by=scenes.reconciler(rig, "nonsense", limits=ON)).reason is Reason.APPLIED


# -- identity ------------------------------------------------------------------------------------


def repartition(rig: fakes.NodeRig) -> None:
    """Let another program change GPU 0, where a pod then uses what the layout would destroy."""
    scenes.run(rig, "all-1g.5gb")
    rig.pods = {uid: pod for uid, pod in rig.pods.items() if "plugin" in pod.name}
    rig.assigned.clear()
    rig.add_pod("training", devices=frozenset(rig.gpus[0].mig_uuids))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (CHANGED, Reason.DRIFTED),
        (CHANGED.replace("mine", "other") + "# another text\n", Reason.DRIFTED),
        (BALANCED, Reason.APPLIED),
    ],
)
def test_after_a_restart_only_another_content_is_a_request_to_evict_pods(
    text: str, reason: Reason
) -> None:
    rig = scenes.busy_node()
    assert run(rig).reason is Reason.APPLIED
    text_of_status = rig.annotations[cluster.STATUS_ANNOTATION]
    repartition(rig)
    rig.annotations[cluster.STATUS_ANNOTATION] = text_of_status

    ours = scenes.reconciler(rig, limits=ON)
    ours.recover("custom", wish(text))

    assert run(rig, wish(text), by=ours).reason is reason
    assert ("training" in rig.pod_names) is (reason is Reason.DRIFTED)


def test_a_drift_check_compares_the_gpus_with_the_layout_of_the_annotation() -> None:
    rig = scenes.node(layout="all-balanced")
    ours = scenes.reconciler(rig, limits=ON)
    ended = run(rig, by=ours)
    assert ours.check_drift("custom", ended, wish()) is drift.Action.REST
    assert rig.labels[cluster.APPLIED_LABEL] == "custom"

    scenes.run(rig, "all-1g.5gb")
    ours.check_drift("custom", ended, wish())

    assert published(rig).reason == "Drifted"
    assert published(rig).annotation_hash == wish().annotation_hash
    assert cluster.APPLIED_LABEL not in rig.labels


@pytest.mark.parametrize("is_same", [True, False])
def test_a_killed_run_is_resumed_for_the_same_annotation_and_undone_for_another(
    *, is_same: bool
) -> None:
    undisturbed = scenes.busy_node()
    run(undisturbed)
    changed_back = 0
    for index in range(len(undisturbed.log)):
        rig = scenes.busy_node()
        before = [gpu.snapshot for gpu in rig.gpus]
        rig.failing = {index: scenes.Killed()}
        with pytest.raises(scenes.Killed):
            run(rig)
        rig.failing = {}
        was_closed = rig.has_hold_taint
        text = rig.annotations.get(cluster.JOURNAL_ANNOTATION)
        was_changing = bool(text and status.Journal.from_json(text).snapshot)
        wanted = wish() if is_same else wish(BALANCED)

        successor = scenes.reconciler(rig, limits=ON)
        successor.recover("custom", wanted)

        assert rig.has_hold_taint is (was_closed and is_same), index
        if was_changing and not is_same:
            changed_back += 1
            assert planner.restore(rig.gpus, before).is_empty, index
        outcome = run(rig, wanted, by=successor)
        assert outcome.state is model.State.SUCCESS, (index, outcome.message)
        assert rig.labels[cluster.APPLIED_LABEL] == "custom"
        assert published(rig).annotation_hash == wanted.annotation_hash
        scenes.assert_nothing_taken(rig)
    assert is_same or changed_back


def test_a_killed_run_is_undone_although_the_annotation_is_gone() -> None:
    rig = scenes.busy_node()
    before = [gpu.snapshot for gpu in rig.gpus]
    rig.step_error = lambda _step: scenes.Killed()  # type: ignore[return-value]
    with pytest.raises(scenes.Killed):
        run(rig)
    rig.step_error = lambda _step: None
    assert rig.has_hold_taint

    successor = scenes.reconciler(rig, limits=ON)
    successor.recover("custom", wish(None))

    assert run(rig, wish(None), by=successor).reason is Reason.NO_CUSTOM_LAYOUT
    assert planner.restore(rig.gpus, before).is_empty
    scenes.assert_nothing_taken(rig)


def test_a_journal_of_a_version_without_the_hash_is_of_a_layout_from_a_file() -> None:
    journal = status.Journal(config="custom", hold_taint=True)
    data = json.loads(journal.to_json())
    del data["annotationHash"]
    assert status.Journal.from_json(json.dumps(data)) == journal
    with_hash = dataclasses.replace(journal, annotation_hash="0123456789ab")
    assert status.Journal.from_json(with_hash.to_json()) == with_hash


# -- on demand -----------------------------------------------------------------------------------

ON_DEMAND = wish(is_on_demand=True)


def idle_node() -> fakes.NodeRig:
    """No pod uses the device that goes."""
    rig = scenes.node(layout="all-balanced")
    rig.add_pod("spared", devices=frozenset({scenes.device(rig, 1, "3g.20gb")}))
    return rig


def assert_refused(rig: fakes.NodeRig, *texts: str, **options: Any) -> None:
    """Request the layout on demand; check that nothing has happened beside the state."""
    before, pods = rig.gpus, set(rig.pods)
    rig.on_call = lambda: taken.append(rig.has_hold_taint)
    taken: list[bool] = []
    started_s = rig.clock.now_s
    outcome = run(rig, ON_DEMAND, **options)
    assert outcome.reason is Reason.IN_USE, outcome.message
    assert not outcome.should_retry
    for text in (*texts, "the agent does not retry"):
        assert text in outcome.message
    assert rig.gpus == before
    assert not rig.executed
    assert set(rig.pods) == pods
    assert rig.labels[cluster.STATE_LABEL] == "failed"
    assert published(rig).reason == "InUse"
    assert published(rig).retry_at is None
    assert rig.labels.get(cluster.APPLIED_LABEL) != "custom"
    assert rig.clock.now_s == started_s
    assert not any(taken)
    scenes.assert_nothing_taken(rig)


def test_on_demand_idle_instances_are_exchanged() -> None:
    rig = idle_node()
    outcome = run(rig, ON_DEMAND)
    assert outcome.reason is Reason.APPLIED
    assert "spared" in rig.pod_names
    scenes.assert_nothing_taken(rig)


@pytest.mark.parametrize("drain", list(policies.Drain))
@pytest.mark.parametrize("is_forced", [True, False])
def test_on_demand_a_pod_in_the_way_ends_the_run_at_once_whatever_the_policy(
    drain: policies.Drain, *, is_forced: bool
) -> None:
    rig = scenes.busy_node()
    rig.policy = policies.Policy(drain=drain, is_forced=is_forced)

    assert_refused(rig, "default/affected")

    assert "spared" not in rig.messages[-1]


def test_on_demand_a_pod_that_is_bound_and_has_no_device_yet_may_get_one() -> None:
    rig = idle_node()
    rig.add_pod("starting", gpu_resources={"nvidia.com/mig-2g.10gb": 1}, phase="Pending")
    assert_refused(rig, "default/starting")


def test_on_demand_a_process_in_the_way_ends_the_run_before_the_plugin_is_paused() -> None:
    rig = idle_node()
    rig.gpu_users = "python (pid 7)"
    assert_refused(rig, "python (pid 7)")
    assert "gpus.execute" not in rig.log


def test_on_demand_a_pod_that_arrives_late_keeps_its_device() -> None:
    """Until the plugin is paused: then no pod gets a device."""
    undisturbed = idle_node()
    run(undisturbed, ON_DEMAND)
    changed = undisturbed.log.index("gpus.execute")
    last = max(i for i in range(changed) if undisturbed.log[i] == "workloads.list")
    first = undisturbed.log.index("gpus.rehearse")
    assert last - first > 3
    for index in range(first, last + 1):
        rig = idle_node()
        before = rig.gpus
        device = scenes.device(rig, 0, "2g.10gb")

        def arrive(rig: fakes.NodeRig = rig, device: str = device, index: int = index) -> None:
            if len(rig.log) == index + 1:
                rig.on_call = lambda: None
                rig.add_pod("late", devices=frozenset({device}))

        rig.on_call = arrive
        outcome = run(rig, ON_DEMAND)

        assert outcome.reason is Reason.IN_USE, (index, outcome.message)
        assert not outcome.should_retry
        assert {"late", "spared"} <= rig.pod_names
        assert rig.gpus == before
        scenes.assert_nothing_taken(rig)


def test_on_demand_a_process_that_starts_during_the_pause_ends_the_run_without_a_wait() -> None:
    rig = idle_node()

    def start() -> None:
        if rig.log[-1] == "gpus.execute":
            rig.gpu_users = "python (pid 7)"

    rig.on_call = start
    outcome = run(rig, ON_DEMAND)
    assert outcome.reason is Reason.IN_USE
    assert not outcome.should_retry
    assert rig.log.count("gpus.execute") == 1
    scenes.assert_nothing_taken(rig)


def test_on_demand_another_layout_drains_the_node_as_everywhere() -> None:
    rig = scenes.busy_node()
    rig.labels[cluster.PARTITIONING_LABEL] = cluster.ON_DEMAND
    assert scenes.run(rig, "one-slice-changed").reason is Reason.APPLIED
    assert "affected" not in rig.pod_names


def test_on_demand_a_machine_is_not_rebooted() -> None:
    rig = scenes.node()
    rig.mode_waits = rig.may_reboot = True
    outcome = run(rig, ON_DEMAND)
    assert outcome.reason is Reason.REBOOT_REQUIRED
    assert "does not reboot" in outcome.message
    assert not rig.reboots


def test_on_demand_other_failures_are_retried() -> None:
    rig = idle_node()
    rig.plugin_is_broken = True
    assert run(rig, ON_DEMAND).should_retry


@pytest.mark.parametrize("make", [idle_node, scenes.busy_node])
@pytest.mark.parametrize("is_on_demand", [True, False])
def test_after_any_call_fails_once_with_a_custom_layout_the_node_is_restored(
    make: Any, *, is_on_demand: bool
) -> None:
    wanted = wish(is_on_demand=is_on_demand)
    undisturbed = make()
    end = run(undisturbed, wanted)
    for index, call in enumerate(undisturbed.log):
        rig = make()
        ours = scenes.reconciler(rig, limits=ON)
        rig.failing = {index: scenes.broken(call)}
        try:
            run(rig, wanted, by=ours)
        except errors.ClusterError:
            rig.failing = {}
            ours.recover("custom", wanted)
        else:
            assert rig.labels[cluster.STATE_LABEL] in ("success", "failed"), index
            scenes.assert_nothing_taken(rig)
        rig.failing = {}

        again = run(rig, wanted, by=ours)

        assert again.state is end.state, (index, again.message)
        if is_on_demand:
            assert set(make().pod_names) <= rig.pod_names, index
        scenes.assert_nothing_taken(rig)


@pytest.mark.parametrize("make", [idle_node, scenes.busy_node])
@pytest.mark.parametrize("is_on_demand", [True, False])
@pytest.mark.parametrize("replaced", [True, False])
def test_the_node_is_restored_whenever_a_custom_request_is_superseded(
    make: Any, *, is_on_demand: bool, replaced: bool
) -> None:
    wanted = wish(is_on_demand=is_on_demand)
    patient_rig = make()
    patient = fakes.FakeRequest(patient_rig.clock, replaced=replaced)
    run(patient_rig, wanted, request=patient)
    for ends_at in range(1, patient.asked + 1):
        rig = make()
        before = rig.gpus
        request = fakes.FakeRequest(rig.clock, ends_at=ends_at, replaced=replaced)
        with pytest.raises(errors.Superseded):
            run(rig, wanted, request=request)
        if "gpus.execute" not in rig.log:
            assert rig.gpus == before
        scenes.assert_nothing_taken(rig, is_stopped=not replaced)
