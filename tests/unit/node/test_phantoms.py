"""Which resources of a node no GPU can supply, by the plugin's strategy and what kubelet has."""

import pytest

from mig_manager import reasons
from mig_manager.core import model
from mig_manager.core.node.devices import phantoms
from mig_manager.core.node.devices.strategies import Strategy
from tests.rigs.node import samples

GPU, SMALL, LARGE = "nvidia.com/gpu", "nvidia.com/mig-1g.5gb", "nvidia.com/mig-3g.20gb"
OWN_NAME = "nvidia.com/mig-quarter"
SMALL_SHARED, SHARED = f"{SMALL}.shared", f"{LARGE}.shared"
DIVIDED = samples.gpu(samples.A100, "1g.5gb@0", "1g.5gb@1")
WHOLE = samples.gpu(samples.A100, mode=model.MigMode.DISABLED, index=1)


PHANTOMS = {
    "as registered": (Strategy.MIXED, {SMALL}, {SMALL: 2}, set()),
    "another profile": (Strategy.MIXED, {SMALL}, {SMALL: 2, LARGE: 4}, {LARGE}),
    "whole GPUs beside a divided one": (Strategy.MIXED, {SMALL}, {SMALL: 2, GPU: 1}, {GPU}),
    "none allocatable": (Strategy.MIXED, {SMALL}, {SMALL: 2, LARGE: 0}, set()),
    "registered although no GPU has it": (
        Strategy.MIXED,
        {SMALL, LARGE},
        {SMALL: 2, LARGE: 4},
        set(),
    ),
    "shared whole GPUs": (Strategy.MIXED, {SMALL_SHARED}, {SMALL_SHARED: 8, SHARED: 8}, {SHARED}),
    "shared, and the plugin shares nothing": (
        Strategy.MIXED,
        {SMALL},
        {SMALL: 2, SMALL_SHARED: 8},
        {SMALL_SHARED},
    ),
    "not shared, and the plugin shares": (
        Strategy.MIXED,
        {SMALL_SHARED},
        {SMALL: 2, SMALL_SHARED: 8},
        {SMALL},
    ),
    "shared, and kubelet is silent": (Strategy.MIXED, None, {SMALL: 2, SMALL_SHARED: 8}, set()),
    "a resource of others": (Strategy.MIXED, {SMALL}, {SMALL: 2, "nvidia.com/hostdev": 3}, set()),
    "an own name beside a profile": (
        Strategy.MIXED,
        {SMALL},
        {SMALL: 2, OWN_NAME: 3},
        {OWN_NAME},
    ),
    "an own name without a plugin": (Strategy.MIXED, set(), {OWN_NAME: 3}, set()),
    "another profile, and kubelet is silent": (Strategy.MIXED, None, {LARGE: 4}, {LARGE}),
    "MIG devices with strategy single": (Strategy.SINGLE, {GPU}, {GPU: 2, SMALL: 2}, {SMALL}),
    "strategy single registered a profile": (Strategy.SINGLE, {SMALL}, {SMALL: 2}, set()),
    "strategy single, and kubelet is silent": (
        Strategy.SINGLE,
        None,
        {SMALL: 2, LARGE: 4},
        {LARGE},
    ),
    "strategy none": (Strategy.NONE, set(), {GPU: 1}, set()),
    "no strategy and no plugin": (None, set(), {GPU: 2, SMALL: 2}, set()),
    "no strategy, and a profile is registered": (None, {SMALL}, {GPU: 2, SMALL: 2}, {GPU}),
    "no strategy, and kubelet is silent": (None, None, {GPU: 2, LARGE: 4}, {LARGE}),
}


@pytest.mark.parametrize(
    ("strategy", "registered", "allocatable", "expected"),
    PHANTOMS.values(),
    ids=PHANTOMS,
)
def test_phantom_devices_are_those_that_no_gpu_supplies(
    strategy: Strategy | None,
    registered: set[str] | None,
    allocatable: dict[str, int],
    expected: set[str],
) -> None:
    healthy = None if registered is None else dict.fromkeys(registered, frozenset({"id"}))
    node = samples.node_view(allocatable=allocatable)
    phantom_counts = phantoms.find(model.ObservedGpus([DIVIDED]), node, strategy, lambda: healthy)
    assert phantom_counts == {name: allocatable[name] for name in expected}


@pytest.mark.parametrize("label", [None, Strategy.MIXED])
@pytest.mark.parametrize(
    ("gpus", "registered", "expected"),
    [
        ([DIVIDED], DIVIDED.uuid, {SMALL: 2}),
        ([DIVIDED], f"{DIVIDED.mig_uuids[0]}::1", {SMALL: 2}),
        ([DIVIDED, WHOLE], DIVIDED.uuid, {SMALL: 2}),
        # A plugin with strategy mixed that starts has not registered its MIG devices yet.
        ([DIVIDED, WHOLE], WHOLE.uuid, {}),
    ],
    ids=["none", "single", "none on one of two", "mixed"],
)
def test_phantom_devices_are_those_of_a_former_strategy(
    gpus: list[model.Gpu], registered: str, expected: dict[str, int], label: Strategy | None
) -> None:
    node = samples.node_view(allocatable={GPU: 2, SMALL: 2})
    healthy = {GPU: frozenset({registered})}
    assert phantoms.find(model.ObservedGpus(gpus), node, label, lambda: healthy) == expected


def test_no_device_is_a_phantom_while_a_gpu_is_unreachable() -> None:
    lost = model.UnreachableGpu(
        index=1, reason=reasons.Reason.GPU_LOST, code=15, message="fell off the bus"
    )
    node = samples.node_view(allocatable={LARGE: 4})
    gpus = model.ObservedGpus([DIVIDED], unreachable=[lost])
    assert not phantoms.find(gpus, node, Strategy.MIXED, dict)
