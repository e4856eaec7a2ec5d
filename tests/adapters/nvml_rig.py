"""A simulated NVML under the real binding, and short names for what tests do with it."""

import contextlib
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from mig_manager import errors
from mig_manager.adapters.nvml import gpus as nvml_gpus
from mig_manager.core import model, profile_name, steps
from mig_manager.sandbox.driver import library as simulated
from mig_manager.sandbox.driver import states
from testkit import nvml_faults
from tests import fakes

ON = model.MigMode.ENABLED
OFF = model.MigMode.DISABLED


class Rig:
    """A simulated node and the adapter on top of it, with time that passes only by waiting."""

    def __init__(self, library: nvml_faults.CountingLibrary, *, in_use_timeout_s: float) -> None:
        self.library = library
        self.state = library.state
        self.clock = fakes.FakeClock()
        self.gpus = nvml_gpus.NvmlGpus(in_use_timeout_s=in_use_timeout_s, clock=self.clock)

    def observe(self, index: int = 0) -> model.Gpu:
        return self.gpus.observe()[index]

    def run(self, *steps: steps.Step) -> None:
        self.gpus.execute(plan_of(self.gpus.observe(), *steps))

    def enable(self, index: int = 0) -> model.Gpu:
        self.run(mode_step(self.observe(index), ON))
        return self.observe(index)

    def fill(self, *names: str, index: int = 0) -> model.Gpu:
        """Switch MIG on and create GPU instances, each with one compute instance, in order."""
        for name in names:
            gpu = self.enable(index)
            create = gi_step(gpu, name)
            self.run(create, ci_step(create, name))
        return self.observe(index)

    def refusal(self, *steps: steps.Step) -> errors.HardwareError:
        """Return the error with which the steps end."""
        with pytest.raises(errors.HardwareError) as caught:
            self.run(*steps)
        return caught.value

    def fault(self, function: str, **how: Any) -> None:
        """Have a C function fail; see ``nvml_faults.Fault``."""
        self.state.add_fault(nvml_faults.Fault(function=function, **how))

    def calls(self, function: str) -> int:
        """Return how often a C function was called."""
        return self.library.counts[function]


Boot = Callable[..., Rig]
"""Starts a node, as ``rig`` does."""


@contextlib.contextmanager
def rig(
    path: pathlib.Path,
    spec: str = "a100-sxm4-40gb",
    *,
    in_use_timeout_s: float = 10.0,
    options: states.Options | None = None,
    faults: Sequence[nvml_faults.Fault] = (),
) -> Iterator[Rig]:
    simulated.create(spec, path, options=options)
    library = nvml_faults.install(path)
    for fault in faults:
        library.state.add_fault(fault)
    try:
        yield Rig(library, in_use_timeout_s=in_use_timeout_s)
    finally:
        simulated.load(None)


def plan_of(gpus: Sequence[model.Gpu], *ordered: steps.Step) -> steps.Plan:
    """Return the plan of these steps, in their order on each GPU."""
    plans = (
        steps.GpuPlan(
            gpu_uuid=gpu.uuid,
            gpu_index=gpu.index,
            steps=tuple(step for step in ordered if step.gpu_uuid == gpu.uuid),
            target=(),
        )
        for gpu in gpus
    )
    return steps.Plan(gpus=tuple(plan for plan in plans if plan.steps))


def profile_of(gpu: model.Gpu, name: str) -> model.GpuInstanceProfile:
    """Find a GPU-instance profile by the name of it or of a part of it."""
    wanted = profile_name.parse(name).gpu_instance
    return next(row for row in gpu.profiles or () if row.profile == wanted)


def mode_step(gpu: model.Gpu, mode: model.MigMode) -> steps.SetMode:
    return steps.SetMode(gpu_uuid=gpu.uuid, mode=mode, needs_reset=gpu.mode_change_needs_reset)


def gi_step(gpu: model.Gpu, name: str, start: int | None = None) -> steps.CreateGpuInstance:
    """Create a GPU instance at a start, or at the first placement that is free."""
    row = profile_of(gpu, name)
    taken = [instance.placement for instance in gpu.gpu_instances]
    placement = next(
        place
        for place in row.placements
        if (place.start == start if start is not None else not any(map(place.overlaps, taken)))
    )
    return steps.CreateGpuInstance(
        gpu_uuid=gpu.uuid,
        profile=row.profile,
        profile_id=row.profile_id,
        placement=placement,
    )


def ci_step(
    created: steps.CreateGpuInstance, name: str, start: int = 0
) -> steps.CreateComputeInstance:
    wanted = profile_name.parse(name)
    return steps.CreateComputeInstance(
        gpu_uuid=created.gpu_uuid,
        gpu_instance_placement=created.placement,
        profile=wanted,
        placement=model.Placement(start, wanted.compute_slices),
    )


def end_steps(gpu: model.Gpu) -> tuple[steps.Step, ...]:
    found: list[steps.Step] = []
    for gi in gpu.gpu_instances:
        found += [
            steps.DestroyComputeInstance(
                gpu_uuid=gpu.uuid,
                gpu_instance_id=gi.instance_id,
                compute_instance_id=ci.instance_id,
                profile=ci.profile,
                uuid=ci.uuid,
            )
            for ci in gi.compute_instances
        ]
        found.append(
            steps.DestroyGpuInstance(
                gpu_uuid=gpu.uuid,
                gpu_instance_id=gi.instance_id,
                profile=gi.profile,
                placement=gi.placement,
            )
        )
    return tuple(found)


def everything(before: model.Gpu) -> steps.Plan:
    """Plan each kind of step: the instances of a GPU are replaced by two others."""
    parted = gi_step(before, "3g.20gb", 0)
    whole = gi_step(before, "2g.10gb", 4)
    return plan_of(
        [before],
        *end_steps(before),
        mode_step(before, OFF),
        mode_step(before, ON),
        parted,
        ci_step(parted, "1c.3g.20gb", 1),
        whole,
        ci_step(whole, "2g.10gb"),
    )


def names(gpu: model.Gpu) -> list[str]:
    """Return what is on a GPU: compute instances by name, and idle GPU instances in brackets."""
    found: list[str] = []
    for gi in gpu.gpu_instances:
        found += [f"{ci.profile}@{gi.placement}" for ci in gi.compute_instances] or [
            f"[{gi.profile}@{gi.placement}]"
        ]
    return found
