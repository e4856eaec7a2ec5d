"""Slots for nodes under change, on the embedded API server."""

import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator

import pytest
import structlog.testing

from mig_manager import errors
from mig_manager.adapters.kubernetes import api, leases
from mig_manager.core.node import cluster
from mig_manager.sandbox.apiserver import resources, store
from testkit import apiserver
from tests import fakes
from tests.sandbox import apirig

NAMESPACE = "mig-manager"
NEVER = leases.Times(renew_s=3600)
"""Renewals are for the tests that are about them."""


@pytest.fixture
def server() -> Iterator[apiserver.ApiServer]:
    with apiserver.serve() as running:
        for name in "abc":
            running.store.create(apirig.a_node(name))
        yield running


@dataclasses.dataclass
class Rig:
    """What the agents of some nodes have of one cluster."""

    server: apiserver.ApiServer
    clock: fakes.FakeClock = dataclasses.field(default_factory=fakes.FakeClock)
    opened: list[api.KubeApi] = dataclasses.field(default_factory=list)
    slots: list[leases.LeaseSlots] = dataclasses.field(default_factory=list)

    def of(self, node: str, *, limit: int = 1, times: leases.Times = NEVER) -> leases.LeaseSlots:
        kube = api.KubeApi.at(
            self.server.url, token=node, request_timeout_s=0.4, sleep=lambda _seconds: None
        )
        self.opened.append(kube)
        self.slots.append(
            leases.LeaseSlots(
                kube,
                namespace=NAMESPACE,
                node_name=node,
                limit=limit,
                clock=self.clock,
                times=times,
                pick=lambda free: free[0],
            )
        )
        return self.slots[-1]

    def leases(self) -> dict[str, str]:
        """Name of each Lease -> its holderIdentity."""
        found = self.server.objects(resources.LEASES, NAMESPACE)
        return {each["metadata"]["name"]: each["spec"]["holderIdentity"] for each in found}

    def disrupt(self, node: str) -> None:
        def mark(thing: store.Object) -> None:
            thing["metadata"]["annotations"] = {cluster.CORDON_ANNOTATION: "layout"}

        self.server.modify(resources.NODES, node, mark)

    def wait(self, is_met: Callable[[], bool]) -> None:
        pause = threading.Event()
        for _ in range(3000):
            if is_met():
                return
            pause.wait(0.01)
        pytest.fail("waited in vain")


@pytest.fixture
def rig(server: apiserver.ApiServer) -> Iterator[Rig]:
    made = Rig(server)
    yield made
    server.clear_faults()
    for own in made.slots:
        own.release()
    for kube in made.opened:
        kube.close()


def test_the_limit_of_nodes_get_slots_and_the_next_is_denied_with_their_names(rig: Rig) -> None:
    first, second, third = (rig.of(node, limit=2) for node in "abc")

    assert (first.take(), second.take()) == ("", "")
    assert third.take() == (
        "waiting for one of 2 slots for nodes under change; under change now: a, b"
    )
    assert rig.leases() == {"mig-manager-slot-0": "a", "mig-manager-slot-1": "b"}


def test_a_released_slot_is_free_and_a_node_with_a_slot_takes_no_second_one(rig: Rig) -> None:
    first, second = rig.of("a", limit=2), rig.of("b")
    assert (first.take(), first.take()) == ("", "")
    assert rig.leases() == {"mig-manager-slot-0": "a"}
    assert second.take()

    first.release()

    assert rig.leases() == {"mig-manager-slot-0": ""}
    assert second.take() == ""


@pytest.mark.parametrize("needs_slot", [True, False])
def test_a_restarted_agent_takes_or_releases_its_own_slot(rig: Rig, *, needs_slot: bool) -> None:
    rig.of("a").take()

    again = rig.of("a")

    if needs_slot:
        assert again.take() == ""
        again.check()
    again.release()
    assert list(rig.leases().values()) == [""]


def test_releasing_without_a_slot_sends_no_request(rig: Rig) -> None:
    own = rig.of("a")
    own.release()
    rig.server.log.clear()

    own.release()

    assert rig.server.log.requests() == []


def test_the_slot_of_a_dead_undisrupted_node_expires(rig: Rig) -> None:
    rig.of("a").take()
    other = rig.of("b")

    assert "under change now: a" in other.take()
    rig.clock.now_s += 89
    assert "under change now: a" in other.take()
    rig.clock.now_s += 1
    assert other.take() == ""
    lease = rig.server.get(resources.LEASES, "mig-manager-slot-0", NAMESPACE)
    assert lease["spec"]["leaseTransitions"] == 2


def test_the_slot_of_a_dead_disrupted_node_is_reported_and_stays_until_the_node_is_deleted(
    rig: Rig,
) -> None:
    rig.of("a").take()
    rig.disrupt("a")
    other = rig.of("b")
    other.take()
    rig.clock.now_s += 1000

    assert "their agents are silent: a (" in other.take()
    assert rig.leases() == {"mig-manager-slot-0": "a"}
    rig.server.delete(resources.NODES, "a")
    assert other.take() == ""


def test_an_unreadable_node_counts_as_disrupted(rig: Rig) -> None:
    rig.of("a").take()
    other = rig.of("b")
    other.take()
    rig.clock.now_s += 1000
    rig.server.inject(apiserver.Fault(token="b", resource="nodes", status=403))  # noqa: S106

    assert other.take() != ""
    assert other.take() == ""


def has_renewed(rig: Rig, more_than: int) -> bool:
    return rig.server.log.count("update", "leases") > more_than


