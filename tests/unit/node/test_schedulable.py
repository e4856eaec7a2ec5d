"""Whether the devices of a node are schedulable, by what kubelet and the Node say."""

import pytest

from mig_manager.core import model
from mig_manager.core.node.devices import schedulable, strategies
from mig_manager.core.objects import node_object
from tests.rigs.node import gpu_values, samples

GPU, SHARED = "nvidia.com/gpu", "nvidia.com/gpu.shared"
MIXED = {"nvidia.com/mig-1g.5gb": 2, "nvidia.com/mig-2g.10gb": 1, "nvidia.com/mig-3g.20gb": 1}


def node_with(
    allocatable: dict[str, int],
    capacity: dict[str, int] | None = None,
    labels: dict[str, str] | None = None,
) -> node_object.NodeView:
    return samples.node_view(
        allocatable=allocatable, capacity=capacity or allocatable, labels=labels or {}
    )


@pytest.mark.parametrize(
    ("healthy", "allocatable", "why"),
    [
        pytest.param({GPU: "1234"}, {GPU: 4}, "", id="exactly the existing devices"),
        pytest.param({GPU: "x234"}, {GPU: 4}, "3 exist", id="one is gone"),
        pytest.param(
            {GPU: "1234"},
            {GPU: 4, "nvidia.com/mig-7g.40gb": 1},
            "nvidia.com/mig-7g.40gb is 1, 0 expected",
            id="a resource of the former layout must go to zero",
        ),
        pytest.param({SHARED: "1234abcd"}, {SHARED: 8}, "", id="shared once per replica"),
        pytest.param({SHARED: "1234abcd"}, {SHARED: 4}, SHARED, id="too few replicas"),
        pytest.param(None, MIXED, "", id="no kubelet: the same of each name"),
        pytest.param(None, {"nvidia.com/mig-1g.5gb": 4}, "counts 4", id="as many of another"),
        pytest.param(None, {GPU: 7}, "counts 7 devices, 4 are expected", id="another sum"),
        pytest.param({GPU: "g"}, {GPU: 1}, "", id="whole GPUs where the strategy is none"),
    ],
)
def test_devices_are_schedulable_only_if_kubelet_has_exactly_these(
    healthy: dict[str, str] | None, allocatable: dict[str, int], why: str
) -> None:
    gpus = samples.balanced_gpu()
    uuids = dict(zip("1234", gpus[0].mig_uuids, strict=True)) | {"g": gpus[0].uuid}
    uuids |= {replica: f"{uuids[of]}::1" for replica, of in zip("abcd", "1234", strict=True)}
    ids = {
        resource: frozenset(uuids.get(letter, "MIG-gone") for letter in letters)
        for resource, letters in (healthy or {}).items()
    }
    reason = schedulable.why_not(gpus, ids or None, node_with(allocatable))
    assert why in reason if why else not reason


@pytest.mark.parametrize("replicas", [1, 4])
@pytest.mark.parametrize("changed", [frozenset(), frozenset({"GPU-another"})])
def test_an_unhealthy_device_of_an_unchanged_gpu_is_ignored(
    changed: frozenset[str], replicas: int
) -> None:
    gpus = samples.balanced_gpu()
    names = ["", *(f"::{number}" for number in range(1, replicas))]
    healthy = {GPU: frozenset(uuid + n for uuid in [*gpus[0].mig_uuids][1:] for n in names)}
    shown = {GPU: 3 * replicas}
    node, unregistered = node_with(shown, {GPU: 4 * replicas}), node_with(shown)
    assert schedulable.why_not(gpus, healthy, node, changed=changed) == ""
    assert schedulable.why_not(gpus, healthy, node, changed={gpus[0].uuid}) != ""
    assert schedulable.why_not(gpus, healthy, node) != ""
    assert schedulable.why_not(gpus, healthy, unregistered, changed=changed) != ""
    assert not schedulable.is_plugin_stale(gpus, healthy, node)
    assert schedulable.is_plugin_stale(gpus, healthy, unregistered)
    gone = {GPU: healthy[GPU] | {"MIG-gone"}}
    assert schedulable.is_plugin_stale(gpus, gone, node_with({GPU: 4}))


def test_without_kubelet_the_capacity_shows_unhealthy_devices() -> None:
    gpus = samples.balanced_gpu()
    node, unregistered = node_with({GPU: 3}, {GPU: 4}), node_with({GPU: 3})
    assert schedulable.why_not(gpus, None, node, changed=()) == ""
    assert schedulable.why_not(gpus, None, node) != ""
    assert schedulable.why_not(gpus, None, unregistered, changed=()) != ""


