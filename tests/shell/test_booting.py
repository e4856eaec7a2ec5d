"""``boot`` over GPUs in memory restores the verified layout, GPU by GPU if one fails."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

import pytest

from mig_manager import errors
from mig_manager.catalogue import hardware
from mig_manager.core import model, steps
from mig_manager.core.layout import config
from mig_manager.core.planner import planner
from mig_manager.core.records import status
from tests.shell import applying_rig
from tests.shell.applying_rig import Gpus, Killed, shape

PRODUCTS = ["A100-SXM4-40GB", "H100-SXM5-80GB"]


def layouts(product: str) -> config.Document:
    small, big = {
        "A100-SXM4-40GB": ("1g.5gb", "3g.20gb"),
        "H100-SXM5-80GB": ("1g.10gb", "3g.40gb"),
    }[product]
    return config.parse(
        f"""
version: v1
mig-configs:
  mixed:
  - {{devices: [0], mig-enabled: true, mig-devices: {{{small}: 2, {big}: 1}}}}
  - {{devices: [1], mig-enabled: true, mig-devices: {{{small}: 7}}}}
  'off':
  - {{devices: all, mig-enabled: false}}
  too-much:
  - {{devices: all, mig-enabled: true, mig-devices: {{{big}: 5}}}}
""",
        source="layouts.yaml",
    )


class Notes(list[str]):
    """Notes that run a callback."""

    def __init__(self, act: Callable[[str], None]) -> None:
        super().__init__()
        self._act = act

    def append(self, remark: str) -> None:
        super().append(remark)
        self._act(remark)


class Node:
    """A machine that can be rebooted."""

    def __init__(self, product: str) -> None:
        self.layouts = layouts(product)
        self.gpus = Gpus(product)
        self.rig = applying_rig.Rig(self.gpus)
        self.rig.apply(self.layouts.layout("mixed"))
        self.before = shape(self.gpus)
        self.gpus.steps = 0

    def reboot(self) -> None:
        self.gpus.reboot()
        self.rig.boot_id = f"{self.rig.boot_id}+"
        self.rig.notes.clear()


def kept_by(node: Node) -> status.VerifiedLayout:
    return status.VerifiedLayout.from_json(node.rig.boot_layout.text or "")


@pytest.fixture(params=PRODUCTS)
def node(request: pytest.FixtureRequest) -> Node:
    return Node(request.param)


@pytest.fixture
def ampere() -> Node:
    return Node(PRODUCTS[0])


def test_after_a_reboot_every_instance_is_back_in_its_place(node: Node) -> None:
    node.reboot()
    assert shape(node.gpus) != node.before

    result = node.rig.boot()

    assert shape(node.gpus) == node.before
    assert (result.layout, result.problems) == ("mixed", ())
    assert node.rig.journal.text is None
    assert node.rig.exclusion.descriptions[-1] == "restore layout mixed"
    assert not node.rig.exclusion.is_locked


def test_a_second_run_does_nothing(node: Node) -> None:
    node.reboot()
    node.rig.boot()
    node.gpus.steps = 0

    result = node.rig.boot()

    assert (result.rounds, result.problems, node.gpus.steps) == ((), (), 0)


def test_the_placements_come_back_and_not_those_that_an_empty_gpu_would_get(ampere: Node) -> None:
    """A layout's instances may lie where history has put them."""
    spec = next(p for p in ampere.gpus.gpus[0].profiles or () if str(p.profile) == "2g.10gb")
    last = max(spec.placements)
    odd = dataclasses.replace(kept_by(ampere), config="odd")
    first = dataclasses.replace(
        odd.snapshot[0],
        gpu_instances=(
            model.GpuInstance(
                instance_id=0,
                profile=spec.profile,
                profile_id=spec.profile_id,
                placement=last,
                compute_instances=(),
            ),
        ),
    )
    ampere.rig.boot_layout.text = dataclasses.replace(
        odd, snapshot=(first, *odd.snapshot[1:])
    ).to_json()
    ampere.reboot()

    ampere.rig.boot()

    (instance,) = ampere.gpus.gpus[0].gpu_instances
    assert instance.placement == last


def test_what_was_off_stays_off(node: Node) -> None:
    node.rig.apply(node.layouts.layout("off"))
    node.reboot()
    node.gpus.steps = 0

    result = node.rig.boot()

    assert (result.rounds, node.gpus.steps) == ((), 0)


@pytest.mark.parametrize("at", range(1, 22))
def test_the_next_boot_finishes_one_that_was_killed_at_any_step(node: Node, at: int) -> None:
    node.reboot()
    node.gpus.killed_at = at
    try:
        node.rig.boot()
    except Killed:
        assert node.rig.journal.text is not None
    node.gpus.killed_at = None

    result = node.rig.boot()

    assert shape(node.gpus) == node.before
    assert result.problems == ()
    assert node.rig.journal.text is None


