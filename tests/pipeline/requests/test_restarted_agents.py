"""Agents that start where a layout is active: what they take for the same request."""

from collections.abc import Callable
from typing import Any

import pytest

from mig_manager import errors, reasons
from mig_manager.core import model, steps
from mig_manager.core.objects import well_known
from mig_manager.core.records import run_status
from mig_manager.core.settings import node_settings
from mig_manager.reasons import Reason
from tests.rigs.node import (
    agents,
    call_errors,
    ends,
    gpu_values,
    moments,
    node_rig,
    nodes,
)

FILE = """
version: v1
mig-configs:
  all-balanced:
  - device-filter: "0x20B010DE"
    devices: all
    mig-enabled: true
    mig-devices: {1g.5gb: 2, 2g.10gb: 1, 3g.20gb: 1}
"""
CHANGED = FILE.replace("1g.5gb: 2, ", "")
OTHER = """
version: v1
mig-configs:
  other:
  - {devices: [0], mig-enabled: true, mig-devices: {1g.5gb: 7}}
"""
DEFAULT: dict[str, Any] = {"has_default_layouts": True}
FILE_ALONE = DEFAULT | {"generated_layouts": node_settings.GeneratedLayouts.OFF}


def start(
    rig: node_rig.NodeRig,
    text: str = FILE,
    settings: dict[str, Any] | None = None,
    layout: str = "all-balanced",
    **overrides: Any,
) -> reasons.Reason:
    """Start an agent on a node whose label names a layout; return how its run ends."""
    agent = agents.start(rig, layout, layouts=text, settings=settings, **overrides)
    return agents.run(rig, layout, by=agent).reason


def repartition(rig: node_rig.NodeRig) -> None:
    """Let another program repartition GPU 0, and a pod use every device there."""
    first, *others = rig.gpus
    profile = max(first.profiles or (), key=lambda each: len(each.placements)).profile
    desired = model.DesiredGpu.of(model.MigMode.ENABLED, {profile: 4})
    rig.gpus = (*gpu_values.with_desired((first,), desired), *others)
    rig.advance()
    rig.pods.add("training", devices=frozenset(rig.gpus[0].mig_uuids))


@pytest.mark.parametrize(
    ("before", "after", "text", "new_text", "reason"),
    [
        pytest.param(FILE_ALONE, DEFAULT, FILE, FILE, Reason.DRIFTED, id="generated now"),
        pytest.param(DEFAULT, FILE_ALONE, FILE, FILE, Reason.DRIFTED, id="no longer generated"),
        pytest.param(FILE_ALONE, FILE_ALONE, FILE, CHANGED, Reason.DRIFTED, id="new default file"),
        pytest.param({}, {}, FILE, OTHER, Reason.UNKNOWN_CONFIG, id="owner's layout is gone"),
    ],
)
def test_content_not_changed_by_the_owner_makes_no_new_request(
    before: dict[str, Any], after: dict[str, Any], text: str, new_text: str, reason: Reason
) -> None:
    rig = nodes.node()
    assert start(rig, text, before) is Reason.APPLIED
    repartition(rig)

    assert start(rig, new_text, after) is reason
    assert "training" in rig.pods.names


def node_of(*names: str) -> node_rig.NodeRig:
    rig = nodes.node()
    rig.gpus = gpu_values.gpus_of("+".join(names))
    rig.advance()
    return rig


def test_generated_layout_that_lacks_a_lost_gpu_makes_no_new_request() -> None:
    rig = node_of("A100-SXM4-40GB", "A30")
    assert start(rig, OTHER) is Reason.APPLIED
    repartition(rig)
    rig.driver.lost.add(rig.gpus[1].uuid)

    assert start(rig, OTHER) is Reason.DRIFTED
    assert "training" in rig.pods.names


@pytest.mark.parametrize(
    "products", [("A30", "A100-SXM4-40GB"), ("A30",)], ids=["among others", "alone"]
)
def test_layout_of_an_unreachable_gpu_stays_the_same_request(products: tuple[str, ...]) -> None:
    layout = "all-2g.12gb"
    rig = node_of(*products)
    assert start(rig, OTHER, layout=layout) is Reason.APPLIED
    lost = rig.gpus[0]
    rig.driver.lost.add(lost.uuid)
    agent = agents.start(rig, layout, layouts=OTHER)

    outcome = ends.run_to(rig, layout, Reason.GPU_UNREACHABLE, f"'{layout}'", by=agent)

    assert outcome.should_retry
    assert lost.uuid in outcome.message
    rig.driver.lost.clear()
    repartition(rig)
    ends.run_to(rig, layout, Reason.DRIFTED, by=agent, attempt=2)
    assert "training" in rig.pods.names


