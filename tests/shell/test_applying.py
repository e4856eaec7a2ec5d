"""``apply`` that is cut off anywhere, fails anywhere, or is not alone; over GPUs in memory."""

import contextlib
import dataclasses
from collections.abc import Iterator

import pytest

from mig_manager import errors
from mig_manager.change import plans
from mig_manager.core import model, steps
from mig_manager.core.layout import config
from mig_manager.core.planner import planner
from mig_manager.core.records import status
from tests import fakes
from tests.shell import applying_rig
from tests.shell.applying_rig import Gpus, Killed, shape

DOCUMENT = config.parse(
    """
version: v1
mig-configs:
  before:
  - {devices: all, mig-enabled: true, mig-devices: {2g.10gb: 1, 3g.20gb: 1}}
  wanted:
  - {devices: all, mig-enabled: true, mig-devices: {1g.5gb: 2, 3g.20gb: 1}}
  other:
  - {devices: all, mig-enabled: true, mig-devices: {7g.40gb: 1}}
  mixed:
  - {devices: [0], mig-enabled: true, mig-devices: {1g.5gb: 2, 3g.20gb: 1}}
  - {devices: [1], mig-enabled: true, mig-devices: {1g.5gb: 7}}
  'off':
  - {devices: all, mig-enabled: false}
  first-only:
  - {devices: [0], mig-enabled: true, mig-devices: {7g.40gb: 1}}
  too-much:
  - {devices: all, mig-enabled: true, mig-devices: {4g.20gb: 2}}
""",
    source="layouts.yaml",
)
OFF = model.MigMode.DISABLED


def layout(name: str) -> config.Layout:
    return DOCUMENT.layout(name)


def unknown() -> errors.LayoutError:
    return errors.LayoutError("no layout 'x'", reason=errors.Reason.UNKNOWN_CONFIG)


def is_active(gpus: Gpus, name: str) -> bool:
    return plans.plan(gpus, layout(name)).is_applied


@pytest.fixture
def gpus() -> Gpus:
    gpus = Gpus()
    applying_rig.apply(gpus, layout("before"))
    gpus.steps = 0
    return gpus


@pytest.fixture
def rig(gpus: Gpus) -> applying_rig.Rig:
    return applying_rig.Rig(gpus)


def cut_off(rig: applying_rig.Rig, gpus: Gpus, name: str, *, at: int) -> bool:
    """Apply a layout and be killed at a step; return whether there was such a step."""
    gpus.steps, gpus.killed_at = 0, at
    try:
        rig.apply(layout(name))
    except Killed:
        return True
    finally:
        gpus.killed_at = None
    return False


def kill_points(name: str, start: str = "before") -> Iterator[int]:
    """Return the number of each step on the way to a layout."""
    gpus = Gpus()
    applying_rig.apply(gpus, layout(start))
    gpus.steps = 0
    applying_rig.apply(gpus, layout(name))
    return iter(range(1, gpus.steps + 1))


WAYS = [
    (start, name, at)
    for start, name in (("before", "wanted"), ("before", "off"), ("off", "other"))
    for at in kill_points(name, start)
]


@pytest.mark.parametrize(("start", "name", "at"), WAYS)
@pytest.mark.parametrize("again", ["wanted", "other", "off", "before"])
def test_after_a_kill_at_any_step_any_layout_can_be_applied(
    start: str, name: str, at: int, again: str
) -> None:
    gpus = Gpus()
    rig = applying_rig.Rig(gpus)
    rig.apply(layout(start))
    assert cut_off(rig, gpus, name, at=at)

    rig.apply(layout(again))

    assert is_active(gpus, again)
    assert rig.journal.text is None
    assert not rig.exclusion.is_locked


@pytest.mark.parametrize(("start", "name", "at"), WAYS)
def test_after_a_kill_at_any_step_an_impossible_layout_restores_what_was(
    start: str, name: str, at: int
) -> None:
    gpus = Gpus()
    rig = applying_rig.Rig(gpus)
    rig.apply(layout(start))
    before = shape(gpus)
    assert cut_off(rig, gpus, name, at=at)
    is_changed = shape(gpus) != before

    with pytest.raises(errors.LayoutError) as caught:
        rig.apply(layout("too-much"))

    assert shape(gpus) == before
    assert rig.journal.text is None
    undone = f"the 'apply' of layout '{name}' was left unfinished and is undone now"
    assert caught.value.message.endswith(undone) is is_changed


