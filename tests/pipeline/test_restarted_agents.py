"""Agents that start where a layout is active: what they take for the same request."""

import dataclasses
from typing import Any

import pytest

from mig_manager import errors
from mig_manager.agent import settings
from mig_manager.catalogue import hardware
from mig_manager.core import model
from mig_manager.errors import Reason
from tests import fake_ports, fakes, scenes

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
FILE_ALONE = DEFAULT | {"generated_layouts": settings.GeneratedLayouts.OFF}


def start(
    rig: fakes.NodeRig,
    text: str = FILE,
    limits: dict[str, Any] | None = None,
    layout: str = "all-balanced",
    **replaced: Any,
) -> errors.Reason:
    """Start an agent on a node whose label names a layout; return how its run ends."""
    ours = scenes.reconciler(rig, text, limits=limits, **replaced)
    ours.recover(layout)
    return scenes.run(rig, layout, by=ours).reason


def repartition(rig: fakes.NodeRig) -> None:
    """Let another program repartition GPU 0, and a pod use every device there."""
    other = scenes.node()
    other.gpus = rig.gpus
    scenes.run(other, "other", OTHER)
    rig.gpus = (other.gpus[0], *rig.gpus[1:])
    rig.live()
    instances = rig.gpus[0].gpu_instances
    uuids = [ci.uuid for gi in instances for ci in gi.compute_instances if ci.uuid]
    rig.add_pod("training", devices=frozenset(uuids))


@pytest.mark.parametrize(
    ("before", "after", "text", "new_text"),
    [
        pytest.param(FILE_ALONE, DEFAULT, FILE, FILE, id="the name is generated now"),
        pytest.param(DEFAULT, FILE_ALONE, FILE, FILE, id="the name is generated no longer"),
        pytest.param(FILE_ALONE, FILE_ALONE, FILE, CHANGED, id="a new default file"),
        pytest.param({}, {}, FILE, OTHER, id="the owner's layout is gone"),
    ],
)
def test_content_that_changed_without_the_owner_is_no_new_request(
    before: dict[str, Any], after: dict[str, Any], text: str, new_text: str
) -> None:
    rig = scenes.node()
    assert start(rig, text, before) is Reason.APPLIED
    repartition(rig)

    assert start(rig, new_text, after) is Reason.DRIFTED
    assert "training" in rig.pod_names


def test_a_layout_generated_without_an_unreachable_gpu_is_no_new_request() -> None:
    rig = scenes.node()
    products = [hardware.find(name) for name in ("A100-SXM4-40GB", "A30")]
    rig.gpus = tuple(hardware.template(each, index) for index, each in enumerate(products))
    rig.live()
    assert start(rig, OTHER) is Reason.APPLIED
    repartition(rig)
    rig.lost.add(rig.gpus[1].uuid)

    assert start(rig, OTHER) is Reason.DRIFTED
    assert "training" in rig.pod_names


class OldDriver(fake_ports.FakeGpus):
    """R535: it lists profiles only while MIG is on."""

    def observe(self) -> model.ObservedGpus:
        gpus = super().observe()
        on = model.MigMode.ENABLED
        listed = (
            gpu if gpu.current_mode is on else dataclasses.replace(gpu, profiles=None)
            for gpu in gpus
        )
        return model.ObservedGpus(listed, gpus.unreachable)


def test_a_driver_that_lists_its_profiles_once_mig_is_on_makes_no_new_request() -> None:
    rig = scenes.node()
    assert start(rig, limits=DEFAULT, gpus=OldDriver(rig)) is Reason.APPLIED
    repartition(rig)

    assert start(rig, limits=DEFAULT, gpus=OldDriver(rig)) is Reason.DRIFTED
    assert "training" in rig.pod_names


@pytest.mark.parametrize("text", [OTHER, FILE])
def test_new_content_that_the_owner_wrote_is_a_new_request(text: str) -> None:
    rig = scenes.node()
    assert start(rig, text) is Reason.APPLIED
    repartition(rig)

    assert start(rig, CHANGED) is Reason.APPLIED
    assert "training" not in rig.pod_names
