"""What journals and nodes without a request say about an interrupted run."""

import dataclasses

import pytest

from mig_manager import errors, reasons
from mig_manager.core.objects import well_known
from mig_manager.core.records import journals, node_entries, run_status
from tests.rigs.node import agents, call_errors, ends, gpu_values, node_rig, nodes


@pytest.mark.parametrize(("layout", "passes"), [("all-1g.5gb", True), ("too-much", False)])
def test_only_a_failure_that_passes_has_a_next_try_in_the_status(
    layout: str, *, passes: bool
) -> None:
    rig = nodes.node()
    rig.plugin.is_broken = True
    rig.pods.clear()

    agents.run(rig, layout, attempt=3, retry_after_s=40)

    assert rig.node_object.status["attempt"] == 3
    assert rig.node_object.status.get("retryAt") == (
        rig.clock.now_iso(after_s=40) if passes else None
    )


@pytest.mark.parametrize("text", ['{"version": 99}', "", "{" * 100_000], ids=range(3))
def test_an_invalid_journal_is_set_aside_and_marked_labels_are_restored(text: str) -> None:
    rig = nodes.node()
    rig.node_object.annotations[well_known.JOURNAL_ANNOTATION] = text
    rig.node_object.labels[well_known.PLUGIN_DEPLOY_LABEL] = well_known.PAUSED_VALUE
    rig.node_object.is_unschedulable = rig.node_object.has_reconfiguring_taint = True

    agents.start(rig, "all-1g.5gb")

    assert rig.node_object.labels[well_known.PLUGIN_DEPLOY_LABEL] == "true"
    assert not rig.node_object.has_reconfiguring_taint
    assert rig.node_object.is_unschedulable
    assert well_known.JOURNAL_ANNOTATION not in rig.node_object.annotations
    kept = rig.node_object.annotations[well_known.UNREADABLE_JOURNAL_ANNOTATION]
    assert text.startswith(kept)
    assert len(kept) == min(len(text), 16 * 1024)
    assert "JournalUnreadable" in rig.node_object.events


def test_the_snapshot_of_a_journal_outlives_its_text() -> None:
    rig = nodes.busy_node()
    without_gpus = journals.Journal(
        layout="a",
        boot_id="b",
        applied_before="c",
        node=node_entries.NodeEntries(advertisers=frozenset({well_known.PLUGIN_DEPLOY_LABEL})),
    )
    snapshot = tuple(gpu.snapshot for gpu in rig.gpus)
    journal = dataclasses.replace(without_gpus, gpus=journals.GpuEntries(snapshots=snapshot))

    again = journals.Journal.from_json(journal.to_json())

    assert dataclasses.replace(again, gpus=journals.GpuEntries()) == without_gpus
    assert gpu_values.geometry(again.gpus.snapshots) == gpu_values.geometry(rig.gpus)
    assert len(journal.to_json()) < 1024 * len(rig.gpus)


def test_labels_that_another_manager_paused_are_restored() -> None:
    rig = nodes.node(layout="all-balanced")
    rig.node_object.labels[well_known.PLUGIN_DEPLOY_LABEL] = well_known.PAUSED_VALUE
    rig.node_object.labels["nvidia.com/gpu.deploy.dcgm"] = "paused-for-driver-upgrade"
    rig.pods.clear()

    assert agents.resume(rig, "all-balanced").state is run_status.State.SUCCESS
    ends.assert_restored(rig)
    assert rig.node_object.labels["nvidia.com/gpu.deploy.dcgm"] == "paused-for-driver-upgrade"


def paused_beside_nvidias_manager() -> node_rig.NodeRig:
    rig = nodes.node(layout="all-balanced")
    rig.node_object.labels[well_known.PLUGIN_DEPLOY_LABEL] = well_known.PAUSED_VALUE
    rig.pods.clear()
    rig.pods.add("nvidias", owner_kind="DaemonSet", container_names=("nvidia-mig-manager",))
    return rig


@pytest.mark.parametrize("layout", [None, "all-balanced", "all-1g.5gb"])
def test_pauses_are_left_to_a_running_foreign_manager(layout: str | None) -> None:
    rig = paused_beside_nvidias_manager()
    agent = agents.start(rig, layout)
    if layout is None:
        assert agent.restore_without_request()
        agent.check_without_request()
    else:
        outcome = agents.run(rig, layout, by=agent)
        assert outcome.state is run_status.State.FAILED
        agent.check_drift(layout, outcome)

    assert rig.node_object.is_plugin_paused


def test_pauses_of_an_allowed_manager_stay() -> None:
    rig = paused_beside_nvidias_manager()
    rig.node_object.labels[well_known.PLUGIN_DEPLOY_LABEL] = "true"
    rig.advance()
    rig.node_object.labels["nvidia.com/gpu.deploy.dcgm"] = well_known.PAUSED_VALUE
    agent = agents.start(rig, "all-balanced", settings={"allows_foreign_managers": True})

    outcome = agents.run(rig, "all-balanced", by=agent)
    agent.check_drift("all-balanced", outcome)

    assert outcome.state is run_status.State.SUCCESS
    assert rig.node_object.labels["nvidia.com/gpu.deploy.dcgm"] == well_known.PAUSED_VALUE


