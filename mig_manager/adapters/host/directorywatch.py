"""Hear of changes in one directory through watchdog; the only importer of it."""

import pathlib
from collections.abc import Callable

import watchdog.events
import watchdog.observers

_READING = frozenset(
    {watchdog.events.EVENT_TYPE_OPENED, watchdog.events.EVENT_TYPE_CLOSED_NO_WRITE}
)
_STOP_S = 1.0


class DirectoryWatch:
    """Calls back after anything but reading happens in a directory, not in those below it."""

    def __init__(self, directory: pathlib.Path, on_event: Callable[[], None]) -> None:
        """Begin to watch.

        Args:
            directory: It must exist.
            on_event: Called in a thread of watchdog's; it must not block.

        Raises:
            OSError: There is no such directory, or the user's inotify instances or watches
                (``fs.inotify.max_user_instances``, ``max_user_watches``) are used up.
        """
        # Resolved, because watchdog does not follow a symbolic link but watches the link itself.
        place = str(directory.resolve(strict=True))
        self._observer = watchdog.observers.Observer()
        self._observer.schedule(_Handler(on_event), place, recursive=False)
        try:
            self._observer.start()
        except OSError:
            # Otherwise the threads that did start would outlive the failure.
            self.stop()
            raise

    @property
    def is_alive(self) -> bool:
        """Whether events can still come.

        The emitter ends when its directory is removed, while the observer knows nothing of it.
        """
        emitters = self._observer.emitters
        return bool(emitters) and all(emitter.is_alive() for emitter in emitters)

    def stop(self) -> None:
        """End the watch and its threads."""
        self._observer.stop()
        if self._observer.is_alive():
            self._observer.join(_STOP_S)


class _Handler(watchdog.events.FileSystemEventHandler):
    def __init__(self, on_event: Callable[[], None]) -> None:
        self._on_event = on_event

    def on_any_event(self, event: watchdog.events.FileSystemEvent) -> None:
        """Pass all but reading on: our own reading must not lead to more of it."""
        if event.event_type not in _READING:
            self._on_event()
