"""``mig-manager demo``: the whole story on a simulated node, with the real agent."""

import dataclasses
import json
import pathlib
import threading
from collections.abc import Callable

from mig_manager.adapters import host
from mig_manager.catalogue import hardware
from mig_manager.core import bar, picture, timing
from mig_manager.core.layout import config
from mig_manager.core.node import cluster
from mig_manager.sandbox.demo import scenarios, stages
from mig_manager.sandbox.driver import states
from mig_manager.sandbox.node import cluster_view, objects

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

    def add(self, who: str, text: str, tone: bar.Tone = bar.Tone.PLAIN) -> None:
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

    def hear(self, kind: cluster_view.Kind, obj: objects.JsonObject) -> None:
        """Take over one object that appeared, changed or went."""
        with self._lock:
            match kind:
                case cluster_view.Kind.NODE:
                    self._hear_node(obj)
                case cluster_view.Kind.POD:
                    self._hear_pod(obj)
                case cluster_view.Kind.DAEMON_SET:
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
            message = f"{state}{reason}: {status.get('message', '')}"
            if self._is_news("status", message):
                self._write("agent", message, _STATE_TONES.get(state, bar.Tone.PLAIN))
        for key, value in sorted(objects.labels(node).items()):
            if key.startswith(cluster.DEPLOY_LABEL_PREFIX) and self._is_news(
                key, value, unless="true"
            ):
                self._write("agent", f"sets {key}={value}")
        allocatable = {
            name: count
            for name, count in ((node.get("status") or {}).get("allocatable") or {}).items()
            if name.startswith(cluster.RESOURCE_PREFIX) and count != "0"
        }
        listed = ", ".join(f"{name}: {count}" for name, count in sorted(allocatable.items()))
        if self._is_news("allocatable", listed):
            self._write("kubelet", f"allocatable: {listed or 'no GPU resources'}")

    def _hear_pod(self, pod: objects.JsonObject) -> None:
        is_plugin = objects.PLUGIN_CONTAINERS.intersection(objects.container_names(pod))
        who = "plugin" if is_plugin else "pods"
        if objects.is_terminating(pod):
            message = "terminates"
        elif objects.is_ready(pod):
            message = "runs"
        else:
            return
        if self._is_news(objects.uid(pod), message):
            self._write(who, f"{objects.namespace(pod)}/{objects.name(pod)} {message}")

    def _is_news(self, key: str, value: str, *, unless: str = "") -> bool:
        """Return whether a value has changed; ``unless`` is what it is taken to have been."""
        known = self._last.get(key, unless)
        self._last[key] = value
        return known != value


_HURRY = 0.25
"""The simulated driver takes a quarter of what real ones take, for impatient readers."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to show, and how."""

    spec: str
    """The GPUs, such as ``8xA100-SXM4-40GB``."""
    scenario: str
    """A key of ``scenarios.STORIES``."""
    packaged: pathlib.Path
    """The config document that comes with the program."""
    is_real_time: bool
    """Whether the simulated driver takes as long as real ones."""
    is_kept: bool
    """Whether the node stays up afterwards, for ``kubectl``, until SIGINT."""


def run(options: Options, *, say: Callable[[str], None], style: bar.Style) -> int:
    """Play one scenario.

    Args:
        options: What to show.
        say: Writes one line.
        style: What the terminal can show.

    Returns:
        0 when everything came out as it must, 1 otherwise.

    Raises:
        UsageError: The spec is no node.
        NotReadyError: A part of the stage did not come up.
    """
    story = scenarios.STORIES[options.scenario]
    products = hardware.parse_node(options.spec)
    gpus = [hardware.template(product, index) for index, product in enumerate(products)]
    text = options.packaged.read_text(encoding="utf-8")
    document = config.parse(text, source=options.packaged.name)
    stage = stages.Stage(
        options.spec,
        text + scenarios.extra_layouts(gpus, document),
        latency=_latency(1.0 if options.is_real_time else _HURRY),
        agent_options=story.agent_options,
    )
    say(style.paint(f"{story.title}, on {options.spec} (simulated)", bar.Tone.STRONG))
    with stage:
        story.prepare(stage)
        is_good = _show(stage, story, story.layout(gpus), say=say, style=style)
        if options.is_kept:
            _keep(stage, say)
    return 0 if is_good else 1


def _show(
    stage: stages.Stage,
    story: scenarios.Story,
    layout: str,
    *,
    say: Callable[[str], None],
    style: bar.Style,
) -> bool:
    lines = Timeline(say, style, host.SystemClock())
    stop = stage.cluster.listen(lines.hear)
    for kind, obj in stage.everything():
        lines.hear(kind, obj)
    say(f"\nbefore\n{picture.draw_gpus(stage.gpus.observe(), style=style)}")
    say("")
    lines.begin()
    lines.add(
        "you", f"kubectl label node {stages.NODE_NAME} {cluster.CONFIG_LABEL}={layout} --overwrite"
    )
    checks = story.play(stage, layout, lambda text: lines.add("you", text))
    lines.end()
    stop()
    say(f"\nafter\n{picture.draw_gpus(stage.gpus.observe(), style=style)}")
    say("")
    for check in checks:
        mark, tone = ("✓", bar.Tone.GOOD) if check.holds else ("✗", bar.Tone.BAD)
        say(f"{style.paint(style.plain(mark), tone)} {style.plain(check.text)}")
    return all(check.holds for check in checks)


def _keep(stage: stages.Stage, say: Callable[[str], None]) -> None:
    say("\nThe node stays up until you press Ctrl-C. In another terminal:")
    say(f"  export KUBECONFIG={stage.kubeconfig}")
    say(f"  kubectl describe node {stages.NODE_NAME}")
    say(f"  kubectl label node {stages.NODE_NAME} {cluster.CONFIG_LABEL}=all-disabled --overwrite")
    say(f"  mig-manager status --simulate-state {stage.state_file}")
    threading.Event().wait()


def _latency(factor: float) -> states.Latency:
    return states.Latency(
        **{
            field.name: getattr(states.REALISTIC, field.name) * factor
            for field in dataclasses.fields(states.Latency)
        }
    )
