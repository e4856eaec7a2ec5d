"""Sentences of the plugin, for cases that are rare in a cluster."""

import dataclasses
import datetime as dt

import pytest

from mig_manager.adapters import cluster_reader
from mig_manager.cli.toolkit import gpu_text, plan_table
from mig_manager.core import model
from mig_manager.core.display import styles
from mig_manager.core.fleet import fleet_nodes, node_moments, node_reports
from mig_manager.core.layout import layout_parser
from mig_manager.core.node.devices import resources
from mig_manager.core.objects import pod_parser
from mig_manager.core.records import run_status
from mig_manager.kubectl import node_history, node_plans, node_status
from mig_manager.kubectl.commands import history, status
from tests.rigs.node import samples
from tests.rigs.shell import plugin_rig

NOW = dt.datetime(2026, 3, 1, 12, 0, 0, tzinfo=dt.UTC)
KIND = "nvidia.com/mig-1g.5gb"
PLAIN = styles.Style()


@pytest.mark.parametrize(
    ("count", "pods", "text"),
    [
        (7, {}, "7 free"),
        (7, {"ml/a": 1, "ml/b": 2}, "3 of 7 in use by ml/a, ml/b (2)"),
        (7, {"ml/a": 7}, "all 7 in use by ml/a (7)"),
        (1, {"ml/a": 1}, "1 in use by ml/a"),
        (2, {"ml/a": 4}, "4 requested of 2, shared or pending: ml/a (4)"),
        (0, {"ml/a": 1}, "1 requested, none exist: ml/a"),
        (
            9,
            {f"ml/{n}": 1 for n in range(9)},
            "all 9 in use by " + ", ".join(f"ml/{n}" for n in range(8)) + " and 1 more",
        ),
    ],
)
def test_the_use_of_a_device_kind_is_explained(
    count: int, pods: dict[str, int], text: str
) -> None:
    assert node_status.usage(resources.DeviceKind(resource=KIND, count=count, pods=pods)) == text


@pytest.mark.parametrize(
    ("resource", "destroyed", "count", "may_evict", "text"),
    [
        (KIND, 4, 1, True, "4 of 4 1g.5gb destroyed, which evicts ml/a"),
        (f"{KIND}.me", 4, 1, True, "4 of 4 1g.5gb+me destroyed, which evicts ml/a"),
        (KIND, 4, 1, False, "4 of 4 1g.5gb destroyed, at least 1 of them in use by ml/a"),
        (KIND, 3, 2, True, "3 of 4 1g.5gb destroyed, at least 1 of them in use by ml/a (2)"),
        (
            *(KIND, 1, 2, True),
            "1 of 4 1g.5gb destroyed; if possible, the agent keeps those in use by ml/a (2)",
        ),
    ],
)
def test_a_loss_of_devices_is_explained(
    resource: str, destroyed: int, count: int, text: str, *, may_evict: bool
) -> None:
    kind = resources.DeviceKind(resource=resource, count=4, pods={"ml/a": count})

    loss = resources.Loss(kind=kind, destroyed=destroyed)
    assert node_plans.loss_text(loss, may_evict=may_evict) == text


def report(
    gpus: tuple[model.Gpu, ...] = (), *, state: run_status.State = run_status.State.SUCCESS
) -> node_reports.NodeReport:
    thing = plugin_rig.node("n1", gpus=gpus, requested="all-balanced", state=state)
    return node_reports.of(fleet_nodes.parse(thing), dt.datetime.now(tz=dt.UTC))


def test_a_plan_without_known_profiles_is_provisional() -> None:
    blind = samples.gpu(None, mode=model.MigMode.DISABLED)
    document = layout_parser.parse(plugin_rig.CONFIG, source="f")

    result = node_plans.plan(
        "all-balanced",
        [report((blind,))],
        document=document,
        pods=cluster_reader.Pods(by_node={}),
    )

    assert result.nodes[0].fit.fits is None
    assert not result.is_good
    assert "the instances are planned once MIG is enabled" in node_plans.pictures(
        result, style=PLAIN
    )
    assert plan_table.table(result, style=PLAIN).splitlines()[1].split()[1] == "unknown"


@pytest.mark.parametrize("state", run_status.State)
def test_a_plan_says_that_a_node_is_changing(state: run_status.State) -> None:
    result = node_plans.plan(
        "all-balanced",
        [report((samples.gpu(samples.A100),), state=state)],
        document=layout_parser.parse(plugin_rig.CONFIG, source="f"),
        pods=cluster_reader.Pods(by_node={}),
    )

    is_changing = state in {run_status.State.PENDING, run_status.State.REBOOTING}
    assert any("changing right now" in note for note in result.nodes[0].notes) is is_changing


