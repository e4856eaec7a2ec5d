"""What is on the GPUs, as NVML reports it."""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import pynvml
import pytest

from mig_manager import errors, reasons
from mig_manager.adapters import host
from mig_manager.adapters.nvml import gpu_device, nvml_gpus
from mig_manager.catalogue import hardware, product_table
from mig_manager.core import model
from mig_manager.core.planner import planner
from mig_manager.sandbox.driver import calls, simulated_nvml, states
from testkit import matrix, nvml_faults
from tests.rigs import layout_table
from tests.rigs.node import nvml_rig
from tests.rigs.node.gpu_values import ci_step, gi_step
from tests.rigs.node.nvml_rig import OFF, Boot, NvmlRig, end_steps

PRODUCTS = [
    pytest.param(product, id=product.key)
    for product in hardware.products().values()
    if not product.not_simulatable
]
CAPABLE = [
    pytest.param(
        product,
        id=product.key,
        marks=() if product in nvml_rig.ONE_OF_EACH_GRID else pytest.mark.slow,
    )
    for product in nvml_rig.MIG_CAPABLE
    if not product.not_simulatable
]


@pytest.mark.parametrize("product", PRODUCTS)
def test_every_product_is_observed_as_it_is(product: product_table.Product, boot: Boot) -> None:
    rig = boot(product.key)
    gpu = rig.observe()
    expected = hardware.template(product)
    # What an idle GPU has by its model; the rest is its own.
    shared = {
        field.name: getattr(expected, field.name)
        for field in dataclasses.fields(expected)
        if field.name not in {"uuid", "pci_address", "pci_subsystem_id", "profiles"}
    }
    assert dataclasses.replace(gpu, **shared) == gpu
    assert sorted(gpu.profiles or (), key=lambda row: row.enum_index) == sorted(
        expected.profiles or (), key=lambda row: row.enum_index
    )
    assert gpu.pci_address == "00000000:07:00.0"


@pytest.mark.parametrize("product", CAPABLE)
def test_every_profile_of_a_product_is_created_and_observed_by_its_name(
    product: product_table.Product, boot: Boot
) -> None:
    rig = boot(product.key)
    empty = rig.enable()
    for row in empty.profiles or ():
        gpu = rig.fill(str(row.profile))
        (instance,) = gpu.gpu_instances
        assert instance.profile == row.profile
        assert instance.profile_id == row.profile_id
        (compute,) = instance.compute_instances
        assert compute.profile == row.profile
        assert gpu.mig_uuids == (compute.uuid,)
        assert (compute.uuid or "").startswith("MIG-")
        rig.execute(*end_steps(gpu))
    assert rig.observe() == empty


def test_gpus_come_in_the_order_of_their_indices(boot: Boot) -> None:
    rig = boot("2xa100-sxm4-40gb+t4+h100-sxm5-80gb")
    gpus = rig.gpus.observe()
    assert [gpu.index for gpu in gpus] == [0, 1, 2, 3]
    assert [gpu.architecture.value for gpu in gpus] == ["ampere", "ampere", "other", "hopper"]
    assert [gpu.mode_change_needs_reset for gpu in gpus] == [True, True, False, False]


def test_profiles_unreported_while_mig_is_off_are_read_once_it_is_on(boot: Boot) -> None:
    rig = boot(options=states.Options(reports_profiles_while_mig_off=False))
    assert rig.observe().profiles is None
    assert len(rig.enable().profiles or ()) == len(hardware.find("a100").profiles)


def test_a_library_that_knows_fewer_profiles_reports_those_it_knows(boot: Boot) -> None:
    rig = boot(options=states.Options(profile_enum_count=9))
    reported = rig.observe().profiles or ()
    assert {row.enum_index for row in reported} == {0, 1, 2, 3, 4, 7}


@pytest.mark.parametrize("spec", ["a100-sxm4-40gb", "h100-sxm5-80gb"])
def test_an_old_library_leaves_the_need_for_a_reset_to_the_architecture(
    spec: str, boot: Boot
) -> None:
    rig = boot(spec, options=states.Options(absent_functions=("nvmlDeviceGetFieldValues",)))
    gpu = rig.observe()
    assert gpu.mode_change_needs_reset is (gpu.architecture is model.Architecture.AMPERE)


