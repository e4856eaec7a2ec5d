"""Requests to the real agent process: corrected, refused by a budget, withdrawn."""

import pytest

from mig_manager.core.objects import well_known
from mig_manager.core.records import run_status
from mig_manager.sandbox import stages
from mig_manager.sandbox.node import objects
from tests.rigs.stage import agent_stage

SPEC = "1xA100-SXM4-40GB"


@pytest.mark.slow
def test_a_corrected_file_is_served_without_touching_the_label() -> None:
    with agent_stage.AgentStage(SPEC) as stage:
        good = stage.config_file.read_text()
        stage.config_file.write_text("version: v1\nmig-configs:\n  all-1g.5gb: 7\n")
        status = stage.fail_to_apply("all-1g.5gb")
        assert status["reason"] == "InvalidConfig"
        assert "config.yaml:3:" in status["message"]

        stage.config_file.write_text(good)

        stage.wait(lambda: stage.status().get("state") == "success", "success")
        assert stage.allocatable() == {"nvidia.com/mig-1g.5gb": 7}


def test_a_drain_that_a_budget_blocks_ends_with_the_budgets_name() -> None:
    patient = "--drain-timeout-s", "1", *agent_stage.PATIENT
    with agent_stage.AgentStage(SPEC, *patient) as stage:
        stage.run_pods([("train", "nvidia.com/gpu", {"app": "train"})])
        stage.guard({"matchLabels": {"app": "train"}})
        stage.label("all-1g.5gb")

        assert stage.wait_for_end("all-1g.5gb") is run_status.State.FAILED
        assert stage.status()["reason"] == "DrainTimeout"
        assert f"PodDisruptionBudget {stages.BUDGET} needs" in stage.status()["message"]
        assert "train" in stage.workloads()
        stage.assert_restored()


@pytest.mark.slow
def test_a_removed_label_leaves_the_layout_active() -> None:
    with agent_stage.AgentStage(SPEC) as stage:
        stage.apply_layout("all-1g.5gb")

        stage.label(None)
        # The agent's answer to a later request shows that it has seen the removal before.
        stage.fail_to_apply("all-9g.1gb")

        assert objects.labels(stage.node())[well_known.APPLIED_LABEL] == "all-1g.5gb"
        assert stage.allocatable() == {"nvidia.com/mig-1g.5gb": 7}