@pytest.mark.parametrize(("start", "name", "at"), WAYS)
def test_the_next_apply_finishes_a_rollback_that_was_killed(
    start: str, name: str, at: int
) -> None:
    gpus = Gpus()
    rig = applying_rig.Rig(gpus)
    rig.apply(layout(start))
    before = shape(gpus)
    assert cut_off(rig, gpus, name, at=at)
    for again in range(1, 20):
        gpus.steps, gpus.killed_at = 0, again
        with contextlib.suppress(Killed, errors.LayoutError):
            rig.apply(layout("too-much"))
    gpus.killed_at = None

    with pytest.raises(errors.LayoutError):
        rig.apply(layout("too-much"))

    assert shape(gpus) == before
    assert rig.journal.text is None


def test_a_layout_about_some_gpus_undoes_the_cut_off_change_of_the_others(
    rig: applying_rig.Rig, gpus: Gpus
) -> None:
    before = shape(gpus)
    last = list(kill_points("off"))[-1]
    assert cut_off(rig, gpus, "off", at=last)
    gpus.gpus = (gpus.gpus[0], fakes.brought_to(gpus.gpus[1:], model.DesiredGpu(mode=OFF))[0])

    rig.apply(layout("first-only"))

    assert is_active(gpus, "first-only")
    assert shape(gpus)[1] == before[1]
    assert rig.journal.text is None


def test_the_journal_is_there_before_the_first_step_and_gone_after_the_last(
    rig: applying_rig.Rig, gpus: Gpus
) -> None:
    seen: list[str | None] = []

    def is_refused(_step: steps.Step) -> bool:
        seen.append(rig.journal.text)
        assert rig.exclusion.is_locked
        return False

    gpus.fails = is_refused
    snapshot = tuple(gpu.snapshot for gpu in gpus.gpus)
    rig.apply(layout("wanted"))

    journal = status.Journal.from_json(seen[0] or "")
    assert journal.config == "wanted"
    assert journal.boot_id == "boot-1"
    assert planner.restore(gpus.gpus, journal.snapshot) == planner.restore(gpus.gpus, snapshot)
    assert len(set(seen)) == 1
    assert rig.journal.read() is None
    assert rig.exclusion.descriptions == ["apply wanted"]


def test_an_undone_change_leaves_no_journal(rig: applying_rig.Rig, gpus: Gpus) -> None:
    before = shape(gpus)
    gpus.fails = lambda step: isinstance(step, steps.CreateGpuInstance) and gpus.steps == 5

    with pytest.raises(errors.HardwareError, match="the instances from before are back"):
        rig.apply(layout("wanted"))

    assert shape(gpus) == before
    assert rig.journal.text is None


def test_a_rollback_that_fails_is_reported_kept_and_tried_again(
    rig: applying_rig.Rig, gpus: Gpus
) -> None:
    before = shape(gpus)
    gpus.fails = lambda step: isinstance(step, steps.CreateGpuInstance)

    with pytest.raises(errors.HardwareError) as caught:
        rig.apply(layout("wanted"))

    assert "; still to do: GPU 0: create" in caught.value.message
    assert caught.value.message.endswith("the next 'apply' tries again")
    assert rig.journal.text is not None

    with pytest.raises(
        errors.LayoutError,
        match=r"was left unfinished; .*: in use; still to do: GPU 0: ",
    ):
        rig.apply(layout("too-much"))
    assert rig.journal.text is not None

    gpus.fails = lambda _step: False
    with pytest.raises(errors.LayoutError, match="is undone now"):
        rig.apply(layout("too-much"))
    assert shape(gpus) == before
    assert rig.journal.text is None


def test_after_a_kill_the_message_says_what_a_rollback_restores(
    rig: applying_rig.Rig, gpus: Gpus
) -> None:
    before = shape(gpus)
    assert cut_off(rig, gpus, "wanted", at=3)
    gpus.fails = lambda step: isinstance(step, steps.CreateGpuInstance) and gpus.steps == 3
    gpus.steps = 0

    with pytest.raises(errors.HardwareError):
        rig.apply(layout("other"))

    (note,) = rig.notes
    assert note == (
        "the 'apply' of layout 'wanted' was left unfinished; should this one fail, the GPUs "
        "return to what they had before that one"
    )
    assert shape(gpus) == before


