"""The state of a node, from its labels and annotations."""

import datetime as dt
import json
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mig_manager import reasons
from mig_manager.agent import outcomes
from mig_manager.core import messages, model
from mig_manager.core.fleet import fleet_nodes, node_reports
from mig_manager.core.objects import well_known
from mig_manager.core.records import (
    applied_gpus,
    gpu_recovery,
    inventory_codec,
    readiness,
    requests,
    run_status,
)
from tests.rigs.node import samples

NOW = dt.datetime(2026, 3, 1, 12, 0, 0, tzinfo=dt.UTC)
GPUS = inventory_codec.to_json([samples.gpu(samples.A100, "1g.5gb@0")])
NodeState = node_reports.NodeState

WITHOUT_ONE = inventory_codec.to_json(
    model.ObservedGpus(
        inventory_codec.from_json(GPUS),
        [
            model.UnreachableGpu(
                index=7,
                uuid="GPU-7",
                pci_address="00000000:0f:00.0",
                reason=reasons.Reason.GPU_LOST,
                code=15,
                message="lost",
            )
        ],
    )
)


def at(**ago: float) -> str:
    return (NOW - dt.timedelta(**ago)).strftime("%Y-%m-%dT%H:%M:%SZ")


READY = {"type": "Ready", "status": "True"}
LOST, UNKNOWN, WELL = (
    condition.entry({"status": "new"}, at())
    for condition in (
        gpu_recovery.none_reachable("GPU 0 is lost"),
        readiness.unknown("wide", reasons.Reason.DRIVER_NOT_LOADED, "no driver"),
        gpu_recovery.NONE_NEEDED,
    )
)


def status(**members: object) -> str:
    return json.dumps(
        {"config": "wide", "state": "success", "phase": "Done", "startedAt": at(minutes=5)}
        | members
    )


def report(  # noqa: PLR0913 - each is named where it is called
    published: str | None,
    *,
    requested_layout: str | None = "wide",
    applied: str = "wide",
    labels: Mapping[str, str] | None = None,
    gpus: str | None = GPUS,
    condition: Mapping[str, str] | None = READY,
    verified_in: str = "boot-1",
) -> node_reports.NodeReport:
    requested = {well_known.CONFIG_LABEL: requested_layout} if requested_layout is not None else {}
    fingerprints = applied_gpus.GpuFingerprints(boot_id=verified_in, gpus={})
    record = requests.RequestRecord(layout="wide", applied_fingerprints=fingerprints)
    annotations = {
        well_known.STATUS_ANNOTATION: published,
        well_known.GPUS_ANNOTATION: gpus,
        well_known.REQUEST_ANNOTATION: record.to_json(),
    }
    item = {
        "metadata": {
            "name": "n1",
            "labels": requested | {well_known.APPLIED_LABEL: applied} | dict(labels or {}),
            "annotations": {key: text for key, text in annotations.items() if text is not None},
        },
        "status": {"conditions": [condition], "nodeInfo": {"bootID": "boot-1"}},
    }
    return node_reports.of(fleet_nodes.parse(item), NOW)


@pytest.mark.parametrize(
    ("published", "expected"),
    [
        (status(), NodeState.SUCCESS),
        (status(state="pending"), NodeState.PENDING),
        (status(state="rebooting"), NodeState.REBOOTING),
        (status(state="pending", startedAt=at(hours=2)), NodeState.STALE),
        (status(state="pending", startedAt="long ago"), NodeState.STALE),
        (status(state="pending", phase="Wait", startedAt=at(hours=9)), NodeState.PENDING),
        (status(state="failed", reason="DoesNotFit"), NodeState.FAILED),
        (status(config="other"), NodeState.WAITING),
        (status(state="new"), NodeState.UNREADABLE),
        ("{", NodeState.UNREADABLE),
        ("[" * 100_000, NodeState.UNREADABLE),
        ("7", NodeState.UNREADABLE),
        (None, NodeState.NO_AGENT),
    ],
)
def test_request_and_status_make_a_state(published: str | None, expected: NodeState) -> None:
    assert report(published).state is expected
    assert expected.is_good is (expected is NodeState.SUCCESS)


@pytest.mark.parametrize("label", [None, ""])
def test_a_node_without_a_request_is_good(label: str | None) -> None:
    node_report = report(status(), requested_layout=label)

    assert node_report.state is NodeState.NO_REQUEST
    assert node_report.state.is_good
    assert "no longer requested" in node_report.notes[0]


