"""A node at rest whose configuration file is unusable now."""

import dataclasses

import pytest

from mig_manager.agent import outcomes
from mig_manager.agent.drift import actions
from mig_manager.core.objects import well_known
from mig_manager.core.records import run_status
from mig_manager.reasons import Reason
from tests.pipeline.drifts import tamper
from tests.rigs import layout_table
from tests.rigs.node import agents, ends, fakes, gpu_values, node_rig, nodes

UNUSABLE_FILES = {
    "typo": agents.LAYOUTS_TEXT.replace("one-slice-changed:", "one-slice-chnged:"),
    "invalid": agents.LAYOUTS_TEXT + "  bad: [{devices: all, mig-devices: {1g.5gb: x}}]\n",
}


def node_without_file(
    text: str = UNUSABLE_FILES["invalid"], *, heals: bool = False
) -> tuple[node_rig.NodeRig, agents.AgentInMemory, outcomes.Outcome]:
    """Return a node whose layout is active, although the file is unusable now."""
    rig = nodes.node(layout="one-slice-changed")
    source = fakes.FakeTextSource(agents.LAYOUTS_TEXT)
    agent = agents.new_agent(rig, heals_drift=heals, layout_source=source)
    agents.run(rig, "one-slice-changed", by=agent)
    source.text = text
    outcome = agents.run(rig, "one-slice-changed", by=agent)
    assert (outcome.reason, outcome.state) == (Reason.ALREADY_APPLIED, run_status.State.SUCCESS)
    rig.node_object.events.clear()
    return rig, agent, outcome


@pytest.mark.parametrize(
    ("text", "heals"), [(UNUSABLE_FILES["typo"], False), (UNUSABLE_FILES["invalid"], True)]
)
def test_a_drift_is_published_although_the_file_is_unusable(text: str, *, heals: bool) -> None:
    rig, agent, outcome = node_without_file(text, heals=heals)
    verified = rig.node_object.request_record["verified"]
    assert agent.check_drift("one-slice-changed", outcome) is actions.Action.REST
    assert rig.node_object.events == []

    before = tamper(rig)
    for _ in range(2):
        assert agent.check_drift("one-slice-changed", outcome) is actions.Action.REST
    assert rig.node_object.labels[well_known.STATE_LABEL] == "failed"
    assert rig.node_object.events == ["Drifted", "DestroyedDevices"]

    rig.gpus = before
    assert agent.check_drift("one-slice-changed", outcome) is actions.Action.REST
    assert rig.node_object.labels[well_known.STATE_LABEL] == "success"
    assert rig.node_object.request_record["verified"] == verified


def test_a_layout_active_again_keeps_its_hash_although_the_file_lacks_it() -> None:
    rig, source = nodes.node(layout="all-balanced"), fakes.FakeTextSource(agents.LAYOUTS_TEXT)
    source.text = agents.LAYOUTS_TEXT.replace("all-balanced", "mine")
    # The layout may be one of the lost GPU's model.
    rig.gpus = (rig.gpus[0], dataclasses.replace(rig.gpus[1], pci_device_id=0x20B710DE))
    rig.driver.lost.add(rig.gpus[1].uuid)
    _, agent, outcome = nodes.at_rest("mine", rig=rig, layout_source=source)
    verified = rig.node_object.request_record["verified"]
    before = tamper(rig)
    agent.check_drift("mine", outcome)

    source.text, rig.gpus = agents.LAYOUTS_TEXT, before
    agent.check_drift("mine", outcome)

    assert rig.node_object.labels[well_known.STATE_LABEL] == "success"
    assert rig.node_object.request_record["verified"] == verified


def test_a_gpu_lost_while_the_file_is_unusable_starts_no_run() -> None:
    rig, agent, outcome = node_without_file()
    rig.driver.lost.add(rig.gpus[1].uuid)

    assert agent.check_drift("one-slice-changed", outcome) is actions.Action.REST

    assert rig.node_object.labels[well_known.STATE_LABEL] == "success"


def test_a_gpu_back_while_the_file_is_unusable_starts_no_run() -> None:
    rig = nodes.node(layout="all-balanced")
    rig.driver.lost.add(rig.gpus[1].uuid)
    source = fakes.FakeTextSource(agents.LAYOUTS_TEXT)
    agent = agents.new_agent(rig, layout_source=source)
    outcome = agents.run(rig, "all-balanced", by=agent)
    source.text = UNUSABLE_FILES["invalid"]
    rig.driver.lost.clear()
    rig.kubelet.schedulable = {"nvidia.com/gpu": gpu_values.device_uuids(rig.gpus[:1])}

    assert agent.check_drift("all-balanced", outcome) is actions.Action.REST

    assert rig.node_object.labels[well_known.STATE_LABEL] == "success"


def test_an_edit_while_a_gpu_is_lost_is_applied_once_it_is_back() -> None:
    rig = nodes.node()
    rules = (("[0]", {"7g.40gb": 1}), ("[1]", {"3g.20gb": 2}))
    text = layout_table.render({"mine": (layout_table.rule_line(*rule) for rule in rules)})
    source = fakes.FakeTextSource(text)
    agent = agents.new_agent(rig, layout_source=source)
    ends.run_to(rig, "mine", Reason.APPLIED, by=agent)
    rig.pods.add("affected", devices=frozenset(rig.gpus[1].mig_uuids))
    rig.driver.lost.add(rig.gpus[1].uuid)
    ends.run_to(rig, "mine", Reason.GPU_UNREACHABLE, by=agent)
    source.text = text.replace("3g.20gb: 2", "7g.40gb: 1")

    rig.driver.lost.clear()
    ends.run_to(rig, "mine", Reason.APPLIED, by=agent)

    assert "affected" not in rig.pods.names


def test_phantoms_are_removed_although_the_file_is_unusable() -> None:
    rig, agent, outcome = node_without_file()
    rig.kubelet.phantoms = {"nvidia.com/mig-7g.40gb": 1}

    agent.check_drift("one-slice-changed", outcome)

    assert rig.node_object.events == ["PhantomDevicesRemoved"]
