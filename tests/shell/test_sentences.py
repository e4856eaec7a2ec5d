"""What the plugin says in words, for cases that are rare in a cluster."""

import dataclasses
import datetime as dt

import pytest

from mig_manager import errors
from mig_manager.core import bar, model
from mig_manager.core.fleet import node_report
from mig_manager.core.layout import config
from mig_manager.core.node import resources
from mig_manager.core.records import gpu_codec
from mig_manager.kubectl import history, layout, plan, selection, status
from tests.shell import plugin_rig as rig
from tests.unit import boards

NOW = dt.datetime(2026, 3, 1, 12, 0, 0, tzinfo=dt.UTC)
KIND = "nvidia.com/mig-1g.5gb"
PLAIN = bar.Style()


@pytest.mark.parametrize(
    ("count", "pods", "said"),
    [
        (7, {}, "7 free"),
        (7, {"ml/a": 1, "ml/b": 2}, "3 of 7 held by ml/a, ml/b (2)"),
        (7, {"ml/a": 7}, "all 7 held by ml/a (7)"),
        (1, {"ml/a": 1}, "1 held by ml/a"),
        (2, {"ml/a": 4}, "4 asked for and 2 there, shared or waited for: ml/a (4)"),
        (0, {"ml/a": 1}, "there are none, and these ask for 1: ml/a"),
        (
            9,
            {f"ml/{n}": 1 for n in range(9)},
            "all 9 held by " + ", ".join(f"ml/{n}" for n in range(8)) + " and 1 more",
        ),
    ],
)
def test_who_asks_for_a_kind_is_told_as_far_as_it_is_known(
    count: int, pods: dict[str, int], said: str
) -> None:
    assert layout.held(resources.Kind(resource=KIND, count=count, pods=pods)) == said


@pytest.mark.parametrize(
    ("ending", "asked", "said"),
    [
        (4, 1, "4 of 4 1g.5gb go: these pods must leave: ml/a"),
        (3, 2, "3 of 4 1g.5gb go: holders of 1 must leave, some of ml/a (2)"),
        (
            1,
            2,
            "1 of 4 1g.5gb go: the agent spares those that are held, if it can, by ml/a (2)",
        ),
    ],
)
def test_what_a_loss_means_is_told_no_surer_than_it_is(ending: int, asked: int, said: str) -> None:
    kind = resources.Kind(resource=KIND, count=4, pods={"ml/a": asked})

    assert layout.loss(resources.Loss(kind=kind, ending=ending)) == said


def report(
    gpus: tuple[model.Gpu, ...] = (), *, state: model.State = model.State.SUCCESS
) -> node_report.Report:
    thing = rig.Seen(name="n1", gpus=gpus, wish="all-balanced", state=state).to_object()
    node = selection.read(thing | {"metadata": thing["metadata"] | {"uid": "u"}})
    return node_report.judge(node, dt.datetime.now(tz=dt.UTC))


def test_a_gpu_that_tells_its_profiles_only_with_mig_on_is_planned_so_far() -> None:
    blind = boards.gpu(None, mode=model.MigMode.DISABLED)
    document = config.parse(rig.CONFIG, source="f")

    result = plan.plan(
        document.layout("all-balanced"),
        [report((blind,))],
        source="f",
        pods=selection.Pods(by_node={}),
    )

    assert result.nodes[0].fits is None
    assert not result.is_good
    assert "the instances are planned once MIG is on" in plan.pictures(result, style=PLAIN)
    assert plan.table(result, style=PLAIN).splitlines()[1].split()[1] == "?"


def test_pods_with_claims_are_named_apart() -> None:
    item = rig.pod("dra", "n1")
    item["metadata"]["uid"] = "u"
    item["spec"]["resourceClaims"] = [{"name": "gpu"}]
    found = selection.read_pods([item], ["n1"])
    shown = status.Status(
        reports=(report((boards.gpu(boards.A100, "1g.5gb@0"),)),),
        pods=selection.Pods(by_node=found),
        now=NOW,
    )

    assert "Pods with ResourceClaims, for these GPUs or others: ml/dra" in status.pictures(
        shown, style=PLAIN
    )


def moment(minutes: int, what: str, *, is_warning: bool = False) -> history.Moment:
    at = NOW - dt.timedelta(minutes=minutes)
    return history.Moment(at=at, what=what, message="layout all-balanced", is_warning=is_warning)


@pytest.mark.parametrize(
    ("moments", "minutes"),
    [
        ([], 5),
        ([moment(60, "Applied")], 60),
        ([moment(60, "Applied"), moment(30, "Recovered"), moment(5, "AlreadyApplied")], 60),
        ([moment(60, "Applied"), moment(30, "Drifted", is_warning=True)], 5),
    ],
)
def test_a_layout_is_in_force_since_it_was_applied_with_nothing_bad_since(
    moments: list[history.Moment], minutes: int
) -> None:
    seen = report()
    assert seen.told
    told = dataclasses.replace(
        seen.told, finished_at=NOW - dt.timedelta(minutes=5), config="all-balanced"
    )

    past = history.History(
        report=dataclasses.replace(seen, told=told),
        moments=tuple(moments),
        why_no_events="",
        now=NOW,
    )

    assert past.in_force_since == NOW - dt.timedelta(minutes=minutes)


def test_what_failed_is_in_force_since_never() -> None:
    past = history.History(
        report=report(state=model.State.FAILED), moments=(), why_no_events="", now=NOW
    )

    assert past.in_force_since is None


def test_a_node_of_which_nothing_is_kept_says_so() -> None:
    node = selection.read({"metadata": {"name": "n1", "uid": "u"}})
    past = history.History(
        report=node_report.judge(node, NOW), moments=(), why_no_events="", now=NOW
    )

    assert history.page(past, style=PLAIN).endswith("Nothing is kept of its past.")


def test_a_node_without_any_gpu_is_drawn_as_that() -> None:
    shown = status.Status(reports=(report(),), pods=selection.Pods(by_node={}), now=NOW)

    assert gpu_codec.from_json(gpu_codec.to_json(())) == ()
    assert "This node has no NVIDIA GPU." in status.pictures(shown, style=PLAIN)
    assert status.slices(()) == "none"


def test_an_object_that_is_no_node_is_an_error_of_ours() -> None:
    with pytest.raises(errors.ClusterError):
        selection.read({"metadata": {"name": "n1"}, "status": {"conditions": [7]}})
