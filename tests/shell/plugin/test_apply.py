"""``kubectl mig apply``, and what the other commands show of custom layouts."""

import copy
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from mig_manager import reasons
from mig_manager.adapters.kubectl import Kubectl
from mig_manager.core import model
from mig_manager.core.layout import available_layouts, custom_layouts, layout_list, layout_parser
from mig_manager.core.objects import node_object, well_known
from testkit import apiserver
from tests.rigs import api_objects
from tests.rigs.shell import commandline, plugin_rig

SPEC = "2xA100-SXM4-40GB"
KEY = ("nodes", "", "gpu-1")
MINE = """\
version: v1
mig-configs:
  mine:
    - {devices: [0], mig-enabled: true, mig-devices: {1g.5gb@4: 1, 2g.10gb: 1}}
"""
OTHER = """\
version: v1
mig-configs:
  custom:
    - {devices: [1], mig-enabled: true, mig-devices: {3g.20gb: 2}}
"""
SEVERAL = MINE + "  whole:\n    - {devices: all, mig-enabled: false}\n"
LISTED = layout_list.to_json([], takes_custom=True)


def add_node(
    server: apiserver.ApiServer,
    *,
    listed: str = LISTED,
    labels: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
    **fields: Any,
) -> None:
    fields = {"gpus": plugin_rig.gpus_with(SPEC), "requested": "all-balanced", **fields}
    node = plugin_rig.node("gpu-1", labels=labels, **fields)
    node_annotations = node["metadata"]["annotations"]
    if fields["gpus"] is not None:
        node_annotations["mig-manager.io/layouts"] = listed
    node_annotations.update(annotations or {})
    server.store.create(node)


def node_copy(server: apiserver.ApiServer) -> api_objects.Object:
    """Return a copy of the node."""
    return copy.deepcopy(server.store.peek(KEY) or {})


def metadata(server: apiserver.ApiServer) -> dict[str, Any]:
    node_metadata: dict[str, Any] = node_copy(server)["metadata"]
    return node_metadata


def apply(user: plugin_rig.KubectlUser, *words: str, text: str = MINE) -> commandline.Answer:
    """Run ``apply [LAYOUT] gpu-1 -f -``; words may begin with the layout."""
    layout = [word for word in words[:1] if not word.startswith("-")]
    return user.run_plugin("apply", *layout, "gpu-1", "-f", "-", *words[len(layout) :], stdin=text)


def assert_nothing_requested(server: apiserver.ApiServer) -> None:
    assert metadata(server)["labels"][well_known.CONFIG_LABEL] == "all-balanced"
    assert well_known.LAYOUT_ANNOTATION not in metadata(server)["annotations"]


def test_apply_writes_label_and_annotation_together_and_draws_the_change(
    empty_cluster: plugin_rig.KubectlUser,
) -> None:
    add_node(empty_cluster.server)
    watched = empty_cluster.server.store.version

    answer = apply(empty_cluster)

    assert (answer.status, answer.err) == (0, "")
    assert "GPU 0" in answer.out
    assert "Requested custom for gpu-1" in answer.out
    assert metadata(empty_cluster.server)["labels"][well_known.CONFIG_LABEL] == "custom"
    text = metadata(empty_cluster.server)["annotations"][well_known.LAYOUT_ANNOTATION]
    written, _ = custom_layouts.single(text, source="annotation")
    meant, _ = custom_layouts.single(MINE, source="file")
    assert written.content_hash == meant.content_hash
    assert empty_cluster.server.store.version == watched + 1


@pytest.mark.parametrize(
    ("layout", "words", "message", "requested"),
    [
        ("all-1g.5gb", (), "Requested all-1g.5gb for gpu-1", "all-1g.5gb"),
        (
            "all-1g.5gb",
            ("--dry-run",),
            "evicted under the default drain policy.",
            "all-balanced",
        ),
        ("all-1g.5gb", ("--dry-run",), "Nothing was requested (--dry-run).", "all-balanced"),
        (
            "all-1g.5bg",
            (),
            "Name a layout that 'kubectl mig layouts' lists.",
            "all-balanced",
        ),
        ("all-balanced", (), "requests layout all-balanced already", "all-balanced"),
        ("gpu-1", (), "no node lists layout 'gpu-1'", "all-balanced"),
        (None, (), "name a layout that 'kubectl mig layouts' lists", "all-balanced"),
    ],
)
def test_without_a_file_a_layout_that_the_node_lists_is_requested(
    empty_cluster: plugin_rig.KubectlUser,
    layout: str | None,
    words: tuple[str, ...],
    message: str,
    requested: str,
) -> None:
    generated = available_layouts.generate(plugin_rig.gpus_with(SPEC)).values()
    add_node(
        empty_cluster.server, listed=layout_list.to_json(map(layout_list.Entry.of, generated))
    )
    answer = empty_cluster.run_plugin("apply", *filter(None, (layout, "gpu-1")), *words)
    assert message in answer.out + answer.err
    assert metadata(empty_cluster.server)["labels"][well_known.CONFIG_LABEL] == requested
    assert well_known.LAYOUT_ANNOTATION not in metadata(empty_cluster.server)["annotations"]