def test_pauses_are_restored_once_the_foreign_manager_is_gone() -> None:
    rig = paused_beside_nvidias_manager()
    agent = agents.start(rig, "all-1g.5gb")
    outcome = agents.run(rig, "all-1g.5gb", by=agent)
    assert outcome.reason is reasons.Reason.FOREIGN_MANAGER
    rig.pods.remove(rig.pods.uid_of("nvidias"))

    ends.run_to(rig, "all-1g.5gb", reasons.Reason.APPLIED, by=agent)


def test_an_own_pause_is_restored_beside_a_foreign_manager() -> None:
    rig = paused_beside_nvidias_manager()
    paused = {well_known.PLUGIN_DEPLOY_LABEL: "true"}
    journal = journals.Journal(
        layout="all-1g.5gb", node=node_entries.NodeEntries(paused_labels=paused)
    )
    rig.node_object.annotations[well_known.JOURNAL_ANNOTATION] = journal.to_json()

    agents.start(rig, None)

    assert rig.node_object.labels[well_known.PLUGIN_DEPLOY_LABEL] == "true"


def test_writes_of_another_program_since_the_crash_are_kept() -> None:
    rig = nodes.node()
    dcgm = "nvidia.com/gpu.deploy.dcgm"
    paused = {well_known.PLUGIN_DEPLOY_LABEL: "true", dcgm: "true"}
    journal = journals.Journal(
        layout="all-1g.5gb", node=node_entries.NodeEntries(paused_labels=paused)
    )
    rig.node_object.annotations[well_known.JOURNAL_ANNOTATION] = journal.to_json()
    rig.node_object.labels |= {
        well_known.PLUGIN_DEPLOY_LABEL: well_known.PAUSED_VALUE,
        dcgm: "false",
    }

    agents.start(rig, None)

    assert rig.node_object.labels[well_known.PLUGIN_DEPLOY_LABEL] == "true"
    assert rig.node_object.labels[dcgm] == "false"
    ends.assert_restored(rig)


def test_node_without_a_request_does_not_stay_pending() -> None:
    rig = nodes.node()
    rig.node_object.labels[well_known.STATE_LABEL] = "pending"

    agents.new_agent(rig).restore_without_request()

    assert rig.node_object.labels[well_known.STATE_LABEL] == "failed"
    assert rig.node_object.status["reason"] == "Interrupted"


@pytest.mark.parametrize(
    "state", [{}, *({well_known.STATE_LABEL: s} for s in ("success", "failed"))]
)
def test_node_without_a_request_keeps_its_state(state: dict[str, str]) -> None:
    rig = nodes.node()
    rig.node_object.labels |= state
    labels = dict(rig.node_object.labels)

    agents.new_agent(rig).restore_without_request()

    assert rig.node_object.labels == labels
    assert rig.node_object.states == rig.node_object.status_messages == []


def test_node_without_a_request_publishes_its_gpus() -> None:
    rig = nodes.node()
    rig.failures.add("gpus.observe", call_errors.NO_DRIVER)
    agent = agents.new_agent(rig)

    assert agent.restore_without_request()
    assert rig.node_object.annotations == {}
    rig.failures.clear()
    assert not agent.restore_without_request()
    assert rig.node_object.published_gpus == rig.gpus
    rig.log.clear()
    assert not agent.restore_without_request()
    assert "node.patch" not in rig.log


def test_an_unfinished_restore_is_retried_after_the_label_is_removed() -> None:
    rig = nodes.hosted_node()
    rig.failures.add("services.start", call_errors.broken("services"))
    agent = agents.new_agent(rig)
    assert agents.run(rig, "one-slice-changed", by=agent).should_retry

    assert agent.restore_without_request()
    assert not rig.host.services["dcgm.service"]

    rig.failures.clear()
    assert not agent.restore_without_request()

    assert rig.host.services["dcgm.service"]
    assert well_known.JOURNAL_ANNOTATION not in rig.node_object.annotations


def test_a_retry_that_can_observe_no_gpu_says_which_attempt_it_is() -> None:
    messages = []
    for attempt in (1, 7):
        rig = nodes.node()
        rig.failures.add(
            "gpus.observe",
            errors.HardwareError(
                "GPU 0: nvmlDeviceGetHandleByIndex answered 'Unknown Error'",
                reason=reasons.Reason.NVML_ERROR,
            ),
        )
        outcome = agents.run(rig, "all-balanced", attempt=attempt)
        assert outcome.should_retry
        messages.append(outcome.message)

    first, seventh = messages
    assert "attempt" not in first
    assert "'Unknown Error'; no GPU can be observed at attempt 7 either" in seventh
