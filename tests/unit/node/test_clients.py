"""The devices that a plan affects, and the daemons that it pauses, from values alone."""

import collections
import dataclasses
from typing import Any

import pytest

from mig_manager.core import model, steps
from mig_manager.core.node import gpu_use
from mig_manager.core.node.daemons import client_table, clients
from mig_manager.core.objects import well_known
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
