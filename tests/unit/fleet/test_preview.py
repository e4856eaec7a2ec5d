"""What a layout would change on a node, from what its agent publishes."""

import dataclasses
from collections.abc import Mapping

import pytest

from mig_manager import errors
from mig_manager.catalogue import hardware
from mig_manager.core import model
from mig_manager.core.fleet import cluster_plan, fleet_nodes, listed_layouts, preview
from mig_manager.core.layout import available_layouts, layout_list, layout_parser
from mig_manager.core.objects import discovery_labels, pod_object, well_known
from mig_manager.core.records import inventory_codec
from mig_manager.reasons import Reason
from tests.rigs import layout_table
from tests.rigs.node import agents, gpu_values, samples

A100 = hardware.find("A100-SXM4-40GB")
DOCUMENT = layout_parser.parse(agents.LAYOUTS_TEXT, source="test")
LISTED = layout_table.counts_of("all-balanced")
MIXED = {"nvidia.com/mig-1g.5gb": 2, "nvidia.com/mig-2g.10gb": 1, "nvidia.com/mig-3g.20gb": 1}
NodeFit = cluster_plan.NodeFit


def gpus(devices: Mapping[str, int] | None = None, *, count: int = 2) -> tuple[model.Gpu, ...]:
    """A100s, with MIG off or with some devices each."""
    return gpu_values.gpus_of(f"{count}xA100-SXM4-40GB", devices)


def node(published: tuple[model.Gpu, ...] | str, **allocatable: int) -> fleet_nodes.FleetNode:
    text = published if isinstance(published, str) else inventory_codec.to_json(published)
    view = samples.node_view(
        annotations={well_known.GPUS_ANNOTATION: text}, allocatable=allocatable
    )
    return fleet_nodes.FleetNode(view=view, is_ready=True)


def pod(name: str, resource: str, **changed: object) -> pod_object.Pod:
    return samples.pod(name, gpu_resources={resource: 1}, **changed)


def plan_for(
    fleet_node: fleet_nodes.FleetNode, layout: str, *pods: pod_object.Pod
) -> cluster_plan.NodePlan:
    return preview.of_layout(fleet_node, DOCUMENT, layout, pods)


def counts(node_plan: cluster_plan.NodePlan) -> Mapping[str, object]:
    plan = node_plan.to_data()["plan"]
    assert plan
    return {**plan["instances"]}


BALANCED = node(gpus(LISTED), **MIXED)
GPU_POD = pod("p", "nvidia.com/gpu")
PLUGIN_POD = pod(
    "plugin",
    "nvidia.com/mig-2g.10gb",
    labels={"name": "nvidia-device-plugin-ds"},
    owner_kind="DaemonSet",
    mounts_plugin_sockets=True,
)
MONITOR_POD = pod(
    "dcgm",
    "other",
    node_selector={well_known.DEPLOY_LABEL_PREFIX + "dcgm-dra": "true"},
    owner_kind="DaemonSet",
    has_claims=True,
)


@pytest.mark.parametrize(
    ("fleet_node", "layout", "pods", "instances", "evicted", "maybe_evicted"),
    [
        pytest.param(BALANCED, "all-balanced", [GPU_POD], (8, 0, 0), (), (), id="active"),
        pytest.param(
            node(gpus()), "all-1g.5gb", [GPU_POD], (0, 0, 14), ("default/p",), (), id="the first"
        ),
        pytest.param(
            node(gpus(LISTED), **{"nvidia.com/gpu": 8}),
            "one-slice-changed",
            [GPU_POD, pod("q", "other")],
            (7, 1, 2),
            (),
            ("default/p",),
            id="all devices are plain GPUs",
        ),
        pytest.param(
            BALANCED,
            "one-slice-changed",
            [pod("claims", "other", has_claims=True), PLUGIN_POD, MONITOR_POD],
            (7, 1, 2),
            (),
            ("default/claims",),
            id="a pod with a claim, the device plugin, and a monitor",
        ),
    ],
)
def test_a_layout_that_fits_names_lost_instances_and_evicted_pods(
    fleet_node: fleet_nodes.FleetNode,
    layout: str,
    pods: list[pod_object.Pod],
    instances: tuple[int, int, int],
    evicted: tuple[str, ...],
    maybe_evicted: tuple[str, ...],
) -> None:
    node_plan = plan_for(fleet_node, layout, *pods)

    assert node_plan.fit is (NodeFit.FITS if any(instances[1:]) else NodeFit.UNCHANGED)
    assert counts(node_plan) == dict(zip(("kept", "destroyed", "created"), instances, strict=True))
    assert (node_plan.evicted, node_plan.maybe_evicted) == (evicted, maybe_evicted)


