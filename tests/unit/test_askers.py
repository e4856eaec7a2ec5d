"""Which pods ask for which devices, and what a plan means to them."""

import pytest

from mig_manager.core import model
from mig_manager.core.node import cluster, resources
from mig_manager.core.planner import planner
from tests.unit import samples

MIXED = "mixed"


def pod(name: str, *, phase: str = "Running", **asks: int) -> cluster.Pod:
    names = {key: key.replace("mig_", "mig-").replace("_", ".") for key in asks}
    requests = {f"nvidia.com/{names[key]}": count for key, count in asks.items()}
    return samples.pod(name, namespace="ml", phase=phase, gpu_resources=requests)


NODE = (
    samples.gpu(samples.A100, "1g.5gb@0", "1g.5gb@1", "2g.10gb@2", "3g.20gb@4"),
    samples.gpu(samples.A100, "1g.5gb@0", "3g.20gb@4", index=1),
    samples.gpu(samples.A100, mode=model.MigMode.DISABLED, index=2),
)


def requests(*pods: cluster.Pod, strategy: str = MIXED) -> dict[str, tuple[int, dict[str, int]]]:
    kinds = resources.kinds(NODE, pods, strategy=strategy)
    return {
        kind.resource.removeprefix("nvidia.com/"): (kind.count, dict(kind.pods)) for kind in kinds
    }


def test_devices_and_requesting_pods_are_counted_by_kind_with_whole_gpus_last() -> None:
    found = requests(pod("a", mig_1g_5gb=2), pod("b", gpu=1, mig_1g_5gb=1), pod("web"))

    assert found == {
        "mig-1g.5gb": (3, {"ml/a": 2, "ml/b": 1}),
        "mig-2g.10gb": (1, {}),
        "mig-3g.20gb": (2, {}),
        "gpu": (1, {"ml/b": 1}),
    }
    assert list(found)[-1] == "gpu"


def test_finished_pods_do_not_count() -> None:
    assert requests(pod("a", phase="Succeeded", mig_1g_5gb=2))["mig-1g.5gb"] == (3, {})


def test_requests_for_shared_devices_count_for_their_kind() -> None:
    assert requests(pod("a", mig_1g_5gb_shared=4))["mig-1g.5gb"] == (3, {"ml/a": 4})


def test_a_requested_kind_that_the_node_lacks_has_count_zero() -> None:
    assert requests(pod("a", mig_7g_40gb=1))["mig-7g.40gb"] == (0, {"ml/a": 1})


@pytest.mark.parametrize(("strategy", "count"), [("single", 7), ("none", 3)])
def test_strategies_single_and_none_count_all_devices_as_whole_gpus(
    strategy: str, count: int
) -> None:
    assert requests(pod("a", gpu=1), strategy=strategy) == {"gpu": (count, {"ml/a": 1})}


def losses(
    desired: dict[str, int], *pods: cluster.Pod, strategy: str = MIXED
) -> tuple[resources.Loss, ...]:
    plan = planner.plan(NODE, {NODE[0].uuid: samples.want(desired)})
    return resources.losses(plan, NODE, pods, strategy=strategy)


def test_the_loss_is_total_when_all_devices_of_a_kind_are_destroyed() -> None:
    (loss,) = losses({"1g.5gb": 2, "3g.20gb": 1}, pod("a", mig_2g_10gb=1), pod("b", gpu=1))

    assert (loss.kind.resource, loss.ending, loss.is_total) == ("nvidia.com/mig-2g.10gb", 1, True)


@pytest.mark.parametrize(("requested", "least"), [(1, 0), (2, 1)])
def test_a_partial_loss_has_a_least_number_of_devices_in_use(requested: int, least: int) -> None:
    (loss,) = losses({"1g.5gb": 2, "2g.10gb": 1}, pod("a", mig_3g_20gb=requested))

    assert (loss.ending, loss.is_total, loss.least) == (1, False, least)


def test_a_mig_mode_change_destroys_every_device_of_the_gpu() -> None:
    off = samples.want(mode=model.MigMode.DISABLED)
    on = samples.want({"1g.5gb": 1})
    plan = planner.plan(NODE, {NODE[1].uuid: off, NODE[2].uuid: on})

    found = resources.losses(
        plan, NODE, [pod("a", gpu=1, mig_1g_5gb=1, mig_3g_20gb=1)], strategy=MIXED
    )

    assert {loss.kind.resource.rpartition("/")[2]: loss.ending for loss in found} == {
        "mig-1g.5gb": 1,
        "mig-3g.20gb": 1,
        "gpu": 1,
    }


def test_with_strategy_none_destroying_one_instance_loses_the_whole_gpu() -> None:
    (loss,) = losses({"1g.5gb": 2}, pod("a", gpu=1), strategy="none")

    assert (loss.ending, loss.kind.count) == (1, 3)
