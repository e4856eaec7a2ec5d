"""``mig-manager demo``: whole stories on a simulated node, with the real agent."""

import collections
import dataclasses
import json
import pathlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

from mig_manager.adapters import host
from mig_manager.catalogue import hardware
from mig_manager.core import bar, model, picture, timing, yaml_tree
from mig_manager.core.layout import config
from mig_manager.core.node import cluster
from mig_manager.sandbox import stages
from mig_manager.sandbox.driver import states
from mig_manager.sandbox.node import cluster_view, objects

ONE_SLICE = "demo-one-slice-changed"
TOO_MUCH = "demo-too-much"
_BALANCED = "all-balanced"
_BUDGET_PATH = "/apis/policy/v1/namespaces/default/poddisruptionbudgets"

_HURRY = 0.25
"""The simulated driver takes a quarter of what real ones take, for impatient readers."""
_WHO_TONES = {
    "you": bar.Tone.STRONG,
    "agent": bar.Tone.CYAN,
    "pods": bar.Tone.WARN,
    "plugin": bar.Tone.MAGENTA,
    "kubelet": bar.Tone.BLUE,
}
_STATE_TONES = {"success": bar.Tone.GOOD, "failed": bar.Tone.BAD}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to show, and how."""

    spec: str
    """The GPUs, such as ``8xA100-SXM4-40GB``."""
    scenario: str
    packaged: pathlib.Path
    is_real_time: bool
    is_kept: bool
    """Whether the node stays up afterwards, for ``kubectl``, until SIGINT."""


def run(options: Options, *, say: Callable[[str], None], style: bar.Style) -> int:
    """Play one scenario; return 0 when everything came out as it must, 1 otherwise.

    Raises:
        UsageError: The spec is no node.
        NotReadyError: A part of the stage did not come up.
    """
    story = STORIES[options.scenario]
    products = hardware.parse_node(options.spec)
    gpus = [hardware.template(product, index) for index, product in enumerate(products)]
    text = options.packaged.read_text(encoding="utf-8")
    document = config.parse(text, source=options.packaged.name)
    factor = 1.0 if options.is_real_time else _HURRY
    real = dataclasses.asdict(states.REALISTIC)
    stage = stages.Stage(
        options.spec,
        text + extra_layouts(gpus, document),
        latency=states.Latency(**{name: seconds * factor for name, seconds in real.items()}),
        agent_options=story.agent_options,
    )
    say(style.paint(f"{story.title}, on {options.spec} (simulated)", bar.Tone.STRONG))
    with stage:
        story.prepare(stage)
        is_good = _show(stage, story, story.layout(gpus), say=say, style=style)
        if options.is_kept:
            label = f"kubectl label node {stages.NODE_NAME} {cluster.CONFIG_LABEL}=all-disabled"
            say("\nThe node stays up until you press Ctrl-C. In another terminal:")
            say(f"  export KUBECONFIG={stage.kubeconfig}")
            say(f"  kubectl describe node {stages.NODE_NAME}")
            say(f"  {label} --overwrite")
            say(f"  mig-manager status --simulate-state {stage.state_file}")
            threading.Event().wait()
    return 0 if is_good else 1


def _show(
    stage: stages.Stage,
    story: "Story",
    layout: str,
    *,
    say: Callable[[str], None],
    style: bar.Style,
) -> bool:
    lines = _Timeline(say, style, host.SystemClock())
    stop = stage.cluster.listen(lines.hear)
    for kind in cluster_view.Kind:
        for obj in stage.cluster.list(kind):
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
    for text, holds in checks.items():
        mark, tone = ("✓", bar.Tone.GOOD) if holds else ("✗", bar.Tone.BAD)
        say(f"{style.paint(style.plain(mark), tone)} {style.plain(text)}")
    return all(checks.values())


class _Timeline:
    """Turns changes of API objects into lines; hears of them on the watches' threads."""

    def __init__(self, say: Callable[[str], None], style: bar.Style, clock: timing.Clock) -> None:
        self._say = say
        self._style = style
        self._clock = clock
        self._lock = threading.RLock()
        self._began_s: float | None = None
        self._last: dict[str, str] = {}

    def begin(self) -> None:
        """Start the clock and the lines; what is true now is not news."""
        with self._lock:
            self._began_s = self._clock.monotonic()

    def end(self) -> None:
        with self._lock:
            self._began_s = None

    def add(self, who: str, text: str, tone: bar.Tone = bar.Tone.PLAIN) -> None:
        """Write one line."""
        with self._lock:
            if self._began_s is None:
                return
            at = f"{self._clock.monotonic() - self._began_s:7.2f} s"
            name = self._style.paint(f"{who:<8}", _WHO_TONES[who])
            line = self._style.paint(self._style.plain(text), tone)
            self._say(f"{self._style.paint(at, bar.Tone.FAINT)}  {name} {line}")

    def hear(self, kind: cluster_view.Kind, obj: objects.JsonObject) -> None:
        """Take over one object that appeared, changed or went."""
        with self._lock:
            if kind is cluster_view.Kind.NODE:
                self._hear_node(obj)
            elif kind is cluster_view.Kind.POD:
                self._hear_pod(obj)

    def _hear_node(self, node: objects.JsonObject) -> None:
        is_closed = any(taint["key"] == cluster.HOLD_TAINT for taint in objects.taints(node))
        if self._is_news("taint", str(is_closed), unless="False"):
            verb = "taints the node: no new pods" if is_closed else "takes the taint away"
            self.add("agent", verb)
        if text := objects.annotations(node).get(cluster.STATUS_ANNOTATION):
            status = json.loads(text)
            state = str(status["state"])
            reason = f" ({status['reason']})" if "reason" in status else ""
            message = f"{state}{reason}: {status.get('message', '')}"
            if self._is_news("status", message):
                self.add("agent", message, _STATE_TONES.get(state, bar.Tone.PLAIN))
        for key, value in sorted(objects.labels(node).items()):
            is_gate = key.startswith(cluster.DEPLOY_LABEL_PREFIX)
            if is_gate and self._is_news(key, value, unless="true"):
                self.add("agent", f"sets {key}={value}")
        allocatable = objects.allocatable_devices(node)
        listed = ", ".join(f"{name}: {n}" for name, n in sorted(allocatable.items()) if n)
        if self._is_news("allocatable", listed):
            self.add("kubelet", f"allocatable: {listed or 'no GPU resources'}")

    def _hear_pod(self, pod: objects.JsonObject) -> None:
        if objects.is_terminating(pod):
            message = "terminates"
        elif objects.is_ready(pod):
            message = "runs"
        else:
            return
        if self._is_news(objects.uid(pod), message):
            who = "plugin" if objects.is_plugin(pod) else "pods"
            self.add(who, f"{objects.namespace(pod)}/{objects.name(pod)} {message}")

    def _is_news(self, key: str, value: str, *, unless: str = "") -> bool:
        """Return whether a value has changed; ``unless`` is what it is taken to have been."""
        known = self._last.get(key, unless)
        self._last[key] = value
        return known != value