def test_a_layout_that_is_active_clears_what_a_kill_right_before_the_end_left(
    rig: applying_rig.Rig, gpus: Gpus
) -> None:
    written = status.Journal(
        config="wanted", boot_id="boot-1", snapshot=tuple(gpu.snapshot for gpu in gpus.gpus)
    )
    applying_rig.apply(gpus, layout("wanted"))
    rig.journal.text = written.to_json()

    assert not rig.apply(layout("wanted")).is_changed
    assert rig.journal.text is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 99}', '{"version": 2}'])
def test_a_journal_that_makes_no_sense_is_set_aside_and_reported(
    rig: applying_rig.Rig, gpus: Gpus, text: str
) -> None:
    rig.journal.text = text

    rig.apply(layout("wanted"))

    assert is_active(gpus, "wanted")
    assert rig.journal.aside == text
    assert rig.journal.read() is None
    assert "it is kept as journal.unreadable and otherwise ignored" in rig.notes[0]


def test_a_journal_that_cannot_be_read_is_set_aside_too(rig: applying_rig.Rig, gpus: Gpus) -> None:
    rig.journal.text = "x"
    rig.journal.refused = {"read"}

    rig.apply(layout("wanted"))

    assert rig.journal.aside == "x"
    assert is_active(gpus, "wanted")


@pytest.mark.parametrize("refused", [{"write"}, {"read", "set_aside"}])
def test_without_a_journal_nothing_is_changed(
    rig: applying_rig.Rig, gpus: Gpus, refused: set[str]
) -> None:
    before = shape(gpus)
    rig.journal.refused = refused

    with pytest.raises(errors.UsageError, match="name another file with --journal-file"):
        rig.apply(layout("wanted"))

    assert shape(gpus) == before
    assert gpus.steps == 0


def test_a_change_is_not_undone_because_its_journal_stays(
    rig: applying_rig.Rig, gpus: Gpus
) -> None:
    rig.journal.refused = {"clear"}

    rig.apply(layout("wanted"))

    assert is_active(gpus, "wanted")
    assert rig.notes == ["cannot clear the journal; remove it, because it is no longer true"]


def test_what_was_set_up_after_a_reboot_is_not_undone(rig: applying_rig.Rig, gpus: Gpus) -> None:
    assert cut_off(rig, gpus, "wanted", at=3)
    rig.boot_id = "boot-2"
    applying_rig.apply(gpus, layout("other"))
    since = shape(gpus)

    with pytest.raises(errors.LayoutError):
        rig.apply(layout("too-much"))

    assert shape(gpus) == since
    assert "was left unfinished when the node was rebooted" in rig.notes[0]
    assert rig.journal.text is None


def test_what_a_reboot_has_emptied_returns_to_what_was(rig: applying_rig.Rig, gpus: Gpus) -> None:
    before = shape(gpus)
    assert cut_off(rig, gpus, "wanted", at=3)
    rig.boot_id = "boot-2"
    applying_rig.apply(gpus, layout("off"))

    with pytest.raises(errors.LayoutError, match="is undone now"):
        rig.apply(layout("too-much"))

    assert shape(gpus) == before


def test_a_rollback_that_resets_a_gpu_is_not_taken_where_that_is_forbidden(
    rig: applying_rig.Rig, gpus: Gpus
) -> None:
    assert cut_off(rig, gpus, "off", at=list(kill_points("off"))[-1])
    now = shape(gpus)
    assert now[0] == (OFF, [])

    with pytest.raises(errors.LayoutError, match="is not undone: that resets a GPU"):
        rig.apply(layout("too-much"), may_reset=False)

    assert shape(gpus) == now
    assert rig.journal.text is not None


def test_another_manager_at_work_is_waited_for_and_reported_of(
    rig: applying_rig.Rig, gpus: Gpus
) -> None:
    rig.exclusion.refusals = 3

    rig.apply(layout("wanted"))

    assert is_active(gpus, "wanted")
    assert rig.notes == ["another manager is at work: agent; waiting up to 30 s"]


def test_another_manager_that_does_not_finish_costs_nothing_but_the_wait(
    rig: applying_rig.Rig, gpus: Gpus
) -> None:
    rig.exclusion.refusals = 10_000

    with pytest.raises(errors.LockedError, match="waited 30 s"):
        rig.apply(layout("wanted"))

    assert gpus.steps == 0


