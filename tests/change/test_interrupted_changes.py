"""What ``apply`` does about a change that was interrupted; over GPUs in memory."""

import dataclasses
import re

import pytest

from mig_manager import errors, reasons
from mig_manager.change import applying, journal_file, layout_store, pod_use
from mig_manager.core import model, steps
from tests.change.forks import refuse, refuse_first_creation_on
from tests.rigs.node import call_errors, fake_cluster, gpu_values, moments, samples
from tests.rigs.node.local_rig import LocalRig

OFF = model.MigMode.DISABLED


def test_a_layout_of_some_gpus_undoes_an_interrupted_change_of_others(
    rig: LocalRig,
) -> None:
    before = rig.geometry
    assert rig.kill_apply("off", steps.SetMode, 2)
    rig.gpus = (
        rig.gpus[0],
        gpu_values.with_desired(rig.gpus[1:], model.DesiredGpu(mode=OFF))[0],
    )

    rig.change_to("first-only")

    assert rig.has("first-only")
    assert rig.geometry[1] == before[1]
    assert rig.journal.text is None


@pytest.mark.parametrize("is_rebooted", [False, True])
def test_a_layout_of_other_gpus_spares_pods_of_an_interrupted_change(
    rig: LocalRig, *, is_rebooted: bool
) -> None:
    rig.change_to("before")
    before = rig.geometry
    assert rig.kill_apply("requested", steps.CreateComputeInstance, 4)
    killed = rig.geometry[1]
    rig.pods.add("train", devices=frozenset(rig.gpus[1].mig_uuids))

    for is_changed in (True, False):
        assert rig.change_to("first-only").is_changed is is_changed
        assert (rig.has("first-only"), rig.geometry[1]) == (True, killed)
        assert re.search(r"unfinished; GPU 1 .* while it is in use", rig.notes[0])
        rig.notes.clear()

    rig.pods.clear()
    if is_rebooted:
        rig.reboot()
        rig.boot()
    else:
        rig.change_to("first-only")
    assert (rig.has("first-only"), rig.geometry[1]) == (True, before[1])
    assert rig.journal.text is None


@pytest.mark.parametrize(("requested", "error"), [("mixed", "in use"), ("other", "default/train")])
def test_a_failed_change_spares_pods_of_an_interrupted_one(
    rig: LocalRig, requested: str, error: str
) -> None:
    before = rig.geometry
    assert rig.kill_apply("requested", steps.CreateComputeInstance, 4)
    done = rig.geometry[0]
    rig.pods.add("train", devices=frozenset(rig.gpus[0].mig_uuids))
    rig.failures.add(steps.CreateGpuInstance, call_errors.IN_USE, times=1)

    with pytest.raises(errors.HardwareError, match=error):
        rig.change_to(requested)

    assert rig.geometry == [done, before[1]]
    assert re.search(r"but not GPU 0 .*, which pods or processes use$", rig.notes[0])
    rig.pods.clear()
    refuse(rig)
    assert rig.geometry == before


def test_a_gpu_in_use_outside_the_layout_is_restored_later(rig: LocalRig) -> None:
    before = rig.geometry
    assert rig.kill_apply("requested", steps.CreateComputeInstance, 4)
    killed = rig.geometry
    rig.pods.add("train", devices=frozenset(rig.gpus[1].mig_uuids))

    rig.change_to("first-only")

    assert "outside this layout, is not restored while it is in use" in rig.notes[0]
    assert (rig.has("first-only"), rig.geometry[1]) == (True, killed[1])
    assert rig.local_journal.layout == "requested"

    rig.pods.clear()
    rig.change_to("first-only")

    assert (rig.geometry[1], rig.journal.text) == (before[1], None)


