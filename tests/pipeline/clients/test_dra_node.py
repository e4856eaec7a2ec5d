"""A node whose devices NVIDIA's DRA driver advertises, in ResourceSlices."""

import dataclasses

import pytest

from mig_manager.core import model, steps
from mig_manager.core.node import policies
from mig_manager.core.node.devices import claims
from mig_manager.core.objects import well_known
from mig_manager.core.records import run_status
from mig_manager.reasons import Reason
from tests.pipeline.claimed_devices import (
    KEEP_ONE,
    add_unbound,
    published_uuids,
    without_driver,
    without_pods,
)
from tests.pipeline.gpu_users import process
from tests.rigs.node import (
    agents,
    call_errors,
    ends,
    gpu_values,
    moments,
    node_rig,
    nodes,
    strikes,
)


def starts(rig: node_rig.NodeRig) -> list[str]:
    """Note the UID of each driver pod that the node ever has."""
    driver_uids: list[str] = []

    def note() -> None:
        driver_uids.extend(pod.uid for pod in rig.pods.dra_drivers if pod.uid not in driver_uids)

    note()
    rig.callbacks.add(moments.Wait, note)
    return driver_uids


def devices(rig: node_rig.NodeRig) -> frozenset[str]:
    return frozenset(uuid for gpu in rig.gpus for uuid in gpu.mig_uuids)


@pytest.mark.parametrize("label_managed", [True, False])
def test_one_of_two_pods_with_claims_leaves_and_the_driver_restarts_once(
    *, label_managed: bool
) -> None:
    rig = nodes.dra_node(label_managed=label_managed)
    driver_uids = starts(rig)
    claimed = {nodes.device_at(rig, 0), nodes.device_at(rig, 6)}

    outcome = agents.run(rig, "most-in-one", layouts=KEEP_ONE)

    assert (outcome.state, outcome.reason) == (run_status.State.SUCCESS, Reason.APPLIED)
    assert rig.log.count("workloads.evict") == 1
    (kept,) = rig.pods.names & {"low", "high"}
    (pod,) = (each for each in rig.pods.values() if each.name == kept)
    assert len(claimed & devices(rig)) == 1
    assert pod.claimed_ids == devices(rig) & claimed
    assert published_uuids(rig) == devices(rig)
    assert len(driver_uids) == 2
    ends.assert_restored(rig)


def test_driver_stops_after_pods_with_claims_and_starts_before_them() -> None:
    rig = nodes.dra_node()

    ends.run_to(rig, "most-in-one", Reason.APPLIED, layouts=KEEP_ONE)

    pauses = [each for each in rig.node_object.status_messages if each.startswith("pausing")]
    assert pauses == ["pausing dcgm-dra, dcgm-exporter-dra", "pausing dra-driver"]
    resumes = ("restarting", "resuming")
    resumed = [each for each in rig.node_object.status_messages if each.startswith(resumes)]
    assert resumed[0] == "restarting the DRA driver"
    assert {rig.node_object.labels[key] for key in (claims.DEPLOY_LABEL, *nodes.DRA_MONITORS)} == {
        "true"
    }


@pytest.mark.parametrize("is_replaced", [False, True], ids=["running", "between two pods"])
def test_stale_slices_are_deleted_before_pods_may_be_scheduled_again(*, is_replaced: bool) -> None:
    rig = nodes.dra_node(label_managed=not is_replaced)
    if is_replaced:
        without_driver(without_pods(rig))
    open_with = rig.note(
        lambda: published_uuids(rig),
        when=lambda: (
            "gpus.execute" in rig.log
            and not rig.node_object.has_reconfiguring_taint
            and not rig.pods.dra_drivers
        ),
    )

    ends.run_to(rig, "most-in-one", Reason.APPLIED, layouts=KEEP_ONE)

    assert set(open_with) == {frozenset()}
    assert published_uuids(rig) == devices(rig)


