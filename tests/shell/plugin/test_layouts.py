"""``kubectl mig layouts`` against the embedded API server."""

import json
import pathlib

import pytest

from mig_manager.core.display import picture, styles
from mig_manager.core.layout import generator, layout_list, layout_parser
from mig_manager.core.objects import well_known
from mig_manager.core.records import run_status
from testkit import apiserver
from tests.rigs import api_objects
from tests.rigs.shell import plugin_rig

SPEC = "2xA100-SXM4-40GB"
OWNERS_FILE = """\
version: v1
mig-configs:
  team-a:
    - {devices: [0], mig-enabled: true, mig-devices: {4g.20gb: 1}}
"""


def entries(text: str = OWNERS_FILE) -> list[layout_list.Entry]:
    """Return what an agent with this file lists for these GPUs."""
    from_file = layout_parser.parse(text, source="/etc/mig-manager/config.yaml").layouts
    made = generator.layouts_of(generator.kinds_of(plugin_rig.gpus_with(SPEC)))
    return [layout_list.Entry.of(layout) for layout in {**made, **from_file}.values()]


def add_node(server: apiserver.ApiServer, listed: str | None, requested: str = "team-a") -> None:
    node = plugin_rig.node("gpu-1", gpus=plugin_rig.gpus_with(SPEC), requested=requested)
    if listed is not None:
        node["metadata"]["annotations"][well_known.LAYOUTS_ANNOTATION] = listed
    server.store.create(node)


def test_each_layout_is_drawn_with_its_origin(empty_cluster: plugin_rig.KubectlUser) -> None:
    add_node(empty_cluster.server, layout_list.to_json(entries()))
    empty_cluster.server.store.create(api_objects.a_config_map(OWNERS_FILE))

    answer = empty_cluster.run_plugin("layouts", "gpu-1")

    assert (answer.status, answer.err) == (0, "")
    parts = answer.out.split("\n\n")
    blocks = {part.split(" · ")[0]: part for part in parts if " · " in part}
    assert answer.out.startswith("gpu-1: 11 layouts can be requested\n")
    assert blocks["team-a"].startswith("team-a · /etc/mig-manager/config.yaml:3 · active\nGPU 0 ·")
    assert "4g.20gb" in blocks["team-a"]
    generated = blocks["all-1g.5gb"]
    assert generated.startswith("all-1g.5gb · generated for NVIDIA A100-SXM4-40GB\nGPU 0-1 ·")
    assert generated.count("│ 1g.5gb ") + generated.count("│  1g.5gb ") == 7
    assert picture.WHOLE in blocks["all-disabled"]
    assert "offers" not in answer.out
    assert max(map(len, answer.out.splitlines())) <= styles.WIDTH


def test_a_layout_whose_content_is_elsewhere_is_listed_without_a_picture(
    empty_cluster: plugin_rig.KubectlUser, tmp_path: pathlib.Path
) -> None:
    add_node(empty_cluster.server, layout_list.to_json(entries()))
    # The file has another content under the same name.
    empty_cluster.server.store.create(api_objects.a_config_map(OWNERS_FILE.replace("4g", "3g")))
    file = tmp_path / "own.yaml"
    file.write_text(OWNERS_FILE)

    assert "team-a · /etc/mig-manager/config.yaml:3 · active\n    its content is in no known" in (
        empty_cluster.run_plugin("layouts", "gpu-1").out
    )
    named = empty_cluster.run_plugin("layouts", "gpu-1", "-f", str(file), "-o", "json").data
    (layout,) = [each for each in named["layouts"] if each["layout"] == "team-a"]
    gpu = {"index": 0, "name": "NVIDIA A100-SXM4-40GB", "isMigEnabled": True}
    assert layout["gpus"] == [gpu | {"devices": {"4g.20gb": 1}}]
    assert layout["isRequested"]
    assert empty_cluster.run_plugin("layouts", "gpu-1", "-f", "missing.yaml").status == 2


@pytest.mark.parametrize(
    ("requested", "state", "is_same_content", "is_applied"),
    [
        ("team-a", run_status.State.SUCCESS, True, True),
        ("team-a", run_status.State.SUCCESS, False, False),
        ("team-a", run_status.State.FAILED, True, False),
        ("all-1g.5gb", run_status.State.FAILED, False, True),
    ],
    ids=["applied", "the file has changed since", "its change failed", "another one failed"],
)
def test_a_layout_is_active_with_the_content_that_was_applied(
    empty_cluster: plugin_rig.KubectlUser,
    requested: str,
    state: run_status.State,
    is_same_content: bool,  # noqa: FBT001 - a case
    is_applied: bool,  # noqa: FBT001 - a case
) -> None:
    (entry,) = [each for each in entries() if each.name == "team-a"]
    node = plugin_rig.node(
        "gpu-1",
        gpus=plugin_rig.gpus_with(SPEC),
        requested=requested,
        state=state,
        config_hash=entry.content_hash if is_same_content else "0123456789ab",
        labels={well_known.APPLIED_LABEL: "team-a"},
    )
    node["metadata"]["annotations"][well_known.LAYOUTS_ANNOTATION] = layout_list.to_json([entry])
    empty_cluster.server.store.create(node)

    (layout,) = empty_cluster.run_plugin("layouts", "gpu-1", "-o", "json").data["layouts"]

    assert layout["isApplied"] is is_applied


