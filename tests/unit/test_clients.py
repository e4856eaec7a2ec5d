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


def plan_to(gpus: tuple[model.Gpu, ...], *names: str) -> steps.Plan:
    return planner.plan(gpus, {gpus[0].uuid: wanted(*names)})


def test_a_plan_that_only_creates_affects_no_pod() -> None:
    gpus = balanced()
    fewer = gpu_values.brought_to(gpus, wanted("1g.5gb", "3g.20gb"))

    plan = plan_to(fewer, "1g.5gb", "2g.10gb", "3g.20gb")

    assert plan.steps
    assert clients.affected_ids(plan, fewer) == frozenset()
    assert clients.affected_pods([POD], None, frozenset()) == ()


def test_a_pod_with_the_whole_mig_gpu_is_affected_by_any_destroyed_instance() -> None:
    gpus = balanced()
    plan = plan_to(gpus, "1g.5gb", "1g.5gb", "3g.20gb")

    assert gpus[0].uuid in clients.affected_ids(plan, gpus)


def test_a_mode_change_affects_every_device_of_the_gpu() -> None:
    gpus = balanced()
    plan = planner.plan(gpus, {gpus[0].uuid: model.DesiredGpu(mode=model.MigMode.DISABLED)})

    assert {gpus[0].uuid, *gpus[0].mig_uuids} == clients.affected_ids(plan, gpus)


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


def test_a_pod_that_kubelet_lists_without_any_device_counts_by_its_request() -> None:
    # Kubelet lists every pod, but not the devices of a plain init container.
    listed = using()
    without_gpu = dataclasses.replace(POD, gpu_resources={})

    assert clients.affected_pods([POD], (listed,), ONE) == (POD,)
    assert clients.affected_pods([without_gpu], (listed,), ONE) == ()


def test_a_pod_whose_init_container_may_use_a_gpu_counts_whatever_else_it_uses() -> None:
    devices = using(OTHER)
    starting = dataclasses.replace(POD, phase="Pending", may_run_gpu_init=True)

    assert clients.affected_pods([starting], (devices,), ONE) == (starting,)
    assert clients.affected_pods([POD], (devices,), ONE) == ()


@pytest.mark.parametrize(
    ("ids", "leaves"),
    [
        ({"nvidia0/gi7"}, True),
        ({"GPU-00000000-0000-0000-0000-000000000000-3"}, True),
        ({"0000:3b:00.1"}, True),
        ({gpu_values.mig_uuid("2")}, False),
        ({gpu_values.mig_uuid("2"), "mlx5_0"}, False),
        ({"MIG-GPU-00000000-0000-0000-0000-000000000000/7/0"}, False),
    ],
)
def test_a_gpu_whose_id_is_no_uuid_may_be_any_device(ids: set[str], *, leaves: bool) -> None:
    devices = using(ids)
    without_gpu = dataclasses.replace(POD, gpu_resources={})

    assert bool(clients.affected_pods([POD], (devices,), ONE)) is leaves
    assert clients.affected_pods([without_gpu], (devices,), ONE) == ()


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
    listed = using()
    nic = dataclasses.replace(listed, claim_drivers=frozenset({"nic.example.com"}))

    for known in (None, (), (listed,)):
        assert clients.affected_pods([claimant], known, ONE) == (claimant,)
        assert "ResourceClaim" in clients.describe_pod(claimant, known)
    assert clients.affected_pods([claimant], (nic,), ONE) == ()


def test_a_whole_node_change_affects_only_pods_that_use_or_request_a_gpu() -> None:
    devices = using(OTHER)
    idle = dataclasses.replace(POD, name="idle", gpu_resources={})

    left = clients.affected_pods([POD, idle], (devices,), frozenset(), is_whole_node=True)

    assert left == (POD,)


def test_the_owners_daemons_are_paused_and_not_evicted() -> None:
    daemon = clients.ExtraClient(labels={"app": "watcher"}, deploy_label=SAMPLER)
    pod = dataclasses.replace(POD, labels={"app": "watcher"}, owner_kind="DaemonSet")
    gpus = balanced()
    plan = plan_to(gpus, "1g.5gb", "1g.5gb", "3g.20gb")

    assert clients.affected_pods([pod], None, ONE, daemons=(daemon,)) == ()
    assert clients.labels_to_pause({SAMPLER: "true"}, plan, (daemon,)) == {SAMPLER: "true"}
    assert clients.labels_to_pause({SAMPLER: "false"}, plan, (daemon,)) == {}


def test_labels_are_paused_in_the_order_of_their_release() -> None:
    gpus = balanced()
    plan = plan_to(gpus, "1g.5gb", "1g.5gb", "3g.20gb")
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


def test_a_pod_on_another_device_stays() -> None:
    assert clients.affected_pods([POD], (using(OTHER),), ONE) == ()
    assert clients.affected_pods([POD], (using(OTHER),), OTHER) == (POD,)