def test_a_request_that_changes_no_gpu_is_reported_as_such(
    empty_cluster: plugin_rig.KubectlUser,
) -> None:
    generated = available_layouts.generate(plugin_rig.gpus_with(SPEC)).values()
    listed = layout_list.to_json(map(layout_list.Entry.of, generated))
    add_node(empty_cluster.server, gpus=plugin_rig.gpus_with(SPEC, "all-1g.5gb"), listed=listed)
    answer = empty_cluster.run_plugin("apply", "all-1g.5gb", "gpu-1")
    assert "already active: no GPU changes." in answer.out
    assert "Requested all-1g.5gb for gpu-1" in answer.out


def test_a_listed_layout_of_the_agents_config_map_is_planned_first(
    empty_cluster: plugin_rig.KubectlUser,
) -> None:
    (mine,) = layout_parser.parse(MINE, source="file").layouts.values()
    add_node(empty_cluster.server, listed=layout_list.to_json([layout_list.Entry.of(mine)]))
    empty_cluster.server.store.create(api_objects.a_config_map(MINE))
    answer = empty_cluster.run_plugin("apply", "mine", "gpu-1", "--dry-run", "-o", "json")
    assert answer.data["nodes"][0]["fit"] == "fits"


def test_a_second_request_of_the_same_layout_is_a_new_one(
    empty_cluster: plugin_rig.KubectlUser,
) -> None:
    add_node(empty_cluster.server)
    texts = set()
    for _ in range(2):
        assert apply(empty_cluster).status == 0
        texts.add(metadata(empty_cluster.server)["annotations"][well_known.LAYOUT_ANNOTATION])
    assert len(texts) == 2


def test_a_dry_run_shows_the_change_and_writes_nothing(
    empty_cluster: plugin_rig.KubectlUser,
) -> None:
    add_node(empty_cluster.server)
    before = empty_cluster.server.store.version

    answer = apply(empty_cluster, "--dry-run", "-o", "json")

    assert answer.status == 0
    assert answer.data["isRequested"] is False
    assert answer.data["nodes"][0]["fit"] == "fits"
    assert "Nothing was requested (--dry-run)." in apply(empty_cluster, "--dry-run").out
    assert empty_cluster.server.store.version == before
    assert_nothing_requested(empty_cluster.server)


@pytest.mark.parametrize(
    ("words", "text", "status", "message"),
    [
        (
            (),
            SEVERAL,
            2,
            "has 2 layouts ('mine', 'whole'); choose one: kubectl mig apply LAYOUT NODE -f FILE",
        ),
        ((), "version: v1\n", 2, "has 0 layouts (none)"),
        (("mien",), SEVERAL, 2, "did you mean 'mine'?"),
        ((), "nonsense", 2, "<stdin>:1:1"),
    ],
)
def test_an_unusable_document_is_refused(
    empty_cluster: plugin_rig.KubectlUser,
    words: tuple[str, ...],
    text: str,
    status: int,
    message: str,
) -> None:
    add_node(empty_cluster.server)
    answer = apply(empty_cluster, *words, text=text)
    assert answer.status == status
    assert message in answer.err
    assert_nothing_requested(empty_cluster.server)


def test_one_layout_of_several_is_named(empty_cluster: plugin_rig.KubectlUser) -> None:
    add_node(empty_cluster.server)
    assert apply(empty_cluster, "whole", text=SEVERAL).status == 0
    text = metadata(empty_cluster.server)["annotations"][well_known.LAYOUT_ANNOTATION]
    layout, _ = custom_layouts.single(text, source="annotation")
    assert layout.rules[0].desired.mode is model.MigMode.DISABLED


def test_a_layout_that_does_not_fit_is_not_requested(
    empty_cluster: plugin_rig.KubectlUser,
) -> None:
    add_node(empty_cluster.server)
    answer = apply(empty_cluster, text=MINE.replace("2g.10gb: 1", "7g.40gb: 1"))
    assert answer.status == 1
    assert "does not fit" in answer.out
    assert "Nothing was requested." in answer.out
    assert_nothing_requested(empty_cluster.server)


