"""``apply`` that is cut off anywhere, fails anywhere, or is not alone; over GPUs in memory."""

import contextlib
import dataclasses
import re
from collections.abc import Callable

import pytest

from mig_manager import errors
from mig_manager.change import apply as applying
from mig_manager.change import boot_layouts, local, pod_use, transaction
from mig_manager.core import model, profile_name, steps, timing
from mig_manager.core.layout import config, layouts
from mig_manager.core.planner import planner
from mig_manager.core.records import journals
from tests.node import fakes, gpu_values, scenes
from tests.node.applying_rig import Node, is_creation, once

OFF = model.MigMode.DISABLED
LAST_OF_OFF = 10
"""The number of the last step to the layout ``off``."""


@pytest.fixture
def node() -> Node:
    return Node()


def test_a_layout_about_some_gpus_undoes_the_cut_off_change_of_the_others(node: Node) -> None:
    before = node.shape
    assert node.cut_off("off", at=LAST_OF_OFF)
    node.gpus = (
        node.gpus[0],
        gpu_values.brought_to(node.gpus[1:], model.DesiredGpu(mode=OFF))[0],
    )

    node.change_to("first-only")

    assert node.has("first-only")
    assert node.shape[1] == before[1]
    assert node.journal.text is None


@pytest.mark.parametrize("is_rebooted", [False, True])
def test_a_layout_of_other_gpus_spares_pods_on_a_cut_off_change(
    node: Node, *, is_rebooted: bool
) -> None:
    node.change_to("before")
    before = node.shape
    assert node.cut_off("wanted", at=12)
    killed = node.shape[1]
    node.add_pod("train", devices=frozenset(node.gpus[1].mig_uuids))

    for is_changed in (True, False):
        assert node.change_to("first-only").is_changed is is_changed
        assert (node.has("first-only"), node.shape[1]) == (True, killed)
        assert re.search(r"unfinished; GPU 1 .* while it is in use", node.notes[0])
        node.notes.clear()

    node.pods.clear()
    if is_rebooted:
        node.lose_instances()
        node.host.boot_id += "+"
        node.boot()
    else:
        node.change_to("first-only")
    assert (node.has("first-only"), node.shape[1]) == (True, before[1])
    assert node.journal.text is None


def test_a_silent_kubelet_spares_no_cut_off_change_of_other_gpus(node: Node) -> None:
    before = node.shape
    assert node.cut_off("wanted", at=12)
    node.gpus = (dataclasses.replace(node.gpus[0], gpu_instances=()), node.gpus[1])
    killed = node.shape
    node.refusing["allocations.assigned_devices"] = errors.ClusterError(
        "no answer", reason=errors.Reason.POD_RESOURCES_UNAVAILABLE
    )

    with pytest.raises(errors.GpuInUseError, match="no answer"):
        node.change_to("first-only")

    assert node.shape == killed
    assert not any("in use" in note for note in node.notes)

    pods = pod_use.PodUse(kubelet=lambda: node.allocations, is_ignored=True)
    deps = dataclasses.replace(node.deps, pods=pods)
    applying.apply(deps, lambda: node.layouts.layout("first-only"))
    assert (node.has("first-only"), node.shape[1]) == (True, before[1])


def test_journal_exists_from_the_first_step_to_the_last(node: Node) -> None:
    seen: list[str | None] = []

    def is_refused(_step: steps.Step) -> bool:
        seen.append(node.journal.text)
        assert node.exclusion.is_locked
        return False

    node.fails = is_refused
    snapshot = tuple(gpu.snapshot for gpu in node.gpus)
    node.change_to("wanted")

    journal = journals.Journal.from_json(seen[0] or "")
    assert (journal.config, journal.boot_id) == ("wanted", "boot-1")
    assert planner.restore(node.gpus, journal.snapshot) == planner.restore(node.gpus, snapshot)
    assert len(set(seen)) == 1
    assert node.journal.read() is None
    assert node.exclusion.descriptions == ["apply wanted"]


