"""The journal in a file: replaced as a whole, and private."""

import os
import pathlib
import stat

import pytest

from mig_manager import errors
from mig_manager.adapters.host import files
from mig_manager.core import ports
from tests.rigs.node import saved_file


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "lib" / "journal.json"


def test_a_written_text_is_read_by_another_process_until_it_is_cleared(
    path: pathlib.Path,
) -> None:
    store = files.JournalFile(path)
    store.save("zwei ✓")
    assert files.JournalFile(path).read() == "zwei ✓"
    for _ in range(2):
        store.clear()
        assert list(path.parent.iterdir()) == []


def test_file_is_private_and_a_stale_temporary_file_blocks_no_write(path: pathlib.Path) -> None:
    store = files.JournalFile(path)
    store.save("old")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.with_name("journal.json.new").write_text("half")

    assert store.read() == "old"
    store.save("new")
    assert store.read() == "new"
    assert [entry.name for entry in path.parent.iterdir()] == ["journal.json"]


def test_a_link_in_its_place_is_not_followed_and_a_pipe_does_not_block(
    path: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    precious = tmp_path / "precious"
    precious.write_text("precious")
    path.parent.mkdir()
    path.symlink_to(precious)
    path.with_name("journal.json.new").symlink_to(precious)
    store = files.JournalFile(path)

    with pytest.raises(errors.ConfigError, match="cannot read the journal"):
        store.read()
    store.save("x")

    assert store.read() == "x"
    assert precious.read_text() == "precious"
    path.unlink()
    os.mkfifo(path)
    assert store.read() == ""


@pytest.mark.parametrize(
    ("content", "why"), [(b"\xff", "is not UTF-8"), (b"x" * (1 << 21), "is larger than")]
)
def test_a_malformed_text_is_an_error_and_can_be_set_aside(
    path: pathlib.Path, content: bytes, why: str
) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    store = files.JournalFile(path)

    with pytest.raises(errors.ConfigError, match=why):
        store.read()
    kept = store.set_aside()

    assert store.read() is None
    assert kept == f"{path}.unreadable"
    assert pathlib.Path(kept).read_bytes() == content


def test_every_operation_on_an_unusable_path_is_a_config_error(
    path: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "lib").touch()
    store = files.JournalFile(path)

    for act, name in (
        (store.read, "read"),
        (lambda: store.save("x"), "write"),
        (store.clear, "remove"),
        (store.set_aside, "set aside"),
    ):
        with pytest.raises(errors.ConfigError, match=f"cannot {name} the journal .*lib/journal"):
            act()


def test_a_verified_layout_is_saved_with_its_own_error_messages(path: pathlib.Path) -> None:
    store = files.VerifiedLayoutFile(path)
    store.save("layout")

    assert files.VerifiedLayoutFile(path).read() == "layout"
    assert store.set_aside() == f"{path}.unreadable"
    path.write_bytes(b"\xff")
    with pytest.raises(errors.ConfigError, match=r"the layout kept for .* not UTF-8"):
        store.read()


class OnDisk:
    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        self.kept: ports.SavedFile = files.JournalFile(path)

    def prevent_writing(self) -> None:
        self._path.with_name("journal.json.new").mkdir()

    def garble(self) -> None:
        self._path.write_bytes(b"\xff")


class InMemory:
    def __init__(self, _path: pathlib.Path) -> None:
        self._fake = saved_file.FakeSavedFile()
        self.kept: ports.SavedFile = self._fake

    def prevent_writing(self) -> None:
        self._fake.failing_operations.add("write")

    def garble(self) -> None:
        self._fake.failing_operations.add("read")


Rig = OnDisk | InMemory


@pytest.fixture(params=[OnDisk, InMemory], ids=["adapter", "fake"])
def rig(request: pytest.FixtureRequest, path: pathlib.Path) -> Rig:
    made: Rig = request.param(path)
    return made


def test_a_kept_file_has_the_last_saved_text_until_it_is_cleared(rig: Rig) -> None:
    kept = rig.kept

    assert kept.read() is None
    for end in (kept.clear, kept.set_aside):
        end()
        kept.save("one")
        kept.save("two")
        assert kept.read() == "two"
        end()
        assert kept.read() is None


def test_a_failed_write_keeps_the_previous_text(rig: Rig) -> None:
    rig.kept.save("old")
    rig.prevent_writing()

    with pytest.raises(errors.ConfigError, match="cannot write"):
        rig.kept.save("new")

    assert rig.kept.read() == "old"


def test_an_unreadable_text_ends_when_set_aside(rig: Rig) -> None:
    rig.kept.save("old")
    rig.garble()

    with pytest.raises(errors.ConfigError):
        rig.kept.read()
    rig.kept.set_aside()

    assert rig.kept.read() is None
