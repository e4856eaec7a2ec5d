"""``kubectl mig plan`` and ``validate``."""

import dataclasses
import json
import pathlib

import pytest

from mig_manager.cli import main
from mig_manager.core import model
from mig_manager.core.layout import layout_list, layout_parser
from mig_manager.core.objects import well_known
from mig_manager.core.records import gpu_recovery
from tests.rigs import api_objects
from tests.rigs.shell import plugin_rig

DOCUMENT = """
version: v1
mig-configs:
  fits: [{devices: all, mig-enabled: true, mig-devices: {1g.5gb: 7}}]
  active: [{devices: all, mig-enabled: false}]
  too-many: [{devices: all, mig-enabled: true, mig-devices: {1g.5gb: 9}}]
  no-such-profile: [{devices: all, mig-enabled: true, mig-devices: {1g.99gb: 1}}]
  other-gpu: [{device-filter: "0x233010DE", devices: all, mig-enabled: true, mig-devices: {}}]
"""
IDLE = plugin_rig.gpus_with("2xA100-SXM4-40GB")
# Such a driver lists profiles only with MIG on, and so whether they fit is not known before.
BLIND = tuple(dataclasses.replace(gpu, profiles=None) for gpu in IDLE)


def test_a_plan_is_drawn_with_the_affected_pods(five_node_cluster: plugin_rig.KubectlUser) -> None:
    answer = five_node_cluster.run_plugin("plan", "all-1g.5gb", "gpu-1")

    assert (answer.status, answer.err) == (0, "")
    assert answer.out.startswith("gpu-1: all-1g.5gb of ConfigMap gpu-operator/default-mig-parted")
    assert "destroy" in answer.out
    assert "16 instances destroyed, 40 created, 16 kept; no reset" in answer.out
    assert "8 of 8 3g.20gb destroyed, which evicts ml/train" in answer.out
    assert "ml/serve" not in answer.out
    assert "Pods: 1 evicted" in answer.out
    modes = five_node_cluster.run_plugin("plan", "all-balanced", "gpu-4").out
    assert "The agent evicts the pods that use GPU 0" in modes
    assert "must be idle" not in modes
    # The nodes have the strategy mixed.
    assert "Not for a device plugin" not in modes


def test_a_plan_for_many_nodes_has_one_line_a_node_and_changes_nothing(
    five_node_cluster: plugin_rig.KubectlUser,
) -> None:
    five_node_cluster.server.log.clear()

    answer = five_node_cluster.run_plugin("plan", "all-balanced")

    assert answer.status == 1
    rows = {line.split()[0]: line for line in answer.out.splitlines()[1:6]}
    assert "unchanged     nothing" in rows["gpu-1"]
    assert rows["gpu-2"].split()[1] == "does-not-fit"
    assert "instances destroyed" in rows["gpu-3"]
    assert "1 GPU reset  ml/elsewhere" in rows["gpu-4"]
    assert "config:8:" in answer.out
    assert "8:76: NVIDIA A30 has no profile 3g.20gb" in answer.out, "an index and UUID are unknown"
    assert "presumed not partitioned" in answer.out
    assert ": 1 unchanged, 2 fits, 2 does not fit." in " ".join(answer.out.split())
    assert {each.verb for each in five_node_cluster.server.log.requests()} <= {"get", "list", ""}


def test_a_layout_may_come_from_a_file_or_from_a_pipe(
    five_node_cluster: plugin_rig.KubectlUser, tmp_path: pathlib.Path
) -> None:
    mine = plugin_rig.CONFIG.replace("all-1g.5gb", "mine")
    file = tmp_path / "layouts.yaml"
    file.write_text(mine)

    assert five_node_cluster.run_plugin("plan", "mine", "gpu-1", "-f", str(file)).status == 0
    assert five_node_cluster.run_plugin("plan", "-f", "-", "mine", "gpu-1", stdin=mine).status == 0
    assert five_node_cluster.run_plugin("plan", "mine", "gpu-1").status == 2


