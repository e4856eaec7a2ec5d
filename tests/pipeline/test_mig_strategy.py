"""A layout over which the device plugin exits: known before anything is touched."""

import dataclasses

import pytest

from mig_manager import errors
from mig_manager.core import model
from mig_manager.core.node import cluster, resources
from mig_manager.core.node import policy as policies
from tests import fakes, scenes


def with_strategy(strategy: str, *, by_label: bool) -> fakes.NodeRig:
    rig = scenes.node(layout="all-1g.5gb")
    if by_label:
        rig.labels[resources.STRATEGY_LABEL] = strategy
        return rig
    for uid, pod in rig.pods.items():
        rig.pods[uid] = dataclasses.replace(pod, mig_strategy=strategy)
    return rig


@pytest.mark.parametrize("by_label", [True, False])
def test_a_mixed_layout_with_strategy_single_fails_before_anything_is_touched(
    *, by_label: bool
) -> None:
    rig = with_strategy("single", by_label=by_label)
    rig.add_pod("train", devices=frozenset({scenes.device(rig, 0, "1g.5gb")}))
    gpus, pods = rig.gpus, dict(rig.pods)

    outcome = scenes.run(rig, "all-balanced")

    assert outcome.reason is errors.Reason.STRATEGY_MISMATCH
    assert "MIG strategy single" in outcome.message
    assert "MIG devices differ: 1g.5gb, 2g.10gb, 3g.20gb" in outcome.message
    assert (rig.gpus, rig.pods) == (gpus, pods)
    assert rig.states == ["failed"]
    assert outcome.should_retry


def test_a_uniform_layout_with_strategy_single_is_applied() -> None:
    rig = with_strategy("single", by_label=True)

    assert scenes.run(rig, "all-disabled").state is model.State.SUCCESS


def test_a_plugin_config_that_changes_with_the_layout_may_change_the_strategy() -> None:
    rig = with_strategy("single", by_label=True)
    rig.policy = policies.Policy(plugin_configs={"all-balanced": "mixed"})

    assert scenes.run(rig, "all-balanced").state is model.State.SUCCESS


def test_without_a_device_plugin_no_strategy_matters() -> None:
    rig = with_strategy("single", by_label=True)
    rig.pods.clear()
    rig.labels[cluster.PLUGIN_DEPLOY_LABEL] = "false"

    assert scenes.run(rig, "all-balanced").state is model.State.SUCCESS


def test_a_plugin_that_does_not_start_is_reported_with_possible_causes() -> None:
    rig = scenes.node(layout="all-1g.5gb")
    rig.plugin_is_broken = True

    outcome = scenes.run(rig, "all-balanced")

    assert outcome.reason is errors.Reason.PLUGIN_NOT_READY
    assert "with MIG strategy single it does not start: MIG devices differ" in outcome.message
