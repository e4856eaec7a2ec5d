"""``mig-manager demo``: stories of the real agent on a simulated node."""

import collections
import dataclasses
import math
import pathlib
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from mig_manager import errors
from mig_manager.adapters import host
from mig_manager.catalogue import hardware
from mig_manager.core import bar, messages, model, picture, yaml_tree
from mig_manager.core.layout import config, layouts
from mig_manager.core.node import well_known
from mig_manager.sandbox import ending, replay, stages, timeline
from mig_manager.sandbox.apiserver import store
from mig_manager.sandbox.driver import events, states
from mig_manager.sandbox.node import cluster_view, objects

SPEC = "8xA100-SXM4-40GB"
ONE_SLICE = "demo-one-slice-changed"
TOO_MUCH = "demo-too-much"
BALANCED = "all-balanced"
_DISABLED = "all-disabled"
_CONFIG_MAP = ("mig-manager", "mig-manager-config")
"""Namespace and name of the agents' layout file, as in the shipped manifests."""
_CONFIG_KEY = "config.yaml"
_FAULT = "0=gpu-reset"

_SPEED_UP = 0.25
"""The simulated driver takes a quarter of a real one's time, for impatient readers."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to show, and how."""

    spec: str
    """The GPUs, such as ``8xA100-SXM4-40GB``, or the file of a capture."""
    scenario: str
    packaged: pathlib.Path
    is_real_time: bool
    is_kept: bool
    """Whether the node stays up afterwards, for ``kubectl``, until a signal."""
    exports: Sequence[str] = ()
    """Commands that set up a shell whose PATH lacks the programs."""

    @property
    def latency(self) -> states.Latency:
        """Durations of the driver's calls."""
        factor = 1.0 if self.is_real_time else _SPEED_UP
        real = dataclasses.asdict(states.REALISTIC)
        return states.Latency(**{name: seconds * factor for name, seconds in real.items()})

    @property
    def node(self) -> str:
        """The GPUs for the simulated driver.

        Raises:
            UsageError: The file is no capture.
            ConfigError: It cannot be read.
        """
        return replay.node(self.spec).spec

    @property
    def gpus(self) -> list[model.Gpu]:
        """The GPUs of such a node, without a layout.

        Raises:
            UsageError: The spec is invalid, or no such GPU has MIG.
        """
        products = hardware.parse_node(self.node)
        if not any(product.is_mig_capable for product in products):
            names = messages.listed(sorted({product.name for product in products}))
            raise errors.UsageError(
                f"{names} cannot be partitioned; name a GPU with MIG, such as {SPEC}"
            )
        return [hardware.template(product, index) for index, product in enumerate(products)]

    def layouts_with(self, name: str) -> str:
        """Return the packaged document, with the extra layout of that name if it exists."""
        text = self.packaged.read_text(encoding="utf-8")
        document = config.parse(text, source=self.packaged.name)
        return text + extra_layouts(self.gpus, document, names=(name,))


def run(options: Options, *, say: Callable[[str], None], style: bar.Style) -> int:
    """Play one scenario; return 0 if all checks pass, else 1.

    Raises:
        UsageError: The spec is invalid.
        NotReadyError: A part of the stage did not start.
        Exception: From ``say``.
    """
    story = STORIES[options.scenario]
    gpus = options.gpus
    layout = story.layout(gpus)
    stage = stages.Stage(
        options.node,
        options.layouts_with(layout),
        latency=options.latency,
        agent_options=("--custom-layouts", *story.agent_options),
    )
    title = style.fitted(f"{story.title}, on {options.spec} (simulated)")
    say(style.paint(title, bar.Tone.STRONG))
    say(STARTING)
    with ending.on_signals(stage.fail), stage:
        publish_layouts(stage)
        story.prepare(stage)
        is_good = _show(stage, story, layout, say=say, style=style)
        layouts = (_smallest_everywhere(gpus), BALANCED, _DISABLED)
        suggestions = _suggestions(options, next(each for each in layouts if each != layout))
        say_next(stage, options, suggestions, who="The node stays", say=say, style=style)
    return 0 if is_good else 1


def say_next(
    stage: stages.Stage,
    options: Options,
    suggestions: Iterable[tuple[str, str]],
    *,
    who: str,
    say: Callable[[str], None],
    style: bar.Style,
) -> None:
    """Print purposes and commands for them; keep the stage up if requested."""
    where = ", in another terminal" if options.is_kept else ""
    say(f"\n{style.paint(f'Try next{where}', bar.Tone.STRONG)}\n")
    if options.is_kept:
        say(f"  export KUBECONFIG={stage.kubeconfig}")
    for line in options.exports:
        say(f"  {line}")
    for purpose, command in suggestions:
        say(f"  {purpose}:\n    {command}")
    if options.is_kept:
        say(f"\n{who} up until you press Ctrl-C.")
        stage.wait(lambda: False, "Ctrl-C", timeout_s=math.inf)


