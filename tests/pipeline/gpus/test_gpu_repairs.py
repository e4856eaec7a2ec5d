"""GPUs with a fault that the agent resets: who leaves, what returns, when it does not try."""

import contextlib
import dataclasses
from collections.abc import Callable

import pytest

from mig_manager import errors, reasons
from mig_manager.agent.drift import actions
from mig_manager.core import model, steps
from mig_manager.core.objects import well_known
from mig_manager.core.records import run_status
from mig_manager.core.settings import node_settings
from tests.pipeline import repairs
from tests.rigs.node import (
    agents,
    call_errors,
    ends,
    fakes,
    gpu_values,
    moments,
    node_rig,
    samples,
)

DAY_S = 86400.0


@pytest.mark.parametrize(
    ("make", "last"), [(repairs.faulty_node, "GpuRecovered"), (repairs.stuck_node, "GpuRepaired")]
)
def test_a_repair_evicts_only_the_pods_of_the_gpu_and_restores_all(
    make: Callable[[], node_rig.NodeRig], last: str
) -> None:
    rig = make()
    before = rig.gpus
    published = rig.note(lambda: rig.node_object.recovery_condition or {})

    outcome = repairs.serve(rig)

    assert outcome.state is run_status.State.SUCCESS
    assert not outcome.verified_gpus.unreachable
    assert not any("Not reset now" in each.get("message", "") for each in published)
    assert repairs.resets(rig) == 1
    assert "affected" not in rig.pods.names
    assert "spared" in rig.pods.names
    assert gpu_values.geometry(rig.gpus) == gpu_values.geometry(before)
    assert not any(gpu.needs_recovery for gpu in rig.gpus)
    assert {step.gpu_uuid for step in rig.driver.executed_steps} == {before[0].uuid}
    assert {"GpuRepairBegun", "Draining", "GpuRepaired", last} <= set(rig.node_object.events)
    assert rig.node_object.labels[well_known.APPLIED_LABEL] == "all-balanced"
    ends.assert_restored(rig)


def test_the_former_placements_return_although_the_planner_chooses_others() -> None:
    rig = repairs.faulty_node()
    by_planner = gpu_values.geometry(rig.gpus)
    (middle,) = (gi for gi in rig.gpus[0].gpu_instances if str(gi.profile) == "2g.10gb")
    pinned = f"2g.10gb@{2 - middle.placement.start}"
    desired = samples.desired_gpu({"1g.5gb": 2, "3g.20gb": 1, pinned: 1})
    rig.gpus = (*gpu_values.with_desired(rig.gpus[:1], desired), *rig.gpus[1:])
    before = gpu_values.geometry(rig.gpus)
    assert before != by_planner

    repairs.serve(rig)

    assert gpu_values.geometry(rig.gpus) == before


def test_a_gpu_reset_by_a_person_before_its_repair_uses_no_attempt() -> None:
    rig = repairs.faulty_node()
    agent = repairs.agent_of(rig)
    agent.recover("all-balanced")
    outcome = agents.run(rig, "all-balanced", by=agent)
    assert agent.check_drift("all-balanced", outcome) is actions.Action.RUN
    rig.gpus = gpu_values.with_action(rig.gpus, model.RecoveryAction.NONE, 0)

    outcome = agents.run(rig, "all-balanced", by=agent)

    assert repairs.resets(rig) == 0
    assert any(
        text.endswith("no longer needs a reset.") for text in rig.node_object.event_messages
    )
    assert not any("was reset" in text for text in rig.node_object.event_messages)
    repairs.break_gpus(rig, 0)
    assert agent.check_drift("all-balanced", outcome) is actions.Action.RUN


def test_a_repair_and_its_layout_restart_a_stale_plugin_once() -> None:
    rig = repairs.faulty_node()
    agent = repairs.begun(rig)
    # A person resets the GPU, and the plugin never gets its devices.
    rig.gpus = gpu_values.with_action(rig.gpus, model.RecoveryAction.NONE, 0)

    def make_stale() -> None:
        rig.kubelet.schedulable = {"nvidia.com/gpu": frozenset({"MIG-of-yesterday"})}

    make_stale()
    rig.callbacks.add(moments.Wait, make_stale)

    ends.run_to(rig, "all-balanced", reasons.Reason.NOT_ALLOCATABLE, by=agent)

    assert rig.log.count("workloads.delete") == 1