# -- layouts ----------------------------------------------------------------------------------


def extra_layouts(gpus: Sequence[model.Gpu], packaged: config.Document) -> str:
    """Return layouts for these very GPUs as text that continues the packaged document."""
    balanced = config.select(packaged.layout(_BALANCED), gpus)
    changed = {uuid: dict(layout.devices) for uuid, layout in balanced.items()}
    first = next(gpu for gpu in gpus if gpu.uuid in changed)
    two, one = _smallest(first, 2).profile, _smallest(first, 1).profile
    changed[first.uuid][two] -= 1
    changed[first.uuid][one] = changed[first.uuid].get(one, 0) + 2
    smallest = {gpu.uuid: _smallest(gpu, 1) for gpu in gpus if gpu.profiles}
    too_much = {uuid: {row.profile: 1 + len(row.placements)} for uuid, row in smallest.items()}
    layouts = {ONE_SLICE: _rules(gpus, changed), TOO_MUCH: _rules(gpus, too_much)}
    return "".join(f"  {line}\n" for line in yaml_tree.dump(layouts).splitlines())


def _rules(
    gpus: Iterable[model.Gpu], desired: Mapping[str, Mapping[model.Profile, int]]
) -> list[object]:
    return [
        {
            "devices": [gpu.index],
            "mig-enabled": True,
            "mig-devices": {str(p): n for p, n in desired[gpu.uuid].items() if n},
        }
        for gpu in gpus
        if gpu.uuid in desired
    ]


