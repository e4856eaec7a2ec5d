"""Read and replace whole files: layout files, journal, verified layout, output.

Data that must survive a power loss is on the disk before anything relies on it.
"""

import contextlib
import errno
import os
import pathlib
import secrets
import stat
from collections.abc import Iterator

from mig_manager import errors

MAX_BYTES = 1 << 20
"""The limit of a ConfigMap, where layout files live (etcd's limit on a request); the
snapshot of any node is far smaller."""
_HOMES = ("/root", "/home", "/run/user")  # what ``ProtectHome=`` hides (systemd.exec(5))
_FOLDER_MODE = 0o755
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class SourceFile:
    """Reads a file of the owner; implements ``ports.TextSource``."""

    def __init__(self, path: str | pathlib.Path, *, max_bytes: int = MAX_BYTES) -> None:
        self._path = pathlib.Path(path)
        self._max_bytes = max_bytes

    @property
    def name(self) -> str:
        """The path, for messages."""
        return str(self._path)

    def read(self) -> str:
        """Return the file's text as it is now; ConfigError, as for the port."""
        try:
            content = read_bytes(self._path, max_bytes=self._max_bytes)
        except OSError as error:
            why = f"{error.strerror or error}{_home_hint(self._path)}"
            raise errors.ConfigError(f"cannot read {self._path}: {why}") from error
        return _decode(content, str(self._path), max_bytes=self._max_bytes)


