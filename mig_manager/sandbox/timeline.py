"""Events of the demo in lines: who did what, and when."""

import json
import threading
from collections.abc import Callable

from mig_manager.core import timing
from mig_manager.core.display import styles
from mig_manager.core.objects import well_known
from mig_manager.sandbox.node import cluster_view, objects

_WHO_TONES = {
    "you": styles.Tone.STRONG,
    "agent": styles.Tone.CYAN,
    "pods": styles.Tone.WARN,
    "plugin": styles.Tone.MAGENTA,
    "kubelet": styles.Tone.BLUE,
}
_STATE_TONES = {"success": styles.Tone.GOOD, "failed": styles.Tone.BAD}


class Timeline:
    """Writes a line for every change of an API object, on the watches' threads.

    Args:
        say: Writes a line.
        style: Of the output.
        clock: For the times.
        fail: Called on a watch's thread with an exception of ``say``.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        style: styles.Style,
        clock: timing.Clock,
        *,
        fail: Callable[[Exception], None],
    ) -> None:
        self._say = say
        self._fail = fail
        self._style = style
        self._clock = clock
        self._lock = threading.RLock()
        self._began_s: float | None = None
        self._last: dict[str, str] = {}

    def begin(self) -> None:
        """Start the clock and the lines; the state so far gets no line."""
        with self._lock:
            self._began_s = self._clock.monotonic()

    def end(self) -> None:
        """Write no more lines."""
        with self._lock:
            self._began_s = None

    def add(self, who: str, text: str, tone: styles.Tone = styles.Tone.PLAIN) -> None:
        """Write one line."""
        with self._lock:
            if self._began_s is None:
                return
            at = f"{self._clock.monotonic() - self._began_s:7.2f} s"
            name = self._style.paint(f"{who:<8}", _WHO_TONES[who])
            columns = len(f"{at}  {who:<8} ")
            # Instead of the start, whose colours have no width and whose spaces would be dropped.
            lines = self._style.fit("x" * columns + text, further=" " * columns)
            line = self._style.paint(self._style.plain(lines[columns:]), tone)
            self._say(f"{self._style.paint(at, styles.Tone.FAINT)}  {name} {line}")

    def receive(self, kind: cluster_view.WatchedKind, obj: objects.JsonObject) -> None:
        """Write lines for an added, changed or deleted object; raises nothing."""
        try:
            with self._lock:
                if kind is cluster_view.WatchedKind.NODE:
                    self._receive_node(obj)
                elif kind is cluster_view.WatchedKind.POD:
                    self._receive_pod(obj)
        except Exception as error:  # noqa: BLE001 - the main thread raises it
            self._fail(error)

    def _receive_node(self, node: objects.JsonObject) -> None:
        is_tainted = any(
            taint["key"] == well_known.RECONFIGURING_TAINT for taint in objects.taints(node)
        )
        if self._is_new("taint", str(is_tainted), initial="False"):
            self.add(
                "agent", "taints the node: no new pods" if is_tainted else "removes the taint"
            )
        if text := objects.annotations(node).get(well_known.STATUS_ANNOTATION):
            status = json.loads(text)
            state = str(status["state"])
            reason = f" ({status['reason']})" if "reason" in status else ""
            message = f"{state}{reason}: {status.get('message', '')}"
            if self._is_new("status", message):
                self.add("agent", message, _STATE_TONES.get(state, styles.Tone.PLAIN))
        fault = objects.true_conditions(node).get(well_known.RECOVERY_CONDITION, "")
        if self._is_new(well_known.RECOVERY_CONDITION, fault):
            tone = styles.Tone.WARN if fault else styles.Tone.PLAIN
            self.add("agent", fault or "sees no GPU with a fault any more", tone)
        for key, value in sorted(objects.labels(node).items()):
            is_gate = key.startswith(well_known.DEPLOY_LABEL_PREFIX)
            if is_gate and self._is_new(key, value, initial="true"):
                self.add("agent", f"sets {key}={value}")
        allocatable = objects.devices(node)
        listed = ", ".join(f"{name}: {n}" for name, n in sorted(allocatable.items()) if n)
        if self._is_new("allocatable", listed):
            self.add("kubelet", f"allocatable: {listed or 'no GPU resources'}")

    def _receive_pod(self, pod: objects.JsonObject) -> None:
        if objects.is_terminating(pod):
            message = "terminates"
        elif objects.is_ready(pod):
            message = "runs"
        else:
            return
        if self._is_new(objects.uid(pod), message):
            who = "plugin" if objects.is_plugin(pod) else "pods"
            self.add(who, f"{objects.namespace(pod)}/{objects.name(pod)} {message}")

    def _is_new(self, key: str, value: str, *, initial: str = "") -> bool:
        """Remember a value; return whether it differs from the last one, at first ``initial``."""
        last = self._last.get(key, initial)
        self._last[key] = value
        return last != value