@pytest.mark.parametrize("label_managed", [True, False])
def test_no_device_can_be_allocated_after_the_last_search_for_users(
    *, label_managed: bool
) -> None:
    rig = nodes.dra_node(label_managed=label_managed)
    published = rig.note(lambda: published_uuids(rig), at="gpus.execute")

    ends.run_to(rig, "most-in-one", Reason.APPLIED, layouts=KEEP_ONE)

    assert published == [frozenset()]


def test_taints_that_a_drivers_restart_clears_are_in_an_event() -> None:
    rig = nodes.dra_node()
    (published_slice,) = rig.dra_driver.slices or ()
    taints = {"gpu-0-mig-1": "gpu.nvidia.com/xid=79"}
    rig.dra_driver.slices = (dataclasses.replace(published_slice, taints=taints),)

    ends.run_to(rig, "most-in-one", Reason.APPLIED, layouts=KEEP_ONE)

    assert "DeviceTaintsCleared" in rig.node_object.events
    assert "clears the taints of gpu-0-mig-1 (gpu.nvidia.com/xid=79)" in " ".join(
        rig.node_object.event_messages
    )


def test_a_claim_with_unknown_devices_may_be_for_any_gpu() -> None:
    rig = nodes.dra_node()
    rig.pods.add("unknown", has_claims=True)

    ends.run_to(rig, "most-in-one", Reason.APPLIED, layouts=KEEP_ONE)

    assert "unknown" not in rig.pods.names
    assert "default/unknown (its ResourceClaim may stand for any GPU)" in " ".join(
        rig.node_object.event_messages
    )


def test_a_monitor_whose_claims_cannot_be_read_is_paused_and_not_evicted() -> None:
    rig = nodes.dra_node()
    rig.pods.change(rig.pods.uid_of("dcgm-dra"), has_claims=True, claimed_ids=None)

    ends.run_to(rig, "most-in-one", Reason.APPLIED, layouts=KEEP_ONE)

    assert rig.log.count("workloads.evict") == 1


def test_an_mps_daemon_for_a_claim_ends_with_the_pod_and_does_not_block() -> None:
    rig = nodes.dra_node()
    daemon = rig.pods.add(
        "mps-control-daemon-x", container_names=("mps-control-daemon",), owner_kind="ReplicaSet"
    )
    used = next(gi for gi in rig.gpus[0].gpu_instances if gi.placement.start == 0)
    rig.driver.processes[rig.gpus[0].uuid] = (process(f"pod {daemon}", used.instance_id),)

    def stop_daemon() -> None:
        if "low" not in rig.pods.names:
            rig.driver.processes.clear()

    rig.callbacks.add(moments.Wait, stop_daemon)

    ends.run_to(rig, "all-disabled", Reason.APPLIED)


def test_slices_that_do_not_match_the_gpus_fail_the_change() -> None:
    rig = nodes.dra_node()
    stale = rig.dra_driver.slices
    rig.set_at(moments.Wait, rig.dra_driver, slices=stale)

    why = "the DRA driver's ResourceSlices list 14 devices: 8 exist, 10 are expected"
    outcome = agents.run(rig, "most-in-one", layouts=KEEP_ONE)
    assert outcome.reason is Reason.NOT_ALLOCATABLE
    assert why in outcome.message

    rig.callbacks.clear()
    assert (
        agents.run(without_driver(rig), "most-in-one", layouts=KEEP_ONE).state
        is run_status.State.SUCCESS
    )


def test_a_driver_that_does_not_come_back_is_named() -> None:
    rig = nodes.dra_node()
    rig.dra_driver.is_broken = True
    ends.run_to(
        rig,
        "most-in-one",
        Reason.PLUGIN_NOT_READY,
        "no new DRA driver pod is ready: default/nvidia-dra-driver",
        layouts=KEEP_ONE,
    )


def test_slices_that_the_api_does_not_list_are_not_waited_for() -> None:
    rig = nodes.dra_node()
    rig.set_at(moments.Wait, rig.dra_driver, slices=None)
    ends.run_to(rig, "most-in-one", Reason.APPLIED, layouts=KEEP_ONE)