def test_the_nodes_config_map_has_the_layouts_of_the_operators_agent(
    empty_cluster: plugin_rig.KubectlUser,
) -> None:
    add_node(empty_cluster.server, layout_list.to_json(entries()))
    empty_cluster.server.store.create(
        api_objects.a_config_map(OWNERS_FILE, "gpu-operator/gpu-1-mig-config")
    )

    out = empty_cluster.run_plugin("layouts", "gpu-1", "-o", "json").out

    assert all(each["gpus"] for each in json.loads(out)["layouts"])


SAME = """version: v1
mig-configs:
  all-7g.40gb: [{devices: all, mig-enabled: true, mig-devices: {7g.40gb: 1}}]
"""


@pytest.mark.parametrize(
    ("document", "origin"),
    [
        (OWNERS_FILE, "generated for NVIDIA A100-SXM4-40GB"),
        (SAME, "ConfigMap mig-manager/mig-manager-config:3"),
    ],
    ids=["without it", "with it"],
)
def test_a_layout_is_planned_from_the_config_map_if_that_has_it(
    empty_cluster: plugin_rig.KubectlUser, document: str, origin: str
) -> None:
    add_node(empty_cluster.server, layout_list.to_json(entries()))
    empty_cluster.server.store.create(api_objects.a_config_map(document))

    answer = empty_cluster.run_plugin("plan", "all-7g.40gb", "gpu-1")

    assert (answer.status, answer.err) == (0, "")
    assert f"Origin: {origin}" in answer.out
    assert empty_cluster.run_plugin("plan", "all-7g.80gb", "gpu-1").status == 2


def test_a_layout_that_a_node_lists_is_planned_without_a_config_map(
    empty_cluster: plugin_rig.KubectlUser,
) -> None:
    add_node(empty_cluster.server, layout_list.to_json(entries()))

    answer = empty_cluster.run_plugin("plan", "all-7g.40gb", "gpu-1")

    assert (answer.status, answer.err) == (0, "")
    assert "Origin: generated for NVIDIA A100-SXM4-40GB" in answer.out
    owners = empty_cluster.run_plugin("plan", "team-a", "gpu-1")
    assert owners.status == 1
    assert "unknown: only its agent has the content of this layout" in owners.out
    assert (
        "no ConfigMap with layouts found"
        in empty_cluster.run_plugin("plan", "all-7g.80gb", "gpu-1").err
    )
    named = empty_cluster.run_plugin(
        "plan", "all-7g.40gb", "gpu-1", "--config-map", "default/none"
    )
    assert (named.status, named.out) == (2, "")


@pytest.mark.parametrize("listed", [None, "{", '{"layouts": 1}', '{"layouts": {"a": []}}', "[[]]"])
def test_without_a_valid_list_those_are_shown_that_can_be_generated(
    listed: str | None, empty_cluster: plugin_rig.KubectlUser
) -> None:
    add_node(empty_cluster.server, listed, requested="all-balanced")

    answer = empty_cluster.run_plugin("layouts", "gpu-1")

    assert (answer.status, answer.err) == (0, "")
    lines = answer.out.splitlines()
    assert lines[0] == "gpu-1: 10 layouts can be requested"
    why = "no layouts" if listed is None else "cannot be read"
    assert why in lines[1]
    assert "all-balanced · generated for NVIDIA A100-SXM4-40GB · active" in lines


def test_layouts_of_nodes_and_of_a_chosen_file_are_completed(
    empty_cluster: plugin_rig.KubectlUser, tmp_path: pathlib.Path
) -> None:
    add_node(empty_cluster.server, layout_list.to_json(entries()))
    file = tmp_path / "own.yaml"
    file.write_text(OWNERS_FILE.replace("team", "all-7"))

    completed = empty_cluster.complete("plan", "-f", str(file), "all-7")

    assert completed.out.split() == ["all-7-a", "all-7g.40gb", ":4"]
    assert empty_cluster.complete("apply", "-f", str(file), "all-7").out.split() == [
        "all-7-a",
        ":4",
    ]
    assert empty_cluster.complete("apply", "all-7").out.split() == ["all-7g.40gb", ":4"]


# With strategy single, GPU feature discovery counts MIG devices.
PARTITIONED = {"nvidia.com/gpu.product": "NVIDIA-A30-MIG-1g.6gb", "nvidia.com/gpu.count": "4"}


WITHOUT_GPUS = {"nvidia.com/gpu.product": "NVIDIA-A30", "nvidia.com/gpu.count": "0"}


@pytest.mark.parametrize(
    "labels", [{}, PARTITIONED, WITHOUT_GPUS], ids=["none", "MIG devices", "no GPU"]
)
def test_a_node_that_is_missing_or_shows_no_gpus_fails_in_a_line(
    empty_cluster: plugin_rig.KubectlUser, labels: dict[str, str]
) -> None:
    empty_cluster.server.store.create(plugin_rig.node("plain", labels=labels))

    assert empty_cluster.run_plugin("layouts", "gpu-9").status == 1
    answer = empty_cluster.run_plugin("layouts", "plain")
    assert answer.status == 1
    assert answer.out.startswith("plain: 0 layouts")
    assert "no agent and no label shows its GPUs" in answer.out
    assert "can be generated" not in answer.out
    assert empty_cluster.complete("layouts", "").out.splitlines()[0] == "plain"
