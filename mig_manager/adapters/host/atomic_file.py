"""What outlives a run in a file: the journal of runs without a cluster, and the proven layout.

A file is replaced as a whole and is on the disk before anything relies on it, because what it is
for includes the loss of power.
"""

import contextlib
import os
import pathlib
from collections.abc import Iterator

from mig_manager import errors

_MAX_BYTES = 1 << 20
"""Far more than the snapshot of any node."""
_MODE = 0o600
_FOLDER_MODE = 0o755
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_OLD = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class _TextFile:
    """One text, replaced as a whole; for whoever holds the node's lock.

    Args:
        path: The file; its folder is made when there is something to write.
    """

    _what: str
    """What errors call it."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path

    def read(self) -> str | None:
        """Return the text, or None when there is none.

        Raises:
            ConfigError: It is there and cannot be read, or is no text of ours by its size.
        """
        with self._told("read"):
            try:
                file = os.open(self._path, _OLD)
            except FileNotFoundError:
                return None
            with open(file, "rb") as stream:  # noqa: PTH123 - a descriptor, not a path
                content = stream.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise errors.ConfigError(
                f"{self._what} {self._path} is larger than {_MAX_BYTES} bytes"
            )
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            raise errors.ConfigError(f"{self._what} {self._path} is not UTF-8") from error

    def write(self, text: str) -> None:
        """Replace the text; on the disk before this returns.

        Raises:
            ConfigError: It cannot be written; the former one is still there.
        """
        fresh = self._beside("new")
        with self._told("write"):
            self._path.parent.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
            # What a writer that was killed has left.
            fresh.unlink(missing_ok=True)
            try:
                _write(fresh, text)
                fresh.replace(self._path)
            except OSError:
                with contextlib.suppress(OSError):
                    fresh.unlink(missing_ok=True)
                raise
            _settle(self._path.parent)

    def clear(self) -> None:
        """Remove the text; done when there is none.

        Raises:
            ConfigError: It cannot be removed.
        """
        with self._told("remove"), contextlib.suppress(FileNotFoundError):
            self._path.unlink()
            _settle(self._path.parent)

    def set_aside(self) -> str:
        """Move a text that makes no sense out of the way; return where it is kept.

        Raises:
            ConfigError: It cannot be moved.
        """
        kept = self._beside("unreadable")
        with self._told("set aside"), contextlib.suppress(FileNotFoundError):
            self._path.replace(kept)
            _settle(self._path.parent)
        return str(kept)

    def _beside(self, suffix: str) -> pathlib.Path:
        return self._path.with_name(f"{self._path.name}.{suffix}")

    @contextlib.contextmanager
    def _told(self, act: str) -> Iterator[None]:
        """Translate the system's errors."""
        try:
            yield
        except OSError as error:
            why = error.strerror or str(error)
            raise errors.ConfigError(f"cannot {act} {self._what} {self._path}: {why}") from error


class JournalFile(_TextFile):
    """Implements ``ports.JournalStore``."""

    _what = "the journal"


class ProvenFile(_TextFile):
    """Implements ``ports.VerifiedLayouts``; the text is that of ``core.status.VerifiedLayout``."""

    _what = "the layout kept for the next boot"

    def save(self, text: str) -> None:
        """Replace what is kept; on the disk before this returns.

        Raises:
            ConfigError: It cannot be written; the former one is still there.
        """
        self.write(text)


def _write(path: pathlib.Path, text: str) -> None:
    file = os.open(path, _NEW, _MODE)
    with open(file, "wb") as stream:  # noqa: PTH123 - a descriptor, not a path
        stream.write(text.encode())
        stream.flush()
        os.fsync(file)


def _settle(folder: pathlib.Path) -> None:
    """Have the disk know which files the folder has."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
