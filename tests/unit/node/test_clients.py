"""The pods that a plan affects, the daemons it pauses, and other managers, from values alone."""

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest

from mig_manager import errors
from mig_manager.core import model, steps
from mig_manager.core.node import gpu_use
from mig_manager.core.node.daemons import client_table, clients, mig_managers
from mig_manager.core.objects import pod_object, well_known
from mig_manager.core.planner import planner
from tests.rigs.node import driver_rules, gpu_values, samples
from tests.rigs.node.samples import pod

ONE = frozenset({driver_rules.mig_uuid("1")})
SAMPLER = well_known.DEPLOY_LABEL_PREFIX + "sampler"


def desired_gpu(*names: str) -> model.DesiredGpu:
    return samples.desired_gpu(collections.Counter(names))


def plan_to(gpus: tuple[model.Gpu, ...], *names: str) -> steps.Plan:
    return planner.plan(gpus, {gpus[0].uuid: desired_gpu(*names)})


LESS = ("1g.5gb", "1g.5gb", "3g.20gb")


# -- affected pods ----------------------------------------------------------------------------


def test_a_plan_affects_the_destroyed_devices_and_the_whole_gpu() -> None:
    gpus = samples.balanced_gpu()
    fewer = gpu_values.with_desired(gpus, desired_gpu("1g.5gb", "3g.20gb"))
    only_creates = plan_to(fewer, "1g.5gb", "2g.10gb", "3g.20gb")
    assert only_creates.steps
    assert only_creates.affected_ids(fewer) == frozenset()
    assert gpu_use.Usage(pods=(pod(),), assigned=None).users(frozenset()) == ()

    assert gpus[0].uuid in plan_to(gpus, *LESS).affected_ids(gpus)
    off = planner.plan(gpus, {gpus[0].uuid: model.DesiredGpu(mode=model.MigMode.DISABLED)})
    assert off.affected_ids(gpus) == {gpus[0].uuid, *gpus[0].mig_uuids}


def test_reset_affects_the_devices_of_a_gpu_known_by_its_last_layout() -> None:
    (gpu,) = samples.balanced_gpu()
    reset = model.RecoveryAction.GPU_RESET
    lost = dataclasses.replace(gpu, is_remembered=True, recovery_action=reset)
    plan = planner.repair((lost,), (lost.snapshot,))
    assert plan.affected_ids((lost,)) == {gpu.uuid, *gpu.mig_uuids}


# -- daemons ----------------------------------------------------------------------------------


def test_the_owners_daemons_are_paused_and_not_evicted() -> None:
    daemon = client_table.ExtraClient(labels={"app": "watcher"}, deploy_label=SAMPLER)
    watcher = pod(labels={"app": "watcher"}, owner_kind="DaemonSet")
    plan = plan_to(samples.balanced_gpu(), *LESS)
    usage = gpu_use.Usage(pods=(watcher,), assigned=None, extra_clients=(daemon,))
    assert usage.users(ONE) == ()
    assert clients.labels_to_pause({SAMPLER: "true"}, plan, (daemon,)) == {SAMPLER: "true"}
    assert clients.labels_to_pause({SAMPLER: "false"}, plan, (daemon,)) == {}


def test_labels_are_paused_in_the_order_of_their_release() -> None:
    names = ("device-plugin", "gpu-feature-discovery", "dcgm", "dcgm-exporter", "nvsm", "client")
    labels = {well_known.DEPLOY_LABEL_PREFIX + name: "true" for name in sorted(names)}
    paused = clients.labels_to_pause(labels, plan_to(samples.balanced_gpu(), *LESS))
    assert [key.removeprefix(well_known.DEPLOY_LABEL_PREFIX) for key in paused] == [*names]


def test_validators_are_known_by_label_and_daemons_by_owner_too() -> None:
    for name in ("operator", "cuda", "device-plugin"):
        labels = {"app": f"nvidia-{name}-validator"}
        assert clients.is_validator(pod(labels=labels, owner_kind="DaemonSet"))
    assert not clients.is_validator(pod())
    selective: dict[str, Any] = {"node_selector": {well_known.PLUGIN_DEPLOY_LABEL: "true"}}
    daemon = pod(**selective, owner_kind="DaemonSet")
    gated = clients.gated_by([pod(**selective), daemon], {well_known.PLUGIN_DEPLOY_LABEL})
    assert gated == (daemon,)


CHART = {"app.kubernetes.io/name": "nvidia-device-plugin"}
DS = {"name": "nvidia-device-plugin-ds"}