def test_a_renewed_slot_never_expires(rig: Rig) -> None:
    rig.of("a", times=leases.Times(renew_s=0.01)).take()
    other = rig.of("b")
    other.take()

    for _ in range(4):
        rig.clock.now_s += 60
        before = rig.server.log.count("update", "leases")
        rig.wait(functools.partial(has_renewed, rig, before + 1))
        assert "under change now: a" in other.take()


class BrokenClock(fakes.FakeClock):
    """Raises, as often as caught, an unforeseen error."""

    faults = 0

    def monotonic(self) -> float:
        if self.faults:
            self.faults -= 1
            raise LookupError("a bug")
        return super().monotonic()


def test_an_unexpected_error_is_logged_and_does_not_end_the_renewal(rig: Rig) -> None:
    rig.clock = clock = BrokenClock()
    own = rig.of("a", times=leases.Times(renew_s=0.01))
    own.take()
    with structlog.testing.capture_logs() as logs:
        clock.faults = 1
        rig.wait(lambda: not clock.faults)
        seen = rig.server.log.count("update", "leases")
        rig.wait(lambda: rig.server.log.count("update", "leases") > seen + 1)

    assert [entry["event"] for entry in logs] == ["slot_renewal_error"]


def test_a_slot_that_is_not_freshly_renewed_fails_the_check_before_the_cordon(rig: Rig) -> None:
    own = rig.of("a")
    own.take()
    own.check()

    rig.clock.now_s += 45

    with pytest.raises(errors.NotReadyError) as caught:
        own.check()
    assert caught.value.reason is errors.Reason.SLOTS_TAKEN
    # It is ours all the same, until another node takes it.
    assert own.take() == ""
    own.check()


def test_a_slot_taken_by_another_node_is_lost(rig: Rig) -> None:
    own, other = rig.of("a"), rig.of("b")
    own.take()
    other.take()
    rig.clock.now_s += 90
    assert other.take() == ""

    assert "under change now: b" in own.take()
    with pytest.raises(errors.NotReadyError):
        own.check()
    own.release()
    assert rig.leases() == {"mig-manager-slot-0": "b"}


def test_a_node_recreates_its_deleted_lease(rig: Rig) -> None:
    rig.of("a", times=leases.Times(renew_s=0.01)).take()

    rig.server.delete(resources.LEASES, "mig-manager-slot-0", NAMESPACE)

    rig.wait(lambda: rig.leases() == {"mig-manager-slot-0": "a"})


def test_other_leases_in_the_namespace_are_left_alone(rig: Rig) -> None:
    lease = {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": "leader", "namespace": NAMESPACE},
        "spec": {"holderIdentity": "operator"},
    }
    rig.server.store.create(lease)

    assert rig.of("a").take() == ""
    assert rig.leases() == {"leader": "operator", "mig-manager-slot-0": "a"}


def test_without_permission_no_node_gets_a_slot(rig: Rig) -> None:
    rig.server.inject(apiserver.Fault(resource="leases", status=403, times=None))

    with pytest.raises(errors.ClusterError) as caught:
        rig.of("a").take()

    assert caught.value.reason is errors.Reason.FORBIDDEN


FAULTS = {
    "409": apiserver.Fault(status=409),
    "500": apiserver.Fault(status=500),
    "no-answer": apiserver.Fault(stall=True),
    "reset": apiserver.Fault(reset=True),
    "garbage": apiserver.Fault(garbles=True),
    "500-when-done": apiserver.Fault(status=500, is_carried_out=True),
    "409-when-done": apiserver.Fault(status=409, is_carried_out=True),
    "no-answer-when-done": apiserver.Fault(stall=True, is_carried_out=True),
    "reset-when-done": apiserver.Fault(reset=True, is_carried_out=True),
}

BY_DEFAULT = ("409", "500", "500-when-done", "no-answer-when-done")
SWEPT = [
    pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.slow) for name in FAULTS
]


def take(own: leases.LeaseSlots) -> None:
    """Take a slot in as many tries as it takes."""
    for _ in range(10):
        try:
            if own.take() == "":
                return
        except errors.ClusterError as error:
            assert error.reason is not errors.Reason.FORBIDDEN  # noqa: PT017 - any other may come
    pytest.fail("no slot")


@pytest.mark.parametrize("skip", [0, 1])
@pytest.mark.parametrize("verb", ["list", "create", "update"])
@pytest.mark.parametrize("name", SWEPT)
def test_a_failed_request_does_not_prevent_taking_and_releasing_a_slot(
    rig: Rig, name: str, verb: str, skip: int
) -> None:
    fault = dataclasses.replace(FAULTS[name], verb=verb, resource="leases", skip=skip)
    rig.server.inject(fault)

    for node in "ab":
        own = rig.of(node, limit=2)
        take(own)
        own.check()
        own.release()

    assert set(rig.leases().values()) == {""}


def test_an_unreleased_slot_expires(rig: Rig) -> None:
    own, other = rig.of("a"), rig.of("b")
    own.take()
    other.take()
    rig.server.inject(apiserver.Fault(token="a", status=503, times=None))  # noqa: S106

    own.release()

    assert rig.leases() == {"mig-manager-slot-0": "a"}
    rig.clock.now_s += 90
    assert other.take() == ""


@pytest.mark.parametrize("name", SWEPT)
def test_a_failed_renewal_does_not_lose_the_slot(rig: Rig, name: str) -> None:
    own = rig.of("a", times=leases.Times(renew_s=0.01))
    own.take()

    rig.server.inject(dataclasses.replace(FAULTS[name], verb="update", resource="leases"))
    rig.wait(lambda: rig.server.faults_waiting() == 0)
    before = rig.server.log.count("update", "leases")
    rig.wait(lambda: rig.server.log.count("update", "leases") > before + 1)

    own.check()
    assert rig.leases() == {"mig-manager-slot-0": "a"}