@pytest.mark.parametrize("absent", [(), ("nvmlDeviceGetVirtualizationMode",)])
@pytest.mark.parametrize("name", ["NONE", "PASSTHROUGH", "VGPU"])
def test_virtualization_is_observed_if_the_library_has_the_query(
    name: str, absent: tuple[str, ...], boot: Boot
) -> None:
    mode = model.Virtualization[name]
    rig = boot(options=states.Options(virtualization=mode, absent_functions=absent))
    assert rig.observe().virtualization is model.Virtualization["NONE" if absent else name]


def test_a_gpu_instance_without_compute_instance_is_observed(rig: NvmlRig) -> None:
    rig.execute(gi_step(rig.enable(), "2g.10gb", 4))
    gpu = rig.observe()
    assert layout_table.gpu_in_words(gpu) == "(2g.10gb)@4"
    assert gpu.mig_uuids == ()


def test_parts_of_a_gpu_instance_are_named_and_placed_as_parts(rig: NvmlRig) -> None:
    whole = gi_step(rig.enable(), "3g.20gb", 4)
    rig.execute(whole, ci_step(whole, "1c.3g.20gb", 2), ci_step(whole, "2c.3g.20gb", 0))
    (instance,) = rig.observe().gpu_instances
    assert {(str(ci.profile), str(ci.placement)) for ci in instance.compute_instances} == {
        ("1c.3g.20gb", "2:1"),
        ("2c.3g.20gb", "0:2"),
    }
    assert len({ci.uuid for ci in instance.compute_instances}) == 2


def test_every_mig_device_is_found_behind_a_gap_in_the_indices(rig: NvmlRig) -> None:
    before = rig.fill(*["1g.5gb"] * 4)
    first, second = end_steps(before)[:2]
    rig.execute(first, second)
    after = rig.observe()
    assert len(after.mig_uuids) == 3
    assert set(after.mig_uuids) < set(before.mig_uuids)


def test_instances_are_in_the_order_of_their_placements(boot: Boot) -> None:
    rig = boot(options=states.Options(swapped_gpus=(0,)))
    gpu = rig.fill(*["1g.5gb"] * 7)
    ids = [instance.instance_id for instance in gpu.gpu_instances]
    assert ids != sorted(ids)
    assert [instance.placement.start for instance in gpu.gpu_instances] == list(range(7))


@pytest.mark.parametrize("code", [states.Code.NO_PERMISSION, states.Code.NOT_SUPPORTED])
def test_without_placements_no_profiles_are_reported_while_mig_is_off(
    code: states.Code, rig: NvmlRig
) -> None:
    rig.fault("nvmlDeviceGetGpuInstancePossiblePlacements*", code=code)
    gpu = rig.observe()
    assert (gpu.profiles, gpu.current_mode) == (None, OFF)


@pytest.mark.parametrize(
    ("spec", "index"), [("a100-sxm4-40gb", 0), ("2xa100-sxm4-40gb", 1)], ids=["alone", "beside"]
)
def test_instances_that_may_not_be_listed_are_an_error_and_never_none(
    boot: Boot, spec: str, index: int
) -> None:
    rig = boot(spec)
    rig.fill("1g.5gb", index=index)
    rig.state.set_options(states.Options(permitted=False))
    with pytest.raises(errors.HardwareError) as caught:
        rig.gpus.observe()
    assert caught.value.reason is reasons.Reason.NO_PERMISSION
    assert caught.value.gpu.startswith(f"GPU {index} (GPU-")


def test_lasting_facts_are_queried_once_for_any_number_of_instances(rig: NvmlRig) -> None:
    rig.fill(*["1g.5gb"] * 7)
    functions = (
        "nvmlDeviceGetMemoryInfo",
        "nvmlDeviceGetGpuInstanceProfileInfo",
        "nvmlGpuInstanceGetComputeInstanceProfileInfo",
        "nvmlDeviceGetMigMode",
    )
    before = {function: rig.calls(function) for function in functions}
    rig.gpus.observe()
    added = {function: rig.calls(function) - before[function] for function in functions}
    assert added["nvmlDeviceGetMemoryInfo"] == 1
    assert added["nvmlDeviceGetMigMode"] == 1
    assert added["nvmlDeviceGetGpuInstanceProfileInfo"] <= 32
    assert added["nvmlGpuInstanceGetComputeInstanceProfileInfo"] <= 16