def publish_layouts(stage: stages.Stage) -> None:
    """Create the ConfigMap of the agents' layout file, and mount it as kubelet does."""
    namespace, name = _CONFIG_MAP

    def mount(record: store.Record) -> None:
        content = record.obj.get("data") or {}
        if record.key == ("configmaps", namespace, name) and _CONFIG_KEY in content:
            new = stage.config_file.with_suffix(".new")
            new.write_text(content[_CONFIG_KEY], encoding="utf-8")
            new.replace(stage.config_file)

    stage.server.store.subscribe(mount)
    text = stage.config_file.read_text(encoding="utf-8")
    stage.api.post(
        f"/api/v1/namespaces/{namespace}/configmaps",
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"namespace": namespace, "name": name},
            "data": {_CONFIG_KEY: text},
        },
    )


def _suggestions(options: Options, layout: str) -> Sequence[tuple[str, str]]:
    """Return pairs of a purpose and a command."""
    if options.is_kept:
        nodes = f"-l kubernetes.io/hostname={stages.NODE_NAME}"
        label = f"kubectl label node {stages.NODE_NAME} {well_known.CONFIG_LABEL}={layout}"
        return (
            ("the layouts of this node", f"kubectl mig layouts {stages.NODE_NAME}"),
            ("what another layout costs", f"mig-manager rollout {layout} {nodes} --dry-run"),
            ("change to it", f"{label} --overwrite"),
        )
    names = list(STORIES)
    scenario = names[(names.index(options.scenario) + 1) % len(names)]
    simulated = f" --simulate {shlex.quote(options.spec)}"
    own = "" if options.spec == SPEC else simulated
    same = "" if options.scenario == names[0] else f" --scenario {options.scenario}"
    return (
        (STORIES[scenario].title, f"mig-manager demo --scenario {scenario}{own}"),
        ("what a layout changes on such GPUs", f"mig-manager plan {layout}{simulated}"),
        ("the same again, and keep the node for kubectl", f"mig-manager demo{same}{own} --keep"),
    )


def _show(
    stage: stages.Stage,
    story: "Story",
    layout: str,
    *,
    say: Callable[[str], None],
    style: bar.Style,
) -> bool:
    lines = timeline.Timeline(say, style, host.SystemClock(), fail=stage.fail)
    stop = stage.cluster.listen(lines.receive)
    for kind in cluster_view.Kind:
        for obj in stage.cluster.list(kind):
            lines.receive(kind, obj)
    before = stage.gpus.observe()
    say("")
    lines.begin()
    checks = story.play(stage, layout, lambda text: lines.add("you", text))
    lines.end()
    stop()
    say("")
    for line in checked(checks, style):
        say(line)
    outcome = picture.draw_outcome(before, stage.gpus.observe(), style=style)
    say(f"\n{style.paint('The GPUs before and after', bar.Tone.STRONG)}\n\n{outcome}")
    return all(checks.values())


def checked(checks: Mapping[str, bool], style: bar.Style) -> Iterable[str]:
    """Return a line for every check and its result."""
    for text, holds in checks.items():
        mark, tone = ("✓", bar.Tone.GOOD) if holds else ("✗", bar.Tone.BAD)
        line = style.plain(style.fitted(f"{mark} {text}", further="  "))
        yield f"{style.paint(line[0], tone)}{line[1:]}"


# -- layouts ----------------------------------------------------------------------------------


def extra_layouts(
    gpus: Sequence[model.Gpu],
    packaged: layouts.Document,
    *,
    names: Collection[str] = (ONE_SLICE, TOO_MUCH),
) -> str:
    """Return layouts for these GPUs as text that continues the packaged document.

    ``names`` may include layouts of that document, which are omitted.
    """
    extra: dict[str, object] = {}
    if ONE_SLICE in names:
        balanced = layouts.select(packaged.layout(BALANCED), gpus)
        changed = {uuid: dict(layout.devices) for uuid, layout in balanced.items()}
        first = next(gpu for gpu in gpus if gpu.uuid in changed)
        two, one = _smallest(first, 2).profile, _smallest(first, 1).profile
        changed[first.uuid][two] -= 1
        changed[first.uuid][one] = changed[first.uuid].get(one, 0) + 2
        extra[ONE_SLICE] = _rules(gpus, changed)
    if TOO_MUCH in names:
        smallest = {gpu.uuid: _smallest(gpu, 1) for gpu in gpus if gpu.profiles}
        too_much = {uuid: {row.profile: 1 + len(row.placements)} for uuid, row in smallest.items()}
        extra[TOO_MUCH] = _rules(gpus, too_much)
    text = yaml_tree.dump(extra) if extra else ""
    return "".join(f"  {line}\n" for line in text.splitlines())


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
    """Return the smallest profile without attributes that has this number of compute slices."""
    rows = (
        row
        for row in gpu.profiles or ()
        if row.profile.gpu_slices == slices
        and not (row.profile.attributes or row.profile.negated_attributes)
    )
    return min(rows, key=lambda row: row.memory_mib)


