"""The layout ``custom``, which is in the node's annotation."""

import dataclasses
import json

import pytest

from mig_manager import errors
from mig_manager.agent.drift import actions
from mig_manager.core import model
from mig_manager.core.layout import layout_list
from mig_manager.core.objects import well_known
from mig_manager.core.records import journals, node_entries, run_status
from mig_manager.reasons import Reason
from tests.pipeline.custom_requests import (
    BALANCED,
    CHANGED,
    ON,
    custom_layout,
    document,
    published_status,
    request_custom,
)
from tests.rigs.node import agents, call_errors, ends, node_rig, nodes, strikes


def test_the_layout_of_the_annotation_is_applied_to_the_gpus_that_it_names() -> None:
    rig = nodes.busy_node()
    second = rig.gpus[1]

    outcome = request_custom(rig)

    assert outcome.reason is Reason.APPLIED
    assert rig.gpus[1] == second
    assert rig.node_object.labels[well_known.APPLIED_LABEL] == "custom"
    layout, _ = custom_layout().layout()
    assert published_status(rig).layout == "custom"
    assert published_status(rig).content_hash == layout.content_hash
    assert published_status(rig).annotation_hash == custom_layout().annotation_hash
    assert published_status(rig).origin == "annotation mig-manager.io/layout of node node-a:3"
    assert f"Layout custom ({layout.content_hash}) is active." in outcome.message
    ends.assert_restored(rig)


@pytest.mark.parametrize(
    ("text", "reason", "message"),
    [
        (None, Reason.NO_CUSTOM_LAYOUT, "node node-a has no annotation mig-manager.io/layout"),
        ("version: [", Reason.INVALID_CONFIG, "of node node-a:2:1: not readable as YAML"),
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
    ],
    ids=["missing", "not YAML", "missing GPU", "unknown profile", "too large"],
)
def test_an_unusable_annotation_changes_nothing_and_says_where_and_why(
    text: str | None, reason: Reason, message: str
) -> None:
    rig = nodes.busy_node()
    before = rig.gpus

    outcome = request_custom(rig, custom_layout(text))

    assert outcome.reason is reason
    assert not outcome.should_retry
    assert message in outcome.message
    assert outcome.message.endswith(reason.remedy)
    assert rig.gpus == before
    assert {"affected", "spared"} <= rig.pods.names
    assert published_status(rig).annotation_hash == custom_layout(text).annotation_hash
    ends.assert_restored(rig)


FILE_WITH_CUSTOM = agents.LAYOUTS_TEXT + "  custom:\n  - {devices: all, mig-enabled: false}\n"


def test_layout_is_not_promised_to_a_lost_gpu_that_it_does_not_name() -> None:
    rig = nodes.node(layout="all-balanced")
    rig.driver.lost = {rig.gpus[1].uuid}
    outcome = request_custom(rig, custom_layout(BALANCED))
    assert outcome.reason is Reason.ALREADY_APPLIED
    assert outcome.message.endswith("once it is back, it gets what the layout has for it.")


def test_a_success_lists_the_gpus_that_the_node_lacks() -> None:
    absent = "GPU-99999999-0000-0000-0000-000000000000"
    rule = f'  - {{devices: ["{absent}"], mig-enabled: true, mig-devices: {{7g.40gb: 1}}}}\n'
    rig = nodes.busy_node()

    for reason in (Reason.APPLIED, Reason.ALREADY_APPLIED):
        outcome = request_custom(rig, custom_layout(CHANGED + rule))
        assert outcome.reason is reason
        assert outcome.message.endswith(f"It names GPUs that this node lacks: {absent}.")


def test_while_the_setting_is_off_an_owners_layout_of_that_name_is_served() -> None:
    rig = nodes.busy_node()

    outcome = ends.run_to(rig, "custom", Reason.APPLIED, layouts=FILE_WITH_CUSTOM)

    assert outcome.message.startswith("Layout custom is active.")
    assert published_status(rig).annotation_hash == ""
    assert all(gpu.current_mode is model.MigMode.DISABLED for gpu in rig.gpus)


def test_custom_request_without_setting_or_layout_fails_and_says_why() -> None:

    outcome = ends.run_to(
        nodes.busy_node(),
        "custom",
        Reason.CUSTOM_LAYOUTS_OFF,
        "custom layouts are switched off",
        "--custom-layouts",
    )

    assert not outcome.should_retry


def test_annotation_precedes_an_owners_layout_of_that_name() -> None:
    rig = nodes.busy_node()
    agent = agents.new_agent(rig, layouts=FILE_WITH_CUSTOM, settings=ON)

    assert request_custom(rig, by=agent).reason is Reason.APPLIED
    listed = rig.node_object.annotations[well_known.LAYOUTS_ANNOTATION]
    assert "custom" not in {each.name for each in layout_list.from_json(listed).layouts}
    assert request_custom(rig, custom_layout(None), by=agent).reason is Reason.NO_CUSTOM_LAYOUT


@pytest.mark.parametrize("is_on", [True, False])
def test_the_list_of_layouts_says_whether_custom_ones_are_taken(*, is_on: bool) -> None:
    rig = nodes.node()
    by = agents.new_agent(rig, settings={"has_custom_layouts": is_on})

    agents.run(rig, "all-1g.5gb", by=by)

    listed = layout_list.from_json(rig.node_object.annotations[well_known.LAYOUTS_ANNOTATION])
    assert listed.takes_custom is is_on