@pytest.mark.parametrize("requested", ["all-1g.5gb", None])
def test_gpus_that_their_agent_cannot_observe_are_unknown(
    empty_cluster: plugin_rig.KubectlUser, tmp_path: pathlib.Path, requested: str | None
) -> None:
    (tmp_path / "layouts.yaml").write_text(plugin_rig.CONFIG)
    product = {"nvidia.com/gpu.product": "NVIDIA-A30", "nvidia.com/gpu.count": "1"}
    lost = plugin_rig.node("lost", requested=requested, labels=product)
    condition = gpu_recovery.none_reachable("GPU 0 is lost")
    lost["status"]["conditions"].append(condition.entry(None, plugin_rig.ago()))
    empty_cluster.server.store.create(lost)

    options = ("-f", str(tmp_path / "layouts.yaml"))
    answer = empty_cluster.run_plugin("plan", "all-disabled", "lost", *options, "-o", "json")
    unknown = empty_cluster.run_plugin("plan", "typo", "lost", *options)

    (planned,) = answer.data["nodes"]
    assert (planned["fit"], planned["plan"]) == ("unknown", None)
    assert planned["message"].startswith("No GPU can be observed: GPU 0 is lost.")
    assert unknown.status == 2
    assert "Name a layout of this file" in unknown.err


