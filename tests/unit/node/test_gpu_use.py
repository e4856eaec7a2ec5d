"""Which pods use or may use a device that a change affects, from values alone."""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import pytest

from mig_manager import reasons
from mig_manager.core import model
from mig_manager.core.node import gpu_use
from mig_manager.core.node.devices import device_ids
from mig_manager.core.objects import pod_object, well_known
from tests.rigs.node import driver_rules, samples
from tests.rigs.node.samples import pod
from tests.unit.node.divided_gpu import GPU, HIGH, LOW, MIG, gpu, process

ONE, OTHER = frozenset({MIG[LOW]}), frozenset({MIG[HIGH]})


def using(ids: Collection[str] = (), *drivers: str, **fields: Any) -> pod_object.PodDevices:
    return pod_object.PodDevices(
        namespace="default",
        name="p",
        device_ids=frozenset(ids),
        claim_drivers=frozenset(drivers),
        **fields,
    )


def users(
    pods: Sequence[pod_object.Pod],
    assigned: tuple[pod_object.PodDevices, ...] | None,
    affected: frozenset[str] | None,
    **fields: Any,
) -> pod_object.Pods:
    return gpu_use.Usage(pods=tuple(pods), assigned=assigned, **fields).users(affected)


def why_uncertain(of: pod_object.Pod, assigned: tuple[pod_object.PodDevices, ...] | None) -> str:
    return gpu_use.Usage(pods=(of,), assigned=assigned).why_uncertain(of)


@pytest.mark.parametrize(
    ("change", "leaves"),
    [
        ({}, True),
        ({"phase": "Succeeded"}, False),
        ({"gpu_resources": {}}, False),
        ({"gpu_resources": {"nvidia.com/gpu.shared": 1}}, True),
        ({"gpu_resources": {"nvidia.com/mig-1g.5gb.shared": 1}}, True),
        ({"gpu_resources": {"nvidia.com/hostdev": 1}}, False),
        ({"owner_kind": "DaemonSet"}, True),
        ({"labels": samples.PLUGIN_LABELS}, True),
        ({"labels": samples.PLUGIN_LABELS, **samples.OF_PLUGIN}, False),
    ],
)
def test_a_pod_whose_devices_kubelet_does_not_list_counts_by_its_request(
    change: dict[str, Any], *, leaves: bool
) -> None:
    assert bool(users([pod(**change)], (), ONE)) is leaves


@pytest.mark.parametrize(
    ("ids", "leaves"),
    [
        # Kubelet lists every pod, but not the devices of a plain init container.
        (set(), True),
        (ONE, True),
        (OTHER, False),
        ({"nvidia0/gi7"}, True),
        ({"GPU-00000000-0000-0000-0000-000000000000-3"}, True),
        ({"0000:3b:00.1"}, True),
        ({*OTHER, "mlx5_0"}, False),
        ({"MIG-GPU-00000000-0000-0000-0000-000000000000/7/0"}, False),
    ],
)
def test_a_pod_uses_its_devices_and_gpus_listed_without_a_uuid(
    ids: Collection[str], *, leaves: bool
) -> None:
    assert bool(users([pod()], (using(ids),), ONE)) is leaves
    without_gpu, uses_it = pod(gpu_resources={}), bool(ONE & frozenset(ids))
    assert bool(users([without_gpu], (using(ids),), ONE)) is uses_it


def test_a_pod_counts_if_its_init_container_may_use_a_gpu() -> None:
    starting = pod(phase="Pending", has_gpu_init=True)
    assert users([starting], (using(OTHER),), ONE) == (starting,)


def test_a_pod_counts_if_its_claim_may_be_for_a_gpu_and_it_is_known_why() -> None:
    claimant, unlisted = pod(gpu_resources={}), pod(gpu_resources={}, has_claims=True)
    of_gpu, nic = using((), "nic.example.com", "gpu.nvidia.com"), using((), "nic.example.com")
    starting = dataclasses.replace(unlisted, phase="Pending", has_claim_init=True)
    for each, assigned in (
        (claimant, (of_gpu,)),
        (starting, (nic,)),
        (unlisted, None),
        (unlisted, ()),
        (unlisted, (using(),)),
    ):
        assert users([each], assigned, ONE) == (each,)
        assert users([each], assigned, frozenset()) == ()
        assert "ResourceClaim" in why_uncertain(each, assigned)
    assert users([unlisted], (nic,), ONE) == ()


def test_a_whole_node_change_affects_only_pods_that_use_or_request_a_gpu() -> None:
    pods = [pod(), pod("idle", gpu_resources={})]
    affected = users(pods, (using(OTHER),), None)
    assert affected == (pod(),)


@pytest.mark.parametrize(
    ("fields", "is_user"),
    [
        ({"ids": ONE}, True),
        ({"ids": OTHER}, False),
        ({"drivers": (well_known.GPU_CLAIM_DRIVER,)}, True),
        ({"drivers": ("nic.example.com",)}, False),
        ({"ids": {"mlx5_0"}}, False),
        ({"ids": {"nvidia0/gi7"}, "gpu_resources": frozenset({"nvidia.com/gpu"})}, True),
    ],
)
def test_a_pod_that_only_kubelet_lists_is_a_user(fields: dict[str, Any], *, is_user: bool) -> None:
    ids, drivers = fields.pop("ids", ()), fields.pop("drivers", ())
    gpu_users = users([], (using(ids, *drivers, **fields),), ONE)
    assert [(each.key, each.is_unlisted) for each in gpu_users] == [("default/p", True)] * is_user