def test_the_sum_of_a_plan_counts_each_node_once() -> None:
    blind = report((samples.gpu(None, mode=model.MigMode.DISABLED),))
    readable = report((samples.gpu(samples.A100),))

    result = node_plans.plan(
        "all-balanced",
        [blind, blind, readable, report()],
        document=layout_parser.parse(plugin_rig.CONFIG, source="f"),
        pods=cluster_reader.Pods(by_node={}),
    )

    total = plan_table.table(result, style=PLAIN).splitlines()[-1]
    assert total == (
        "Layout all-balanced of f: 1 fits, 1 does not fit, 2 unknown. Pods: none evicted."
    )


def test_a_note_after_a_message_follows_its_end_mark() -> None:
    failed = report(state=run_status.State.FAILED)
    assert failed.node.status
    run = dataclasses.replace(failed.node.status, message="It failed. Is it up?")
    node = dataclasses.replace(failed.node, status=run)
    failed = dataclasses.replace(failed, node=node, notes=("a note", "another"))
    shown = node_status.ClusterStatus(
        reports=(failed,), pods=cluster_reader.Pods(by_node={}), now=NOW
    )

    assert "n1: It failed. Is it up? a note; another" in status.table(shown, style=PLAIN)


def test_pods_with_claims_are_named_separately() -> None:
    item = plugin_rig.pod("dra", "n1")
    item["metadata"]["uid"] = "u"
    item["spec"]["resourceClaims"] = [{"name": "gpu"}]
    by_node = {"n1": (pod_parser.parse(item),)}
    shown = node_status.ClusterStatus(
        reports=(report((samples.gpu(samples.A100, "1g.5gb@0"),)),),
        pods=cluster_reader.Pods(by_node=by_node),
        now=NOW,
    )

    assert "Pods with ResourceClaims, for these GPUs or others: ml/dra" in node_status.pictures(
        shown, style=PLAIN
    )


def moment(minutes: int, what: str, *, is_warning: bool = False) -> node_moments.Moment:
    at = NOW - dt.timedelta(minutes=minutes)
    return node_moments.Moment(
        at=at, what=what, message="layout all-balanced", is_warning=is_warning
    )


def past_of(
    of: node_reports.NodeReport, *moments: node_moments.Moment
) -> node_history.NodeHistory:
    return node_history.NodeHistory(report=of, moments=moments, why_no_events="", now=NOW)


def test_long_messages_of_a_history_are_wrapped_in_their_column() -> None:
    long = dataclasses.replace(moment(5, "DrainTimeout"), message="word " * 60 + "end")

    lines = history.page(past_of(report(), long), style=styles.Style(columns=80)).splitlines()

    column = lines[-2].index("word")
    assert max(map(len, lines)) <= 80
    assert len([line for line in lines if line.find("word") == column]) > 5


@pytest.mark.parametrize(
    ("moments", "minutes"),
    [
        ([], 5),
        ([moment(60, "Applied")], 60),
        ([moment(60, "Applied"), moment(30, "Recovered"), moment(5, "AlreadyApplied")], 60),
        ([moment(60, "Applied"), moment(30, "Drifted", is_warning=True)], 5),
    ],
)
def test_a_layout_is_applied_since_its_last_event_without_a_later_warning(
    moments: list[node_moments.Moment], minutes: int
) -> None:
    finished = report()
    assert finished.node.status
    run = dataclasses.replace(finished.node.status, finished_at=NOW - dt.timedelta(minutes=5))
    finished = dataclasses.replace(finished, node=dataclasses.replace(finished.node, status=run))

    assert past_of(finished, *moments).applied_since == NOW - dt.timedelta(minutes=minutes)


def test_a_failed_layout_is_never_applied() -> None:
    assert past_of(report(state=run_status.State.FAILED)).applied_since is None


def test_a_node_without_history_or_gpu_has_short_answers() -> None:
    node = fleet_nodes.parse({"metadata": {"name": "n1"}})
    past = past_of(node_reports.of(node, NOW))
    shown = node_status.ClusterStatus(
        reports=(report(),), pods=cluster_reader.Pods(by_node={}), now=NOW
    )

    assert history.page(past, style=PLAIN).endswith("No history is known.")
    assert "This node has no NVIDIA GPU." in node_status.pictures(shown, style=PLAIN)
    assert gpu_text.slices(()) == "none"
