"""What a rollback that failed leaves, and how it is completed later."""

import json

import pytest

from mig_manager import errors
from mig_manager.core import model, steps
from mig_manager.core.node.daemons import clients
from mig_manager.core.objects import well_known
from mig_manager.core.records import journals, node_entries
from mig_manager.reasons import Reason
from tests.pipeline import claimed_devices
from tests.rigs.node import agents, call_errors, ends, moments, node_rig, nodes
from tests.rigs.node.nodes import EXTRA_CLIENTS


def after_failed_rollback() -> tuple[node_rig.NodeRig, tuple[model.Gpu, ...]]:
    """A change has failed, and so has its rollback."""
    rig = nodes.busy_node()
    before = rig.gpus
    with rig.failures.adding(steps.CreateGpuInstance, call_errors.REFUSED):
        assert agents.run(rig, "one-slice-changed").should_retry
    assert well_known.JOURNAL_ANNOTATION in rig.node_object.annotations
    return rig, before


def test_failed_rollback_names_missing_instances_and_is_retried() -> None:
    rig, _ = after_failed_rollback()

    message = rig.node_object.status_messages[-1]
    assert "still to do: GPU 0" in message
    assert "create GPU instance 2g.10gb at" in message
    assert well_known.APPLIED_LABEL not in rig.node_object.labels
    text = rig.node_object.annotations.pop(well_known.JOURNAL_ANNOTATION)
    journal = journals.Journal.from_json(text)
    assert journal == journal.remaining(node_entries.RunEnd.RESTORED)
    ends.assert_restored(rig)

    rig.node_object.annotations[well_known.JOURNAL_ANNOTATION] = text
    successor = agents.start(rig, "one-slice-changed")
    ends.run_to(rig, "one-slice-changed", Reason.APPLIED, by=successor, attempt=2)
    ends.assert_applied_label_is_true(rig)


def test_gpus_lost_in_a_change_are_unreachable_in_its_status() -> None:
    rig = nodes.busy_node()
    uuids = {gpu.uuid for gpu in rig.gpus}
    rig.callbacks.add(steps.Step, lambda: rig.driver.lost.update(uuids))
    rig.failures.add(steps.Step, call_errors.broken("gpus"))

    assert agents.run(rig, "one-slice-changed").should_retry

    assert [gpu["index"] for gpu in rig.node_object.status["unreachableGpus"]] == [0, 1]
    assert "gpus" not in rig.node_object.status


@pytest.mark.parametrize("requested", ["too-much", "no-such-layout", "no-such-profile", None])
def test_failed_rollback_is_completed_for_an_impossible_request(requested: str | None) -> None:
    rig, before = after_failed_rollback()

    agents.take_over(rig, requested)

    assert ends.is_as_before(rig, before)
    assert rig.node_object.labels[well_known.APPLIED_LABEL] == "all-balanced"
    ends.assert_restored(rig)


@pytest.mark.parametrize("is_broken", [True, False])
@pytest.mark.parametrize("label_managed", [True, False])
def test_a_final_failure_says_if_the_plugin_is_not_back(
    *, label_managed: bool, is_broken: bool
) -> None:
    rig = nodes.node(layout="all-balanced", label_managed=label_managed)
    before = rig.gpus
    rig.set_at(steps.Step, rig.plugin, is_broken=is_broken)
    unsupported = errors.HardwareError("no", reason=Reason.NOT_SUPPORTED)
    rig.failures.add(steps.Step, unsupported, times=1)

    outcome = ends.run_to(rig, "one-slice-changed", Reason.NOT_SUPPORTED)

    assert not outcome.should_retry
    assert ends.is_as_before(rig, before)
    assert ("no new device plugin pod is ready" in outcome.message) is is_broken
    assert rig.node_object.labels.get(well_known.APPLIED_LABEL) == (
        None if is_broken else "all-balanced"
    )


def test_a_final_failure_waits_for_no_plugin_that_its_run_did_not_pause() -> None:
    rig = nodes.node(layout="all-balanced", label_managed=False)
    # The DaemonSet makes no new pod of the deleted plugin, which a later run must verify.
    rig.set_at(steps.Step, rig.plugin, is_label_managed=True)
    agent = agents.new_agent(rig)
    with rig.failures.adding(steps.CreateGpuInstance, call_errors.REFUSED):
        agents.run(rig, "one-slice-changed", by=agent)
    began_s = rig.clock.now_s

    outcome = agents.run(rig, "too-much", by=agent)

    assert outcome.reason is Reason.DOES_NOT_FIT
    assert "plugin" not in outcome.message
    assert rig.clock.now_s == began_s


