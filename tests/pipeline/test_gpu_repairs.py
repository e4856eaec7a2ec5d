"""GPUs with a fault that the agent resets: who leaves, what returns, and when it does not try."""

import dataclasses
import json
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mig_manager import errors
from mig_manager.agent import drift, outcomes, reconcile, settings
from mig_manager.core import model, ports, profile_name, steps
from mig_manager.core.fleet import slots
from mig_manager.core.node import well_known
from mig_manager.sandbox.driver import states
from testkit import nvidia_smi, nvml_faults
from tests.adapters import systemd_rig
from tests.node import fakes, gpu_values, scenes
from tests.pipeline import custom_requests
from tests.sandbox import library
from tests.stage import agent_stage

LAYOUT, OTHER = "all-balanced", "all-1g.5gb"
RESET = {"repair": settings.Repair.RESET}
DAY_S = 86400.0


def faulty_node(*indices: int) -> fakes.NodeRig:
    """Return a busy node whose GPUs with these indices (0 if none is named) await a reset."""
    rig = scenes.busy_node()
    rig.resets.are_available = True
    break_gpus(rig, *(indices or (0,)))
    return rig


def break_gpus(rig: fakes.NodeRig, *indices: int) -> None:
    rig.gpus = gpu_values.with_action(rig.gpus, model.RecoveryAction.GPU_RESET, *indices)


def agent_of(rig: fakes.NodeRig, **options: Any) -> reconcile.Reconciler:
    return scenes.reconciler(rig, limits=options.pop("limits", RESET), **options)


def serve(rig: fakes.NodeRig, by: reconcile.Reconciler | None = None) -> outcomes.Outcome:
    """Let an agent take over, and repair what it finds at the next drift check, as the loop."""
    agent = by or agent_of(rig)
    if by is None:
        agent.recover(LAYOUT)
    outcome = scenes.run(rig, LAYOUT, by=agent)
    if agent.check_drift(LAYOUT, outcome) is drift.Action.REPAIR:
        return scenes.run(rig, LAYOUT, by=agent)
    return outcome


def resets(rig: fakes.NodeRig) -> int:
    return rig.log.count("host.reset")


def message(rig: fakes.NodeRig) -> str:
    assert rig.recovery_condition is not None
    return rig.recovery_condition["message"]


def test_a_repair_evicts_only_the_pods_of_the_gpu_and_restores_all() -> None:
    rig = faulty_node()
    before = rig.gpus

    outcome = serve(rig)

    assert outcome.state is model.State.SUCCESS
    assert resets(rig) == 1
    assert "affected" not in rig.pod_names
    assert "spared" in rig.pod_names
    assert gpu_values.geometry(rig.gpus) == gpu_values.geometry(before)
    assert not any(gpu.needs_recovery for gpu in rig.gpus)
    assert {step.gpu_uuid for step in rig.driver.executed} == {before[0].uuid}
    assert {"GpuRepairBegun", "Draining", "GpuRepaired", "GpuRecovered"} <= set(rig.events)
    assert rig.labels[well_known.APPLIED_LABEL] == LAYOUT
    scenes.assert_restored(rig)


def test_the_former_placements_return_although_the_planner_chooses_others() -> None:
    rig = faulty_node()
    chosen = gpu_values.geometry(rig.gpus)
    (middle,) = (gi for gi in rig.gpus[0].gpu_instances if str(gi.profile) == "2g.10gb")
    pin = model.Pin(profile=middle.profile, start=2 - middle.placement.start)
    others = {profile_name.parse("1g.5gb"): 2, profile_name.parse("3g.20gb"): 1}
    wanted = model.DesiredGpu.of(model.MigMode.ENABLED, others, {pin: 1})
    rig.gpus = (*gpu_values.brought_to(rig.gpus[:1], wanted), *rig.gpus[1:])
    before = gpu_values.geometry(rig.gpus)
    assert before != chosen

    serve(rig)

    assert gpu_values.geometry(rig.gpus) == before


