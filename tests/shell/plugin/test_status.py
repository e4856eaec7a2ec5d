"""``kubectl mig status``."""

import pytest

from mig_manager.core.display import styles
from mig_manager.core.records import journals, run_status
from tests.rigs.shell import plugin_rig


def test_one_node_is_drawn_with_the_pods_that_use_it(
    five_node_cluster: plugin_rig.KubectlUser,
) -> None:
    answer = five_node_cluster.run_plugin("status", "gpu-1")

    assert (answer.status, answer.err) == (0, "")
    first, *_ = lines = answer.out.splitlines()
    assert first.startswith("gpu-1 · success · requested all-balanced · Applied · since 20")
    assert "GPU 0-7 · NVIDIA A100-SXM4-40GB · MIG on · 8 alike" in lines
    assert sum("3g.20gb" in line and "│" in line for line in lines) == 1
    assert "  1g.5gb   2 of 16 in use by ml/serve (2)" in lines
    assert "  2g.10gb  8 free" in lines
    assert "  3g.20gb  1 of 8 in use by ml/train" in lines
    assert "only kubelet knows" in lines[-1]
    assert max(map(len, lines)) <= styles.WIDTH


def test_many_nodes_have_one_line_each_with_explanations_below(
    five_node_cluster: plugin_rig.KubectlUser,
) -> None:
    answer = five_node_cluster.run_plugin("status")

    assert answer.status == 1
    balanced = "8x 3g.20gb, 8x 2g.10gb, 16x 1g.5gb"
    differing = ("waiting,not-ready", "Applied", "5m", "all-balanced", "all-1g.5gb")
    assert [*plugin_rig.rows(answer.out).values()] == [
        ["NODE", "STATE", "REASON", "AGE", "REQUESTED", "APPLIED", "SLICES"],
        ["gpu-1", "success", "Applied", "5m", "all-balanced", "all-balanced", balanced],
        ["gpu-2", "failed", "UnknownProfile", "5m", "all-1g.5gb", "-", "2x whole GPU"],
        ["gpu-3", *differing, "7x 1g.5gb"],
        ["gpu-4", "stale", "Drain", "100m", "all-1g.5gb", "-", "1x whole GPU"],
        ["gpu-5", "no-agent", "-", "-", "all-balanced", "-", "-"],
    ]
    why = answer.out.partition("\n\n")[2]
    assert "gpu-2: GPU 0 has no profile 1g.5gb" in why
    assert "gpu-3: it is applied; the node is not ready" in why
    assert why.endswith("check that an agent\n  runs on this node\n")
    assert "gpu-1" not in why
    assert "cpu" not in answer.out


def test_nodes_are_selected_by_label_and_drawn_in_colour_on_request(
    five_node_cluster: plugin_rig.KubectlUser,
) -> None:
    answer = five_node_cluster.run_plugin("status", "-l", "pool=train", "-o", "wide")
    coloured = five_node_cluster.run_plugin("status", "gpu-2", "--color", "always")

    assert answer.status == 1
    assert "\x1b[31mfailed" in coloured.out
    assert "\x1b" not in answer.out
    assert answer.out.startswith("gpu-1 · success")
    assert "NVIDIA H100 80GB HBM3" in answer.out
    assert "gpu-3" not in answer.out


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (("status", "gpu-1"), "applied all-balanced (before)"),
        (("status",), "all-balanced (before)"),
    ],
)
def test_the_layout_applied_before_a_change_is_shown_during_it(
    empty_cluster: plugin_rig.KubectlUser, words: tuple[str, ...], shown: str
) -> None:
    gpus = plugin_rig.gpus_with("1xA100-SXM4-40GB")
    node = plugin_rig.node(
        "gpu-1", gpus=gpus, requested="all-1g.5gb", state=run_status.State.PENDING
    )
    journal = journals.Journal(layout="all-1g.5gb", applied_before="all-balanced")
    node["metadata"]["annotations"]["mig-manager.io/journal"] = journal.to_json()
    empty_cluster.server.store.create(node)
    empty_cluster.server.store.create(plugin_rig.node("gpu-2", gpus=gpus))

    assert shown in empty_cluster.run_plugin(*words).out
    (as_json,) = empty_cluster.run_plugin("status", "gpu-1", "-o", "json").data["nodes"]
    assert (as_json["applied"], as_json["appliedBefore"]) == (None, "all-balanced")


def test_a_missing_node_does_not_hide_the_others(
    five_node_cluster: plugin_rig.KubectlUser,
) -> None:
    answer = five_node_cluster.run_plugin("status", "gpu-1", "gpu-9")

    assert answer.status == 1
    assert "gpu-1 · success" in answer.out
    assert 'nodes "gpu-9" not found' in answer.err


def test_the_json_of_a_status_has_every_fact(five_node_cluster: plugin_rig.KubectlUser) -> None:
    answer = five_node_cluster.run_plugin("status", "-o", "json").data

    assert answer["isGood"] is False
    assert [node["state"] for node in answer["nodes"]] == [
        "success", "failed", "waiting", "stale", "no-agent",
    ]  # fmt: skip
    first = answer["nodes"][0]
    assert len(first["gpus"]) == 8
    assert "id" not in first["gpus"][0]["gpuInstances"][0]
    assert {each["resource"]: each["pods"] for each in first["deviceRequests"]} == {
        "nvidia.com/mig-1g.5gb": {"ml/serve": 2},
        "nvidia.com/mig-2g.10gb": {},
        "nvidia.com/mig-3g.20gb": {"ml/train": 1},
    }