def test_a_workload_that_selects_nodes_by_a_deploy_label_is_no_daemon() -> None:
    selective = dataclasses.replace(POD, node_selector={cluster.PLUGIN_DEPLOY_LABEL: "true"})
    daemon = dataclasses.replace(selective, owner_kind="DaemonSet")

    gated = clients.gated_by([selective, daemon], {cluster.PLUGIN_DEPLOY_LABEL})

    assert gated == (daemon,)


@pytest.mark.parametrize(
    ("pod", "is_plugin"),
    [
        ({"labels": {"app": "nvidia-device-plugin-daemonset"}}, True),
        ({"labels": {"name": "nvidia-device-plugin-ds"}}, True),
        ({"container_names": ("nvidia-device-plugin-ctr",)}, True),
        (
            {
                "labels": {"app.kubernetes.io/name": "nvidia-device-plugin"},
                "container_names": ("nvidia-device-plugin-ctr", "config-manager"),
            },
            True,
        ),
        (
            {
                "labels": {"app.kubernetes.io/name": "nvidia-device-plugin"},
                "container_names": ("gpu-feature-discovery-ctr",),
            },
            False,
        ),
        (
            {
                "labels": {"app.kubernetes.io/name": "nvidia-device-plugin"},
                "container_names": ("mps-control-daemon-ctr",),
            },
            False,
        ),
        ({"labels": {"app": "nvidia-device-plugin-mps-control-daemon"}}, False),
        # A label that any pod may have.
        ({"labels": {"name": "nvidia-device-plugin-ds"}, "owner_kind": None}, False),
        ({"labels": {"name": "nvidia-device-plugin-ds"}, "owner_kind": "ReplicaSet"}, False),
        (
            {"labels": {"name": "nvidia-device-plugin-ds"}, "mounts_plugin_sockets": False},
            False,
        ),
        ({"labels": {"app": "gpu-feature-discovery"}}, False),
    ],
)
def test_the_device_plugin_is_found_however_it_was_deployed(
    pod: dict[str, object], *, is_plugin: bool
) -> None:
    ours = dataclasses.replace(POD, **{**OF_PLUGIN, **pod})  # type: ignore[arg-type]
    found = clients.is_device_plugin(ours)

    assert found is is_plugin


def counted(
    allocatable: dict[str, int],
    capacity: dict[str, int] | None = None,
    labels: dict[str, str] | None = None,
) -> resources.NodeDevices:
    return resources.NodeDevices(
        allocatable=allocatable, capacity=capacity or allocatable, labels=labels or {}
    )


def test_devices_are_schedulable_only_if_kubelet_has_exactly_the_existing_ones() -> None:
    gpus = balanced()
    ids = frozenset(gpus[0].mig_uuids)
    stale = frozenset({"MIG-gone", *sorted(ids)[1:]})
    count = {"nvidia.com/gpu": len(ids)}

    assert resources.why_not_schedulable(gpus, {"nvidia.com/gpu": ids}, counted(count)) == ""
    assert "3 exist" in resources.why_not_schedulable(
        gpus, {"nvidia.com/gpu": stale}, counted(count)
    )


def test_a_resource_of_the_former_layout_must_have_gone_to_zero() -> None:
    gpus = balanced()
    ids = {"nvidia.com/gpu": frozenset(gpus[0].mig_uuids)}

    why = resources.why_not_schedulable(
        gpus, ids, counted({"nvidia.com/gpu": 4, "nvidia.com/mig-7g.40gb": 1})
    )

    assert "nvidia.com/mig-7g.40gb is 1, 0 expected" in why


def test_shared_devices_count_once_per_replica() -> None:
    gpus = balanced()
    ids = {"nvidia.com/gpu.shared": frozenset(gpus[0].mig_uuids)}

    assert resources.why_not_schedulable(gpus, ids, counted({"nvidia.com/gpu.shared": 8})) == ""
    assert resources.why_not_schedulable(gpus, ids, counted({"nvidia.com/gpu.shared": 7})) != ""


def test_without_kubelet_the_sum_of_the_nodes_counts_decides() -> None:
    gpus = balanced()

    assert resources.why_not_schedulable(gpus, None, counted({"nvidia.com/mig-1g.5gb": 4})) == ""
    assert "counts 7 devices, 4 are expected" in resources.why_not_schedulable(
        gpus, None, counted({"nvidia.com/gpu": 7})
    )


def test_whole_gpus_are_right_where_the_strategy_is_none() -> None:
    gpus = balanced()

    assert (
        resources.why_not_schedulable(
            gpus, {"nvidia.com/gpu": frozenset({gpus[0].uuid})}, counted({"nvidia.com/gpu": 1})
        )
        == ""
    )


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