@pytest.mark.parametrize("how", [settings.Repair.OFF, settings.Repair.REPORT])
def test_without_the_setting_no_gpu_is_reset(how: settings.Repair) -> None:
    rig = faulty_node()
    serve(rig, agent_of(rig, limits={"repair": how}))
    assert resets(rig) == 0
    assert "affected" in rig.pod_names


@pytest.mark.parametrize(
    "action", [each for each in model.RecoveryAction if each is not model.RecoveryAction.GPU_RESET]
)
def test_what_a_reset_does_not_cure_is_left_to_people(action: model.RecoveryAction) -> None:
    rig = faulty_node()
    rig.gpus = gpu_values.with_action(rig.gpus, action, 0)
    serve(rig)
    assert resets(rig) == 0
    assert "affected" in rig.pod_names


def cordon(rig: fakes.NodeRig) -> None:
    rig.is_unschedulable = True


def taint(rig: fakes.NodeRig) -> None:
    rig.taints.add("nvsentinel.example/quarantine")


def taint_device(rig: fakes.NodeRig) -> None:
    rig.dra_driver.is_installed, rig.dra_driver.is_gated = True, False
    rig.live()
    assert rig.dra_driver.slices is not None
    rig.dra_driver.slices = tuple(
        dataclasses.replace(each, taints={"gpu-0": "gpu.nvidia.com/xid=79"})
        for each in rig.dra_driver.slices
    )


def virtualize(rig: fakes.NodeRig) -> None:
    rig.gpus = tuple(
        dataclasses.replace(gpu, virtualization=model.Virtualization.PASSTHROUGH)
        for gpu in rig.gpus
    )


def rebrand(rig: fakes.NodeRig) -> None:
    rig.gpus = tuple(
        dataclasses.replace(gpu, architecture=model.Architecture.OTHER) for gpu in rig.gpus
    )


def forbid(rig: fakes.NodeRig) -> None:
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
    ],
)
def test_a_repair_yields_and_the_condition_says_why(
    prepare: Callable[[fakes.NodeRig], None], why: str
) -> None:
    rig = faulty_node()
    prepare(rig)
    before = rig.gpus

    serve(rig)

    assert resets(rig) == 0
    assert rig.gpus == before
    assert "affected" in rig.pod_names
    assert why in message(rig)
    assert not rig.has_hold_taint


def test_a_repair_begins_once_the_cordon_is_gone() -> None:
    rig = faulty_node()
    rig.is_unschedulable = True
    agent = agent_of(rig)
    outcome = serve(rig, agent)
    assert agent.check_drift(LAYOUT, outcome) is drift.Action.REST
    rig.is_unschedulable = False
    assert agent.check_drift(LAYOUT, outcome) is drift.Action.REPAIR


@pytest.mark.parametrize(
    ("key", "tolerated", "expected"),
    [
        ("nvidia.com/gpu", (), 1),
        ("team", ("team",), 1),
        ("team", (), 0),
        ("node.kubernetes.io/unreachable", ("node.kubernetes.io/unreachable",), 0),
    ],
)
def test_a_taint_that_gpu_pods_tolerate_is_where_the_node_belongs(
    key: str, tolerated: tuple[str, ...], expected: int
) -> None:
    rig = faulty_node()
    rig.taints.add(key)
    rig.pods = {
        uid: dataclasses.replace(pod, tolerated=frozenset(tolerated)) if pod.gpu_resources else pod
        for uid, pod in rig.pods.items()
    }
    serve(rig)
    assert resets(rig) == expected