def test_no_slices_are_requested_on_a_node_without_the_driver() -> None:
    rig = nodes.busy_node()
    agent = agents.new_agent(rig)
    ends.run_to(rig, "one-slice-changed", Reason.APPLIED, by=agent)
    ends.run_to(rig, "one-slice-changed", Reason.ALREADY_APPLIED, by=agent)
    assert not [call for call in rig.log if call.startswith("slices")]


@pytest.mark.parametrize("has_failed", [False, True])
def test_an_active_layout_that_the_driver_does_not_know_restarts_it_once(
    *, has_failed: bool
) -> None:
    rig = nodes.dra_node()
    driver_uids = starts(rig)
    rig.dra_driver.slices = ()
    agent = agents.new_agent(rig)
    if has_failed:
        rig.failures.add("gpus.observe", call_errors.broken("gpus"))
        ends.run_to(rig, "all-1g.5gb", Reason.NVML_ERROR, by=agent)
        rig.failures.clear()
    attempt = 2 if has_failed else 1

    ends.run_to(rig, "all-1g.5gb", Reason.ALREADY_APPLIED, by=agent, attempt=attempt)

    assert len(driver_uids) == 2
    assert {"low", "high"} <= rig.pods.names


def test_a_node_with_device_plugin_and_driver_waits_for_both() -> None:
    rig = nodes.dra_node()
    rig.node_object.labels[well_known.PLUGIN_DEPLOY_LABEL] = "true"
    rig.advance()

    ends.run_to(rig, "most-in-one", Reason.APPLIED, layouts=KEEP_ONE)

    assert "restarting the device plugin and the DRA driver" in rig.node_object.status_messages
    uuids = devices(rig)
    assert rig.kubelet.schedulable == {"nvidia.com/gpu": uuids}
    assert published_uuids(rig) == uuids


@pytest.mark.parametrize("label_managed", [True, False])
@pytest.mark.parametrize("number", [1, 4])
def test_the_agent_after_a_killed_one_waits_for_the_driver(
    number: int, *, label_managed: bool
) -> None:
    rig = nodes.dra_node(label_managed=label_managed)
    driver_uids = starts(rig)
    strikes.kill_before(rig, steps.DestroyComputeInstance, "all-balanced", number=number)
    assert not rig.pods.dra_drivers

    assert agents.resume(rig, "all-balanced").state is run_status.State.SUCCESS

    assert len(driver_uids) == 2
    assert published_uuids(rig) == devices(rig)
    ends.assert_restored(rig)


@pytest.mark.parametrize(
    ("requested", "label_managed", "is_stopped"),
    [
        ("all-balanced", True, True),
        ("all-balanced", False, False),
        ("all-1g.5gb", True, False),
        ("all-1g.5gb", False, True),
        ("all-disabled", True, True),
        ("all-disabled", False, False),
    ],
)
def test_next_run_waits_for_the_driver_that_the_last_one_ended(
    requested: str, *, label_managed: bool, is_stopped: bool
) -> None:
    def begin() -> ends.NodeAndAgent:
        rig = nodes.dra_node(label_managed=label_managed)
        return rig, agents.new_agent(rig)

    superseded_runs = [
        *ends.supersede_at_checks(begin, "all-balanced", is_replaced=not is_stopped)
    ]
    for rig, agent in superseded_runs:
        rig.pods.remove_if(lambda pod: pod.is_terminating)

        outcome = (
            agents.resume(rig, requested) if is_stopped else agents.run(rig, requested, by=agent)
        )

        assert outcome.state is run_status.State.SUCCESS
        assert rig.pods.has_dra_driver
        assert published_uuids(rig) == gpu_values.device_uuids(rig.gpus)
        ends.assert_restored(rig)
    assert len(superseded_runs) > 4


