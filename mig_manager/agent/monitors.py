"""Bring the monitors back after a change: one after the other, each given time to get ready.

By then the layout is in force and proven, so nothing here makes the run fail. A monitor that does
not come back is a warning; a newer wish, or an API that fails, only ends the waiting, and the end
of the run gives back whatever is left.
"""

import contextlib
from collections.abc import Iterator

import structlog

from mig_manager import errors
from mig_manager.agent import gpu_clients, record
from mig_manager.core import ports, timing
from mig_manager.core.node import clients, cluster

_log = structlog.get_logger()


class Monitors:
    """The daemons of a node that watch its GPUs, and the pods that vouch for them."""

    def __init__(
        self,
        node: ports.Node,
        workloads: ports.Workloads,
        clock: timing.Clock,
        *,
        timeout_s: float,
        pace: timing.Backoff,
    ) -> None:
        self._node = node
        self._workloads = workloads
        self._clock = clock
        self._timeout_s = timeout_s
        self._pace = pace

    def resume(
        self, paused: gpu_clients.Paused, journal: record.Record, wish: ports.Cancellation
    ) -> None:
        """Give back the deploy labels one by one, and have the operator validate anew.

        Args:
            paused: What the pause found.
            journal: What is still taken.
            wish: Once it ends, nobody is waited for any more.
        """
        try:
            self._resume_each(paused, journal, wish)
        except errors.Superseded as end:
            _log.info("monitors_not_waited_for", why=end.why)
        except errors.ClusterError as error:
            _log.warning("monitors_not_waited_for", error=error.message)
        self._look_again(paused)

    def _resume_each(
        self, paused: gpu_clients.Paused, journal: record.Record, wish: ports.Cancellation
    ) -> None:
        waited_for = [key for key in journal.journal.paused_labels if key in paused.staffed]
        for number, key in enumerate(waited_for):
            also = () if number else journal.journal.paused_labels.keys() - waited_for
            is_ours = key in journal.resume({key, *also})
            if is_ours and not self._is_back(key, wish):
                self._node.emit(
                    reason="MonitorNotReady",
                    message=f"{key}: no pod is ready after {self._timeout_s:g} s",
                    is_warning=True,
                )

    def _is_back(self, key: str, wish: ports.Cancellation) -> bool:
        deadline = self._clock.monotonic() + self._timeout_s
        turn = 0
        while True:
            is_late = self._clock.monotonic() >= deadline
            seen = None if is_late else self._workloads.watched()
            may_be_ready = seen is None or _are_ready(seen, key)
            if may_be_ready and _are_ready(self._workloads.list(), key):
                return True
            if is_late:
                return False
            wish.pause(self._pace.delay_s(turn))
            turn += 1

    def _look_again(self, paused: gpu_clients.Paused) -> None:
        """Delete the pods whose successors shall look at the new devices."""
        # Feature discovery that a label places is new already; another must be made so.
        is_old = clients.DISCOVERY_DEPLOY_LABEL not in paused.staffed
        with _leniently():
            for pod in self._workloads.list():
                is_meant = clients.is_validator(pod) or (
                    is_old and clients.is_feature_discovery(pod)
                )
                if is_meant and not pod.is_terminating:
                    with _leniently():
                        self._workloads.delete(pod)


def _are_ready(pods: tuple[cluster.Pod, ...], key: str) -> bool:
    placed = clients.gated_by(pods, (key,))
    return bool(placed) and all(pod.is_ready and not pod.is_terminating for pod in placed)


@contextlib.contextmanager
def _leniently() -> Iterator[None]:
    try:
        yield
    except errors.ClusterError as error:
        _log.warning("pod_not_restarted", error=error.message)
