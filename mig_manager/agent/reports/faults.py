"""Report faults of the GPUs on the Node: the condition ``GpuRecoveryNeeded``, and Events."""

import collections
from collections.abc import Collection, Iterable

import structlog

from mig_manager import reasons
from mig_manager.core import messages, model, ports
from mig_manager.core.records import gpu_recovery

_XID_PAUSE_S = 3600.0
"""After this time the same Xid of a GPU gets another Event: a GPU may repeat it every second."""
_MAX_XIDS = 100
_ALL_LOST = frozenset({("", None)})  # published while no GPU can be observed

_log = structlog.get_logger()


class FaultReport:
    """Publishes what changes of the GPUs' faults; the layout's outcome does not depend on it."""

    def __init__(self, deps: ports.Dependencies, *, is_on: bool) -> None:
        self._deps = deps
        self.is_on = is_on
        self._faults: frozenset[tuple[str, model.RecoveryAction | None]] = frozenset()
        # A deque is safe to append to from another thread.
        self._xids: collections.deque[tuple[str, int]] = collections.deque(maxlen=_MAX_XIDS)
        """The latest critical errors that were not published."""
        self._published_s: dict[tuple[str, int], float] = {}

    def add_xids(self, xids: Iterable[tuple[str, int]]) -> None:
        """Count critical errors of GPUs, to be published by the next check; for any thread."""
        for uuid, xid in xids:
            self._deps.telemetry.xid_reported(uuid, xid)
            self._xids.append((uuid, xid))

    def publish_failure(self, reason: reasons.Reason | None, message: str) -> bool:
        """Publish that no GPU can be observed; return whether that is due to the GPUs."""
        is_loss = reason in gpu_recovery.LOSSES
        if self.is_on and is_loss:
            self._deps.node.set_condition(gpu_recovery.none_reachable(message))
            self._publish_xids()
            self._faults = _ALL_LOST
        return is_loss

    def publish(
        self, gpus: model.ObservedGpus, note: str = "", resetting: Collection[str] = ()
    ) -> None:
        """Publish the faults of observed GPUs; do nothing for an empty observation.

        ``note`` and ``resetting`` are as in ``gpu_recovery.condition``.
        """
        if not self.is_on or not (gpus or gpus.unreachable):
            return
        condition = gpu_recovery.condition(gpus, note, resetting)
        self._deps.node.set_condition(condition)
        self._publish_xids()
        faulty = [gpu for gpu in (*gpus, *gpus.unreachable) if gpu_recovery.fault(gpu)]
        faults = frozenset((gpu.uuid, gpu.recovery_action) for gpu in faulty)
        if faults == self._faults:
            return
        self._faults = faults
        if faults:
            named = [
                f"GPU {gpu.index}: {gpu.recovery_action.value}"
                for gpu in faulty
                if gpu.recovery_action
            ]
            _log.warning("gpu_recovery_needed", gpus=named)
            message = condition.message
            self._deps.node.emit(reason="GpuRecoveryNeeded", message=message, is_warning=True)
        elif not condition.is_true:
            _log.info("gpu_recovered")
            message = condition.message
            self._deps.node.emit(reason="GpuRecovered", message=message, is_warning=False)

    def _publish_xids(self) -> None:
        now_s = self._deps.clock.monotonic()
        noted = dict.fromkeys(self._xids.popleft() for _ in range(len(self._xids)))
        new = [
            event
            for event in noted
            if now_s - self._published_s.get(event, -_XID_PAUSE_S) >= _XID_PAUSE_S
        ]
        if not new:
            return
        self._published_s |= dict.fromkeys(new, now_s)
        named = messages.list_names([f"Xid {xid} of {uuid}" for uuid, xid in new])
        message = f"The driver reports {named}; NVIDIA's Xid catalogue explains each."
        self._deps.node.emit(reason="GpuXid", message=message, is_warning=True)