def _smallest(gpu: model.Gpu, slices: int) -> model.GpuInstanceProfile:
    """Return the smallest profile without attributes of so many compute slices."""
    rows = (
        row
        for row in gpu.profiles or ()
        if row.profile.gpu_slices == slices
        and not (row.profile.attributes or row.profile.negated_attributes)
    )
    return min(rows, key=lambda row: row.memory_mib)


def _smallest_everywhere(gpus: Sequence[model.Gpu]) -> str:
    names = {str(_smallest(gpu, 1).profile) for gpu in gpus if gpu.profiles}
    return f"all-{names.pop()}" if len(names) == 1 else _BALANCED


# -- stories ----------------------------------------------------------------------------------


Checks = dict[str, bool]
"""What must have come of a story, and whether it has."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """One scenario."""

    title: str
    prepare: Callable[[stages.Stage], None]
    layout: Callable[[Sequence[model.Gpu]], str]
    play: Callable[[stages.Stage, str, Callable[[str], None]], Checks]
    """From the label on; the last argument prints what a person does."""
    agent_options: tuple[str, ...] = ()


def _use_whole_gpus(stage: stages.Stage) -> None:
    """Have pods use two GPUs, or the only one."""
    number = min(2, len(stage.gpus.observe()))
    stage.run_pods([(f"train-{i}", "nvidia.com/gpu", {}) for i in range(number)])


def _play_first(stage: stages.Stage, layout: str, _say: Callable[[str], None]) -> Checks:
    pods = {name for name, ids in stage.devices_by_pod().items() if ids}
    stage.label(layout)
    stage.wait_for_end(layout)
    gone = f"the pods that used whole GPUs were evicted: {', '.join(sorted(pods))}"
    return _is_active(stage, layout) | {gone: pods.isdisjoint(stage.workloads())}


def _fill(stage: stages.Stage) -> None:
    """Apply the balanced layout and put a pod on every device of it."""
    stage.label(_BALANCED)
    stage.wait_for_end(_BALANCED)
    pods: list[tuple[str, str, Mapping[str, str]]] = []
    for resource, count in sorted(stage.allocatable().items()):
        kind = resource.removeprefix(cluster.RESOURCE_PREFIX).replace(".", "-").replace("+", "-")
        pods += [(f"{kind}-{i}", resource, {"size": kind}) for i in range(count)]
    stage.run_pods(pods)


def _play_one_slice(stage: stages.Stage, layout: str, _say: Callable[[str], None]) -> Checks:
    before_by_pod = stage.devices_by_pod()
    stage.label(layout)
    stage.wait_for_end(layout)
    return _is_active(stage, layout) | _only_the_necessary(stage, before_by_pod)


def _play_refusal(stage: stages.Stage, layout: str, _say: Callable[[str], None]) -> Checks:
    before = stage.devices_by_pod(), stage.gpus.observe()
    stage.label(layout)
    state = stage.wait_for_end(layout)
    is_refused = state is model.State.FAILED and stage.status()["reason"] == "DoesNotFit"
    is_untouched = (stage.devices_by_pod(), stage.gpus.observe()) == before
    return {
        "the node says failed, with the reason DoesNotFit": is_refused,
        f"not one of {len(before[0])} pods and no GPU was touched": is_untouched,
    }


def _fill_and_guard(stage: stages.Stage) -> None:
    """Fill the node; a budget guards the pods on two slices."""
    _fill(stage)
    pods = stage.workloads().items()
    guarded = sorted({objects.labels(p)["size"] for name, p in pods if name.startswith("mig-2g")})
    selector = {"matchExpressions": [{"key": "size", "operator": "In", "values": guarded}]}
    stage.api.post(
        _BUDGET_PATH,
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": {"name": "keep-them-all", "namespace": "default"},
            "spec": {"maxUnavailable": 0, "selector": selector},
        },
    )


def _play_budget(stage: stages.Stage, layout: str, say: Callable[[str], None]) -> Checks:
    before = stage.devices_by_pod(), stage.gpus.observe()
    stage.label(layout)
    state = stage.wait_for_end(layout)
    status = stage.status()
    is_named = status["reason"] == "DrainTimeout" and "keep-them-all" in str(status["message"])
    is_untouched = (stage.devices_by_pod(), stage.gpus.observe()) == before
    blocked = {
        "the drain gave up with the reason DrainTimeout and named pod and budget": (
            state is model.State.FAILED and is_named
        ),
        "that cost nothing: pods, GPUs and device plugin are as they were": is_untouched,
    }
    say("kubectl delete poddisruptionbudget keep-them-all")
    stage.api.delete(f"{_BUDGET_PATH}/keep-them-all")
    stage.wait(
        lambda: stage.status().get("state") == model.State.SUCCESS.value,
        "the agent's own retry",
        timeout_s=60.0,
    )
    return blocked | _is_active(stage, layout) | _only_the_necessary(stage, before[0])


def _only_the_necessary(
    stage: stages.Stage, before_by_pod: Mapping[str, frozenset[str]]
) -> Checks:
    alive = {uuid for gpu in stage.gpus.observe() for uuid in gpu.mig_uuids or (gpu.uuid,)}
    doomed = {name for name, ids in before_by_pod.items() if ids and not ids <= alive}
    spared = {name for name, ids in before_by_pod.items() if ids and ids <= alive}
    after = stage.devices_by_pod()
    gone = f"only the pods on destroyed instances were evicted: {', '.join(sorted(doomed))}"
    kept = f"the other {len(spared)} pods kept running on the same devices"
    return {
        gone: bool(doomed) and doomed.isdisjoint(stage.workloads()),
        kept: bool(spared) and all(after.get(name) == before_by_pod[name] for name in spared),
    }


def _is_active(stage: stages.Stage, layout: str) -> Checks:
    labels = objects.labels(stage.node())
    text = stage.config_file.read_text(encoding="utf-8")
    document = config.parse(text, source=str(stage.config_file))
    expected: collections.Counter[str] = collections.Counter()
    for gpu in config.select(document.layout(layout), stage.gpus.observe()).values():
        for profile, count in gpu.devices:
            name = str(profile).replace("+", ".")
            expected[f"{cluster.RESOURCE_PREFIX}mig-{name}"] += count
    listed = ", ".join(f"{count} x {name}" for name, count in sorted(expected.items()))
    published = {cluster.STATE_LABEL: model.State.SUCCESS.value, cluster.APPLIED_LABEL: layout}
    taints = {taint["key"] for taint in objects.taints(stage.node())}
    is_closed = bool(taints & {cluster.HOLD_TAINT, objects.UNSCHEDULABLE_TAINT})
    is_paused = cluster.PAUSED_VALUE in labels.values()
    return {
        f"{cluster.STATE_LABEL}=success and {cluster.APPLIED_LABEL}={layout}": (
            published.items() <= labels.items()
        ),
        f"{sum(expected.values())} devices are allocatable: {listed}": (
            stage.allocatable() == dict(expected)
        ),
        "the node is schedulable and nothing is left paused": not is_closed and not is_paused,
    }


STORIES: Mapping[str, Story] = {
    "first-layout": Story(
        title="a first layout: whole GPUs become MIG devices",
        prepare=_use_whole_gpus,
        layout=_smallest_everywhere,
        play=_play_first,
    ),
    "one-slice": Story(
        title="one slice changes beside running pods",
        prepare=_fill,
        layout=lambda _gpus: ONE_SLICE,
        play=_play_one_slice,
    ),
    "does-not-fit": Story(
        title="a layout that does not fit is refused before anything is touched",
        prepare=_fill,
        layout=lambda _gpus: TOO_MUCH,
        play=_play_refusal,
    ),
    "budget": Story(
        title="a PodDisruptionBudget blocks the drain",
        prepare=_fill_and_guard,
        layout=lambda _gpus: ONE_SLICE,
        play=_play_budget,
        agent_options=("--drain-timeout-s", "3", "--retry-initial-s", "1", "--retry-max-s", "2"),
    ),
}