def test_a_rollback_that_fails_is_reported_kept_and_tried_again(node: Node) -> None:
    before = node.shape
    node.fails = is_creation

    with pytest.raises(errors.HardwareError) as caught:
        node.change_to("wanted")

    assert "; still to do: GPU 0: create" in caught.value.message
    assert caught.value.message.endswith("the next 'apply' tries again")
    assert node.journal.text is not None

    with pytest.raises(
        errors.LayoutError,
        match=r"was left unfinished; .*: in use; still to do: GPU 0: ",
    ):
        node.change_to("too-much")
    assert node.journal.text is not None

    node.fails = lambda _step: False
    with pytest.raises(errors.LayoutError, match="is undone now"):
        node.change_to("too-much")
    assert node.shape == before
    assert node.journal.text is None


def test_a_disk_that_fills_during_a_change_hides_no_failure(node: Node) -> None:
    node.on_step = lambda _step: node.journal.refused.add("write")
    node.fails = is_creation

    with pytest.raises(errors.HardwareError) as caught:
        node.change_to("wanted")

    assert caught.value.message.startswith("in use; the rollback failed as well: in use; ")
    assert caught.value.message.count("cannot write the journal") == 1
    assert journals.Journal.from_json(node.journal.text or "").snapshot


def test_after_a_kill_the_message_says_what_a_rollback_restores(node: Node) -> None:
    before = node.shape
    assert node.cut_off("wanted", at=3)
    node.fails = lambda step: is_creation(step) and node.steps == 3
    node.steps = 0

    with pytest.raises(errors.HardwareError):
        node.change_to("other")

    (note,) = node.notes
    assert note == (
        "the change to layout 'wanted' was left unfinished; if this one fails, the GPUs "
        "are rolled back to their state before that one"
    )
    assert (node.shape, node.journal.text, node.host.refreshes) == (before, None, 1)


@pytest.mark.parametrize("is_same_boot", [True, False])
def test_persistence_mode_is_restored_after_a_kill_and_not_after_a_reboot(
    node: Node, *, is_same_boot: bool
) -> None:
    uuid = node.gpus[0].uuid
    node.journal.text = journals.Journal(
        config="wanted",
        boot_id=node.host.boot_id if is_same_boot else "boot-0",
        snapshot=tuple(gpu.snapshot for gpu in node.gpus),
        persistent_gpus=(uuid, "GPU-of-another-node"),
    ).to_json()
    node.resets.without_persistence = {uuid}

    node.change_to("before")

    assert node.resets.without_persistence == (set() if is_same_boot else {uuid})
    assert node.journal.text is None


def lose_first(node: Node) -> None:
    node.driver.lost = {node.gpus[0].uuid}


def keep_off(node: Node) -> None:
    node.resets.keep_persistence_off = True


def lose_program(node: Node) -> None:
    node.has_reset = False


@pytest.mark.parametrize("obstruct", [lose_first, keep_off, lose_program])
def test_persistence_mode_that_stays_off_is_restored_by_a_later_run(
    node: Node, obstruct: Callable[[Node], None]
) -> None:
    uuid = node.gpus[0].uuid
    journal = journals.Journal(config="wanted", boot_id="boot-1", persistent_gpus=(uuid,))
    node.journal.text = journal.to_json()
    node.resets.without_persistence = {uuid}

    obstruct(node)
    for _ in range(2):
        node.change_to("before")
    assert node.resets.without_persistence == {uuid}
    node.driver.lost, node.resets.keep_persistence_off, node.has_reset = set(), False, True
    node.change_to("before")

    assert node.resets.without_persistence == set()
    assert node.journal.text is None


def test_a_layout_of_other_gpus_keeps_the_journal_of_an_unreachable_one(node: Node) -> None:
    lost = node.gpus[1]
    node.journal.text = journals.Journal(config="wanted", snapshot=(lost.snapshot,)).to_json()
    node.driver.lost = {lost.uuid}

    node.change_to("first-only")

    kept = journals.Journal.from_json(node.journal.text or "").snapshot
    assert gpu_values.geometry(kept) == gpu_values.geometry([lost])


def test_a_reset_whose_journal_cannot_be_written_is_reported(node: Node) -> None:
    before = tuple(gpu.snapshot for gpu in node.gpus)
    journal = local.LocalJournal(node.deps, journals.Journal(config="wanted", snapshot=before))
    node.journal.refused = {"write"}

    journal.announce(persistent_gpus=(before[0].uuid,))

    (note,) = node.notes
    assert note.startswith("cannot write the journal")


def no_files() -> Exception:
    return errors.HostError("nvidia-ctk failed", reason=errors.Reason.DEVICE_FILES_FAILED)


