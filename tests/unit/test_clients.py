"""The pods and services that a plan affects, decided from values alone."""

import collections
import dataclasses
from collections.abc import Collection

import pytest

from mig_manager.catalogue import hardware
from mig_manager.core import model, steps
from mig_manager.core.node import clients, cluster, resources
from mig_manager.core.planner import planner
from tests import gpu_values
from tests.unit import samples

ONE, OTHER = frozenset({gpu_values.mig_uuid("1")}), frozenset({gpu_values.mig_uuid("2")})
SAMPLER = cluster.DEPLOY_LABEL_PREFIX + "sampler"

POD = samples.pod()

OF_PLUGIN = {"owner_kind": "DaemonSet", "mounts_plugin_sockets": True}
"""What a pod of the device plugin is beside its name."""


def using(ids: Collection[str] = ()) -> cluster.PodDevices:
    return cluster.PodDevices(namespace="default", name="p", device_ids=frozenset(ids))


def balanced() -> tuple[model.Gpu, ...]:
    gpu = hardware.template(hardware.find("A100-SXM4-40GB"), 0)
    return gpu_values.brought_to((gpu,), wanted("1g.5gb", "1g.5gb", "2g.10gb", "3g.20gb"))


def wanted(*names: str) -> model.DesiredGpu:
    return samples.want(collections.Counter(names))


LESS = ("1g.5gb", "1g.5gb", "3g.20gb")


def plan_to(gpus: tuple[model.Gpu, ...], *names: str) -> steps.Plan:
    return planner.plan(gpus, {gpus[0].uuid: wanted(*names)})


def test_a_plan_that_only_creates_affects_no_pod() -> None:
    fewer = gpu_values.brought_to(balanced(), wanted("1g.5gb", "3g.20gb"))

    plan = plan_to(fewer, "1g.5gb", "2g.10gb", "3g.20gb")

    assert plan.steps
    assert clients.affected_ids(plan, fewer) == frozenset()
    assert clients.affected_pods([POD], None, frozenset()) == ()


def test_a_destroyed_instance_affects_the_whole_mig_gpu_and_a_mode_change_every_device() -> None:
    gpus = balanced()
    off = {gpus[0].uuid: model.DesiredGpu(mode=model.MigMode.DISABLED)}

    assert gpus[0].uuid in clients.affected_ids(plan_to(gpus, *LESS), gpus)
    every = {gpus[0].uuid, *gpus[0].mig_uuids}
    assert clients.affected_ids(planner.plan(gpus, off), gpus) == every


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
        ({"labels": {"app": "nvidia-device-plugin-daemonset"}}, True),
        ({"labels": {"app": "nvidia-device-plugin-daemonset"}, **OF_PLUGIN}, False),
    ],
)
def test_a_pod_whose_devices_kubelet_does_not_list_counts_by_its_request(
    change: dict[str, object], *, leaves: bool
) -> None:
    pod = dataclasses.replace(POD, **change)  # type: ignore[arg-type]

    assert bool(clients.affected_pods([pod], (), ONE)) is leaves


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
def test_a_pod_counts_for_its_devices_and_for_a_gpu_whose_id_is_no_uuid(
    ids: Collection[str], *, leaves: bool
) -> None:
    without_gpu = dataclasses.replace(POD, gpu_resources={})

    assert bool(clients.affected_pods([POD], (using(ids),), ONE)) is leaves
    uses_it = bool(ONE & frozenset(ids))
    assert bool(clients.affected_pods([without_gpu], (using(ids),), ONE)) is uses_it


def test_a_pod_whose_init_container_may_use_a_gpu_counts_whatever_else_it_uses() -> None:
    starting = dataclasses.replace(POD, phase="Pending", may_run_gpu_init=True)

    assert clients.affected_pods([starting], (using(OTHER),), ONE) == (starting,)


def test_a_pod_with_a_claim_on_a_gpu_counts_for_any_device_and_its_name_says_why() -> None:
    drivers = frozenset({"nic.example.com", "gpu.nvidia.com"})
    devices = dataclasses.replace(using(), claim_drivers=drivers)
    claimant = dataclasses.replace(POD, gpu_resources={})

    assert clients.affected_pods([claimant], (devices,), ONE) == (claimant,)
    assert clients.affected_pods([claimant], (devices,), frozenset()) == ()
    assert "ResourceClaim" in clients.describe_pod(claimant, (devices,))
    assert (
        clients.describe_pod(claimant, ()) == clients.describe_pod(claimant, None) == "default/p"
    )