@pytest.mark.parametrize(
    "how", [node_settings.RepairPolicy.OFF, node_settings.RepairPolicy.REPORT]
)
def test_without_the_setting_no_gpu_is_reset(how: node_settings.RepairPolicy) -> None:
    rig = repairs.faulty_node()
    repairs.serve(rig, repairs.agent_of(rig, settings={"repair": how}))
    assert repairs.resets(rig) == 0
    assert "affected" in rig.pods.names


@pytest.mark.parametrize(
    "action", [each for each in model.RecoveryAction if each is not model.RecoveryAction.GPU_RESET]
)
def test_a_fault_that_a_reset_does_not_cure_is_left_to_people(
    action: model.RecoveryAction,
) -> None:
    rig = repairs.faulty_node()
    rig.gpus = gpu_values.with_action(rig.gpus, action, 0)
    repairs.serve(rig)
    assert repairs.resets(rig) == 0
    assert "affected" in rig.pods.names


def cordon(rig: node_rig.NodeRig) -> None:
    rig.node_object.is_unschedulable = True


def taint(rig: node_rig.NodeRig) -> None:
    rig.node_object.taints.add("nvsentinel.example/quarantine")


def taint_device(rig: node_rig.NodeRig) -> None:
    rig.dra_driver.is_installed, rig.dra_driver.is_label_managed = True, False
    rig.advance()
    assert rig.dra_driver.slices is not None
    rig.dra_driver.slices = tuple(
        dataclasses.replace(each, taints={"gpu-0": "gpu.nvidia.com/xid=79"})
        for each in rig.dra_driver.slices
    )


def virtualize(rig: node_rig.NodeRig) -> None:
    rig.gpus = tuple(
        dataclasses.replace(gpu, virtualization=model.Virtualization.PASSTHROUGH)
        for gpu in rig.gpus
    )


def rebrand(rig: node_rig.NodeRig) -> None:
    rig.gpus = tuple(
        dataclasses.replace(gpu, architecture=model.Architecture.OTHER) for gpu in rig.gpus
    )


def forbid(rig: node_rig.NodeRig) -> None:
    rig.resets.are_available = False


@pytest.mark.parametrize(
    ("prepare", "why"),
    [
        (cordon, "the node is cordoned"),
        (taint, "a taint of another program: nvsentinel.example/quarantine"),
        (taint_device, "the DRA driver has tainted devices: gpu-0"),
        (virtualize, "virtual machines"),
        (rebrand, "not known"),
        (forbid, "the agent may not reset GPUs"),
        (repairs.silence_kubelet, "no socket"),
    ],
)
def test_a_repair_yields_and_the_condition_says_why(
    prepare: Callable[[node_rig.NodeRig], None], why: str
) -> None:
    rig = repairs.faulty_node()
    prepare(rig)
    before = rig.gpus

    repairs.serve(rig)

    assert repairs.resets(rig) == 0
    assert rig.gpus == before
    assert "affected" in rig.pods.names
    assert why in repairs.message(rig)
    assert "GpuRepairBegun" not in rig.node_object.events
    assert not rig.node_object.has_reconfiguring_taint


def test_a_repair_begins_once_the_cordon_is_gone() -> None:
    rig = repairs.faulty_node()
    rig.node_object.is_unschedulable = True
    agent = repairs.agent_of(rig)
    outcome = repairs.serve(rig, agent)
    assert agent.check_drift("all-balanced", outcome) is actions.Action.REST
    rig.node_object.is_unschedulable = False
    assert agent.check_drift("all-balanced", outcome) is actions.Action.RUN


@pytest.mark.parametrize(
    ("key", "tolerated", "expected"),
    [
        ("nvidia.com/gpu", (), 1),
        ("team", ("team",), 1),
        ("team", (), 0),
        ("node.kubernetes.io/unreachable", ("node.kubernetes.io/unreachable",), 0),
    ],
)
def test_a_repair_ignores_only_taints_that_the_gpu_pods_tolerate(
    key: str, tolerated: tuple[str, ...], expected: int
) -> None:
    rig = repairs.faulty_node()
    rig.node_object.taints.add(key)
    for uid, pod in rig.pods.items():
        if pod.gpu_resources:
            rig.pods.change(uid, tolerated=frozenset(tolerated))
    repairs.serve(rig)
    assert repairs.resets(rig) == expected


