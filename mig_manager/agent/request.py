"""The newest request, between the threads that watch and the loop that serves it."""

import threading

from mig_manager import errors

_MIN_PAUSE_S = 0.02
"""The shortest pause that a change in the cluster ends."""


class Inbox:
    """Keeps the newest request; an older one that was not served is dropped.

    A request is the label's value, or None without a label, together with a generation that grows
    whenever label or layout file changes.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._name: str | None = None
        self._is_label_known = False
        self._generation = 0
        self._needs_check = False
        self._is_stopping = False
        self._has_cluster_changed = False

    def put_label(self, name: str | None) -> None:
        """Set the label's value; the same value again is no new request.

        The first value counts even without a label, because a killed run may have left a journal.
        """
        with self._changed:
            if name != self._name or not self._is_label_known:
                self._name = name
                self._is_label_known = True
                self._generation += 1
                self._changed.notify_all()

    def put_file_change(self) -> None:
        """Make the request new, because a file that it depends on has changed.

        Before the label is known there is no request, and the first one reads the new file.
        """
        with self._changed:
            if self._is_label_known:
                self._generation += 1
                self._changed.notify_all()

    def put_gpu_change(self) -> None:
        """Ask for a drift check, because another program has changed the GPUs."""
        with self._changed:
            self._needs_check = True
            self._changed.notify_all()

    def put_cluster_change(self) -> None:
        """End the present pause, because a pod or the node has changed."""
        with self._changed:
            self._has_cluster_changed = True
            self._changed.notify_all()

    def stop(self) -> None:
        """End every wait, because the agent stops."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()

    @property
    def is_stopping(self) -> bool:
        """Whether the agent stops."""
        return self._is_stopping

    def next(self, seen: int, *, timeout_s: float | None = None) -> "Request | None":
        """Wait for a request that is newer than generation ``seen``.

        Args:
            seen: The generation of the last request that was served.
            timeout_s: When to check for drift; None: only when a GPU changes.

        Returns:
            The request; None when the agent stops and for a drift check.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_stopping or self._generation > seen or self._needs_check,
                timeout=timeout_s,
            )
            if self._is_stopping or self._generation <= seen:
                self._needs_check = False
                return None
            return Request(self, name=self._name, generation=self._generation)

    def end_of(self, generation: int) -> errors.Superseded | None:
        """Return why a request is superseded; None while it is not."""
        with self._changed:
            if self._is_stopping:
                return errors.Superseded(
                    "the agent is shutting down", is_replaced=False, is_stopping=True
                )
            if self._generation == generation:
                return None
            if self._name is None:
                return errors.Superseded("the label was removed", is_replaced=False)
            return errors.Superseded(
                f"label or config file changed; {self._name} is requested now", is_replaced=True
            )

    def wait(self, generation: int, seconds: float) -> None:
        """Sleep until ``generation`` is superseded, at most for ``seconds``."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over(generation), timeout=seconds)

    def pause(self, generation: int, seconds: float) -> None:
        """Sleep as ``wait``, but only until the cluster changes.

        A change since the last pause counts, too. The pause has a minimum, because changes often
        come in bursts.
        """
        first_s = min(seconds, _MIN_PAUSE_S)
        self.wait(generation, first_s)
        with self._changed:
            self._changed.wait_for(
                lambda: self._has_cluster_changed or self._is_over(generation),
                timeout=seconds - first_s,
            )
            self._has_cluster_changed = False

    def _is_over(self, generation: int) -> bool:
        return self._is_stopping or self._generation != generation


class Request:
    """One request of the label; implements ``ports.Cancellation``."""

    def __init__(self, inbox: Inbox, *, name: str | None, generation: int) -> None:
        self._inbox = inbox
        self.name = name
        self.generation = generation

    def check(self) -> None:
        """Raise ``Superseded`` if a newer request exists or the agent stops."""
        end = self._inbox.end_of(self.generation)
        if end is not None:
            raise end

    def wait(self, seconds: float) -> None:
        """Sleep; raise ``Superseded`` as soon as the request is superseded."""
        self._inbox.wait(self.generation, seconds)
        self.check()

    def pause(self, seconds: float) -> None:
        """Sleep until the cluster changes; raise ``Superseded`` as ``wait``."""
        self._inbox.pause(self.generation, seconds)
        self.check()
