"""The journal of ``apply``, and disks that refuse it; over GPUs in memory."""

import dataclasses

import pytest

from mig_manager import errors, reasons
from mig_manager.change import local_journal
from mig_manager.core import steps
from mig_manager.core.planner import planner
from mig_manager.core.records import journals
from tests.rigs.node import gpu_values, strikes
from tests.rigs.node.local_rig import LocalNode, first_only, is_creation


def test_journal_exists_from_the_first_step_to_the_last(node: LocalNode) -> None:
    journal_texts: list[str | None] = []

    def is_refused(_step: steps.Step) -> bool:
        journal_texts.append(node.journal.text)
        assert node.lock.is_locked
        return False

    node.refuses_step = is_refused
    snapshot = tuple(gpu.snapshot for gpu in node.gpus)
    node.change_to("requested")

    journal = journals.Journal.from_json(journal_texts[0] or "")
    assert (journal.config, journal.boot_id) == ("requested", "boot-1")
    assert planner.restore(node.gpus, journal.gpus.snapshot) == planner.restore(
        node.gpus, snapshot
    )
    assert len(set(journal_texts)) == 1
    assert node.journal.read() is None
    assert node.lock.descriptions == ["apply requested"]


def test_journal_of_a_complete_change_is_cleared(node: LocalNode) -> None:
    snapshot = tuple(gpu.snapshot for gpu in node.gpus)
    written = journals.Journal(
        config="requested", boot_id="boot-1", gpus=journals.GpuEntries(snapshot=snapshot)
    )
    node.set_up("requested")
    node.journal.text = written.to_json()

    assert not node.change_to("requested").is_changed
    assert node.journal.text is None


def test_a_change_is_not_undone_because_its_journal_stays(node: LocalNode) -> None:
    node.journal.failing_operations = {"clear"}

    node.change_to("requested")

    assert node.has("requested")
    assert node.notes == ["cannot clear the journal; remove it, because it is outdated"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 99}', '{"version": 1}', None])
def test_an_invalid_or_unreadable_journal_is_set_aside(node: LocalNode, text: str | None) -> None:
    node.journal.text = text or ""
    node.journal.failing_operations = {"read"} if text is None else set()

    node.change_to("requested")

    assert node.has("requested")
    assert node.journal.aside == (text or "")
    assert node.journal.read() is None
    assert "it is kept as journal.unreadable and otherwise ignored" in node.notes[0]


@pytest.mark.parametrize("refused", [{"write"}, {"read", "set_aside"}])
def test_without_a_journal_nothing_is_changed(node: LocalNode, refused: set[str]) -> None:
    before = node.geometry
    node.journal.failing_operations = refused

    with pytest.raises(errors.UsageError) as caught:
        node.change_to("requested")

    assert caught.value.own_remedy == "Run as root, or name another file with --journal-file."
    assert local_journal.RETRIED_LATER not in caught.value.message
    assert node.geometry == before
    assert node.steps == 0


def test_a_disk_that_fills_during_a_change_hides_no_failure(node: LocalNode) -> None:
    node.on_step = lambda _step: node.journal.failing_operations.add("write")
    node.refuses_step = is_creation

    with pytest.raises(errors.HardwareError) as caught:
        node.change_to("requested")

    assert caught.value.message.startswith("in use; the rollback failed as well: in use; ")
    assert caught.value.message.count("cannot write the journal") == 1
    assert node.local_journal.gpus.snapshot


def test_a_reset_whose_journal_cannot_be_written_is_reported(node: LocalNode) -> None:
    before = journals.GpuEntries(snapshot=tuple(gpu.snapshot for gpu in node.gpus))
    recorder = local_journal.LocalRecorder(
        node.deps, journals.Journal(config="requested", gpus=before)
    )
    node.journal.failing_operations = {"write"}

    recorder.announce(gpus=dataclasses.replace(before, persistent_gpus=(node.gpus[0].uuid,)))

    (note,) = node.notes
    assert note.startswith("cannot write the journal")


def test_a_layout_of_other_gpus_keeps_the_journal_of_an_unreachable_one(
    node: LocalNode,
) -> None:
    lost = node.gpus[1]
    entries = journals.GpuEntries(snapshot=(lost.snapshot,))
    node.journal.text = journals.Journal(config="requested", gpus=entries).to_json()
    node.driver.lost = {lost.uuid}

    node.change_to("first-only")

    kept = node.local_journal.gpus.snapshot
    assert gpu_values.geometry(kept) == gpu_values.geometry([lost])


def no_files() -> Exception:
    return errors.HostError("nvidia-ctk failed", reason=reasons.Reason.DEVICE_FILES_FAILED)


@pytest.mark.parametrize("failure", [no_files(), strikes.Killed()])
@pytest.mark.parametrize(("layout", "is_undone"), [("requested", False), ("before", True)])
def test_outdated_device_files_are_refreshed_by_the_next_apply(
    node: LocalNode, failure: Exception, layout: str, *, is_undone: bool
) -> None:
    if is_undone:
        node.refuses_step = first_only(is_creation)
    node.fail_always["refresh_files"] = failure
    with pytest.raises((errors.MigManagerError, strikes.Killed)):
        node.change_to("requested")
    changed = node.geometry

    node.fail_always["refresh_files"] = no_files()
    with pytest.raises(errors.HostError, match=r"^nvidia-ctk failed; the next 'apply'"):
        node.change_to(layout)
    node.fail_always.clear()
    assert not node.change_to(layout).is_changed

    assert (node.geometry, node.host.refreshes, node.journal.text) == (changed, 1, None)
