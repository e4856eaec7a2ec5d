"""The log lines of the real agent process: each has its attempt, and none is waited for."""

import pytest

from mig_manager.core.records import run_status
from tests.rigs.node.local_rig import LAYOUTS_TEXT
from tests.rigs.shell import lost_stderr
from tests.rigs.stage import agent_stage

SPEC, LAYOUT = "1xA100-SXM4-40GB", "all-1g.5gb"


@pytest.mark.slow
def test_all_lines_of_an_attempt_have_its_id_and_each_attempt_has_another() -> None:
    with agent_stage.ObservedStage(SPEC) as stage:
        # Whatever fails is tried again: what looks like NVML's state file no longer is one.
        good = stage.machine.state_file.read_bytes()
        stage.machine.state_file.write_bytes(b"{}")
        stage.label(LAYOUT)
        # Not what is tried again: the look at a node without a label may be as well.
        failed = "Internal,failed"
        stage.wait(lambda: stage.series("runs_total").get(failed, 0) >= 2, "two failures")
        stage.machine.state_file.write_bytes(good)
        assert stage.wait_for_end(LAYOUT) is not run_status.State.PENDING
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
@pytest.mark.parametrize("way", ["stalled-reader", "full-disk"])
def test_agent_whose_log_lines_are_lost_serves_its_node(way: str) -> None:
    with (
        lost_stderr.WAYS[way]() as stderr,
        agent_stage.AgentStage(
            SPEC, "--log-level", "debug", text=LAYOUTS_TEXT, stderr=stderr
        ) as rig,
    ):
        rig.apply_layout("requested")
        assert rig.stop_agent() == 0
