"""Replicas of the partitioner: one of them acts, and the next takes over."""

import threading

import pytest
import structlog.testing

from mig_manager.adapters import host
from mig_manager.core.objects import well_known
from mig_manager.partitioner import main
from mig_manager.sandbox.apiserver import kinds, store
from testkit import apiserver
from tests.partitioner import partitioner_rig
from tests.partitioner.partitioner_rig import SOON_S, TERM_S, PartitionerRig
from tests.rigs import waiting
from tests.rigs.node import strikes


def test_second_replica_takes_over_without_a_repeated_request(rig: PartitionerRig) -> None:
    rig.add_nodes("n1", "n2")
    rig.add_pods("p1")
    rig.add_pods("big", profile="9g.99gb")
    first, second = rig.replica("a"), rig.replica("b")
    rig.pass_time(SOON_S, first, second)
    assert (len(first.kube.patches), len(second.kube.patches)) == (1, 0)
    events = rig.events()
    assert (rig.metric(first, "leader"), rig.metric(second, "leader")) == (1, 0)

    first.service.leader.release()
    rig.kill(first)
    rig.pass_time(TERM_S, second)

    assert second.leads
    assert second.kube.patches == []
    assert rig.events() == events


def test_new_leader_awaits_the_change_of_the_former_one(rig: PartitionerRig) -> None:
    rig.add_nodes("n1", "n2")
    rig.add_pods("p1")
    first, second = (rig.replica(name, max_unavailable="2") for name in "ab")
    rig.pass_time(SOON_S, first, second)
    first.service.leader.release()
    rig.kill(first)

    rig.pass_time(TERM_S, second)
    assert second.leads
    assert second.kube.patches == []
    target = rig.requested_node()
    rig.answer(target)
    rig.bind("p1", target)
    rig.add_pods("p2", profile="7g.40gb")
    rig.pass_time(TERM_S, second)

    assert second.kube.patches == []
    rig.add_pods("p3", profile="3g.20gb")
    rig.pass_time(TERM_S, second)
    assert len(second.kube.patches) == 1


@pytest.mark.parametrize(
    ("layout", "ready", "is_awaited"),
    [("custom", "True", True), ("custom", "False", False), ("all-1g.5gb", "True", False)],
)
def test_new_leader_awaits_only_what_a_former_one_may_have_requested(
    rig: PartitionerRig, layout: str, ready: str, *, is_awaited: bool
) -> None:
    rig.add_nodes("n1", "n2")
    status = {"conditions": [{"type": "Ready", "status": ready}]}
    metadata = {"labels": {well_known.CONFIG_LABEL: layout}}
    rig.server.merge(kinds.NODES, "n1", {"metadata": metadata, "status": status})
    rig.add_pods("p1")
    replica = rig.replica(max_unavailable="2")
    rig.pass_time(TERM_S, replica)

    assert bool(rig.requested_layout("n2")) is not is_awaited
    rig.pass_time(300, replica)
    assert rig.requested_layout("n2")


def test_leader_that_lost_the_lease_serves_pods_that_still_wait(rig: PartitionerRig) -> None:
    rig.add_node()
    rig.add_pods("p1", profile="4g.20gb")
    replica = rig.stepping_replica(cooldown_s="200")
    rig.answer("n1")
    rig.bind("p1", "n1")
    rig.add_pods("p2", profile="2g.10gb")
    rig.pass_time(SOON_S, replica)
    rig.server.inject(apiserver.Fault(path="/leases", status=500, times=None))
    with structlog.testing.capture_logs():
        rig.pass_time(TERM_S, replica)
    assert not replica.leads
    rig.server.clear_faults()

    rig.pass_time(200, replica)

    assert replica.leads
    assert len(replica.kube.patches) == 2


def test_leader_that_loses_the_lease_while_it_requests_requests_no_more(
    rig: PartitionerRig,
) -> None:
    rig.add_nodes("n1", "n2")
    rig.add_pods("p1", "p2", profile="4g.20gb")
    replica = rig.replica(max_unavailable="2")

    def lose_lease(record: store.Record) -> None:
        if record.key[0] == kinds.NODES.plural:
            rig.server.inject(apiserver.Fault(path="/leases", status=500, times=None))
            rig.clock.now_s += TERM_S

    rig.sync(replica)
    rig.server.store.subscribe(lose_lease)
    with structlog.testing.capture_logs():
        rig.pass_time(SOON_S, replica)

    assert len(replica.kube.patches) == 1


@pytest.mark.slow
@pytest.mark.parametrize("is_sent", [False, True], ids=["before it is sent", "after"])
def test_a_leader_killed_at_any_request_causes_no_repeated_request(*, is_sent: bool) -> None:
    kill_at = 0
    has_survived = False
    while not has_survived:
        kill_at += 1
        with partitioner_rig.serving() as rig, structlog.testing.capture_logs():
            rig.add_nodes("n1", "n2")
            rig.add_pods("p1", "p2", "p3")
            rig.add_pods("big", profile="9g.99gb")
            first, second = (rig.replica(name, max_unavailable="2") for name in "ab")
            first.kube.kill_at, first.kube.is_sent = kill_at, is_sent
            try:
                rig.pass_time(SOON_S, first, second)
                has_survived = True
            except strikes.Killed:
                pass
            rig.kill(first)

            rig.pass_time(TERM_S + SOON_S, second)
            rig.answer(rig.requested_node())
            rig.pass_time(TERM_S, second)

            assert second.leads
            assert len(rig.patches()) == 1, kill_at
            assert len(rig.events("NoRoomPossible")) == 1, kill_at
            assert len(rig.events("RepartitioningRequested")) <= 1, kill_at
    assert kill_at >= 5


def test_the_end_of_a_process_releases_the_lease_at_once(rig: PartitionerRig) -> None:
    replica = rig.replica("a")
    settings = replica.service.settings
    service = main.Replica(settings, replica.kube, identity="a", clock=host.SystemClock())
    thread = threading.Thread(target=service.serve, daemon=True)
    thread.start()
    waiting.until(lambda: service.leader.may_write, "leadership")

    service.stop()
    thread.join(60)

    lease = rig.server.get(kinds.LEASES, "mig-manager-partitioner", "mig-manager")
    assert not thread.is_alive()
    assert lease["spec"]["holderIdentity"] == ""
