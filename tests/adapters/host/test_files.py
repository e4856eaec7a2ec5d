"""SourceFile and FileWatch against real files, inotify and kubelet's way of changing a mount."""

import contextlib
import os
import pathlib
import queue
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator

import pytest

from mig_manager import errors
from mig_manager.adapters.host import file_watch, files

_SOON_S = 60.0
_QUIET_S = 0.3
_OTHER_USER_ID = 65534  # without rights


class Mount:
    """A directory as kubelet's AtomicWriter fills it for a ConfigMap."""

    def __init__(self, directory: pathlib.Path) -> None:
        self.directory = directory
        self.file = directory / "config.yaml"
        self._count = 0
        self.make("one")

    def make(self, content: str) -> None:
        self.directory.mkdir()
        self.swap(content)
        self.file.symlink_to("..data/config.yaml")

    def swap(self, content: str) -> None:
        self._count += 1
        fresh = self.directory / f"..{self._count}"
        fresh.mkdir()
        (fresh / "config.yaml").write_text(content)
        temporary = self.directory / "..data_tmp"
        temporary.symlink_to(fresh.name)
        old = self.directory / "..data"
        target = old.resolve() if old.exists() else None
        temporary.rename(old)
        if target is not None:
            shutil.rmtree(target)


@pytest.fixture
def mount(tmp_path: pathlib.Path) -> Mount:
    return Mount(tmp_path / "mount")


@contextlib.contextmanager
def watching(path: pathlib.Path, *, poll_s: float = 600.0) -> Iterator[queue.Queue[str]]:
    """Run a watch; each change puts the content at that moment."""
    changes: queue.Queue[str] = queue.Queue()
    watch = file_watch.FileWatch(
        path, lambda: changes.put(path.read_text()), debounce_s=0.02, poll_s=poll_s
    )
    watch.start()
    try:
        yield changes
    finally:
        watch.stop()


def put(path: pathlib.Path, content: str) -> None:
    """Replace a file at once: one that is written in place is empty for a moment."""
    fresh = path.with_suffix(".fresh")
    fresh.write_text(content)
    fresh.rename(path)


def nothing_more(changes: queue.Queue[str]) -> bool:
    try:
        changes.get(timeout=_QUIET_S)
    except queue.Empty:
        return True
    return False