def test_a_budget_stops_the_repair_and_the_layout_stays_a_success() -> None:
    rig = repairs.faulty_node()
    rig.disruptions.refusals["affected"] = "budget 'pdb' allows no disruption"
    before = rig.gpus

    outcome = repairs.serve(rig)

    assert outcome.state is run_status.State.SUCCESS
    assert "The repair of GPU 0" in outcome.message
    assert "pdb" in outcome.message
    assert repairs.resets(rig) == 0
    assert rig.gpus == before
    assert rig.node_object.labels[well_known.STATE_LABEL] == "success"
    assert rig.node_object.labels[well_known.APPLIED_LABEL] == "all-balanced"
    assert "GpuRepairFailed" in rig.node_object.events
    assert "another begins at" in repairs.message(rig)
    assert {"affected", "spared"} <= rig.pods.names
    ends.assert_restored(rig)


API_BROKEN = {"workloads.list": call_errors.broken("node")}
PASSES = contextlib.nullcontext()


@pytest.mark.parametrize(
    ("refusals", "is_silent", "failures", "expectation", "state"),
    [
        pytest.param(1000, False, {}, pytest.raises(errors.LockedError), "success", id="lock"),
        pytest.param(0, True, {}, PASSES, "success", id="kubelet"),
        pytest.param(0, False, API_BROKEN, PASSES, "failed", id="API"),
    ],
)
def test_a_repair_that_could_not_begin_is_neither_failed_nor_delayed(
    refusals: int,
    failures: dict[str, Exception],
    expectation: contextlib.AbstractContextManager[object],
    state: str,
    *,
    is_silent: bool,
) -> None:
    rig = repairs.faulty_node()
    lock = fakes.FakeLock()
    agent = repairs.begun(rig, lock=lock)
    lock.refusals, rig.kubelet.is_silent = refusals, is_silent
    rig.failures.add_all(failures)

    with expectation:
        agents.run(rig, "all-balanced", by=agent)

    assert rig.node_object.labels[well_known.STATE_LABEL] == state
    assert "GpuRepairFailed" not in rig.node_object.events
    assert {"affected", "spared"} <= rig.pods.names
    lock.refusals, rig.kubelet.is_silent = 0, False
    rig.failures.clear()
    assert repairs.serve(rig, agent).state is run_status.State.SUCCESS
    assert repairs.resets(rig) == 1
    assert [each["attempts"] for each in rig.node_object.request_record["repairs"]] == [1]


def test_each_attempt_reports_that_the_lock_delays_it_and_a_repair() -> None:
    rig = repairs.faulty_node()
    lock = fakes.FakeLock()
    agent = repairs.agent_of(rig, lock=lock)
    assert repairs.request_other(rig, agent).reason is reasons.Reason.GPU_NEEDS_RESET
    lock.refusals = 1000

    for attempt in (2, 3):
        began_s = rig.clock.now_s
        outcome = repairs.request_other(rig, agent, attempt=attempt)

        assert outcome.reason is reasons.Reason.LOCKED
        assert rig.node_object.status["attempt"] == attempt
        # It has waited for the lock once.
        assert rig.clock.now_s - began_s < 2 * agents.TIMEOUTS["lock_timeout_s"]

    lock.refusals = 0
    assert repairs.request_other(rig, agent, attempt=4).state is run_status.State.SUCCESS
    assert repairs.resets(rig) == 1


def test_a_reset_that_cures_nothing_is_tried_once_and_then_pauses_longer() -> None:
    rig = repairs.faulty_node()
    rig.resets.action_after = model.RecoveryAction.GPU_RESET
    agent = repairs.agent_of(rig)
    outcome = repairs.serve(rig, agent)
    assert repairs.resets(rig) == 1
    assert "still needs a reset" in repairs.message(rig)
    pauses_s = []
    for number in range(2, 5):
        began_s = rig.clock.now_s
        while agent.check_drift("all-balanced", outcome) is actions.Action.REST:
            rig.clock.wait(300)
        pauses_s.append(rig.clock.now_s - began_s)
        outcome = agents.run(rig, "all-balanced", by=agent)
        assert repairs.resets(rig) == number
    assert pauses_s[0] >= 600
    assert sorted(set(pauses_s)) == pauses_s
    assert rig.node_object.labels[well_known.STATE_LABEL] == "success"
    assert "spared" in rig.pods.names


YEARS_S = 20 * 365 * DAY_S


@pytest.mark.parametrize(
    ("starts_s", "resets"),
    [((0, 100, 1100), [1, 1, 2]), ((YEARS_S, 0, 100), [1, 2, 2])],
    ids=["a restart does not shorten the pause", "a clock that was years ahead does not block"],
)
def test_the_pause_between_repairs_outlasts_agents(
    starts_s: tuple[float, ...], resets: list[int]
) -> None:
    rig = repairs.faulty_node()
    rig.resets.action_after = model.RecoveryAction.GPU_RESET
    counts = []
    for start_s in starts_s:
        rig.clock.now_s = start_s
        repairs.serve(rig)
        counts.append(repairs.resets(rig))

    assert counts == resets