@pytest.mark.parametrize("boot_id", ["boot-1", "boot-2"])
def test_a_rollback_that_fails_again_is_not_announced_as_restored(boot_id: str) -> None:
    rig, _ = after_failed_rollback()
    rig.host.boot_id = boot_id
    rig.failures.add(steps.CreateGpuInstance, call_errors.REFUSED)

    assert agents.undo(rig)  # and is retried

    assert "Recovered" not in rig.node_object.events


def test_a_failed_rollback_is_remembered_without_a_restart() -> None:
    rig = nodes.busy_node()
    before = rig.gpus
    agent = agents.new_agent(rig)
    with rig.failures.adding(steps.CreateGpuInstance, call_errors.REFUSED):
        agents.run(rig, "one-slice-changed", by=agent)
    rig.failures.add(steps.CreateComputeInstance, call_errors.REFUSED, times=1)

    ends.run_to(rig, "one-slice-changed", Reason.INSUFFICIENT_RESOURCES, by=agent, attempt=2)

    assert well_known.JOURNAL_ANNOTATION not in rig.node_object.annotations
    assert ends.is_as_before(rig, before)
    assert rig.node_object.labels[well_known.APPLIED_LABEL] == "all-balanced"


def test_layout_for_another_gpu_completes_an_older_rollback() -> None:
    rig, before = after_failed_rollback()
    text = f"{agents.LAYOUTS_TEXT}  second-only:\n  - {{devices: [1], mig-enabled: false}}\n"
    agent = agents.start(rig, "one-slice-changed", layouts=text)

    ends.run_to(rig, "second-only", Reason.APPLIED, by=agent)

    assert rig.gpus[1].current_mode is model.MigMode.DISABLED
    assert ends.is_as_before(rig, before[:1])


def test_a_stopped_run_names_what_an_older_change_still_has_to_restore() -> None:
    rig, _ = after_failed_rollback()
    agent = agents.start(rig, "one-slice-changed")
    error = errors.ClusterError("no pods", reason=Reason.API_UNAVAILABLE)

    def stop() -> bool:
        rig.failures.add("workloads.list", error)
        return True

    ends.supersede(rig, "one-slice-changed", by=agent, ends_when=stop)

    assert (
        "the interrupted change could not be rolled back: no pods"
        in rig.node_object.status_messages[-1]
    )


def after_partial_rollback(
    rig: node_rig.NodeRig | None = None, layout: str = "one-slice-changed"
) -> tuple[node_rig.NodeRig, tuple[model.Gpu, ...], str]:
    """Return a node whose rollback has failed, its GPUs before, and a device of the change."""
    rig = rig or nodes.busy_node()
    before, had = rig.gpus, {gi.placement for gi in rig.gpus[0].gpu_instances}
    executed = rig.driver.executed_steps

    def has_created() -> bool:
        return any(isinstance(each, steps.CreateComputeInstance) for each in executed)

    with rig.failures.adding(steps.Step, call_errors.REFUSED, when=has_created):
        assert agents.run(rig, layout).should_retry
    assert well_known.JOURNAL_ANNOTATION in rig.node_object.annotations
    (new_device,) = (
        ci.uuid or ""
        for gi in rig.gpus[0].gpu_instances
        if gi.placement not in had
        for ci in gi.compute_instances
    )
    return rig, before, new_device


def test_a_rollback_that_would_destroy_a_pods_device_does_not_run() -> None:
    rig, _, new_device = after_partial_rollback()
    rig.pods.add("newcomer", devices=frozenset({new_device}))
    gpus = rig.gpus

    outcome = agents.resume(rig, "too-much")

    assert rig.gpus == gpus
    assert "default/newcomer" in outcome.message
    assert outcome.should_retry
    assert "newcomer" in rig.pods.names


@pytest.mark.parametrize("requested", ["too-much", None])
def test_a_rollback_of_a_later_run_keeps_new_pods_away(requested: str | None) -> None:
    rig, before, _ = after_partial_rollback()
    resource = {"nvidia.com/mig-3g.20gb": 1}
    uid = rig.pods.add("bound", phase="Pending", gpu_resources=resource, is_admitted=False)
    tainted = rig.note(lambda: rig.node_object.has_reconfiguring_taint, at="gpus.execute")
    admitted_s = rig.clock.now_s + 4

    def admit() -> None:
        is_due = rig.node_object.has_reconfiguring_taint and rig.clock.now_s > admitted_s
        if is_due and not rig.pods[uid].is_admitted:
            is_refused = rig.node_object.is_plugin_paused
            phase = "Failed" if is_refused else "Running"
            rig.pods.change(uid, is_admitted=True, phase=phase)

    rig.callbacks.add(moments.Call, admit)
    agents.resume(rig, requested) if requested else agents.undo(rig)

    assert tainted == [True]
    assert ends.is_as_before(rig, before)
    assert rig.pods[uid].phase == "Running"
    ends.assert_restored(rig)


