"""Whatever is created and destroyed in whatever order, the simulated GPU stays possible."""

import pathlib
import tempfile
from typing import Any

import hypothesis
import pynvml
import pytest
from hypothesis import strategies

from mig_manager.catalogue import product_table
from mig_manager.core import model
from mig_manager.sandbox.driver import states
from testkit import nvml_faults
from tests.rigs.node import nvml_rig

PRODUCTS = ("A100", "H100", "GH200", "A30", "RTX-PRO-6000")
REFUSALS = (pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES, pynvml.NVML_ERROR_IN_USE)


class Walk:
    """A GPU on which random things are done."""

    def __init__(self, library: nvml_faults.CountingLibrary) -> None:
        self.library = library
        self.device = nvml_rig.gpu_with_mig()
        (self.board,) = library.state.boards

    @property
    def gpu(self) -> states.GpuState:
        return self.library.state.read().gpus[0]

    def step(self, choice: int) -> None:
        """Do one of the things that can be done now."""
        acts = [self.create, self.create_placed]
        if self.gpu.instances:
            acts += [self.create_compute, self.destroy]
        acts[choice % len(acts)](choice // len(acts))

    def create(self, choice: int) -> None:
        self.attempt(pynvml.nvmlDeviceCreateGpuInstance, self.device, self.row(choice).profile_id)

    def create_placed(self, choice: int) -> None:
        profile_id = self.row(choice).profile_id
        placements = nvml_rig.placements(self.device, profile_id)
        place = nvml_rig.at(*placements[choice % len(placements)])
        create = pynvml.nvmlDeviceCreateGpuInstanceWithPlacement
        self.attempt(create, self.device, profile_id, place)

    def create_compute(self, choice: int) -> None:
        instance = self.gpu.instances[choice % len(self.gpu.instances)]
        rows = self.board.row(instance.profile_id).compute
        handle = pynvml.nvmlDeviceGetGpuInstanceById(self.device, instance.instance_id)
        create = pynvml.nvmlGpuInstanceCreateComputeInstance
        self.attempt(create, handle, rows[choice % len(rows)].profile_id)

    def destroy(self, choice: int) -> None:
        instance = self.gpu.instances[choice % len(self.gpu.instances)]
        handle = pynvml.nvmlDeviceGetGpuInstanceById(self.device, instance.instance_id)
        for compute in instance.compute_instances:
            assert not self.attempt(pynvml.nvmlGpuInstanceDestroy, handle)
            compute_handle = pynvml.nvmlGpuInstanceGetComputeInstanceById(
                handle, compute.instance_id
            )
            pynvml.nvmlComputeInstanceDestroy(compute_handle)
        pynvml.nvmlGpuInstanceDestroy(handle)

    def attempt(self, call: Any, *arguments: Any) -> bool:
        """Return whether a call succeeded; only the refusals of a full GPU are forgiven."""
        before = self.gpu
        try:
            call(*arguments)
        except pynvml.NVMLError as error:
            assert error.value in REFUSALS  # noqa: PT017
            assert self.gpu == before
            return False
        return True

    def row(self, choice: int) -> product_table.GpuProfile:
        rows = self.board.product.profiles
        return rows[choice % len(rows)]

    def check(self) -> None:
        gpu = self.gpu
        rows = [self.board.row(instance.profile_id) for instance in gpu.instances]
        pool = model.Engines.pool(row.engines for row in self.board.product.profiles)
        assert model.Engines.total(row.engines for row in rows).within(pool)
        assert disjoint([instance.placement for instance in gpu.instances])
        ids = [instance.instance_id for instance in gpu.instances]
        assert ids == sorted(set(ids))
        uuids = []
        for instance in gpu.instances:
            assert disjoint([compute.placement for compute in instance.compute_instances])
            uuids += [self.board.mig_uuid(instance, c) for c in instance.compute_instances]
        assert len(set(uuids)) == len(uuids)
        by_index = pynvml.nvmlDeviceGetMigDeviceHandleByIndex
        listed = [pynvml.nvmlDeviceGetUUID(by_index(self.device, i)) for i in range(len(uuids))]
        assert uuids == listed
        end = nvml_rig.refusal(by_index, self.device, len(uuids))
        assert end in ("NOT_FOUND", "INVALID_ARGUMENT")


def disjoint(placements: list[model.Placement]) -> bool:
    slices = [number for place in placements for number in range(place.start, place.end)]
    return len(slices) == len(set(slices))


@pytest.mark.slow
@hypothesis.settings(max_examples=30, deadline=None)
@hypothesis.given(
    product=strategies.sampled_from(PRODUCTS),
    swapped=strategies.booleans(),
    choices=strategies.lists(strategies.integers(0, 500), min_size=5, max_size=25),
)
def test_random_walk_never_reaches_an_impossible_state(
    *, product: str, swapped: bool, choices: list[int]
) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        nvml_rig.nvml_session(
            pathlib.Path(folder, "node"), product, swapped_gpus=(0,) if swapped else ()
        ) as library,
    ):
        walk = Walk(library)
        for choice in choices:
            walk.step(choice)
            walk.check()
        while walk.gpu.instances:
            walk.destroy(0)
        whole = next(row for row in walk.board.product.profiles if row.max_instances == 1)
        pynvml.nvmlDeviceCreateGpuInstance(walk.device, whole.profile_id)
