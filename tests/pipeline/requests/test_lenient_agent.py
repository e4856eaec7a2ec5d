"""The agent with ``--lenient``."""

from collections.abc import Iterable, Iterator

import pytest
import structlog.testing
import structlog.typing

from mig_manager.core.records import run_status
from mig_manager.reasons import Reason
from tests.pipeline import custom_requests
from tests.rigs.node import agents, ends, node_rig, nodes

TWICE = agents.LAYOUTS_TEXT + "  all-disabled:\n  - {devices: all, mig-enabled: false}\n"


@pytest.fixture
def logs() -> Iterator[list[structlog.typing.EventDict]]:
    """What the run logs."""
    with structlog.testing.capture_logs() as logs:
        yield logs


def warnings(logs: Iterable[structlog.typing.EventDict]) -> list[structlog.typing.EventDict]:
    return [each for each in logs if each["event"] == "config_overlooked"]


def lenient(rig: node_rig.NodeRig, text: str = agents.LAYOUTS_TEXT) -> agents.AgentInMemory:
    return agents.new_agent(rig, layouts=text, is_lenient=True)


def test_lenient_agent_applies_with_a_warning_what_a_strict_one_refuses(
    logs: list[structlog.typing.EventDict],
) -> None:
    rig = nodes.node()

    ends.run_to(rig, "all-1g.5gb", Reason.INVALID_CONFIG, layouts=TWICE)
    ends.run_to(rig, "all-1g.5gb", Reason.APPLIED, by=lenient(rig, TWICE))

    (warning,) = warnings(logs)
    assert warning["log_level"] == "warning"
    assert str(warning["place"]).endswith(":20:3")
    assert "key 'all-disabled' is given twice" in str(warning["problem"])


def test_lenient_agent_applies_an_annotation_with_a_warning(
    logs: list[structlog.typing.EventDict],
) -> None:
    rig = nodes.busy_node()
    agent = agents.new_agent(rig, is_lenient=True, settings=custom_requests.ON)
    twice = custom_requests.custom_layout(custom_requests.CHANGED + "version: v1\n")

    assert custom_requests.request_custom(rig, twice, by=agent).reason is Reason.APPLIED

    (warning,) = warnings(logs)
    assert "key 'version' is given twice" in str(warning["problem"])


def test_a_layout_for_other_gpus_counts_as_active_as_in_mig_parted(
    logs: list[structlog.typing.EventDict],
) -> None:
    rig = nodes.node(layout="all-balanced")
    gpus = rig.gpus

    ends.run_to(rig, "other-gpu", Reason.ALREADY_APPLIED, by=lenient(rig))

    assert rig.gpus == gpus
    problems = [str(each["problem"]) for each in warnings(logs)]
    assert any("selects none of this node's GPUs" in each for each in problems)


@pytest.mark.parametrize("layout", ["too-much", "no-such-profile"])
def test_a_lenient_agent_still_refuses_an_impossible_layout(layout: str) -> None:
    rig = nodes.node(layout="all-balanced")
    gpus = rig.gpus

    assert agents.run(rig, layout, by=lenient(rig)).state is run_status.State.FAILED
    assert rig.gpus == gpus


def test_a_layout_with_placements_is_served_like_any_other() -> None:
    text = agents.LAYOUTS_TEXT + (
        "  placed:\n  - {devices: [0], mig-enabled: true, mig-devices: {1g.5gb@4: 1}}\n"
    )
    rig = nodes.node()

    ends.run_to(rig, "placed", Reason.APPLIED, layouts=text)

    assert [gi.placement.start for gi in rig.gpus[0].gpu_instances] == [4]