def test_a_node_without_an_agent_is_only_planned_for(
    empty_cluster: plugin_rig.KubectlUser,
) -> None:
    product = {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-40GB"}
    add_node(empty_cluster.server, gpus=None, state=None, labels=product)
    assert apply(empty_cluster, "--dry-run").status == 0
    answer = apply(empty_cluster)
    assert answer.status == 2
    assert "no agent shows its GPUs" in answer.err
    assert "'kubectl get pods -A --field-selector spec.nodeName=gpu-1'" in answer.err
    assert_nothing_requested(empty_cluster.server)


NO_CUSTOM, NO_EVICTION, ON_DEMAND = "takes no custom layouts", "evicts no pod", "on demand"
PARTITIONED = {well_known.PARTITIONING_LABEL: well_known.ON_DEMAND}


@pytest.mark.parametrize(
    ("listed", "labels", "name", "notes"),
    [
        (LISTED, {}, "mine", set()),
        pytest.param("nonsense", {}, "mine", set(), marks=pytest.mark.slow),
        (layout_list.to_json([]), {}, "mine", {NO_CUSTOM}),
        (LISTED, PARTITIONED, "mine", {NO_EVICTION, ON_DEMAND}),
        (LISTED, {}, "on-demand mine", {NO_EVICTION}),
    ],
)
def test_other_handling_of_the_layout_by_an_agent_is_noted(
    empty_cluster: plugin_rig.KubectlUser,
    listed: str,
    labels: dict[str, str],
    name: str,
    notes: set[str],
) -> None:
    add_node(empty_cluster.server, listed=listed, labels=labels)
    answer = apply(empty_cluster, text=MINE.replace("mine", name))
    every = (NO_CUSTOM, NO_EVICTION, ON_DEMAND)
    assert {each for each in every if each in answer.out} == notes
    assert metadata(empty_cluster.server)["labels"][well_known.CONFIG_LABEL] == "custom"
    request = custom_layouts.CustomRequest.of(
        node_object.parse_node(node_copy(empty_cluster.server))
    )
    may_evict = custom_layouts.request_for("custom", request).may_evict
    assert may_evict is (NO_EVICTION not in notes)


def replace_label(node: dict[str, Any]) -> None:
    node["metadata"]["labels"][well_known.CONFIG_LABEL] = "all-disabled"


def register_again(node: dict[str, Any]) -> None:
    node["metadata"]["uid"] = "another-machine"


def move(node: dict[str, Any]) -> None:
    node["metadata"]["labels"]["example.com/rack"] = "12"


@pytest.mark.parametrize(
    ("edit", "requested"),
    [(replace_label, "all-disabled"), (register_again, "all-balanced"), (move, "custom")],
)
def test_apply_reads_a_node_changed_in_between_again(
    empty_cluster: plugin_rig.KubectlUser,
    monkeypatch: pytest.MonkeyPatch,
    edit: Callable[[dict[str, Any]], None],
    requested: str,
) -> None:
    add_node(empty_cluster.server)
    patch_node = Kubectl.patch_node

    def patch(self: Kubectl, name: str, version: str, change: node_object.NodePatch) -> None:
        monkeypatch.undo()
        node = node_copy(empty_cluster.server)
        edit(node)
        empty_cluster.server.store.write(KEY, node)
        patch_node(self, name, version, change)

    monkeypatch.setattr(Kubectl, "patch_node", patch)
    answer = apply(empty_cluster)

    is_refused = requested != "custom"
    assert answer.status == int(is_refused)
    assert metadata(empty_cluster.server)["labels"][well_known.CONFIG_LABEL] == requested
    assert ("has changed since" in answer.err) is is_refused


def test_a_request_that_a_webhook_reverts_is_reported(
    empty_cluster: plugin_rig.KubectlUser,
) -> None:
    add_node(empty_cluster.server)
    empty_cluster.server.inject(apiserver.Fault(method="PATCH", resource="nodes", reverts=True))

    answer = apply(empty_cluster)

    assert answer.status == 1
    keys = f"{well_known.CONFIG_LABEL}, {well_known.LAYOUT_ANNOTATION}"
    assert f"did not keep {keys}: does an admission webhook change it?" in answer.err


def test_kubectl_itself_writes_the_request(
    empty_cluster: plugin_rig.KubectlUser, tmp_path: pathlib.Path
) -> None:
    add_node(empty_cluster.server)
    (tmp_path / "mine.yaml").write_text(MINE)
    answer = empty_cluster.run_plugin_with_kubectl(
        "apply", "gpu-1", "-f", str(tmp_path / "mine.yaml")
    )
    assert answer.status == 0, answer.err
    assert metadata(empty_cluster.server)["labels"][well_known.CONFIG_LABEL] == "custom"


# -- what other commands show -----------------------------------------------------------------


def add_custom(
    server: apiserver.ApiServer, text: str | None, *, reported: str = MINE, **fields: Any
) -> None:
    """Add a node that asks for the layout of ``text``, whose agent has applied ``reported``."""
    layout, _ = custom_layouts.single(reported, source="annotation")
    add_node(
        server,
        requested="custom",
        config_hash=layout.content_hash,
        annotation_hash=custom_layouts.CustomRequest(
            node_name="gpu-1", text=reported
        ).annotation_hash,
        annotations={} if text is None else {well_known.LAYOUT_ANNOTATION: text},
        **fields,
    )


def test_status_distinguishes_one_custom_layout_from_the_next(
    empty_cluster: plugin_rig.KubectlUser,
) -> None:
    add_custom(empty_cluster.server, MINE)
    assert (
        empty_cluster.run_plugin("status", "gpu-1", "-o", "json").data["nodes"][0]["state"]
        == "success"
    )

    node = node_copy(empty_cluster.server)
    node["metadata"]["annotations"][well_known.LAYOUT_ANNOTATION] = OTHER
    empty_cluster.server.store.write(KEY, node)

    answer = empty_cluster.run_plugin("status", "gpu-1", "-o", "json").data["nodes"][0]
    assert answer["state"] == "waiting"
    assert "an earlier annotation" in " ".join(answer["notes"])


@pytest.mark.parametrize("name", ["custom", well_known.ON_DEMAND])
def test_a_custom_layout_is_planned_from_the_nodes_annotation(
    empty_cluster: plugin_rig.KubectlUser, name: str
) -> None:
    add_custom(
        empty_cluster.server,
        OTHER.replace("custom", name),
        gpus=plugin_rig.gpus_with(SPEC, "all-1g.5gb"),
    )
    empty_cluster.server.store.create(plugin_rig.pod("trainer", "gpu-1", mig_1g_5gb=14))
    answer = empty_cluster.run_plugin("plan", "custom", "gpu-1")
    assert answer.status == 0, answer.err
    assert "custom of the node's annotation" in answer.out
    assert "3g.20gb" in answer.out
    assert ("Pods: none evicted." in answer.out) is (name == well_known.ON_DEMAND)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "has no annotation"),
        ("nonsense", "of node gpu-1:1:1"),
        (OTHER.replace("custom", '"\\e[2J"') + '  "\\e[3J": []', "of node gpu-1:5:"),
    ],
)
def test_a_plan_says_why_the_custom_layout_is_missing(
    empty_cluster: plugin_rig.KubectlUser, text: str | None, message: str
) -> None:
    add_custom(empty_cluster.server, text)
    answer = empty_cluster.run_plugin("plan", "custom", "gpu-1", "-o", "json")
    assert answer.status == 1
    assert message in answer.data["nodes"][0]["message"]
    assert "\x1b" not in empty_cluster.run_plugin("plan", "custom", "gpu-1").out


