"""A DRA driver that has no ready pod: without it no pod with a claim ends."""

import dataclasses
import functools

import pytest

from mig_manager.core import steps
from mig_manager.core.node.devices import claims
from mig_manager.core.objects import pod_object, well_known
from mig_manager.core.records import journals, node_entries, run_status
from mig_manager.reasons import Reason
from tests.pipeline.claimed_devices import KEEP_ONE, published_uuids, without_driver, without_pods
from tests.rigs.node import agents, ends, fake_cluster, moments, node_rig, nodes, strikes


def test_driver_between_two_pods_is_waited_for_before_evictions() -> None:
    rig = without_driver(nodes.dra_node())
    ends.run_to(rig, "all-disabled", Reason.APPLIED)
    assert not {"low", "high"} & rig.pods.names
    assert published_uuids(rig) == {gpu.uuid for gpu in rig.gpus}


@pytest.mark.parametrize("label_managed", [True, False])
def test_a_driver_with_dynamic_mig_between_two_pods_refuses_the_change(
    *, label_managed: bool
) -> None:
    rig = without_driver(nodes.dra_node(label_managed=label_managed))
    rig.dra_driver.feature_gates = {"DynamicMIG": True}
    # Its slices have no UUIDs, so no device of a claim is known.
    (published_slice,) = rig.dra_driver.slices or ()
    uuids = dict.fromkeys(published_slice.uuids, "")
    rig.dra_driver.slices = (dataclasses.replace(published_slice, uuids=uuids),)
    for uid, pod in rig.pods.items():
        if pod.claimed_ids:
            rig.pods.change(uid, claimed_ids=None)

    ends.run_to(rig, "all-disabled", Reason.FOREIGN_MANAGER, "DRA driver with DynamicMIG")

    assert {"low", "high"} <= rig.pods.names


@pytest.mark.parametrize("layout", ["all-balanced", "all-disabled"])
def test_a_pod_with_a_claim_is_not_evicted_while_no_driver_gets_ready(layout: str) -> None:
    rig = without_driver(nodes.dra_node())
    rig.dra_driver.is_broken = True
    why = "no DRA driver pod is ready after 20 s"
    ends.run_to(rig, layout, Reason.PLUGIN_NOT_READY, why, "default/high")
    assert {"low", "high"} <= rig.pods.names
    rig.dra_driver.is_broken = False
    ends.run_to(without_driver(rig), layout, Reason.APPLIED)


def test_a_driver_that_its_label_keeps_away_is_named_with_the_label() -> None:
    """A person sets it during the drain, and the claims of the monitors cannot end any more."""
    rig = nodes.dra_node()
    agent = agents.new_agent(rig)
    layout, remedy = "all-balanced", "Set label nvidia.com/gpu.deploy.dra-driver to true: 'false' "

    def strike() -> None:
        if "workloads.evict" in rig.log:
            nodes.write_deploy_label(rig, claims.DEPLOY_LABEL, "false")

    with rig.callbacks.adding(moments.Call, strike):
        for attempt in (1, 2):
            ends.run_to(rig, layout, Reason.IN_USE, remedy, by=agent, attempt=attempt)
        without_driver(rig)
        ends.run_to(rig, "all-disabled", Reason.PLUGIN_NOT_READY, remedy)
    nodes.write_deploy_label(rig, claims.DEPLOY_LABEL, "true")
    for _ in ("the driver starts", "the monitors end"):
        rig.advance()
    ends.run_to(rig, layout, Reason.APPLIED, by=agent, attempt=3)


def test_a_broken_driver_does_not_delay_a_change_without_claims() -> None:
    rig = without_driver(without_pods(nodes.dra_node(label_managed=False)))
    ends.run_to(rig, "all-balanced", Reason.APPLIED)


@pytest.mark.parametrize("label_managed", [True, False])
def test_a_drain_reopens_the_node_for_a_driver_that_vanished_meanwhile(
    *, label_managed: bool
) -> None:
    rig = nodes.dra_node(label_managed=label_managed)
    agent = agents.new_agent(rig)
    rig.callbacks.add(
        moments.Call,
        lambda: without_driver(rig),
        when=lambda: any(pod.is_terminating for pod in rig.pods.values()),
        times=1,
    )
    ends.run_to(rig, "all-disabled", Reason.DRAIN_TIMEOUT, by=agent)
    ends.run_to(rig, "all-disabled", Reason.APPLIED, by=agent, attempt=2)


@pytest.mark.parametrize("layout", ["all-balanced", "all-disabled"])
def test_agent_after_a_kill_reopens_the_node_for_the_driver(layout: str) -> None:
    rig = nodes.dra_node()
    strikes.kill_before(rig, steps.DestroyComputeInstance, layout)
    rig.pods.add("late", has_claims=True, claimed_ids=frozenset({min(rig.gpus[1].mig_uuids)}))

    assert agents.resume(rig, "all-disabled").state is run_status.State.SUCCESS

    assert "late" not in rig.pods.names
    ends.assert_restored(rig)


def test_a_drain_that_was_reopened_for_the_driver_begins_again() -> None:
    rig = without_driver(nodes.dra_node())
    rig.node_object.has_reconfiguring_taint = True
    journal = journals.Journal(
        layout="all-disabled",
        is_draining=True,
        node=node_entries.NodeEntries(has_reconfiguring_taint=True),
    )
    rig.node_object.annotations[well_known.JOURNAL_ANNOTATION] = journal.to_json()
    rig.disruptions.refusals["low"] = "budget 'x' allows no disruption"

    assert agents.resume(rig, "all-disabled").reason is Reason.DRAIN_TIMEOUT

    ends.assert_restored(rig)