def test_a_claim_that_kubelet_does_not_list_may_be_for_a_gpu() -> None:
    claimant = dataclasses.replace(POD, gpu_resources={}, has_claims=True)
    nic = dataclasses.replace(using(), claim_drivers=frozenset({"nic.example.com"}))

    for known in (None, (), (using(),)):
        assert clients.affected_pods([claimant], known, ONE) == (claimant,)
        assert "ResourceClaim" in clients.describe_pod(claimant, known)
    assert clients.affected_pods([claimant], (nic,), ONE) == ()


def test_a_whole_node_change_affects_only_pods_that_use_or_request_a_gpu() -> None:
    pods = [POD, dataclasses.replace(POD, name="idle", gpu_resources={})]

    assert clients.affected_pods(pods, (using(OTHER),), frozenset(), is_whole_node=True) == (POD,)


def test_the_owners_daemons_are_paused_and_not_evicted() -> None:
    daemon = clients.ExtraClient(labels={"app": "watcher"}, deploy_label=SAMPLER)
    pod = dataclasses.replace(POD, labels={"app": "watcher"}, owner_kind="DaemonSet")
    plan = plan_to(balanced(), *LESS)

    assert clients.affected_pods([pod], None, ONE, daemons=(daemon,)) == ()
    assert clients.labels_to_pause({SAMPLER: "true"}, plan, (daemon,)) == {SAMPLER: "true"}
    assert clients.labels_to_pause({SAMPLER: "false"}, plan, (daemon,)) == {}


def test_labels_are_paused_in_the_order_of_their_release() -> None:
    plan = plan_to(balanced(), *LESS)
    names = ("client", "dcgm-exporter", "nvsm", "dcgm", "gpu-feature-discovery", "device-plugin")
    labels = dict.fromkeys((cluster.DEPLOY_LABEL_PREFIX + name for name in names), "true")

    paused = clients.labels_to_pause(labels, plan)

    assert [key.removeprefix(cluster.DEPLOY_LABEL_PREFIX) for key in paused] == [
        "device-plugin",
        "gpu-feature-discovery",
        "dcgm",
        "dcgm-exporter",
        "nvsm",
        "client",
    ]


@pytest.mark.parametrize(
    "app",
    ["nvidia-operator-validator", "nvidia-cuda-validator", "nvidia-device-plugin-validator"],
)
def test_the_operators_validators_are_known_by_their_label(app: str) -> None:
    assert clients.is_validator(dataclasses.replace(POD, labels={"app": app}))
    assert not clients.is_validator(POD)


def test_a_workload_that_selects_nodes_by_a_deploy_label_is_no_daemon() -> None:
    selective = dataclasses.replace(POD, node_selector={cluster.PLUGIN_DEPLOY_LABEL: "true"})
    daemon = dataclasses.replace(selective, owner_kind="DaemonSet")

    gated = clients.gated_by([selective, daemon], {cluster.PLUGIN_DEPLOY_LABEL})

    assert gated == (daemon,)


CHART = {"app.kubernetes.io/name": "nvidia-device-plugin"}
DS = {"name": "nvidia-device-plugin-ds"}


@pytest.mark.parametrize(
    ("is_plugin", "pod"),
    [
        (True, {"labels": {"app": "nvidia-device-plugin-daemonset"}}),
        (True, {"labels": DS}),
        (True, {"container_names": ("nvidia-device-plugin-ctr",)}),
        (
            True,
            {"labels": CHART, "container_names": ("nvidia-device-plugin-ctr", "config-manager")},
        ),
        (False, {"labels": CHART, "container_names": ("gpu-feature-discovery-ctr",)}),
        (False, {"labels": CHART, "container_names": ("mps-control-daemon-ctr",)}),
        (False, {"labels": {"app": "nvidia-device-plugin-mps-control-daemon"}}),
        # A label that any pod may have.
        (False, {"labels": DS, "owner_kind": None}),
        (False, {"labels": DS, "owner_kind": "ReplicaSet"}),
        (False, {"labels": DS, "mounts_plugin_sockets": False}),
        (False, {"labels": {"app": "gpu-feature-discovery"}}),
    ],
)
def test_the_device_plugin_is_found_however_it_was_deployed(
    pod: dict[str, object], *, is_plugin: bool
) -> None:
    ours = dataclasses.replace(POD, **{**OF_PLUGIN, **pod})  # type: ignore[arg-type]

    assert clients.is_device_plugin(ours) is is_plugin