@pytest.mark.parametrize("at", [1, 3, 5, 8])
def test_power_lost_in_the_middle_of_an_apply_restores_what_was_verified_before(
    node: Node, at: int
) -> None:
    node.gpus.killed_at = at
    with pytest.raises(Killed):
        node.rig.apply(node.layouts.layout("off"))
    node.gpus.killed_at = None
    node.reboot()

    node.rig.boot()

    assert shape(node.gpus) == node.before
    assert node.rig.journal.text is None


def test_nothing_kept_is_said_and_no_failure(ampere: Node) -> None:
    ampere.rig.boot_layout.text = None
    ampere.reboot()
    ampere.gpus.is_driver_loaded = False

    result = ampere.rig.boot()

    assert (result.layout, result.rounds, result.problems) == ("", (), ())
    assert ampere.rig.clock.now_s == 0


def test_nothing_kept_still_undoes_what_a_first_apply_has_left(ampere: Node) -> None:
    ampere.rig.apply(ampere.layouts.layout("off"))
    off = shape(ampere.gpus)
    ampere.rig.boot_layout.text = None
    ampere.gpus.steps, ampere.gpus.killed_at = 0, 3
    with pytest.raises(Killed):
        ampere.rig.apply(ampere.layouts.layout("mixed"))
    ampere.gpus.killed_at = None
    ampere.reboot()

    ampere.rig.boot()

    assert shape(ampere.gpus) == off
    assert ampere.rig.notes == [
        "the 'apply' of layout 'mixed' was left unfinished and is undone now"
    ]


def test_with_nothing_kept_the_fallback_is_applied_and_kept(ampere: Node) -> None:
    ampere.rig.boot_layout.text = None
    ampere.reboot()

    result = ampere.rig.boot(ampere.layouts.layout("mixed"))

    assert result.layout == "mixed"
    kept = kept_by(ampere)
    assert planner.restore(ampere.gpus.gpus, kept.snapshot).is_empty
    assert kept.boot_id == "boot-1+"


def test_what_is_kept_outdoes_the_fallback(node: Node) -> None:
    node.reboot()

    node.rig.boot(node.layouts.layout("off"))

    assert shape(node.gpus) == node.before


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 99}', '{"version": 1}'])
def test_what_makes_no_sense_is_set_aside_and_a_problem(ampere: Node, text: str) -> None:
    ampere.rig.boot_layout.text = text
    ampere.reboot()
    ampere.gpus.steps = 0

    result = ampere.rig.boot()

    (problem,) = result.problems
    assert problem.message.startswith("the layout saved for this boot is invalid (")
    assert problem.remedy
    assert (ampere.rig.boot_layout.aside, ampere.gpus.steps) == (text, 0)
    assert ampere.rig.boot().problems == ()


def test_what_cannot_be_read_gives_way_to_the_fallback_and_stays_a_problem(ampere: Node) -> None:
    ampere.rig.boot_layout.refused = {"read"}
    ampere.reboot()

    result = ampere.rig.boot(ampere.layouts.layout("mixed"))

    assert shape(ampere.gpus) == ampere.before
    assert len(result.problems) == 1


def test_what_can_neither_be_read_nor_moved_is_an_error_with_a_way_out(ampere: Node) -> None:
    ampere.rig.boot_layout.refused = {"read", "set_aside"}

    with pytest.raises(errors.UsageError, match="--verified-layout-file"):
        ampere.rig.boot()


def test_a_gpu_that_was_swapped_costs_no_other_and_is_reported_twice(node: Node) -> None:
    node.reboot()
    first, second = node.gpus.gpus
    other = dataclasses.replace(second, uuid="GPU-new")
    node.gpus.gpus = (first, other)

    result = node.rig.boot()

    gone, new = (problem.message for problem in result.problems)
    assert f"GPU {second.uuid} is gone" in gone
    assert "GPU-new" in new
    assert "is new" in new
    assert shape(node.gpus)[0] == node.before[0]
    assert node.gpus.gpus[1] == other
    assert node.rig.journal.text is None


def test_a_new_gpu_without_mig_is_nobodys_problem(node: Node) -> None:
    t4 = hardware.template(hardware.find("T4"), 2)
    node.gpus.gpus = (*node.gpus.gpus, t4)
    node.reboot()

    assert node.rig.boot().problems == ()
    assert shape(node.gpus)[:2] == node.before


