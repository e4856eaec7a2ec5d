"""How a node stands, judged from what the API tells of it."""

import datetime as dt
import json
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mig_manager import errors
from mig_manager.core import model
from mig_manager.core.fleet import node_report
from mig_manager.core.node import cluster
from mig_manager.core.records import gpu_codec
from tests.unit import boards

NOW = dt.datetime(2026, 3, 1, 12, 0, 0, tzinfo=dt.UTC)
GPUS = gpu_codec.to_json([boards.gpu(boards.A100, "1g.5gb@0")])
Standing = node_report.Standing

WITHOUT_ONE = gpu_codec.to_json(
    model.ObservedGpus(
        gpu_codec.from_json(GPUS),
        [
            model.UnreachableGpu(
                index=7,
                uuid="GPU-7",
                pci_address="00000000:0f:00.0",
                reason=errors.Reason.GPU_LOST,
                code=15,
                message="lost",
            )
        ],
    )
)


def at(**ago: float) -> str:
    return (NOW - dt.timedelta(**ago)).strftime("%Y-%m-%dT%H:%M:%SZ")


def status(**members: object) -> str:
    return json.dumps(
        {"config": "wish", "state": "success", "phase": "Done", "startedAt": at(minutes=5)}
        | members
    )


def judge(
    told: str | None,
    *,
    wish: str | None = "wish",
    applied: str = "wish",
    labels: Mapping[str, str] | None = None,
    gpus: str | None = GPUS,
    is_ready: bool = True,
) -> node_report.Report:
    wished = {cluster.CONFIG_LABEL: wish} if wish is not None else {}
    annotations = {cluster.STATUS_ANNOTATION: told, cluster.GPUS_ANNOTATION: gpus}
    view = cluster.NodeView(
        name="n1",
        uid="",
        labels=wished | {cluster.APPLIED_LABEL: applied} | dict(labels or {}),
        annotations={key: text for key, text in annotations.items() if text is not None},
        is_unschedulable=False,
        taint_keys=frozenset(),
        allocatable={},
    )
    return node_report.judge(node_report.Node(view=view, is_ready=is_ready), NOW)


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (status(), Standing.IN_FORCE),
        (status(state="pending"), Standing.CHANGING),
        (status(state="rebooting"), Standing.CHANGING),
        (status(state="pending", startedAt=at(hours=2)), Standing.STALE),
        (status(state="pending", startedAt="long ago"), Standing.STALE),
        (status(state="pending", phase="Wait", startedAt=at(hours=9)), Standing.CHANGING),
        (status(state="failed", reason="DoesNotFit"), Standing.FAILED),
        (status(state="failed", reason="Drifted"), Standing.DRIFTED),
        (status(config="other"), Standing.BEHIND),
        (status(state="new"), Standing.UNREADABLE),
        ("{", Standing.UNREADABLE),
        ("[" * 100_000, Standing.UNREADABLE),
        ("7", Standing.UNREADABLE),
        (None, Standing.NO_AGENT),
    ],
)
def test_a_wish_and_its_answer_make_a_standing(told: str | None, expected: Standing) -> None:
    assert judge(told).standing is expected
    assert expected.is_good is (expected is Standing.IN_FORCE)


@pytest.mark.parametrize("wish", [None, ""])
def test_a_node_without_a_wish_has_nothing_to_answer_to(wish: str | None) -> None:
    report = judge(status(), wish=wish)

    assert report.standing is Standing.NO_WISH
    assert report.standing.is_good
    assert "nobody wishes" in report.notes[0]


def test_a_status_that_cannot_be_read_is_told_even_where_nothing_is_wished() -> None:
    assert judge("{", wish=None).standing is Standing.UNREADABLE


@pytest.mark.parametrize(
    ("report", "note"),
    [
        (judge(status(), is_ready=False), "not ready"),
        (judge(status(), applied="other"), "says other"),
        (judge(status(), gpus=None), "no agent has published"),
        (judge(status(), gpus="{"), "cannot be read"),
        (
            judge(status(), gpus=WITHOUT_ONE),
            "GPU 7 (GPU-7, 00000000:0f:00.0) is unreachable",
        ),
        (judge(status(config="other")), "last told of layout other"),
        (judge(status(state="pending", startedAt=at(hours=2))), "nothing more was told since"),
        (judge(status(state="failed", retryAt=at(hours=1))), "next try was due"),
        (judge(None, labels={cluster.STATE_LABEL: "success"}), "another manager"),
    ],
)
def test_what_is_odd_is_noted(report: node_report.Report, note: str) -> None:
    assert any(note in each for each in report.notes), report.notes


def test_a_node_that_is_well_has_no_notes_and_its_gpus() -> None:
    report = judge(status(retryAt=at(minutes=1)))

    assert report.notes == ()
    assert report.gpus
    assert report.gpus[0].name == "Test GPU"


@pytest.mark.parametrize(
    ("labels", "is_about"),
    [
        ({}, False),
        ({"nvidia.com/gpu.present": "true"}, True),
        ({"nvidia.com/mig.capable": "true"}, True),
        ({"nvidia.com/mig.capable": "false"}, False),
        ({cluster.CONFIG_LABEL: "x"}, True),
    ],
)
def test_a_node_is_about_gpus_when_anything_says_so(
    labels: dict[str, str], *, is_about: bool
) -> None:
    node = judge(None, wish=None, labels=labels, gpus=None).node

    assert node.is_about_gpus is is_about


@given(st.dictionaries(st.sampled_from(["config", "reason", "phase", "message"]), st.text()))
def test_texts_of_a_status_are_harmless(members: dict[str, str]) -> None:
    told = node_report.read(status(**members))

    assert (told.config + told.reason + told.phase + told.message).isprintable()
    assert model.State.SUCCESS is told.state


@given(st.recursive(st.none() | st.integers() | st.text(), st.lists, max_leaves=5))
def test_members_of_any_type_provoke_no_more_than_a_refusal(value: object) -> None:
    for name in ("config", "state", "phase", "attempt", "startedAt", "retryAt", "message"):
        judge(status(**{name: value}))
