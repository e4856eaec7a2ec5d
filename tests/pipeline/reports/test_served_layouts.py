"""The layouts that an agent serves: its file's, and those generated from the GPUs."""

import dataclasses
from typing import Any

import pytest

from mig_manager import errors, reasons
from mig_manager.agent.drift import actions
from mig_manager.core.layout import layout_list, layout_parser
from mig_manager.core.objects import well_known
from mig_manager.core.settings import node_settings
from tests.rigs import layout_table
from tests.rigs.node import agents, call_errors, ends, fakes, gpu_values, node_rig, nodes, strikes

OWNERS_FILE = """
version: v1
mig-configs:
  team-a:
  - {devices: [0], mig-enabled: true, mig-devices: {4g.20gb: 1}}
  all-balanced:
  - {devices: all, mig-enabled: true, mig-devices: {3g.20gb: 2}}
  for-another-product:
  - {devices: all, mig-enabled: true, mig-devices: {1g.6gb: 4}}
"""
GENERATED = "generated for NVIDIA A100-SXM4-40GB"
DEFAULT: dict[str, Any] = {"has_default_layouts": True}


@pytest.fixture
def rig() -> node_rig.NodeRig:
    return nodes.node()


def apply(
    rig: node_rig.NodeRig, layout: str, text: str = OWNERS_FILE, **settings: Any
) -> tuple[reasons.Reason, str]:
    """Apply a layout with an agent of its own; return the reason and the origin of the layout."""
    outcome = agents.run(rig, layout, by=agents.new_agent(rig, layouts=text, settings=settings))
    return outcome.reason, rig.node_object.status.get("origin", "")


def origins_by_layout(rig: node_rig.NodeRig) -> dict[str, str]:
    """Return the published layouts and their origins."""
    listed = layout_list.from_json(rig.node_object.annotations[well_known.LAYOUTS_ANNOTATION])
    return {each.name: each.origin for each in listed.layouts}


def devices(rig: node_rig.NodeRig) -> list[dict[str, int]]:
    return [gpu["devices"] for gpu in rig.node_object.status["gpus"]]


def test_layouts_of_three_origins_are_served(rig: node_rig.NodeRig) -> None:
    source = fakes.FakeTextSource(OWNERS_FILE)
    agent = agents.new_agent(rig, layout_source=source)

    def origin(layout: str) -> str:
        ends.run_to(rig, layout, reasons.Reason.APPLIED, by=agent)
        return str(rig.node_object.status["origin"])

    assert origin("team-a") == "test.yaml:4"
    assert origin("all-balanced") == "test.yaml:6"
    assert devices(rig) == [{"3g.20gb": 2}] * 2
    assert origin("all-1g.5gb") == GENERATED
    assert devices(rig) == [{"1g.5gb": 7}] * 2
    before = origins_by_layout(rig)
    assert before["all-balanced"] == "test.yaml:6"
    assert before["all-1g.10gb"] == GENERATED

    source.text = OWNERS_FILE.replace("3g.20gb: 2", "2g.10gb: 3").replace("team-a", "team-b")

    assert origin("all-balanced") == "test.yaml:6"
    assert devices(rig) == [{"2g.10gb": 3}] * 2
    assert origin("all-1g.5gb") == GENERATED
    assert origins_by_layout(rig).keys() == before.keys() - {"team-a"} | {"team-b"}


def test_only_layouts_that_fit_are_listed_with_their_hash(rig: node_rig.NodeRig) -> None:
    apply(rig, "team-a")

    text = rig.node_object.annotations[well_known.LAYOUTS_ANNOTATION]
    assert "for-another-product" not in origins_by_layout(rig)
    for entry in layout_list.from_json(text).layouts:
        assert apply(rig, entry.name)[0] in (
            reasons.Reason.APPLIED,
            reasons.Reason.ALREADY_APPLIED,
        )
        assert rig.node_object.status["configHash"] == entry.content_hash
        assert rig.node_object.status["origin"] == entry.origin
    assert rig.node_object.annotations[well_known.LAYOUTS_ANNOTATION] == text