@pytest.mark.parametrize(
    ("is_plugin", "changed"),
    [
        (True, {"labels": samples.PLUGIN_LABELS}),
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
    changed: dict[str, Any], *, is_plugin: bool
) -> None:
    assert clients.is_device_plugin(pod(**{**samples.OF_PLUGIN, **changed})) is is_plugin


# -- the table of the owner's own daemons -----------------------------------------------------


TABLE = """\
version: v1
clients:
- labels: {app: watcher}
- labels: {app: sampler, tier: gpu}
  namespace: monitoring
  deploy-label: nvidia.com/gpu.deploy.sampler
"""


def test_client_table_matches_all_labels_and_the_namespace() -> None:
    anywhere, in_place = table = client_table.parse(TABLE, source="t")
    assert table == (
        client_table.ExtraClient(labels={"app": "watcher"}),
        client_table.ExtraClient(
            labels={"app": "sampler", "tier": "gpu"},
            namespace="monitoring",
            deploy_label="nvidia.com/gpu.deploy.sampler",
        ),
    )
    sampler: dict[str, Any] = {
        "namespace": "monitoring",
        "labels": {"app": "sampler", "tier": "gpu", "more": "x"},
    }
    assert client_table.members([pod(**sampler)], table) == (pod(**sampler),)
    assert not anywhere.matches(pod(**sampler))
    assert not in_place.matches(pod(**sampler | {"namespace": "default"}))
    assert not in_place.matches(pod(**sampler | {"labels": {"app": "sampler"}}))


@pytest.mark.parametrize("text", ["", "null", "version: v1", "version: v1\nclients:\n"])
def test_an_empty_table_has_no_daemons(text: str) -> None:
    assert client_table.parse(text, source="t") == ()


ENTRY = "version: v1\nclients:\n- labels: {a: b}\n  "


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        ("[]", "1:1", "expected a mapping"),
        ("clients: []", "1:1", "'version' is missing"),
        ("version: v2", "1:10", "must be the text v1"),
        ("version: v1\nclient: []", "2:1", "did you mean 'clients'"),
        ("version: v1\nclients: {}", "2:10", "must be a list"),
        ("version: v1\nclients:\n- x", "3:3", "a client is a mapping"),
        ("version: v1\nclients:\n- namespace: x", "3:3", "'labels' is missing"),
        ("version: v1\nclients:\n- labels: {}", "3:11", "labels must be a mapping"),
        ("version: v1\nclients:\n- labels: {a: true}", "3:15", "label 'a' must be a text"),
        (f"{ENTRY}namespace: 1", "4:14", "namespace must be"),
        (f"{ENTRY}deploy-label: example.com/x", "4:17", "begin with 'nvidia.com/gpu.deploy.'"),
        (f"{ENTRY}deploy-label: nvidia.com/gpu.deploy.", "4:17", "must begin with"),
    ],
)
def test_a_malformed_table_is_refused_with_its_location(
    text: str, place: str, message: str
) -> None:
    with pytest.raises(errors.ConfigError) as caught:
        client_table.parse(text, source="t.yaml")
    assert caught.value.message.startswith(f"t.yaml:{place}: ")
    assert message in caught.value.message


# -- other managers, by what their public manifests say of them -------------------------------


OWN_UID = "11111111-2222-3333-4444-555555555555"
NVIDIAS, NOS = "NVIDIA's mig-manager", "nos' mig-agent"
SLICER = "OpenShift's Dynamic Accelerator Slicer"
COMPONENT, NAME = "app.kubernetes.io/component", "app.kubernetes.io/name"
OPERATORS: dict[str, Any] = {
    "labels": {"app": "nvidia-mig-manager"},
    "container_names": ("nvidia-mig-manager",),
}
DAS: dict[str, Any] = {"container_names": ("das-daemonset",)}


def manager(name: str = "some-pod", **changed: Any) -> pod_object.Pod:
    common = {"namespace": "ns", "uid": "another", "images": ("registry.example.com/app:1",)}
    return pod(name, **(common | changed))


