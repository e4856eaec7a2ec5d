"""The ports of the machine: its files, lock, services, reboot and the owner's hooks."""

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from mig_manager.core.files import hook_files


class TextSource(Protocol):
    """A text that the owner wrote: a layout file or a checkpoint."""

    @property
    def name(self) -> str:
        """Its name in errors: the file name, or ``<stdin>``."""

    def read(self) -> str:
        """Return its text; ConfigError if it is missing, unreadable, too large, or not UTF-8."""


class NodeLock(Protocol):
    """The lock of this node's GPUs: one agent, boot unit or command changes them at a time."""

    def hold(
        self, doing: str, *, changes_gpus: bool = True
    ) -> contextlib.AbstractContextManager[None]:
        """Hold the lock in the context; other managers read its purpose (``doing``).

        They also read whether its owner ``changes_gpus``, or only observes them.

        Raises:
            LockedError: On entering, at once: another manager, which it names, has the lock.
        """


class SavedText(Protocol):
    """A text that is saved on the host over a reboot, and replaced as a whole.

    Each method raises ConfigError if the file cannot be accessed.
    """

    def read(self) -> str | None:
        """Return the text; None if there is none."""

    def save(self, text: str) -> None:
        """Replace the text, on disk before this returns; after an error the old one stays."""


class SavedFile(SavedText, Protocol):
    """A saved text that can end, or be invalid."""

    def clear(self) -> None:
        """Remove the text, if any."""

    def set_aside(self) -> str:
        """Rename the file of an invalid text; return the new path."""


class Reboot(Protocol):
    """Reboots the node; each method raises HostError REBOOT_REQUIRED if that is refused."""

    def check(self) -> None:
        """Check whether a reboot is allowed, before pods are evicted for it."""

    def request(self, why: str) -> None:
        """Request a reboot and return at once; SIGTERM follows soon."""


class HostServices(Protocol):
    """The machine's own services, through its init system.

    Each method raises HostError HOST_SERVICE_FAILED, with the init system's message, if it fails
    or does not answer in time.
    """

    def running(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the active and starting ones, and the units that stop with them, in stop order.

        A unit that stops with them and cannot be started again is an error.
        """

    def stop(self, name: str) -> None:
        """Stop a service, if it runs, and wait until it has stopped."""

    def may_have_stopped(self, name: str, listed: Collection[str]) -> bool:
        """Return whether a service is listed, or stops with a listed one."""

    def start(self, name: str) -> bool:
        """Start a service and wait until it runs; return False if it was running before."""


class Hooks(Protocol):
    """The owner's programs around a change."""

    @property
    def variables(self) -> Mapping[str, str]:
        """Environment variables for all hooks, besides the layout's name."""

    def read(self) -> hook_files.Table:
        """Return the current hooks; ConfigError if the file cannot be read or is invalid."""

    def missing(self, hook: hook_files.Hook) -> str:
        """Return why a hook's program cannot run here; empty if it can."""

    def run(
        self,
        point: hook_files.Point,
        hook: hook_files.Hook,
        environment: Mapping[str, str],
        *,
        check: Callable[[], object],
    ) -> None:
        """Run a hook to its end, and kill every process that it leaves behind.

        ``check`` is called repeatedly; its exceptions end the hook.

        Raises:
            HostError: HOOK_FAILED, with the hook's location and last output: it cannot run, fails,
                or takes too long.
        """
