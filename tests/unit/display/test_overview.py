"""The overview of a cluster's nodes: GPUs to scale, what is in use, and what pods wait for."""

import datetime as dt
from collections.abc import Sequence
from typing import Any

import pytest

from mig_manager.core import model
from mig_manager.core.display import styles
from mig_manager.core.fleet import fleet_nodes, node_reports, overview
from mig_manager.core.objects import pod_object, pod_parser, well_known
from mig_manager.core.records import journals, run_status
from tests.rigs import api_objects
from tests.rigs.node import samples

PLAIN = styles.Style(columns=100)
NOW = dt.datetime(2026, 3, 1, tzinfo=dt.UTC)
AT = "2026-03-01T00:00:00Z"
BALANCED = samples.gpu(samples.A100, "2g.10gb@0", "1g.5gb@2", "1g.5gb@3", "3g.20gb@4")
OFF = samples.gpu(samples.A100, mode=model.MigMode.DISABLED)
TWO_OFF = [samples.gpu(samples.A100, mode=model.MigMode.DISABLED, index=n) for n in (0, 1)]
TWO_ON = [samples.gpu(samples.A100, "3g.20gb@4", index=n) for n in (0, 1)]
WHOLE = model.Placement(0, 8)
ONE_FREE = samples.gpu(samples.A100, "3g.20gb@4")


def node(
    gpus: model.Gpu | Sequence[model.Gpu],
    *in_use: model.Placement,
    applied: str = "balanced",
    before: str = "",
    strategy: str = "mixed",
    shared: str = "",
    state: run_status.State = run_status.State.SUCCESS,
    **members: str,
) -> fleet_nodes.FleetNode:
    """Build a node; on the last of several GPUs these are in use, on the others nothing."""
    every = [gpus] if isinstance(gpus, model.Gpu) else gpus
    use = {gpu.uuid: () for gpu in every} | {every[-1].uuid: in_use} if in_use else None
    text = api_objects.a_status("balanced", state, startedAt=AT, **members)
    annotations = api_objects.annotations_of_agent(every, status_text=text, in_use=use, at=AT)
    if before:
        journal = journals.Journal(layout="balanced", applied_before=before)
        annotations[well_known.JOURNAL_ANNOTATION] = journal.to_json()
    labels = {well_known.CONFIG_LABEL: "balanced", well_known.APPLIED_LABEL: applied}
    if strategy:
        labels["nvidia.com/mig.strategy"] = strategy
    allocatable = {} if strategy else {"nvidia.com/gpu": "2"}
    if shared:
        allocatable[f"nvidia.com/{shared}"] = "8"
    item = api_objects.a_node("a", labels, annotations=annotations, allocatable=allocatable)
    item["status"]["capacity"] = allocatable
    return fleet_nodes.parse(item)


def pod(name: str, profile: str, *, on: str = "a") -> pod_object.Pod:
    claims = {"resourceClaims": [{"name": "c", "resourceClaimName": "c"}]}
    how: dict[str, Any] = (
        {"spec": claims} if profile == "claim" else {"limits": {f"nvidia.com/{profile}": 1}}
    )
    return pod_parser.parse(api_objects.a_pod(name, node=on, **how))


def drawn(
    one: fleet_nodes.FleetNode, *pods: pod_object.Pod, style: styles.Style = PLAIN
) -> list[str]:
    return overview.draw(
        overview.Overview(reports=[node_reports.of(one, NOW)], pods=pods), style=style
    )