@pytest.mark.parametrize(
    "code",
    [
        states.Code.GPU_IS_LOST,
        states.Code.UNKNOWN,
        states.Code.RESET_REQUIRED,
        states.Code.TIMEOUT,
    ],
)
def test_one_gpu_that_answers_an_error_does_not_hide_the_others(
    code: states.Code, boot: Boot
) -> None:
    rig = boot("3xa100-sxm4-40gb")
    uuid = rig.observe(1).uuid
    rig.fault("nvmlDeviceGetMigMode", gpu=1, code=code, count=None)
    observed = rig.gpus.observe()
    assert [gpu.index for gpu in observed] == [0, 2]
    (unreachable,) = observed.unreachable
    assert (unreachable.index, unreachable.uuid, unreachable.code) == (1, uuid, code)
    assert "nvmlDeviceGetMigMode" in unreachable.message


def test_every_gpu_unreachable_is_an_error_that_names_each(boot: Boot) -> None:
    rig = boot("2xa100-sxm4-40gb")
    rig.state.lose_gpu(0)
    uuid = rig.state.boards[1].uuid
    rig.fault("nvmlDeviceGetMigMode", gpu=1, code=states.Code.GPU_IS_LOST)
    with pytest.raises(errors.HardwareError) as caught:
        rig.gpus.observe()
    first, second = caught.value.message.split("; ")
    assert first.startswith("GPU 0")
    assert second == f"GPU 1 ({uuid}): nvmlDeviceGetMigMode answered 'GPU is lost'"
    assert caught.value.reason is reasons.Reason.GPU_LOST
    assert caught.value.reason.is_transient
    assert caught.value.gpu.startswith("GPU 0")
    assert caught.value.code == states.Code.GPU_IS_LOST


