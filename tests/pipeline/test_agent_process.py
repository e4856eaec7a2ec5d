"""The real agent process on a sandbox node: real HTTP, real gRPC, real pynvml."""

import dataclasses
import pathlib

import pytest

from mig_manager.catalogue import hardware
from mig_manager.core import model
from mig_manager.core.layout import config
from mig_manager.core.node import cluster
from mig_manager.sandbox import scenarios, stages
from mig_manager.sandbox.driver import states
from mig_manager.sandbox.node import device_plugin, objects, sandbox_node
from testkit import apiserver
from tests import journals

PACKAGED = pathlib.Path(__file__).parents[2] / "profiles" / "mig-parted.yaml"
IMPATIENT = ("--retry-initial-s", "0.2", "--retry-max-s", "0.5")
QUICK = sandbox_node.NodeOptions(
    tick_s=0.05, pod_start_s=0.05, pod_stop_s=0.05, plugin_start_s=0.05
)
"""Each thing still takes a moment of its own, only a shorter one than people like to watch."""


def config_text(spec: str) -> str:
    gpus = [hardware.template(p, i) for i, p in enumerate(hardware.parse_node(spec))]
    text = PACKAGED.read_text(encoding="utf-8")
    return text + scenarios.extra_layouts(gpus, config.parse(text, source="packaged"))


def new_stage(
    spec: str,
    *agent_options: str,
    text: str | None = None,
    node_options: sandbox_node.NodeOptions | None = None,
    server: apiserver.ApiServer | None = None,
) -> stages.Stage:
    return stages.Stage(
        spec,
        config_text(spec) if text is None else text,
        latency=states.Latency(),
        agent_options=(*IMPATIENT, *agent_options),
        node_options=node_options or QUICK,
        server=server,
    )


def assert_nothing_taken(stage: stages.Stage, *, is_stopped: bool = False) -> None:
    node = stage.node()
    assert not (node["spec"] or {}).get("unschedulable")
    assert not (node["spec"] or {}).get("taints")
    assert cluster.PAUSED_VALUE not in objects.labels(node).values()
    journal = objects.annotations(node).get(cluster.JOURNAL_ANNOTATION)
    assert journals.lists_nothing(journal, is_stopped=is_stopped)


def play(story: str, spec: str) -> None:
    scenario = scenarios.STORIES[story]
    gpus = [hardware.template(p, i) for i, p in enumerate(hardware.parse_node(spec))]
    with new_stage(spec, *scenario.agent_options) as stage:
        scenario.prepare(stage)
        checks = scenario.play(stage, scenario.layout(gpus), lambda _text: None)
        assert checks
        assert [text for text, holds in checks.items() if not holds] == []
        assert_nothing_taken(stage)


@pytest.mark.slow
@pytest.mark.parametrize("story", scenarios.STORIES)
@pytest.mark.parametrize(
    "spec",
    [
        "8xA100-SXM4-40GB",
        "8xH100",
        "8xH200",
        "4xA30",
        "1xA30",
        "8xB200",
        "4xRTX-PRO-6000",
        "4xA100-SXM4-80GB+2xA30",
    ],
)
def test_every_story_comes_out_as_it_must_on_every_kind_of_node(story: str, spec: str) -> None:
    play(story, spec)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [device_plugin.Strategy.SINGLE, device_plugin.Strategy.NONE])
def test_other_strategies_of_the_plugin_are_verified_as_well(
    strategy: device_plugin.Strategy,
) -> None:
    quick = dataclasses.replace(QUICK, strategy=strategy)
    with new_stage("2xA100-SXM4-40GB", node_options=quick) as stage:
        stage.label("all-1g.5gb")

        assert stage.wait_for_end("all-1g.5gb") is model.State.SUCCESS
        expected = 14 if strategy is device_plugin.Strategy.SINGLE else 2
        assert stage.allocatable() == {"nvidia.com/gpu": expected}


@pytest.mark.slow
def test_change_that_waits_for_pods_lists_them_a_few_times() -> None:
    # As on a real node: what the agent waits for takes some seconds, of pods and of the plugin.
    slow = dataclasses.replace(QUICK, pod_stop_s=3.0, plugin_start_s=3.0)
    scenario = scenarios.STORIES["first-layout"]
    gpus = [hardware.template(p, i) for i, p in enumerate(hardware.parse_node("2xA100-SXM4-40GB"))]
    server = apiserver.ApiServer()
    with new_stage(
        "2xA100-SXM4-40GB", *scenario.agent_options, node_options=slow, server=server
    ) as stage:
        scenario.prepare(stage)
        server.log.clear()

        checks = scenario.play(stage, scenario.layout(gpus), lambda _text: None)

        assert all(checks.values())
        assert server.log.count("list", "pods") <= 14
