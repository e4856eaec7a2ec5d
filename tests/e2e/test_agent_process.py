"""The real agent process on a sandbox node: real HTTP, real gRPC, real pynvml."""

import dataclasses
import pathlib
import signal
from collections.abc import Iterator

import pytest

from mig_manager.core import cluster, config, model
from mig_manager.sandbox import hardware
from mig_manager.sandbox.cluster import nodeoptions, objects, view
from mig_manager.sandbox.driver import states
from mig_manager.sandbox.show import scenarios, stages

PACKAGED = pathlib.Path(__file__).parents[2] / "profiles" / "mig-parted.yaml"
IMPATIENT = ("--retry-initial-s", "0.2", "--retry-max-s", "0.5")
QUICK = nodeoptions.NodeOptions(
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
    node_options: nodeoptions.NodeOptions | None = None,
) -> stages.Stage:
    return stages.Stage(
        spec,
        config_text(spec) if text is None else text,
        latency=states.Latency(),
        agent_options=(*IMPATIENT, *agent_options),
        node_options=node_options or QUICK,
    )


@pytest.fixture
def two_gpus() -> Iterator[stages.Stage]:
    with new_stage("2xA100-SXM4-40GB") as world:
        yield world


def assert_nothing_taken(world: stages.Stage) -> None:
    node = world.node()
    assert not (node["spec"] or {}).get("unschedulable")
    assert not (node["spec"] or {}).get("taints")
    assert cluster.PAUSED_VALUE not in objects.labels(node).values()
    assert cluster.JOURNAL_ANNOTATION not in objects.annotations(node)


def play(story: str, spec: str) -> None:
    told = scenarios.STORIES[story]
    gpus = [hardware.template(p, i) for i, p in enumerate(hardware.parse_node(spec))]
    with new_stage(spec, *told.agent_options) as world:
        told.prepare(world)
        checks = told.play(world, told.layout(gpus), lambda _text: None)
        assert checks
        assert [check.text for check in checks if not check.holds] == []
        assert_nothing_taken(world)


@pytest.mark.parametrize("story", scenarios.STORIES)
def test_every_story_of_the_demo_comes_out_as_it_must_on_a_mixed_node(story: str) -> None:
    play(story, "2xA100-SXM4-80GB+1xA30")


@pytest.mark.slow
@pytest.mark.parametrize("story", scenarios.STORIES)
@pytest.mark.parametrize(
    "spec",
    [
        "8xA100-SXM4-40GB",
        "8xH100",
        "8xH200",
        "4xA30",
        "8xB200",
        "4xRTX-PRO-6000",
        "4xA100-SXM4-80GB+2xA30",
    ],
)
def test_every_story_comes_out_as_it_must_on_every_kind_of_node(story: str, spec: str) -> None:
    play(story, spec)


@pytest.mark.parametrize("strategy", [nodeoptions.Strategy.SINGLE, nodeoptions.Strategy.NONE])
def test_other_strategies_of_the_plugin_are_proven_as_well(strategy: nodeoptions.Strategy) -> None:
    quick = dataclasses.replace(QUICK, strategy=strategy)
    with new_stage("2xA100-SXM4-40GB", node_options=quick) as world:
        world.label("all-1g.5gb")

        assert world.wait_for_end("all-1g.5gb") is model.State.SUCCESS
        expected = 14 if strategy is nodeoptions.Strategy.SINGLE else 2
        assert world.allocatable() == {"nvidia.com/gpu": expected}


def test_a_plugin_that_crashes_on_the_layout_fails_the_run_by_name() -> None:
    # With mig.strategy=single the plugin refuses GPUs that differ, and exits.
    quick = dataclasses.replace(QUICK, strategy=nodeoptions.Strategy.SINGLE)
    with new_stage("2xA100-SXM4-40GB", "--plugin-timeout-s", "2", node_options=quick) as world:
        world.label("all-balanced")

        assert world.wait_for_end("all-balanced") is model.State.FAILED
        assert world.status()["reason"] == "PluginNotReady"
        assert cluster.APPLIED_LABEL not in objects.labels(world.node())


