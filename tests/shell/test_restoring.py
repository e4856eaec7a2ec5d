"""``restore``: back to a checkpoint from anywhere, or not a step; over GPUs in memory."""

import json

import pytest

from mig_manager import errors
from mig_manager.change import plans
from mig_manager.core import model
from mig_manager.core.layout import config
from mig_manager.core.records import checkpoint
from tests.shell import applying_rig
from tests.shell.applying_rig import Gpus, Killed, shape

LAYOUTS = config.parse(
    """
version: v1
mig-configs:
  'off':
  - {devices: all, mig-enabled: false}
  then:
  - {devices: [0], mig-enabled: true, mig-devices: {1g.5gb: 2, 3g.20gb: 1}}
  - {devices: [1], mig-enabled: true, mig-devices: {1c.3g.20gb: 2, 1g.5gb: 1}}
  now:
  - {devices: all, mig-enabled: true, mig-devices: {2g.10gb: 1, 3g.20gb: 1}}
""",
    source="layouts.yaml",
)


def gpus_with(layout: str) -> Gpus:
    gpus = Gpus()
    applying_rig.apply(gpus, LAYOUTS.layout(layout))
    gpus.steps = 0
    return gpus


THEN = gpus_with("then")
CHECKPOINT = checkpoint.render(THEN.gpus)


def ways() -> list[tuple[str, int]]:
    """Return each step of the restore from each layout."""
    found = []
    for start in ("off", "now"):
        gpus = gpus_with(start)
        applying_rig.Rig(gpus).restore(CHECKPOINT)
        found += [(start, at) for at in range(1, gpus.steps + 1)]
    return found


WAYS = ways()


@pytest.mark.parametrize("start", ["off", "now", "then"])
def test_gpus_have_again_what_they_had_each_instance_in_its_place(start: str) -> None:
    gpus = gpus_with(start)
    rig = applying_rig.Rig(gpus)

    restored = rig.restore(CHECKPOINT)

    assert shape(gpus) == shape(THEN)
    assert restored.is_changed is (start != "then")
    assert rig.journal.text is None
    assert rig.exclusion.descriptions == ["restore checkpoint c.json"]


def test_what_is_right_already_is_not_touched() -> None:
    gpus = gpus_with("now")
    kept = [gi for gi in gpus.gpus[0].gpu_instances if str(gi.profile) == "3g.20gb"]

    applying_rig.Rig(gpus).restore(CHECKPOINT)

    assert set(kept) <= set(gpus.gpus[0].gpu_instances)


def test_what_was_restored_comes_back_at_the_next_boot() -> None:
    gpus = gpus_with("now")
    rig = applying_rig.Rig(gpus)
    rig.restore(CHECKPOINT)
    gpus.reboot()
    rig.boot_id = "boot-2"

    back = rig.boot()

    assert (back.layout, back.problems) == ("checkpoint c.json", ())
    assert shape(gpus) == shape(THEN)


@pytest.mark.parametrize(("start", "at"), WAYS)
def test_a_restore_that_fails_at_any_step_is_undone(start: str, at: int) -> None:
    gpus = gpus_with(start)
    before = shape(gpus)
    rig = applying_rig.Rig(gpus)
    gpus.fails = lambda _step: gpus.steps == at

    with pytest.raises(errors.HardwareError, match=r"in use; (the instances|nothing)"):
        rig.restore(CHECKPOINT)

    assert shape(gpus) == before
    assert rig.journal.text is None


@pytest.mark.parametrize(("start", "at"), WAYS)
def test_after_a_kill_at_any_step_the_next_restore_makes_it_good(start: str, at: int) -> None:
    gpus = gpus_with(start)
    rig = applying_rig.Rig(gpus)
    gpus.killed_at = at
    with pytest.raises(Killed):
        rig.restore(CHECKPOINT)
    assert rig.journal.text is not None
    gpus.killed_at = None

    rig.restore(CHECKPOINT)

    assert shape(gpus) == shape(THEN)
    assert rig.journal.text is None


def test_after_a_kill_a_bad_checkpoint_undoes_nothing() -> None:
    start, at = WAYS[len(WAYS) // 2]
    gpus = gpus_with(start)
    rig = applying_rig.Rig(gpus)
    gpus.killed_at = at
    with pytest.raises(Killed):
        rig.restore(CHECKPOINT)
    gpus.killed_at = None
    left, journal = shape(gpus), rig.journal.text

    with pytest.raises(errors.CheckpointError):
        rig.restore(CHECKPOINT[:-1])

    assert shape(gpus) == left
    assert rig.journal.text == journal


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
def test_a_bad_checkpoint_changes_nothing_not_even_the_gpus_that_it_is_right_about(
    spoil: object,
) -> None:
    gpus = gpus_with("now")
    rig = applying_rig.Rig(gpus)
    before = gpus.gpus
    data = json.loads(CHECKPOINT)
    spoil(data)  # type: ignore[operator]

    with pytest.raises(errors.CheckpointError, match=r"^c\.json:1:\d+: "):
        rig.restore(json.dumps(data))

    assert gpus.gpus == before
    assert gpus.steps == 0


def test_with_the_mode_alone_no_instance_is_made() -> None:
    gpus = gpus_with("off")

    applying_rig.Rig(gpus).restore(CHECKPOINT, scope=plans.Scope.MODE_ONLY)

    assert [(g.current_mode, g.gpu_instances) for g in gpus.gpus] == [
        (model.MigMode.ENABLED, ())
    ] * 2


def test_another_manager_at_work_keeps_a_restore_off() -> None:
    gpus = gpus_with("now")
    before = gpus.gpus
    rig = applying_rig.Rig(gpus)
    rig.exclusion.refusals = 1_000_000

    with pytest.raises(errors.LockedError):
        rig.restore(CHECKPOINT)

    assert gpus.gpus == before
