"""What the real agent process reports, during a run and after it."""

from collections.abc import Iterator

import pytest

from mig_manager.core import model
from tests.stage import agent_stage, observed_agent

LAYOUT = "all-1g.5gb"


@pytest.fixture
def observed() -> Iterator[observed_agent.Observed]:
    port = observed_agent.free_port()
    with agent_stage.Stage(
        "1xA100-SXM4-40GB", "--health-address", "127.0.0.1", "--health-port", str(port)
    ) as stage:
        observed = observed_agent.Observed(stage, port)
        stage.wait(lambda: observed.ask("/readyz")[0] == 200, "a ready agent")
        yield observed


def test_metrics_follow_a_run_and_sum_it_up(observed: observed_agent.Observed) -> None:
    stage = observed.stage
    assert observed.ask("/healthz") == (200, "ok\n")
    assert set(observed.series("state").values()) == {0.0}
    stage.run_pods([("train", "nvidia.com/gpu", {"app": "train"})])
    stage.api.post(
        "/apis/policy/v1/namespaces/default/poddisruptionbudgets",
        {
            "metadata": {"name": "guard"},
            "spec": {"maxUnavailable": 0, "selector": {"matchLabels": {"app": "train"}}},
        },
    )
    stage.label(LAYOUT)
    stage.wait(lambda: stage.status().get("phase") == "Drain", "the drain")

    stage.wait(lambda: observed.series("state")["pending"] == 1, "the state's metric")
    assert observed.series("attempt") == {"": 1}
    assert "Resolve" in observed.series("phase_duration_seconds_count")
    assert observed.ask("/healthz")[0] == observed.ask("/readyz")[0] == 200

    stage.api.delete("/apis/policy/v1/namespaces/default/poddisruptionbudgets/guard", {})
    assert stage.wait_for_end(LAYOUT) is model.State.SUCCESS
    stage.wait(lambda: observed.series("state")["success"] == 1, "the state's metric")

    assert observed.series("runs_total")["Applied,success"] == 1
    assert observed.series("instances") == {"1g.5gb": 7}
    assert observed.series("evictions_total") == {"": 1}
    assert [key.partition(",")[2] for key in observed.series("layout_info")] == [LAYOUT]
    assert observed.series("gpu_operation_duration_seconds_count")["execute,ok"] == 1
    assert observed.series("nvml_calls_total")["nvmlDeviceCreateGpuInstanceWithPlacement"] == 7
    assert observed.series("api_contact_age_seconds")[""] < 60
    assert observed.ask("/healthz") == observed.ask("/readyz") == (200, "ok\n")


@pytest.mark.slow
def test_all_lines_of_an_attempt_have_its_id_and_each_attempt_has_another(
    observed: observed_agent.Observed,
) -> None:
    stage = observed.stage
    # Whatever fails is tried again: what looks like NVML's state file no longer is one.
    good = stage.state_file.read_bytes()
    stage.state_file.write_bytes(b"{}")
    stage.label(LAYOUT)
    # Not what is tried again: the look at a node without a label may be as well.
    failed = "Internal,failed"
    stage.wait(lambda: observed.series("runs_total").get(failed, 0) >= 2, "two failures")
    stage.state_file.write_bytes(good)
    assert stage.wait_for_end(LAYOUT) is not model.State.PENDING
    stage.wait(lambda: stage.status().get("state") == "success", "success")

    assert stage.stop_agent() == 0

    lines = observed.lines()
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