def test_unknown_claims_are_resolved_before_a_pod_is_evicted() -> None:
    rig = nodes.dra_node()
    pods_before = dict(rig.pods)
    for uid, pod in rig.pods.items():
        if pod.claimed_ids:
            rig.pods.change(uid, claimed_ids=None)
    without_driver(rig)
    rig.dra_driver.slices = ()

    def learn() -> None:
        for uid in rig.pods.keys() & pods_before.keys() if rig.dra_driver.slices else ():
            rig.pods.change(uid, claimed_ids=pods_before[uid].claimed_ids)

    rig.callbacks.add(moments.Wait, learn)
    ends.run_to(rig, "most-in-one", Reason.APPLIED, layouts=KEEP_ONE)
    assert rig.log.count("workloads.evict") == 1


def test_claims_that_are_known_do_not_wait_for_stale_slices() -> None:
    rig = nodes.dra_node()
    rig.dra_driver.slices = ()

    ends.run_to(rig, "all-disabled", Reason.APPLIED)

    assert not any(
        "waiting for the DRA driver" in each for each in rig.node_object.status_messages
    )


def test_a_drain_stays_closed_while_a_ready_driver_publishes_its_slices() -> None:
    rig = nodes.dra_node()
    strikes.kill_before(rig, "workloads.evict", "all-disabled")
    rig.dra_driver.slices = ()
    for uid, pod in rig.pods.items():
        if pod.claimed_ids:
            rig.pods.change(uid, claimed_ids=None)
    closed = rig.note(
        lambda: rig.node_object.has_reconfiguring_taint,
        when=lambda: "waiting for the DRA driver" in rig.node_object.status_messages[-1],
    )

    assert agents.resume(rig, "all-disabled").state is run_status.State.SUCCESS

    assert set(closed) == {True}


class NewWorkloads(fake_cluster.FakeWorkloads):
    """The pods as a new agent sees them: it knows a claim's devices only from the slices."""

    def __init__(self, rig: node_rig.NodeRig) -> None:
        super().__init__(rig)
        self._resolved_uids: set[str] = set()

    def list(self) -> pod_object.Pods:
        pods, listed = super().list(), published_uuids(self._rig)
        self._resolved_uids |= {
            pod.uid for pod in pods if (pod.claimed_ids or frozenset()) <= listed
        }
        return tuple(
            pod if pod.uid in self._resolved_uids else dataclasses.replace(pod, claimed_ids=None)
            for pod in pods
        )


@pytest.mark.parametrize("label_managed", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("requested", "kept"),
    [pytest.param("all-balanced", 1, marks=pytest.mark.slow), ("all-disabled", 0)],
)
def test_agent_after_any_kill_evicts_only_affected_pods(
    requested: str, kept: int, *, label_managed: bool
) -> None:
    make = functools.partial(nodes.dra_node, label_managed=label_managed)
    waits = 0
    for index, rig, _ in strikes.kills(make, lambda rig: agents.run(rig, "all-balanced")):
        if not rig.pods.has_dra_driver:
            rig.dra_driver.slices = ()
        agent = agents.start(rig, requested, workloads=NewWorkloads(rig))

        assert agents.run(rig, requested, by=agent).state is run_status.State.SUCCESS, index

        assert len({"low", "high"} & rig.pods.names) == kept, index
        ends.assert_restored(rig)
        waits += any(
            "waiting for the DRA driver" in each for each in rig.node_object.status_messages
        )
    assert waits > 3


@pytest.mark.parametrize("label_managed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_after_the_driver_vanishes_at_any_call_a_retry_succeeds(*, label_managed: bool) -> None:
    make = functools.partial(nodes.dra_node, label_managed=label_managed)
    failed = 0
    for index in range(len(strikes.calls(make, "all-disabled"))):
        rig = make()
        agent = agents.new_agent(rig)
        rig.callbacks.add(index, functools.partial(without_driver, rig))

        outcome = agents.run(rig, "all-disabled", by=agent)
        if outcome.state is not run_status.State.SUCCESS:
            failed += 1
            assert outcome.should_retry, index
            ends.assert_restored(rig)
            # The driver comes back, and then the pods end that wait for it.
            rig.clock.wait(5)
            rig.clock.wait(5)
            outcome = agents.run(rig, "all-disabled", by=agent, attempt=2)

        assert outcome.state is run_status.State.SUCCESS, (index, outcome.message)
        assert published_uuids(rig) == {gpu.uuid for gpu in rig.gpus}, index
        ends.assert_restored(rig)
    assert failed > 0


@pytest.mark.parametrize("is_stopped", [True, False])
def test_request_that_ends_in_a_wait_for_the_driver_restores_the_node(*, is_stopped: bool) -> None:
    def begin() -> ends.NodeAndAgent:
        rig = nodes.dra_node()
        strikes.kill_before(rig, steps.DestroyComputeInstance, "all-disabled")
        rig.pods.add("late", has_claims=True, claimed_ids=frozenset({min(rig.gpus[1].mig_uuids)}))
        return rig, agents.start(rig, "all-disabled")

    superseded_runs = [
        *ends.supersede_at_checks(begin, "all-disabled", is_replaced=not is_stopped)
    ]
    for rig, agent in superseded_runs:
        ends.assert_restored(rig, is_stopped=is_stopped)

        outcome = (
            agents.resume(rig, "all-disabled")
            if is_stopped
            else agents.run(rig, "all-disabled", by=agent)
        )

        assert outcome.state is run_status.State.SUCCESS
        ends.assert_restored(rig)
    assert len(superseded_runs) > 4