class OneUuid(simulated_nvml.SimulatedLibrary):
    """A library that reports one UUID for every GPU."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name != "nvmlDeviceGetUUID":
            return super().__getattr__(name)

        def write(_handle: Any, buffer: Any, _length: Any) -> int:
            buffer.value = b"GPU-00000000-0000-0000-0000-000000000000"
            return int(states.Code.SUCCESS)

        return write


def test_gpus_with_one_uuid_are_an_error_that_names_both(boot: Boot) -> None:
    rig = boot("3xa100-sxm4-40gb")
    simulated_nvml.load(OneUuid(rig.state))
    with pytest.raises(errors.HardwareError, match="GPU 0 and GPU 1 report the same UUID"):
        rig.gpus.observe()


def test_profiles_that_cannot_be_named_are_an_error(rig: NvmlRig) -> None:
    rig.fault("nvmlDeviceGetMemoryInfo", code=states.Code.NOT_SUPPORTED)
    with pytest.raises(errors.HardwareError, match="no memory size") as caught:
        rig.observe()
    assert caught.value.reason is reasons.Reason.NOT_SUPPORTED


def test_a_gpu_without_memory_of_its_own_gets_its_layout(
    boot: Boot, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = pynvml.nvmlDeviceGetGpuInstanceProfileInfo

    def nvmlDeviceGetGpuInstanceProfileInfo(*arguments: object) -> object:  # noqa: N802 - as NVML has it
        info = real(*arguments)
        info.memorySizeMB = 0
        return info

    monkeypatch.setattr(
        pynvml, "nvmlDeviceGetGpuInstanceProfileInfo", nvmlDeviceGetGpuInstanceProfileInfo
    )
    rig = boot("a30")
    rig.fault("nvmlDeviceGetMemoryInfo", count=None, code=states.Code.NOT_SUPPORTED)
    gpu = rig.observe()
    assert gpu.memory_mib == 0
    names = sorted(str(row.profile) for row in gpu.profiles or ())
    assert names == ["1g.0gb", "1g.0gb+me", "2g.0gb", "2g.0gb+me", "4g.0gb"]
    gpu = rig.fill("2g.0gb", "1g.0gb")
    assert layout_table.gpu_in_words(gpu) == "2g.0gb@0 1g.0gb@2"


def test_a_profile_newer_than_this_version_is_observed_by_an_own_name() -> None:
    info = pynvml.c_nvmlGpuInstanceProfileInfo_t(id=77, sliceCount=1, memorySizeMB=4864)
    assert str(gpu_device._name(21, info, total_bytes=40960 * 2**20)) == "1g.5gb+enum21"


MIXED = matrix.Transition(
    product="A100-SXM4-40GB",
    before=({"1g.5gb": 7}, {"3g.20gb": 2}, {"1g.5gb": 7}, {"7g.40gb": 1}),
    after=({"3g.20gb": 1, "1g.5gb": 4}, {"1g.5gb": 7}, {"7g.40gb": 1}, {"3g.20gb": 2}),
)


def test_profiles_of_equal_gpus_are_read_and_kept_once(tmp_path: pathlib.Path) -> None:
    matrix.prepare(MIXED, tmp_path / "gpus.json")
    ask = "nvmlGpuInstanceGetComputeInstanceProfileInfo"
    library = nvml_faults.install(tmp_path / "gpus.json")
    try:
        gpus = nvml_gpus.NvmlGpus(clock=host.SystemClock())
        observed = gpus.observe()
        queries = library.counts[ask]
        gpus.execute(planner.plan(observed, MIXED.desired_gpus(observed)), observed)
    finally:
        simulated_nvml.load(None)

    assert len(observed) == len(MIXED.before)
    assert len({id(gpu.profiles) for gpu in observed}) == 1
    assert library.counts[ask] == queries > 0


@pytest.mark.parametrize("value", range(8))
def test_a_recovery_action_is_observed_by_nvidias_name(value: int, boot: Boot) -> None:
    names = {
        text.removeprefix("NVML_GPU_RECOVERY_ACTION_"): number
        for text, number in vars(pynvml).items()
        if text.startswith("NVML_GPU_RECOVERY_ACTION_")
    }
    rig = boot("2xA30")
    rig.state.fail_gpu(1, action=value)

    healthy, faulty = rig.gpus.observe()

    assert healthy.recovery_action is model.RecoveryAction.NONE
    assert not healthy.needs_recovery
    assert faulty.recovery_action is not None
    assert names[faulty.recovery_action.name] == value
    assert faulty.needs_recovery is (value != 0)


def test_the_recovery_action_of_a_newer_driver_is_reported_as_other(boot: Boot) -> None:
    rig = boot("T4")
    rig.state.fail_gpu(0, action=8)
    assert rig.observe().recovery_action is model.RecoveryAction.OTHER


def test_a_driver_without_recovery_actions_is_observed(boot: Boot) -> None:
    gpu = boot("A30", options=states.Options(reports_recovery_action=False)).observe()
    assert gpu.recovery_action is None
    assert not gpu.needs_recovery
    assert gpu.mode_change_needs_reset


def test_a_recovery_action_changes_no_plan(boot: Boot) -> None:
    rig = boot("A30")
    before = rig.gpus.observe()
    desired = {before[0].uuid: model.DesiredGpu.of(model.MigMode.ENABLED, {})}
    rig.state.fail_gpu(0, action=2)
    after = rig.gpus.observe()
    assert after == before
    assert planner.plan(after, desired) == planner.plan(before, desired)


def test_an_unreachable_gpu_still_reports_its_recovery_action(boot: Boot) -> None:
    rig = boot("2xA30")
    rig.state.fail_gpu(1, action=pynvml.NVML_GPU_RECOVERY_ACTION_GPU_RESET)
    rig.fault("nvmlDeviceGetName", gpu=1, code=int(states.Code.RESET_REQUIRED), count=None)

    (lost,) = rig.gpus.observe().unreachable

    assert lost.reason is reasons.Reason.GPU_NEEDS_RESET
    assert lost.recovery_action is model.RecoveryAction.GPU_RESET


@pytest.mark.slow
@pytest.mark.parametrize("mode", [nvml_rig.ON, OFF])
def test_a_gpu_that_others_change_before_any_call_is_reachable(
    mode: model.MigMode, boot: Boot
) -> None:
    calls_left = 0

    def remove_in_time(call: Callable[..., int], *arguments: Any) -> int:
        nonlocal calls_left
        calls_left -= 1
        if calls_left == 0:
            is_on = mode is nvml_rig.ON
            gone = dataclasses.replace(full, instances=(), is_enabled=is_on, is_pending=is_on)
            rig.state.update(lambda machine: machine.with_gpu(0, gone))
        return call(*arguments)

    rig = boot(
        "A30",
        options=states.Options(reports_profiles_while_mig_off=False),
        alterations=dict.fromkeys(calls.FUNCTIONS, remove_in_time),
    )
    parted = gi_step(rig.fill("1g.6gb"), "2g.12gb")
    rig.execute(parted, *(ci_step(parted, "1c.2g.12gb", start) for start in range(2)))
    (full,) = rig.state.read().gpus
    calls_left = 0
    rig.observe()
    assert calls_left < 0

    for number in range(1, 1 - calls_left):
        rig.state.update(lambda machine: machine.with_gpu(0, full))
        calls_left = number
        assert len(rig.observe().gpu_instances) in (0, 2), number
