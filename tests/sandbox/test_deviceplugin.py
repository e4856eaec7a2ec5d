import dataclasses

import pytest

from mig_manager.core import model
from mig_manager.sandbox import deviceplugin, options, programs

_1G = model.Profile(compute_slices=1, gpu_slices=1, memory_gb=5)
_2G = model.Profile(compute_slices=2, gpu_slices=2, memory_gb=10)
_ME = dataclasses.replace(_1G, attributes=("me",))
_PARTIAL = model.Profile(compute_slices=1, gpu_slices=2, memory_gb=10)

NONE, SINGLE, MIXED = options.Strategy.NONE, options.Strategy.SINGLE, options.Strategy.MIXED


def gpu(index: int, *profiles: model.Profile, mode: model.MigMode | None = None) -> model.Gpu:
    mode = mode or (model.MigMode.ENABLED if profiles else model.MigMode.DISABLED)
    return model.Gpu(
        index=index,
        uuid=f"GPU-{index}",
        name="NVIDIA A100-SXM4-40GB",
        architecture=model.Architecture.AMPERE,
        pci_address=f"00000000:0{index}:00.0",
        pci_device_id=0x20B010DE,
        pci_subsystem_id=0x134F10DE,
        memory_mib=40960,
        current_mode=mode,
        pending_mode=mode,
        mode_change_needs_reset=True,
        profiles=(),
        gpu_instances=tuple(
            _instance(index, place, profile) for place, profile in enumerate(profiles)
        ),
    )


def _instance(index: int, place: int, profile: model.Profile) -> model.GpuInstance:
    inner = model.ComputeInstance(
        instance_id=0, profile=profile, placement=None, uuid=f"MIG-{index}-{place}"
    )
    return model.GpuInstance(
        instance_id=7 + place,
        profile=profile.gpu_instance,
        profile_id=19,
        placement=model.Placement(place, 1),
        compute_instances=(inner,),
    )


@pytest.mark.parametrize(
    ("strategy", "gpus", "expected"),
    [
        (NONE, [gpu(0), gpu(1, _1G)], {"nvidia.com/gpu": ("GPU-0", "GPU-1")}),
        (SINGLE, [gpu(0), gpu(1)], {"nvidia.com/gpu": ("GPU-0", "GPU-1")}),
        (SINGLE, [gpu(0, _1G), gpu(1, _1G)], {"nvidia.com/gpu": ("MIG-0-0", "MIG-1-0")}),
        (
            MIXED,
            [gpu(0), gpu(1, _1G, _2G), gpu(2, _1G)],
            {
                "nvidia.com/gpu": ("GPU-0",),
                "nvidia.com/mig-1g.5gb": ("MIG-1-0", "MIG-2-0"),
                "nvidia.com/mig-2g.10gb": ("MIG-1-1",),
            },
        ),
        (MIXED, [gpu(0, _ME)], {"nvidia.com/mig-1g.5gb.me": ("MIG-0-0",)}),
        (MIXED, [], {}),
    ],
    ids=["none", "single-without-mig", "single", "mixed", "attribute", "no-gpu"],
)
def test_each_strategy_names_the_devices_its_way(
    strategy: options.Strategy, gpus: list[model.Gpu], expected: dict[str, tuple[str, ...]]
) -> None:
    found = deviceplugin.enumerate_devices(gpus, strategy)

    assert found.resources == expected
    assert not found.warnings


@pytest.mark.parametrize(
    ("strategy", "gpus", "word"),
    [
        (SINGLE, [gpu(0), gpu(1, _1G)], "some GPUs only"),
        (SINGLE, [gpu(0, _1G), gpu(1, mode=model.MigMode.ENABLED)], "without any MIG device"),
        (SINGLE, [gpu(0, _1G), gpu(1, _2G)], "differ"),
        (MIXED, [gpu(0, _PARTIAL)], "1c.2g.10gb"),
    ],
    ids=["unequal-modes", "empty", "unequal-profiles", "partial-compute-instance"],
)
def test_layouts_that_a_strategy_cannot_name_make_the_plugin_exit(
    strategy: options.Strategy, gpus: list[model.Gpu], word: str
) -> None:
    with pytest.raises(programs.ExitedError, match=word):
        deviceplugin.enumerate_devices(gpus, strategy)


def test_mixed_only_warns_of_a_mig_gpu_without_devices() -> None:
    found = deviceplugin.enumerate_devices([gpu(0, mode=model.MigMode.ENABLED)], MIXED)

    assert found.resources == {}
    assert found.warnings == ("MIG is enabled on GPU 0 without any MIG device",)


def test_an_instance_without_compute_instance_is_no_device() -> None:
    whole = gpu(0, _1G)
    bare = dataclasses.replace(whole.gpu_instances[0], compute_instances=())

    found = deviceplugin.enumerate_devices(
        [dataclasses.replace(whole, gpu_instances=(bare,))], MIXED
    )

    assert found.resources == {}