def test_layout_unknown_to_the_unreachable_product_is_final() -> None:
    rig = node_of("A100-SXM4-40GB", "A100-SXM4-40GB")
    rig.driver.lost.add(rig.gpus[1].uuid)

    assert start(rig, OTHER, layout="all-2g.12gb") is Reason.UNKNOWN_CONFIG


def test_driver_that_lists_profiles_late_makes_no_new_request() -> None:
    rig = nodes.node()
    rig.driver.hides_profiles = True
    assert start(rig, settings=DEFAULT) is Reason.APPLIED
    repartition(rig)

    assert start(rig, settings=DEFAULT) is Reason.DRIFTED
    assert "training" in rig.pods.names


@pytest.mark.parametrize("text", [OTHER, FILE], ids=["another layout", "other content"])
def test_new_content_that_the_owner_wrote_is_a_new_request(text: str) -> None:
    rig = nodes.node()
    assert start(rig, text) is Reason.APPLIED
    repartition(rig)

    assert start(rig, CHANGED) is Reason.APPLIED
    assert "training" not in rig.pods.names


@pytest.mark.parametrize(
    ("then", "attempts", "end"),
    [
        ("one-slice-changed", 0, "is back"),
        ("one-slice-changed", 3, "is removed"),
        ("all-balanced", 0, "is removed"),
        ("all-balanced", 3, "is back"),
    ],
)
def test_a_deleted_plugin_is_awaited_until_it_is_back_or_removed(
    then: str, attempts: int, end: str
) -> None:
    rig = nodes.node(layout="all-balanced", label_managed=False)
    # Its DaemonSet makes no new pod yet.
    rig.set_at(steps.Step, rig.plugin, is_label_managed=True)
    rig.failures.add(steps.CreateGpuInstance, call_errors.REFUSED, times=1)
    ends.run_to(rig, "one-slice-changed", Reason.INSUFFICIENT_RESOURCES)
    assert not rig.pods.plugins
    for _ in range(attempts):
        assert start(rig, agents.LAYOUTS_TEXT, layout=then) is Reason.PLUGIN_NOT_READY
        assert f"{well_known.PLUGIN_DEPLOY_LABEL}=false" in rig.node_object.status["message"]
        # Kubelet forgets a stopped plugin after five minutes.
        rig.kubelet.schedulable = {}
    rig.callbacks.clear()
    if end == "is back":
        rig.set_at(moments.Wait, rig.plugin, is_label_managed=False)
    else:
        rig.node_object.labels[well_known.PLUGIN_DEPLOY_LABEL] = "false"

    reason = start(rig, agents.LAYOUTS_TEXT, layout=then)

    assert reason in {Reason.APPLIED, Reason.ALREADY_APPLIED}
    assert bool(rig.pods.plugins) is (end == "is back")


def refuse_eviction(rig: node_rig.NodeRig) -> None:
    rig.pods.add("affected", devices=frozenset({nodes.device(rig, 0, "2g.10gb")}))
    rig.disruptions.refusals["affected"] = "budget"


def refuse_instance(rig: node_rig.NodeRig) -> None:
    unsupported = errors.HardwareError("no", reason=Reason.NOT_SUPPORTED)
    rig.failures.add(steps.CreateGpuInstance, unsupported, times=1)


@pytest.mark.parametrize("refuse", [refuse_eviction, refuse_instance])
def test_a_plugin_that_is_removed_after_a_failed_run_is_not_awaited(
    refuse: Callable[[node_rig.NodeRig], None],
) -> None:
    rig = nodes.node(layout="all-balanced", label_managed=False)
    refuse(rig)
    assert agents.run(rig, "one-slice-changed").state is run_status.State.FAILED
    (plugin,) = rig.pods.plugins
    rig.plugin.is_label_managed = True
    rig.pods.remove(plugin.uid)
    rig.kubelet.schedulable = {}
    rig.disruptions.refusals.clear()

    assert start(rig, agents.LAYOUTS_TEXT, layout="one-slice-changed") is Reason.APPLIED
