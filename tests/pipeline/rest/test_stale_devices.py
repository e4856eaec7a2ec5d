"""What advertises a drifted node's devices: it offers none that are gone."""

import dataclasses
from collections.abc import Callable
from typing import Self

import pytest

from mig_manager.agent.drift import actions
from mig_manager.core import model
from mig_manager.core.fleet import slots
from mig_manager.core.node.devices import strategies
from mig_manager.core.objects import discovery_labels, well_known
from mig_manager.core.records import run_status
from mig_manager.reasons import Reason
from tests.pipeline.drifts import tamper
from tests.rigs import layout_table
from tests.rigs.node import (
    agents,
    call_errors,
    driver_rules,
    ends,
    fake_cluster,
    gpu_values,
    moments,
    node_rig,
    nodes,
    parts,
    samples,
)

OFF = model.MigMode.DISABLED


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UnservedNode:
    """A node at rest, where no run applies a layout."""

    rig: node_rig.NodeRig
    check: Callable[[], actions.Action]

    @classmethod
    def of(cls, why: str, rig: node_rig.NodeRig | None = None) -> Self:
        """Return a node without a request, or with one that no run can apply."""
        rig, agent, _ = nodes.at_rest("all-balanced", rig=rig)
        if why == "no request":
            agent.restore_without_request()
            rig.forget_past()
            return cls(rig=rig, check=agent.check_without_request)
        outcome = agents.run(rig, why, by=agent)
        assert outcome.state is run_status.State.FAILED
        rig.forget_past()
        return cls(rig=rig, check=lambda: agent.check_drift(why, outcome))

    @property
    def plugins(self) -> set[str]:
        """The UIDs of the device plugin's pods."""
        return {pod.uid for pod in self.rig.pods.plugins}

    def assert_schedulable_devices_exist(self) -> None:
        self.rig.clock.wait(1)
        present = self.rig.plugin_devices
        assert self.rig.kubelet.schedulable == present


UNSERVED = ["no request", "no-such-layout", "too-much"]


@pytest.mark.parametrize("why", UNSERVED)
def test_a_node_without_a_usable_request_offers_no_device_that_is_gone(why: str) -> None:
    node = UnservedNode.of(why)
    rig = node.rig
    rig.node_object.labels[discovery_labels.STRATEGY] = strategies.Strategy.SINGLE.value
    rig.pods.watched = lambda: tuple(rig.pods.values())
    tamper(rig)
    gpus, state = rig.gpus, rig.node_object.labels.get(well_known.STATE_LABEL)
    rig.pods.add("busy", devices=frozenset({nodes.device(rig, 1, "3g.20gb")}))

    node.check()
    # Kubelet has not reported yet that the plugin ends.
    assert set(fake_cluster.FakeNode(rig).latest(is_at_rest=True).allocatable.values()) == {0}
    node.assert_schedulable_devices_exist()

    assert rig.gpus == gpus
    assert "busy" in rig.pods.names
    assert rig.node_object.labels.get(well_known.STATE_LABEL) == state
    assert rig.node_object.events == ["DestroyedDevices"]
    assert rig.node_object.event_messages == [
        "the device plugin advertises 1 device that no GPU has: it is restarted"
    ]
    plugins, questions = node.plugins, rig.log.count("allocations.allocatable")
    assert node.check() is not actions.Action.HEAL
    rig.clock.wait(1)
    assert node.plugins == plugins
    assert rig.log.count("allocations.allocatable") == questions


@pytest.mark.parametrize(
    ("strategy", "events"),
    [
        (strategies.Strategy.MIXED, ["DestroyedDevices"]),
        (strategies.Strategy.NONE, []),
        (None, []),
    ],
)
def test_a_gpu_with_mig_enabled_is_a_device_only_without_a_strategy(
    strategy: strategies.Strategy | None, events: list[str]
) -> None:
    node = UnservedNode.of("no request")
    rig = node.rig
    if strategy:
        rig.node_object.labels[discovery_labels.STRATEGY] = strategy.value
    (devices,) = rig.plugin_devices.values()
    rig.kubelet.schedulable = {"nvidia.com/gpu": devices | {rig.gpus[0].uuid}}

    node.check()

    assert rig.node_object.events == events


