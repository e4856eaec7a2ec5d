"""The real agent process on a sandbox node: real HTTP, real gRPC, real pynvml."""

import dataclasses
import pathlib
import sys

import pytest

from mig_manager.core.node.devices import strategies
from mig_manager.sandbox import scenarios
from testkit import nvml_faults
from tests.rigs import programs
from tests.rigs.node import gpu_values
from tests.rigs.stage import agent_stage

SPEC = "2xA100-SXM4-40GB"


@pytest.mark.parametrize("strategy", [strategies.Strategy.SINGLE, strategies.Strategy.NONE])
def test_other_strategies_of_the_plugin_are_verified_as_well(
    strategy: strategies.Strategy,
) -> None:
    quick = dataclasses.replace(agent_stage.QUICK, strategy=strategy)
    with agent_stage.AgentStage(node_options=quick) as stage:
        stage.apply_layout("all-1g.5gb")

        expected = 14 if strategy is strategies.Strategy.SINGLE else 2
        assert stage.allocatable() == {"nvidia.com/gpu": expected}


@pytest.mark.slow
def test_change_that_waits_for_pods_lists_them_a_few_times() -> None:
    # As on a real node: what the agent waits for takes some seconds, of pods and of the plugin.
    slow = dataclasses.replace(agent_stage.QUICK, pod_stop_s=3.0, plugin_start_s=3.0)
    scenario = scenarios.BY_NAME["first-layout"]
    with agent_stage.AgentStage(SPEC, *scenario.agent_options, node_options=slow) as stage:
        scenario.prepare(stage)
        stage.server.log.clear()

        layout = scenario.layout(gpu_values.gpus_of(SPEC))
        checks = scenario.play(stage, layout, lambda _text: None)

        assert all(checks.values())
        assert stage.server.log.count("list", "pods") <= 14


@pytest.mark.slow
def test_malformed_hooks_file_is_served_once_it_is_corrected(tmp_path: pathlib.Path) -> None:
    file, log = tmp_path / "hooks.yaml", tmp_path / "log"
    note = f"command: /bin/sh, args: [-c, 'echo $0 $MIG_PARTED_SELECTED_CONFIG >> {log}', %s]"
    points = ("apply-start", "pre-apply-mode", "pre-apply-config", "apply-exit")
    good = "".join(["hooks:\n", *(f"  {each}: [{{{note % each}}}]\n" for each in points)])
    file.write_text(good.replace("apply-exit:", "apply-end:"))
    with agent_stage.AgentStage(SPEC, "--hooks-file", str(file)) as stage:
        status = stage.fail_to_apply("all-1g.5gb")
        assert status["reason"] == "InvalidConfig"
        assert f"{file}:5:3: unexpected key 'apply-end'" in status["message"]
        assert not log.exists()

        file.write_text(good)

        stage.wait(lambda: stage.status()["state"] == "success", "success")
        assert log.read_text() == "".join(f"{each} all-1g.5gb\n" for each in points)
        stage.assert_restored()


def test_boot_restores_the_layout_that_an_agent_verified() -> None:
    with agent_stage.AgentStage("1xH100-SXM5-80GB+1xA30") as stage:
        stage.apply_layout("all-balanced")
        stage.stop_agent()
        before = stage.gpus.observe()
        nvml_faults.SharedState(stage.machine.state_file).reboot()

        options = ("--simulate-state", stage.machine.state_file)
        booted = programs.run(sys.executable, "-m", "mig_manager", "boot", *options)

        assert booted.returncode == 0, booted.stderr
        assert booted.stdout == "Layout all-balanced is restored.\n"
        assert [gpu.snapshot for gpu in stage.gpus.observe()] == [gpu.snapshot for gpu in before]