def test_a_silent_kubelet_blocks_a_layout_beside_an_interrupted_change(rig: LocalRig) -> None:
    before = rig.geometry
    assert rig.kill_apply("requested", steps.CreateComputeInstance, 4)
    rig.gpus = gpu_values.without_instances(rig.gpus, 0)
    killed = rig.geometry
    rig.failures.add("allocations.assigned_devices", errors.KubeletError("no answer"))

    with pytest.raises(errors.GpuInUseError, match="no answer"):
        rig.change_to("first-only")

    assert rig.geometry == killed
    assert not any("in use" in note for note in rig.notes)

    pods = pod_use.PodUse(kubelet=lambda: fake_cluster.FakeAllocations(rig), is_ignored=True)
    deps = dataclasses.replace(rig.deps, pods=pods)
    applying.apply(deps, lambda: rig.layouts.layout("first-only"))
    assert (rig.has("first-only"), rig.geometry[1]) == (True, before[1])


def test_after_a_kill_the_message_says_what_a_rollback_restores(rig: LocalRig) -> None:
    before = rig.geometry
    assert rig.kill_apply("requested", steps.CreateGpuInstance)
    executed = rig.driver.executed_steps
    executed.clear()
    rig.failures.add(
        steps.CreateGpuInstance, call_errors.IN_USE, when=lambda: len(executed) == 2, times=1
    )

    with pytest.raises(errors.HardwareError):
        rig.change_to("other")

    (note,) = rig.notes
    assert note == (
        "the change to layout 'requested' was left unfinished; if this one fails, the GPUs "
        "are rolled back to their state before that one"
    )
    assert (rig.geometry, rig.journal.text, rig.host.refreshes) == (before, None, 1)


def test_a_rollback_that_fails_is_reported_kept_and_tried_again(rig: LocalRig) -> None:
    before = rig.geometry

    with rig.failures.adding(steps.CreateGpuInstance, call_errors.IN_USE):
        with pytest.raises(errors.HardwareError) as caught:
            rig.change_to("requested")

        assert "; still to do: GPU 0: create" in caught.value.message
        assert caught.value.message.endswith("the next 'apply' tries again")
        assert rig.journal.text is not None

        with pytest.raises(
            errors.LayoutError,
            match=r"was left unfinished; .*: in use; still to do: GPU 0: ",
        ):
            rig.change_to("too-much")
        assert rig.journal.text is not None

    refuse(rig)
    assert rig.geometry == before
    assert rig.journal.text is None


def test_a_failed_apply_restores_gpus_that_an_older_journal_does_not_name(
    rig: LocalRig,
) -> None:
    """A 'boot' that was killed left a journal of the first GPU alone."""
    rig.change_to("mixed")
    before = rig.geometry
    rig.gpus = gpu_values.without_instances(rig.gpus, 0)
    empty = rig.geometry[0]
    with rig.kill_process(steps.CreateComputeInstance):
        rig.boot()
    journal = rig.local_journal
    assert [gpu.uuid for gpu in journal.gpus.snapshots] == [rig.gpus[0].uuid]
    refuse_first_creation_on(rig, rig.gpus[1].uuid)

    with pytest.raises(errors.HardwareError, match="the former instances are restored"):
        rig.change_to("requested")

    assert rig.geometry == [empty, before[1]]
    assert rig.journal.text is None


@pytest.mark.parametrize(("since", "is_undone"), [("other", False), ("off", True)])
def test_after_a_reboot_only_the_gpus_that_it_emptied_are_restored(
    rig: LocalRig, since: str, *, is_undone: bool
) -> None:
    before = rig.geometry
    assert rig.kill_apply("requested", steps.CreateGpuInstance)
    rig.host.boot_id = "boot-2"
    rig.set_up(since)
    rebooted = rig.geometry

    with pytest.raises(errors.LayoutError) as caught:
        rig.change_to("too-much")

    assert rig.geometry == (before if is_undone else rebooted)
    assert ("is undone now" in caught.value.message) is is_undone
    assert is_undone or "was left unfinished when the node was rebooted" in rig.notes[0]
    assert rig.journal.text is None


def test_after_a_reboot_instances_on_another_gpu_do_not_prevent_the_undo(
    rig: LocalRig,
) -> None:
    before = rig.geometry
    assert rig.kill_apply("first-only", steps.DestroyGpuInstance)
    rig.reboot()
    whole = samples.desired_gpu({"7g.40gb": 1})
    rig.gpus = (rig.gpus[0], *gpu_values.with_desired(rig.gpus[1:], whole))
    other = rig.geometry[1]

    refuse(rig)

    assert rig.geometry == [before[0], other]


