"""What the agent publishes about the use of the node's instances, after runs and at rest."""

import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any

import pytest

from mig_manager import errors, reasons
from mig_manager.agent.drift import actions
from mig_manager.core import gpu_processes, model
from mig_manager.core.objects import well_known
from tests.rigs import layout_table
from tests.rigs.node import agents, ends, fakes, gpu_values, node_rig, nodes

GPU_0 = 0


@pytest.fixture
def rig() -> node_rig.NodeRig:
    """A node with ``all-balanced``: pods use slices 0-1 of the first GPU, 4-7 of the second."""
    return nodes.busy_node()


def published_use(rig: node_rig.NodeRig) -> list[list[list[int]]]:
    """Return the published spans in use, GPU by GPU."""
    data = json.loads(rig.node_object.annotations[well_known.CAPACITY_ANNOTATION])
    return [gpu["inUse"] for gpu in data["gpus"]]


def on_demand(rig: node_rig.NodeRig, **overrides: Any) -> agents.AgentInMemory:
    """Return the agent of a node with on-demand partitioning that has just started."""
    agent = agents.new_agent(rig, **overrides)
    agents.run(rig, "all-balanced", by=agent)
    agent.capacity.follow(is_on_demand=True, has_changed=False)
    return agent


def catch_up(rig: node_rig.NodeRig, agent: agents.AgentInMemory, most: int = 10) -> list[float]:
    """Wait and observe as the loop does, until nothing is left to do; return the pauses."""
    pauses: list[float] = []
    while math.isfinite(agent.capacity.next_in_s) and len(pauses) < most:
        pauses.append(round(agent.capacity.next_in_s, 2))
        rig.clock.wait(agent.capacity.next_in_s)
        if not agent.capacity.next_in_s:
            agent.capacity.refresh()
    return pauses


def first_check(
    rig: node_rig.NodeRig, agent: agents.AgentInMemory, layout: str | None
) -> Callable[[], object]:
    """Serve a node with a request or without one; return what checks its GPUs at rest."""
    if layout is None:
        agent.restore_without_request()
        return agent.check_without_request
    outcome = agents.run(rig, layout, by=agent)
    return lambda: agent.check_drift(layout, outcome)


def use_changed(agent: agents.AgentInMemory) -> None:
    agent.capacity.follow(is_on_demand=True, has_changed=True)


def patches(rig: node_rig.NodeRig) -> int:
    return rig.log.count("node.patch")


def test_run_publishes_use_and_room_in_its_last_patch(rig: node_rig.NodeRig) -> None:
    telemetry = fakes.FakeTelemetry()

    agents.run(rig, "all-balanced", by=agents.new_agent(rig, telemetry=telemetry))

    first, second = json.loads(rig.node_object.annotations[well_known.CAPACITY_ANNOTATION])["gpus"]
    assert first["inUse"] == [[0, 2]]
    assert second["inUse"] == [[4, 4]]
    assert first["room"]["3g.20gb"] == 1
    assert second["free"] == 4
    _, in_use = telemetry.events["use_observed"][-1]
    assert in_use[first["uuid"]] == {model.Placement(0, 2)}
    assert patches(rig) == 1


def test_the_use_after_a_change_is_of_the_new_instances(rig: node_rig.NodeRig) -> None:
    agents.run(rig, "one-slice-changed")

    assert published_use(rig) == [[], [[4, 4]]]


def test_a_node_without_a_request_publishes_the_use_once(rig: node_rig.NodeRig) -> None:
    for _ in range(2):
        rig.clock.wait(5)
        assert not agents.new_agent(rig).restore_without_request()

    assert published_use(rig) == [[[0, 2]], [[4, 4]]]
    assert patches(rig) == 1


def test_nothing_happens_at_rest_on_a_node_without_on_demand_partitioning(
    rig: node_rig.NodeRig,
) -> None:
    watch = fakes.FakePodWatch()
    agent = agents.new_agent(rig, pod_watch=watch)
    agents.run(rig, "all-balanced", by=agent)

    agent.capacity.follow(is_on_demand=False, has_changed=True)

    assert math.isinf(agent.capacity.next_in_s)
    assert not watch.is_kept