def test_a_budget_stops_the_repair_and_the_layout_stays_a_success() -> None:
    rig = faulty_node()
    rig.disruptions.refusals["affected"] = "budget 'pdb' allows no disruption"
    before = rig.gpus

    outcome = serve(rig)

    assert outcome.state is model.State.SUCCESS
    assert "The repair of GPU 0" in outcome.message
    assert "pdb" in outcome.message
    assert resets(rig) == 0
    assert rig.gpus == before
    assert rig.labels[well_known.STATE_LABEL] == "success"
    assert rig.labels[well_known.APPLIED_LABEL] == LAYOUT
    assert "GpuRepairFailed" in rig.events
    assert "another begins at" in message(rig)
    assert {"affected", "spared"} <= rig.pod_names
    scenes.assert_restored(rig)


@pytest.mark.parametrize("obstacle", ["lock", "kubelet", "API"])
def test_a_repair_that_could_not_begin_is_neither_failed_nor_delayed(obstacle: str) -> None:
    rig = faulty_node()
    lock = fakes.FakeExclusion()
    agent = agent_of(rig, lock=lock)
    outcome = scenes.run(rig, LAYOUT, by=agent)
    assert agent.check_drift(LAYOUT, outcome) is drift.Action.REPAIR
    lock.refusals = 1000 if obstacle == "lock" else 0
    rig.kubelet.is_silent = obstacle == "kubelet"
    rig.refusing = {"workloads.list": scenes.BROKEN["node"]} if obstacle == "API" else {}

    follows = agent.repair(LAYOUT, fakes.FakeRequest(rig.clock))

    assert follows is (obstacle != "lock")
    assert follows or rig.labels[well_known.STATE_LABEL] == "success"
    assert "GpuRepairFailed" not in rig.events
    assert {"affected", "spared"} <= rig.pod_names
    lock.refusals, rig.kubelet.is_silent = 0, False
    rig.refusing.clear()
    outcome = serve(rig, agent)
    assert outcome.state is model.State.SUCCESS
    assert resets(rig) == 1
    record = json.loads(rig.annotations[well_known.REQUEST_ANNOTATION])
    assert [each["attempts"] for each in record["repairs"]] == [1]


def test_a_reset_that_cures_nothing_is_tried_once_and_then_pauses_longer() -> None:
    rig = faulty_node()
    rig.resets.action_after = model.RecoveryAction.GPU_RESET
    agent = agent_of(rig)
    outcome = serve(rig, agent)
    assert resets(rig) == 1
    assert "still needs a reset" in message(rig)
    pauses_s = []
    for number in range(2, 5):
        began_s = rig.clock.now_s
        while agent.check_drift(LAYOUT, outcome) is drift.Action.REST:
            rig.clock.wait(300)
        pauses_s.append(rig.clock.now_s - began_s)
        outcome = scenes.run(rig, LAYOUT, by=agent)
        assert resets(rig) == number
    assert pauses_s[0] >= 600
    assert sorted(set(pauses_s)) == pauses_s
    assert rig.labels[well_known.STATE_LABEL] == "success"
    assert "spared" in rig.pod_names


def test_a_restart_does_not_shorten_the_pause() -> None:
    rig = faulty_node()
    rig.resets.action_after = model.RecoveryAction.GPU_RESET
    serve(rig)
    assert resets(rig) == 1

    serve(rig)
    assert resets(rig) == 1
    rig.clock.wait(1000)
    serve(rig)
    assert resets(rig) == 2


def test_a_clock_that_was_years_ahead_does_not_block_a_repair() -> None:
    rig = faulty_node()
    rig.resets.action_after = model.RecoveryAction.GPU_RESET
    rig.clock.now_s = 20 * 365 * DAY_S
    serve(rig)
    assert resets(rig) == 1

    rig.clock.now_s = 0.0
    serve(rig)
    assert resets(rig) == 2
    serve(rig)
    assert resets(rig) == 2


def test_a_second_fault_in_the_pause_waits_and_another_gpu_does_not() -> None:
    rig = faulty_node()
    agent = agent_of(rig)
    outcome = serve(rig, agent)
    assert resets(rig) == 1
    break_gpus(rig, 0, 1)

    assert agent.check_drift(LAYOUT, outcome) is drift.Action.REPAIR
    scenes.run(rig, LAYOUT, by=agent)

    assert [gpu.awaits_reset for gpu in rig.gpus] == [True, False]
    assert "GPU 0 (repair 1 has ended; another begins at" in message(rig)


