"""One manager at a time on a node, by a lock on a file that all of them know.

The lock is ``flock(2)``'s: the kernel gives it back with the process however that ends, it keeps
threads of one process apart as well, since each opens the file anew, and scripts can take part
with ``flock(1)``. The text in the file only tells people who holds it; it decides nothing, for a
manager that was killed leaves its own behind.
"""

import contextlib
import errno
import fcntl
import json
import os
import pathlib
import socket
import stat
from collections.abc import Iterator

import structlog

from mig_manager import clocks, errors

_MODE = 0o644
"""Everybody may read who is at work."""
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""No child keeps the lock; a link leads nowhere; a pipe in our place does not hold us up."""
_MAX_BYTES = 4096
_MOST_OPENINGS = 10
"""How often a file that is removed under our hands is opened again."""
_FOLDER_MODE = 0o755

_log = structlog.get_logger()


class LockFile:
    """Implements ``ports.Exclusion``.

    Args:
        path: The file; it and its folder are made.
        program: What this manager is called, told to whoever is kept off.
        clock: Tells since when the lock is held.
        is_required: Whether to refuse the work where no file can be locked. A pod may lack the
            mount: its agent goes on alone, and says so once.
    """

    def __init__(
        self, path: pathlib.Path, *, program: str, clock: clocks.Clock, is_required: bool
    ) -> None:
        self._path = path
        self._program = program
        self._clock = clock
        self._is_required = is_required
        self._is_warned = False

    @contextlib.contextmanager
    def hold(self, doing: str) -> Iterator[None]:
        """Keep every other manager off while the context lasts.

        Args:
            doing: What for, told to whoever is kept off.

        Raises:
            LockedError: On entering, at once: another manager is at work; says which.
            UsageError: On entering: the file cannot be made or locked, and it is required.
        """
        file = self._locked()
        if file is None:
            yield
            return
        try:
            _tell(file, self._holder(doing))
            yield
            _tell(file, "")
        finally:
            # A child that is being started has a copy for a moment; closing ours is not enough.
            fcntl.flock(file, fcntl.LOCK_UN)
            os.close(file)

    def _locked(self) -> int | None:
        """Return the file with the lock on it; None where that cannot be had."""
        try:
            return _lock(self._path)
        except OSError as error:
            why = error.strerror or str(error)
            if self._is_required:
                raise errors.UsageError(
                    f"cannot lock {self._path}, which keeps two managers off one node: {why}; "
                    "run as root, or name another file with --lock-file"
                ) from error
            if not self._is_warned:
                _log.warning("lock_unavailable", path=str(self._path), detail=why)
            self._is_warned = True
            return None

    def _holder(self, doing: str) -> str:
        told = {
            "program": self._program,
            "pid": os.getpid(),
            "doing": doing,
            "since": self._clock.now_iso(),
            "host": socket.gethostname(),
        }
        return json.dumps(told) + "\n"


def holder(path: pathlib.Path) -> str:
    """Return who holds a lock, without taking it from anybody; empty when nobody does.

    Whoever has given it back has emptied the file, so that the lock is only tried, shared and for
    a moment, where somebody holds it or was killed.

    Raises:
        OSError: The file is there and cannot be read.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return ""
    with open(file, "rb") as stream:  # noqa: PTH123 - a descriptor, not a path
        told = stream.read(_MAX_BYTES)
        if not told.strip():
            return ""
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _who(told) or "a manager that does not say who it is"
        return ""


def _lock(path: pathlib.Path) -> int:
    """Open the file and lock it.

    Raises:
        LockedError: Somebody else has.
        OSError: It cannot be made, opened or locked, or is not one that we may write to.
    """
    path.parent.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
    for _ in range(_MOST_OPENINGS):
        file = os.open(path, _FLAGS, _MODE)
        try:
            _require_ours(file)
            _flock(file)
            if _is_at(path, file):
                return file
        except BaseException:
            os.close(file)
            raise
        # Removed before we had it: who comes next would lock another file.
        os.close(file)
    raise OSError(errno.ESTALE, "it is removed again and again")


def _require_ours(file: int) -> None:
    """Refuse what somebody may have put in our place to have us write to another file."""
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        raise OSError(errno.EINVAL, "it is no plain file of its own")
    if found.st_uid not in (0, os.geteuid()):
        raise OSError(errno.EPERM, f"it belongs to user {found.st_uid}")
    if found.st_uid == os.geteuid():
        # Whatever the umask was, and others must not write what people are told.
        os.fchmod(file, _MODE)


def _flock(file: int) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = _who(os.pread(file, _MAX_BYTES, 0))
        raise errors.LockedError(
            "another manager is at work on this node's GPUs" + (f": {holder}" if holder else ""),
            holder=holder,
        ) from error


def _is_at(path: pathlib.Path, file: int) -> bool:
    try:
        return os.path.samestat(os.lstat(path), os.fstat(file))
    except FileNotFoundError:
        return False


def _tell(file: int, text: str) -> None:
    """Replace the text; a disk that is full costs people the name of the holder, no more."""
    with contextlib.suppress(OSError):
        os.ftruncate(file, 0)
        os.pwrite(file, text.encode(), 0)


def _who(content: bytes) -> str:
    """Return who holds the lock as a part of a sentence; empty when the text does not say."""
    try:
        told = json.loads(content)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(told, dict):
        return ""
    found = [str(told.get(key, "?")) for key in ("program", "pid", "host", "doing", "since")]
    return "{} (pid {} on {}), {}, since {}".format(*found)
