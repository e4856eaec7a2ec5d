"""One slot between the watchers and the worker: the newest wish wins."""

import threading

from mig_manager import errors

_NEWS_REST_S = 0.02
"""The shortest pause that news end."""


class Mailbox:
    """Holds what is wanted now; older wishes that nobody took are gone.

    A wish is the label's value, or None when there is no label, together with a generation that
    grows whenever label or config file changed.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._name: str | None = None
        self._is_label_known = False
        self._generation = 0
        self._is_look_due = False
        self._is_stopping = False
        self._has_news = False

    def put_label(self, name: str | None) -> None:
        """Take over the label as the API shows it; the same value again is no new wish.

        The first look counts even without a label: a run that a crash interrupted may have left
        things to give back.
        """
        with self._changed:
            if name != self._name or not self._is_label_known:
                self._name = name
                self._is_label_known = True
                self._generation += 1
                self._changed.notify_all()

    def put_file_change(self) -> None:
        """Make the request new because the config file has changed.

        Before the node was read there is no request; the first one reads the file as it is then.
        """
        with self._changed:
            if self._is_label_known:
                self._generation += 1
                self._changed.notify_all()

    def put_gpu_change(self) -> None:
        """Have the GPUs looked at soon: somebody has changed them. It is no new wish."""
        with self._changed:
            self._is_look_due = True
            self._changed.notify_all()

    def put_news(self) -> None:
        """Have whoever waits for something in the cluster look again soon."""
        with self._changed:
            self._has_news = True
            self._changed.notify_all()

    def stop(self) -> None:
        """Wake everybody for a shutdown."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()

    @property
    def is_stopping(self) -> bool:
        """Whether a shutdown is under way."""
        return self._is_stopping

    def next(self, seen: int, *, timeout_s: float | None = None) -> "LabelWish | None":
        """Block until there is a wish newer than generation ``seen``.

        Args:
            seen: The generation of the last wish that was served.
            timeout_s: When to look at the GPUs again; None: not before somebody changes them.

        Returns:
            The wish; None at shutdown and when a look at the GPUs is due.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_stopping or self._generation > seen or self._is_look_due,
                timeout=timeout_s,
            )
            if self._is_stopping or self._generation <= seen:
                self._is_look_due = False
                return None
            return LabelWish(self, name=self._name, generation=self._generation)

    def end_of(self, generation: int) -> errors.Superseded | None:
        """Return why a wish has ended, or None while it stands."""
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
                f"label or config file changed; {self._name} is wanted now", is_replaced=True
            )

    def wait(self, generation: int, seconds: float) -> None:
        """Sleep, but wake when ``generation`` is no longer the newest or at shutdown."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over(generation), timeout=seconds)

    def pause(self, generation: int, seconds: float) -> None:
        """Do the same between two looks at the cluster.

        News from it, also since the last pause, end the pause early, but not at once: they often
        come in swarms.
        """
        rest_s = min(seconds, _NEWS_REST_S)
        self.wait(generation, rest_s)
        with self._changed:
            self._changed.wait_for(
                lambda: self._has_news or self._is_over(generation), timeout=seconds - rest_s
            )
            self._has_news = False

    def _is_over(self, generation: int) -> bool:
        return self._is_stopping or self._generation != generation


class LabelWish:
    """One wish of the label; implements ``ports.Cancellation``."""

    def __init__(self, mailbox: Mailbox, *, name: str | None, generation: int) -> None:
        self._mailbox = mailbox
        self.name = name
        self.generation = generation

    def check(self) -> None:
        """Raise ``Superseded`` when the wish has ended."""
        end = self._mailbox.end_of(self.generation)
        if end is not None:
            raise end

    def wait(self, seconds: float) -> None:
        """Sleep; raise ``Superseded`` as soon as the wish has ended."""
        self._mailbox.wait(self.generation, seconds)
        self.check()

    def pause(self, seconds: float) -> None:
        """Sleep, or until there is news; raise ``Superseded`` as soon as the wish has ended."""
        self._mailbox.pause(self.generation, seconds)
        self.check()