def test_a_gpu_that_was_healthy_for_long_starts_with_the_first_pause() -> None:
    rig = faulty_node()
    agent = agent_of(rig)
    outcome = serve(rig, agent)
    rig.clock.wait(3 * DAY_S)
    break_gpus(rig, 0)
    assert agent.check_drift(LAYOUT, outcome) is drift.Action.REPAIR
    scenes.run(rig, LAYOUT, by=agent)
    record = json.loads(rig.annotations[well_known.REQUEST_ANNOTATION])
    assert [each["attempts"] for each in record["repairs"]] == [1]


def test_a_refused_reset_restores_the_instances_and_is_reported() -> None:
    rig = faulty_node()
    rig.resets.refusal = "GPU 0 can only be reset together with GPU 1"
    before = rig.gpus
    outcome = serve(rig)
    assert outcome.state is model.State.SUCCESS
    assert "only be reset together" in message(rig)
    assert gpu_values.geometry(rig.gpus) == gpu_values.geometry(before)
    scenes.assert_restored(rig)


def test_instances_that_the_fault_keeps_go_with_the_reset() -> None:
    rig = faulty_node()
    before = gpu_values.geometry(rig.gpus)

    def refuse(step: steps.Step) -> Exception | None:
        if isinstance(step, steps.DestroyComputeInstance | steps.DestroyGpuInstance):
            return errors.HardwareError("broken", reason=errors.Reason.NVML_ERROR)
        return None

    rig.driver.step_error = refuse
    serve(rig)
    assert resets(rig) == 1
    assert gpu_values.geometry(rig.gpus) == before


def test_a_gpu_that_is_lost_by_its_reset_leaves_the_others_serving() -> None:
    rig = faulty_node()
    uuid = rig.gpus[0].uuid

    def lose() -> None:
        if rig.log[-1] == "host.reset":
            rig.driver.lost.add(uuid)

    rig.on_call = lose
    outcome = serve(rig)
    assert outcome.state is model.State.SUCCESS
    assert [gpu.uuid for gpu in outcome.gpus.unreachable] == [uuid]
    assert "GpuRepairFailed" in rig.events
    assert "spared" in rig.pod_names
    scenes.assert_restored(rig)


def test_a_repair_never_reboots_the_node() -> None:
    rig = faulty_node()
    rig.host.may_reboot = True
    rig.resets.refusal = "no"
    serve(rig)
    assert rig.host.reboots == 0
    assert "spared" in rig.pod_names


def test_drift_on_another_gpu_is_not_healed_by_a_repair() -> None:
    rig = faulty_node()
    agent = agent_of(rig)
    outcome = scenes.run(rig, LAYOUT, by=agent)
    rig.gpus = (rig.gpus[0], dataclasses.replace(rig.gpus[1], gpu_instances=()))
    assert agent.check_drift(LAYOUT, outcome) is drift.Action.REST
    assert "the GPUs do not have the requested layout" in message(rig)


def test_a_node_without_a_request_only_reports() -> None:
    rig = faulty_node()
    agent = agent_of(rig)
    agent.rest()
    agent.check_faults()
    assert resets(rig) == 0
    assert "no layout is requested" in message(rig)


# -- beside a layout that is not active ----------------------------------------------------------


def request_other(
    rig: fakes.NodeRig, by: reconcile.Reconciler, *, attempt: int = 1
) -> outcomes.Outcome:
    return scenes.run(rig, OTHER, by=by, is_new=attempt == 1, attempt=attempt)


