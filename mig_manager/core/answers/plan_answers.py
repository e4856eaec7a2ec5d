"""Plans of GPUs in answers, and the answers of commands that change GPUs."""

import dataclasses
from typing import Annotated, Literal, NotRequired, TypedDict

from mig_manager.core import model, steps
from mig_manager.core.answers.gpu_answers import UnreachableGpu
from mig_manager.core.answers.values import Strategy

Step = Annotated[dict[str, object], "core.answers.plan_answers.ACTIONS"]
PublishedStep = Annotated[
    dict[str, object], "core.answers.plan_answers.ACTIONS", "core.answers.gpu_answers.LOCAL_IDS"
]


class _Target(TypedDict):
    profile: str
    placement: str
    compute_instances: list[str]  # their profiles
    kept: bool  # whether it exists already


class _GpuPlanFacts(TypedDict):
    index: int
    uuid: str
    changes_mode: bool
    needs_reset: bool
    is_provisional: bool  # whether the instances are unknown until MIG is enabled
    target: list[_Target]  # empty while is_provisional


class GpuPlan(_GpuPlanFacts):
    """The change of one GPU."""

    steps: list[Step]  # in the order in which they run


class _PublishedGpuPlan(_GpuPlanFacts):
    steps: list[PublishedStep]  # in the order in which they run


class _Counts(TypedDict):
    destroyed: int
    created: int
    kept: int


class _PlanFacts(TypedDict):
    layout: str
    origin: str | None  # where the layout comes from, such as config.yaml:12
    is_applied: bool  # whether there is nothing to do
    is_provisional: bool
    instances: _Counts
    unserved_mig_strategies: dict[Strategy, str]  # why the device plugin would exit
    warnings: list[str]
    unreachable_gpus: list[UnreachableGpu]


class PublishedPlan(_PlanFacts):
    """What a layout changes on a node, as far as its annotations show."""

    gpus: list[_PublishedGpuPlan]  # GPUs that change


class Plan(_PlanFacts):
    """Answer of 'mig-manager plan', 'apply --dry-run' and 'assert'."""

    kind: Literal["Plan"]
    destroyed_uuids: list[str]  # MIG devices that are destroyed, GPUs whose mode changes
    affected_pods: list[str]  # pods that use them, as far as known
    gpus: list[GpuPlan]  # GPUs that change


class Change(TypedDict):
    """Answer of 'mig-manager apply' and 'restore'."""

    kind: Literal["Change"]
    layout: str
    is_changed: bool
    warnings: list[str]
    plans: list[Plan]  # executed plans
    unreachable_gpus: list[UnreachableGpu]


class Boot(TypedDict):
    """Answer of 'mig-manager boot'."""

    kind: Literal["Boot"]
    layout: str  # empty: no layout to restore
    is_changed: bool
    plans: list[Plan]  # executed plans
    problems: list[str]
    faults: NotRequired[list[str]]  # GPUs that need recovery, with what to do


OMITTED_FIELDS = frozenset({"gpu_uuid", "profile_id", "within"})
"""Fields of a step that no answer has: a plan names its GPU, and placement and ids the rest."""
ACTIONS = {
    steps.DestroyComputeInstance: "destroy-compute-instance",
    steps.DestroyGpuInstance: "destroy-gpu-instance",
    steps.SetMode: "set-mode",
    steps.Reset: "reset-gpu",
    steps.CreateGpuInstance: "create-gpu-instance",
    steps.CreateComputeInstance: "create-compute-instance",
}


def plan(planned: steps.GpuPlan) -> GpuPlan:
    """Return the plan of one GPU."""
    return {
        "index": planned.gpu_index,
        "uuid": planned.gpu_uuid,
        "changes_mode": bool(planned.of(steps.SetMode)),
        "needs_reset": planned.resets_gpu,
        "is_provisional": planned.is_provisional,
        "steps": [_step_data(step) for step in planned.steps],
        "target": [
            {
                "profile": str(target.profile),
                "placement": str(target.placement),
                "compute_instances": [str(ci.profile) for ci in target.compute_instances],
                "kept": target.is_kept,
            }
            for target in planned.target
        ],
    }


def _step_data(step: steps.Step) -> dict[str, object]:
    def plain(value: object) -> object:
        if isinstance(value, model.Profile | model.Placement):
            return str(value)
        return value.value if isinstance(value, model.MigMode) else value

    return {"action": ACTIONS[type(step)]} | {
        each.name: plain(getattr(step, each.name))
        for each in dataclasses.fields(step)
        if each.name not in OMITTED_FIELDS
    }