@pytest.mark.parametrize(
    ("one", "pods", "strip"),
    [
        (node(BALANCED), [], "0 │2g░░░░░│1g░│1g░│3g░░░░░░░░░░░░░│"),
        (node(BALANCED), ["mig-2g.10gb", "mig-1g.5gb"], "0 │2g█████│1g█│1g░│3g░░░░░░░░░░░░░│"),
        (
            # Published, so it is known which of the two.
            node(BALANCED, model.Placement(3, 1)),
            ["mig-1g.5gb"],
            "0 │2g░░░░░│1g░│1g█│3g░░░░░░░░░░░░░│",
        ),
        (
            # Published before that pod ended.
            node(BALANCED, model.Placement(3, 1)),
            [],
            "0 │2g░░░░░│1g░│1g░│3g░░░░░░░░░░░░░│",
        ),
        (node(ONE_FREE), ["mig-3g.20gb"], "0 │···············│3g█████████████│"),
        (node(ONE_FREE, strategy="single"), ["gpu"], "0 │···············│3g█████████████│"),
        (
            # Without the label, the node's resources show the strategy.
            node(ONE_FREE, strategy=""),
            ["gpu"],
            "0 │···············│3g█████████████│",
        ),
        (
            # The device plugin gives the whole GPU.
            node(ONE_FREE, strategy="none"),
            ["gpu"],
            "0 │███████████████│3g█████████████│",
        ),
        (
            # Published before the instance was destroyed.
            node(ONE_FREE, model.Placement(0, 4)),
            ["claim"],
            "0 │···············│3g░░░░░░░░░░░░░│",
        ),
        (
            # Four pods can share one.
            node(BALANCED, shared="mig-1g.5gb"),
            ["mig-1g.5gb"] * 4,
            "0 │2g░░░░░│1g█│1g░│3g░░░░░░░░░░░░░│",
        ),
        (
            node(BALANCED, shared="mig-1g.5gb.shared"),
            ["mig-1g.5gb.shared"] * 5,
            "0 │2g░░░░░│1g█│1g█│3g░░░░░░░░░░░░░│",
        ),
        (
            node(
                BALANCED, model.Placement(2, 1), model.Placement(3, 1), shared="mig-1g.5gb.shared"
            ),
            ["mig-1g.5gb.shared"] * 2,
            "0 │2g░░░░░│1g█│1g█│3g░░░░░░░░░░░░░│",
        ),
        (node(OFF), ["gpu"], "0 │MIG off████████████████████████│"),
        (node(OFF), [], "0 │MIG off░░░░░░░░░░░░░░░░░░░░░░░░│"),
        (node(OFF, WHOLE), ["claim"], "0 │MIG off████████████████████████│"),
        (
            node(TWO_OFF, WHOLE),
            ["gpu"],
            "0 │MIG off░░░░░░░░░░░░░░░░░░░░░░░░│  1 │MIG off████████████████████████│",
        ),
        (
            node(TWO_ON, model.Placement(4, 4), strategy="none"),
            ["gpu"],
            "0 │···············│3g░░░░░░░░░░░░░│  1 │███████████████│3g█████████████│",
        ),
    ],
)
def test_an_instance_in_use_is_filled_as_pods_request_it(
    one: fleet_nodes.FleetNode, pods: list[str], strip: str
) -> None:
    requests = [pod(str(number), each) for number, each in enumerate(pods)]
    assert drawn(one, *requests)[1].strip() == strip


@pytest.mark.parametrize(
    ("one", "line"),
    [
        (node(BALANCED), "  a  success     balanced"),
        (
            node(
                BALANCED,
                applied="",
                state=run_status.State.PENDING,
                phase="Drain",
                message="1 pod to evict",
            ),
            "  a  pending     - → balanced  Drain: 1 pod to evict",
        ),
        (
            node(
                BALANCED,
                applied="",
                before="halves",
                state=run_status.State.PENDING,
                phase="Execute",
            ),
            "  a  pending     halves → balanced  Execute",
        ),
        (
            node(
                BALANCED,
                state=run_status.State.FAILED,
                reason="DrainTimeout",
                message="waiting " * 20,
            ),
            f"  a  failed      balanced  DrainTimeout: {'waiting ' * 7}wa…",
        ),
    ],
)
def test_a_node_has_one_line_with_its_state_layout_and_reason(
    one: fleet_nodes.FleetNode, line: str
) -> None:
    assert drawn(one)[0] == line
    assert len(line) <= 100


def test_pending_pods_are_counted_by_the_devices_that_they_wait_for() -> None:
    waiting = [pod("b", "mig-7g.40gb", on=""), pod("c", "mig-7g.40gb", on="")]
    others = pod("d", "gpu", on=""), pod("e", "mig-1g.5gb")
    last = drawn(node(BALANCED), *waiting, *others)[-1]
    assert last == "2 pods wait for MIG devices: 2x mig-7g.40gb"


def test_the_overview_fits_a_narrow_terminal_without_unicode() -> None:
    one = node(BALANCED, state=run_status.State.FAILED, reason="DrainTimeout", message="x" * 200)
    lines = drawn(one, style=styles.Style(columns=60, unicode=False))
    assert max(map(len, lines)) <= 60
    assert all(map(str.isascii, lines))