def test_generated_layouts_precede_the_default_file_which_fills_up(rig: node_rig.NodeRig) -> None:
    assert apply(rig, "all-balanced", **DEFAULT) == (reasons.Reason.APPLIED, GENERATED)
    assert devices(rig) == [layout_table.counts_of("all-balanced")] * 2
    assert apply(rig, "team-a", **DEFAULT) == (reasons.Reason.APPLIED, "test.yaml:4")


def test_generated_layouts_are_served_without_a_readable_default_file(
    rig: node_rig.NodeRig,
) -> None:
    broken = "version: v2"

    assert apply(rig, "all-1g.5gb", broken, **DEFAULT) == (reasons.Reason.APPLIED, GENERATED)
    # Of an owner's file it is not known which layouts it overrides.
    assert apply(rig, "all-1g.5gb", broken)[0] is reasons.Reason.INVALID_CONFIG


def test_without_generated_layouts_the_file_alone_counts(rig: node_rig.NodeRig) -> None:
    off: dict[str, Any] = {"generated_layouts": node_settings.GeneratedLayouts.OFF}

    assert apply(rig, "all-1g.5gb", **off)[0] is reasons.Reason.UNKNOWN_CONFIG
    assert apply(rig, "team-a", **off) == (reasons.Reason.APPLIED, "test.yaml:4")
    assert origins_by_layout(rig) == {"team-a": "test.yaml:4", "all-balanced": "test.yaml:6"}


def test_generated_layouts_can_replace_the_file(rig: node_rig.NodeRig) -> None:
    only = DEFAULT | {"generated_layouts": node_settings.GeneratedLayouts.ONLY}

    assert apply(rig, "team-a", **only)[0] is reasons.Reason.UNKNOWN_CONFIG
    assert apply(rig, "all-balanced", **only) == (reasons.Reason.APPLIED, GENERATED)
    assert set(origins_by_layout(rig).values()) == {GENERATED}


@pytest.mark.parametrize(
    "generated", [node_settings.GeneratedLayouts.MERGE, node_settings.GeneratedLayouts.ONLY]
)
def test_where_the_driver_lists_no_profiles_the_default_file_is_served(
    rig: node_rig.NodeRig, generated: node_settings.GeneratedLayouts
) -> None:
    rig.gpus = tuple(dataclasses.replace(gpu, profiles=None) for gpu in rig.gpus)
    settings = DEFAULT | {"generated_layouts": generated}

    assert apply(rig, "all-1g.5gb", **settings)[0] is reasons.Reason.UNKNOWN_CONFIG
    assert set(origins_by_layout(rig)) == {"team-a", "all-balanced", "for-another-product"}


def test_layout_selects_only_gpus_of_its_product() -> None:
    rig = nodes.node()
    rig.gpus = gpu_values.gpus_of("A100-SXM4-80GB+A30+A100-SXM4-80GB")

    assert apply(rig, "all-2g.12gb", "", **DEFAULT) == (
        reasons.Reason.APPLIED,
        "generated for NVIDIA A30",
    )
    assert [gpu.get("2g.12gb", 0) for gpu in devices(rig)] == [0, 2, 0]
    reason, origin = apply(rig, "all-balanced", "", **DEFAULT)
    assert reason is reasons.Reason.APPLIED
    assert origin == "generated for NVIDIA A100-SXM4-80GB, NVIDIA A30"
    assert devices(rig)[1] == {"2g.12gb": 1, "1g.6gb": 2}


def test_the_loss_of_the_only_gpu_of_a_generated_layout_is_found_at_rest() -> None:
    rig = nodes.node()
    rig.gpus = gpu_values.gpus_of("A100-SXM4-80GB+A30")
    agent = agents.new_agent(rig, layouts=OWNERS_FILE)
    outcome = agents.run(rig, "all-2g.12gb", by=agent)
    assert agent.check_drift("all-2g.12gb", outcome) is actions.Action.REST

    rig.driver.lost.add(rig.gpus[1].uuid)

    assert agent.check_drift("all-2g.12gb", outcome) is actions.Action.HEAL


