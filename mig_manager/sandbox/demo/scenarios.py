"""The demonstration's stories: what is set up, what a person does, what must come of it."""

import collections
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

from mig_manager.core import model, yaml_tree
from mig_manager.core.layout import config
from mig_manager.core.node import cluster
from mig_manager.sandbox.demo import stages
from mig_manager.sandbox.node import objects

ONE_SLICE = "demo-one-slice-changed"
TOO_MUCH = "demo-too-much"
_BALANCED = "all-balanced"
_BUDGET_PATH = "/apis/policy/v1/namespaces/default/poddisruptionbudgets"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that must have come of a story."""

    text: str
    holds: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """One scenario."""

    title: str
    prepare: Callable[[stages.Stage], None]
    """Sets up the node before the layout is requested."""
    layout: Callable[[Sequence[model.Gpu]], str]
    """The layout that a person asks for."""
    play: Callable[[stages.Stage, str, Callable[[str], None]], list[Check]]
    """From the label on; the last argument prints what a person does."""
    agent_options: tuple[str, ...] = ()


def extra_layouts(gpus: Sequence[model.Gpu], packaged: config.Document) -> str:
    """Return layouts for this very node as text that continues the packaged document.

    Args:
        gpus: The node's GPUs.
        packaged: The document that comes with the program.
    """
    balanced = config.select(packaged.layout(_BALANCED), gpus)
    changed = {uuid: dict(layout.devices) for uuid, layout in balanced.items()}
    first = next(gpu for gpu in gpus if gpu.uuid in changed)
    two, one = _plain(first, 2), _plain(first, 1)
    changed[first.uuid][two] -= 1
    changed[first.uuid][one] = changed[first.uuid].get(one, 0) + 2
    too_much = {
        gpu.uuid: {_plain(gpu, 1): 1 + len(_placements(gpu, 1))} for gpu in gpus if gpu.profiles
    }
    layouts = {ONE_SLICE: _rules(gpus, changed), TOO_MUCH: _rules(gpus, too_much)}
    text = yaml_tree.dump(layouts)
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
    """Return the smallest profile without attributes of so many compute slices."""
    return min(
        (
            row
            for row in gpu.profiles or ()
            if row.profile.gpu_slices == slices
            and not (row.profile.attributes or row.profile.negated_attributes)
        ),
        key=lambda row: row.memory_mib,
    )


def _plain(gpu: model.Gpu, slices: int) -> model.Profile:
    return _smallest(gpu, slices).profile


def _placements(gpu: model.Gpu, slices: int) -> tuple[model.Placement, ...]:
    return _smallest(gpu, slices).placements


def _smallest_everywhere(gpus: Sequence[model.Gpu]) -> str:
    names = {str(_plain(gpu, 1)) for gpu in gpus if gpu.profiles}
    return f"all-{names.pop()}" if len(names) == 1 else _BALANCED


# -- first layout ---------------------------------------------------------------------------


def _use_whole_gpus(stage: stages.Stage) -> None:
    """Have pods use two GPUs, or the only one."""
    number = min(2, len(stage.gpus.observe()))
    stage.run_pods([(f"train-{i}", "nvidia.com/gpu", {}) for i in range(number)])


def _play_first(stage: stages.Stage, layout: str, _say: Callable[[str], None]) -> list[Check]:
    pods = {name for name, ids in stage.devices_by_pod().items() if ids}
    stage.label(layout)
    stage.wait_for_end(layout)
    return [*_is_active(stage, layout), _check_gone(stage, pods)]


# -- one slice changes beside running pods ---------------------------------------------------


def _fill(stage: stages.Stage) -> None:
    """Apply the balanced layout and put a pod on every device of it."""
    stage.label(_BALANCED)
    stage.wait_for_end(_BALANCED)
    pods: list[tuple[str, str, Mapping[str, str]]] = []
    for resource, count in sorted(stage.allocatable().items()):
        kind = resource.removeprefix(cluster.RESOURCE_PREFIX).replace(".", "-").replace("+", "-")
        pods += [(f"{kind}-{i}", resource, {"size": kind}) for i in range(count)]
    stage.run_pods(pods)


def _play_one_slice(stage: stages.Stage, layout: str, _say: Callable[[str], None]) -> list[Check]:
    before_by_pod = stage.devices_by_pod()
    stage.label(layout)
    stage.wait_for_end(layout)
    return [*_is_active(stage, layout), *_only_the_necessary(stage, before_by_pod)]


def _only_the_necessary(
    stage: stages.Stage, before_by_pod: Mapping[str, frozenset[str]]
) -> tuple[Check, ...]:
    alive = {uuid for gpu in stage.gpus.observe() for uuid in gpu.mig_uuids or (gpu.uuid,)}
    doomed = {name for name, ids in before_by_pod.items() if ids and not ids <= alive}
    spared = {name for name, ids in before_by_pod.items() if ids and ids <= alive}
    after = stage.devices_by_pod()
    return (
        Check(
            text=f"only the pods on destroyed instances were evicted: {', '.join(sorted(doomed))}",
            holds=doomed.isdisjoint(stage.workloads()) and bool(doomed),
        ),
        Check(
            text=f"the other {len(spared)} pods kept running on the same devices",
            holds=bool(spared) and all(after.get(name) == before_by_pod[name] for name in spared),
        ),
    )


# -- a layout that does not fit ---------------------------------------------------------------


def _play_refusal(stage: stages.Stage, layout: str, _say: Callable[[str], None]) -> list[Check]:
    before_by_pod, before = stage.devices_by_pod(), stage.gpus.observe()
    stage.label(layout)
    state = stage.wait_for_end(layout)
    return [
        Check(
            text="the node says failed, with the reason DoesNotFit",
            holds=state is model.State.FAILED and stage.status()["reason"] == "DoesNotFit",
        ),
        Check(
            text=f"not one of {len(before_by_pod)} pods and no GPU was touched",
            holds=stage.devices_by_pod() == before_by_pod and stage.gpus.observe() == before,
        ),
    ]


# -- a drain that a budget blocks --------------------------------------------------------------


def _fill_and_guard(stage: stages.Stage) -> None:
    _fill(stage)
    guarded = _kinds_of_two_slices(stage)
    stage.api.post(
        _BUDGET_PATH,
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": {"name": "keep-them-all", "namespace": "default"},
            "spec": {
                "maxUnavailable": 0,
                "selector": {
                    "matchExpressions": [{"key": "size", "operator": "In", "values": guarded}]
                },
            },
        },
    )


def _kinds_of_two_slices(stage: stages.Stage) -> list[str]:
    return sorted(
        {
            objects.labels(pod)["size"]
            for name, pod in stage.workloads().items()
            if name.startswith("mig-2g")
        }
    )


def _play_budget(stage: stages.Stage, layout: str, say: Callable[[str], None]) -> list[Check]:
    before_by_pod, before = stage.devices_by_pod(), stage.gpus.observe()
    stage.label(layout)
    state = stage.wait_for_end(layout)
    blocked = [
        Check(
            text="the drain gave up with the reason DrainTimeout and named pod and budget",
            holds=state is model.State.FAILED
            and stage.status()["reason"] == "DrainTimeout"
            and "keep-them-all" in str(stage.status()["message"]),
        ),
        Check(
            text="that cost nothing: pods, GPUs and device plugin are as they were",
            holds=stage.devices_by_pod() == before_by_pod and stage.gpus.observe() == before,
        ),
    ]
    say("kubectl delete poddisruptionbudget keep-them-all")
    stage.api.delete(f"{_BUDGET_PATH}/keep-them-all")
    stage.wait(
        lambda: stage.status().get("state") == model.State.SUCCESS.value,
        "the agent's own retry",
        timeout_s=60.0,
    )
    return [*blocked, *_is_active(stage, layout), *_only_the_necessary(stage, before_by_pod)]


# -- what success means --------------------------------------------------------------------------


def _is_active(stage: stages.Stage, layout: str) -> list[Check]:
    labels = objects.labels(stage.node())
    text = stage.config_file.read_text(encoding="utf-8")
    desired = config.select(
        config.parse(text, source=str(stage.config_file)).layout(layout), stage.gpus.observe()
    )
    expected: collections.Counter[str] = collections.Counter()
    for gpu in desired.values():
        for profile, count in gpu.devices:
            name = str(profile).replace("+", ".")
            expected[f"{cluster.RESOURCE_PREFIX}mig-{name}"] += count
    allocatable = stage.allocatable()
    listed = ", ".join(f"{count} x {name}" for name, count in sorted(expected.items()))
    return [
        Check(
            text=f"{cluster.STATE_LABEL}=success and {cluster.APPLIED_LABEL}={layout}",
            holds=labels.get(cluster.STATE_LABEL) == model.State.SUCCESS.value
            and labels.get(cluster.APPLIED_LABEL) == layout,
        ),
        Check(
            text=f"{sum(expected.values())} devices are allocatable: {listed}",
            holds=allocatable == dict(expected),
        ),
        Check(
            text="the node is schedulable and nothing is left paused",
            holds={cluster.HOLD_TAINT, objects.UNSCHEDULABLE_TAINT}.isdisjoint(
                taint["key"] for taint in objects.taints(stage.node())
            )
            and cluster.PAUSED_VALUE not in labels.values(),
        ),
    ]


def _check_gone(stage: stages.Stage, names: Iterable[str]) -> Check:
    gone = set(names)
    return Check(
        text=f"the pods that used whole GPUs were evicted: {', '.join(sorted(gone))}",
        holds=gone.isdisjoint(stage.workloads()),
    )


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
"""By the name that ``--scenario`` takes."""
