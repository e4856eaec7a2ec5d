"""Monitors, validators and the owner's daemons in a run."""

import math
from typing import Any

import pytest

from mig_manager.core import steps
from mig_manager.core.node.daemons import clients
from mig_manager.reasons import Reason
from tests.rigs.node import call_errors, ends, fakes, moments, nodes
from tests.rigs.node.nodes import (
    DCGM,
    EXPORTER,
    GFD,
    SAMPLER,
    monitored_node,
    node_with_extra_clients,
)


def test_monitors_resume_one_by_one_after_the_change_is_verified() -> None:
    rig = monitored_node()
    has_gfd = rig.note(
        lambda: "gpu-feature-discovery" in rig.pods.names,
        when=lambda: "gpus.execute" in rig.log and rig.node_object.labels[EXPORTER] == "true",
    )

    ends.run_to(rig, "one-slice-changed", Reason.APPLIED)

    verifying = rig.node_object.status_messages.index(
        "waiting for the new devices to be schedulable"
    )
    assert rig.node_object.status_messages[verifying + 1 : verifying + 3] == [
        "resuming gpu-feature-discovery, dcgm",
        "resuming dcgm-exporter",
    ]
    assert set(has_gfd) == {True}
    assert {rig.node_object.labels[key] for key in (GFD, DCGM, EXPORTER)} == {"true"}
    assert "MonitorNotReady" not in rig.node_object.events


def test_a_newer_request_does_not_wait_for_monitors() -> None:
    rig = monitored_node()
    rig.daemons.is_ready_by_label[GFD] = False
    cancel = fakes.FakeCancellation(
        rig.clock,
        ends_when=lambda: rig.node_object.status_messages[-1].startswith("resuming"),
        is_replaced=True,
    )

    ends.run_to(rig, "one-slice-changed", Reason.APPLIED, cancel=cancel)

    assert rig.clock.now_s < 2


def test_an_api_that_fails_leaves_the_monitors_to_the_end_of_the_run() -> None:
    rig = monitored_node()

    def fail() -> None:
        raise call_errors.broken("node")

    rig.callbacks.add(
        "node.patch",
        fail,
        when=lambda: any(
            each.startswith("resuming") for each in rig.node_object.status_messages[-1:]
        ),
        times=1,
    )

    ends.run_to(rig, "one-slice-changed", Reason.APPLIED)

    assert rig.node_object.labels[EXPORTER] == "true"


def test_monitor_that_does_not_return_is_only_a_warning() -> None:
    rig = monitored_node()
    rig.daemons.is_ready_by_label[GFD] = False
    closed = rig.note(lambda: rig.node_object.has_reconfiguring_taint, at=moments.Wait)

    ends.run_to(rig, "one-slice-changed", Reason.APPLIED)

    assert rig.node_object.events[-2:] == ["MonitorNotReady", "Applied"]
    assert GFD in rig.node_object.event_messages[-2]
    assert rig.node_object.labels[EXPORTER] == "true"
    assert closed[-1] is False


def test_a_monitor_that_ends_again_is_not_ready() -> None:
    rig = monitored_node()

    def end() -> None:
        for uid, pod in rig.pods.items():
            if GFD in pod.node_selector and rig.node_object.status_messages[-1].startswith(
                "resuming"
            ):
                rig.kubelet.pod_ends_from_s[uid] = math.inf
                rig.pods.terminate(uid)

    rig.callbacks.add(moments.Wait, end)

    ends.run_to(rig, "one-slice-changed", Reason.APPLIED)

    assert "MonitorNotReady" in rig.node_object.events


@pytest.mark.parametrize("value", ["false", None])
def test_a_monitor_that_is_switched_off_meanwhile_is_not_awaited(value: str | None) -> None:
    rig = monitored_node()
    rig.daemons.is_ready_by_label[GFD] = False

    def switch_off() -> None:
        if rig.node_object.status_messages[-1].startswith("resuming"):
            nodes.write_deploy_label(rig, GFD, value)

    rig.callbacks.add(moments.Wait, switch_off)

    ends.run_to(rig, "one-slice-changed", Reason.APPLIED)

    assert rig.node_object.labels.get(GFD) == value
    assert "MonitorNotReady" not in rig.node_object.events


def test_validator_and_ungated_feature_discovery_are_restarted() -> None:
    rig = nodes.busy_node()
    rig.daemons.without_label.add("nvidia-operator-validator")
    rig.advance()
    before = {pod.uid for pod in rig.pods.values() if clients.is_validator(pod)}
    discovery: dict[str, Any] = {"container_names": ("gpu-feature-discovery-ctr",)}
    cuda: dict[str, Any] = {"labels": {"app": "nvidia-cuda-validator"}}
    before.add(rig.pods.add("gfd", **discovery, owner_kind="DaemonSet"))
    before.add(rig.pods.add("cuda", **cuda, owner_kind="ClusterPolicy"))
    assert len(before) == 3
    others = {rig.pods.add("bare", **each) for each in (discovery, cuda)}
    others |= {rig.pods.add("web", **each, owner_kind="ReplicaSet") for each in (discovery, cuda)}

    ends.run_to(rig, "one-slice-changed", Reason.APPLIED)

    assert all(uid not in rig.pods or rig.pods[uid].is_terminating for uid in before)
    assert not any(rig.pods[uid].is_terminating for uid in others)


def test_validators_on_their_way_out_are_not_deleted_again() -> None:
    rig = nodes.busy_node()
    leaving: dict[str, Any] = {"owner_kind": "DaemonSet", "is_terminating": True}
    labels = {"app": "nvidia-operator-validator"}
    rig.callbacks.add(moments.Wait, lambda: rig.pods.add("v", labels=labels, **leaving))

    ends.run_to(rig, "one-slice-changed", Reason.APPLIED)

    assert "workloads.delete" not in rig.log


def test_a_validator_that_cannot_be_deleted_does_not_fail_the_run() -> None:
    rig = monitored_node()
    rig.failures.add("workloads.delete", call_errors.broken("workloads"), times=1)

    ends.run_to(rig, "one-slice-changed", Reason.APPLIED)

    assert not rig.failures


def test_the_owners_daemons_are_away_during_the_change_and_back_after_it() -> None:
    rig = node_with_extra_clients()
    names_at_steps = rig.note(lambda: rig.pods.names, at=steps.Step)
    ends.run_to(rig, "one-slice-changed", Reason.APPLIED)
    rig.advance()

    assert names_at_steps
    assert all({"watcher", "sampler"}.isdisjoint(names) for names in names_at_steps)
    assert {"watcher", "sampler"} <= rig.pods.names
    assert "workloads.evict" in rig.log
    assert rig.node_object.labels[SAMPLER] == "true"


def test_daemon_that_tolerates_every_taint_restarts_after_the_change() -> None:
    rig = node_with_extra_clients()
    early: list[str] = []

    def start() -> None:
        early.append(rig.pods.add("watcher", labels={"app": "watcher"}, owner_kind="DaemonSet"))

    rig.callbacks.add(steps.Step, start, times=1)
    ends.run_to(rig, "one-slice-changed", Reason.APPLIED)

    assert early[0] not in rig.pods
