"""Slots for nodes under change, on the embedded API server."""

import contextlib
import dataclasses
from collections.abc import Iterator

import pytest
import structlog.testing

from mig_manager import errors, reasons
from mig_manager.adapters.kubernetes import api, lease_slots
from mig_manager.core.objects import well_known
from mig_manager.sandbox.apiserver import kinds
from testkit import apiserver
from tests.rigs import api_objects, waiting
from tests.rigs.node import fakes

NAMESPACE = "mig-manager"
LEASE = "mig-manager-slot-0"


class Clock(fakes.FakeClock):
    """Raises an unforeseen error where ``has_bug``."""

    has_bug = False

    def monotonic(self) -> float:
        if self.has_bug:
            self.has_bug = False
            raise LookupError("a bug")
        return super().monotonic()


class LeasesRig:
    """What the agents of the nodes a, b and c have of one cluster."""

    def __init__(self, server: apiserver.ApiServer) -> None:
        self.server = server
        self.clock = Clock()
        self.agents: list[tuple[api.KubeApi, lease_slots.LeaseSlots]] = []

    def of(self, node: str, *, limit: int = 1, renew_s: float = 3600) -> lease_slots.LeaseSlots:
        """Return the slots of a node's agent, which renews them only where a test is about it."""
        kube = api.KubeApi.at(
            self.server.url, token=node, request_timeout_s=60.0, sleep=lambda _seconds: None
        )
        slots = lease_slots.LeaseSlots(
            kube,
            namespace=NAMESPACE,
            node_name=node,
            limit=limit,
            clock=self.clock,
            renew_s=renew_s,
            # Rather an expired slot than a free one.
            pick=lambda takeable: max(takeable, key=lambda slot: slot.holder),
        )
        self.agents.append((kube, slots))
        return slots

    def with_slot(self, node: str, *, renew_s: float = 3600) -> lease_slots.LeaseSlots:
        slot = self.of(node, renew_s=renew_s)
        assert slot.take() is None
        return slot

    def holders(self) -> dict[str, str]:
        """Name of each Lease -> its holderIdentity."""
        leases = self.server.objects(kinds.LEASES, NAMESPACE)
        return {each["metadata"]["name"]: each["spec"]["holderIdentity"] for each in leases}

    def wait_for_renewal(self) -> None:
        before = self.updates()
        waiting.until(lambda: self.updates() > before + 1, "the renewals")

    def updates(self) -> int:
        return self.server.log.count("update", "leases")


@pytest.fixture
def rig(server: apiserver.ApiServer) -> Iterator[LeasesRig]:
    server.create(*(api_objects.a_node(name) for name in "abc"))
    rig = LeasesRig(server)
    yield rig
    server.clear_faults()
    for kube, slot in rig.agents:
        slot.release()
        kube.close()


def test_slots_are_limited_and_a_denial_names_the_holders(rig: LeasesRig) -> None:
    first, second, third = (rig.of(node, limit=2) for node in "abc")

    assert (first.take(), second.take()) == (None, None)
    assert str(third.take()) == (
        "waiting for one of 2 slots for nodes under change; under change now: a, b"
    )
    assert rig.holders() == {LEASE: "a", "mig-manager-slot-1": "b"}


def test_node_takes_and_releases_one_slot_among_foreign_leases(rig: LeasesRig) -> None:
    rig.server.create(api_objects.a_lease("leader", holderIdentity="operator"))
    first, second = rig.of("a", limit=2), rig.of("b")
    assert (first.take(), first.take()) == (None, None)
    assert rig.holders() == {"leader": "operator", LEASE: "a"}
    assert second.take()

    first.release()

    assert rig.holders() == {"leader": "operator", LEASE: ""}
    assert second.take() is None
    rig.server.log.clear()
    first.release()
    assert rig.server.log.requests() == []


@pytest.mark.parametrize("needs_slot", [True, False])
def test_a_restarted_agent_takes_or_releases_its_own_slot(
    rig: LeasesRig, *, needs_slot: bool
) -> None:
    rig.with_slot("a")

    again = rig.with_slot("a") if needs_slot else rig.of("a")

    if needs_slot:
        again.check()
    again.release()
    assert rig.holders() == {LEASE: ""}


@pytest.mark.parametrize("is_dead", [True, False], ids=["dead agent", "failed release"])
def test_an_unreleased_slot_expires_for_another_node(rig: LeasesRig, *, is_dead: bool) -> None:
    slot, other = rig.with_slot("a"), rig.of("b")
    assert "under change now: a" in str(other.take())
    if not is_dead:
        rig.server.inject(apiserver.Fault(token="a", status=503, times=None))  # noqa: S106
        slot.release()
        assert rig.holders() == {LEASE: "a"}

    rig.clock.now_s = 89
    assert "under change now: a" in str(other.take())
    rig.clock.now_s = 90
    assert other.take() is None
    lease = rig.server.get(kinds.LEASES, LEASE, NAMESPACE)
    assert lease["spec"]["leaseTransitions"] == 1