def test_a_driver_that_ends_as_the_taint_comes_is_verified_when_it_returns() -> None:
    rig = without_pods(nodes.dra_node(label_managed=False))

    def strike() -> None:
        is_usage_read = "allocations.assigned_devices" in rig.log
        is_tainted = rig.node_object.has_reconfiguring_taint or "gpus.execute" in rig.log
        if is_usage_read and not is_tainted:
            without_driver(rig)

    rig.callbacks.add("node.patch", strike)

    ends.run_to(rig, "all-balanced", Reason.APPLIED)

    assert rig.pods.has_dra_driver
    assert published_uuids(rig) == devices(rig)


def test_a_driver_that_first_comes_during_the_change_is_verified() -> None:
    rig = without_driver(without_pods(nodes.dra_node(label_managed=False)))
    # Its pods tolerate every taint.
    rig.callbacks.add("gpus.execute", rig.start_driver, times=1)

    ends.run_to(rig, "all-balanced", Reason.APPLIED)

    assert rig.pods.has_dra_driver
    assert published_uuids(rig) == devices(rig)


@pytest.mark.parametrize("label_managed", [True, False])
@pytest.mark.parametrize("is_before", [True, False])
def test_late_pod_leaves_only_while_the_driver_runs(
    *, label_managed: bool, is_before: bool
) -> None:
    probe = nodes.dra_node(label_managed=label_managed)
    before = devices(probe)
    agents.run(probe, "all-balanced")
    rig = nodes.dra_node(label_managed=label_managed)
    late = min(before - devices(probe) - {nodes.device_at(rig, 0), nodes.device_at(rig, 6)})
    agent = agents.new_agent(rig)

    def is_due() -> bool:
        pauses = [each for each in rig.node_object.status_messages if each.startswith("pausing")]
        is_last = bool(pauses) and "dra-driver" in pauses[-1]
        return rig.node_object.has_reconfiguring_taint and (
            is_last or (is_before and bool(pauses))
        )

    rig.callbacks.add(
        moments.Call,
        lambda: rig.pods.add("late", has_claims=True, claimed_ids=frozenset({late})),
        when=is_due,
        times=1,
    )
    outcome = agents.run(rig, "all-balanced", by=agent)

    is_late = not (is_before and label_managed)
    assert (outcome.reason is Reason.DRAIN_TIMEOUT) is is_late, outcome.message
    assert ("late" in rig.pods.names) is is_late
    ends.assert_restored(rig)
    ends.run_to(
        rig,
        "all-balanced",
        Reason.APPLIED if is_late else Reason.ALREADY_APPLIED,
        by=agent,
        attempt=2,
    )


def test_reboot_is_refused_while_a_pod_with_a_claim_remains() -> None:
    rig = without_pods(nodes.dra_node())
    nodes.must_reboot(rig)
    off = gpu_values.with_desired(rig.gpus[:1], model.DesiredGpu(mode=model.MigMode.DISABLED))
    claimed = sorted(rig.gpus[1].mig_uuids)
    rig.gpus = (*off, rig.gpus[1])
    rig.pods.add("claiming", has_claims=True, claimed_ids=frozenset(claimed[:1]))
    rig.pods.add("other", devices=frozenset(claimed[1:2]))

    why = "these pods with ResourceClaims cannot end: default/claiming; drain the node and reboot"
    ends.run_to(rig, "all-1g.5gb", Reason.REBOOT_REQUIRED, why)

    assert rig.host.reboots == 0
    assert {"claiming", "other"} <= rig.pods.names
    rig.clock.wait(1)
    assert rig.pods.has_dra_driver


def test_a_node_with_a_driver_and_no_claim_reboots() -> None:
    rig = without_pods(nodes.dra_node())
    nodes.must_reboot(rig)

    agents.run(rig, "all-disabled")

    assert rig.host.reboots == 1


