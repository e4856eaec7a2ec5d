"""Which GPU instances are in use, from values alone."""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import pytest

from mig_manager import reasons
from mig_manager.core import gpu_processes, model
from mig_manager.core.node import gpu_use, instance_use
from mig_manager.core.node.daemons import client_table
from mig_manager.core.node.devices import device_ids
from mig_manager.core.objects import pod_object, well_known
from tests.rigs.node import driver_rules, samples
from tests.rigs.node.samples import pod

LOW, HIGH, NONE = "4:2", "6:1", ""
MIG = {"4:2": driver_rules.mig_uuid("1"), "6:1": driver_rules.mig_uuid("2")}
WHOLE = model.Placement(0, 8)
GPU = driver_rules.mig_uuid("gpu").replace("MIG", "GPU")


def gpu() -> model.Gpu:
    """Build a GPU with two MIG devices, one at slices 4-5 and one at 6."""
    divided = samples.gpu(samples.A100, "2g.10gb@4", "1g.5gb@6")
    return dataclasses.replace(
        divided,
        uuid=GPU,
        gpu_instances=tuple(
            dataclasses.replace(
                gi,
                compute_instances=tuple(
                    dataclasses.replace(ci, uuid=MIG[str(gi.placement)])
                    for ci in gi.compute_instances
                ),
            )
            for gi in divided.gpu_instances
        ),
    )


PLAIN = dataclasses.replace(samples.gpu(samples.A100, mode=model.MigMode.DISABLED), uuid=GPU)


def has(name: str, *ids: str) -> pod_object.PodDevices:
    return pod_object.PodDevices(namespace="default", name=name, device_ids=frozenset(ids))


def process(*instances: int, name: str = "python", owner: str = "") -> gpu_processes.GpuProcess:
    return gpu_processes.GpuProcess(pid=7, name=name, owner=owner, gpu_instances=instances)


def use_and_stability(
    pods: list[pod_object.Pod],
    assigned: list[pod_object.PodDevices] | None,
    *processes: gpu_processes.GpuProcess,
    of: model.Gpu | None = None,
    **options: Any,
) -> tuple[str, bool]:
    """Return the placements in use as text, and whether that is stable."""
    used_gpu = of or gpu()
    usage = gpu_use.Usage(
        pods=tuple(pods),
        assigned=None if assigned is None else tuple(assigned),
        processes={used_gpu.uuid: processes},
        **options,
    )
    use = instance_use.find([used_gpu], usage)
    assert use is not None
    return " ".join(map(str, sorted(use.in_use[used_gpu.uuid]))), use.is_stable


A, A_HAS_LOW = [pod("a")], [has("a", MIG[LOW])]
BOTH = f"{LOW} {HIGH}"


@pytest.mark.parametrize(
    ("pods", "assigned", "processes", "use"),
    [
        pytest.param([], [], (), (NONE, True), id="nothing"),
        pytest.param(A, A_HAS_LOW, (), (LOW, True), id="a pod's device"),
        pytest.param([], [], (process(1),), (HIGH, False), id="a process"),
        pytest.param(A, A_HAS_LOW, (process(0),), (LOW, True), id="a pod's process"),
        pytest.param(A, A_HAS_LOW, (process(1),), (BOTH, False), id="a pod and a process"),
        pytest.param(
            [pod("a", phase="Succeeded")], A_HAS_LOW, (), (NONE, True), id="a finished pod"
        ),
        pytest.param(A, [has("a", GPU)], (), (BOTH, True), id="a pod with the whole GPU"),
        pytest.param(
            [pod("a", phase="Pending")], [], (), (BOTH, False), id="a pod without a device yet"
        ),
        pytest.param(
            [pod("a", phase="Pending", has_gpu_init=True)],
            A_HAS_LOW,
            (),
            (BOTH, False),
            id="an init container",
        ),
        pytest.param(
            [pod("a", gpu_resources={}, has_claims=True)],
            [],
            (),
            (BOTH, False),
            id="an unknown claim",
        ),
        pytest.param(
            [], [has("gone", MIG[HIGH])], (), (HIGH, False), id="a pod that only kubelet lists"
        ),
    ],
)
def test_instances_in_use_are_found_and_observed_again_if_unsure(
    pods: list[pod_object.Pod],
    assigned: list[pod_object.PodDevices],
    processes: tuple[gpu_processes.GpuProcess, ...],
    use: tuple[str, bool],
) -> None:
    assert use_and_stability(pods, assigned, *processes) == use


def test_without_kubelet_only_a_node_without_gpu_pods_is_known() -> None:
    silent = gpu_use.Usage(pods=(pod("a"),), assigned=None)
    assert instance_use.find([gpu()], silent) is None
    assert use_and_stability([pod("a", gpu_resources={})], None) == (NONE, True)


def test_daemons_that_a_change_pauses_use_nothing() -> None:
    operand = pod(
        "dcgm",
        gpu_resources={},
        owner_kind="DaemonSet",
        node_selector={well_known.DEPLOY_LABEL_PREFIX + "dcgm": "true"},
    )
    watcher = pod("watcher", labels={"app": "watcher"}, owner_kind="DaemonSet")
    listed = client_table.ExtraClient(labels={"app": "watcher"})
    gated = client_table.ExtraClient(
        labels={"app": "other"}, deploy_label=well_known.DEPLOY_LABEL_PREFIX + "other"
    )
    beside = pod(
        "beside",
        gpu_resources={},
        owner_kind="DaemonSet",
        node_selector={str(gated.deploy_label): "true"},
    )

    assert use_and_stability([operand], [], process(0, owner="pod dcgm")) == (NONE, True)
    assert use_and_stability(
        [watcher], [], process(1, owner="pod watcher"), extra_clients=(listed,)
    ) == (
        NONE,
        True,
    )
    assert use_and_stability(
        [beside], [], process(1, owner="pod beside"), extra_clients=(gated,)
    ) == (
        NONE,
        True,
    )
    assert use_and_stability([pod("a", gpu_resources={})], [], process(1, owner="pod a")) == (
        HIGH,
        False,
    )


def test_gpu_without_mig_is_in_use_as_a_whole() -> None:
    assert use_and_stability([], [], of=PLAIN) == (NONE, True)
    assert use_and_stability([pod("a")], [has("a", GPU)], of=PLAIN) == (str(WHOLE), True)
    assert use_and_stability([], [], process(), of=PLAIN) == (str(WHOLE), False)
    assert use_and_stability([], [], process(name="nvidia-persistenced"), of=PLAIN) == (NONE, True)


def test_a_gpu_that_does_not_answer_is_not_known_and_observed_again() -> None:
    usage = gpu_use.Usage(pods=(), assigned=(), processes={"GPU-9": ()})
    use = instance_use.find([gpu(), dataclasses.replace(PLAIN, uuid="GPU-9")], usage)

    assert use == instance_use.InstanceUse(in_use={"GPU-9": frozenset()}, is_stable=False)


def test_only_changes_that_concern_gpus_are_relevant() -> None:
    before = instance_use.relevant(pod("a"))

    assert before == instance_use.relevant(pod("a", is_ready=False))
    assert instance_use.relevant(None) == instance_use.relevant(pod("b", gpu_resources={}))
    for changed in (
        None,
        pod("a", phase="Succeeded"),
        pod("a", phase="Pending", has_gpu_init=True),
        pod("d", gpu_resources={}, has_claims=True),
    ):
        assert before != instance_use.relevant(changed)


# -- users ------------------------------------------------------------------------------------

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
