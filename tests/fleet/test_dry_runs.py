"""Dry runs of a rollout and of its undo: the plan of each node, and no request."""

import json

from mig_manager.core.layout import layout_list
from mig_manager.core.objects import well_known
from tests.fleet.rollout_rig import LAYOUT, RolloutRig
from tests.rigs import api_objects, layout_table, waiting
from tests.rigs.node import agents
from tests.rigs.stage import whole_agents


def test_a_dry_run_shows_the_plan_of_each_node_and_changes_nothing(rig: RolloutRig) -> None:
    rig.serve_config()
    rig.publish_gpus("node-000", "A100-SXM4-40GB", 2)
    rig.publish_gpus("node-001", "A30")
    for name in rig.names[2:]:
        rig.write(name, annotations=None)
    gpu = {"nvidia.com/gpu": 1}
    rig.server.store.create(api_objects.a_pod("train", node="node-000", limits=gpu))

    answer = rig.roll(LAYOUT, "--dry-run")

    assert answer.status == 1
    nodes = {node["node"]: node for node in answer.data["nodes"]}
    assert nodes["node-000"]["fit"] == "fits"
    assert [gpu["needsReset"] for gpu in nodes["node-000"]["plan"]["gpus"]] == [True, True]
    assert nodes["node-000"]["evictedPods"] == ["default/train"]
    assert nodes["node-001"]["fit"] == "does-not-fit"
    assert nodes["node-001"]["reason"] == "UnknownProfile"
    assert nodes["node-002"]["fit"] == "unknown"
    assert not any(rig.labels().values())
    text = rig(LAYOUT, "-l", "gpu=yes", "--dry-run").out
    total = ": 1 fits, 1 does not fit, 3 unknown. Pods: 1 evicted."
    assert f"{total} Nothing was changed." in " ".join(text.split())


def test_a_dry_run_plans_layouts_of_a_file(rig: RolloutRig) -> None:
    rig.publish_gpus("node-000", "A100-SXM4-40GB", 2)
    rig.publish_gpus("node-001", "A30")
    file = rig.layout_file(agents.LAYOUTS_TEXT.replace(LAYOUT, "own"))

    of_own = rig.roll("own", "--dry-run", "-f", file)

    assert [node["fit"] for node in of_own.data["nodes"][:2]] == ["fits", "does-not-fit"]
    assert rig.roll("nothing", "--dry-run", "-f", file).status == 2


def test_a_dry_run_of_an_undo_shows_what_each_node_returns_to(rig: RolloutRig) -> None:
    rig.serve_config()
    rig.publish_gpus("node-000", "A100-SXM4-40GB", 2)
    for name, before in (("node-000", "all-balanced"), ("node-001", None), ("node-002", "x")):
        request = "newer" if name == "node-002" else LAYOUT
        mark = {well_known.ROLLOUT_ANNOTATION: json.dumps({"layout": LAYOUT, "before": before})}
        rig.write(name, annotations=mark, labels={well_known.CONFIG_LABEL: request})
    labels = rig.labels()

    answer = rig.roll("undo", "--dry-run")

    nodes = {node["node"]: node for node in answer.data["nodes"]}
    assert {name: (node["layout"], node["reason"]) for name, node in nodes.items()} == {
        "node-000": ("all-balanced", None),
        "node-001": (None, "LabelRemoved"),
        "node-002": ("newer", "Superseded"),
    }
    assert nodes["node-000"]["plan"]["instances"]["created"] == 8
    text = rig("undo", "-l", "gpu=yes", "--dry-run").out
    assert "node-000  all-balanced  fits" in text
    assert rig.labels() == labels


def test_a_misspelt_layout_is_answered_with_the_available_layouts(
    rig: RolloutRig,
) -> None:
    larger = "  all-1g.45gb: [{devices: all, mig-enabled: true, mig-devices: {1g.45gb: 4}}]\n"
    file = rig.layout_file(f"{agents.LAYOUTS_TEXT.rstrip()}\n{larger}")
    rig.publish_gpus("node-000", "A100-SXM4-40GB")

    answer = rig("all-1g.5bg", "-l", "gpu=yes", "--dry-run", "-f", file)

    assert answer.status == 2
    assert "did you mean 'all-1g.5gb'?" in answer.err


def test_a_dry_run_of_a_layout_that_a_node_lists_needs_no_config_map(rig: RolloutRig) -> None:
    rig.publish_gpus("node-000", "A100-SXM4-40GB")
    rig.list_layouts("node-000")

    answer = rig.roll(LAYOUT, "--dry-run")

    fits = [node["fit"] for node in answer.data["nodes"]]
    assert fits == ["fits", *["unknown"] * 4]
    of_own = rig.roll("own", "--dry-run").data["nodes"]
    assert [node["fit"] for node in of_own] == ["does-not-fit", *["unknown"] * 4]


def test_dry_run_of_a_custom_layout_reads_the_nodes_and_evicts_no_pod(
    rig: RolloutRig,
) -> None:
    rig.serve_config(text=agents.LAYOUTS_TEXT.replace(LAYOUT, well_known.CUSTOM_LAYOUT))
    gpu = {"nvidia.com/gpu": 1}
    for name, labels in (
        ("node-000", {}),
        ("node-001", {well_known.PARTITIONING_LABEL: "on-demand"}),
    ):
        rig.publish_gpus(name, "A100-SXM4-40GB")
        listed = {
            well_known.LAYOUTS_ANNOTATION: layout_list.to_json((), takes_custom=True),
            well_known.LAYOUT_ANNOTATION: layout_table.document([LAYOUT]),
        }
        rig.write(name, annotations=listed, labels=labels)
        rig.server.store.create(api_objects.a_pod(f"on-{name}", node=name, limits=gpu))

    evicting, on_demand = rig.roll("custom", "--dry-run").data["nodes"][:2]

    assert (evicting["evictedPods"], evicting["notes"]) == (["default/on-node-000"], [])
    assert (on_demand["fit"], on_demand["evictedPods"]) == ("fits", [])
    assert "evicts no pod" in on_demand["notes"][0]
    text = rig("custom", "-l", "gpu=yes", "--dry-run").out
    assert "Layout custom of the node's annotation" in " ".join(text.split())


def test_a_dry_run_works_with_what_a_real_agent_publishes(rig: RolloutRig) -> None:
    rig.serve_config()
    with whole_agents.hosts(rig.server, ["other"]):
        waiting.until(
            lambda: well_known.GPUS_ANNOTATION in rig.metadata("other").get("annotations", {}),
            "the GPUs of a node without a label",
        )
        answer = rig(LAYOUT, "-l", "!gpu", "--dry-run", "-o", "json")

        assert (answer.status, answer.data["nodes"][0]["fit"]) == (0, "fits")
        whole_agents.label_all(rig.server, ["other"], LAYOUT)
        waiting.until(lambda: whole_agents.is_applied(rig.server, "other", LAYOUT), LAYOUT)
        again = rig(LAYOUT, "-l", "!gpu", "--dry-run", "-o", "json").data["nodes"][0]
    assert (again["fit"], again["plan"]["instances"]["kept"]) == ("unchanged", 7)