def test_an_unknown_layout_needs_neither_lock_nor_gpus(rig: applying_rig.Rig) -> None:
    rig.exclusion.refusals = 10_000

    with pytest.raises(errors.LayoutError, match=r"^no layout 'x'$"):
        rig.apply(unknown())

    assert rig.clock.now_s == 0


def test_after_a_kill_an_unknown_layout_undoes_nothing_and_destroys_nothing(
    rig: applying_rig.Rig, gpus: Gpus
) -> None:
    assert cut_off(rig, gpus, "wanted", at=3)
    left, journal = shape(gpus), rig.journal.text
    gpus.steps = 0

    with pytest.raises(errors.LayoutError, match=r"^no layout 'x'$"):
        rig.apply(unknown())

    assert (gpus.steps, shape(gpus)) == (0, left)
    assert rig.journal.text == journal


def test_a_failed_apply_restores_gpus_that_an_older_journal_does_not_name(
    rig: applying_rig.Rig, gpus: Gpus
) -> None:
    """A 'boot' that was killed left a journal of the first GPU alone."""
    second = gpus.gpus[1].uuid
    rig.apply(layout("mixed"))
    before = shape(gpus)
    gpus.gpus = (dataclasses.replace(gpus.gpus[0], gpu_instances=()), gpus.gpus[1])
    empty = shape(gpus)[0]
    gpus.steps, gpus.killed_at = 0, 2
    with pytest.raises(Killed):
        rig.boot()
    gpus.killed_at = None
    journal = status.Journal.from_json(rig.journal.text or "")
    assert [gpu.uuid for gpu in journal.snapshot] == [gpus.gpus[0].uuid]
    refused: list[steps.Step] = []

    def fails(step: steps.Step) -> bool:
        is_last = isinstance(step, steps.CreateGpuInstance) and step.gpu_uuid == second
        if is_last and not refused:
            refused.append(step)
            return True
        return False

    gpus.fails = fails
    with pytest.raises(errors.HardwareError, match="the instances from before are back"):
        rig.apply(layout("wanted"))

    assert refused
    assert shape(gpus) == [empty, before[1]]
    assert rig.journal.text is None


def with_foreign(gpus: Gpus, start: int) -> model.Placement:
    """Create an instance of one slice on the first GPU, as another program does."""
    spec = next(p for p in gpus.gpus[0].profiles or () if str(p.profile) == "1g.5gb")
    place = next(place for place in spec.placements if place.start == start)
    for step in (
        steps.CreateGpuInstance(
            gpu_uuid=gpus.gpus[0].uuid,
            profile=spec.profile,
            profile_id=spec.profile_id,
            placement=place,
        ),
        steps.CreateComputeInstance(
            gpu_uuid=gpus.gpus[0].uuid,
            gpu_instance_placement=place,
            profile=spec.profile,
            placement=model.Placement(0, 1),
        ),
    ):
        gpus.gpus = (fakes.apply_step(gpus.gpus[0], step), *gpus.gpus[1:])
    return place


class MissingOne(Gpus):
    """The first observation misses an instance, as on a driver that lists too few."""

    def __init__(self) -> None:
        super().__init__()
        self.looks = 0
        self.missed: model.Placement | None = None

    def observe(self) -> model.ObservedGpus:
        self.looks += 1
        first, *others = super().observe()
        if self.looks == 1 and self.missed:
            seen = tuple(gi for gi in first.gpu_instances if gi.placement != self.missed)
            first = dataclasses.replace(first, gpu_instances=seen)
        return model.ObservedGpus((first, *others))


@pytest.fixture
def missing() -> MissingOne:
    """GPUs with 2g.10gb and 3g.20gb; the next observation misses an instance of the first."""
    gpus = MissingOne()
    applying_rig.apply(gpus, layout("before"))
    gpus.missed = with_foreign(gpus, start=2)
    gpus.looks = gpus.steps = 0
    gpus.fails = lambda step: (
        isinstance(step, steps.CreateGpuInstance) and step.placement == gpus.missed
    )
    return gpus


def test_a_rollback_names_and_keeps_an_instance_that_the_first_check_missed(
    missing: MissingOne,
) -> None:
    before = shape(missing)
    rig = applying_rig.Rig(missing)

    with pytest.raises(errors.HardwareError) as caught:
        rig.apply(layout("wanted"))

    assert shape(missing) == before
    assert caught.value.reason is errors.Reason.VERIFY_FAILED
    assert "1g.5gb at 2:1 on GPU 0 was not there before, and is kept" in caught.value.message
    assert rig.journal.text is not None