def test_a_gpu_that_fails_has_what_it_had_and_costs_no_other(node: Node) -> None:
    node.reboot()
    empty = shape(node.gpus)
    bad = node.gpus.gpus[1].uuid
    node.gpus.fails = lambda step: (
        step.gpu_uuid == bad and isinstance(step, steps.CreateComputeInstance)
    )

    result = node.rig.boot()

    (problem,) = result.problems
    assert "in use; the instances from before are back" in problem.message
    assert problem.remedy == errors.Reason.IN_USE.remedy_at_shell
    assert shape(node.gpus) == [node.before[0], empty[1]]
    assert node.rig.journal.text is None
    assert node.rig.notes[-1].endswith("trying one GPU after the other")


def test_a_gpu_left_in_between_is_all_that_the_journal_names(node: Node) -> None:
    node.reboot()
    bad = node.gpus.gpus[1].uuid
    node.gpus.fails = lambda step: (
        step.gpu_uuid == bad
        and isinstance(step, steps.CreateComputeInstance | steps.DestroyGpuInstance)
    )

    result = node.rig.boot()

    assert "still to do: GPU 1: " in result.problems[0].message
    assert shape(node.gpus)[0] == node.before[0]
    journal = status.Journal.from_json(node.rig.journal.text or "")
    assert [gpu.uuid for gpu in journal.snapshot] == [bad]

    node.gpus.fails = lambda _step: False
    assert node.rig.boot().problems == ()
    assert shape(node.gpus) == node.before


def test_a_driver_that_comes_late_is_waited_for(node: Node) -> None:
    node.reboot()
    node.gpus.is_driver_loaded = False

    def load(remark: str) -> None:
        assert remark == "no driver; waiting up to 120 s"
        node.gpus.is_driver_loaded = True

    node.rig.notes = Notes(load)
    node.rig.boot()

    assert shape(node.gpus) == node.before


def test_a_driver_that_does_not_come_is_given_up_at_the_deadline(node: Node) -> None:
    node.reboot()
    node.gpus.is_driver_loaded = False

    with pytest.raises(errors.HardwareError, match="no driver; waited 7 s for it") as caught:
        node.rig.boot(driver_timeout_s=7.0)

    assert caught.value.reason is errors.Reason.DRIVER_NOT_LOADED
    assert node.rig.clock.now_s == pytest.approx(7.0)
    assert not node.rig.exclusion.is_locked


def test_another_manager_at_work_is_waited_for(node: Node) -> None:
    node.reboot()
    node.rig.exclusion.refusals = 3

    node.rig.boot()

    assert shape(node.gpus) == node.before


def test_each_apply_keeps_what_it_has_verified(ampere: Node) -> None:
    first = ampere.rig.boot_layout.text
    ampere.rig.apply(ampere.layouts.layout("off"))
    second = kept_by(ampere)
    ampere.rig.boot_layout.text = None
    ampere.rig.apply(ampere.layouts.layout("off"))

    assert first != ampere.rig.boot_layout.text
    assert second.config == "off"
    assert kept_by(ampere) == second


def test_an_apply_that_fails_keeps_what_was_kept(ampere: Node) -> None:
    kept = ampere.rig.boot_layout.text
    ampere.gpus.fails = lambda step: isinstance(step, steps.SetMode)

    with pytest.raises(errors.HardwareError):
        ampere.rig.apply(ampere.layouts.layout("off"))

    assert ampere.rig.boot_layout.text == kept


def test_an_apply_whose_layout_cannot_be_kept_succeeds_and_says_so(ampere: Node) -> None:
    ampere.rig.boot_layout.refused = {"write"}
    ampere.rig.apply(ampere.layouts.layout("off"))

    assert ampere.rig.notes == [
        "cannot write the journal; the next boot will not restore this layout"
    ]


def test_a_signal_that_ends_boot_finds_a_true_journal(node: Node) -> None:
    """A deferred signal takes effect as soon as the change is complete."""

    @contextlib.contextmanager
    def guard() -> Iterator[None]:
        yield
        raise KeyboardInterrupt

    node.reboot()
    node.rig.guard = guard

    with pytest.raises(KeyboardInterrupt):
        node.rig.boot()

    assert shape(node.gpus) == node.before
    assert node.rig.journal.text is None


def test_device_files_that_fail_at_boot_are_a_problem_and_undo_nothing(node: Node) -> None:
    node.reboot()
    node.rig.owner.refusing["host.refresh"] = errors.HostError(
        "nvidia-ctk failed", reason=errors.Reason.DEVICE_FILES_FAILED
    )

    result = node.rig.boot()

    assert shape(node.gpus) == node.before
    assert result.rounds
    assert [problem.message for problem in result.problems] == ["nvidia-ctk failed"]