def test_use_that_returns_after_a_lost_answer_is_published_again(rig: node_rig.NodeRig) -> None:
    agent = on_demand(rig)
    catch_up(rig, agent)
    before = published_use(rig)
    lost = errors.ClusterError("lost", reason=reasons.Reason.API_ERROR)
    rig.lost_answers.add("node.patch", lost)
    new = rig.pods.add("new", devices=frozenset({nodes.device(rig, GPU_0, "3g.20gb")}))
    use_changed(agent)
    rig.clock.wait(agent.capacity.next_in_s)
    agent.capacity.refresh()
    assert published_use(rig) != before

    rig.lost_answers.clear()
    rig.pods.remove(new)
    use_changed(agent)
    catch_up(rig, agent)

    assert published_use(rig) == before


def test_change_of_use_at_rest_is_published_in_one_patch(rig: node_rig.NodeRig) -> None:
    agent = on_demand(rig)
    catch_up(rig, agent)
    rig.log.clear()
    rig.pods.add("new", devices=frozenset({nodes.device(rig, GPU_0, "3g.20gb")}))

    use_changed(agent)
    rig.clock.wait(0.5)
    use_changed(agent)

    assert catch_up(rig, agent) == [1.0]
    assert published_use(rig) == [[[0, 2], [4, 4]], [[4, 4]]]
    assert patches(rig) == 1
    assert "gpus.observe" not in rig.log


def test_gpus_that_another_manager_changes_are_published_later(rig: node_rig.NodeRig) -> None:
    lock = fakes.FakeLock(refusals=10**9)
    agent = on_demand(rig, lock=lock)
    rig.node_object.annotations.clear()

    catch_up(rig, agent, most=3)
    assert well_known.CAPACITY_ANNOTATION not in rig.node_object.annotations
    lock.refusals = 0
    catch_up(rig, agent)

    assert published_use(rig) == [[[0, 2]], [[4, 4]]]


def test_use_that_keeps_changing_is_published_after_a_while(rig: node_rig.NodeRig) -> None:
    agent = on_demand(rig)
    catch_up(rig, agent)
    for _ in range(9):
        use_changed(agent)
        rig.clock.wait(0.6)

    assert agent.capacity.next_in_s == 0


def test_an_unchanged_use_is_not_written_again(rig: node_rig.NodeRig) -> None:
    agent = on_demand(rig)
    catch_up(rig, agent)
    rig.log.clear()

    use_changed(agent)

    assert catch_up(rig, agent) == [1.0]
    assert "allocations.assigned_devices" in rig.log
    assert patches(rig) == 0


def test_the_watch_of_the_pods_comes_and_goes_with_the_label(rig: node_rig.NodeRig) -> None:
    watch = fakes.FakePodWatch()
    agent = on_demand(rig, pod_watch=watch)
    assert watch.is_kept
    assert catch_up(rig, agent) == [1.0]
    use_changed(agent)

    agent.capacity.follow(is_on_demand=False, has_changed=True)

    assert not watch.is_kept
    assert math.isinf(agent.capacity.next_in_s)