def test_a_verified_layout_of_other_gpus_does_not_end_a_killed_change(rig: LocalRig) -> None:
    before = rig.geometry
    assert rig.kill_apply("requested", steps.CreateGpuInstance, 3)
    assert rig.geometry[1] != before[1]
    killed = rig.local_journal
    # Another program has its own journal.
    rig.journal.text = None
    rig.change_to("first-only")
    snapshot = tuple(gpu for gpu in killed.gpus.snapshots if gpu.uuid == rig.gpus[1].uuid)
    changed = dataclasses.replace(killed, gpus=killed.gpus.with_snapshots(snapshot))
    rig.journal.text = changed.to_json()

    refuse(rig)

    assert rig.geometry[1] == before[1]
    assert rig.has("first-only")


def test_a_journal_older_than_an_agents_verified_layout_undoes_nothing(rig: LocalRig) -> None:
    assert rig.kill_apply("requested", steps.CreateGpuInstance)
    rig.set_up("other")
    saved = layout_store.VerifiedLayoutStore(rig.verified_layout_file, "boot-1")
    gpus = rig.deps.gpus.observe()
    saved.save(gpus, layout="other", content_hash="h", covered={gpu.uuid for gpu in gpus})
    verified = rig.geometry

    observed = rig.deps.gpus.observe()
    assert journal_file.as_if_undone(rig.deps, observed, rig.gpus[0]) == rig.gpus[0]
    with pytest.raises(errors.LayoutError):
        rig.change_to("too-much")

    assert rig.geometry == verified
    assert "layout 'other' was verified since" in rig.notes[0]
    assert rig.journal.text is None


def test_a_gpu_whose_layout_an_agent_verified_since_is_not_undone(rig: LocalRig) -> None:
    before = rig.geometry
    assert rig.kill_apply("requested", steps.CreateGpuInstance)
    # The agent knows nothing of the journal in the file.
    journal, rig.journal.text = rig.journal.text, None
    rig.change_to("first-only")
    rig.journal.text = journal

    refuse(rig)

    assert rig.has("first-only")
    assert rig.geometry[1] == before[1]
    assert "layout 'first-only' was verified since on GPU 0" in rig.notes[0]
    assert rig.journal.text is None


def test_an_unknown_layout_needs_neither_lock_nor_gpus_and_undoes_nothing(
    rig: LocalRig,
) -> None:
    assert rig.kill_apply("requested", steps.CreateGpuInstance)
    geometry, journal = rig.geometry, rig.journal.text
    rig.driver.executed_steps.clear()
    rig.lock.refusals = 10_000
    unknown = errors.LayoutError("no layout 'x'", reason=reasons.Reason.UNKNOWN_CONFIG)

    with pytest.raises(errors.LayoutError, match=r"^no layout 'x'$"):
        rig.apply(unknown)

    assert rig.clock.now_s == 0
    assert rig.driver.executed_steps == []
    assert (rig.geometry, rig.journal.text) == (geometry, journal)


@pytest.mark.parametrize(
    ("layout", "kind", "number", "is_undone", "message"),
    [
        ("off", steps.SetMode, 2, False, "is not undone, because that resets a GPU"),
        ("requested", steps.CreateGpuInstance, 1, True, "is undone now"),
    ],
)
def test_a_rollback_that_needs_a_forbidden_reset_does_not_run(
    rig: LocalRig,
    layout: str,
    kind: moments.MomentSelector,
    number: int,
    message: str,
    *,
    is_undone: bool,
) -> None:
    before = rig.geometry
    assert rig.kill_apply(layout, kind, number)
    now = rig.geometry
    assert now != before

    with pytest.raises(errors.LayoutError, match=message):
        rig.change_to("too-much", may_reset=False)

    assert rig.geometry == (before if is_undone else now)
    assert (rig.journal.text is None) is is_undone