def test_a_release_that_met_another_write_is_tried_again(rig: LeasesRig) -> None:
    slot = rig.with_slot("a")
    rig.server.inject(apiserver.Fault(verb="update", resource="leases", status=409))

    slot.release()

    assert rig.holders() == {LEASE: ""}


def test_a_slot_that_another_node_took_over_is_lost(rig: LeasesRig) -> None:
    slot, other = rig.with_slot("a"), rig.of("b")
    other.take()
    rig.clock.now_s = 90
    assert other.take() is None

    assert "under change now: b" in str(slot.take())
    with pytest.raises(errors.NotReadyError):
        slot.check()
    slot.release()
    assert rig.holders() == {LEASE: "b"}


@pytest.mark.parametrize("is_taken", [True, False], ids=["taken", "free"])
def test_a_slot_that_a_second_agent_of_the_node_released_is_checked(
    rig: LeasesRig, *, is_taken: bool
) -> None:
    slot, second, other = rig.with_slot("a"), rig.with_slot("a"), rig.of("b")
    second.release()
    assert not is_taken or other.take() is None

    with pytest.raises(errors.NotReadyError) if is_taken else contextlib.nullcontext():
        slot.check()

    assert rig.holders() == {LEASE: "b" if is_taken else "a"}


@pytest.fixture
def silent(rig: LeasesRig) -> lease_slots.LeaseSlots:
    """Have a node whose agent died in its slot; return the slots of another agent."""
    rig.with_slot("a")
    other = rig.of("b")
    other.take()
    rig.clock.now_s += 1000
    return other


def test_slot_of_a_dead_disrupted_node_stays_until_it_is_deleted(
    rig: LeasesRig, silent: lease_slots.LeaseSlots
) -> None:
    annotations = {well_known.JOURNAL_ANNOTATION: "{}"}
    rig.server.merge(kinds.NODES, "a", {"metadata": {"annotations": annotations}})

    assert "their agents are silent: a (" in str(silent.take())
    assert rig.holders() == {LEASE: "a"}
    rig.server.delete(kinds.NODES, "a")
    assert silent.take() is None


def test_dead_disrupted_nodes_beyond_the_limit_count_against_it(rig: LeasesRig) -> None:
    first, *others = (rig.of(node, limit=3) for node in "abc")
    assert [slot.take() for slot in (first, *others)] == [None, None, None]
    first.release()
    for name in "bc":
        annotations = {well_known.JOURNAL_ANNOTATION: "{}"}
        rig.server.merge(kinds.NODES, name, {"metadata": {"annotations": annotations}})
    limited = rig.of("a", limit=2)
    limited.take()
    rig.clock.now_s += 1000

    assert "their agents are silent: b, c (" in str(limited.take())
    assert rig.holders()[LEASE] == ""
    rig.server.delete(kinds.NODES, "c")
    assert limited.take() is None
    assert list(rig.holders().values()) == ["a", "b", "c"]


def test_an_unreadable_node_counts_as_disrupted(
    rig: LeasesRig, silent: lease_slots.LeaseSlots
) -> None:
    rig.server.inject(apiserver.Fault(token="b", resource="nodes", status=403))  # noqa: S106

    assert silent.take()
    assert silent.take() is None


def test_a_renewed_slot_never_expires_and_its_lease_is_made_again(rig: LeasesRig) -> None:
    rig.with_slot("a", renew_s=0.01)
    other = rig.of("b")
    other.take()

    for _ in range(4):
        rig.clock.now_s += 60
        rig.wait_for_renewal()
        assert "under change now: a" in str(other.take())

    rig.server.delete(kinds.LEASES, LEASE, NAMESPACE)
    waiting.until(lambda: rig.holders() == {LEASE: "a"}, "the Lease")


def test_an_unexpected_error_is_logged_and_does_not_end_the_renewal(rig: LeasesRig) -> None:
    rig.with_slot("a", renew_s=0.01)
    with structlog.testing.capture_logs() as logs:
        rig.clock.has_bug = True
        waiting.until(lambda: not rig.clock.has_bug, "the bug")
        rig.wait_for_renewal()

    assert [entry["event"] for entry in logs] == ["slot_renewal_error"]


def test_slot_that_is_not_freshly_renewed_fails_before_the_cordon(rig: LeasesRig) -> None:
    slot = rig.with_slot("a")
    slot.check()

    rig.clock.now_s += 45

    with pytest.raises(errors.NotReadyError) as caught:
        slot.check()
    assert caught.value.reason is reasons.Reason.SLOTS_TAKEN
    # It is ours all the same, until another node takes it.
    assert slot.take() is None
    slot.check()


@pytest.mark.parametrize("name", ["409", "500-when-done"])
def test_a_failed_renewal_does_not_lose_the_slot(rig: LeasesRig, name: str) -> None:
    slot = rig.with_slot("a", renew_s=0.01)

    rig.server.inject(
        dataclasses.replace(apiserver.FAULTS[name], verb="update", resource="leases")
    )
    waiting.until(lambda: rig.server.faults_waiting() == 0, "the fault")
    rig.wait_for_renewal()

    slot.check()
    assert rig.holders() == {LEASE: "a"}