def test_a_layout_waits_for_the_repair_of_its_gpu_before_an_eviction() -> None:
    rig = faulty_node()
    agent = agent_of(rig)

    outcome = request_other(rig, agent)

    assert outcome.reason is errors.Reason.GPU_NEEDS_RESET
    assert outcome.should_retry
    assert outcome.message.endswith(f"To be reset by the agent: {rig.gpus[0]}.")
    assert {"affected", "spared"} <= rig.pod_names
    scenes.assert_restored(rig)
    assert rig.recovery_condition is not None
    assert rig.recovery_condition["reason"] == "GpuReset"
    outcome = request_other(rig, agent, attempt=2)
    assert outcome.state is model.State.SUCCESS
    assert resets(rig) == 1
    assert scenes.has_layout(rig, OTHER)
    scenes.assert_restored(rig)


def test_a_fault_during_a_change_is_repaired_before_the_next_attempt() -> None:
    rig = scenes.busy_node()
    rig.resets.are_available = True
    before = gpu_values.geometry(rig.gpus)

    def fail(step: steps.Step) -> Exception | None:
        if isinstance(step, steps.CreateGpuInstance) and not resets(rig):
            break_gpus(rig, 0)
        if rig.gpus[0].awaits_reset:
            return errors.HardwareError("broken", reason=errors.Reason.NVML_ERROR)
        return None

    rig.driver.step_error = fail
    agent = agent_of(rig)
    outcome = request_other(rig, agent)
    assert outcome.should_retry

    for attempt in range(2, 5):
        outcome = request_other(rig, agent, attempt=attempt)

    assert outcome.state is model.State.SUCCESS, outcome.message
    assert resets(rig) == 1
    assert scenes.has_layout(rig, OTHER)
    assert before != gpu_values.geometry(rig.gpus)
    scenes.assert_restored(rig)


def test_a_layout_evicts_no_pod_after_a_failed_repair() -> None:
    rig = faulty_node()
    rig.resets.refusal = "GPU 0 can only be reset together with GPU 1"
    agent = agent_of(rig)
    request_other(rig, agent)
    outcome = request_other(rig, agent, attempt=2)

    assert outcome.reason is errors.Reason.GPU_NEEDS_RESET
    assert "only be reset together" in message(rig)
    assert rig.labels[well_known.APPLIED_LABEL] == LAYOUT
    assert "spared" in rig.pod_names
    assert agent.check_drift(OTHER, outcome) is drift.Action.REST
    scenes.assert_restored(rig)

    rig.resets.refusal = ""
    rig.clock.wait(1000)
    assert agent.check_drift(OTHER, outcome) is drift.Action.REPAIR
    outcome = request_other(rig, agent, attempt=3)
    assert outcome.state is model.State.SUCCESS
    assert scenes.has_layout(rig, OTHER)


def test_a_failed_layout_runs_again_once_another_program_has_reset_the_gpu() -> None:
    rig = faulty_node()
    rig.is_unschedulable = True
    agent = agent_of(rig)
    outcome = request_other(rig, agent)
    assert (outcome.reason, outcome.should_retry) == (errors.Reason.GPU_NEEDS_RESET, False)
    assert {"affected", "spared"} <= rig.pod_names
    assert agent.check_drift(OTHER, outcome) is drift.Action.REST
    rig.gpus = gpu_values.with_action(rig.gpus, model.RecoveryAction.NONE, 0)
    assert agent.check_drift(OTHER, outcome) is drift.Action.RUN


def test_a_layout_without_the_faulty_gpu_is_applied() -> None:
    rig = faulty_node(1)
    outcome = scenes.run(rig, "one-slice-changed", by=agent_of(rig), is_new=True)
    assert outcome.state is model.State.SUCCESS
    assert resets(rig) == 0


def test_an_unknown_layout_does_not_keep_the_gpu_from_its_repair() -> None:
    rig = faulty_node()
    before = gpu_values.geometry(rig.gpus)
    agent = agent_of(rig)
    outcome = scenes.run(rig, "no-such-layout", by=agent, is_new=True)
    assert outcome.should_retry

    outcome = scenes.run(rig, "no-such-layout", by=agent)

    assert (outcome.reason, outcome.should_retry) == (errors.Reason.UNKNOWN_CONFIG, False)
    assert resets(rig) == 1
    assert gpu_values.geometry(rig.gpus) == before
    assert rig.labels[well_known.APPLIED_LABEL] == LAYOUT
    scenes.assert_restored(rig)


