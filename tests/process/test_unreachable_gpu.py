"""The real agent on a node of eight GPUs that loses one, and gets it back."""

import json
from collections.abc import Mapping

import pytest

from mig_manager.core.objects import well_known
from mig_manager.sandbox.node import objects
from testkit import nvml_faults
from tests.rigs.driver.eight_gpus import LAYOUTS, LOST, SPEC
from tests.rigs.stage import agent_stage


def instances(state: nvml_faults.SharedState) -> list[int]:
    return [len(gpu.instances) for gpu in state.read().gpus]


def event_reasons(stage: agent_stage.AgentStage) -> Mapping[str, str]:
    """Return the last message of the node's Events by reason."""
    return {
        str(each["reason"]): str(each["message"])
        for each in stage.api.get("/api/v1/namespaces/default/events")["items"]
    }


def assert_published(stage: agent_stage.ObservedStage, uuid: str) -> None:
    """Check that status, inventory, metric and Event name the lost GPU."""
    assert f"GPU {LOST} ({uuid}" in stage.status()["message"]
    assert [gpu["uuid"] for gpu in stage.status()["unreachableGpus"]] == [uuid]
    inventory = json.loads(objects.annotations(stage.node())[well_known.GPUS_ANNOTATION])
    assert [gpu["index"] for gpu in inventory["unreachable"]] == [LOST]
    stage.wait(
        lambda: stage.series("unreachable_gpu") == {f"{LOST},GpuLost,{uuid}": 1.0},
        "the metric",
    )
    stage.wait(lambda: "GpuUnreachable" in event_reasons(stage), "the Event")
    assert uuid in event_reasons(stage)["GpuUnreachable"]


@pytest.mark.slow
def test_agent_serves_the_others_and_a_returned_gpu() -> None:
    with agent_stage.ObservedStage(SPEC, text=LAYOUTS) as stage:
        state = nvml_faults.SharedState(stage.machine.state_file)
        stage.apply_layout("halves")

        # Lost at rest: the agent observes again, and then serves another layout without it.
        state.lose_gpu(LOST)
        stage.apply_layout("sevenths")
        assert instances(state) == [7, 7, 7, 2, 7, 7, 7, 7]
        assert stage.allocatable() == {"nvidia.com/mig-1g.5gb": 49}
        assert_published(stage, state.boards[LOST].uuid)

        # A layout that names it fails, before anything is touched.
        assert stage.fail_to_apply("names-it")["reason"] == "GpuUnreachable"
        assert instances(state) == [7, 7, 7, 2, 7, 7, 7, 7]

        stage.apply_layout("sevenths")

        # Back from the shop, without MIG mode: the layout is applied to it.
        state.return_gpu(LOST, keeps_mode=False)
        stage.wait(
            lambda: stage.allocatable() == {"nvidia.com/mig-1g.5gb": 56}, "the GPU's devices"
        )
        stage.wait(lambda: "unreachableGpus" not in stage.status(), "a status without it")
        stage.wait(lambda: stage.series("unreachable_gpu") == {}, "no metric")
        stage.wait(lambda: stage.status()["state"] == "success", "the end")
        assert instances(state) == [7] * 8
