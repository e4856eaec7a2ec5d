"""Pass the newest request from the watches to the loop; a newer one supersedes a run."""

import dataclasses
import threading
from collections.abc import Callable

from mig_manager import errors
from mig_manager.agent import layout_request
from mig_manager.core import ports
from mig_manager.core.layout import custom_layouts

_MIN_PAUSE_S = 0.02  # the minimum pause; a change in the cluster does not shorten it


class Inbox:
    """Keeps the newest request; drops older ones that were not served.

    A request is the label's value (None without a label), the content of ``custom``, and a
    generation. The generation grows when label, content, a file or the Node object changes; only a
    change of label or content is a new request.
    """

    def __init__(self, on_check: Callable[[], object] = lambda: None) -> None:
        self._on_check = on_check  # called by every check of a request
        self._changed = threading.Condition()
        self._latest = ReceivedRequest(inbox=self)
        self._needs_check = False
        self.is_stopping = False
        self._has_cluster_changed = False
        self.is_on_demand = False
        self._has_use_changed = False

    def put_label(
        self,
        name: str | None,
        *,
        node_uid: str = "",
        custom: custom_layouts.CustomRequest | None = None,
    ) -> None:
        """Set the label's value and the content of ``custom``; equal ones are no new request.

        The first value counts even without a label: an interrupted run may have left a journal.
        The same value on another Node object is served again: kubelet has re-registered the
        deleted node, and the new object lacks all published data.
        """
        with self._changed:
            before = self._latest
            if custom and before.request.custom == dataclasses.replace(custom, is_on_demand=True):
                # The owner ended on-demand partitioning: this run still must not evict pods.
                custom = before.request.custom
            request = layout_request.Request(layout=name or "", custom=custom)
            is_first = before.generation == 0
            is_new = is_first or request != before.request
            after = dataclasses.replace(
                before,
                request=request,
                node_uid=node_uid or before.node_uid,
                since=before.generation + 1 if is_new and not is_first else before.since,
            )
            self._latest = after
            if is_new or (before.node_uid and before.node_uid != after.node_uid):
                self._renew()

    def put_file_change(self) -> None:
        """Serve the request again, because a file that it depends on has changed.

        Before the label is known there is no request, and the first one reads the new file.
        """
        with self._changed:
            if self._latest.generation > 0:
                self._renew()

    def put_gpu_change(self) -> None:
        """Request a drift check, because another program has changed the GPUs."""
        with self._changed:
            self._needs_check = True
            self._changed.notify_all()

    def put_cluster_change(self) -> None:
        """End the current pause, because a pod or the node has changed."""
        with self._changed:
            self._has_cluster_changed = True
            self._changed.notify_all()

    def put_on_demand(self, *, is_on_demand: bool) -> None:
        """Set whether the node has on-demand partitioning."""
        with self._changed:
            if is_on_demand is not self.is_on_demand:
                self.is_on_demand = is_on_demand
                self.put_use_change()

    def put_use_change(self) -> None:
        """Record that the use of the GPUs may have changed."""
        with self._changed:
            self._has_use_changed = True
            self._changed.notify_all()

    def take_use_change(self) -> bool:
        """Return whether the use of the GPUs may have changed since the last call."""
        with self._changed:
            has_changed, self._has_use_changed = self._has_use_changed, False
            return has_changed

    def stop(self) -> None:
        """End every wait, because the agent stops."""
        with self._changed:
            self.is_stopping = True
            self._changed.notify_all()

    def next(self, generation: int) -> "ReceivedRequest | None":
        """Return the request if it is newer than the ``generation`` of the last one.

        Returns None when the agent stops, and for a drift check.
        """
        with self._changed:
            if self.is_stopping or self._latest.generation == generation:
                self._needs_check = False
                return None
            return self._latest

    def is_over(self, generation: int, *, at_rest: bool = False) -> bool:
        """Return whether ``generation`` is superseded, or at rest, a drift check is needed."""
        has_ended = self.is_stopping or self._latest.generation != generation
        return has_ended or (at_rest and self._needs_check)

    def wait_until_superseded(
        self, generation: int, *, at_rest: bool = False, timeout_s: float | None = None
    ) -> bool:
        """Wait until a request is superseded; return False at the time-out or a change of use.

        At rest a changed GPU also ends the wait, because it requires a drift check.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self.is_over(generation, at_rest=at_rest) or self._has_use_changed,
                timeout=timeout_s,
            )
            return self.is_over(generation, at_rest=at_rest)

    def check(self, generation: int) -> None:
        """Raise ``Superseded`` if ``generation`` is superseded."""
        self._on_check()
        with self._changed:
            latest = self._latest
            by = errors.SupersededBy
            if self.is_stopping:
                raise errors.Superseded("the agent is shutting down", by.STOP)
            if latest.generation == generation:
                return
            if not latest.request.layout:
                raise errors.Superseded("the label was removed", by.NO_LAYOUT)
            raise errors.Superseded(
                f"label, layout or Node object changed; {latest.request.layout} is requested now",
                by.SAME_LAYOUT if latest.since <= generation else by.OTHER_LAYOUT,
            )

    def wait(self, generation: int, seconds: float) -> None:
        """Sleep until ``generation`` is superseded, at most for ``seconds``."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_over(generation), timeout=seconds)

    def pause(self, generation: int, seconds: float) -> None:
        """Sleep as ``wait``, but only until the cluster changes.

        A change since the last pause also counts. The pause has a minimum, because changes often
        come in bursts.
        """
        first_s = min(seconds, _MIN_PAUSE_S)
        self.wait(generation, first_s)
        with self._changed:
            self._changed.wait_for(
                lambda: self._has_cluster_changed or self.is_over(generation),
                timeout=seconds - first_s,
            )
            self._has_cluster_changed = False

    def _renew(self) -> None:
        self._latest = dataclasses.replace(self._latest, generation=self._latest.generation + 1)
        self._changed.notify_all()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedRequest:
    """A request by label and annotation; as ``ports.Cancellation`` a newer one supersedes it."""

    inbox: Inbox
    request: layout_request.Request = dataclasses.field(default_factory=layout_request.Request)
    generation: int = 0  # 0: the label is not known yet
    since: int = 0
    """The generation in which label or annotation changed; 0: they are as this process first
    read them. Later generations are changed files and new Node objects."""
    node_uid: str = ""

    def check(self) -> None:
        """Raise ``Superseded`` if a newer request exists or the agent stops."""
        self.inbox.check(self.generation)

    def wait(self, seconds: float) -> None:
        """Sleep; raise ``Superseded`` as soon as the request is superseded."""
        self.inbox.wait(self.generation, seconds)
        self.check()

    def pause(self, seconds: float) -> None:
        """Sleep until the cluster changes; raise ``Superseded`` if the request is superseded."""
        self.inbox.pause(self.generation, seconds)
        self.check()


class Uninterrupted:
    """Implements ``ports.Cancellation`` for work that no request supersedes, like a rollback."""

    def __init__(self, deps: ports.Dependencies) -> None:
        self._deps = deps

    def check(self) -> None:
        """Report that work goes on."""
        self._deps.telemetry.still_working()

    def wait(self, seconds: float) -> None:
        """Sleep."""
        self._deps.telemetry.still_working()
        self._deps.clock.wait(seconds)

    def pause(self, seconds: float) -> None:
        """Sleep."""
        self.wait(seconds)