def test_a_missed_instance_is_part_of_the_next_change(missing: MissingOne) -> None:
    rig = applying_rig.Rig(missing)
    with pytest.raises(errors.HardwareError):
        rig.apply(layout("wanted"))
    before = shape(missing)

    refused: list[steps.Step] = []

    def fails(step: steps.Step) -> bool:
        if isinstance(step, steps.CreateGpuInstance) and step.profile.gpu_slices == 7:
            refused.append(step)
        return len(refused) == 2 and refused[-1] is step

    missing.fails = fails
    with pytest.raises(errors.HardwareError, match="the instances from before are back"):
        rig.apply(layout("other"))

    assert shape(missing) == before
    assert rig.journal.text is None
    missing.fails = lambda _step: False
    rig.apply(layout("other"))
    assert is_active(missing, "other")


def test_an_instance_that_someone_creates_during_a_change_is_named_and_kept(
    rig: applying_rig.Rig, gpus: Gpus
) -> None:
    placements: list[model.Placement] = []

    def create(step: steps.Step) -> bool:
        if isinstance(step, steps.CreateGpuInstance) and not placements:
            placements.append(with_foreign(gpus, start=3))
            return True
        return False

    gpus.fails = create
    with pytest.raises(errors.HardwareError, match=r"1g\.5gb at 3:1 on GPU 0 was not") as caught:
        rig.apply(layout("wanted"))

    assert caught.value.reason is errors.Reason.VERIFY_FAILED
    assert placements[0] in {gi.placement for gi in gpus.gpus[0].gpu_instances}
    assert rig.journal.text is not None


def test_after_a_kill_only_what_the_change_created_is_removed(
    rig: applying_rig.Rig, gpus: Gpus
) -> None:
    before = shape(gpus)
    assert cut_off(rig, gpus, "wanted", at=4)
    place = with_foreign(gpus, start=3)

    with pytest.raises(errors.LayoutError, match=r"1g\.5gb at 3:1 on GPU 0 was not there before"):
        rig.apply(layout("too-much"))

    first = gpus.gpus[0]
    assert place in {gi.placement for gi in first.gpu_instances}
    others = tuple(gi for gi in first.gpu_instances if gi.placement != place)
    gpus.gpus = (dataclasses.replace(first, gpu_instances=others), *gpus.gpus[1:])
    assert shape(gpus) == before
    assert rig.journal.text is not None

    # Once that instance is removed, the layout is applied.
    with pytest.raises(errors.LayoutError, match=r"too-much|fit"):
        rig.apply(layout("too-much"))
    assert rig.journal.text is None


def test_a_plan_that_has_become_stale_is_given_up_before_its_first_step(
    rig: applying_rig.Rig, gpus: Gpus
) -> None:
    before = shape(gpus)
    gpus.is_stale, gpus.steps = True, 0

    with pytest.raises(errors.StalePlanError, match="already; nothing was changed") as caught:
        rig.apply(layout("wanted"))

    assert caught.value.reason.is_transient
    assert (gpus.steps, shape(gpus), rig.journal.text) == (0, before, None)
    rig.apply(layout("wanted"))
    assert is_active(gpus, "wanted")


def test_beside_an_older_change_a_stale_plan_leaves_alone_what_it_would_have_created(
    rig: applying_rig.Rig, gpus: Gpus
) -> None:
    assert cut_off(rig, gpus, "wanted", at=4)
    place = with_foreign(gpus, start=3)
    gpus.is_stale = True

    with pytest.raises(
        errors.HardwareError, match=r"1g\.5gb at 3:1 on GPU 0 was not there before"
    ):
        rig.apply(layout("other"))

    assert place in {gi.placement for gi in gpus.gpus[0].gpu_instances}
    assert rig.journal.text is not None


def test_device_files_are_refreshed_after_a_rollback(rig: applying_rig.Rig, gpus: Gpus) -> None:
    gpus.fails = lambda step: isinstance(step, steps.CreateGpuInstance) and gpus.steps == 5

    with pytest.raises(errors.HardwareError):
        rig.apply(layout("wanted"))

    assert rig.owner.refreshed == 1
    gpus.fails = lambda _step: False
    rig.apply(layout("wanted"))
    assert rig.owner.refreshed == 2