def test_a_plugin_without_deploy_label_is_held_off_during_the_change_and_restarted() -> None:
    plain = dataclasses.replace(QUICK, deploy_style=nodeoptions.DeployStyle.PLAIN)
    with new_stage("2xA100-SXM4-40GB", node_options=plain) as world:
        world.label("all-1g.5gb")

        assert world.wait_for_end("all-1g.5gb") is model.State.SUCCESS
        assert world.allocatable() == {"nvidia.com/mig-1g.5gb": 14}
        assert_nothing_taken(world)


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        ("all-9g.1gb", "UnknownConfig"),
        ("all-1g.10gb.me", "UnknownProfile"),
        (scenarios.TOO_MUCH, "DoesNotFit"),
    ],
)
def test_a_wish_that_cannot_be_touches_nothing(
    two_gpus: stages.Stage, layout: str, reason: str
) -> None:
    two_gpus.run_pods([("train", "nvidia.com/gpu", {})])
    pods = {objects.uid(pod) for pod in two_gpus.cluster.list(view.Kind.POD)}
    labels = dict(objects.labels(two_gpus.node()))

    two_gpus.label(layout)

    assert two_gpus.wait_for_end(layout) is model.State.FAILED
    assert two_gpus.status()["reason"] == reason
    assert {objects.uid(pod) for pod in two_gpus.cluster.list(view.Kind.POD)} == pods
    ours = {cluster.CONFIG_LABEL: layout, cluster.STATE_LABEL: "failed"}
    assert dict(objects.labels(two_gpus.node())) == {**labels, **ours}


def test_a_corrected_file_is_served_without_touching_the_label(two_gpus: stages.Stage) -> None:
    good = two_gpus.config_file.read_text()
    two_gpus.config_file.write_text("version: v1\nmig-configs:\n  all-1g.5gb: 7\n")
    two_gpus.label("all-1g.5gb")
    assert two_gpus.wait_for_end("all-1g.5gb") is model.State.FAILED
    assert two_gpus.status()["reason"] == "InvalidConfig"
    assert "config.yaml:3:" in two_gpus.status()["message"]

    two_gpus.config_file.write_text(good)

    two_gpus.wait(lambda: two_gpus.status().get("state") == "success", "success")
    assert two_gpus.allocatable() == {"nvidia.com/mig-1g.5gb": 14}


def test_a_newer_label_during_the_drain_takes_over_at_once(two_gpus: stages.Stage) -> None:
    two_gpus.run_pods([("train", "nvidia.com/gpu", {"app": "train"})])
    two_gpus.api.post(
        "/apis/policy/v1/namespaces/default/poddisruptionbudgets",
        {
            "metadata": {"name": "guard"},
            "spec": {"maxUnavailable": 0, "selector": {"matchLabels": {"app": "train"}}},
        },
    )
    two_gpus.label("all-1g.5gb")
    two_gpus.wait(lambda: two_gpus.status().get("phase") == "Drain", "the drain")

    two_gpus.label("all-disabled")

    assert two_gpus.wait_for_end("all-disabled") is model.State.SUCCESS
    assert "train" in two_gpus.workloads()
    assert_nothing_taken(two_gpus)


def test_an_agent_told_to_stop_during_the_drain_gives_everything_back(
    two_gpus: stages.Stage,
) -> None:
    two_gpus.run_pods([("train", "nvidia.com/gpu", {"app": "train"})])
    two_gpus.api.post(
        "/apis/policy/v1/namespaces/default/poddisruptionbudgets",
        {
            "metadata": {"name": "guard"},
            "spec": {"maxUnavailable": 0, "selector": {"matchLabels": {"app": "train"}}},
        },
    )
    two_gpus.label("all-1g.5gb")
    two_gpus.wait(lambda: two_gpus.status().get("phase") == "Drain", "the drain")

    assert two_gpus.stop_agent() == 0

    two_gpus.wait(lambda: two_gpus.status().get("state") == "failed", "a terminal state")
    assert two_gpus.status()["reason"] == "Interrupted"
    assert_nothing_taken(two_gpus)


def test_an_agent_killed_while_the_plugin_is_paused_is_made_good_by_its_successor(
    two_gpus: stages.Stage,
) -> None:
    two_gpus.label("all-1g.5gb")
    two_gpus.wait(
        lambda: cluster.PAUSED_VALUE in objects.labels(two_gpus.node()).values(), "the pause"
    )
    two_gpus.stop_agent(signal.SIGKILL)

    two_gpus.start_agent()

    two_gpus.wait(lambda: two_gpus.status().get("state") == "success", "success")
    assert two_gpus.allocatable() == {"nvidia.com/mig-1g.5gb": 14}
    assert_nothing_taken(two_gpus)
