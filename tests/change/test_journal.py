"""The journal of ``apply``, and disks that refuse it; over GPUs in memory."""

import dataclasses

import pytest

from mig_manager import errors, reasons
from mig_manager.change import journal_file
from mig_manager.core import steps
from mig_manager.core.planner import planner
from mig_manager.core.records import journals
from tests.rigs.node import call_errors, gpu_values, strikes
from tests.rigs.node.local_rig import LocalRig


def test_journal_exists_from_the_first_step_to_the_last(rig: LocalRig) -> None:
    journal_texts: list[str | None] = []

    def note() -> None:
        journal_texts.append(rig.journal.text)
        assert rig.lock.is_locked

    rig.callbacks.add(steps.Step, note)
    snapshot = tuple(gpu.snapshot for gpu in rig.gpus)
    rig.change_to("requested")

    journal = journals.Journal.from_json(journal_texts[0] or "")
    assert (journal.layout, journal.boot_id) == ("requested", "boot-1")
    assert planner.restore(rig.gpus, journal.gpus.snapshots) == planner.restore(rig.gpus, snapshot)
    assert len(set(journal_texts)) == 1
    assert rig.journal.read() is None
    assert rig.lock.descriptions == ["apply requested"]


def test_journal_of_a_complete_change_is_cleared(rig: LocalRig) -> None:
    snapshot = tuple(gpu.snapshot for gpu in rig.gpus)
    written = journals.Journal(
        layout="requested", boot_id="boot-1", gpus=journals.GpuEntries(snapshots=snapshot)
    )
    rig.set_up("requested")
    rig.journal.text = written.to_json()

    assert not rig.change_to("requested").is_changed
    assert rig.journal.text is None


def test_a_change_is_not_undone_because_its_journal_stays(rig: LocalRig) -> None:
    rig.journal.failing_operations = {"clear"}

    rig.change_to("requested")

    assert rig.has("requested")
    assert rig.notes == ["cannot clear the journal; remove it, because it is outdated"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 99}', '{"version": 1}', None])
def test_an_invalid_or_unreadable_journal_is_set_aside(rig: LocalRig, text: str | None) -> None:
    rig.journal.text = text or ""
    rig.journal.failing_operations = {"read"} if text is None else set()

    rig.change_to("requested")

    assert rig.has("requested")
    assert rig.journal.aside == (text or "")
    assert rig.journal.read() is None
    assert "it is kept as journal.unreadable and otherwise ignored" in rig.notes[0]


@pytest.mark.parametrize("refused", [{"write"}, {"read", "set_aside"}])
def test_without_a_journal_nothing_is_changed(rig: LocalRig, refused: set[str]) -> None:
    before = rig.geometry
    rig.journal.failing_operations = refused

    with pytest.raises(errors.UsageError) as caught:
        rig.change_to("requested")

    assert caught.value.own_remedy == "Run as root, or name another file with --journal-file."
    assert journal_file.RETRIED_LATER not in caught.value.message
    assert rig.geometry == before
    assert rig.driver.executed_steps == []


def test_a_disk_that_fills_during_a_change_hides_no_failure(rig: LocalRig) -> None:
    rig.callbacks.add(steps.Step, lambda: rig.journal.failing_operations.add("write"))
    rig.failures.add(steps.CreateGpuInstance, call_errors.IN_USE)

    with pytest.raises(errors.HardwareError) as caught:
        rig.change_to("requested")

    assert caught.value.message.startswith("in use; the rollback failed as well: in use; ")
    assert caught.value.message.count("cannot write the journal") == 1
    assert rig.local_journal.gpus.snapshots


def test_a_reset_whose_journal_cannot_be_written_is_reported(rig: LocalRig) -> None:
    before = journals.GpuEntries(snapshots=tuple(gpu.snapshot for gpu in rig.gpus))
    recorder = journal_file.FileRecorder(
        rig.deps, journals.Journal(layout="requested", gpus=before)
    )
    rig.journal.failing_operations = {"write"}

    recorder.announce(gpus=dataclasses.replace(before, persistent_gpus=(rig.gpus[0].uuid,)))

    (note,) = rig.notes
    assert note.startswith("cannot write the journal")


def test_a_layout_of_other_gpus_keeps_the_journal_of_an_unreachable_one(
    rig: LocalRig,
) -> None:
    lost = rig.gpus[1]
    entries = journals.GpuEntries(snapshots=(lost.snapshot,))
    rig.journal.text = journals.Journal(layout="requested", gpus=entries).to_json()
    rig.driver.lost = {lost.uuid}

    rig.change_to("first-only")

    kept = rig.local_journal.gpus.snapshots
    assert gpu_values.geometry(kept) == gpu_values.geometry([lost])


def no_files() -> Exception:
    return errors.HostError("nvidia-ctk failed", reason=reasons.Reason.DEVICE_FILES_FAILED)


@pytest.mark.parametrize("failure", [no_files(), strikes.Killed()])
@pytest.mark.parametrize(("layout", "is_undone"), [("requested", False), ("before", True)])
def test_stale_device_files_are_refreshed_by_the_next_apply(
    rig: LocalRig, failure: Exception, layout: str, *, is_undone: bool
) -> None:
    if is_undone:
        rig.failures.add(steps.CreateGpuInstance, call_errors.IN_USE, times=1)
    rig.failures.add("refresh_files", failure)
    with pytest.raises((errors.MigManagerError, strikes.Killed)):
        rig.change_to("requested")
    changed = rig.geometry

    rig.failures.clear()
    rig.failures.add("refresh_files", no_files())
    with pytest.raises(errors.HostError, match=r"^nvidia-ctk failed; the next 'apply'"):
        rig.change_to(layout)
    rig.failures.clear()
    assert not rig.change_to(layout).is_changed

    assert (rig.geometry, rig.host.refreshes, rig.journal.text) == (changed, 1, None)
