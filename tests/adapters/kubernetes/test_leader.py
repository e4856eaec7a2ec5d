"""Leadership by one Lease, on the embedded API server; and failed requests for a Lease."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import pytest
import structlog.testing

from mig_manager import errors
from mig_manager.adapters.kubernetes import leader, lease_slots
from mig_manager.core.objects import lease
from mig_manager.sandbox.apiserver import kinds
from testkit import apiserver
from tests.rigs import api_objects
from tests.rigs.cluster.mortal_api import MortalApi
from tests.rigs.node import fakes, strikes

NAMESPACE = "mig-manager"
LEASE = "mig-manager-partitioner"
DURATION_S = 60.0
RENEW_S = 10.0


class LeaderRig:
    """Replicas of one program; they share a clock that only tests move."""

    def __init__(self, server: apiserver.ApiServer) -> None:
        self.server = server
        self.clock = fakes.FakeClock()
        self.request_timeout_s = 60.0
        self.clients: list[MortalApi] = []
        self.slots: list[Slot] = []

    def client(self, name: str) -> MortalApi:
        kube = MortalApi.at(
            self.server.url,
            token=name,
            request_timeout_s=self.request_timeout_s,
            sleep=lambda _seconds: None,
        )
        self.clients.append(kube)
        return kube

    def slot(self, name: str) -> "Slot":
        """Return the slots of a node, which renews them only where it campaigns."""
        kube = self.client(name)
        slot = Slot(
            kube, namespace=NAMESPACE, node_name=name, limit=1, clock=self.clock, renew_s=3600
        )
        self.slots.append(slot)
        return slot

    def replica(self, name: str, *, duration_s: float = DURATION_S) -> leader.Leader:
        return leader.Leader(
            self.client(name),
            namespace=NAMESPACE,
            name=LEASE,
            identity=name,
            duration_s=duration_s,
            clock=self.clock,
        )

    def holder(self) -> str:
        obj = self.server.get(kinds.LEASES, LEASE, NAMESPACE)
        return str(obj["spec"]["holderIdentity"])

    def pass_time(self, seconds: float, *replicas: "leader.Leader | Slot") -> None:
        """Let time pass in steps of a second, in which these replicas campaign."""
        for _ in range(round(seconds)):
            self.clock.now_s += 1
            for each in replicas:
                each.campaign()


@pytest.fixture
def rig(server: apiserver.ApiServer) -> Iterator[LeaderRig]:
    rig = LeaderRig(server)
    yield rig
    for slot in rig.slots:
        slot.release()
    for kube in rig.clients:
        kube.close()


def test_one_replica_leads_as_long_as_it_renews(rig: LeaderRig) -> None:
    first, second = rig.replica("a"), rig.replica("b")

    assert first.campaign()
    assert not second.campaign()
    rig.pass_time(10 * DURATION_S, first, second)

    assert (first.may_write, second.may_write) == (True, False)
    assert rig.holder() == "a"


def test_at_rest_a_replica_sends_one_request_in_each_sixth_of_the_duration(rig: LeaderRig) -> None:
    first, second = rig.replica("a"), rig.replica("b")
    rig.pass_time(1, first, second)
    rig.server.log.clear()

    rig.pass_time(DURATION_S, first, second)

    assert rig.server.log.count("update", "leases") == 6
    assert rig.server.log.count("get", "leases") == 6
    assert len(rig.server.log.requests()) == 12


def test_a_released_lease_is_taken_by_the_next_campaign(rig: LeaderRig) -> None:
    first, second = rig.replica("a"), rig.replica("b")
    rig.pass_time(1, first, second)

    first.release()

    assert not first.may_write
    assert rig.holder() == ""
    rig.pass_time(RENEW_S, second)
    assert second.may_write


def test_a_replica_that_does_not_lead_releases_nothing(rig: LeaderRig) -> None:
    first, second = rig.replica("a"), rig.replica("b")
    rig.pass_time(1, first, second)
    rig.server.log.clear()

    second.release()

    assert rig.server.log.requests() == []


@pytest.mark.parametrize("duration_s", [DURATION_S, 10 * DURATION_S], ids=["equal", "longer"])
def test_lease_of_a_killed_leader_is_taken_after_its_duration(
    rig: LeaderRig, duration_s: float
) -> None:
    first, second = rig.replica("a", duration_s=duration_s), rig.replica("b")
    rig.pass_time(1, first, second)

    rig.pass_time(duration_s - 1, second)
    assert not second.may_write
    rig.pass_time(RENEW_S + 1, second)

    assert second.may_write
    obj = rig.server.get(kinds.LEASES, LEASE, NAMESPACE)
    assert obj["spec"]["leaseTransitions"] == 1


def test_leader_that_cannot_renew_stops_before_another_may_begin(rig: LeaderRig) -> None:
    first, second = rig.replica("a"), rig.replica("b")
    rig.pass_time(1, first, second)
    rig.server.inject(apiserver.Fault(token="a", status=503, times=None))  # noqa: S106
    stopped_s = taken_s = None

    with structlog.testing.capture_logs():
        while taken_s is None:
            rig.pass_time(1, first, second)
            assert not (first.may_write and second.may_write)
            if stopped_s is None and not first.may_write:
                stopped_s = rig.clock.now_s
            if second.may_write:
                taken_s = rig.clock.now_s

    assert stopped_s is not None
    assert taken_s - stopped_s >= leader.MAX_WRITE_S
    rig.server.clear_faults()
    with structlog.testing.capture_logs() as logs:
        rig.pass_time(RENEW_S, first)
    assert [each["event"] for each in logs] == ["leadership_lost"]
    assert not first.may_write


class Slot(lease_slots.LeaseSlots):
    """The slot of the only node that may be under change: held as leadership is."""

    def campaign(self) -> None:
        with contextlib.suppress(errors.ClusterError):
            self.take()

    @property
    def may_write(self) -> bool:
        with contextlib.suppress(errors.NotReadyError):
            self.check()
            return True
        return False


class LeaseKind(NamedTuple):
    """A lease that one of several programs holds."""

    campaigner: Callable[[LeaderRig, str], leader.Leader | Slot]
    lease: str
    read: str  # the verb with which its programs look at it
    steps_s: Sequence[int]  # until the next campaign of each, to the end
    event: str  # the log event of taking it


LEADERSHIP = LeaseKind(LeaderRig.replica, LEASE, "get", [5] * 6, "leadership_taken")
SLOT = LeaseKind(LeaderRig.slot, "mig-manager-slot-0", "list", [10] * 13, "slot_taken")
BOTH = pytest.mark.parametrize("kind", [LEADERSHIP, SLOT], ids=["leader", "slot"])
FAULTS = {
    **apiserver.FAULTS,
    "409-when-done": apiserver.Fault(status=409, is_carried_out=True),
}
"""The last one: as where another writer was quicker after us."""
BY_DEFAULT = (
    *("403", "409", "409-when-done", "429-retry-after", "500"),
    *("500-when-done", "no-answer-when-done", "garbage"),
)
ALSO = ("no-answer", "reset", "reset-when-done")
# The Lease is renewed twice, and released.
RENEWALS = [(nth, "update") for nth in range(3)]


@BOTH
@pytest.mark.parametrize(
    "name", [*BY_DEFAULT, *(pytest.param(name, marks=pytest.mark.slow) for name in ALSO)]
)
def test_a_failed_request_loses_no_lease_and_makes_no_second_holder(
    rig: LeaderRig, name: str, kind: LeaseKind
) -> None:
    if FAULTS[name].stall:
        rig.request_timeout_s = 0.2
    for skip, verb in (*((0, "create"), (0, kind.read), (1, kind.read)), *RENEWALS):
        first, second = kind.campaigner(rig, "a"), kind.campaigner(rig, "b")
        fault = dataclasses.replace(FAULTS[name], resource="leases", skip=skip, verb=verb)
        rig.server.inject(fault)

        with structlog.testing.capture_logs():
            for step_s in kind.steps_s:
                rig.clock.now_s += step_s
                first.campaign()
                second.campaign()
                assert not (first.may_write and second.may_write)
            (holding,) = (each for each in (first, second) if each.may_write)
            holding.release()

        (obj,) = rig.server.objects(kinds.LEASES, NAMESPACE)
        assert (obj["spec"]["holderIdentity"], rig.server.faults_waiting()) == ("", 0)
        rig.server.delete(kinds.LEASES, obj["metadata"]["name"], NAMESPACE)


@pytest.mark.parametrize("write", ["create", "update"])
def test_a_replica_releases_a_lease_that_it_wrote_without_an_answer(
    rig: LeaderRig, write: str
) -> None:
    first = rig.replica("a")
    rig.server.inject(apiserver.Fault(verb=write, status=403, is_carried_out=True))
    with structlog.testing.capture_logs():
        first.campaign()
        if write == "update":
            rig.pass_time(RENEW_S, first)
        assert rig.holder() == "a"

        first.release()

    assert rig.holder() == ""


@pytest.mark.parametrize("status", [403, 500])
def test_a_lease_that_cannot_be_read_is_not_taken_for_missing(rig: LeaderRig, status: int) -> None:
    first = rig.replica("a")
    rig.server.inject(apiserver.Fault(verb="get", status=status, times=None))

    with structlog.testing.capture_logs() as logs:
        assert not first.campaign()

    assert [each["event"] for each in logs] == ["lease_not_renewed"]
    assert rig.server.log.count("create", "leases") == 0


@BOTH
def test_a_lease_without_end_is_taken_after_an_hour_and_its_owner_logged(
    rig: LeaderRig, kind: LeaseKind
) -> None:
    second = kind.campaigner(rig, "b")
    endless = {"holderIdentity": "other", "leaseDurationSeconds": 2**31 - 1}
    rig.server.create(api_objects.a_lease(kind.lease, **endless))

    with structlog.testing.capture_logs() as logs:
        second.campaign()
        rig.clock.now_s += lease.MAX_DURATION_S - 1
        second.campaign()
        assert not second.may_write
        rig.pass_time(RENEW_S, second)

    assert second.may_write
    warning, takeover = logs
    assert (warning["event"], warning["owner"]) == ("lease_too_long", "other")
    assert kind.lease in warning["hint"]
    assert takeover["event"] == kind.event


def test_a_lease_that_was_deleted_is_made_again(rig: LeaderRig) -> None:
    first = rig.replica("a")
    first.campaign()

    rig.server.delete(kinds.LEASES, LEASE, NAMESPACE)
    rig.pass_time(RENEW_S, first)

    assert first.may_write
    assert rig.holder() == "a"


def test_a_lease_that_a_person_assigned_to_another_is_not_taken(rig: LeaderRig) -> None:
    def give(obj: dict[str, object]) -> None:
        obj["spec"] = {"holderIdentity": "b", "leaseDurationSeconds": 60}

    first = rig.replica("a")
    first.campaign()
    rig.server.modify(kinds.LEASES, LEASE, give, namespace=NAMESPACE)

    with structlog.testing.capture_logs():
        rig.pass_time(RENEW_S, first)

    assert not first.may_write
    assert rig.holder() == "b"


def campaign_until_killed(rig: LeaderRig, candidate: leader.Leader, kube: MortalApi) -> None:
    """Lead for a while, then release the Lease, unless the process is killed before."""
    for _ in range(3):
        rig.pass_time(RENEW_S, candidate)
    candidate.release()
    pytest.fail(f"alive after {kube.count} requests")


@pytest.mark.parametrize("is_sent", [False, True], ids=["before it is sent", "after"])
def test_replica_killed_at_any_request_leaves_a_usable_lease(
    rig: LeaderRig, *, is_sent: bool
) -> None:
    # It looks, makes the Lease, renews it twice, looks again, and releases it.
    for kill_at in range(1, 7):
        first, second = rig.replica("a"), rig.replica("b")
        mortal = rig.clients[-2]
        mortal.kill_at, mortal.is_sent = kill_at, is_sent
        with structlog.testing.capture_logs(), pytest.raises(strikes.Killed):
            campaign_until_killed(rig, first, mortal)

        rig.pass_time(DURATION_S + 2 * RENEW_S, second)

        assert second.may_write
        second.release()
        rig.server.delete(kinds.LEASES, LEASE, NAMESPACE)
