"""The agent with ``--lenient``."""

from collections.abc import Mapping

import pytest
import structlog.testing

from mig_manager import errors
from mig_manager.agent import planning, record
from mig_manager.core import model
from tests import fakes, scenes

TWICE = scenes.CONFIG + "  all-disabled:\n  - {devices: all, mig-enabled: false}\n"


@pytest.fixture
def overlooked(monkeypatch: pytest.MonkeyPatch) -> structlog.testing.LogCapture:
    """What the run logs of what it passes; a logger of its own, for others may be configured."""
    captured = structlog.testing.LogCapture()

    def only_that(
        _logger: object, _name: str, event: structlog.typing.EventDict
    ) -> Mapping[str, object]:
        if event["event"] != "config_overlooked":
            raise structlog.DropEvent
        return event

    logger = structlog.wrap_logger(None, processors=[only_that, captured])
    monkeypatch.setattr(planning, "_log", logger)
    return captured


def play(rig: fakes.NodeRig, layout: str, text: str, *, is_lenient: bool) -> record.Outcome:
    request = fakes.FakeRequest(rig.clock)
    return scenes.reconciler(rig, text, is_lenient=is_lenient).run(layout, request)


def test_a_document_that_mig_parted_accepts_is_applied_with_a_warning(
    overlooked: structlog.testing.LogCapture,
) -> None:
    rig = scenes.node()

    outcome = play(rig, "all-1g.5gb", TWICE, is_lenient=True)

    assert outcome.state is model.State.SUCCESS
    (warning,) = overlooked.entries
    assert warning["log_level"] == "warning"
    assert str(warning["place"]).endswith(":21:3")
    assert "key 'all-disabled' is given twice" in str(warning["problem"])


def test_the_same_document_is_refused_by_a_strict_agent() -> None:
    outcome = play(scenes.node(), "all-1g.5gb", TWICE, is_lenient=False)

    assert outcome.reason is errors.Reason.INVALID_CONFIG


def test_a_layout_for_other_gpus_counts_as_active_as_in_mig_parted(
    overlooked: structlog.testing.LogCapture,
) -> None:
    rig = scenes.node(layout="all-balanced")
    gpus = rig.gpus

    outcome = play(rig, "other-gpu", scenes.CONFIG, is_lenient=True)

    assert outcome.state is model.State.SUCCESS
    assert rig.gpus == gpus
    problems = [str(each["problem"]) for each in overlooked.entries]
    assert any("is about none of this node's GPUs" in each for each in problems)


@pytest.mark.parametrize("layout", ["too-much", "no-such-profile"])
def test_what_the_gpus_cannot_have_is_refused_all_the_same(layout: str) -> None:
    rig = scenes.node(layout="all-balanced")
    gpus = rig.gpus

    outcome = play(rig, layout, scenes.CONFIG, is_lenient=True)

    assert outcome.state is model.State.FAILED
    assert rig.gpus == gpus


def test_a_layout_with_placements_is_served_like_any_other() -> None:
    text = scenes.CONFIG + (
        "  placed:\n  - {devices: [0], mig-enabled: true, mig-devices: {1g.5gb@4: 1}}\n"
    )
    rig = scenes.node()

    outcome = play(rig, "placed", text, is_lenient=False)

    assert outcome.state is model.State.SUCCESS
    assert [gi.placement.start for gi in rig.gpus[0].gpu_instances] == [4]


def test_a_place_that_cannot_be_fails_before_anything_is_touched() -> None:
    text = scenes.CONFIG + (
        "  clash:\n  - {devices: all, mig-enabled: true, "
        "mig-devices: {1g.5gb@4: 1, 3g.20gb@4: 1}}\n"
    )
    rig = scenes.node(layout="all-balanced")
    gpus = rig.gpus

    outcome = play(rig, "clash", text, is_lenient=False)

    assert outcome.reason is errors.Reason.DOES_NOT_FIT
    assert "test.yaml:22:5: the layout does not fit GPU 0" in outcome.message
    assert rig.gpus == gpus
    scenes.assert_nothing_taken(rig)