def test_the_list_of_layouts_has_the_custom_one(empty_cluster: plugin_rig.KubectlUser) -> None:
    add_custom(empty_cluster.server, MINE)
    listed = empty_cluster.run_plugin("layouts", "gpu-1", "-o", "json").data["layouts"]
    (custom,) = (each for each in listed if each["layout"] == "custom")
    assert custom["isRequested"]
    assert custom["isApplied"]
    assert custom["gpus"][0]["devices"] == {"1g.5gb": 1, "2g.10gb": 1}


def test_a_history_does_not_take_another_custom_layout_for_this_one(
    empty_cluster: plugin_rig.KubectlUser,
) -> None:
    add_custom(empty_cluster.server, OTHER, reported=OTHER)
    other, _ = custom_layouts.single(OTHER, source="annotation")
    applied = reasons.Reason.APPLIED.value
    for hours, content_hash in ((9, other.content_hash), (8, "0123456789ab")):
        message = f"Layout custom ({content_hash}) is active."
        at = plugin_rig.ago(hours=hours)
        empty_cluster.server.store.create(api_objects.an_event("gpu-1", applied, message, at=at))

    since = empty_cluster.run_plugin("history", "gpu-1", "-o", "json").data["appliedSince"]

    status = empty_cluster.run_plugin("status", "gpu-1", "-o", "json").data["nodes"][0]
    assert since == status["lastRun"]["finishedAt"]
