"""``kubectl mig capacity`` over nodes as agents leave them."""

from collections.abc import Mapping, Sequence

import pytest

from mig_manager.core import model
from mig_manager.core.objects import well_known
from tests.rigs import api_objects
from tests.rigs.shell import plugin_rig

ON_DEMAND = {well_known.PARTITIONING_LABEL: well_known.ON_DEMAND}
A100 = "A100-SXM4-40GB"


def node(
    name: str,
    gpus: Sequence[model.Gpu],
    in_use: Mapping[str, set[model.Placement]] | None,
    labels: Mapping[str, str] | None = None,
) -> api_objects.Object:
    made = plugin_rig.node(name, requested="all-balanced", labels=labels)
    made["metadata"]["annotations"] |= api_objects.annotations_of_agent(
        gpus, in_use=in_use, at=plugin_rig.ago(minutes=7)
    )
    return made


def nodes() -> list[api_objects.Object]:
    balanced = plugin_rig.gpus_with(f"2x{A100}", "all-balanced")
    one, two = (gpu.uuid for gpu in balanced)
    first = next(gi for gi in balanced[0].gpu_instances if str(gi.profile) == "2g.10gb")
    whole = plugin_rig.gpus_with(A100)
    damaged = node("damaged", balanced, {})
    damaged["metadata"]["annotations"][well_known.CAPACITY_ANNOTATION] = "[]"
    cordoned = node("whole", whole, {whole[0].uuid: set()}, ON_DEMAND)
    cordoned["spec"] = {"unschedulable": True}
    return [
        node("busy", balanced, {one: {first.placement}, two: set()}, ON_DEMAND),
        node("changed", balanced, {one: {model.Placement(0, 8)}}),
        damaged,
        node("silent", balanced, None),
        cordoned,
    ]


@pytest.fixture
def capacity_cluster(empty_cluster: plugin_rig.KubectlUser) -> plugin_rig.KubectlUser:
    for each in nodes():
        empty_cluster.server.store.create(each)
    return empty_cluster


def test_capacity_shows_idle_possible_and_stranded_devices(
    capacity_cluster: plugin_rig.KubectlUser,
) -> None:
    answer = capacity_cluster.run_plugin("capacity")

    shown = plugin_rig.rows(answer.out)
    assert shown["NODE"] == ["NODE", "OBSERVED", "FREE", "STRANDED", "IDLE NOW", "ROOM"]
    assert shown["busy"] == [
        "busy",
        "7m",
        "14",
        "0",
        "2x 3g.20gb, 1x 2g.10gb, 4x 1g.5gb",
        "1x 7g.40gb, 1x 4g.20gb, 3x 3g.20gb, 5x 2g.10gb, 7x 1g.10gb, 12x 1g.5gb",
    ]
    assert shown["whole"][2:] == ["0", "0", "1x whole GPU", "none"]
    assert shown["silent"] == ["silent", "-", "-", "-", "-", "-"]
    assert shown["all"][1:] == [
        *shown["busy"][2:4],
        "2x 3g.20gb, 1x 2g.10gb, 4x 1g.5gb, 1x whole GPU",
        shown["busy"][5],
    ]
    # What is not known of some nodes is no good answer.
    assert answer.status == 1


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("silent", "its agent has not published which instances are in use"),
        ("damaged", "the published use cannot be read"),
        ("changed", "the use of GPU 0-1 is unknown or outdated"),
        ("changed", "pods may have come and gone since"),
        ("whole", "no new pods are scheduled to it"),
    ],
)
def test_a_node_with_unknown_use_is_listed_with_the_reason(
    capacity_cluster: plugin_rig.KubectlUser, name: str, why: str
) -> None:
    answer = capacity_cluster.run_plugin("capacity", name)

    assert why in " ".join(answer.out.split())


def test_a_single_node_with_known_use_gives_status_0(
    capacity_cluster: plugin_rig.KubectlUser,
) -> None:
    answer = capacity_cluster.run_plugin("capacity", "busy")

    assert (answer.status, answer.err) == (0, "")
    assert list(plugin_rig.rows(answer.out)) == ["NODE", "busy"]
    assert "come and gone" not in answer.out


def test_json_has_every_gpu_with_its_fragmentation(
    capacity_cluster: plugin_rig.KubectlUser,
) -> None:
    data = capacity_cluster.run_plugin("capacity", "-o", "json").data

    busy = data["nodes"][0]
    assert busy["isOnDemand"]
    assert busy["idleDevices"] == {"3g.20gb": 2, "2g.10gb": 1, "1g.5gb": 4}
    first, second = busy["gpus"]
    assert (first["inUse"], first["freeSlices"], first["fragmentation"]) == (["0:2"], 6, 0.33)
    assert first["room"]["1g.5gb+me"] == 1
    assert (second["inUse"], second["fragmentation"]) == ([], 0.0)
    assert data["total"]["idleWholeGpus"] == 1
    assert not data["isGood"]
