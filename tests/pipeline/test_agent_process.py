"""The real agent process on a sandbox node: real HTTP, real gRPC, real pynvml."""

import dataclasses

import pytest

from mig_manager.sandbox import stories
from mig_manager.sandbox.node import device_plugin
from tests.stage import agent_stage

SPEC = "2xA100-SXM4-40GB"


@pytest.mark.slow
@pytest.mark.parametrize("story", stories.STORIES)
@pytest.mark.parametrize(
    "spec",
    [
        "8xA100-SXM4-40GB",
        "8xH100",
        "4xA30",
        "4xRTX-PRO-6000",
        "4xA100-SXM4-80GB+2xA30",
    ],
)
def test_every_story_comes_out_as_it_must_on_every_kind_of_node(story: str, spec: str) -> None:
    scenario = stories.STORIES[story]
    with agent_stage.Stage(spec, *scenario.agent_options) as stage:
        scenario.prepare(stage)
        layout = scenario.layout(agent_stage.gpus(spec))
        checks = scenario.play(stage, layout, lambda _text: None)
        assert checks
        assert [text for text, holds in checks.items() if not holds] == []
        stage.assert_restored()


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", [device_plugin.PluginStrategy.SINGLE, device_plugin.PluginStrategy.NONE]
)
def test_other_strategies_of_the_plugin_are_verified_as_well(
    strategy: device_plugin.PluginStrategy,
) -> None:
    quick = dataclasses.replace(agent_stage.QUICK, strategy=strategy)
    with agent_stage.Stage(node_options=quick) as stage:
        stage.assert_ends("all-1g.5gb")

        expected = 14 if strategy is device_plugin.PluginStrategy.SINGLE else 2
        assert stage.allocatable() == {"nvidia.com/gpu": expected}


@pytest.mark.slow
def test_change_that_waits_for_pods_lists_them_a_few_times() -> None:
    # As on a real node: what the agent waits for takes some seconds, of pods and of the plugin.
    slow = dataclasses.replace(agent_stage.QUICK, pod_stop_s=3.0, plugin_start_s=3.0)
    scenario = stories.STORIES["first-layout"]
    with agent_stage.Stage(SPEC, *scenario.agent_options, node_options=slow) as stage:
        scenario.prepare(stage)
        stage.server.log.clear()

        layout = scenario.layout(agent_stage.gpus(SPEC))
        checks = scenario.play(stage, layout, lambda _text: None)

        assert all(checks.values())
        assert stage.server.log.count("list", "pods") <= 14
