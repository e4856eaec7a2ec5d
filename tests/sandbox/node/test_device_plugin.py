import dataclasses
import itertools

import pytest

from mig_manager.core import model
from mig_manager.core.node.devices import strategies
from mig_manager.sandbox.node import device_plugin

_1G = model.Profile(compute_slices=1, gpu_slices=1, memory_gb=5)
_2G = model.Profile(compute_slices=2, gpu_slices=2, memory_gb=10)
_ME = dataclasses.replace(_1G, attributes=("me",))
_PARTIAL = model.Profile(compute_slices=1, gpu_slices=2, memory_gb=10)

NONE, SINGLE, MIXED = (
    strategies.Strategy.NONE,
    strategies.Strategy.SINGLE,
    strategies.Strategy.MIXED,
)


def gpu(
    index: int, *profiles: model.Profile, enabled: bool = False
) -> device_plugin.EnumeratedGpu:
    return device_plugin.EnumeratedGpu(
        index=index,
        uuid=f"GPU-{index}",
        is_mig_enabled=enabled or bool(profiles),
        mig_devices={f"MIG-{index}-{place}": profile for place, profile in enumerate(profiles)},
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
        (MIXED, [gpu(0, enabled=True)], {}),
        (MIXED, [], {}),
    ],
    ids=["none", "single-without-mig", "single", "mixed", "attribute", "no-device", "no-gpu"],
)
def test_each_strategy_has_its_own_names_of_devices(
    strategy: strategies.Strategy,
    gpus: list[device_plugin.EnumeratedGpu],
    expected: dict[str, tuple[str, ...]],
) -> None:
    assert device_plugin.enumerate_devices(gpus, strategy) == expected


@pytest.mark.parametrize(
    ("strategy", "gpus", "word"),
    [
        (SINGLE, [gpu(0), gpu(1, _1G)], "some GPUs only"),
        (SINGLE, [gpu(0, _1G), gpu(1, enabled=True)], "without any MIG device"),
        (SINGLE, [gpu(0, _1G), gpu(1, _2G)], "differ"),
        (MIXED, [gpu(0, _PARTIAL)], "1c.2g.10gb"),
    ],
    ids=["unequal-modes", "empty", "unequal-profiles", "partial-compute-instance"],
)
def test_layouts_that_a_strategy_cannot_name_make_the_plugin_exit(
    strategy: strategies.Strategy, gpus: list[device_plugin.EnumeratedGpu], word: str
) -> None:
    with pytest.raises(device_plugin.ExitedError, match=word):
        device_plugin.enumerate_devices(gpus, strategy)


@pytest.mark.parametrize("strategy", strategies.Strategy)
def test_the_plugin_exits_where_the_agent_refuses(strategy: strategies.Strategy) -> None:
    """The agent's rules and those of the plugin are written apart."""
    layouts = (None, (), (_1G,), (_2G, _2G), (_1G, _2G), (_PARTIAL, _PARTIAL))
    for pair in itertools.product(layouts, repeat=2):
        gpus = [
            gpu(index, *(profiles or ()), enabled=profiles is not None)
            for index, profiles in enumerate(pair)
        ]
        described = [
            strategies.GpuLayout(
                name=each.uuid,
                is_enabled=each.is_mig_enabled,
                profiles=[*each.mig_devices.values()],
            )
            for each in gpus
        ]
        refused = dict(strategies.refusals(described))
        try:
            device_plugin.enumerate_devices(gpus, strategy)
        except device_plugin.ExitedError:
            assert strategy in refused, pair
        else:
            assert strategy not in refused, pair