# -- strikes -------------------------------------------------------------------------------------


def test_another_request_supersedes_a_repair_which_then_begins_again() -> None:
    rig = faulty_node()
    agent = agent_of(rig)
    outcome = scenes.run(rig, LAYOUT, by=agent)
    assert agent.check_drift(LAYOUT, outcome) is drift.Action.REPAIR
    request = fakes.FakeRequest(rig.clock, replaced=True)
    request.ends_when = lambda: rig.has_hold_taint
    with pytest.raises(errors.Superseded):
        scenes.run(rig, LAYOUT, by=agent, request=request)
    assert resets(rig) == 0

    request_other(rig, agent)
    request_other(rig, agent, attempt=2)

    assert resets(rig) == 1
    assert scenes.has_layout(rig, OTHER)
    scenes.assert_restored(rig)


HALF = """
version: v1
mig-configs:
  half:
  - {{devices: [0], mig-enabled: true, mig-devices: {{{}}}}}
  - {{devices: [1], mig-enabled: false}}
"""


@pytest.mark.parametrize("cause", ["new agent", "new content", "drift"])
def test_a_repair_changes_no_gpu_whose_pods_it_has_not_drained(cause: str) -> None:
    rig = scenes.node()
    rig.resets.are_available = True
    configs = fakes.FakeConfig(HALF.format("1g.5gb: 2, 2g.10gb: 2"))
    agent = agent_of(rig, configs=configs)
    outcome = scenes.run(rig, "half", by=agent)
    rig.add_pod("elsewhere", devices=frozenset({scenes.device(rig, 0, "2g.10gb")}))
    rig.add_pod("affected", devices=frozenset({rig.gpus[1].uuid}))
    break_gpus(rig, 1)
    assert agent.check_drift("half", outcome) is drift.Action.REPAIR
    rig.disruptions.refusals["affected"] = "budget"
    request = fakes.FakeRequest(rig.clock, replaced=cause == "new content")
    request.ends_when = lambda: rig.clock.now_s > 8
    with pytest.raises(errors.Superseded):
        scenes.run(rig, "half", by=agent, request=request)
    rig.disruptions.refusals.clear()
    if cause == "drift":
        wanted = model.DesiredGpu.of(model.MigMode.ENABLED, {profile_name.parse("2g.10gb"): 3})
        rig.gpus = (*gpu_values.brought_to(rig.gpus[:1], wanted), *rig.gpus[1:])
        rig.add_pod("late", devices=frozenset(rig.gpus[0].mig_uuids))
    else:
        configs.text = HALF.format("1g.5gb: 7")
    if cause != "new content":
        agent.stop()
        agent = agent_of(rig, configs=configs)
        agent.recover("half")

    scenes.run(rig, "half", by=agent)

    assert "GpuRepairFailed" not in rig.events
    assert resets(rig) == 1
    present = {*rig.gpus[0].mig_uuids, *(gpu.uuid for gpu in rig.gpus)}
    assert all(devices <= present for devices in rig.kubelet.assigned.values())


def test_a_repair_takes_a_slot_as_other_changes_do() -> None:
    rig = faulty_node()
    calls: list[str] = []

    class Slots(ports.Slots):
        def take(self) -> slots.Denial | None:
            calls.append("take")
            return None if len(calls) > 2 else slots.Denial(limit=1, changing=("node-b",))

        def check(self) -> None: ...

        def release(self) -> None:
            calls.append("release")

    rig.slots = Slots()
    agent = agent_of(rig)
    outcome = scenes.run(rig, LAYOUT, by=agent)
    assert agent.check_drift(LAYOUT, outcome) is drift.Action.REPAIR
    calls.clear()
    scenes.run(rig, LAYOUT, by=agent)
    assert calls == ["take", "take", "take", "release", "release"]
    assert resets(rig) == 1