@pytest.mark.parametrize("failure", [no_files(), scenes.Killed()])
@pytest.mark.parametrize("is_undone", [False, True])
def test_outdated_device_files_are_refreshed_by_the_next_apply(
    node: Node, failure: Exception, *, is_undone: bool
) -> None:
    if is_undone:
        node.fails = once(is_creation)
    node.refusing["host.refresh"] = failure
    with pytest.raises((errors.MigManagerError, scenes.Killed)):
        node.change_to("wanted")
    changed = node.shape

    node.refusing["host.refresh"] = no_files()
    with pytest.raises(errors.HostError, match=r"^nvidia-ctk failed$"):
        node.change_to("before" if is_undone else "wanted")
    node.refusing.clear()
    assert not node.change_to("before" if is_undone else "wanted").is_changed

    assert (node.shape, node.host.refreshes, node.journal.text) == (changed, 1, None)


def test_journal_of_a_complete_change_is_cleared(node: Node) -> None:
    written = journals.Journal(
        config="wanted", boot_id="boot-1", snapshot=tuple(gpu.snapshot for gpu in node.gpus)
    )
    node.set_up("wanted")
    node.journal.text = written.to_json()

    assert not node.change_to("wanted").is_changed
    assert node.journal.text is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 99}', '{"version": 2}', None])
def test_a_journal_that_makes_no_sense_or_cannot_be_read_is_set_aside(
    node: Node, text: str | None
) -> None:
    node.journal.text = text or ""
    node.journal.refused = {"read"} if text is None else set()

    node.change_to("wanted")

    assert node.has("wanted")
    assert node.journal.aside == (text or "")
    assert node.journal.read() is None
    assert "it is kept as journal.unreadable and otherwise ignored" in node.notes[0]


@pytest.mark.parametrize("refused", [{"write"}, {"read", "set_aside"}])
def test_without_a_journal_nothing_is_changed(node: Node, refused: set[str]) -> None:
    before = node.shape
    node.journal.refused = refused

    with pytest.raises(errors.UsageError, match="name another file with --journal-file") as caught:
        node.change_to("wanted")

    assert local.RETRIED_LATER not in caught.value.message
    assert node.shape == before
    assert node.steps == 0


def test_a_change_is_not_undone_because_its_journal_stays(node: Node) -> None:
    node.journal.refused = {"clear"}

    node.change_to("wanted")

    assert node.has("wanted")
    assert node.notes == ["cannot clear the journal; remove it, because it is outdated"]


@pytest.mark.parametrize(("since", "is_undone"), [("other", False), ("off", True)])
def test_after_a_reboot_only_what_it_has_emptied_returns_to_what_was(
    node: Node, since: str, *, is_undone: bool
) -> None:
    before = node.shape
    assert node.cut_off("wanted", at=3)
    node.host.boot_id = "boot-2"
    node.set_up(since)
    rebooted = node.shape

    with pytest.raises(errors.LayoutError) as caught:
        node.change_to("too-much")

    assert node.shape == (before if is_undone else rebooted)
    assert ("is undone now" in caught.value.message) is is_undone
    assert is_undone or "was left unfinished when the node was rebooted" in node.notes[0]
    assert node.journal.text is None


def test_after_a_reboot_instances_on_another_gpu_do_not_prevent_the_undo(node: Node) -> None:
    before = node.shape
    assert node.cut_off("first-only", at=3)
    node.host.boot_id = "boot-2"
    node.lose_instances()
    whole = model.DesiredGpu.of(model.MigMode.ENABLED, {profile_name.parse("7g.40gb"): 1})
    node.gpus = (node.gpus[0], *gpu_values.brought_to(node.gpus[1:], whole))
    other = node.shape[1]

    with pytest.raises(errors.LayoutError, match="is undone now"):
        node.change_to("too-much")

    assert node.shape == [before[0], other]


def test_a_verified_layout_of_other_gpus_does_not_end_a_killed_change(node: Node) -> None:
    before = node.shape
    assert node.cut_off("wanted", at=9)
    assert node.shape[1] != before[1]
    killed = journals.Journal.from_json(node.journal.text or "")
    # Another program has its own journal.
    node.journal.text = None
    node.change_to("first-only")
    snapshot = tuple(gpu for gpu in killed.snapshot if gpu.uuid == node.gpus[1].uuid)
    node.journal.text = dataclasses.replace(killed, snapshot=snapshot).to_json()

    with pytest.raises(errors.LayoutError, match="is undone now"):
        node.change_to("too-much")

    assert node.shape[1] == before[1]
    assert node.has("first-only")