def test_a_rollback_keeps_a_device_that_a_pod_gets_while_services_stop() -> None:
    """The device plugin is a service that the agent does not know."""
    rig, _, new_device = after_partial_rollback()
    del rig.node_object.labels[well_known.PLUGIN_DEPLOY_LABEL]
    rig.pods.remove_if(clients.is_device_plugin)
    rig.host.services["dcgm.service"] = True
    rig.callbacks.add(
        "services.stop", lambda: rig.pods.add("newcomer", devices=frozenset({new_device})), times=1
    )
    gpus = rig.gpus

    assert agents.undo(rig)

    assert rig.gpus == gpus
    assert "newcomer" in rig.pods.names
    assert rig.host.services == {"dcgm.service": True}
    assert not rig.node_object.has_reconfiguring_taint


def test_a_rollback_of_a_later_run_pauses_the_owners_extra_clients() -> None:
    rig, before, new_device = after_partial_rollback()
    rig.owner.extra_clients = EXTRA_CLIENTS
    uid = rig.pods.add(
        "watcher",
        devices=frozenset({new_device}),
        labels={"app": "watcher"},
        owner_kind="DaemonSet",
    )

    agents.resume(rig, "too-much")

    assert ends.is_as_before(rig, before)
    assert uid not in rig.pods
    ends.assert_restored(rig)


def test_a_layout_for_another_gpu_evicts_no_pod_for_an_older_rollback() -> None:
    rig, _, new_device = after_partial_rollback()
    gpu = rig.gpus[0]
    rig.hooks.text = nodes.HOOKS
    rig.callbacks.add(
        "hooks.run", lambda: rig.pods.add("newcomer", devices=frozenset({new_device})), times=1
    )
    text = f"{agents.LAYOUTS_TEXT}  second-only:\n  - {{devices: [1], mig-enabled: false}}\n"
    rig.pods.remove(rig.pods.uid_of("spared"))
    agent = agents.start(rig, "one-slice-changed", layouts=text)

    ends.run_to(rig, "second-only", Reason.APPLIED, by=agent)

    assert "newcomer" in rig.pods.names
    assert rig.gpus[0] == gpu
    assert rig.gpus[1].current_mode is model.MigMode.DISABLED


def test_a_rollback_waits_for_a_kubelet_that_has_just_started() -> None:
    rig, before, _ = after_partial_rollback()
    rig.kubelet.all_listed_from_s = rig.clock.now_s + 5

    assert not agents.undo(rig)

    assert ends.is_as_before(rig, before)


def test_a_rollback_runs_although_the_list_of_extra_clients_is_invalid() -> None:
    rig, before, _ = after_partial_rollback()
    rig.owner.extra_clients = "version: v1\nclients:\n- labels: {}\n"

    assert not agents.undo(rig)

    assert ends.is_as_before(rig, before)


def test_journal_of_a_newer_version_is_read_as_far_as_known() -> None:
    rig, before = after_failed_rollback()
    newer = json.loads(rig.node_object.annotations[well_known.JOURNAL_ANNOTATION])
    newer |= {"version": journals.JOURNAL_VERSION + 1, "unheardOf": ["x"]}
    rig.node_object.annotations[well_known.JOURNAL_ANNOTATION] = json.dumps(newer)

    agents.start(rig, None)

    assert ends.is_as_before(rig, before)
    ends.assert_restored(rig)


def test_a_rollback_that_failed_is_not_repeated_in_the_same_run() -> None:
    rig = nodes.busy_node()
    rig.failures.add(steps.CreateGpuInstance, call_errors.REFUSED)

    agents.run(rig, "one-slice-changed")

    assert rig.node_object.status_messages.count("restoring the previous instances") == 1


@pytest.mark.parametrize("is_late", [False, True], ids=["before", "after the pause"])
def test_a_rollback_spares_the_device_of_a_pod_that_is_not_bound_yet(*, is_late: bool) -> None:
    rig, _, new_device = after_partial_rollback(
        claimed_devices.without_pods(nodes.dra_node()), "all-balanced"
    )
    rig.clock.wait(1)
    assert new_device in claimed_devices.published_uuids(rig)
    gpus = rig.gpus

    rig.callbacks.add(
        moments.Call,
        lambda: claimed_devices.add_unbound(rig, new_device),
        when=lambda: not (is_late and rig.pods.has_dra_driver),
        times=1,
    )

    assert agents.undo(rig)

    assert rig.gpus == gpus
    rig.clock.wait(1)
    assert rig.pods.has_dra_driver