def test_a_killed_repair_is_finished_by_the_next_agent() -> None:
    for _index, rig, before in scenes.kills(faulty_node, serve):
        rig.clock.wait(5)
        outcome = serve(rig)
        assert outcome.state is model.State.SUCCESS
        assert resets(rig) in (1, 2)
        assert not any(gpu.needs_recovery for gpu in rig.gpus)
        assert gpu_values.geometry(rig.gpus) == gpu_values.geometry(before)
        assert "spared" in rig.pod_names
        scenes.assert_restored(rig)


@pytest.mark.parametrize("pods_at_kill", [{"affected", "spared"}, {"spared"}])
def test_a_resumed_repair_has_failed_only_if_a_pod_was_evicted(pods_at_kill: set[str]) -> None:
    rig = faulty_node()
    others = rig.pod_names - {"affected", "spared"}

    def kill() -> None:
        if rig.has_hold_taint and rig.pod_names - others == pods_at_kill:
            raise scenes.Killed

    rig.on_call = kill
    with pytest.raises(scenes.Killed):
        serve(rig)
    rig.on_call = lambda: None
    rig.kubelet.is_silent = True
    serve(rig)

    was_evicted = "affected" not in pods_at_kill
    assert ("GpuRepairFailed" in rig.events) is was_evicted
    rig.kubelet.is_silent = False
    serve(rig)
    assert resets(rig) == (0 if was_evicted else 1)


def test_a_repair_evicts_whatever_the_origin_of_the_layout() -> None:
    rig = custom_requests.idle_node()
    rig.resets.are_available = True
    agent = agent_of(rig, limits=RESET | custom_requests.ON)
    on_demand = custom_requests.requested(custom_requests.BALANCED, is_on_demand=True)
    outcome = custom_requests.run(rig, on_demand, by=agent)
    rig.add_pod("affected", devices=frozenset({scenes.device(rig, 0, "1g.5gb")}))
    break_gpus(rig, 0)

    assert agent.check_drift("custom", outcome, on_demand) is drift.Action.REPAIR
    outcome = custom_requests.run(rig, on_demand, by=agent)

    assert outcome.state is model.State.SUCCESS
    assert resets(rig) == 1
    assert "affected" not in rig.pod_names
    record = json.loads(rig.annotations[well_known.REQUEST_ANNOTATION])
    assert record["mayEvict"] is False


def test_a_killed_repair_is_undone_where_the_label_was_removed() -> None:
    for _index, rig, before in scenes.kills(faulty_node, serve):
        rig.clock.wait(5)
        scenes.undo(rig)
        assert gpu_values.geometry(rig.gpus) == gpu_values.geometry(before)
        assert not rig.has_hold_taint
        assert well_known.JOURNAL_ANNOTATION not in rig.annotations


def test_a_killed_repair_is_undone_for_another_request() -> None:
    for _index, rig, _before in scenes.kills(faulty_node, serve):
        rig.clock.wait(5)
        agent = agent_of(rig)
        agent.recover(OTHER)
        outcome = request_other(rig, agent)
        if outcome.reason is errors.Reason.GPU_NEEDS_RESET:
            outcome = request_other(rig, agent, attempt=2)
        assert outcome.state is model.State.SUCCESS, outcome.message
        assert resets(rig) in (1, 2)
        assert scenes.has_layout(rig, OTHER)
        scenes.assert_restored(rig)


# -- the real agent process ----------------------------------------------------------------------