@pytest.mark.parametrize("call", ["allocations.assigned_devices", "workloads.list", "node.patch"])
def test_failed_observation_is_retried_with_backoff(rig: node_rig.NodeRig, call: str) -> None:
    agent = on_demand(rig)
    catch_up(rig, agent)
    rig.pods.add("new", devices=frozenset({nodes.device(rig, GPU_0, "3g.20gb")}))
    rig.failures.add(call, errors.ClusterError("no", reason=reasons.Reason.API_UNAVAILABLE))

    use_changed(agent)

    assert catch_up(rig, agent, most=9) == [1.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert published_use(rig) == [[[0, 2]], [[4, 4]]]
    rig.failures.clear()
    catch_up(rig, agent)
    assert published_use(rig) == [[[0, 2], [4, 4]], [[4, 4]]]


def test_failed_observation_is_not_retried_once_the_label_is_gone(rig: node_rig.NodeRig) -> None:
    agent = on_demand(rig)
    rig.failures.add(
        "workloads.list", errors.ClusterError("no", reason=reasons.Reason.API_UNAVAILABLE)
    )
    assert catch_up(rig, agent, most=2) == [1.0, 1.0]

    agent.capacity.follow(is_on_demand=False, has_changed=False)

    assert math.isinf(agent.capacity.next_in_s)


@pytest.mark.slow
def test_a_bug_in_an_observation_does_not_end_the_agent(rig: node_rig.NodeRig) -> None:
    agent = on_demand(rig)
    rig.failures.add("allocations.assigned_devices", KeyError("bug"))

    assert catch_up(rig, agent, most=2) == [1.0, 1.0]


@pytest.mark.slow
def test_a_bug_in_an_observation_fails_no_run(rig: node_rig.NodeRig) -> None:
    def list_processes() -> dict[str, tuple[gpu_processes.GpuProcess, ...]]:
        raise KeyError("bug")

    agent = on_demand(rig, processes=list_processes)

    ends.run_to(rig, "all-balanced", reasons.Reason.ALREADY_APPLIED, by=agent)
    assert well_known.CAPACITY_ANNOTATION not in rig.node_object.annotations


def test_processes_are_listed_only_on_demand_and_until_they_end(rig: node_rig.NodeRig) -> None:
    gpu = rig.gpus[0]
    (small, *_) = (gi for gi in gpu.gpu_instances if str(gi.profile) == "1g.5gb")
    user = gpu_processes.GpuProcess(pid=7, name="a", owner="", gpu_instances=(small.instance_id,))
    processes: dict[str, tuple[gpu_processes.GpuProcess, ...]] = {
        each.uuid: () for each in rig.gpus
    }
    processes[gpu.uuid] = (user,)
    listings: list[bool] = []

    def list_processes() -> dict[str, tuple[gpu_processes.GpuProcess, ...]]:
        listings.append(True)
        return processes

    agent = agents.new_agent(rig, processes=list_processes)
    agents.run(rig, "all-balanced", by=agent)
    assert not listings
    agent.capacity.follow(is_on_demand=True, has_changed=False)

    assert catch_up(rig, agent, most=3) == [1.0, 1.0, 2.0]
    start, size = small.placement.start, small.placement.size
    assert [start, size] in published_use(rig)[0]
    processes[gpu.uuid] = ()
    assert catch_up(rig, agent) == [4.0]
    assert published_use(rig)[0] == [[0, 2]]


def test_unknown_use_after_a_run_is_removed_and_observed_on_demand(rig: node_rig.NodeRig) -> None:
    agent = on_demand(rig)
    catch_up(rig, agent)
    rig.kubelet.is_silent = True

    agents.run(rig, "all-balanced", by=agent)

    assert well_known.CAPACITY_ANNOTATION not in rig.node_object.annotations
    rig.kubelet.is_silent = False
    catch_up(rig, agent)
    assert published_use(rig) == [[[0, 2]], [[4, 4]]]


def test_drift_is_published_with_the_use_of_its_instances(rig: node_rig.NodeRig) -> None:
    agent = agents.new_agent(rig)
    outcome = agents.run(rig, "all-balanced", by=agent)
    agent.capacity.follow(is_on_demand=True, has_changed=False)
    catch_up(rig, agent)
    first = rig.gpus[0]
    kept = tuple(gi for gi in first.gpu_instances if str(gi.profile) != "3g.20gb")
    rig.gpus = (dataclasses.replace(first, gpu_instances=kept), *rig.gpus[1:])

    agent.check_drift("all-balanced", outcome)
    catch_up(rig, agent)

    assert len(rig.node_object.published_gpus[0].gpu_instances) == len(kept)
    assert published_use(rig) == [[[0, 2]], [[4, 4]]]


@pytest.mark.parametrize("layout", [None, "first", "all-balanced"])
def test_gpus_changed_at_rest_are_published_with_their_use(
    rig: node_rig.NodeRig, layout: str | None
) -> None:
    first = layout_table.rule_line("[0]", layout_table.counts_of("all-balanced"))
    agent = agents.new_agent(rig, layouts=f"{agents.LAYOUTS_TEXT}  first:\n{first}\n")
    check = first_check(rig, agent, layout)
    backup = dict(rig.node_object.annotations)
    rig.gpus = gpu_values.without_instances(rig.gpus, 1)
    rig.register_devices()
    rig.pods.remove(rig.pods.uid_of("spared"))
    assert check() is actions.Action.REST
    before = patches(rig)
    check()

    assert patches(rig) == before
    # Another program restores the Node.
    for key in (well_known.GPUS_ANNOTATION, well_known.CAPACITY_ANNOTATION):
        rig.node_object.annotations[key] = backup[key]
    check()
    assert gpu_values.geometry(rig.node_object.published_gpus) == gpu_values.geometry(rig.gpus)
    assert published_use(rig) == [[[0, 2]], []]


@pytest.mark.parametrize("layout", [None, "all-balanced"])
def test_gpus_that_cannot_be_observed_are_not_shown(
    rig: node_rig.NodeRig, layout: str | None
) -> None:
    agent = agents.new_agent(rig)
    check_gpus = first_check(rig, agent, layout)
    agent.capacity.follow(is_on_demand=True, has_changed=False)
    catch_up(rig, agent)
    keys = (well_known.GPUS_ANNOTATION, well_known.CAPACITY_ANNOTATION)
    before = {key: rig.node_object.annotations[key] for key in keys}

    def check() -> None:
        check_gpus()
        use_changed(agent)
        catch_up(rig, agent)

    rig.failures.add("gpus.observe", errors.HardwareError("lost", reason=reasons.Reason.GPU_LOST))
    for _ in range(2):
        check()
        assert not rig.node_object.annotations.keys() & set(keys)

    rig.failures.remove("gpus.observe")
    check()
    assert rig.node_object.annotations[keys[0]] == before[keys[0]]
    assert published_use(rig) == [[[0, 2]], [[4, 4]]]


def test_gpus_and_use_are_shown_again_soon_after_a_check_that_failed_once(
    rig: node_rig.NodeRig,
) -> None:
    agent = agents.new_agent(rig)
    outcome = agents.run(rig, "all-balanced", by=agent)
    agent.capacity.follow(is_on_demand=True, has_changed=False)
    catch_up(rig, agent)
    rig.failures.add(
        "gpus.observe", errors.HardwareError("hung", reason=reasons.Reason.NVML_TIMEOUT)
    )
    agent.check_drift("all-balanced", outcome)
    rig.failures.remove("gpus.observe")
    assert well_known.GPUS_ANNOTATION not in rig.node_object.annotations

    catch_up(rig, agent)

    assert well_known.GPUS_ANNOTATION in rig.node_object.annotations
    assert published_use(rig) == [[[0, 2]], [[4, 4]]]


def test_a_run_that_can_observe_no_gpu_publishes_none(rig: node_rig.NodeRig) -> None:
    agent = on_demand(rig)
    rig.failures.add("gpus.observe", errors.HardwareError("lost", reason=reasons.Reason.GPU_LOST))

    ends.run_to(rig, "all-1g.5gb", reasons.Reason.GPU_LOST, by=agent)
    assert not rig.node_object.annotations.keys() & {
        well_known.GPUS_ANNOTATION,
        well_known.CAPACITY_ANNOTATION,
    }


def test_new_agent_observes_the_gpus_for_its_first_report(rig: node_rig.NodeRig) -> None:
    rig.node_object.annotations.clear()
    agent = agents.new_agent(rig)

    agent.capacity.follow(is_on_demand=True, has_changed=False)
    catch_up(rig, agent)

    assert rig.log.count("gpus.observe") == 1
    assert {well_known.CAPACITY_ANNOTATION, well_known.GPUS_ANNOTATION} == set(
        rig.node_object.annotations
    )
    assert patches(rig) == 1


def test_a_node_that_is_registered_again_gets_everything_again(rig: node_rig.NodeRig) -> None:
    agent = on_demand(rig)
    catch_up(rig, agent)
    before = dict(rig.node_object.annotations)
    rig.node_object.annotations.clear()

    agent.forget_node()
    catch_up(rig, agent)

    for key in (well_known.CAPACITY_ANNOTATION, well_known.GPUS_ANNOTATION):
        assert (
            json.loads(rig.node_object.annotations[key])["gpus"] == json.loads(before[key])["gpus"]
        )


def test_an_attempt_that_is_retried_observes_no_use(rig: node_rig.NodeRig) -> None:
    del rig.node_object.annotations[well_known.CAPACITY_ANNOTATION]
    rig.disruptions.refusals["affected"] = "budget 'pdb-a' allows no disruption"

    assert agents.run(rig, "one-slice-changed").should_retry
    assert well_known.CAPACITY_ANNOTATION not in rig.node_object.annotations