class _TextFile:
    """One text, replaced as a whole; one process at a time may write it.

    Methods raise ConfigError on failure, and then leave the old text.
    """

    _what: str

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path

    def read(self) -> str | None:
        """Return the text, or None if the file does not exist."""
        with self._errors_translated("read"):
            try:
                file = os.open(self._path, _READ)
            except FileNotFoundError:
                return None
            with open(file, "rb") as stream:  # noqa: PTH123 - a descriptor, not a path
                content = stream.read(MAX_BYTES + 1)
        return _decode(content, f"{self._what} {self._path}")

    def save(self, text: str) -> None:
        """Replace the text; it is on the disk before this returns."""
        with self._errors_translated("write"):
            self._path.parent.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
            replace(self._path, text, mode=0o600, temporary=self._beside("new"))
            _sync_folder(self._path.parent)

    def clear(self) -> None:
        """Remove the text, if it exists."""
        with self._errors_translated("remove"), contextlib.suppress(FileNotFoundError):
            self._path.unlink()
            _sync_folder(self._path.parent)

    def set_aside(self) -> str:
        """Rename a text that cannot be parsed; return its new path."""
        path = self._beside("unreadable")
        with self._errors_translated("set aside"), contextlib.suppress(FileNotFoundError):
            self._path.replace(path)
            _sync_folder(self._path.parent)
        return str(path)

    def _beside(self, suffix: str) -> pathlib.Path:
        return self._path.with_name(f"{self._path.name}.{suffix}")

    @contextlib.contextmanager
    def _errors_translated(self, act: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            why = error.strerror or str(error)
            raise errors.ConfigError(f"cannot {act} {self._what} {self._path}: {why}") from error


class JournalFile(_TextFile):
    """Implements ``ports.SavedFile``."""

    _what = "the journal"


class VerifiedLayoutFile(_TextFile):
    """Implements ``ports.SavedFile``."""

    _what = "the layout kept for the next boot"


class HostCopyFile(_TextFile):
    """Implements ``ports.SavedText`` beside the verified layout."""

    _what = "the record of the request"

    def __init__(self, verified_layout: pathlib.Path) -> None:
        super().__init__(host_copy_path(verified_layout))


def host_copy_path(verified_layout: pathlib.Path) -> pathlib.Path:
    """Return the path of the host's copy of journal and record, beside the verified layout."""
    return verified_layout.with_suffix(".request.json")


def write_output(path: pathlib.Path, content: str | bytes, *, mode: int | None = None) -> None:
    """Write a file named by the user, in an existing folder.

    Links are followed, an existing file keeps its mode unless ``mode`` is set, and pipes and
    devices are written to instead of replaced.

    Raises:
        UsageError: It cannot be written; the previous content is still there.
    """
    data = content.encode() if isinstance(content, str) else content
    try:
        try:
            old_mode = path.stat().st_mode
        except FileNotFoundError:
            umask = os.umask(0)
            os.umask(umask)
            old_mode = stat.S_IFREG | (0o666 & ~umask)
        if not stat.S_ISREG(old_mode):
            # By its own name: the target of /dev/stdout may have none that can be opened.
            path.write_bytes(data)
            return
        target = path.resolve(strict=False)
        # Random, because the folder may be shared with others.
        temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
        new_mode = stat.S_IMODE(old_mode) if mode is None else mode
        replace(target, data, mode=new_mode, temporary=temporary)
    except OSError as error:
        raise errors.UsageError(
            f"cannot write {path}: {error.strerror or error}",
            remedy="Check the path, your rights and the free space.",
        ) from error


def replace(
    path: pathlib.Path, content: str | bytes, *, mode: int, temporary: pathlib.Path | None = None
) -> None:
    """Replace a file as ``replacing`` does; its content is on the disk before this returns.

    Its mode does not depend on the umask.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    with replacing(path, temporary) as new:
        file = os.open(new, flags, mode)
        with open(file, "wb") as stream:  # noqa: PTH123 - a descriptor, not a path
            stream.write(content.encode() if isinstance(content, str) else content)
            stream.flush()
            os.fchmod(file, mode)
            os.fsync(file)


@contextlib.contextmanager
def replacing(path: pathlib.Path, temporary: pathlib.Path | None = None) -> Iterator[pathlib.Path]:
    """Replace a file atomically by the file that the body writes to the yielded path.

    The yielded path is in the same folder. A killed writer's file is removed.

    Raises:
        OSError: It cannot be replaced; the previous file is still there.
    """
    new = temporary or path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    try:
        yield new
        new.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
        raise


def read_bytes(path: pathlib.Path, *, max_bytes: int = MAX_BYTES) -> bytes:
    """Return a file's content, up to one byte more than allowed.

    Named pipes are refused, because a writer may never come. The pipe of ``/dev/stdin`` or of a
    shell's ``<(...)`` has a writer and no name.
    """
    with open(path, "rb", opener=_open_without_waiting) as stream:
        if stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode):
            if os.path.exists(os.path.realpath(path)):  # noqa: PTH110 - as the kernel resolves it
                raise OSError(errno.EINVAL, "it is a named pipe, not a file")
            os.set_blocking(stream.fileno(), True)
        return stream.read(max_bytes + 1)


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def _decode(content: bytes, name: str, *, max_bytes: int = MAX_BYTES) -> str:
    if len(content) > max_bytes:
        raise errors.ConfigError(
            f"{name} is larger than {max_bytes} bytes", remedy="Name a smaller file."
        )
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise errors.ConfigError(
            f"{name} is not UTF-8: {error.reason} at byte {error.start}",
            remedy="Save the file as UTF-8, or name another file.",
        ) from error


def _home_hint(path: pathlib.Path) -> str:
    """Return a hint that ProtectHome= may hide a missing file; empty if it does not apply."""
    home = next((home for home in _HOMES if path.absolute().is_relative_to(home)), None)
    if home is None:
        return ""
    # ProtectHome= makes the folder empty, or closes it to root; its mode closes it to other users.
    is_hidden = os.geteuid() == 0
    with contextlib.suppress(OSError), os.scandir(home) as entries:
        is_hidden = next(entries, None) is None
    if not is_hidden:
        return ""
    return (
        f"; below systemd, ProtectHome= of the unit hides {home}: put the file in /etc/mig-manager"
    )


def _sync_folder(folder: pathlib.Path) -> None:
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