@pytest.mark.parametrize("refused", ["allocations.allocatable", "workloads.delete"])
@pytest.mark.parametrize("why", UNSERVED)
def test_devices_that_could_not_be_removed_are_removed_later(why: str, refused: str) -> None:
    node = UnservedNode.of(why)
    tamper(node.rig)
    node.rig.failures.add(refused, call_errors.broken(refused))
    node.check()
    assert node.rig.node_object.events == []
    node.rig.failures.clear()

    node.check()

    node.assert_schedulable_devices_exist()
    assert node.rig.node_object.events == ["DestroyedDevices"]


def test_devices_of_a_lost_gpu_or_of_another_manager_stay() -> None:
    for is_foreign in (False, True):
        node = UnservedNode.of("no request")
        rig, served = node.rig, node.rig.kubelet.schedulable
        tamper(rig)
        if is_foreign:
            rig.pods.add(
                "nvidias", owner_kind="DaemonSet", container_names=("nvidia-mig-manager",)
            )
        else:
            rig.driver.lost.add(rig.gpus[1].uuid)
        node.check()
        rig.clock.wait(1)
        assert (rig.kubelet.schedulable, rig.node_object.events) == (served, [])


def test_a_plugin_with_too_few_devices_is_not_restarted_without_a_request() -> None:
    node = UnservedNode.of("no request")
    # Its owner may have left out a GPU.
    node.rig.kubelet.schedulable = {"nvidia.com/gpu": gpu_values.device_uuids(node.rig.gpus[:1])}
    plugins = node.plugins

    node.check()

    assert node.plugins == plugins


def test_a_plugin_without_a_pod_is_reported_once() -> None:
    node = UnservedNode.of("no request")
    for uid in node.plugins:
        node.rig.pods.remove(uid)
    tamper(node.rig)

    for _ in range(2):
        node.check()

    assert node.rig.node_object.events == ["DestroyedDevices"]
    assert "found no pod of it" in node.rig.node_object.event_messages[0]


def test_a_dra_driver_without_a_request_offers_no_device_that_is_gone() -> None:
    rig = nodes.dra_node()
    agent = agents.new_agent(rig)
    agents.run(rig, "all-1g.5gb", by=agent)
    agent.restore_without_request()
    first, *others = rig.gpus
    rig.gpus = (dataclasses.replace(first, gpu_instances=first.gpu_instances[1:-1]), *others)

    agent.check_without_request()
    assert not rig.dra_driver.slices
    rig.clock.wait(1)

    (listed,) = rig.dra_driver.slices or ()
    assert set(listed.uuids.values()) == gpu_values.device_uuids(rig.gpus)


@pytest.mark.parametrize("why", [*UNSERVED, "drifted"])
def test_phantom_devices_are_removed_without_a_usable_request(why: str) -> None:
    if why == "drifted":
        rig, agent, outcome = nodes.at_rest("all-balanced")
        tamper(rig)
        agent.check_drift("all-balanced", outcome)
        rig.clock.wait(1)
        rig.kubelet.phantoms = {"nvidia.com/mig-7g.40gb": 1}
        agent.check_drift("all-balanced", outcome)
    else:
        node = UnservedNode.of(why)
        rig = node.rig
        rig.kubelet.phantoms = {"nvidia.com/mig-7g.40gb": 1}
        node.check()

    assert rig.kubelet.phantoms == {}
    assert "PhantomDevicesRemoved" in rig.node_object.events


@pytest.mark.parametrize("is_foreign", [False, True])
def test_a_drifted_node_offers_no_device_that_is_gone(*, is_foreign: bool) -> None:
    rig, agent, outcome = nodes.at_rest("all-balanced")
    tamper(rig)
    if is_foreign:
        # It restarts the plugin itself, maybe after further steps.
        rig.pods.add("nvidias", owner_kind="DaemonSet", container_names=("nvidia-mig-manager",))

    assert agent.check_drift("all-balanced", outcome) is actions.Action.REST
    rig.clock.wait(1)

    present = rig.plugin_devices
    assert (rig.kubelet.schedulable == present) is not is_foreign
    assert rig.node_object.labels[well_known.STATE_LABEL] == "failed"
    plugins, lists = set(rig.pods), rig.log.count("workloads.list")
    rig.pods.watched = lambda: tuple(rig.pods.values())
    assert agent.check_drift("all-balanced", outcome) is actions.Action.REST
    rig.clock.wait(1)
    assert set(rig.pods) == plugins
    assert rig.log.count("workloads.list") == lists