def test_a_second_fault_in_the_pause_waits_and_another_gpu_does_not() -> None:
    rig = repairs.faulty_node()
    agent = repairs.agent_of(rig)
    outcome = repairs.serve(rig, agent)
    assert repairs.resets(rig) == 1
    repairs.break_gpus(rig, 0, 1)

    assert agent.check_drift("all-balanced", outcome) is actions.Action.RUN
    agents.run(rig, "all-balanced", by=agent)

    assert [gpu.recovers_by_reset for gpu in rig.gpus] == [True, False]
    assert "GPU 0 (repair 1 has ended; another begins at" in repairs.message(rig)


def test_a_gpu_that_was_healthy_for_long_starts_with_the_first_pause() -> None:
    rig = repairs.faulty_node()
    agent = repairs.agent_of(rig)
    outcome = repairs.serve(rig, agent)
    rig.clock.wait(3 * DAY_S)
    repairs.break_gpus(rig, 0)
    assert agent.check_drift("all-balanced", outcome) is actions.Action.RUN
    agents.run(rig, "all-balanced", by=agent)
    assert [each["attempts"] for each in rig.node_object.request_record["repairs"]] == [1]


def test_a_refused_reset_restores_the_instances_and_is_reported() -> None:
    rig = repairs.faulty_node()
    rig.failures.add("reset.reset", repairs.REFUSED)
    before = rig.gpus
    assert repairs.serve(rig).state is run_status.State.SUCCESS
    assert "only be reset together" in repairs.message(rig)
    assert gpu_values.geometry(rig.gpus) == gpu_values.geometry(before)
    ends.assert_restored(rig)


def test_a_postponed_repair_keeps_the_message_of_a_failed_one() -> None:
    rig = repairs.faulty_node()
    rig.failures.add("reset.reset", repairs.REFUSED)
    agent = repairs.agent_of(rig)
    outcome = repairs.serve(rig, agent)
    rig.clock.wait(DAY_S / 2)
    assert agent.check_drift("all-balanced", outcome) is actions.Action.RUN

    rig.node_object.is_unschedulable = True

    assert "only be reset together" in agents.run(rig, "all-balanced", by=agent).message
    assert rig.log.count("reset.reset") == 1


def test_a_reset_ends_instances_that_the_fault_keeps_undestroyed() -> None:
    rig = repairs.faulty_node()
    before = gpu_values.geometry(rig.gpus)
    destructions = steps.DestroyComputeInstance | steps.DestroyGpuInstance
    rig.failures.add(destructions, call_errors.broken("gpus"))

    repairs.serve(rig)
    assert repairs.resets(rig) == 1
    assert gpu_values.geometry(rig.gpus) == before


def test_a_gpu_that_is_lost_by_its_reset_leaves_the_others_serving() -> None:
    rig = repairs.faulty_node()
    uuid = rig.gpus[0].uuid
    rig.callbacks.add("reset.reset", lambda: rig.driver.lost.add(uuid))
    outcome = repairs.serve(rig)
    assert outcome.state is run_status.State.SUCCESS
    assert [gpu.uuid for gpu in outcome.verified_gpus.unreachable] == [uuid]
    assert "GpuRepairFailed" in rig.node_object.events
    assert "spared" in rig.pods.names
    ends.assert_restored(rig)


def test_a_repair_never_reboots_the_node() -> None:
    rig = repairs.faulty_node()
    rig.host.may_reboot = True
    rig.failures.add("reset.reset", repairs.REFUSED)
    repairs.serve(rig)
    assert rig.host.reboots == 0
    assert "spared" in rig.pods.names


def test_drift_on_another_gpu_is_not_healed_by_a_repair() -> None:
    rig = repairs.faulty_node()
    agent = repairs.agent_of(rig)
    outcome = agents.run(rig, "all-balanced", by=agent)
    rig.gpus = gpu_values.without_instances(rig.gpus, 1)
    assert agent.check_drift("all-balanced", outcome) is actions.Action.REST
    assert "the GPUs do not have the requested layout" in repairs.message(rig)


def test_a_node_without_a_request_only_reports() -> None:
    rig = repairs.faulty_node()
    agent = repairs.agent_of(rig)
    agent.restore_without_request()
    agent.check_without_request()
    assert repairs.resets(rig) == 0
    assert "no layout is requested" in repairs.message(rig)
