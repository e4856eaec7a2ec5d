"""Extended resources: names, counts, whether they are schedulable, and who asks for them."""

import dataclasses

import pytest

from mig_manager.catalogue import hardware
from mig_manager.core import model, profile_name
from mig_manager.core.node.devices import device_ids, resources, schedulable, strategies
from mig_manager.core.objects import node_object, pod_object
from mig_manager.core.planner import planner
from tests.rigs.node import gpu_values, samples

GPU, SHARED = "nvidia.com/gpu", "nvidia.com/gpu.shared"
MIXED = {"nvidia.com/mig-1g.5gb": 2, "nvidia.com/mig-2g.10gb": 1, "nvidia.com/mig-3g.20gb": 1}


@pytest.mark.parametrize(
    ("name", "resource"),
    [
        ("1g.5gb", "nvidia.com/mig-1g.5gb"),
        ("1g.5gb+me", "nvidia.com/mig-1g.5gb.me"),
        ("1g.24gb-me", "nvidia.com/mig-1g.24gb-me"),
        ("1c.2g.10gb", None),
    ],
)
def test_a_profile_has_the_name_that_nvidias_plugin_gives_it(
    name: str, resource: str | None
) -> None:
    assert resources.of_profile(profile_name.parse(name)) == resource
    assert resource is None or resources.is_device(resource)
    assert not resources.is_device("nvidia.com/hostdev")


def test_devices_are_counted_by_resource_without_nameless_ones() -> None:
    divided = samples.gpu(samples.A100, "1g.5gb@0", "2g.10gb@2[1c@0]")
    whole = samples.gpu(samples.A100, mode=model.MigMode.DISABLED)
    counts = resources.counts([*samples.balanced_gpu(), divided, whole, samples.gpu(samples.A100)])
    assert counts == MIXED | {"nvidia.com/mig-1g.5gb": 3, GPU: 1}


# -- what is schedulable ----------------------------------------------------------------------


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


# -- which layouts a device plugin serves -----------------------------------------------------


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


# -- which pods ask for which devices, and what a plan means to them --------------------------


NODE = (
    samples.gpu(samples.A100, "1g.5gb@0", "1g.5gb@1", "2g.10gb@2", "3g.20gb@4"),
    samples.gpu(samples.A100, "1g.5gb@0", "3g.20gb@4", index=1),
    samples.gpu(samples.A100, mode=model.MigMode.DISABLED, index=2),
)


def pod(name: str, asks: dict[str, int], *, phase: str = "Running") -> pod_object.Pod:
    amounts = {f"nvidia.com/{resource}": count for resource, count in asks.items()}
    return samples.pod(name, namespace="ml", phase=phase, gpu_resources=amounts)


def requests(
    *pods: pod_object.Pod, strategy: strategies.Strategy = strategies.Strategy.MIXED
) -> dict[str, tuple[int, dict[str, int]]]:
    return {
        kind.resource.removeprefix("nvidia.com/"): (kind.count, dict(kind.pods))
        for kind in resources.kinds(NODE, pods, strategy=strategy)
    }


def test_devices_and_requesting_pods_are_counted_by_kind() -> None:
    rows = requests(
        pod("a", {"mig-1g.5gb": 2}),
        pod("b", {"gpu": 1, "mig-1g.5gb": 1}),
        pod("shares", {"mig-2g.10gb.shared": 4}),
        pod("asks-in-vain", {"mig-7g.40gb": 1}),
        pod("finished", {"mig-1g.5gb": 2}, phase="Succeeded"),
        pod("web", {}),
    )
    assert list(rows.items()) == [
        ("mig-1g.5gb", (3, {"ml/a": 2, "ml/b": 1})),
        ("mig-2g.10gb", (1, {"ml/shares": 4})),
        ("mig-3g.20gb", (2, {})),
        ("mig-7g.40gb", (0, {"ml/asks-in-vain": 1})),
        ("gpu", (1, {"ml/b": 1})),
    ]
    for strategy, count in ((strategies.Strategy.SINGLE, 7), (strategies.Strategy.NONE, 3)):
        assert requests(pod("a", {"gpu": 1}), strategy=strategy) == {"gpu": (count, {"ml/a": 1})}


