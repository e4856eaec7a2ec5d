"""Extended resources: names, counts, and who asks for them."""

import dataclasses

import pytest

from mig_manager.catalogue import hardware
from mig_manager.core import model, profile_name
from mig_manager.core.node.devices import resources, strategies
from mig_manager.core.objects import pod_object
from mig_manager.core.planner import planner
from tests.rigs.node import gpu_values, samples

GPU = "nvidia.com/gpu"
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