def test_an_unknown_layout_is_compared_with_generated_ones_too(rig: node_rig.NodeRig) -> None:
    ends.run_to(
        rig,
        "all-1g.5gB",
        reasons.Reason.UNKNOWN_CONFIG,
        "did you mean 'all-1g.5gb'",
        "test.yaml and this node's generated layouts",
        layouts=OWNERS_FILE,
    )


def test_a_generated_layout_needs_no_second_observation(rig: node_rig.NodeRig) -> None:
    assert strikes.calls(nodes.node, "all-balanced").count("gpus.observe") == (
        calls_of(rig, "all-2g.10gb").count("gpus.observe")
    )


def calls_of(rig: node_rig.NodeRig, layout: str) -> list[str]:
    ends.run_to(rig, layout, reasons.Reason.APPLIED, layouts=OWNERS_FILE)
    return rig.log


@pytest.mark.parametrize("layout", [None, "all-balanced"])
def test_a_node_that_was_registered_again_gets_everything_published_again(
    rig: node_rig.NodeRig, layout: str | None
) -> None:
    agent = agents.new_agent(rig)

    def serve() -> None:
        if layout is None:
            assert not agent.restore_without_request()
        else:
            agents.run(rig, layout, by=agent)

    serve()
    published = set(rig.node_object.annotations)
    assert well_known.LAYOUTS_ANNOTATION in published
    before, rig.node_object.ready_condition = rig.gpus, None
    rig.node_object.annotations.clear()
    rig.node_object.labels.pop(well_known.STATE_LABEL, None)
    rig.node_object.labels.pop(well_known.APPLIED_LABEL, None)
    rig.driver.executed_steps.clear()

    agent.forget_node()
    serve()

    assert set(rig.node_object.annotations) == published
    assert rig.node_object.ready_condition is not None
    assert rig.node_object.labels.get(well_known.APPLIED_LABEL) == layout
    assert (rig.driver.executed_steps, rig.gpus) == ([], before)


def test_layouts_are_written_without_a_label_until_that_succeeds(rig: node_rig.NodeRig) -> None:
    written: list[str] = []
    answers = [False, True]

    def write(document: str) -> bool:
        written.append(document)
        return answers[len(written) - 1]

    agent = agents.new_agent(rig, layouts=OWNERS_FILE, write_layouts=write)
    for _ in range(2):
        agent.restore_without_request()
    agents.run(rig, "team-a", by=agent)

    refused, document = written
    assert refused == document
    entries = layout_parser.parse(document, source="ConfigMap").layouts.values()
    assert (
        layout_list.to_json(
            dataclasses.replace(
                layout_list.Entry.of(each), origin=origins_by_layout(rig)[each.name]
            )
            for each in entries
        )
        == rig.node_object.annotations[well_known.LAYOUTS_ANNOTATION]
    )
    assert origins_by_layout(rig)["all-7g.40gb"] == GENERATED


def test_a_list_that_could_not_be_published_is_published_later(rig: node_rig.NodeRig) -> None:
    undisturbed = calls_of(nodes.node(), "team-a")
    at = len(undisturbed) - undisturbed[::-1].index("node.patch") - 1
    rig.failures.add(at, call_errors.broken("node"))
    written: list[str] = []

    def write(document: str) -> bool:
        written.append(document)
        return True

    agent = agents.new_agent(rig, layouts=OWNERS_FILE, write_layouts=write)
    with pytest.raises(errors.ClusterError):
        agents.run(rig, "team-a", by=agent)
    rig.failures.add("gpus.observe", call_errors.broken("gpus"))
    agent.recover("team-a")
    ends.run_to(rig, "team-a", reasons.Reason.NVML_ERROR, by=agent)
    rig.failures.clear()
    assert well_known.LAYOUTS_ANNOTATION not in rig.node_object.annotations
    assert not written

    agents.run(rig, "team-a", by=agent)

    assert "team-a" in origins_by_layout(rig)
    assert len(written) == 1