def test_a_failure_is_over_once_its_layout_is_not_requested() -> None:
    failed = status(state="failed", reason="DoesNotFit", retryAt=at(hours=1))

    node_report = report(failed, requested_layout=None)

    assert node_report.last_run is None
    assert node_report.notes == ("layout wide failed (DoesNotFit), and is no longer requested",)
    assert report(failed).last_run
    assert report(status(), requested_layout=None).last_run


def test_a_malformed_status_is_reported_even_without_a_request() -> None:
    assert report("{", requested_layout=None).state is NodeState.UNREADABLE


@pytest.mark.parametrize(
    ("node_report", "note"),
    [
        (report(status(), condition=READY | {"status": "False"}), "not ready"),
        (report(status(), applied="other"), "is other"),
        (report(status(), verified_in="boot-0"), "has rebooted since"),
        (report(status(), gpus=None), "no agent shows"),
        (report(status(), gpus=None, condition=LOST), "No GPU can be observed: GPU 0 is lost."),
        (report(status(), gpus=None, condition=UNKNOWN), "no GPU can be observed: no driver."),
        (report(status(), gpus=None, condition=WELL), "no agent shows"),
        (report(status(), gpus="{"), "cannot be read"),
        (
            report(status(), gpus=WITHOUT_ONE),
            "GPU 7 (GPU-7, 00000000:0f:00.0) is unreachable",
        ),
        (report(status(config="other")), "last reported layout other"),
        (report(status(state="pending", startedAt=at(hours=2))), "no report since"),
        (report(status(state="failed", retryAt=at(hours=1))), "next retry was scheduled"),
        (report(None, labels={well_known.STATE_LABEL: "success"}), "another MIG manager"),
        (report(status(), labels={well_known.STATE_LABEL: "failed"}), "another program"),
        (
            report(None, requested_layout=None, labels={"nvidia.com/mig-config": "x"}),
            "label nvidia.com/mig-config has no effect; write nvidia.com/mig.config",
        ),
    ],
)
def test_unusual_facts_are_noted(node_report: node_reports.NodeReport, note: str) -> None:
    assert any(note in each for each in node_report.notes), node_report.notes


def test_a_healthy_node_has_gpus_and_no_notes() -> None:
    node_report = report(status(retryAt=at(minutes=1)))

    assert node_report.notes == ()
    assert node_report.gpus
    assert node_report.gpus[0].name == "Test GPU"


@pytest.mark.parametrize(
    ("labels", "has_gpus"),
    [
        ({}, False),
        ({"nvidia.com/gpu.present": "true"}, True),
        ({"nvidia.com/mig.capable": "true"}, True),
        ({"nvidia.com/mig.capable": "false"}, False),
        ({well_known.CONFIG_LABEL: "x"}, True),
    ],
)
def test_labels_indicate_gpus(labels: dict[str, str], *, has_gpus: bool) -> None:
    node = report(None, requested_layout=None, labels=labels, gpus=None).node

    assert node.has_gpus is has_gpus


@given(st.dictionaries(st.sampled_from(["config", "reason", "phase", "message"]), st.text()))
def test_the_texts_of_a_status_are_printable(members: dict[str, str]) -> None:
    parsed = run_status.parse(status(**members))

    assert (parsed.layout + parsed.reason + parsed.phase + parsed.message).isprintable()
    assert run_status.State.SUCCESS is parsed.state


def test_the_longest_message_of_an_agent_is_read_with_its_remedy() -> None:
    outcome = outcomes.failure(reasons.Reason.DRAIN_TIMEOUT, "a-long-word " * 2_000)

    assert run_status.parse(status(message=outcome.message)).message == outcome.message
    # Of any other writer, a message is bounded.
    read = run_status.parse(status(message="word " * 20_000 + "end. Read the log."))
    assert len(read.message) <= messages.MAX_BYTES
    assert read.message.endswith(" ... Read the log.")


@given(st.recursive(st.none() | st.integers() | st.text(), st.lists, max_leaves=5))
def test_members_of_any_type_raise_nothing(value: object) -> None:
    for name in ("config", "state", "phase", "attempt", "startedAt", "retryAt", "message"):
        report(status(**{name: value}))


@pytest.mark.parametrize("attempt", [True, -1, 2**31, 1.5, "2", None])
def test_a_malformed_attempt_number_counts_as_the_first(attempt: object) -> None:
    assert repr(run_status.parse(status(attempt=attempt)).attempt) == "1"