def test_a_first_layout_changes_modes_and_resets_gpus() -> None:
    plan = plan_for(node(gpus()), "all-1g.5gb").to_data()["plan"]

    assert plan
    changes = [(gpu["index"], gpu["changes_mode"], gpu["needs_reset"]) for gpu in plan["gpus"]]
    assert changes == [(0, True, True), (1, True, True)]


def test_a_pod_that_may_use_an_unreachable_gpu_is_not_certainly_evicted() -> None:
    both = gpus(LISTED)
    published = gpu_values.seen_of(both, {both[1].uuid})

    node_plan = plan_for(
        node(published, **MIXED), "all-1g.5gb", pod("p", "nvidia.com/mig-2g.10gb")
    )

    assert node_plan.is_changed
    assert (node_plan.evicted, node_plan.maybe_evicted) == ((), ("default/p",))
    assert [loss.least for loss in node_plan.losses or ()] == [0]


@pytest.mark.parametrize(
    ("resource", "advertised", "devices"),
    [("nvidia.com/gpu", 14, 14), ("nvidia.com/gpu", 2, 2), ("nvidia.com/gpu.shared", 56, 14)],
)
def test_a_node_without_labels_has_the_devices_that_it_advertises(
    resource: str, advertised: int, devices: int
) -> None:
    fleet_node = node(gpus({"1g.5gb": 7}), **{resource: advertised})

    node_plan = plan_for(fleet_node, "all-disabled", pod("p", resource))

    assert node_plan.evicted == ("default/p",)
    assert [loss.kind.count for loss in node_plan.losses or ()] == [devices]


def test_resources_by_profile_separate_certain_from_possible_evictions() -> None:
    fleet_node = node(gpus(LISTED), **MIXED)

    node_plan = plan_for(
        fleet_node,
        "one-slice-changed",
        pod("gone", "nvidia.com/mig-2g.10gb"),
        pod("kept", "nvidia.com/mig-3g.20gb"),
        pod("also-kept", "nvidia.com/mig-1g.5gb"),
    )

    # On GPU 0 the only 2g.10gb of it goes; GPU 1 keeps its own.
    assert counts(node_plan) == {"kept": 7, "destroyed": 1, "created": 2}
    assert node_plan.evicted == ()
    assert node_plan.maybe_evicted == ("default/gone",)
    only_gpu = node(gpus(LISTED, count=1), **MIXED)
    layout = DOCUMENT.layout("one-slice-changed")
    alone = dataclasses.replace(layout, rules=layout.rules[:1])
    document = dataclasses.replace(DOCUMENT, layouts={layout.name: alone})
    pods = [pod("gone", "nvidia.com/mig-2g.10gb"), pod("p", "nvidia.com/mig-1g.5gb")]
    node_plan = preview.of_layout(only_gpu, document, layout.name, pods)
    assert node_plan.evicted == ("default/gone",)


