"""What advertises a drifted node's devices: it offers none that are gone."""

import dataclasses

import pytest

from mig_manager.agent import drift
from mig_manager.core import model, profile_name
from mig_manager.core.node import device_ids, well_known
from mig_manager.errors import Reason
from tests import layout_table
from tests.node import driver_rules, ends, gpu_values, nodes, strikes
from tests.pipeline.drifts import LAYOUT, tamper

OFF = model.MigMode.DISABLED


@pytest.mark.parametrize("is_foreign", [False, True])
def test_a_drifted_node_offers_no_device_that_is_gone(*, is_foreign: bool) -> None:
    rig, agent, ended = nodes.at_rest(LAYOUT)
    tamper(rig)
    if is_foreign:
        # It restarts the plugin itself, maybe after further steps.
        rig.add_pod("nvidias", owner_kind="DaemonSet", container_names=("nvidia-mig-manager",))

    assert agent.check_drift(LAYOUT, ended) is drift.Action.REST
    rig.clock.wait(1)

    present = {"nvidia.com/gpu": device_ids.expected_ids(rig.gpus)[0]}
    assert (rig.schedulable == present) is not is_foreign
    assert rig.labels[well_known.STATE_LABEL] == "failed"
    plugins, lists = set(rig.pods), rig.log.count("workloads.list")
    rig.watched = lambda: tuple(rig.pods.values())
    assert agent.check_drift(LAYOUT, ended) is drift.Action.REST
    rig.clock.wait(1)
    assert set(rig.pods) == plugins
    assert rig.log.count("workloads.list") == lists


def test_each_drift_restarts_the_plugin_also_after_a_refused_deletion() -> None:
    rig, agent, ended = nodes.at_rest(LAYOUT)
    for refusal in ({}, {"workloads.delete": strikes.BROKEN["workloads"]}):
        tamper(rig)
        rig.refusing.update(refusal)
        assert agent.check_drift(LAYOUT, ended) is drift.Action.REST
        rig.refusing.clear()
        assert agent.check_drift(LAYOUT, ended) is drift.Action.REST
        rig.clock.wait(1)
        assert rig.schedulable == {"nvidia.com/gpu": device_ids.expected_ids(rig.gpus)[0]}
    assert rig.events == [Reason.DRIFTED.value]


def test_a_plugin_begun_in_a_drift_restarts_once_the_layout_is_back() -> None:
    rig, agent, ended = nodes.at_rest(LAYOUT)
    served = rig.schedulable
    before = tamper(rig)
    rig.schedulable = {"nvidia.com/gpu": device_ids.expected_ids(rig.gpus)[0]}
    agent.check_drift(LAYOUT, ended)

    rig.gpus = before
    assert agent.check_drift(LAYOUT, ended) is drift.Action.HEAL
    ends.assert_ends(rig, Reason.ALREADY_APPLIED, layout=LAYOUT, by=agent, may_evict=False)

    assert rig.schedulable == served


def test_a_plugin_is_restarted_after_a_change_of_a_gpu_outside_the_layout() -> None:
    text = (
        "version: v1\nmig-configs:\n  first:\n"
        + layout_table.rule_line("[0]", {"7g.40gb": 1})
        + "\n"
    )
    rig, agent, ended = nodes.at_rest("first", rig=nodes.node(), text=text)
    assert agent.check_drift("first", ended) is drift.Action.REST
    desired = model.DesiredGpu.of(model.MigMode.ENABLED, {profile_name.parse("3g.20gb"): 2})
    rig.gpus = (rig.gpus[0], *gpu_values.brought_to(rig.gpus[1:], desired))

    assert agent.check_drift("first", ended) is drift.Action.HEAL
    rested = ends.assert_ends(
        rig, Reason.ALREADY_APPLIED, layout="first", by=agent, may_evict=False
    )

    assert rig.schedulable == {"nvidia.com/gpu": device_ids.expected_ids(rig.gpus)[0]}
    assert agent.check_drift("first", rested) is drift.Action.REST

    agent.rest()
    rig.gpus = (rig.gpus[0], *gpu_values.brought_to(rig.gpus[1:], model.DesiredGpu(mode=OFF)))
    agent.check_without_request()
    assert rig.labels[well_known.APPLIED_LABEL] == "first"


def test_a_plugin_is_restarted_whenever_instances_were_recreated_in_place() -> None:
    rig, agent, ended = nodes.at_rest(LAYOUT)
    for name in ("another", "a third"):
        served, first = rig.schedulable, rig.gpus[0].gpu_instances[0]
        (device,) = first.compute_instances
        device = dataclasses.replace(device, uuid=driver_rules.mig_uuid(name))
        recreated = dataclasses.replace(first, compute_instances=(device,))
        instances = (recreated, *rig.gpus[0].gpu_instances[1:])
        rig.gpus = (dataclasses.replace(rig.gpus[0], gpu_instances=instances), *rig.gpus[1:])

        assert agent.check_drift(LAYOUT, ended) is drift.Action.HEAL
        ended = ends.assert_ends(
            rig, Reason.ALREADY_APPLIED, layout=LAYOUT, by=agent, may_evict=False
        )

        assert rig.schedulable != served
        assert rig.schedulable == {"nvidia.com/gpu": device_ids.expected_ids(rig.gpus)[0]}
        assert agent.check_drift(LAYOUT, ended) is drift.Action.REST


def test_a_plugin_that_missed_a_gpu_between_two_checks_is_restarted() -> None:
    rig, agent, ended = nodes.at_rest(LAYOUT)
    served = rig.schedulable
    assert agent.check_drift(LAYOUT, ended) is drift.Action.REST
    # It restarted while GPU 1 did not answer, and kubelet has forgotten the former devices.
    rig.schedulable = {"nvidia.com/gpu": device_ids.expected_ids(rig.gpus[:1])[0]}

    assert agent.check_drift(LAYOUT, ended) is drift.Action.HEAL
    ends.assert_ends(rig, Reason.ALREADY_APPLIED, layout=LAYOUT, by=agent, may_evict=False)

    assert rig.schedulable == served
