"""Which layouts a device plugin serves; compared with the sandbox's plugin, written apart."""

import dataclasses
import itertools

import pytest

from mig_manager.catalogue import hardware
from mig_manager.core import model, profile_name
from mig_manager.core.node import resources
from mig_manager.sandbox.node import device_plugin, node_options

OFF = ("off", ())
LAYOUTS = (
    OFF,
    ("on", ()),
    ("on", ("1g.5gb",)),
    ("on", ("2g.10gb", "2g.10gb")),
    ("on", ("1g.5gb", "2g.10gb")),
    ("on", ("1c.2g.10gb", "1c.2g.10gb")),
)


def layout(index: int, mode: str, names: tuple[str, ...]) -> resources.GpuLayout:
    return resources.GpuLayout(
        name=f"GPU {index}",
        is_enabled=mode == "on",
        profiles=[profile_name.parse(name) for name in names],
    )


def seen(index: int, mode: str, names: tuple[str, ...]) -> node_options.SeenGpu:
    return node_options.SeenGpu(
        index=index,
        uuid=f"GPU-{index}",
        name="A100",
        memory_mib=40960,
        is_mig_capable=True,
        is_mig_enabled=mode == "on",
        mig_devices=tuple(
            node_options.MigDevice(uuid=f"MIG-{index}-{number}", profile=profile_name.parse(name))
            for number, name in enumerate(names)
        ),
    )


@pytest.mark.parametrize("strategy", resources.Strategy)
@pytest.mark.parametrize("layouts", [*itertools.product(LAYOUTS, repeat=2)])
def test_a_layout_is_refused_where_the_plugin_exits(
    layouts: tuple[tuple[str, tuple[str, ...]], ...], strategy: resources.Strategy
) -> None:
    gpus = [seen(index, *each) for index, each in enumerate(layouts)]
    try:
        device_plugin.enumerate_devices(gpus, node_options.Strategy(strategy.value))
    except device_plugin.ExitedError:
        exits = True
    else:
        exits = False

    found = resources.strategy_refusals(
        [layout(index, *each) for index, each in enumerate(layouts)]
    )

    assert (strategy in found) is exits


@pytest.mark.parametrize(
    ("layouts", "why"),
    [
        ([("on", ("1g.5gb",)), OFF], "MIG is enabled on GPU 0 and not on GPU 1"),
        ([("on", ("1g.5gb",)), ("on", ())], "MIG is enabled without a MIG device on GPU 1"),
        ([("on", ("1g.5gb", "2g.10gb"))], "MIG devices differ: 1g.5gb, 2g.10gb"),
    ],
)
def test_the_refusal_names_its_cause(layouts: list[tuple[str, tuple[str, ...]]], why: str) -> None:
    found = resources.strategy_refusals(
        [layout(index, *each) for index, each in enumerate(layouts)]
    )

    assert found[resources.Strategy.SINGLE] == why


def test_console_gpus_do_not_count() -> None:
    gpu = hardware.template(hardware.find("A100-SXM4-40GB"), 0)
    display = dataclasses.replace(gpu, index=1, uuid="GPU-display", name="DGX Display")
    wanted = {
        gpu.uuid: model.DesiredGpu.of(model.MigMode.ENABLED, {profile_name.parse("1g.5gb"): 7})
    }

    assert not resources.strategy_refusals(resources.gpu_layouts((gpu, display), wanted))
    assert resources.expected_devices((gpu, display)) == resources.expected_devices((gpu,))