def test_another_config_of_the_plugin_does_not_restart_the_driver() -> None:
    rig = nodes.dra_node()
    rig.node_object.labels |= {
        well_known.PLUGIN_DEPLOY_LABEL: "true",
        well_known.PLUGIN_CONFIG_LABEL: "whole",
    }
    rig.advance()
    rig.owner.policy = policies.Policy(plugin_configs=(("all-1g.5gb", "sliced"),))
    driver_uids = starts(rig)
    assert agents.run(rig, "all-1g.5gb").state is run_status.State.SUCCESS
    assert rig.node_object.labels[well_known.PLUGIN_CONFIG_LABEL] == "sliced"
    assert len(driver_uids) == 1
    assert "slices.delete" not in rig.log


def test_verified_driver_is_not_restarted_after_a_kill() -> None:
    rig = nodes.dra_node()
    driver_uids = starts(rig)
    waiting = "waiting for the new devices to be schedulable"
    strikes.kill_when(
        rig,
        lambda: waiting in rig.node_object.status_messages and rig.pods.has_dra_driver,
        lambda rig: agents.run(rig, "all-balanced"),
    )
    deleted = rig.log.count("slices.delete")

    assert agents.resume(rig, "all-balanced").state is run_status.State.SUCCESS

    assert len(driver_uids) == 2
    assert rig.log.count("slices.delete") == deleted
    ends.assert_restored(rig)


def bind(rig: node_rig.NodeRig, uid: str) -> None:
    pod = rig.pods.elsewhere.pop(uid)
    rig.pods[uid] = dataclasses.replace(pod, node_name="node-a", phase="Running")


@pytest.mark.parametrize("start", [0, 3, 6])
def test_a_device_of_a_pod_that_is_not_bound_yet_counts_as_used(start: int) -> None:
    rig = without_pods(nodes.dra_node())
    device = nodes.device_at(rig, start)
    add_unbound(rig, device)

    ends.run_to(rig, "most-in-one", Reason.APPLIED, layouts=KEEP_ONE)
    assert device in devices(rig)


@pytest.mark.parametrize("is_late", [False, True], ids=["before", "after the drain"])
def test_no_pod_is_evicted_while_another_is_about_to_be_bound(*, is_late: bool) -> None:
    rig = nodes.dra_node()
    device = nodes.device_at(rig, 3)
    before = rig.gpus
    unbound: list[str] = []
    rig.callbacks.add(
        moments.Call,
        lambda: unbound.append(add_unbound(rig, device)),
        when=lambda: (
            not is_late
            or rig.node_object.labels.get(claims.DEPLOY_LABEL) == well_known.PAUSED_VALUE
        ),
        times=1,
    )
    agent = agents.new_agent(rig)

    outcome = ends.run_to(rig, "all-disabled", Reason.DRAIN_TIMEOUT, "default/unbound", by=agent)

    assert outcome.should_retry
    assert rig.gpus == before
    assert ("workloads.evict" in rig.log) is is_late
    bind(rig, *unbound)
    ends.run_to(rig, "all-disabled", Reason.APPLIED, by=agent, attempt=2)


def test_a_silent_kubelet_hides_no_pod_that_is_about_to_be_bound() -> None:
    rig = nodes.dra_node()
    device = nodes.device_at(rig, 3)
    answers_from_s: list[float] = []

    def allocate() -> None:
        add_unbound(rig, device)
        rig.pods.add("starting", phase="Pending", gpu_resources={"nvidia.com/gpu": 1})
        rig.kubelet.is_silent = True
        answers_from_s.append(rig.clock.now_s + 25)

    def answer() -> None:
        rig.kubelet.is_silent &= rig.clock.now_s < min(answers_from_s, default=0)

    rig.callbacks.add(moments.Wait, answer)
    paused = nodes.DRA_MONITORS[0]
    rig.callbacks.add(
        moments.Call,
        allocate,
        when=lambda: rig.node_object.labels[paused] == well_known.PAUSED_VALUE,
        times=1,
    )
    ends.run_to(rig, "most-in-one", Reason.DRAIN_TIMEOUT, "default/unbound", layouts=KEEP_ONE)

    assert "starting" in rig.pods.names