def counted(
    allocatable: dict[str, int],
    capacity: dict[str, int] | None = None,
    labels: dict[str, str] | None = None,
) -> resources.NodeDevices:
    return resources.NodeDevices(
        allocatable=allocatable, capacity=capacity or allocatable, labels=labels or {}
    )


GPU, SHARED = "nvidia.com/gpu", "nvidia.com/gpu.shared"


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
        pytest.param({SHARED: "1234"}, {SHARED: 8}, "", id="shared once per replica"),
        pytest.param({SHARED: "1234"}, {SHARED: 7}, SHARED, id="not a multiple"),
        pytest.param(None, {"nvidia.com/mig-1g.5gb": 4}, "", id="no kubelet: the sum"),
        pytest.param(None, {GPU: 7}, "counts 7 devices, 4 are expected", id="another sum"),
        pytest.param({GPU: "g"}, {GPU: 1}, "", id="whole GPUs where the strategy is none"),
    ],
)
def test_devices_are_schedulable_only_if_kubelet_has_exactly_the_existing_ones(
    healthy: dict[str, str] | None, allocatable: dict[str, int], why: str
) -> None:
    gpus = balanced()
    uuids = dict(zip("1234", gpus[0].mig_uuids, strict=True)) | {"g": gpus[0].uuid}
    ids: dict[str, frozenset[str]] | None = None
    if healthy is not None:
        (resource, letters), *_ = healthy.items()
        ids = {resource: frozenset(uuids.get(letter, "MIG-gone") for letter in letters)}

    found = resources.why_not_schedulable(gpus, ids, counted(allocatable))

    assert why in found if why else not found


@pytest.mark.parametrize("changed", [frozenset(), frozenset({"GPU-another"})])
def test_an_unhealthy_device_of_a_gpu_that_did_not_change_is_no_matter(
    changed: frozenset[str],
) -> None:
    gpus = balanced()
    healthy = {"nvidia.com/gpu": frozenset([*gpus[0].mig_uuids][1:])}
    node = counted({"nvidia.com/gpu": 3}, {"nvidia.com/gpu": 4})
    unregistered = counted({"nvidia.com/gpu": 3})

    assert resources.why_not_schedulable(gpus, healthy, node, changed=changed) == ""
    assert resources.why_not_schedulable(gpus, healthy, node, changed={gpus[0].uuid}) != ""
    assert resources.why_not_schedulable(gpus, healthy, node) != ""
    assert resources.why_not_schedulable(gpus, healthy, unregistered, changed=changed) != ""
    assert not resources.is_plugin_stale(gpus, healthy, node)
    assert resources.is_plugin_stale(gpus, healthy, unregistered)


def test_a_plugin_that_offers_a_device_that_is_gone_is_stale() -> None:
    gpus = balanced()
    stale = {"nvidia.com/gpu": frozenset({"MIG-gone", *[*gpus[0].mig_uuids][1:]})}

    assert resources.is_plugin_stale(gpus, stale, counted({"nvidia.com/gpu": 4}))


MIXED = {"nvidia.com/mig-1g.5gb": 2, "nvidia.com/mig-2g.10gb": 1, "nvidia.com/mig-3g.20gb": 1}
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
        ({"nvidia.com/gpu": 16}, {"nvidia.com/gpu.replicas": "4"}, True),
        ({"nvidia.com/gpu": 16}, {"nvidia.com/gpu.replicas": "1"}, False),
        ({"nvidia.com/mig-7g.40gb.shared": 3}, {}, False),
    ],
)
def test_without_kubelet_replicas_of_shared_devices_are_known(
    allocatable: dict[str, int], labels: dict[str, str], *, is_good: bool
) -> None:
    why = resources.why_not_schedulable(balanced(), None, counted(allocatable, labels=labels))

    assert (why == "") is is_good
