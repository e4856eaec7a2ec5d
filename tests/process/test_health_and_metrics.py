"""What the real agent process serves over HTTP, during a run and after it: health and metrics."""

from collections.abc import Iterator

import pytest

from mig_manager.core.records import run_status
from tests.rigs.stage import agent_stage

LAYOUT = "all-1g.5gb"


@pytest.fixture
def stage() -> Iterator[agent_stage.ObservedStage]:
    with agent_stage.ObservedStage("1xA100-SXM4-40GB") as stage:
        yield stage


def start_drain(stage: agent_stage.ObservedStage) -> None:
    """Request a layout whose drain waits for the budget of a pod."""
    stage.run_pods([("train", "nvidia.com/gpu", {"app": "train"})])
    stage.guard({"matchLabels": {"app": "train"}})
    stage.label(LAYOUT)
    stage.wait(lambda: stage.status().get("phase") == "Drain", "the drain")


@pytest.mark.slow
def test_probes_succeed_before_during_and_after_a_run(stage: agent_stage.ObservedStage) -> None:
    assert stage.ask("/healthz") == (200, "ok\n")
    start_drain(stage)
    assert stage.ask("/healthz")[0] == stage.ask("/readyz")[0] == 200
    stage.unguard()
    assert stage.wait_for_end(LAYOUT) is run_status.State.SUCCESS
    assert stage.ask("/healthz") == stage.ask("/readyz") == (200, "ok\n")


@pytest.mark.slow
def test_metrics_follow_a_run(stage: agent_stage.ObservedStage) -> None:
    assert set(stage.series("state").values()) == {0.0}

    start_drain(stage)

    stage.wait(lambda: stage.series("state")["pending"] == 1, "the state's metric")
    assert stage.series("attempt") == {"": 1}
    assert "Resolve" in stage.series("phase_duration_seconds_count")


@pytest.mark.slow
def test_metrics_sum_up_a_finished_run(stage: agent_stage.ObservedStage) -> None:
    start_drain(stage)
    stage.unguard()
    assert stage.wait_for_end(LAYOUT) is run_status.State.SUCCESS
    stage.wait(lambda: stage.series("state")["success"] == 1, "the state's metric")

    assert stage.series("runs_total")["Applied,success"] == 1
    assert stage.series("instances") == {"1g.5gb": 7}
    assert stage.series("evictions_total") == {"": 1}
    assert [key.partition(",")[2] for key in stage.series("layout_info")] == [LAYOUT]
    assert stage.series("gpu_operation_duration_seconds_count")["execute,ok"] == 1
    assert stage.series("nvml_calls_total")["nvmlDeviceCreateGpuInstanceWithPlacement"] == 7
    assert stage.series("api_contact_age_seconds")[""] < 60
