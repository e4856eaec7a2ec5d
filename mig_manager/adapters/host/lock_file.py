"""Allow one manager at a time on a node, with a lock on a shared file.

The lock is ``flock(2)``'s. The kernel releases it at the end of the process, also after a crash.
It excludes threads of one process too, because every thread opens the file itself, and scripts can
use it with ``flock(1)``. A process that can open the file can lock it, even read-only, so only the
file's owner may open it.

A second file beside it, readable by all, describes the manager that has the lock. It decides
nothing: a killed manager leaves its description, and a script writes none. ``/proc/locks`` shows
which process has the lock.
"""

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import pathlib
import socket
import stat
from collections.abc import Collection, Iterator
from typing import NamedTuple

import structlog

from mig_manager import errors
from mig_manager.adapters.host import procfs
from mig_manager.core import messages, timing
from mig_manager.core.files import json_text

_MODE = 0o600
_DESCRIPTION_MODE = 0o644
_CAREFUL = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""Children do not inherit the lock, links are not followed, and a pipe in its place does not
block."""
_MAX_BYTES = 4096
_PROBE_PAUSES = 5
_PROBE_PAUSE_S = 0.01
_MAX_OPENINGS = 10
_FOLDER_MODE = 0o755

_log = structlog.get_logger()


class Manager(NamedTuple):
    """The process that has a lock."""

    description: str
    may_change_gpus: bool = True  # also where no description says so


@dataclasses.dataclass(eq=False, repr=False, match_args=False)
class LockFile:
    """Implements ``ports.NodeLock``; makes the file and its folder."""

    path: pathlib.Path
    _: dataclasses.KW_ONLY
    program: str  # the description of this manager for others
    clock: timing.Clock
    is_required: bool
    """If not (a pod may lack the mount), an agent that cannot lock the file works without, and
    warns once."""
    _has_warned: bool = dataclasses.field(default=False, init=False)

    @contextlib.contextmanager
    def hold(self, doing: str, *, changes_gpus: bool = True) -> Iterator[None]:
        """Exclude every other manager during the context, and show them ``doing``.

        Raises:
            LockedError: At once, if another manager has the lock.
            UsageError: The file cannot be locked, but is required.
        """
        try:
            file = self._lock_unless_probed()
        except OSError as error:
            why = error.strerror or str(error)
            if self.is_required:
                raise errors.UsageError(
                    f"cannot lock {self.path}, which excludes a second manager: {why}",
                    remedy="Run as root, or name another file with --lock-file.",
                ) from error
            if not self._has_warned:
                _log.warning("lock_unavailable", path=str(self.path), detail=why)
            self._has_warned = True
            file = None
        if file is None:
            yield
            return
        description = {
            "program": self.program,
            "pid": os.getpid(),
            "doing": doing,
            "changes_gpus": changes_gpus,
            "since": self.clock.now_iso(),
            "host": socket.gethostname(),
        }
        try:
            _describe(self.path, json.dumps(description) + "\n")
            yield
        finally:
            _describe(self.path, "")
            # A starting child has a copy for a moment; closing ours is not enough.
            fcntl.flock(file, fcntl.LOCK_UN)
            os.close(file)

    def _lock_unless_probed(self) -> int:
        """Lock the file; retry while ``manager`` of another process probes it for a moment."""
        for _ in range(_PROBE_PAUSES):
            try:
                return _lock(self.path)
            except errors.LockedError:
                # Other PID namespaces are not visible: a lock of theirs may be such a probe.
                # A file removed meanwhile is made again.
                with contextlib.suppress(FileNotFoundError):
                    if _locking_process(self.path.stat(), kinds=("WRITE",)):
                        raise
            self.clock.wait(_PROBE_PAUSE_S)
        return _lock(self.path)


def manager(path: pathlib.Path) -> Manager | None:
    """Return which process has a lock, without taking it; None if none is visible.

    Every user can see a process of this PID namespace. A process of another namespace is detected
    by trying the lock, shared and for a moment, which only the file's owner may do. It is tried
    only if the description is not empty: a manager that releases the lock empties it.

    Raises:
        OSError: The file exists and cannot be inspected.
    """
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return None
    text = _text(path)
    if pid := _locking_process(status):
        return _who(pid, text)
    if not text or not os.access(path, os.R_OK):
        return None
    with _opened(path, os.O_RDONLY) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _who(0, text)
        return None


def _lock(path: pathlib.Path) -> int:
    """Open the file and lock it; LockedError, or OSError if that is impossible or unsafe."""
    path.parent.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
    for _ in range(_MAX_OPENINGS):
        file = os.open(path, os.O_RDWR | os.O_CREAT | _CAREFUL, _MODE)
        try:
            _require_ours(file, _MODE)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.lstat(path), os.fstat(file)):
                    return file
            # Removed before we locked it: the next manager would lock another file.
            os.close(file)
        except BlockingIOError as error:
            other = _who(_locking_process(os.fstat(file)), _text(path))
            os.close(file)
            raise errors.LockedError(
                f"another manager is at work on this node's GPUs: {other.description}"
            ) from error
        except BaseException:
            os.close(file)
            raise
    raise OSError(errno.ESTALE, "it is removed repeatedly")


def _require_ours(file: int, mode: int) -> None:
    """Refuse a planted file, such as a hard link to another file."""
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        raise OSError(errno.EINVAL, "it is not a plain file with one name")
    if status.st_uid not in (0, os.geteuid()):
        raise OSError(errno.EPERM, f"it belongs to user {status.st_uid}")
    if status.st_uid == os.geteuid():
        # Correct a mode set by the umask or a script.
        os.fchmod(file, mode)


def _beside(path: pathlib.Path) -> pathlib.Path:
    return path.with_name(f"{path.name}.owner")


def _describe(path: pathlib.Path, text: str) -> None:
    """Replace the description; a full disk costs only this description."""
    with (
        contextlib.suppress(OSError),
        _opened(_beside(path), os.O_RDWR | os.O_CREAT) as file,
    ):
        _require_ours(file, _DESCRIPTION_MODE)
        os.ftruncate(file, 0)
        os.pwrite(file, text.encode(), 0)


def _text(path: pathlib.Path) -> bytes:
    with contextlib.suppress(OSError), _opened(_beside(path), os.O_RDONLY) as file:
        return os.pread(file, _MAX_BYTES, 0)
    return b""


@contextlib.contextmanager
def _opened(path: pathlib.Path, flags: int) -> Iterator[int]:
    file = os.open(path, flags | _CAREFUL, _DESCRIPTION_MODE)
    try:
        yield file
    finally:
        os.close(file)


def _locking_process(file: os.stat_result, *, kinds: Collection[str] = ("READ", "WRITE")) -> int:
    """Return the process of this PID namespace that has the lock on a file; 0 if none.

    A line is ``1: FLOCK  ADVISORY  WRITE 16076 fe:00:10011606 0 EOF`` (proc_locks(5)), with the
    file's device in hexadecimal. Lines with an arrow are waiting processes.
    """
    device = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}"
    for line in procfs.text(procfs.ROOT / "locks").splitlines():
        _number, kind, *words = [*line.split(), ""]
        is_here = kind == "FLOCK" and words[3:4] == [device] and words[1] in kinds
        if is_here and words[2].isdigit():
            return int(words[2])
    return 0


def _who(pid: int, text: bytes) -> Manager:
    """Describe the process that has the lock; ``pid`` is 0 if ``/proc/locks`` lacks it."""
    try:
        fields = json_text.parse_object(text)
    except ValueError:
        fields = {}
    # A killed manager may have left the description.
    if fields and (not pid or fields.get("pid") == _own_pid(pid)):
        fields |= {"pid": pid} if pid else {}
        keys = ("program", "pid", "host", "doing", "since")
        values = [str(fields.get(key, "?")) for key in keys]
        described = "{} (pid {} on {}), {}, since {}".format(*values)
        return Manager(described, may_change_gpus=fields.get("changes_gpus") is not False)
    if not pid:
        return Manager("a process that left no description")
    name = messages.printable(procfs.text(procfs.ROOT / f"{pid}/comm").strip(), "?")
    return Manager(f"{name or 'a process'} (pid {pid})")


def _own_pid(pid: int) -> int:
    """Return a process's PID in its own, the innermost, PID namespace."""
    status = procfs.text(procfs.ROOT / f"{pid}/status")
    named = [line.split() for line in status.splitlines() if line.startswith("NSpid:")]
    return int(named[0][-1]) if named else pid
