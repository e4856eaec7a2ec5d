"""A simulated NVML under the real binding, and short names for what tests do with it.

Through our adapter (``NvmlRig``), or through the binding alone (``Start``).
"""

import contextlib
import ctypes
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pynvml
import pytest

from mig_manager import errors
from mig_manager.adapters.nvml import nvml_gpus
from mig_manager.catalogue import hardware
from mig_manager.core import model, steps
from mig_manager.sandbox.driver import simulated_nvml, state_file, states
from testkit import nvml_faults
from tests.rigs.node import fakes, gpu_values

ON = model.MigMode.ENABLED
OFF = model.MigMode.DISABLED
MIG_CAPABLE = tuple(p for p in hardware.products().values() if p.profiles)
ONE_OF_EACH_GRID = tuple({p.grid: p for p in reversed(MIG_CAPABLE)}.values())
UNKNOWN = 99
_ERRORS = {
    int(value): name.removeprefix("NVML_ERROR_")
    for name, value in vars(pynvml).items()
    if name.startswith("NVML_ERROR_")
}


class NvmlRig:
    """A simulated node and the adapter on top of it, with time that passes only by waiting."""

    def __init__(self, library: nvml_faults.CountingLibrary, *, in_use_timeout_s: float) -> None:
        self.library = library
        self.state = library.state
        self.clock = fakes.FakeClock()
        self.gpus = nvml_gpus.NvmlGpus(in_use_timeout_s=in_use_timeout_s, clock=self.clock)

    def observe(self, index: int = 0) -> model.Gpu:
        return self.gpus.observe()[index]

    def execute(self, *ordered: steps.Step) -> None:
        self.gpus.execute(plan_of(self.gpus.observe(), *ordered))

    def enable(self, index: int = 0) -> model.Gpu:
        self.execute(gpu_values.mode_step(self.observe(index), ON))
        return self.observe(index)

    def fill(self, *names: str, index: int = 0) -> model.Gpu:
        """Switch MIG on and create GPU instances, each with one compute instance, in order."""
        for name in names:
            gpu = self.enable(index)
            create = gpu_values.gi_step(gpu, name)
            self.execute(create, gpu_values.ci_step(create, name))
        return self.observe(index)

    def refusal(self, *ordered: steps.Step) -> errors.HardwareError:
        """Return the error with which the steps end."""
        with pytest.raises(errors.HardwareError) as caught:
            self.execute(*ordered)
        return caught.value

    def fault(self, function: str, **how: Any) -> None:
        """Have a C function fail; see ``nvml_faults.Fault``."""
        self.state.add_fault(nvml_faults.Fault(function=function, **how))

    def calls(self, function: str) -> int:
        """Return how often a C function was called."""
        return self.library.counts[function]


Boot = Callable[..., NvmlRig]  # boots a node, as ``booted`` does
Start = Callable[..., nvml_faults.CountingLibrary]
"""Starts a node with these options and opens NVML on it."""


@contextlib.contextmanager
def booted(
    path: pathlib.Path,
    spec: str = "a100-sxm4-40gb",
    *,
    in_use_timeout_s: float = 10.0,
    options: states.Options | None = None,
    faults: Sequence[nvml_faults.Fault] = (),
    alterations: Mapping[str, nvml_faults.Alteration] | None = None,
) -> Iterator[NvmlRig]:
    state_file.SharedState(path).create(spec, options=options)
    library = nvml_faults.install(path, alterations)
    for fault in faults:
        library.state.add_fault(fault)
    try:
        yield NvmlRig(library, in_use_timeout_s=in_use_timeout_s)
    finally:
        simulated_nvml.load(None)


@contextlib.contextmanager
def nvml_session(
    path: pathlib.Path, spec: str = "A100-SXM4-40GB", **options: Any
) -> Iterator[nvml_faults.CountingLibrary]:
    with booted(path, spec, options=states.Options(**options)) as rig:
        pynvml.nvmlInit()
        yield rig.library


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


def end_steps(gpu: model.Gpu) -> tuple[steps.Step, ...]:
    removals: list[steps.Step] = []
    for gi in gpu.gpu_instances:
        removals += [
            steps.DestroyComputeInstance(
                gpu_uuid=gpu.uuid,
                gpu_instance_id=gi.instance_id,
                within=gi.placement,
                compute_instance_id=ci.instance_id,
                profile=ci.profile,
                uuid=ci.uuid,
            )
            for ci in gi.compute_instances
        ]
        removals.append(
            steps.DestroyGpuInstance(
                gpu_uuid=gpu.uuid,
                gpu_instance_id=gi.instance_id,
                profile=gi.profile,
                placement=gi.placement,
            )
        )
    return tuple(removals)


def everything(before: model.Gpu) -> steps.Plan:
    """Plan each kind of step: the instances of a GPU are replaced by two others."""
    parted = gpu_values.gi_step(before, "3g.20gb", 0)
    whole = gpu_values.gi_step(before, "2g.10gb", 4)
    return plan_of(
        [before],
        *end_steps(before),
        gpu_values.mode_step(before, OFF),
        gpu_values.mode_step(before, ON),
        parted,
        gpu_values.ci_step(parted, "1c.3g.20gb", 1),
        whole,
        gpu_values.ci_step(whole, "2g.10gb"),
    )


# -- through the binding alone ----------------------------------------------------------------


def refusal(call: Callable[..., object], *arguments: object) -> str:
    """Make a call that must fail and return the name of NVML's error."""
    with pytest.raises(pynvml.NVMLError) as caught:
        call(*arguments)
    return str(_ERRORS[int(caught.value.value)])


def handle(index: int = 0) -> Any:
    return pynvml.nvmlDeviceGetHandleByIndex(index)


def gpu_with_mig(index: int = 0) -> Any:
    """Return the handle of a GPU with MIG on."""
    device = handle(index)
    assert pynvml.nvmlDeviceSetMigMode(device, 1) == pynvml.NVML_SUCCESS
    return device


def create_instances(device: Any, profile_id: int = 9) -> tuple[Any, Any]:
    """Create a GPU instance with a compute instance that spans it."""
    instance = pynvml.nvmlDeviceCreateGpuInstance(device, profile_id)
    rows = hardware.find(pynvml.nvmlDeviceGetName(device)).profiles
    row = next(row for row in rows if row.profile_id == profile_id)
    spanning = max(row.compute, key=lambda compute: compute.slices)
    return instance, pynvml.nvmlGpuInstanceCreateComputeInstance(instance, spanning.profile_id)


def placements(device: Any, profile_id: int) -> list[tuple[int, int]]:
    """Ask for the count, then for the placements, as C callers do."""
    count = ctypes.c_uint()
    ask = pynvml.nvmlDeviceGetGpuInstancePossiblePlacements
    ask(device, profile_id, None, ctypes.byref(count))
    structs = (pynvml.c_nvmlGpuInstancePlacement_t * count.value)()
    ask(device, profile_id, structs, ctypes.byref(count))
    return [(place.start, place.size) for place in structs]


def at(start_slice: int, size: int) -> Any:
    return ctypes.byref(pynvml.c_nvmlGpuInstancePlacement_t(start_slice, size))
