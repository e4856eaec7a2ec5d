"""Which layouts a device plugin serves, by its MIG strategy, and the devices that it lists."""

import dataclasses

import pytest

from mig_manager.catalogue import hardware
from mig_manager.core import model, profile_name
from mig_manager.core.node.devices import device_ids, strategies
from tests.rigs.node import samples

Mig = tuple[str, ...] | None  # the profiles of a GPU's MIG devices; None: MIG is off


def refusals(*layouts: Mig) -> dict[strategies.Strategy, str]:
    gpus = [
        strategies.GpuLayout(
            name=f"GPU {index}",
            is_enabled=names is not None,
            profiles=[profile_name.parse(name) for name in names or ()],
        )
        for index, names in enumerate(layouts)
    ]
    return dict(strategies.refusals(gpus))


@pytest.mark.parametrize(
    ("layouts", "why"),
    [
        ([("1g.5gb",), None], "MIG is enabled on GPU 0 and not on GPU 1"),
        ([("1g.5gb",), ()], "MIG is enabled without a MIG device on GPU 1"),
        ([("1g.5gb", "2g.10gb")], "MIG devices differ: 1g.5gb, 2g.10gb"),
    ],
)
def test_the_refusal_names_its_cause(layouts: list[Mig], why: str) -> None:
    assert refusals(*layouts)[strategies.Strategy.SINGLE] == why


def test_console_gpus_do_not_count() -> None:
    gpu = hardware.template(hardware.find("A100-SXM4-40GB"), 0)
    display = dataclasses.replace(gpu, index=1, uuid="GPU-display", name="DGX Display")
    layouts = strategies.gpu_layouts(
        (gpu, display), {gpu.uuid: samples.desired_gpu({"1g.5gb": 7})}
    )
    assert not strategies.refusals(layouts)


OFF = model.MigMode.DISABLED
DIVIDED = samples.gpu(samples.A100, "1g.5gb@0", "2g.10gb@2[]", "3g.20gb@4[1c@0 1c@2]")


@pytest.mark.parametrize(
    ("gpu", "sliced", "whole"),
    [
        pytest.param(DIVIDED, {"MIG-0-0-0", "MIG-0-4-0", "MIG-0-4-2"}, {"GPU-0"}, id="divided"),
        pytest.param(samples.gpu(samples.A100), set(), {"GPU-0"}, id="no instance"),
        pytest.param(samples.gpu(samples.A100, mode=OFF), {"GPU-0"}, {"GPU-0"}, id="MIG off"),
        pytest.param(samples.gpu(None, mode=None), {"GPU-0"}, {"GPU-0"}, id="without MIG"),
        pytest.param(
            dataclasses.replace(samples.gpu(None, mode=None), name="DGX Display"),
            set(),
            set(),
            id="a console GPU",
        ),
    ],
)
def test_the_device_plugin_lists_mig_devices_or_whole_gpus(
    gpu: model.Gpu, sliced: set[str], whole: set[str]
) -> None:
    other = samples.gpu(samples.A100, "2g.10gb@2", index=1)
    with_mig, without_mig = device_ids.expected_ids((gpu, other))
    assert with_mig == sliced | {"MIG-1-2-0"}
    assert without_mig == whole | {"GPU-1"}
