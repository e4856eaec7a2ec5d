"""``restore``: back to a checkpoint from anywhere, or not a step; over GPUs in memory."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from mig_manager import errors
from mig_manager.core import model
from mig_manager.core.files import checkpoint
from tests.rigs.node.local_rig import LocalRig

THEN = LocalRig("split")
CHECKPOINT = checkpoint.render(THEN.gpus)


@pytest.mark.parametrize("start", ["off", "before", "split"])
def test_restore_returns_each_instance_to_its_placement(start: str) -> None:
    rig = LocalRig(start)
    right = [gi for gi in rig.gpus[0].gpu_instances if str(gi.profile) == "3g.20gb"]

    restored = rig.restore(CHECKPOINT)

    assert rig.geometry == THEN.geometry
    assert restored.is_changed is (start != "split")
    assert rig.journal.text is None
    assert rig.lock.descriptions == ["restore checkpoint c.json"]
    # What is right already is not touched.
    assert set(right) <= set(rig.gpus[0].gpu_instances)

    rig.reboot()
    back = rig.boot()
    assert (back.layout, back.problems) == ("checkpoint c.json", ())
    assert rig.geometry == THEN.geometry


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data.update(Version="v2"),
        lambda data: data["MigState"]["Devices"][1].update(UUID="GPU-x"),
        lambda data: data["MigState"]["Devices"][1]["GpuInstances"][0].update(ProfileID=31),
        lambda data: data["MigState"]["Devices"][1]["GpuInstances"][0]["Placement"].update(
            Start=9
        ),
    ],
)
def test_bad_checkpoint_changes_no_gpu(spoil: Callable[[Any], None]) -> None:
    rig = LocalRig()
    data = json.loads(CHECKPOINT)
    spoil(data)

    with pytest.raises(errors.CheckpointError, match=r"^c\.json:1:\d+: "):
        rig.restore(json.dumps(data))

    assert rig.driver.executed_steps == []


def test_restoring_the_mode_alone_creates_no_instance() -> None:
    rig = LocalRig("off")

    rig.restore(CHECKPOINT, is_mode_only=True)

    assert rig.geometry == [(model.MigMode.ENABLED, model.MigMode.ENABLED)] * 2


def test_restoring_the_mode_alone_verifies_no_instance() -> None:
    rig = LocalRig("off")
    rig.driver.hides_profiles = True
    impossible = re.sub(r'("Start":)[0-9]+', r"\g<1>5", CHECKPOINT)
    assert impossible != CHECKPOINT

    assert rig.restore(impossible, is_mode_only=True).is_changed

    assert {gpu.current_mode for gpu in rig.gpus} == {model.MigMode.ENABLED}