def test_missing_file_names_protect_home_unless_the_home_is_visible(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # systemd mounts an empty folder over it (systemd.exec(5)).
    monkeypatch.setattr(files, "_HOMES", (str(tmp_path),))
    missing = files.SourceFile(tmp_path / "config.yaml")

    with pytest.raises(errors.ConfigError, match=f"ProtectHome= of the unit hides {tmp_path}"):
        missing.read()
    (tmp_path / ".profile").touch()
    with pytest.raises(errors.ConfigError, match=r"No such file or directory$"):
        missing.read()


def test_home_that_is_closed_to_its_user_does_not_name_protect_home(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_HOMES", (str(tmp_path),))
    tmp_path.chmod(0)
    if os.geteuid() == 0:
        os.seteuid(_OTHER_USER_ID)
    try:
        with pytest.raises(errors.ConfigError, match=r"Permission denied$"):
            files.SourceFile(tmp_path / "config.yaml").read()
    finally:
        os.seteuid(os.getuid())
        tmp_path.chmod(0o700)


def test_a_missing_file_or_a_directory_is_a_config_error_with_its_name(
    tmp_path: pathlib.Path,
) -> None:
    for name, why in (("gone.yaml", r"gone\.yaml: No such file"), ("", "Is a directory")):
        with pytest.raises(errors.ConfigError, match=why):
            files.SourceFile(tmp_path / name).read()


def test_a_named_pipe_is_refused_and_a_shells_pipe_is_read(tmp_path: pathlib.Path) -> None:
    named = tmp_path / "layouts.yaml"
    os.mkfifo(named)
    with pytest.raises(errors.ConfigError, match="it is a named pipe, not a file"):
        files.SourceFile(named).read()

    # It writes while it is read.
    script = "echo one; until [ -e go ]; do :; done; echo two"
    with subprocess.Popen(  # noqa: S603 - our own script
        ["/bin/sh", "-c", script], cwd=tmp_path, stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdout is not None
        timer = threading.Timer(0.05, (tmp_path / "go").touch)
        timer.start()
        assert files.SourceFile(f"/dev/fd/{writer.stdout.fileno()}").read() == "one\ntwo\n"
        timer.join()


def test_a_file_of_more_than_a_mebibyte_or_not_utf_8_is_refused(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(b"#" * files.MAX_BYTES)
    assert len(files.SourceFile(path).read()) == files.MAX_BYTES
    path.write_bytes(b"#" * (files.MAX_BYTES + 1))
    with pytest.raises(errors.ConfigError, match="larger than"):
        files.SourceFile(path).read()
    assert len(files.SourceFile(path, max_bytes=2 * files.MAX_BYTES).read()) > files.MAX_BYTES
    path.write_bytes(b"abc\xff")
    with pytest.raises(errors.ConfigError, match=r"not UTF-8: .* at byte 3") as raised:
        files.SourceFile(path).read()
    assert raised.value.own_remedy == "Save the file as UTF-8, or name another file."


@pytest.mark.parametrize("is_linked", [True, False])
def test_kubelets_swap_of_the_data_link_is_a_change_if_the_content_differs(
    mount: Mount, *, is_linked: bool
) -> None:
    link = mount.directory.with_name("link")
    link.symlink_to(mount.directory)
    with watching(link / "config.yaml" if is_linked else mount.file) as changes:
        for content in ("two", "three"):
            mount.swap(content)
            assert changes.get(timeout=_SOON_S) == content
        mount.swap("three")
        assert nothing_more(changes)


@pytest.mark.parametrize(
    "replace",
    [
        pytest.param(lambda path: path.write_text("two"), id="written in place"),
        pytest.param(lambda path: path.with_suffix(".new").rename(path), id="renamed over it"),
    ],
)
def test_an_editors_replacement_of_a_file_is_a_change(
    tmp_path: pathlib.Path, replace: Callable[[pathlib.Path], object]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("one")
    path.with_suffix(".new").write_text("two")
    with watching(path) as changes:
        replace(path)
        # While it is written, the file is empty.
        assert next(filter(None, iter(lambda: changes.get(timeout=_SOON_S), None))) == "two"


def test_reading_the_file_raises_no_event(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("one")
    events: queue.Queue[str] = queue.Queue()
    watch = file_watch.DirectoryWatch(tmp_path, lambda: events.put("event"))
    try:
        path.read_text()
        assert nothing_more(events)
        path.write_text("two")
        assert events.get(timeout=_SOON_S) == "event"
    finally:
        watch.stop()


def test_file_that_appears_is_a_change_and_a_brief_absence_is_not(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "config.yaml"
    with watching(path) as changes:
        put(path, "one")
        assert changes.get(timeout=_SOON_S) == "one"
        path.unlink()
        assert nothing_more(changes)
        put(path, "one")
        assert nothing_more(changes)
        put(path, "two")
        assert changes.get(timeout=_SOON_S) == "two"


def test_a_folder_whose_link_leads_to_itself_is_watched_once_it_exists(
    tmp_path: pathlib.Path,
) -> None:
    folder = tmp_path / "folder"
    folder.symlink_to(folder)
    with watching(folder / "config.yaml", poll_s=0.05) as changes:
        folder.unlink()
        folder.mkdir()
        put(folder / "config.yaml", "two")
        assert changes.get(timeout=_SOON_S) == "two"


@pytest.mark.parametrize("is_there", [True, False])
def test_a_directory_that_is_created_or_recreated_is_watched(
    tmp_path: pathlib.Path, *, is_there: bool
) -> None:
    mount = Mount(tmp_path / "mount")
    if not is_there:
        shutil.rmtree(mount.directory)
    with watching(mount.file, poll_s=0.05) as changes:
        if is_there:
            shutil.rmtree(mount.directory)
        mount.make("two")
        assert changes.get(timeout=_SOON_S) == "two"
        mount.swap("three")
        assert changes.get(timeout=_SOON_S) == "three"


def test_the_file_is_polled_when_inotify_is_exhausted(
    mount: Mount, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_args: object) -> None:
        raise OSError(24, "inotify instance limit reached")

    monkeypatch.setattr(file_watch, "DirectoryWatch", refuse)
    with watching(mount.file, poll_s=0.05) as changes:
        mount.swap("two")
        assert changes.get(timeout=_SOON_S) == "two"


def test_a_callback_error_does_not_end_the_watch(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("one")
    heard: queue.Queue[str] = queue.Queue()

    def listen() -> None:
        heard.put(path.read_text())
        raise RuntimeError("a bug of the listener's")

    watch = file_watch.FileWatch(path, listen, debounce_s=0.02)
    watch.start()
    try:
        for content in ("two", "three"):
            put(path, content)
            assert heard.get(timeout=_SOON_S) == content
    finally:
        watch.stop()
