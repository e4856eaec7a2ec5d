"""What a reconfiguration asks of NVML, counted by the simulated library."""

import collections
import dataclasses
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import pytest

from mig_manager.adapters import host
from mig_manager.adapters.nvml import nvml_gpus
from mig_manager.core import model
from mig_manager.core.planner import planner
from mig_manager.sandbox.driver import simulated_nvml
from testkit import matrix, nvml_faults
from tests.rigs.driver import nvml_codes
from tests.rigs.node import gpu_values
from tests.rigs.planner import oracle

ON = model.MigMode.ENABLED

LASTING = frozenset(
    {
        "nvmlDeviceGetName",
        "nvmlDeviceGetPciInfo_v3",
        "nvmlDeviceGetArchitecture",
        "nvmlDeviceGetMemoryInfo",
        "nvmlDeviceGetFieldValues",
        "nvmlDeviceGetVirtualizationMode",
        "nvmlDeviceGetGpuInstanceProfileInfo",
        "nvmlDeviceGetGpuInstancePossiblePlacements_v2",
    }
)
"""Questions about what does not change as long as the MIG mode does not."""

INSTANCE_QUESTIONS = 4
"""At most so many for each instance that is destroyed or made, beside the change itself."""

PROFILE_QUESTIONS = 12
"""At most so many about what GPU instances can hold, for each profile that is new to the GPU."""


def small(transition: matrix.Transition) -> matrix.Transition:
    """Return the same on one GPU, beside one that stays as it is."""
    return dataclasses.replace(
        transition,
        before=(transition.before[0], transition.before[-1]),
        after=(transition.after[0], transition.before[-1]),
    )


class Recording(NamedTuple):
    before: tuple[model.Gpu, ...]
    desired: dict[str, model.DesiredGpu]
    change: Sequence[nvml_faults.Call]
    observation_after: Sequence[nvml_faults.Call]
    after: tuple[model.Gpu, ...]


def record(transition: matrix.Transition, path: pathlib.Path) -> Recording:
    matrix.prepare(transition, path)
    nvml_faults.install(path).state.log_calls()
    try:
        gpus = nvml_gpus.NvmlGpus(clock=host.SystemClock())
        before = gpus.observe()
        first = len(nvml_faults.read_calls(path))
        desired = transition.desired_gpus(before)
        plan = planner.plan(before, desired)
        changed = {gpu.uuid: gpu for gpu in gpus.execute(plan, before)}
        after = gpus.observe()
        calls = nvml_faults.read_calls(path)
        assert tuple(changed.get(gpu.uuid, gpu) for gpu in before) == after
        assert planner.plan(after, desired).is_empty
        # The driver of nodes in memory and this one are written apart.
        assert gpu_values.geometry(gpu_values.execute(before, plan)) == gpu_values.geometry(after)
    finally:
        simulated_nvml.load(None)
    last = max(i for i, call in enumerate(calls) if call.function == "nvmlInitWithFlags")
    return Recording(before, desired, calls[first:last], calls[last:], after)


def fewest_changes(gpu: model.Gpu, desired: model.DesiredGpu) -> int:
    """Return how many changes a GPU needs, by trying every desired layout.

    Instances end before MIG is switched off, because Ampere counts them as clients of the GPU.
    """
    switches = int(gpu.current_mode is not desired.mode)
    if desired.mode is not ON:
        inside = sum(len(gi.compute_instances) for gi in gpu.gpu_instances)
        return switches + len(gpu.gpu_instances) + inside
    goals = oracle.goals(gpu, dict(desired.devices))
    return switches + min(oracle.price(gpu, goal, {})[1] for goal in goals)


@pytest.mark.parametrize(
    "transition",
    [
        pytest.param(
            each,
            id=f"{each.product}: {each.name}",
            marks=() if number % 4 == 0 else pytest.mark.slow,
        )
        for number, each in enumerate(matrix.TRANSITIONS)
    ],
)
def test_no_plan_needs_fewer_changes_and_no_query_is_superfluous(
    transition: matrix.Transition, tmp_path: pathlib.Path
) -> None:
    played = record(small(transition), tmp_path / "gpus.json")
    counts = collections.Counter(call.function for call in played.change)
    changes = [call for call in played.change if call.function in nvml_codes.CHANGES]

    assert len(changes) == sum(
        fewest_changes(gpu, played.desired[gpu.uuid]) for gpu in played.before
    )
    assert counts["nvmlInitWithFlags"] == counts["nvmlShutdown"] == 1
    # Of the GPU that stays as it is, nothing.
    assert {call.gpu for call in played.change if call.gpu is not None} == {0}
    asked_again = {name: count for name, count in counts.items() if name in LASTING}
    if "nvmlDeviceSetMigMode" not in counts:
        assert asked_again == {}
    # To see what came of it is to observation at that GPU, and at no other.
    an_observation = sum(call.gpu == 0 for call in played.observation_after)
    had, has = (
        {instance.profile_id for instance in gpus[0].gpu_instances}
        for gpus in (played.before, played.after)
    )
    about_profiles = PROFILE_QUESTIONS * len(has - had)
    beyond = len(played.change) - len(changes)
    assert beyond <= an_observation + INSTANCE_QUESTIONS * len(changes) + about_profiles


def test_the_queries_of_a_change_do_not_grow_with_the_node(tmp_path: pathlib.Path) -> None:
    one_slice = next(t for t in matrix.TRANSITIONS if t.before[1:] == t.after[1:])

    few = record(small(one_slice), tmp_path / "few")
    many = record(one_slice, tmp_path / "many")

    assert len(many.before) == matrix.GPUS
    assert collections.Counter(call.function for call in many.change) == collections.Counter(
        call.function for call in few.change
    )