def test_unhealthy_devices_are_named_by_gpu_with_their_remedy() -> None:
    first, second = samples.balanced_gpu(), samples.gpu(samples.A100, "7g.40gb@0", index=1)
    gpus = model.ObservedGpus((*first, second))
    healthy = {GPU: frozenset(second.mig_uuids)}
    why = schedulable.why_not(gpus, healthy, node_with({GPU: 1}, {GPU: 5}))
    assert why == (
        "kubelet has 1 allocatable devices: 1 exist, 5 are expected; "
        "unhealthy, after an Xid until the device plugin restarts: 4 of GPU 0"
    )
    unregistered = schedulable.why_not(gpus, healthy, node_with({GPU: 1}))
    assert unregistered.endswith("5 are expected")


@pytest.mark.parametrize(
    ("allocatable", "strategy", "is_good"),
    [
        (MIXED | {"nvidia.com/mig-7g.40gb": 1}, None, True),
        ({"nvidia.com/mig-1g.5gb": 5}, None, False),
        ({GPU: 5}, None, True),
        ({GPU: 3}, None, False),
        ({GPU: 5}, strategies.Strategy.MIXED, False),
        ({GPU: 2}, strategies.Strategy.NONE, True),
    ],
)
def test_devices_beside_an_unreachable_gpu_are_compared_by_name(
    allocatable: dict[str, int], strategy: strategies.Strategy | None, *, is_good: bool
) -> None:
    gpus = gpu_values.seen_of(
        (*samples.balanced_gpu(), samples.gpu(samples.A100, index=1)), {"GPU-1"}
    )
    assert [gpu.index for gpu in gpus.unreachable] == [1]

    why = schedulable.why_not(gpus, None, node_with(allocatable), strategy=strategy)

    assert (why == "") is is_good


REPLICAS = {"nvidia.com/mig-1g.5gb.replicas": "4"}


@pytest.mark.parametrize(
    ("allocatable", "labels", "is_good"),
    [
        (MIXED, {}, True),
        ({name: 4 * n for name, n in MIXED.items()}, REPLICAS, True),
        ({f"{name}.shared": 4 * n for name, n in MIXED.items()}, {}, True),
        (MIXED | {"nvidia.com/mig-1g.5gb": 8}, REPLICAS, True),
        ({name: 4 * n for name, n in MIXED.items()}, {}, False),
        (MIXED | {"nvidia.com/mig-1g.5gb": 7}, REPLICAS, False),
        ({GPU: 16}, {"nvidia.com/gpu.replicas": "4"}, True),
        ({GPU: 16}, {"nvidia.com/gpu.replicas": "1"}, False),
        ({"nvidia.com/mig-7g.40gb.shared": 3}, {}, False),
    ],
)
def test_without_kubelet_replicas_of_shared_devices_are_known(
    allocatable: dict[str, int], labels: dict[str, str], *, is_good: bool
) -> None:
    why = schedulable.why_not(samples.balanced_gpu(), None, node_with(allocatable, labels=labels))
    assert (why == "") is is_good


@pytest.mark.parametrize("strategy", [None, *strategies.Strategy])
def test_whole_gpus_count_unless_the_strategy_offers_instances(
    strategy: strategies.Strategy | None,
) -> None:
    gpus = samples.balanced_gpu()
    healthy, node = {GPU: frozenset({gpus[0].uuid})}, node_with({GPU: 1})
    is_good = strategy in (None, strategies.Strategy.NONE)
    for allocatable in (healthy, None):
        why = schedulable.why_not(gpus, allocatable, node, strategy=strategy)
        assert (why == "") is is_good
        is_stale = schedulable.is_plugin_stale(gpus, allocatable, node, strategy=strategy)
        assert is_stale is not is_good


@pytest.mark.parametrize(
    ("allocatable", "strategy", "is_good"),
    [
        *(({}, None, True), ({GPU: 1}, None, False), ({GPU: 2}, None, True)),
        *(({}, strategies.Strategy.SINGLE, True), ({GPU: 2}, strategies.Strategy.SINGLE, False)),
    ],
)
def test_without_kubelet_gpus_without_devices_are_compared(
    allocatable: dict[str, int], strategy: strategies.Strategy | None, *, is_good: bool
) -> None:
    gpus = model.ObservedGpus(samples.gpu(samples.A100, index=index) for index in range(2))
    why = schedulable.why_not(gpus, None, node_with(allocatable), strategy=strategy)
    assert (why == "") is is_good