def test_a_journal_older_than_an_agents_verified_layout_undoes_nothing(node: Node) -> None:
    assert node.cut_off("wanted", at=3)
    node.set_up("other")
    saved = boot_layouts.BootLayout(node.boot_layout, "boot-1")
    saved.save(node.hardware.observe(), config="other", config_hash="h")
    verified = node.shape

    assert local.undone(node.deps, node.hardware.observe(), node.gpus[0]) == node.gpus[0]
    with pytest.raises(errors.LayoutError):
        node.change_to("too-much")

    assert node.shape == verified
    assert "layout 'other' was verified since" in node.notes[0]
    assert node.journal.text is None


@pytest.mark.parametrize(
    ("layout", "at", "is_undone"), [("off", LAST_OF_OFF, False), ("wanted", 3, True)]
)
def test_where_resets_are_forbidden_a_rollback_with_one_is_not_taken(
    node: Node, layout: str, at: int, *, is_undone: bool
) -> None:
    before = node.shape
    assert node.cut_off(layout, at=at)
    now = node.shape
    assert now != before

    message = "is undone now" if is_undone else "is not undone, because that resets a GPU"
    with pytest.raises(errors.LayoutError, match=message):
        node.change_to("too-much", may_reset=False)

    assert node.shape == (before if is_undone else now)
    assert (node.journal.text is None) is is_undone


def test_apply_resets_no_gpu_where_resets_are_forbidden() -> None:
    node = Node("off")
    node.driver.mode_waits = True

    with pytest.raises(errors.HardwareError, match="only the new mode stays pending"):
        node.change_to("wanted", may_reset=False)
    assert "host.reset" not in node.log

    node.change_to("wanted")
    assert node.has("wanted")


def mode_of_first(node: Node) -> layouts.Layout:
    """Return the layout of GPU 0 alone, and interrupt a change of GPU 1."""
    text = """
version: v1
mig-configs:
  first: [{devices: [0], mig-enabled: true, mig-devices: {}}]
  second: [{devices: [1], mig-enabled: true, mig-devices: {1g.5gb: 7}}]
"""
    node.layouts = config.parse(text, source="two.yaml")
    assert node.cut_off("second", at=5)
    return node.layouts.layout("first")


@pytest.mark.parametrize("has_interrupted", [False, True])
@pytest.mark.parametrize("reason", ["waits", "in-use"])
def test_mode_only_without_resets_leaves_the_mode_pending(
    reason: str, *, has_interrupted: bool
) -> None:
    """A persistence daemon uses the GPU, so the driver answers IN_USE."""
    node = Node("one-off" if has_interrupted else "off")
    before = node.shape[1]
    layout = mode_of_first(node) if has_interrupted else node.layouts.layout("bare")
    node.driver.mode_waits = reason == "waits"

    def put_off(step: steps.Step) -> None:
        if reason == "in-use" and isinstance(step, steps.SetMode):
            node.gpus = tuple(
                dataclasses.replace(gpu, pending_mode=step.mode)
                if gpu.uuid == step.gpu_uuid
                else gpu
                for gpu in node.gpus
            )

    node.on_step = put_off
    node.fails = lambda step: reason == "in-use" and isinstance(step, steps.SetMode)

    assert node.apply(layout, is_mode_only=True, may_reset=False).is_changed

    assert {gpu.pending_mode for gpu in node.gpus} == {model.MigMode.ENABLED}
    assert node.journal.text is None
    assert (node.shape[1] == before) is has_interrupted


def test_mode_only_reports_a_failure_on_another_gpu_as_such() -> None:
    node = Node("one-off")
    layout = mode_of_first(node)
    node.driver.mode_waits = True
    node.fails = lambda step: not isinstance(step, steps.SetMode)

    with pytest.raises(errors.HardwareError) as caught:
        node.apply(layout, is_mode_only=True, may_reset=False)

    assert caught.value.reason is errors.Reason.RESET_REQUIRED