def test_each_drift_restarts_the_plugin_also_after_a_refused_deletion() -> None:
    rig, agent, outcome = nodes.at_rest("all-balanced")
    for refusal in ({}, {"workloads.delete": call_errors.broken("workloads")}):
        tamper(rig)
        rig.failures.add_all(refusal)
        assert agent.check_drift("all-balanced", outcome) is actions.Action.REST
        rig.failures.clear()
        assert agent.check_drift("all-balanced", outcome) is actions.Action.REST
        rig.clock.wait(1)
        assert rig.kubelet.schedulable == rig.plugin_devices
    assert rig.node_object.events == ["Drifted", "DestroyedDevices", "DestroyedDevices"]


def test_each_drift_to_the_same_devices_restarts_the_plugin() -> None:
    rig, agent, outcome = nodes.at_rest("all-balanced")
    for _ in range(2):
        before = tamper(rig)
        assert agent.check_drift("all-balanced", outcome) is actions.Action.REST
        rig.clock.wait(1)
        assert rig.kubelet.schedulable == rig.plugin_devices
        # The other program restores the instance, and restarts the plugin.
        rig.gpus = before
        rig.register_devices()
        assert agent.check_drift("all-balanced", outcome) is actions.Action.REST


def test_a_plugin_begun_in_a_drift_restarts_once_the_layout_is_back() -> None:
    rig, agent, outcome = nodes.at_rest("all-balanced")
    served = rig.kubelet.schedulable
    before = tamper(rig)
    rig.register_devices()
    agent.check_drift("all-balanced", outcome)

    rig.gpus = before
    assert agent.check_drift("all-balanced", outcome) is actions.Action.HEAL
    ends.run_to(rig, "all-balanced", Reason.ALREADY_APPLIED, by=agent, is_heal=True)

    assert rig.kubelet.schedulable == served


def test_a_plugin_is_restarted_after_a_change_of_a_gpu_outside_the_layout() -> None:
    text = layout_table.render({"first": [layout_table.rule_line("[0]", {"7g.40gb": 1})]})
    rig, agent, outcome = nodes.at_rest("first", rig=nodes.node(), layouts=text)
    assert agent.check_drift("first", outcome) is actions.Action.REST
    desired = samples.desired_gpu({"3g.20gb": 2})
    rig.gpus = (rig.gpus[0], *gpu_values.with_desired(rig.gpus[1:], desired))

    assert agent.check_drift("first", outcome) is actions.Action.HEAL
    stale = rig.kubelet.schedulable
    rested = ends.run_to(rig, "first", Reason.ALREADY_APPLIED, by=agent, is_heal=True)

    assert rig.kubelet.hidden is stale
    assert rig.kubelet.schedulable == rig.plugin_devices
    assert agent.check_drift("first", rested) is actions.Action.REST

    agent.restore_without_request()
    rig.gpus = (rig.gpus[0], *gpu_values.with_desired(rig.gpus[1:], model.DesiredGpu(mode=OFF)))
    agent.check_without_request()
    assert rig.node_object.labels[well_known.APPLIED_LABEL] == "first"


def test_a_plugin_is_restarted_whenever_instances_were_recreated_in_place() -> None:
    rig, agent, outcome = nodes.at_rest("all-balanced")
    for name in ("another", "a third"):
        served, first = rig.kubelet.schedulable, rig.gpus[0].gpu_instances[0]
        (device,) = first.compute_instances
        device = dataclasses.replace(device, uuid=driver_rules.mig_uuid(name))
        recreated = dataclasses.replace(first, compute_instances=(device,))
        instances = (recreated, *rig.gpus[0].gpu_instances[1:])
        rig.gpus = (dataclasses.replace(rig.gpus[0], gpu_instances=instances), *rig.gpus[1:])

        assert agent.check_drift("all-balanced", outcome) is actions.Action.HEAL
        outcome = ends.run_to(rig, "all-balanced", Reason.ALREADY_APPLIED, by=agent, is_heal=True)

        assert rig.kubelet.schedulable != served
        assert rig.kubelet.schedulable == rig.plugin_devices
        assert agent.check_drift("all-balanced", outcome) is actions.Action.REST


