"""Watch the content of files; the only user of watchdog."""

import contextlib
import hashlib
import os
import pathlib
import threading
from collections.abc import Callable

import structlog
import watchdog.events
import watchdog.observers

from mig_manager.adapters.host import files

_READING = frozenset(
    {watchdog.events.EVENT_TYPE_OPENED, watchdog.events.EVENT_TYPE_CLOSED_NO_WRITE}
)
_NO_INOTIFY_POLL_S = 5.0  # poll interval while inotify is unavailable; a poll costs one small read
_MAX_POSTPONEMENTS = 10  # a file that never stops changing is read after this many debounce times
_STOP_S = 5.0
_OBSERVER_STOP_S = 1.0

_log = structlog.get_logger()


class FileWatch:
    """Calls back when the content of a file has changed.

    Kubelet changes a mounted ConfigMap by swapping the symbolic link ``..data`` beside the file,
    so we watch the directory and compare content. The file is read ``debounce_s`` after the last
    event. It is also polled every ``poll_s``, because inotify can be unavailable, or fall silent
    when the directory is replaced. A temporarily missing file does not count as changed.
    ``on_change`` is called in the watch's thread.
    """

    def __init__(
        self,
        path: str | pathlib.Path,
        on_change: Callable[[], None],
        *,
        debounce_s: float = 0.2,
        poll_s: float = 30.0,
    ) -> None:
        self._path = pathlib.Path(path)
        self._on_change = on_change
        self._debounce_s = debounce_s
        self._poll_s = poll_s
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._digest: bytes | None = None
        self._directory: DirectoryWatch | None = None
        self._has_warned = False
        self._is_missing = False
        self._thread = threading.Thread(target=self._run, name="config-watch", daemon=True)

    def start(self) -> None:
        """Read the current content, and report every later change."""
        self._watch_directory()
        self._digest = self._read()
        self._thread.start()

    def stop(self) -> None:
        """End the watch; ``on_change`` is not called again."""
        self._stopping.set()
        self._wake.set()
        self._thread.join(_STOP_S)
        self._close_directory()

    def _run(self) -> None:
        while not self._stopping.is_set():
            has_inotify = self._directory is not None
            pause_s = self._poll_s if has_inotify else min(self._poll_s, _NO_INOTIFY_POLL_S)
            if self._wake.wait(pause_s):
                # Wait until events stop, because most writers write more than once.
                for _ in range(_MAX_POSTPONEMENTS):
                    self._wake.clear()
                    if self._stopping.is_set() or not self._wake.wait(self._debounce_s):
                        break
            if self._stopping.is_set():
                return
            self._watch_directory()
            digest = self._read()
            if digest is None or digest == self._digest or self._stopping.is_set():
                continue
            self._digest = digest
            _log.info("config_file_changed", path=str(self._path), digest=digest.hex()[:12])
            try:
                self._on_change()
            except Exception:  # noqa: BLE001 - a bug of the callback must not end the watch
                _log.exception("config_listener_error")

    def _read(self) -> bytes | None:
        """Return the content's digest; None while the file is unreadable."""
        try:
            content = files.read_bytes(self._path)
        except OSError as error:
            if not self._is_missing:
                _log.warning("config_file_unreadable", path=str(self._path), detail=error.strerror)
            self._is_missing = True
            return None
        self._is_missing = False
        return hashlib.sha256(content).digest()

    def _watch_directory(self) -> None:
        if self._directory is not None and self._directory.is_alive:
            return
        self._close_directory()
        try:
            self._directory = DirectoryWatch(self._path.parent, self._wake.set)
        except OSError as error:
            if not self._has_warned:
                _log.warning("config_watch_polls", path=str(self._path), detail=error.strerror)
            self._has_warned = True
        else:
            self._has_warned = False

    def _close_directory(self) -> None:
        if self._directory is not None:
            with contextlib.suppress(OSError):
                self._directory.stop()
            self._directory = None


class DirectoryWatch(watchdog.events.FileSystemEventHandler):
    """Calls back after every event except reads in a directory, without subdirectories."""

    def __init__(self, directory: pathlib.Path, on_event: Callable[[], None]) -> None:
        """Start to watch; ``on_event`` is called in a thread of watchdog's and must not block.

        Raises:
            OSError: The directory does not exist, or the user's inotify instances or watches
                (``fs.inotify.max_user_instances``, ``max_user_watches``) are used up.
        """
        self._on_event = on_event
        # Resolved, because watchdog watches a symbolic link itself and does not follow it.
        resolved = os.path.realpath(directory, strict=True)
        self._observer = watchdog.observers.Observer()
        self._observer.schedule(self, resolved, recursive=False)
        try:
            self._observer.start()
        except OSError:
            # Otherwise the threads that started would outlive the failure.
            self.stop()
            raise

    @property
    def is_alive(self) -> bool:
        """Whether events can still come: the emitter ends when its directory is removed."""
        emitters = self._observer.emitters
        return bool(emitters) and all(emitter.is_alive() for emitter in emitters)

    def stop(self) -> None:
        """End the watch and its threads."""
        self._observer.stop()
        if self._observer.is_alive():
            self._observer.join(_OBSERVER_STOP_S)

    def on_any_event(self, event: watchdog.events.FileSystemEvent) -> None:
        """Report all events except reads, because our own reads would cause more events."""
        if event.event_type not in _READING:
            self._on_event()
