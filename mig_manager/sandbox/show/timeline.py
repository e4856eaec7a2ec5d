"""What happens on the node, line by line while it happens."""

import json
import threading
from collections.abc import Callable

from mig_manager.core import bar, timing
from mig_manager.core.node import cluster
from mig_manager.sandbox.cluster import manifests, objects, view

_WHO_TONES = {
    "you": bar.Tone.STRONG,
    "agent": bar.Tone.CYAN,
    "pods": bar.Tone.WARN,
    "plugin": bar.Tone.MAGENTA,
    "kubelet": bar.Tone.BLUE,
}
_STATE_TONES = {"success": bar.Tone.GOOD, "failed": bar.Tone.BAD}


class Timeline:
    """Turns changes of API objects into lines; hears of them on the watches' threads."""

    def __init__(self, say: Callable[[str], None], style: bar.Style, clock: timing.Clock) -> None:
        self._say = say
        self._style = style
        self._clock = clock
        self._lock = threading.Lock()
        self._is_on = False
        self._began_s = 0.0
        self._last: dict[str, str] = {}

    def begin(self) -> None:
        """Start the clock and the talking; what is true now is not news."""
        with self._lock:
            self._began_s = self._clock.monotonic()
            self._is_on = True

    def end(self) -> None:
        """Stop talking."""
        with self._lock:
            self._is_on = False

    def tell(self, who: str, text: str, tone: bar.Tone = bar.Tone.PLAIN) -> None:
        """Write one line."""
        with self._lock:
            self._write(who, text, tone)

    def _write(self, who: str, text: str, tone: bar.Tone = bar.Tone.PLAIN) -> None:
        if not self._is_on:
            return
        at = f"{self._clock.monotonic() - self._began_s:7.2f} s"
        name = self._style.paint(f"{who:<8}", _WHO_TONES.get(who, bar.Tone.PLAIN))
        line = self._style.paint(self._style.plain(text), tone)
        self._say(f"{self._style.paint(at, bar.Tone.FAINT)}  {name} {line}")

    def hear(self, kind: view.Kind, obj: objects.JsonObject) -> None:
        """Take over one object that appeared, changed or went."""
        with self._lock:
            match kind:
                case view.Kind.NODE:
                    self._hear_node(obj)
                case view.Kind.POD:
                    self._hear_pod(obj)
                case view.Kind.DAEMON_SET:
                    pass

    def _hear_node(self, node: objects.JsonObject) -> None:
        text = objects.annotations(node).get(cluster.STATUS_ANNOTATION)
        is_closed = any(taint["key"] == cluster.HOLD_TAINT for taint in objects.taints(node))
        if self._is_news("taint", str(is_closed), unless="False"):
            verb = "taints the node: no new pods" if is_closed else "takes the taint away"
            self._write("agent", verb)
        if text:
            status = json.loads(text)
            state = str(status["state"])
            reason = f" ({status['reason']})" if "reason" in status else ""
            said = f"{state}{reason}: {status.get('message', '')}"
            if self._is_news("status", said):
                self._write("agent", said, _STATE_TONES.get(state, bar.Tone.PLAIN))
        for key, value in sorted(objects.labels(node).items()):
            if key.startswith(cluster.DEPLOY_LABEL_PREFIX) and self._is_news(
                key, value, unless="true"
            ):
                self._write("agent", f"sets {key}={value}")
        offered = {
            name: count
            for name, count in ((node.get("status") or {}).get("allocatable") or {}).items()
            if name.startswith(cluster.RESOURCE_PREFIX) and count != "0"
        }
        listed = ", ".join(f"{name}: {count}" for name, count in sorted(offered.items()))
        if self._is_news("allocatable", listed):
            self._write("kubelet", f"offers {listed or 'no GPU resources'}")

    def _hear_pod(self, pod: objects.JsonObject) -> None:
        is_plugin = manifests.PLUGIN_CONTAINERS.intersection(objects.container_names(pod))
        who = "plugin" if is_plugin else "pods"
        if objects.is_terminating(pod):
            said = "is told to stop"
        elif objects.is_ready(pod):
            said = "runs"
        else:
            return
        if self._is_news(objects.uid(pod), said):
            self._write(who, f"{objects.namespace(pod)}/{objects.name(pod)} {said}")

    def _is_news(self, key: str, value: str, *, unless: str = "") -> bool:
        """Tell whether a value has changed; ``unless`` is what it is taken to have been."""
        known = self._last.get(key, unless)
        self._last[key] = value
        return known != value
