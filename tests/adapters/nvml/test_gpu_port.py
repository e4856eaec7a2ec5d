"""GPUs through NVML, and the fake that stands for them: the same tests for both."""

import dataclasses

import pytest

from mig_manager import errors, reasons
from mig_manager.core import model, ports, profile_name, steps
from mig_manager.core.planner import planner
from tests.rigs.node import fake_host, gpu_values, node_rig, nvml_rig

SPEC = "2xA100-SXM4-40GB"
EMPTY, WHOLE, SLICED = (
    model.DesiredGpu.of(model.MigMode.ENABLED, {profile_name.parse(name): count})
    for name, count in (("7g.40gb", 0), ("7g.40gb", 1), ("1g.5gb", 7))
)


class InMemory:
    def __init__(self) -> None:
        self._node = node_rig.NodeRig(gpus=gpu_values.gpus_of(SPEC))
        self.gpus: ports.Gpus = fake_host.FakeGpus(self._node)

    def use(self, gpu: model.Gpu) -> None:
        self._node.driver.clients = "train"
        self._node.failures.add(
            steps.Step,
            errors.HardwareError("in use", reason=reasons.Reason.IN_USE),
            when=lambda: self._node.driver.next_step.gpu_uuid == gpu.uuid,
        )

    def lose(self, gpu: model.Gpu) -> None:
        self._node.driver.lost.add(gpu.uuid)


class Simulated:
    def __init__(self, node: nvml_rig.NvmlRig) -> None:
        self._state = node.state
        self.gpus: ports.Gpus = node.gpus

    def use(self, gpu: model.Gpu) -> None:
        (device,) = gpu.mig_uuids
        self._state.add_client(device, name="train")

    def lose(self, gpu: model.Gpu) -> None:
        self._state.lose_gpu(gpu.index)


Rig = InMemory | Simulated


@pytest.fixture(params=["fake", "adapter"])
def rig(request: pytest.FixtureRequest, boot: nvml_rig.Boot) -> Rig:
    """Return two GPUs with one device each."""
    is_fake = request.param == "fake"
    made: Rig = InMemory() if is_fake else Simulated(boot(SPEC, in_use_timeout_s=0.0))
    made.gpus.execute(plan_of(made.gpus.observe(), WHOLE))
    return made


def plan_of(
    gpus: model.ObservedGpus, desired: model.DesiredGpu, *, requires_idle: bool = False
) -> steps.Plan:
    plan = planner.plan(gpus, {gpu.uuid: desired for gpu in gpus})
    return dataclasses.replace(plan, requires_idle=requires_idle)


def test_executed_plan_is_observed_afterwards(rig: Rig) -> None:
    before = rig.gpus.observe()

    after = rig.gpus.execute(plan_of(before, SLICED), before)

    assert [len(gpu.mig_uuids) for gpu in after] == [7, 7]
    assert gpu_values.geometry(after) == gpu_values.geometry(rig.gpus.observe())
    assert plan_of(after, SLICED).is_empty


@pytest.mark.parametrize("other", [EMPTY, SLICED], ids=["destroyed", "replaced"])
def test_instance_that_another_program_destroyed_counts_as_destroyed(
    other: model.DesiredGpu, rig: Rig
) -> None:
    plan = plan_of(rig.gpus.observe(), EMPTY)
    before = rig.gpus.execute(plan_of(rig.gpus.observe(), other))

    assert gpu_values.geometry(rig.gpus.execute(plan)) == gpu_values.geometry(before)


def test_only_the_gpus_of_a_plan_are_returned(rig: Rig) -> None:
    _, second = rig.gpus.observe()

    after = rig.gpus.execute(plan_of(model.ObservedGpus([second]), SLICED))

    assert [gpu.uuid for gpu in after] == [second.uuid]


def test_refused_step_on_one_gpu_does_not_stop_the_other(rig: Rig) -> None:
    before = rig.gpus.observe()
    rig.use(before[0])

    with pytest.raises(errors.HardwareError) as caught:
        rig.gpus.execute(plan_of(before, SLICED))

    assert caught.value.reason is reasons.Reason.IN_USE
    assert [len(gpu.mig_uuids) for gpu in rig.gpus.observe()] == [1, 7]


def test_plan_for_idle_gpus_is_refused_before_its_first_step(rig: Rig) -> None:
    before = rig.gpus.observe()
    rig.use(before[0])

    with pytest.raises(errors.GpuInUseError, match="train"):
        rig.gpus.execute(plan_of(before, SLICED, requires_idle=True), before)

    assert gpu_values.geometry(rig.gpus.observe()) == gpu_values.geometry(before)


def test_plan_whose_instances_exist_is_refused_at_its_start_only(rig: Rig) -> None:
    rig.gpus.execute(plan_of(rig.gpus.observe(), EMPTY))
    plan = plan_of(rig.gpus.observe(), SLICED)
    before = rig.gpus.execute(plan)

    again = rig.gpus.execute(plan)
    with pytest.raises(errors.OutdatedPlanError, match=r"has 1g\.5gb at 0:1"):
        rig.gpus.execute(dataclasses.replace(plan, requires_idle=True), again)

    assert gpu_values.geometry(again) == gpu_values.geometry(before)


@pytest.mark.parametrize("requires_idle", [False, True])
def test_lost_gpu_is_unreachable_and_the_other_one_changes(
    rig: Rig, *, requires_idle: bool
) -> None:
    before = rig.gpus.observe()
    rig.lose(before[0])

    after = rig.gpus.execute(plan_of(before, SLICED, requires_idle=requires_idle), before)

    assert after.unreachable[0].uuid == before[0].uuid
    for observed in (after, rig.gpus.observe()):
        (lost,), (other,) = observed.unreachable, observed
        assert (lost.index, lost.reason) == (0, reasons.Reason.GPU_LOST)
        assert len(other.mig_uuids) == 7