def test_mode_only_without_resets_reports_instances_in_use_of_other_gpus(node: Node) -> None:
    assert node.cut_off("wanted", at=9)
    node.fails = lambda _step: True

    with pytest.raises(errors.HardwareError) as caught:
        node.change_to("first-only", is_mode_only=True, may_reset=False)

    assert caught.value.reason is errors.Reason.IN_USE


@pytest.mark.parametrize("is_admitted", [False, True])
def test_a_pod_admitted_while_instances_are_in_use_keeps_its_device(*, is_admitted: bool) -> None:
    node = Node(count=1)
    before, devices = node.shape, frozenset(node.gpus[0].mig_uuids)

    def admit(_step: steps.Step) -> bool:
        if is_admitted:
            node.add_pod("train", devices=devices)
        return True

    node.fails = once(admit)
    deps = dataclasses.replace(node.deps, in_use_timeout_s=30.0)
    pods = "in use; pods have devices that the change destroys or resets: default/train"
    refusal = pytest.raises(errors.HardwareError, match=pods)

    with refusal if is_admitted else contextlib.nullcontext():
        applying.apply(deps, lambda: node.layouts.layout("wanted"))

    assert node.has("wanted") is not is_admitted
    assert (node.shape == before) is is_admitted


def test_apply_waits_for_another_manager_until_a_deadline(node: Node) -> None:
    node.exclusion.refusals = 10_000
    with pytest.raises(errors.LockedError, match="agent; waited 30 s for it to finish"):
        node.change_to("wanted")
    assert node.clock.now_s == pytest.approx(30)
    assert node.steps == 0

    node.notes.clear()
    node.exclusion.refusals = 3
    node.change_to("wanted")
    assert node.has("wanted")
    assert node.notes == ["another manager is at work: agent; waiting up to 30 s"]
    assert not node.exclusion.is_locked


def test_a_lock_that_the_work_itself_meets_is_not_waited_for() -> None:
    clock = fakes.FakeClock()
    lock = fakes.FakeExclusion()

    with (
        pytest.raises(errors.LockedError, match=r"^mine$"),
        transaction.hold_lock(lock, "x", timing.Wait(clock=clock, timeout_s=9.0)),
    ):
        raise errors.LockedError("mine")

    assert clock.now_s == 0


def test_an_unknown_layout_needs_neither_lock_nor_gpus_and_undoes_nothing(node: Node) -> None:
    assert node.cut_off("wanted", at=3)
    left, journal = node.shape, node.journal.text
    node.steps, node.exclusion.refusals = 0, 10_000
    unknown = errors.LayoutError("no layout 'x'", reason=errors.Reason.UNKNOWN_CONFIG)

    with pytest.raises(errors.LayoutError, match=r"^no layout 'x'$"):
        node.apply(unknown)

    assert node.clock.now_s == 0
    assert (node.steps, node.shape, node.journal.text) == (0, left, journal)


def test_a_failed_apply_restores_gpus_that_an_older_journal_does_not_name(node: Node) -> None:
    """A 'boot' that was killed left a journal of the first GPU alone."""
    second = node.gpus[1].uuid
    node.change_to("mixed")
    before = node.shape
    node.gpus = (dataclasses.replace(node.gpus[0], gpu_instances=()), node.gpus[1])
    empty = node.shape[0]
    with node.killed(at=2):
        node.boot()
    journal = journals.Journal.from_json(node.journal.text or "")
    assert [gpu.uuid for gpu in journal.snapshot] == [node.gpus[0].uuid]
    node.fails = once(lambda step: is_creation(step) and step.gpu_uuid == second)

    with pytest.raises(errors.HardwareError, match="the former instances are restored"):
        node.change_to("wanted")

    assert node.shape == [empty, before[1]]
    assert node.journal.text is None


def test_a_rollback_pauses_between_its_attempts_however_long_they_take(node: Node) -> None:
    ends: list[float] = []
    pauses: list[float] = []

    def hang() -> None:
        if node.log[-1] != "gpus.execute" or not (ends or node.steps):
            return
        pauses.extend([node.clock.now_s - ends[-1]] if ends else [])
        node.clock.now_s += 2.5
        ends.append(node.clock.now_s)
        raise errors.HardwareError("in use", reason=errors.Reason.IN_USE)

    node.fails = is_creation
    node.on_call = hang

    with pytest.raises(errors.HardwareError):
        node.change_to("wanted")

    assert pauses == [1.0, 2.0]