@pytest.mark.parametrize(
    ("desired", "asks", "strategy", "lost"),
    [
        pytest.param(
            {"1g.5gb": 2, "3g.20gb": 1},
            {"mig-2g.10gb": 1, "gpu": 1},
            "mixed",
            {"mig-2g.10gb": (1, True, 1)},
            id="total when all devices of a kind are destroyed",
        ),
        pytest.param(
            {"1g.5gb": 2, "2g.10gb": 1},
            {"mig-3g.20gb": 1},
            "mixed",
            {"mig-3g.20gb": (1, False, 0)},
            id="a partial loss",
        ),
        pytest.param(
            {"1g.5gb": 2, "2g.10gb": 1},
            {"mig-3g.20gb": 2},
            "mixed",
            {"mig-3g.20gb": (1, False, 1)},
            id="a partial loss of devices in use",
        ),
        pytest.param(
            None,
            {"gpu": 1, "mig-1g.5gb": 1, "mig-3g.20gb": 1},
            "mixed",
            {"mig-1g.5gb": (2, False, 0), "mig-3g.20gb": (1, False, 0)},
            id="every device of a GPU whose mode changes",
        ),
        pytest.param(
            {"1g.5gb": 2}, {"gpu": 1}, "none", {"gpu": (1, False, 0)}, id="a whole GPU with none"
        ),
    ],
)
def test_a_loss_is_total_or_has_a_least_number_of_devices_in_use(
    desired: dict[str, int] | None,
    asks: dict[str, int],
    strategy: str,
    lost: dict[str, tuple[int, bool, int]],
) -> None:
    off = samples.desired_gpu(mode=model.MigMode.DISABLED)
    plan = planner.plan(
        NODE, {NODE[0].uuid: off if desired is None else samples.desired_gpu(desired)}
    )
    losses = resources.losses(plan, NODE, [pod("a", asks)], strategy=strategies.Strategy(strategy))
    assert {
        loss.kind.resource.removeprefix("nvidia.com/"): (loss.destroyed, loss.is_total, loss.least)
        for loss in losses
    } == lost


@pytest.mark.parametrize(
    ("count", "capacity", "least"),
    [
        (2, {"nvidia.com/mig-3g.20gb": 2}, 1),
        (7, {"nvidia.com/mig-3g.20gb": 8}, 1),
        (4, {"nvidia.com/mig-3g.20gb": 8}, 0),
        (4, {"nvidia.com/mig-3g.20gb": 0, "nvidia.com/mig-3g.20gb.shared": 8}, 0),
        (4, {"nvidia.com/mig-3g.20gb": 2, "nvidia.com/mig-3g.20gb.shared": 8}, 0),
        (4, {"nvidia.com/mig-3g.20gb.shared": 8, "nvidia.com/mig-3g.20gb": 2}, 0),
        (2, {}, 1),
        (4, {}, 0),
    ],
)
def test_shared_devices_are_in_use_by_as_many_pods_as_they_have_replicas(
    count: int, capacity: dict[str, int], least: int
) -> None:
    plan = planner.plan(NODE, {NODE[0].uuid: samples.desired_gpu({"1g.5gb": 2, "2g.10gb": 1})})
    amounts = {"mig-3g.20gb": count}
    mixed = strategies.Strategy.MIXED
    (loss,) = resources.losses(plan, NODE, [pod("a", amounts)], strategy=mixed, capacity=capacity)
    assert (loss.destroyed, loss.least) == (1, least)


@pytest.mark.parametrize("product", ["a100-sxm4-40gb", "a30", "h100-sxm5-80gb"])
def test_the_devices_of_a_layout_are_known_before_a_node_has_it(product: str) -> None:
    first, changed, last = (hardware.template(hardware.find(product), i) for i in range(3))
    profiles = [spec.profile for spec in first.profiles or ()]
    for devices in ({}, *({profile: 1} for profile in profiles)):
        desired = model.DesiredGpu.of(model.MigMode.ENABLED, devices)
        (after,) = gpu_values.with_desired((changed,), desired)

        mixed, single = (
            resources.desired_counts((first, changed, last), {changed.uuid: desired}, strategy)
            for strategy in (strategies.Strategy.MIXED, strategies.Strategy.SINGLE)
        )

        assert mixed == resources.counts((first, after, last))
        assert single == {"nvidia.com/gpu": 2 + len(devices)}


def test_whole_gpus_are_counted_and_displays_are_not() -> None:
    gpu = hardware.template(hardware.find("a100-sxm4-40gb"))
    display = dataclasses.replace(gpu, uuid="GPU-display", name="DGX Display")
    seven = model.DesiredGpu.of(model.MigMode.ENABLED, {profile_name.parse("1g.5gb"): 7})
    part = model.DesiredGpu.of(model.MigMode.ENABLED, {profile_name.parse("1c.2g.10gb"): 2})

    def count(goal: model.DesiredGpu | None) -> dict[str, int]:
        desired = {gpu.uuid: goal} if goal else {}
        return resources.desired_counts((gpu, display), desired, strategies.Strategy.MIXED)

    assert count(None) == {"nvidia.com/gpu": 1}
    assert count(seven) == {"nvidia.com/gpu": 0, "nvidia.com/mig-1g.5gb": 7}
    assert count(part) == {"nvidia.com/gpu": 0}