class RepairStage(agent_stage.Stage):
    """An agent with the library of a real driver, and ``nvidia-smi``."""

    def __init__(self, folder: pathlib.Path) -> None:
        super().__init__("2xA30", "--repair", "reset", "--watch-gpu-events", has_library=True)
        self._folder = folder

    def wait_for_repair(self) -> None:
        """Wait for the good end of the one repair, and for an open node."""

        def ends() -> list[dict[str, Any]]:
            return [line for line in self.lines() if line["event"] == "gpu_repair_ended"]

        self.wait(lambda: bool(ends()), "the end of the repair", timeout_s=120)
        assert [line["error"] for line in ends()] == [None]
        self.wait(lambda: not self.remaining(), "an open node")

    def start_agent(self) -> None:
        nvidia_smi.install(self._folder, self.state_file)
        super().start_agent()


@pytest.fixture
def stage(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RepairStage]:
    for name, value in library.environ(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    with RepairStage(tmp_path / "bin") as started:
        yield started


def test_an_xid_starts_a_repair_that_returns_the_devices(stage: RepairStage) -> None:
    state = nvml_faults.SharedState(stage.state_file)
    stage.assert_ends("all-1g.6gb")
    allocatable = stage.allocatable()

    stage.wait_for_listener()
    before = [[gpu.placement for gpu in each.instances] for each in state.read().gpus]
    untouched = {each.serial for each in state.read().gpus[0].instances}
    state.fail_gpu(1, action=1, xid=79)

    stage.wait_for_repair()
    stage.wait(lambda: stage.allocatable() == allocatable, "all devices")
    after = state.read().gpus
    assert [[gpu.placement for gpu in each.instances] for each in after] == before
    assert {each.serial for each in after[0].instances} == untouched
    assert [each.recovery_action for each in after] == [0, 0]


@pytest.fixture
def host(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[systemd_rig.StandIn]:
    """A stand-in for systemd, as the settings file of the agent's unit names it."""
    listed = tmp_path / "clients.yaml"
    listed.write_text(f"version: v1\nsystemd-services: [{systemd_rig.NVSM}]\n", encoding="utf-8")
    monkeypatch.setenv("WITH_SHUTDOWN_HOST_GPU_CLIENTS", "true")
    monkeypatch.setenv("GPU_CLIENTS_FILE", str(listed))
    units = {systemd_rig.NVSM: systemd_rig.Unit()}
    with systemd_rig.a_bus(tmp_path) as bus, systemd_rig.standing_in(bus, units) as standing_in:
        monkeypatch.setenv("DBUS_SYSTEM_BUS_ADDRESS", bus.address)
        yield standing_in


def test_an_agent_of_the_host_stops_and_starts_the_services_that_use_the_gpu(
    host: systemd_rig.StandIn, stage: RepairStage
) -> None:
    state = nvml_faults.SharedState(stage.state_file)
    stage.assert_ends("all-1g.6gb")
    stage.run_pods([(f"pod-{n}", "nvidia.com/mig-1g.6gb", {}) for n in range(8)])
    gpus, before = stage.gpus.observe(), stage.devices_by_pod()
    monitors = [
        state.add_client(gpu.uuid, name="nvsm", kind=states.ClientKind.MONITOR) for gpu in gpus
    ]

    def follow(method: str) -> None:
        while method == "StopUnit" and monitors:
            state.remove_client(monitors.pop())

    host.calls.clear()
    host.on_call = follow
    stage.wait_for_listener()
    state.fail_gpu(1, action=1, xid=95)

    stage.wait_for_repair()

    assert [call.split()[:2] for call in host.calls] == [
        ["StopUnit", systemd_rig.NVSM],
        ["StartUnit", systemd_rig.NVSM],
    ]
    assert host.units[systemd_rig.NVSM].state == "active"
    stage.wait(lambda: stage.allocatable() == {"nvidia.com/mig-1g.6gb": 8}, "all devices")
    assert [gpu.snapshot for gpu in stage.gpus.observe()] == [gpu.snapshot for gpu in gpus]
    kept = {name for name, ids in before.items() if ids and ids <= {*gpus[0].mig_uuids}}
    after = stage.devices_by_pod()
    assert kept == stage.workloads().keys()
    assert len(kept) == 4
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept}