def _smallest_everywhere(gpus: Sequence[model.Gpu]) -> str:
    names = {str(_smallest(gpu, 1).profile) for gpu in gpus if gpu.profiles}
    return f"all-{names.pop()}" if len(names) == 1 else BALANCED


# -- stories ----------------------------------------------------------------------------------


Checks = dict[str, bool]
"""Expectations of a story, and whether they hold."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """One scenario."""

    title: str
    prepare: Callable[[stages.Stage], None]
    layout: Callable[[Sequence[model.Gpu]], str]
    play: Callable[[stages.Stage, str, Callable[[str], None]], Checks]
    """The last argument prints an action of a person."""
    agent_options: tuple[str, ...] = ()


def _use_whole_gpus(stage: stages.Stage) -> None:
    """Run pods on two GPUs, or on the only one."""
    number = min(2, len(stage.gpus.observe()))
    stage.run_pods([(f"train-{i}", "nvidia.com/gpu", {}) for i in range(number)])


def _play_first(stage: stages.Stage, layout: str, say: Callable[[str], None]) -> Checks:
    pods = {name for name, ids in stage.devices_by_pod().items() if ids}
    _request(stage, layout, say)
    evicted = f"the pods that used whole GPUs were evicted: {', '.join(sorted(pods))}"
    return _is_active(stage, layout) | {evicted: pods.isdisjoint(stage.workloads())}


def _fill(stage: stages.Stage) -> None:
    """Apply the balanced layout and run a pod on every device."""
    stage.label(BALANCED)
    stage.wait_for_end(BALANCED)
    pods: list[tuple[str, str, Mapping[str, str]]] = []
    for resource, count in sorted(stage.allocatable().items()):
        kind = pod_name(resource)
        pods += [(f"{kind}-{i}", resource, {"size": kind}) for i in range(count)]
    stage.run_pods(pods)


def pod_name(resource: str) -> str:
    """Return a name for pods that request a resource."""
    return resource.removeprefix(well_known.RESOURCE_PREFIX).replace(".", "-").replace("+", "-")


def _play_one_slice(stage: stages.Stage, layout: str, say: Callable[[str], None]) -> Checks:
    before = stage.devices_by_pod()
    _request(stage, layout, say)
    return _is_active(stage, layout) | _only_affected_evicted(stage, before)


def _play_refusal(stage: stages.Stage, layout: str, say: Callable[[str], None]) -> Checks:
    before = stage.devices_by_pod(), stage.gpus.observe()
    state = _request(stage, layout, say)
    is_refused = state is model.State.FAILED and stage.status()["reason"] == "DoesNotFit"
    is_untouched = (stage.devices_by_pod(), stage.gpus.observe()) == before
    return {
        "the node's state is failed, with the reason DoesNotFit": is_refused,
        f"none of the {len(before[0])} pods and no GPU was touched": is_untouched,
    }


def _fill_and_guard(stage: stages.Stage) -> None:
    """Fill the node; a budget guards the pods on two slices."""
    _fill(stage)
    pods = stage.workloads().items()
    guarded = sorted({objects.labels(p)["size"] for name, p in pods if name.startswith("mig-2g")})
    stage.guard({"matchExpressions": [{"key": "size", "operator": "In", "values": guarded}]})


def _play_budget(stage: stages.Stage, layout: str, say: Callable[[str], None]) -> Checks:
    before = stage.devices_by_pod(), stage.gpus.observe()
    state = _request(stage, layout, say)
    status = stage.status()
    is_named = status["reason"] == "DrainTimeout" and stages.BUDGET in str(status["message"])
    is_untouched = (stage.devices_by_pod(), stage.gpus.observe()) == before
    blocked = {
        "the drain failed with the reason DrainTimeout and named pod and budget": (
            state is model.State.FAILED and is_named
        ),
        "pods, GPUs and device plugin are unchanged": is_untouched,
    }
    say(f"kubectl delete poddisruptionbudget {stages.BUDGET}")
    stage.unguard()
    stage.wait(
        lambda: stage.status().get("state") == model.State.SUCCESS.value,
        "the agent's own retry",
        timeout_s=60.0,
    )
    return blocked | _is_active(stage, layout) | _only_affected_evicted(stage, before[0])


def _only_affected_evicted(stage: stages.Stage, before: Mapping[str, frozenset[str]]) -> Checks:
    present = {uuid for gpu in stage.gpus.observe() for uuid in gpu.mig_uuids or (gpu.uuid,)}
    affected = {name for name, ids in before.items() if ids and not ids <= present}
    return _only_evicted(stage, before, affected, "destroyed instances")


def _only_evicted(
    stage: stages.Stage,
    before: Mapping[str, frozenset[str]],
    affected: set[str],
    where: str,
    *,
    has_others: bool = True,
) -> Checks:
    others = {name for name, ids in before.items() if ids} - affected
    after = stage.devices_by_pod()
    evicted = f"only the pods on {where} were evicted: {', '.join(sorted(affected))}"
    kept = f"the other {len(others)} pods kept running on the same devices"
    return {
        evicted: bool(affected) and affected.isdisjoint(stage.workloads()),
        kept: bool(others) is has_others
        and all(after.get(name) == before[name] for name in others),
    }


def _request(stage: stages.Stage, layout: str, say: Callable[[str], None]) -> model.State:
    """Request a layout as a person does; return the state at the end of the run."""
    label = f"{well_known.CONFIG_LABEL}={layout}"
    say(f"kubectl label node {stages.NODE_NAME} {label} --overwrite")
    stage.label(layout)
    return stage.wait_for_end(layout)


def _play_fault(stage: stages.Stage, layout: str, say: Callable[[str], None]) -> Checks:
    before = stage.devices_by_pod()
    gpus = stage.gpus.observe()
    faulty = {device for gpu in gpus[:1] for device in gpu.mig_uuids}
    say(f"mig-manager status --simulate-state {stage.state_file} --simulate-event {_FAULT}")
    events.play(_FAULT, stage.state_file)

    def is_repaired() -> bool:
        is_at_rest = stage.status()["state"] == model.State.SUCCESS.value
        return is_at_rest and not any(gpu.needs_recovery for gpu in stage.gpus.observe())

    stage.wait(is_repaired, "repair of the GPU", timeout_s=120.0)
    affected = {name for name, ids in before.items() if ids & faulty}
    return _is_active(stage, layout) | _only_evicted(
        stage, before, affected, "GPU 0", has_others=len(gpus) > 1
    )


def _is_active(stage: stages.Stage, layout: str) -> Checks:
    labels = objects.labels(stage.node())
    text = stage.config_file.read_text(encoding="utf-8")
    document = config.parse(text, source=str(stage.config_file))
    expected: collections.Counter[str] = collections.Counter()
    for gpu in layouts.select(document.layout(layout), stage.gpus.observe()).values():
        for profile, count in gpu.devices:
            name = str(profile).replace("+", ".")
            expected[f"{well_known.RESOURCE_PREFIX}mig-{name}"] += count
    listed = ", ".join(f"{count} x {name}" for name, count in sorted(expected.items()))
    published = {
        well_known.STATE_LABEL: model.State.SUCCESS.value,
        well_known.APPLIED_LABEL: layout,
    }
    taints = {taint["key"] for taint in objects.taints(stage.node())}
    is_closed = bool(taints & {well_known.HOLD_TAINT, objects.UNSCHEDULABLE_TAINT})
    is_paused = well_known.PAUSED_VALUE in labels.values()
    return {
        f"{well_known.STATE_LABEL}=success and {well_known.APPLIED_LABEL}={layout}": (
            published.items() <= labels.items()
        ),
        f"{sum(expected.values())} devices are allocatable: {listed}": (
            stage.allocatable() == dict(expected)
        ),
        "the node is schedulable and nothing is paused": not is_closed and not is_paused,
    }


STARTING = "The Kubernetes API and the daemons are starting."
"""What a reader waits for after the title."""

STORIES: Mapping[str, Story] = {
    "one-slice": Story(
        title="one instance changes beside running pods",
        prepare=_fill,
        layout=lambda _gpus: ONE_SLICE,
        play=_play_one_slice,
    ),
    "first-layout": Story(
        title="a first layout: whole GPUs become MIG devices",
        prepare=_use_whole_gpus,
        layout=_smallest_everywhere,
        play=_play_first,
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
    "gpu-fault": Story(
        title="a GPU with a fault is reset, and its layout restored",
        prepare=_fill,
        layout=lambda _gpus: BALANCED,
        play=_play_fault,
        agent_options=("--repair", "reset", "--drift-check-interval-s", "1"),
    ),
}