def test_invalid_file_does_not_block_a_custom_layout() -> None:
    rig = nodes.busy_node()
    assert (
        request_custom(rig, by=agents.new_agent(rig, layouts="nonsense", settings=ON)).reason
        is Reason.APPLIED
    )


# -- identity ---------------------------------------------------------------------------------


def repartition(rig: node_rig.NodeRig) -> None:
    """Let another program change GPU 0, where a pod then uses what the layout would destroy."""
    agents.run(rig, "all-1g.5gb")
    rig.pods.remove_if(lambda pod: "plugin" not in pod.name)
    rig.kubelet.devices_by_pod.clear()
    rig.pods.add("training", devices=frozenset(rig.gpus[0].mig_uuids))


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
    rig = nodes.busy_node()
    assert request_custom(rig).reason is Reason.APPLIED
    written = dict(rig.node_object.annotations)
    repartition(rig)
    rig.node_object.annotations = written

    agent = agents.start(rig, "custom", custom=custom_layout(text), settings=ON)

    assert request_custom(rig, custom_layout(text), by=agent).reason is reason
    assert ("training" in rig.pods.names) is (reason is Reason.DRIFTED)


def test_a_drift_check_compares_the_gpus_with_the_layout_of_the_annotation() -> None:
    rig = nodes.node(layout="all-balanced")
    agent = agents.new_agent(rig, settings=ON)
    outcome = request_custom(rig, by=agent)
    assert agent.check_drift("custom", outcome, custom_layout()) is actions.Action.REST
    assert rig.node_object.labels[well_known.APPLIED_LABEL] == "custom"

    agents.run(rig, "all-1g.5gb")
    agent.check_drift("custom", outcome, custom_layout())

    assert published_status(rig).reason == "Drifted"
    assert published_status(rig).annotation_hash == custom_layout().annotation_hash
    assert well_known.APPLIED_LABEL not in rig.node_object.labels


def test_a_run_that_a_stop_ended_in_an_outage_needs_no_further_change() -> None:
    undisturbed = nodes.busy_node()
    request_custom(undisturbed)
    executed = undisturbed.log.index("gpus.execute")
    rig = nodes.busy_node()
    agent = agents.new_agent(rig, settings=ON)
    rig.failures.add(undisturbed.log.index("node.patch", executed), call_errors.broken("node"))
    with pytest.raises(errors.ClusterError):
        request_custom(rig, by=agent)
    agent.stop()
    changed = len(rig.driver.executed_steps)

    successor = agents.start(rig, "custom", custom=custom_layout(), settings=ON)

    assert request_custom(rig, by=successor).state is run_status.State.SUCCESS
    assert len(rig.driver.executed_steps) == changed


@pytest.mark.parametrize("is_same", [pytest.param(True, marks=pytest.mark.slow), False])
def test_killed_run_is_resumed_only_for_the_same_annotation(*, is_same: bool) -> None:
    changed_back = 0
    for index, rig, before in strikes.kills(nodes.busy_node, request_custom):
        was_closed = rig.node_object.has_reconfiguring_taint
        text = rig.node_object.annotations.get(well_known.JOURNAL_ANNOTATION)
        was_changing = bool(text and journals.Journal.from_json(text).gpus.snapshots)
        requested = custom_layout() if is_same else custom_layout(BALANCED)

        successor = agents.start(rig, "custom", custom=requested, settings=ON)

        assert rig.node_object.has_reconfiguring_taint is (was_closed and is_same), index
        if was_changing and not is_same:
            changed_back += 1
            assert ends.is_as_before(rig, before), index
        outcome = request_custom(rig, requested, by=successor)
        assert outcome.state is run_status.State.SUCCESS, (index, outcome.message)
        assert rig.node_object.labels[well_known.APPLIED_LABEL] == "custom"
        assert published_status(rig).annotation_hash == requested.annotation_hash
        ends.assert_restored(rig)
    assert is_same or changed_back


def test_a_killed_run_is_undone_although_the_annotation_is_gone() -> None:
    undisturbed = nodes.busy_node()
    request_custom(undisturbed)
    executing = undisturbed.log.index("gpus.execute")
    rig, before = strikes.kill_at_call(nodes.busy_node, executing, request_custom)
    assert rig.node_object.has_reconfiguring_taint

    successor = agents.start(rig, "custom", custom=custom_layout(None), settings=ON)

    assert request_custom(rig, custom_layout(None), by=successor).reason is Reason.NO_CUSTOM_LAYOUT
    assert ends.is_as_before(rig, before)
    ends.assert_restored(rig)


def test_journal_without_the_hash_is_of_a_layout_from_a_file() -> None:
    journal = journals.Journal(
        layout="custom", node=node_entries.NodeEntries(has_reconfiguring_taint=True)
    )
    data = json.loads(journal.to_json())
    del data["annotationHash"]
    assert journals.Journal.from_json(json.dumps(data)) == journal
    with_hash = dataclasses.replace(journal, annotation_hash="0123456789ab")
    assert journals.Journal.from_json(with_hash.to_json()) == with_hash
