"""GPUs at rest that another program changes: what the node then says."""

import dataclasses
from collections.abc import Callable

import pytest

from mig_manager.agent.drift import actions
from mig_manager.core import model
from mig_manager.core.objects import well_known
from mig_manager.reasons import Reason
from tests.pipeline.drifts import tamper
from tests.rigs.node import agents, ends, nodes


def test_a_drift_is_published_once_and_cleared_when_it_is_over() -> None:
    rig, agent, outcome = nodes.at_rest("all-balanced")
    assert agent.check_drift("all-balanced", outcome) is actions.Action.REST
    assert rig.node_object.states == []
    before = tamper(rig)

    for _ in range(3):
        assert agent.check_drift("all-balanced", outcome) is actions.Action.REST

    assert rig.node_object.labels[well_known.STATE_LABEL] == "failed"
    assert well_known.APPLIED_LABEL not in rig.node_object.labels
    assert rig.node_object.events == ["Drifted", "DestroyedDevices"]
    assert "gpus.execute" not in rig.log

    rig.gpus = before
    agent.check_drift("all-balanced", outcome)
    assert rig.node_object.labels[well_known.STATE_LABEL] == "success"
    assert rig.node_object.labels[well_known.APPLIED_LABEL] == "all-balanced"


def test_a_drift_is_published_although_kubelet_is_silent() -> None:
    rig, agent, outcome = nodes.at_rest("all-balanced", heals_drift=True)
    nodes.add_pod_on_unowned_instances(rig)
    rig.kubelet.is_silent = True

    assert agent.check_drift("all-balanced", outcome) is actions.Action.REST

    assert rig.node_object.events == ["Drifted"]
    assert "default/foreign" in rig.node_object.status_messages[-1]


@pytest.mark.parametrize("at_run", ["listed", "missing"])
def test_a_drift_that_changes_between_a_run_and_a_check_is_published(at_run: str) -> None:
    rig, _, _ = nodes.at_rest("all-balanced")
    before = rig.gpus
    nodes.add_pod_on_unowned_instances(rig)
    changed = {"listed": rig.gpus, "missing": before[:1]}
    rig.gpus = changed.pop(at_run)
    agent = agents.start(rig, "all-balanced")
    outcome = ends.run_to(rig, "all-balanced", Reason.DRIFTED, by=agent)
    (rig.gpus,) = changed.values()

    for _ in range(2):
        assert agent.check_drift("all-balanced", outcome) is actions.Action.REST

    is_missing = f"the driver no longer lists {before[1]}" in rig.node_object.status_messages[-1]
    assert is_missing is (at_run == "listed")
    assert rig.node_object.events == ["Drifted", "Drifted", "DestroyedDevices"]


IMPOSSIBLE_NOW: dict[str, Callable[[model.Gpu], model.Gpu]] = {
    "profile": lambda gpu: dataclasses.replace(
        gpu, profiles=tuple(each for each in gpu.profiles or () if str(each.profile) != "3g.20gb")
    ),
    "mode": lambda gpu: dataclasses.replace(
        gpu, current_mode=None, pending_mode=None, profiles=()
    ),
    "host": lambda gpu: dataclasses.replace(gpu, virtualization=model.Virtualization.VGPU),
}


@pytest.mark.parametrize(("lost", "heals"), [("profile", True), ("mode", False), ("host", True)])
def test_a_drift_that_cannot_be_planned_is_published(lost: str, *, heals: bool) -> None:
    rig, agent, outcome = nodes.at_rest("all-balanced", heals_drift=heals)
    before = rig.gpus
    rig.gpus = tuple(
        IMPOSSIBLE_NOW[lost](dataclasses.replace(gpu, gpu_instances=())) for gpu in rig.gpus
    )

    for _ in range(2):
        assert agent.check_drift("all-balanced", outcome) is actions.Action.REST

    assert rig.node_object.labels[well_known.STATE_LABEL] == "failed"
    assert rig.node_object.events == ["Drifted", "DestroyedDevices"]
    assert well_known.APPLIED_LABEL not in rig.node_object.labels
    assert "it cannot be restored" in rig.node_object.status_messages[-1]
    rig.gpus = before
    agent.check_drift("all-balanced", outcome)
    assert rig.node_object.labels[well_known.STATE_LABEL] == "success"


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_layout_without_a_request_is_labelled_until_it_is_gone(*, is_restarted: bool) -> None:
    rig, agent, _ = nodes.at_rest("all-balanced")
    agent.restore_without_request()
    agent.check_without_request()
    assert rig.node_object.labels[well_known.APPLIED_LABEL] == "all-balanced"
    tamper(rig)

    if is_restarted:
        agents.undo(rig)
    else:
        agent.check_without_request()

    assert well_known.APPLIED_LABEL not in rig.node_object.labels