FROM_NVIDIA = manager(
    "nvidia-mig-manager-abcde",
    **OPERATORS,
    images=("nvcr.io/nvidia/cloud-native/k8s-mig-manager:v0.15.0",),
)
DYNAMIC_DRA = manager(
    "nvidia-dra-driver-gpu-kubelet-plugin-abcde",
    labels={"nvidia-dra-driver-gpu-component": "kubelet-plugin"},
    container_names=("compute-domains", "gpus"),
    feature_gates={"DynamicMIG": True},
)
OWN_MANAGERS = [
    manager("ours", uid=OWN_UID, labels={NAME: "mig-manager"}, container_names=("mig-manager",)),
    manager(
        "in-its-place",
        uid=OWN_UID,
        **OPERATORS,
        images=("registry.example.com:5000/mig-manager:0.1.0",),
    ),
]


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (FROM_NVIDIA, NVIDIAS),
        (manager(labels={"app": "nvidia-mig-manager"}), NVIDIAS),
        (manager(container_names=("log", "nvidia-mig-manager")), NVIDIAS),
        (DYNAMIC_DRA, "NVIDIA's DRA driver with DynamicMIG"),
        (manager(labels={NAME: "nos-mig-agent"}), NOS),
        (manager(labels={COMPONENT: "mig-agent"}, container_names=("mig-agent",)), NOS),
        (manager(images=("ghcr.io/nebuly-ai/nos-mig-agent@sha256:00",)), NOS),
        (manager(**DAS), SLICER),
        (
            manager(
                labels={"app": "controller-daemonset"},
                container_names=("daemonset",),
                images=("example.com/instaslicev2-daemonset:latest",),
            ),
            SLICER,
        ),
    ],
)
def test_a_foreign_manager_is_named_with_its_kind(other: pod_object.Pod, what: str) -> None:
    assert mig_managers.others([manager(), other], OWN_UID) == (f"ns/{other.name} ({what})",)


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"name": "mig-manager"}, id="a pod's name alone"),
        pytest.param(
            {"container_names": ("compute-domains",), "feature_gates": {"DynamicMIG": True}},
            id="DRA for compute domains only",
        ),
        pytest.param(
            {"container_names": ("compute-domains", "gpus")}, id="DRA with static instances"
        ),
        pytest.param(
            {"container_names": ("gpus",), "feature_gates": {"DynamicMIG": False}},
            id="DRA with the gate off",
        ),
        pytest.param({"feature_gates": {"DynamicMIG": True}}, id="another driver's gate"),
        pytest.param({"labels": {COMPONENT: "mig-agent"}}, id="a component's name"),
        pytest.param(
            {"labels": {"app": "controller-daemonset"}, "container_names": ("daemonset",)},
            id="another driver's controller",
        ),
        pytest.param({"labels": samples.PLUGIN_LABELS}, id="the device plugin"),
        pytest.param({"labels": {NAME: "mig-manager"}}, id="our label on another thing"),
        *[
            pytest.param({**DAS, "phase": phase}, id=f"one that has {phase}")
            for phase in ("Succeeded", "Failed")
        ],
    ],
)
def test_software_that_changes_no_instances_is_not_a_foreign_manager(
    changed: Mapping[str, Any],
) -> None:
    for own_uid in (OWN_UID, None):
        assert mig_managers.others([manager(**changed)], own_uid) == ()


def test_agent_is_foreign_to_others_and_not_to_itself() -> None:
    assert (
        mig_managers.others(OWN_MANAGERS, OWN_UID) == mig_managers.others(OWN_MANAGERS, None) == ()
    )
    assert mig_managers.others(OWN_MANAGERS, "third") == (
        "ns/ours (another mig-manager)",
        f"ns/in-its-place ({NVIDIAS})",
    )
    unmistakable = [FROM_NVIDIA, DYNAMIC_DRA, manager(**DAS, phase="Pending")]
    assert len(mig_managers.others(unmistakable, None)) == len(unmistakable)


HAMI = manager("hami-abcde", labels={COMPONENT: "hami-device-plugin"})
VOLCANO = manager("volcano-abcde", labels={"name": "volcano-device-plugin"})
HAMIS, VOLCANOS = "hami.io/node-nvidia-register", "volcano.sh/node-vgpu-register"
REGISTERED = {
    # ``MarshalNodeDevices``, and ``EncodeNodeDevices`` before HAMi 2.8 and of volcano's.
    "json": '[{{"id":"GPU-1","count":7,"type":"NVIDIA-A30","mode":"{0}","health":true}}]',
    "fields": "GPU-1,10,40960,100,NVIDIA-A30,0,true,0,hami-core:GPU-2,1,9,100,A,0,true,1,{0}:",
    "volcano": "GPU-1,10,40960,NVIDIA-A30,true,{0}:",
}


@pytest.mark.parametrize("encoding", REGISTERED.values(), ids=REGISTERED)
@pytest.mark.parametrize(
    ("plugin", "key", "kind"),
    [
        (HAMI, HAMIS, "HAMi in MIG mode"),
        (VOLCANO, VOLCANOS, "volcano's vGPU device plugin in MIG mode"),
    ],
    ids=["HAMi", "volcano"],
)
def test_vgpu_plugin_is_a_foreign_manager_only_in_mig_mode(
    plugin: pod_object.Pod, key: str, kind: str, encoding: str
) -> None:
    in_mig_mode = {key: encoding.format("mig")}
    named = (f"ns/{plugin.name} ({kind})",)

    assert mig_managers.others([manager(), plugin], OWN_UID, in_mig_mode) == named
    assert mig_managers.is_vgpu_plugin(plugin)

    for other_mode in ("hami-core", "mps", "mig2", ""):
        registered = {key: encoding.format(other_mode)}
        assert mig_managers.others([plugin], OWN_UID, registered) == ()
    other_key = ({HAMIS, VOLCANOS} - {key}).pop()
    for annotations in ({}, {other_key: encoding.format("mig")}, {key: "["}):
        assert mig_managers.others([plugin], OWN_UID, annotations) == ()


def test_an_annotation_without_its_vgpu_plugin_is_not_a_foreign_manager() -> None:
    left_behind = {HAMIS: REGISTERED["json"].format("mig")}
    gone = dataclasses.replace(HAMI, phase="Succeeded")

    assert mig_managers.others([manager(), VOLCANO, gone], OWN_UID, left_behind) == ()
    assert not mig_managers.is_vgpu_plugin(manager())
