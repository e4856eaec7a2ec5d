"""The config file: read it whole, and notice when its content changes."""

import contextlib
import hashlib
import pathlib
import threading
from collections.abc import Callable
from typing import Protocol

import structlog

from mig_manager.adapters.host import configfile

ConfigFile = configfile.ConfigFile

_log = structlog.get_logger()

_BLIND_POLL_S = 5.0
"""How often to look while inotify cannot tell us; it costs one small read."""
_MOST_POSTPONEMENTS = 10
"""A file that is written without end is looked at nevertheless."""
_STOP_S = 5.0


class ConfigWatch:
    """Calls back when the content of a file is another than before.

    Kubelet changes a mounted ConfigMap by swapping the symbolic link ``..data`` beside the file,
    so we watch the directory and compare content; any event there is only a reason to look. Since
    inotify can fall silent (the directory was removed, or made again), or not be had at all, we
    also look from time to time. A file that is missing for a while has not changed.
    """

    def __init__(
        self,
        path: str | pathlib.Path,
        on_change: Callable[[], None],
        *,
        debounce_s: float = 0.2,
        poll_s: float = 30.0,
    ) -> None:
        """Prepare to watch a file; it need not exist.

        Args:
            path: The file.
            on_change: Called in a thread of ours after the content has changed.
            debounce_s: How long nothing must happen before we look.
            poll_s: How often we look although nothing seems to happen.
        """
        self._path = pathlib.Path(path)
        self._on_change = on_change
        self._debounce_s = debounce_s
        self._poll_s = poll_s
        self._wake = threading.Event()
        self._is_stopping = False
        self._digest: bytes | None = None
        self._directory: _DirectoryWatch | None = None
        self._is_blind = False
        self._is_missing = False
        self._thread = threading.Thread(target=self._run, name="config-watch", daemon=True)

    def start(self) -> None:
        """Take the present content as known; every change after this is told."""
        self._arm()
        self._digest = self._look()
        self._thread.start()

    def stop(self) -> None:
        """End the watch; ``on_change`` is not called again."""
        self._is_stopping = True
        self._wake.set()
        self._thread.join(_STOP_S)
        self._disarm()

    def _run(self) -> None:
        while not self._is_stopping:
            is_armed = self._directory is not None
            pause_s = self._poll_s if is_armed else min(self._poll_s, _BLIND_POLL_S)
            if self._wake.wait(pause_s):
                self._settle()
            if not self._is_stopping:
                self._arm()
                self._compare()

    def _settle(self) -> None:
        """Wait until nothing has happened for a moment, for most writers write more than once."""
        for _ in range(_MOST_POSTPONEMENTS):
            self._wake.clear()
            if self._is_stopping or not self._wake.wait(self._debounce_s):
                return

    def _compare(self) -> None:
        digest = self._look()
        if digest is None or digest == self._digest or self._is_stopping:
            return
        self._digest = digest
        _log.info("config_file_changed", path=str(self._path), digest=digest.hex()[:12])
        try:
            self._on_change()
        except Exception:  # noqa: BLE001 - a listener's bug must not end the listening
            _log.exception("config_listener_error")

    def _look(self) -> bytes | None:
        """Return the content's digest; None while it cannot be read."""
        try:
            content = configfile.read_bytes(self._path)
        except OSError as err:
            if not self._is_missing:
                _log.warning("config_file_unreadable", path=str(self._path), detail=err.strerror)
            self._is_missing = True
            return None
        self._is_missing = False
        return hashlib.sha256(content).digest()

    def _arm(self) -> None:
        """Have inotify tell us, as far as it can."""
        if self._directory is not None and self._directory.is_alive:
            return
        self._disarm()
        # Not needed, and not cheap, for commands that only read a file.
        from mig_manager.adapters.host import directorywatch  # noqa: PLC0415

        try:
            self._directory = directorywatch.DirectoryWatch(self._path.parent, self._wake.set)
        except OSError as err:
            if not self._is_blind:
                _log.warning("config_watch_polls", path=str(self._path), detail=err.strerror)
            self._is_blind = True
        else:
            self._is_blind = False

    def _disarm(self) -> None:
        if self._directory is not None:
            with contextlib.suppress(OSError):
                self._directory.stop()
            self._directory = None


class _DirectoryWatch(Protocol):
    @property
    def is_alive(self) -> bool: ...

    def stop(self) -> None: ...