@pytest.mark.parametrize(
    "namesake",
    [
        using(ONE),
        using((), well_known.GPU_CLAIM_DRIVER),
        using({"nvidia0/gi7"}, gpu_resources=frozenset({"nvidia.com/gpu"})),
    ],
)
def test_pods_with_one_name_are_one_user_with_all_their_devices(
    namesake: pod_object.PodDevices,
) -> None:
    other = using({"mlx5_0"}, "nic.example.com")
    for both in ((namesake, other), (other, namesake)):
        assert [each.key for each in users([], both, ONE)] == ["default/p"]


GONE = frozenset({driver_rules.mig_uuid("gone")})


@pytest.mark.parametrize(
    ("known_ids", "owners", "is_user"),
    [
        (ONE | OTHER, None, True),
        (ONE | OTHER, ["pod p"], True),
        (ONE | OTHER, [""], True),  # it may be of any pod
        (ONE | OTHER, ["pod another", "unit train.service"], False),
        (ONE | OTHER, [], False),
        (ONE | OTHER | GONE, None, False),
        (None, None, False),
    ],
)
def test_a_pod_whose_device_no_gpu_has_is_a_user_unless_it_has_no_process(
    known_ids: frozenset[str] | None, owners: list[str] | None, *, is_user: bool
) -> None:
    processes = None if owners is None else {GPU: [process(owner=owner) for owner in owners]}
    state: dict[str, Any] = {"known_ids": known_ids, "processes": processes}
    claiming = pod(gpu_resources={}, claimed_ids=GONE)
    assert bool(users([pod()], (using(GONE),), ONE, **state)) is is_user
    assert bool(users([claiming], (), ONE, **state)) is is_user
    usage = gpu_use.Usage(pods=(claiming,), assigned=(), **state)
    assert is_user <= bool(usage.why_uncertain(claiming))


def test_device_ids_are_unknown_with_a_gpu_that_cannot_be_observed() -> None:
    assert device_ids.of_gpus(model.ObservedGpus((gpu(),))) == frozenset({GPU, *MIG.values()})
    lost = model.UnreachableGpu(
        index=1, uuid="", reason=reasons.Reason.GPU_LOST, code=None, message="lost"
    )
    assert device_ids.of_gpus(model.ObservedGpus((gpu(),), (lost,))) is None


@pytest.mark.parametrize(
    ("changed", "affected", "is_undecided"),
    [
        ({}, ONE, True),
        ({}, frozenset(), False),
        ({}, ONE | OTHER | {GPU}, False),  # every device goes
        ({"gpu_resources": {}}, ONE, False),
        ({"gpu_resources": {}, "has_claims": True}, ONE, True),
        ({"gpu_resources": {}, "claimed_ids": ONE}, ONE, False),
        ({"claimed_ids": ONE}, ONE, True),  # it has a device of the plugin, too
        ({"claimed_ids": ONE, "claimed_resources": frozenset({"nvidia.com/gpu"})}, ONE, False),
    ],
)
def test_pods_whose_devices_only_a_silent_kubelet_knows_are_undecided(
    changed: dict[str, Any], affected: frozenset[str], *, is_undecided: bool
) -> None:
    usage = gpu_use.Usage(
        pods=(pod(**changed),), assigned=None, known_ids=frozenset({GPU, *MIG.values()})
    )
    assert bool(usage.undecided_users(affected)) is is_undecided
    assert not dataclasses.replace(usage, assigned=(using(ONE),)).undecided_users(affected)


@pytest.mark.parametrize(
    ("pods", "assigned", "is_incomplete", "undecided"),
    [
        ([pod()], (), True, ["p"]),
        ([pod()], (using(),), True, ["p"]),
        ([pod()], (using(OTHER),), False, []),
        ([pod(), pod("q")], (using(OTHER),), False, ["q"]),
        ([], (), False, []),
        ([pod(gpu_resources={})], (), False, []),
        ([pod(phase="Pending")], (), False, ["p"]),
        ([pod(phase="Pending", is_terminating=True)], (), False, []),
        ([pod(phase="Pending", has_gpu_init=True)], (), False, []),
        # Its init container may have had its only device.
        ([pod(has_gpu_init=True)], (using(),), False, []),
    ],
)
def test_kubelets_answer_is_incomplete_without_a_device_of_a_running_pod(
    pods: list[pod_object.Pod],
    assigned: tuple[pod_object.PodDevices, ...],
    *,
    is_incomplete: bool,
    undecided: list[str],
) -> None:
    usage = gpu_use.Usage(pods=tuple(pods), assigned=assigned)
    assert bool(usage.why_incomplete) is is_incomplete
    assert [each.name for each in usage.undecided_users(ONE)] == undecided


@pytest.mark.parametrize(
    ("requested", "affected", "is_user"),
    [
        (["mig-2g.10gb"], ONE, True),
        (["mig-2g.10gb"], ONE | OTHER | {GPU}, True),
        (["mig-2g.10gb"], OTHER | {GPU}, False),
        (["mig-1g.5gb.shared"], OTHER, True),
        (["mig-1g.5gb", "mig-2g.10gb"], ONE, True),
        (["mig-1g.5gb", "gpu"], ONE, True),
        (["mig-1g.5gb", "hostdev"], ONE, False),
        (["mig-1g.5gb"], frozenset({"unknown"}), True),
        (["mig-1g.5gb"], None, True),
    ],
)
@pytest.mark.parametrize("is_silent", [False, True])
def test_a_pod_without_a_listed_device_may_have_those_of_its_profile(
    requested: list[str], affected: frozenset[str] | None, *, is_user: bool, is_silent: bool
) -> None:
    starting = pod(gpu_resources={f"nvidia.com/{name}": 1 for name in requested})
    names = gpu_use.resource_names([gpu()])
    assigned = None if is_silent else ()
    assert bool(users([starting], assigned, affected, resource_names=names)) is is_user
