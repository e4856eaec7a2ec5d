"""The scenarios of the demo, by name."""

import collections
import dataclasses
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mig_manager.core import model
from mig_manager.core.layout import layout_parser, selection
from mig_manager.core.objects import well_known
from mig_manager.core.records import run_status
from mig_manager.sandbox import demo_layouts, stages
from mig_manager.sandbox.driver import simulated_events
from mig_manager.sandbox.node import objects

_FAULT = "0=gpu-reset"

Checks = dict[str, bool]  # expectations of a scenario, and whether they hold


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What a person does on a node, and what must come of it."""

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
    stage.label(demo_layouts.BALANCED)
    stage.wait_for_end(demo_layouts.BALANCED)
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
    status = _request(stage, layout, say)
    is_refused = _is_failed(status) and status["reason"] == "DoesNotFit"
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
    status = _request(stage, layout, say)
    is_named = status["reason"] == "DrainTimeout" and stages.BUDGET in str(status["message"])
    is_untouched = (stage.devices_by_pod(), stage.gpus.observe()) == before
    blocked = {
        "the drain failed with the reason DrainTimeout and named pod and budget": (
            _is_failed(status) and is_named
        ),
        "pods, GPUs and device plugin are unchanged": is_untouched,
    }
    say(f"kubectl delete poddisruptionbudget {stages.BUDGET}")
    stage.unguard()
    stage.wait(
        lambda: stage.status().get("state") == run_status.State.SUCCESS.value,
        "the agent's own retry",
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


def _is_failed(status: Mapping[str, Any]) -> bool:
    return bool(status["state"] == run_status.State.FAILED.value)


def _request(stage: stages.Stage, layout: str, say: Callable[[str], None]) -> Mapping[str, Any]:
    """Request a layout as a person does; return the status at the end of the run."""
    label = f"{well_known.CONFIG_LABEL}={layout}"
    say(f"kubectl label node {stages.NODE_NAME} {label} --overwrite")
    stage.label(layout)
    return stage.wait_for_status(layout)


def _play_fault(stage: stages.Stage, layout: str, say: Callable[[str], None]) -> Checks:
    before = stage.devices_by_pod()
    gpus = stage.gpus.observe()
    faulty = {device for gpu in gpus[:1] for device in gpu.mig_uuids}
    state_file = shlex.quote(str(stage.machine.state_file))
    say(f"mig-manager status --simulate-state {state_file} --simulate-event {_FAULT}")
    simulated_events.simulate(_FAULT, stage.machine.state_file)

    def is_repaired() -> bool:
        is_at_rest = stage.status()["state"] == run_status.State.SUCCESS.value
        return is_at_rest and not any(gpu.needs_recovery for gpu in stage.gpus.observe())

    stage.wait(is_repaired, "repair of the GPU")
    affected = {name for name, ids in before.items() if ids & faulty}
    return _is_active(stage, layout) | _only_evicted(
        stage, before, affected, "GPU 0", has_others=len(gpus) > 1
    )


def _is_active(stage: stages.Stage, layout: str) -> Checks:
    labels = objects.labels(stage.node())
    text = stage.config_file.read_text(encoding="utf-8")
    document = layout_parser.parse(text, source=str(stage.config_file))
    expected: collections.Counter[str] = collections.Counter()
    for gpu in selection.select(document.layout(layout), stage.gpus.observe()).values():
        for profile, count in gpu.devices:
            # As in NVIDIA's documentation, to check ``resources.of_profile`` independently.
            name = str(profile).replace("+", ".")
            expected[f"{well_known.RESOURCE_PREFIX}mig-{name}"] += count
    listed = ", ".join(f"{count} x {name}" for name, count in sorted(expected.items()))
    published = {
        well_known.STATE_LABEL: run_status.State.SUCCESS.value,
        well_known.APPLIED_LABEL: layout,
    }
    taints = {taint["key"] for taint in objects.taints(stage.node())}
    is_closed = bool(taints & {well_known.RECONFIGURING_TAINT, well_known.CORDON_TAINT})
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


BY_NAME: Mapping[str, Scenario] = {
    "one-slice": Scenario(
        title="one instance changes beside running pods",
        prepare=_fill,
        layout=lambda _gpus: demo_layouts.ONE_SLICE,
        play=_play_one_slice,
    ),
    "first-layout": Scenario(
        title="a first layout: whole GPUs become MIG devices",
        prepare=_use_whole_gpus,
        layout=demo_layouts.smallest_everywhere,
        play=_play_first,
    ),
    "does-not-fit": Scenario(
        title="a layout that does not fit is refused before anything is touched",
        prepare=_fill,
        layout=lambda _gpus: demo_layouts.TOO_MUCH,
        play=_play_refusal,
    ),
    "budget": Scenario(
        title="a PodDisruptionBudget blocks the drain",
        prepare=_fill_and_guard,
        layout=lambda _gpus: demo_layouts.ONE_SLICE,
        play=_play_budget,
        agent_options=("--drain-timeout-s", "3", "--retry-initial-s", "1", "--retry-max-s", "2"),
    ),
    "gpu-fault": Scenario(
        title="a GPU with a fault is reset, and its layout restored",
        prepare=_fill,
        layout=lambda _gpus: demo_layouts.BALANCED,
        play=_play_fault,
        agent_options=("--repair", "reset", "--drift-check-interval-s", "1"),
    ),
}