def test_layout_that_a_node_lists_as_generated_is_previewed() -> None:
    fleet_node = node(gpus())
    made = available_layouts.generate(gpus())["all-7g.40gb"]
    text = layout_list.to_json([layout_list.Entry.of(made)])
    annotations = {**fleet_node.view.annotations, well_known.LAYOUTS_ANNOTATION: text}
    listing = dataclasses.replace(
        fleet_node, view=dataclasses.replace(fleet_node.view, annotations=annotations)
    )

    listed_layouts.require_layout([fleet_node, listing], DOCUMENT, "all-7g.40gb")
    with pytest.raises(errors.LayoutError, match=r"unknown layout 'all-7g\.40gb'"):
        listed_layouts.require_layout([fleet_node], DOCUMENT, "all-7g.40gb")
    assert counts(plan_for(listing, "all-7g.40gb"))["created"] == 2
    node_plan = plan_for(fleet_node, "all-7g.40gb")
    assert (node_plan.fit, node_plan.reason) == (NodeFit.DOES_NOT_FIT, Reason.UNKNOWN_CONFIG)


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        ("too-much", Reason.DOES_NOT_FIT),
        ("no-such-profile", Reason.UNKNOWN_PROFILE),
        ("other-gpu", Reason.NO_GPU_MATCHES),
    ],
)
def test_a_layout_that_does_not_fit_has_a_reason(layout: str, reason: Reason) -> None:
    node_plan = plan_for(node(gpus()), layout)

    assert (node_plan.fit, node_plan.reason) == (NodeFit.DOES_NOT_FIT, reason)
    assert node_plan.message


@pytest.mark.parametrize(("text", "message"), [("", "no agent shows"), ("{}", "cannot be read")])
def test_a_node_without_readable_gpus_is_unknown(text: str, message: str) -> None:
    node_plan = plan_for(node(text), "all-1g.5gb")

    assert node_plan.fit is NodeFit.UNKNOWN
    assert message in node_plan.message


@pytest.mark.parametrize(
    ("layout", "strategy", "mps", "fit", "reason"),
    [
        ("all-balanced", "single", "false", NodeFit.UNKNOWN, Reason.STRATEGY_MISMATCH),
        ("all-balanced", "mixed", "false", NodeFit.FITS, None),
        ("all-1g.5gb", "single", "false", NodeFit.FITS, None),
        ("all-1g.5gb", "single", "true", NodeFit.UNKNOWN, Reason.STRATEGY_MISMATCH),
        ("all-disabled", "single", "true", NodeFit.FITS, None),
    ],
)
def test_a_layout_that_the_strategy_cannot_serve_is_not_said_to_fit(
    layout: str, strategy: str, mps: str, fit: cluster_plan.NodeFit, reason: Reason | None
) -> None:
    fleet_node = node(gpus({"7g.40gb": 1}))
    labels = {discovery_labels.STRATEGY: strategy, discovery_labels.MPS_CAPABLE: mps}
    view = dataclasses.replace(fleet_node.view, labels=labels)

    node_plan = plan_for(dataclasses.replace(fleet_node, view=view), layout)

    assert (node_plan.fit, node_plan.reason) == (fit, reason)
    assert (strategy in node_plan.message) is bool(reason)


@pytest.mark.parametrize(
    ("label", "advertised", "resource"),
    [
        ("single", {"nvidia.com/mig-1g.5gb": 14}, "nvidia.com/mig-1g.5gb"),
        ("none", {"nvidia.com/mig-1g.5gb": 14}, "nvidia.com/mig-1g.5gb"),
        ("mixed", {"nvidia.com/gpu": 14}, "nvidia.com/gpu"),
    ],
)
def test_advertised_devices_count_more_than_the_label_of_the_strategy(
    label: str, advertised: Mapping[str, int], resource: str
) -> None:
    fleet_node = node(gpus({"1g.5gb": 7}), **advertised)
    labels = {discovery_labels.STRATEGY: label}
    view = dataclasses.replace(fleet_node.view, labels=labels)
    outdated = dataclasses.replace(fleet_node, view=view)

    assert plan_for(outdated, "all-disabled", pod("p", resource)).evicted == ("default/p",)
    is_single = resource == "nvidia.com/gpu"
    reason = Reason.STRATEGY_MISMATCH if is_single else None
    assert plan_for(outdated, "all-balanced").reason is reason


def test_without_known_profiles_no_layout_fits() -> None:
    blind = tuple(dataclasses.replace(gpu, profiles=None) for gpu in gpus())

    node_plans = [plan_for(node(blind), name) for name in ("all-1g.5gb", "too-much")]

    assert all(each.planned and each.planned.plan.is_provisional for each in node_plans)
    assert {(each.fit, each.reason) for each in node_plans} == {
        (NodeFit.UNKNOWN, cluster_plan.PreviewReason.MIG_DISABLED)
    }
