"""One manager at a time on a node, by a lock on a file that all of them know.

The lock is ``flock(2)``'s: the kernel gives it back with the process however that ends, it keeps
threads of one process apart as well, since each opens the file anew, and scripts can take part
with ``flock(1)``. Whoever may open the file may lock it, also to read only (flock(2)): it is its
owner's alone. A second file beside it, which everybody may read, tells people what the holder
does. It decides nothing, for a manager that was killed leaves its own behind, and a script writes
none; which process holds the lock is in ``/proc/locks``.
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

from mig_manager import errors
from mig_manager.core import messages, timing

_MODE = 0o600
_HOLDER_MODE = 0o644
_CAREFUL = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""No child keeps the lock; a link leads nowhere; a pipe in our place does not hold us up."""
_MAX_BYTES = 4096
_MOST_OPENINGS = 10
"""How often a file that is removed under our hands is opened again."""
_FOLDER_MODE = 0o755
_PROC = pathlib.Path("/proc")

_log = structlog.get_logger()


class LockFile:
    """Implements ``ports.NodeLock``.

    Args:
        path: The file; it and its folder are made.
        program: What this manager is called, told to whoever is kept off.
        clock: Tells since when the lock is held.
        is_required: Whether to refuse the work where no file can be locked. A pod may lack the
            mount: its agent goes on alone, and says so once.
    """

    def __init__(
        self, path: pathlib.Path, *, program: str, clock: timing.Clock, is_required: bool
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
            _tell(self._path, self._holder(doing))
            yield
            _tell(self._path, "")
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
    """Return who holds a lock, without taking it from anybody; empty when nobody is seen to.

    Any user is told of a process that this PID namespace has. One of another namespace is seen by
    trying the lock, shared and for a moment, which only its owner may do; it is tried only where
    somebody holds it or was killed, since whoever has given it back has emptied the text.

    Raises:
        OSError: The file is there and cannot be looked at.
    """
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return ""
    text = _text(path)
    if pid := _locking_process(found):
        return _who(pid, text)
    if not text or not os.access(path, os.R_OK):
        return ""
    with _opened(path, os.O_RDONLY) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _who(0, text)
        return ""


def _lock(path: pathlib.Path) -> int:
    """Open the file and lock it.

    Raises:
        LockedError: Somebody else has.
        OSError: It cannot be made, opened or locked, or is not one that we may write to.
    """
    path.parent.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
    for _ in range(_MOST_OPENINGS):
        file = os.open(path, os.O_RDWR | os.O_CREAT | _CAREFUL, _MODE)
        try:
            _require_ours(file, _MODE)
            _flock(path, file)
            if _is_at(path, file):
                return file
        except BaseException:
            os.close(file)
            raise
        # Removed before we had it: who comes next would lock another file.
        os.close(file)
    raise OSError(errno.ESTALE, "it is removed again and again")


def _require_ours(file: int, mode: int) -> None:
    """Refuse what somebody may have put in our place to have us write to another file."""
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        raise OSError(errno.EINVAL, "it is no plain file of its own")
    if found.st_uid not in (0, os.geteuid()):
        raise OSError(errno.EPERM, f"it belongs to user {found.st_uid}")
    if found.st_uid == os.geteuid():
        # Whatever the umask was, and whatever an earlier version or a script made it.
        os.fchmod(file, mode)


def _flock(path: pathlib.Path, file: int) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = _who(_locking_process(os.fstat(file)), _text(path))
        raise errors.LockedError(
            f"another manager is at work on this node's GPUs: {holder}", owner=holder
        ) from error


def _is_at(path: pathlib.Path, file: int) -> bool:
    try:
        return os.path.samestat(os.lstat(path), os.fstat(file))
    except FileNotFoundError:
        return False


def _beside(path: pathlib.Path) -> pathlib.Path:
    return path.with_name(f"{path.name}.holder")


def _tell(path: pathlib.Path, text: str) -> None:
    """Replace the text; a disk that is full costs people the name of the holder, no more."""
    with (
        contextlib.suppress(OSError),
        _opened(_beside(path), os.O_RDWR | os.O_CREAT) as file,
    ):
        _require_ours(file, _HOLDER_MODE)
        os.ftruncate(file, 0)
        os.pwrite(file, text.encode(), 0)


def _text(path: pathlib.Path) -> bytes:
    with contextlib.suppress(OSError), _opened(_beside(path), os.O_RDONLY) as file:
        return os.pread(file, _MAX_BYTES, 0)
    return b""


@contextlib.contextmanager
def _opened(path: pathlib.Path, flags: int) -> Iterator[int]:
    file = os.open(path, flags | _CAREFUL, _HOLDER_MODE)
    try:
        yield file
    finally:
        os.close(file)


def _locking_process(found: os.stat_result) -> int:
    """Return the process that holds the lock on a file; 0 if this PID namespace has none.

    A line is ``1: FLOCK  ADVISORY  WRITE 16076 fe:00:10011606 0 EOF`` (proc_locks(5)), with the
    file's device in hexadecimal. Lines with an arrow are of those who wait.
    """
    device = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    try:
        lines = (_PROC / "locks").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return 0
    for line in lines:
        _number, kind, *words = [*line.split(), ""]
        if kind == "FLOCK" and words[3:4] == [device] and words[2].isdigit():
            return int(words[2])
    return 0


def _who(pid: int, text: bytes) -> str:
    """Return who holds the lock, as a part of a sentence.

    Args:
        pid: The holder's, as ``/proc/locks`` has it; 0 if it is not there.
        text: What the last holder that is a manager of ours wrote.
    """
    told = _parsed(text)
    if told and (not pid or told.get("pid") == _own_pid(pid)):
        found = {"pid": "?"} | told | ({"pid": pid} if pid else {})
        values = [str(found.get(key, "?")) for key in ("program", "pid", "host", "doing", "since")]
        return "{} (pid {} on {}), {}, since {}".format(*values)
    if not pid:
        return "a process that does not say who it is"
    try:
        name = messages.printable((_PROC / f"{pid}/comm").read_text(errors="replace").strip(), "?")
    except OSError:
        name = "a process"
    return f"{name} (pid {pid})"


def _own_pid(pid: int) -> int:
    """Return a process's PID as itself sees it, in the innermost namespace that it is in."""
    try:
        status = (_PROC / f"{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return pid
    named = [line.split() for line in status.splitlines() if line.startswith("NSpid:")]
    return int(named[0][-1]) if named else pid


def _parsed(content: bytes) -> dict[str, object]:
    try:
        told = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return told if isinstance(told, dict) else {}
