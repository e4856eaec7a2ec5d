"""The owner's file changes below an active layout: what stays, what fails, what is new."""

import pytest

from mig_manager.core.objects import well_known
from mig_manager.reasons import Reason
from tests.pipeline.requests.stories import Story
from tests.rigs.node import agents, nodes

EDITED_FILE = agents.LAYOUTS_TEXT.replace("2g.10gb: 1, ", "")
"""The layout has other content than the generated one of its name."""


def active_by_own_file() -> Story:
    """Return a node with a layout of the owner, whose name a generated one has, too."""
    story = Story(nodes.node())
    story.source.text = EDITED_FILE
    story.run_agent(story.label("all-balanced"))
    used = frozenset({nodes.device(story.rig, 0, "3g.20gb")})
    story.rig.pods.add("training", devices=used)
    story.rig.forget_past()
    return story


@pytest.mark.parametrize(
    ("text", "reason", "words"),
    [
        (EDITED_FILE.replace("{1g.5gb: 2,", "{1g.5gb: 2,,"), "InvalidConfig", "test.yaml:8:"),
        (
            EDITED_FILE.replace("  all-balanced:", "  all-balancd:"),
            "UnknownConfig",
            "a generated layout",
        ),
    ],
    ids=["typo", "misspelt name"],
)
@pytest.mark.parametrize("is_restarted", [False, True])
def test_an_active_layout_survives_a_file_that_lacks_it(
    text: str, reason: str, words: str, *, is_restarted: bool
) -> None:
    story = active_by_own_file()
    gpus = story.rig.gpus

    if is_restarted:
        story.source.text = text
        story.run_agent()
    else:
        story.run_agent(story.file(text))

    assert story.reasons[-1] is Reason.ALREADY_APPLIED
    assert (story.rig.node_object.labels[well_known.STATE_LABEL], story.rig.gpus) == (
        "success",
        gpus,
    )
    assert not story.rig.driver.executed_steps
    assert reason in story.rig.node_object.events
    assert story.rig.node_object.ready_condition is not None
    assert story.rig.node_object.ready_condition["status"] == "True"
    for message in (
        story.rig.node_object.status_messages[-1],
        story.rig.node_object.ready_condition["message"],
    ):
        assert words in message


def test_a_new_request_fails_for_a_file_that_cannot_be_read() -> None:
    story = active_by_own_file()

    story.run_agent(
        story.file("version: ["), story.label("all-1g.5gb"), story.label("all-balanced")
    )

    assert story.reasons[-2:] == [Reason.INVALID_CONFIG, Reason.INVALID_CONFIG]
    assert story.rig.node_object.labels[well_known.STATE_LABEL] == "failed"


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_drifted_layout_fails_for_a_file_that_cannot_be_read(*, is_restarted: bool) -> None:
    story = active_by_own_file()
    nodes.add_pod_on_unowned_instances(story.rig)

    if is_restarted:
        story.source.text = "version: ["
        story.run_agent()
    else:
        story.run_agent(story.file("version: ["))

    assert story.reasons[-1] is Reason.INVALID_CONFIG
    assert well_known.APPLIED_LABEL not in story.rig.node_object.labels


def test_generated_layout_of_the_same_content_replaces_that_of_the_file() -> None:
    story = Story(nodes.node())

    story.run_agent(
        story.label("all-balanced"),
        story.file(agents.LAYOUTS_TEXT.replace("  all-balanced:", "  all-balancd:")),
    )

    assert story.reasons[-2:] == [Reason.APPLIED, Reason.ALREADY_APPLIED]
    assert "UnknownConfig" not in story.rig.node_object.events


def test_a_new_request_takes_a_generated_layout_for_that_of_the_file() -> None:
    story = active_by_own_file()

    story.run_agent(
        story.file(EDITED_FILE.replace("  all-balanced:", "  all-balancd:")),
        story.label(None),
        story.label("all-balanced"),
    )

    assert story.reasons[-1] is Reason.APPLIED
