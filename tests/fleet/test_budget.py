"""All nodes are labelled at once, and never more than the budget are under change."""

import contextlib
import itertools
import random
import threading

import pytest

from mig_manager import errors
from mig_manager.adapters import host
from mig_manager.adapters.kubernetes import api, lease_slots
from mig_manager.core import timing
from mig_manager.sandbox.apiserver import kinds
from testkit import apiserver
from tests.fleet import census
from tests.rigs import api_objects, waiting
from tests.rigs.stage import whole_agents

LAYOUT = "all-1g.5gb"


def used_slots(server: apiserver.ApiServer) -> list[str]:
    leases = server.objects(kinds.LEASES, whole_agents.NAMESPACE)
    return [each["spec"]["holderIdentity"] for each in leases if each["spec"]["holderIdentity"]]


@pytest.mark.slow
def test_agents_with_a_budget_of_two_never_have_three_nodes_under_change() -> None:
    with apiserver.serve() as server:
        names = whole_agents.populate(server, 8)
        counted = census.Census(server)
        with whole_agents.hosts(server, names, limit=2):
            whole_agents.label_all(server, names, LAYOUT)
            waiting.until(
                lambda: all(whole_agents.is_applied(server, name, LAYOUT) for name in names),
                "the layout on every node",
            )
            waiting.until(lambda: not used_slots(server), "every slot released")

        assert counted.ever == set(names)
        assert 1 <= counted.most <= 2


class Contender:
    """An agent as far as slots go: it waits, taints its node, and releases the slot."""

    def __init__(self, server: apiserver.ApiServer, name: str, *, limit: int) -> None:
        self._server = server
        self._name = name
        self._clock = host.SystemClock()
        # Hundreds ask one server in one process.
        self._kube = api.KubeApi.at(server.url, token=name, request_timeout_s=60.0)
        self._slots = lease_slots.LeaseSlots(
            self._kube,
            namespace=whole_agents.NAMESPACE,
            node_name=name,
            limit=limit,
            clock=self._clock,
        )

    def taint_within_budget(self) -> None:
        spread = random.Random(self._name)  # noqa: S311 - no secret
        for attempt in itertools.count():
            with contextlib.suppress(errors.ClusterError):
                denial = self._slots.take()
                if not denial:
                    break
                assert "slots for nodes under change" in str(denial)
            wait_s = timing.Backoff(first_s=1.0, max_s=5.0).delay_s(attempt)
            self._clock.wait(wait_s * spread.uniform(0.5, 1.0))
        self._slots.check()
        self._set_taints(api_objects.RECONFIGURING_TAINT)
        self._clock.wait(0.05)
        self._set_taints()
        self._slots.release()
        self._kube.close()

    def _set_taints(self, *taints: api_objects.Object) -> None:
        self._server.merge(kinds.NODES, self._name, {"spec": {"taints": [*taints]}})


def contend(server: apiserver.ApiServer, count: int, *, limit: int) -> census.Census:
    names = whole_agents.populate(server, count)
    counted = census.Census(server)
    threads = [
        threading.Thread(
            target=Contender(server, name, limit=limit).taint_within_budget, daemon=True
        )
        for name in names
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert not any(thread.is_alive() for thread in threads)
    assert counted.ever == set(names)
    assert used_slots(server) == []
    return counted


@pytest.mark.slow
def test_budget_of_ten_holds_although_slot_requests_fail() -> None:
    with apiserver.serve() as server:
        for verb in ("create", "update"):
            for skip, status in ((20, 500), (60, 409), (100, 503)):
                for is_carried_out in (False, True):
                    fault = apiserver.Fault(
                        verb=verb,
                        resource="leases",
                        skip=skip if verb == "update" else 2,
                        # Each of the ten Leases is created once; updates are many.
                        times=5 if verb == "update" else 1,
                        status=status,
                        is_carried_out=is_carried_out,
                    )
                    server.inject(fault)

        assert 2 <= contend(server, 300, limit=10).most <= 10
        assert server.faults_waiting() == 0