def test_a_plugin_that_missed_a_gpu_between_two_checks_is_restarted() -> None:
    rig, agent, outcome = nodes.at_rest("all-balanced")
    served = rig.kubelet.schedulable
    assert agent.check_drift("all-balanced", outcome) is actions.Action.REST
    # It restarted while GPU 1 did not answer, and kubelet has forgotten the former devices.
    rig.kubelet.schedulable = {"nvidia.com/gpu": gpu_values.device_uuids(rig.gpus[:1])}

    assert agent.check_drift("all-balanced", outcome) is actions.Action.HEAL
    ends.run_to(rig, "all-balanced", Reason.ALREADY_APPLIED, by=agent, is_heal=True)

    assert rig.kubelet.schedulable == served


def test_a_node_whose_run_waits_offers_no_device_that_is_gone() -> None:
    rig = nodes.busy_node()
    rig.disruptions.refusals["affected"] = "budget"
    agent = agents.new_agent(rig)
    rig.callbacks.add(
        moments.Call,
        lambda: tamper(rig, 1, "1g.5gb"),
        when=lambda: rig.clock.now_s > 5,
        times=1,
    )

    for attempt in (1, 2):
        outcome = agents.run(rig, "one-slice-changed", by=agent, attempt=attempt)
        rig.clock.wait(1)
        assert outcome.reason is Reason.DRAIN_TIMEOUT
        assert rig.kubelet.schedulable == rig.plugin_devices

    assert rig.node_object.events.count("DestroyedDevices") == 1
    ends.assert_restored(rig)


def deny_slot_for_minutes(rig: node_rig.NodeRig) -> None:
    denials = [slots.Denial(limit=1, changing=("b",))] * 200
    rig.slots = parts.Slots(are_limited=True, denials=denials)


def test_a_node_that_waits_for_a_slot_offers_no_device_that_is_gone() -> None:
    rig = nodes.busy_node()
    deny_slot_for_minutes(rig)
    schedulable: list[bool] = []

    def compare() -> None:
        if rig.clock.now_s > 310:
            schedulable.append(rig.kubelet.schedulable == rig.plugin_devices)

    tamper(rig)
    rig.callbacks.add(moments.Wait, compare)
    ends.run_to(rig, "one-slice-changed", Reason.APPLIED)

    assert schedulable[0]
    assert rig.node_object.events.count("DestroyedDevices") == 1


def test_a_plugin_that_keeps_a_device_is_restarted_once_for_a_request() -> None:
    rig = nodes.busy_node()
    rig.disruptions.refusals["affected"] = "budget"
    deny_slot_for_minutes(rig)
    served = rig.kubelet.schedulable
    tamper(rig, 1, "1g.5gb")
    rig.set_at(moments.Wait, rig.kubelet, schedulable=served)
    agent = agents.new_agent(rig)

    # The first attempt waits for a slot, and both fail after it.
    for attempt in (1, 2):
        ends.run_to(rig, "one-slice-changed", Reason.DRAIN_TIMEOUT, by=agent, attempt=attempt)

    assert rig.node_object.events.count("DestroyedDevices") == 1


def test_an_unreadable_node_loses_no_outcome_and_ends_no_wait_for_a_slot() -> None:
    rig = nodes.busy_node()
    rig.disruptions.refusals["affected"] = "budget"

    def is_unreadable() -> bool:
        is_published = rig.node_object.labels.get(well_known.STATE_LABEL) == "failed"
        return is_published or 290 < rig.clock.now_s < 320

    rig.failures.add("node.read", call_errors.broken("node"), when=is_unreadable)
    assert agents.run(rig, "one-slice-changed").reason is Reason.DRAIN_TIMEOUT

    rig.disruptions.refusals.clear()
    rig.node_object.labels.pop(well_known.STATE_LABEL)
    deny_slot_for_minutes(rig)
    assert agents.run(rig, "one-slice-changed").reason is Reason.APPLIED