@pytest.mark.parametrize(
    "shown",
    [
        {"allocatable": {"nvidia.com/mig-1g.5gb": "7"}},
        {"labels": {"nvidia.com/mig-1g.5gb.count": "7"}},
    ],
    ids=["resource", "label"],
)
def test_plan_is_unknown_on_a_node_that_another_manager_partitioned(
    empty_cluster: plugin_rig.KubectlUser, shown: dict[str, dict[str, str]]
) -> None:
    product = {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-40GB", "nvidia.com/gpu.count": "1"}
    labels = {**product, **shown.get("labels", {})}
    node = api_objects.a_node("n1", labels, allocatable=shown.get("allocatable"))
    layouts = api_objects.a_config_map(plugin_rig.CONFIG, "gpu-operator/default-mig-parted-config")
    for each in (layouts, node, plugin_rig.pod("serve", "n1", mig_1g_5gb=1)):
        empty_cluster.server.store.create(each)

    answer = empty_cluster.run_plugin("plan", "all-balanced", "n1", "-o", "json")

    (planned,) = answer.data["nodes"]
    assert (planned["fit"], planned["plan"]) == ("unknown", None)
    assert "it has 1x NVIDIA A100-SXM4-40GB, with MIG devices" in planned["message"]


def test_another_layout_of_the_same_name_is_noted(empty_cluster: plugin_rig.KubectlUser) -> None:
    gpus = plugin_rig.gpus_with("1xA30")
    odd = plugin_rig.node("odd", gpus=gpus, requested="all-disabled", config_hash="0123456789ab")
    layouts = api_objects.a_config_map(plugin_rig.CONFIG, "gpu-operator/default-mig-parted-config")
    for each in (layouts, odd):
        empty_cluster.server.store.create(each)

    answer = empty_cluster.run_plugin("plan", "all-disabled")

    assert "its agent last used another layout named all-disabled" in answer.out


@pytest.mark.parametrize(
    ("published", "expected"),
    [
        (
            IDLE,
            {
                "fits": "fits",
                "active": "unchanged",
                "too-many": "does-not-fit",
                "no-such-profile": "does-not-fit",
                "other-gpu": "does-not-fit",
            },
        ),
        (
            BLIND,
            dict.fromkeys(("fits", "too-many", "no-such-profile"), "unknown")
            | {"active": "unchanged"},
        ),
    ],
    ids=["known profiles", "unknown profiles"],
)
def test_both_previews_give_the_same_verdict(
    empty_cluster: plugin_rig.KubectlUser,
    published: tuple[model.Gpu, ...],
    expected: dict[str, str],
) -> None:
    file = empty_cluster.home / "layouts.yaml"
    file.write_text(DOCUMENT)
    empty_cluster.server.store.create(
        plugin_rig.node("gpu-1", gpus=published, labels={"pool": "a"})
    )
    kubeconfig = ("--kubeconfig", str(empty_cluster.home / "kubeconfig"))
    for layout, fit in expected.items():
        words = (layout, "-l", "pool=a", "-f", str(file), "-o", "json")
        planned = empty_cluster.run_plugin("plan", *words)
        rolled = empty_cluster.run_plugin(
            "rollout", *words, "--dry-run", *kubeconfig, command=main.main
        )

        (plan,), (preview,) = planned.data["nodes"], rolled.data["nodes"]
        assert plan["fit"] == preview["fit"] == fit
        assert plan == {**preview, "notes": plan["notes"]}
        assert planned.status == rolled.status == (fit not in ("fits", "unchanged"))


def listing_node(**changed: str) -> api_objects.Object:
    """Build a node whose agent lists a layout of the same document, but for what is changed."""
    layout = layout_parser.parse(plugin_rig.CONFIG, source="config.yaml").layout("all-balanced")
    entry = dataclasses.replace(layout_list.Entry.of(layout), **changed)
    node = plugin_rig.node(
        "gpu-1", gpus=plugin_rig.gpus_with("1xA100-SXM4-40GB"), labels={"test": "listed"}
    )
    node["metadata"]["annotations"][well_known.LAYOUTS_ANNOTATION] = layout_list.to_json([entry])
    return node


@pytest.mark.parametrize("has_config_map", [False, True])
def test_content_that_only_the_agent_has_is_unknown(
    empty_cluster: plugin_rig.KubectlUser,
    has_config_map: bool,  # noqa: FBT001 - a case
) -> None:
    empty_cluster.server.store.create(listing_node(content_hash="0123456789ab"))
    if has_config_map:
        empty_cluster.server.store.create(api_objects.a_config_map(plugin_rig.CONFIG))
    kubeconfig = ("--kubeconfig", str(empty_cluster.home / "kubeconfig"))
    words = ("all-balanced", "-l", "test=listed", "-o", "json")

    planned = empty_cluster.run_plugin("plan", *words)
    rolled = empty_cluster.run_plugin(
        "rollout", *words, "--dry-run", *kubeconfig, command=main.main
    )
    named = empty_cluster.run_plugin("plan", *words, "-f", "-", stdin=plugin_rig.CONFIG)

    assert (planned.status, rolled.status, named.status) == (1, 1, 0)
    plan, preview, of_file = (each.data["nodes"][0] for each in (planned, rolled, named))
    assert (plan["fit"], of_file["fit"]) == ("unknown", "fits")
    assert preview == {**plan, "reason": "ContentUnknown"}
    assert of_file["notes"] == ["its agent has another layout named all-balanced"]


def test_a_plan_of_the_content_that_the_agent_has_is_without_a_note(
    empty_cluster: plugin_rig.KubectlUser,
) -> None:
    empty_cluster.server.store.create(listing_node())
    words = ("plan", "all-balanced", "gpu-1", "-o", "json", "-f", "-")

    (planned,) = empty_cluster.run_plugin(*words, stdin=plugin_rig.CONFIG).data["nodes"]

    assert planned["notes"] == []


def test_a_plan_as_json_has_verdicts_losses_and_no_ids(
    five_node_cluster: plugin_rig.KubectlUser,
) -> None:
    answer = five_node_cluster.run_plugin("plan", "all-1g.5gb", "gpu-1", "gpu-2", "-o", "json")

    assert answer.status == 1
    first, second = answer.data["nodes"]
    assert (first["fit"], first["plan"]["instances"]["created"]) == ("fits", 40)
    assert [lost["pods"] for lost in first["losses"]] == [{"ml/train": 1}]
    assert "gpuInstanceId" not in json.dumps(answer.data)
    assert (second["fit"], second["plan"]) == ("does-not-fit", None)


def test_layouts_are_checked_against_the_products_that_the_nodes_have(
    five_node_cluster: plugin_rig.KubectlUser,
) -> None:
    answer = five_node_cluster.run_plugin("validate", "all-1g.5gb", "all-1g.10gb", "-o", "json")

    assert answer.status == 1
    fits = {(each["layout"], each["product"]): each["fit"] for each in answer.data["verdicts"]}
    a100, a30, h100 = "NVIDIA A100-SXM4-40GB", "NVIDIA A30", "NVIDIA H100 80GB HBM3"
    assert fits == {
        ("all-1g.5gb", a100): "fits",
        ("all-1g.5gb", a30): "does-not-fit",
        ("all-1g.5gb", h100): "does-not-fit",
        ("all-1g.10gb", a100): "not-for-it",
        ("all-1g.10gb", a30): "not-for-it",
        ("all-1g.10gb", h100): "fits",
    }
    note = "gpu-5: no agent shows its GPUs; by its labels it has 4x NVIDIA A30"
    assert note in answer.err


def test_validate_without_a_name_checks_all_layouts(
    five_node_cluster: plugin_rig.KubectlUser,
) -> None:
    answer = five_node_cluster.run_plugin("validate", "-l", "pool=train", "-o", "json")

    assert answer.status == 0
    fits = [each["fit"] for each in answer.data["verdicts"] if "H100" in each["product"]]
    assert fits == ["fits", "elsewhere", "elsewhere", "fits"]
    assert five_node_cluster.run_plugin("validate", "-l", "pool=train", "--must-fit").status == 1
