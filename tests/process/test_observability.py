"""What the real agent process reports, during a run and after it."""

from collections.abc import Iterator

import pytest

from mig_manager.core import model
from tests.kit import lost_stderr
from tests.node.applying_rig import LAYOUTS_TEXT
from tests.stage import agent_stage

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
    assert stage.wait_for_end(LAYOUT) is model.State.SUCCESS
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
    assert stage.wait_for_end(LAYOUT) is model.State.SUCCESS
    stage.wait(lambda: stage.series("state")["success"] == 1, "the state's metric")

    assert stage.series("runs_total")["Applied,success"] == 1
    assert stage.series("instances") == {"1g.5gb": 7}
    assert stage.series("evictions_total") == {"": 1}
    assert [key.partition(",")[2] for key in stage.series("layout_info")] == [LAYOUT]
    assert stage.series("gpu_operation_duration_seconds_count")["execute,ok"] == 1
    assert stage.series("nvml_calls_total")["nvmlDeviceCreateGpuInstanceWithPlacement"] == 7
    assert stage.series("api_contact_age_seconds")[""] < 60


@pytest.mark.slow
def test_all_lines_of_an_attempt_have_its_id_and_each_attempt_has_another(
    stage: agent_stage.ObservedStage,
) -> None:
    # Whatever fails is tried again: what looks like NVML's state file no longer is one.
    good = stage.machine.state_file.read_bytes()
    stage.machine.state_file.write_bytes(b"{}")
    stage.label(LAYOUT)
    # Not what is tried again: the look at a node without a label may be as well.
    failed = "Internal,failed"
    stage.wait(lambda: stage.series("runs_total").get(failed, 0) >= 2, "two failures")
    stage.machine.state_file.write_bytes(good)
    assert stage.wait_for_end(LAYOUT) is not model.State.PENDING
    stage.wait(lambda: stage.status().get("state") == "success", "success")

    assert stage.stop_agent() == 0

    lines = stage.lines()
    ends = [line for line in lines if line["event"] == "run_finished"]
    assert len({line["attempt_id"] for line in ends}) == len(ends) >= 3
    for end in ends[:-1]:
        events = {line["event"] for line in lines if line.get("attempt_id") == end["attempt_id"]}
        assert {"gpu_worker_stderr", "run_finished", "retry_scheduled"} <= events
    assert all("attempt_id" in line for line in lines if line["event"] == "phase_entered")
    assert not [
        line["event"]
        for line in lines
        if "attempt_id" in line and line["event"].startswith(("agent_", "node_watch"))
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "way", ["stalled-reader", pytest.param("full-disk", marks=pytest.mark.slow)]
)
def test_agent_whose_log_lines_are_lost_serves_its_node(way: str) -> None:
    with (
        lost_stderr.WAYS[way]() as stderr,
        agent_stage.AgentStage(
            "1xA100-SXM4-40GB", "--log-level", "debug", text=LAYOUTS_TEXT, stderr=stderr
        ) as rig,
    ):
        rig.assert_ends("wanted")
        assert rig.stop_agent() == 0
