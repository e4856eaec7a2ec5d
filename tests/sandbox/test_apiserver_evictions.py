"""Evictions and PodDisruptionBudgets of the embedded Kubernetes API."""

import pytest

from mig_manager.sandbox.apiserver import resources
from testkit import apiserver
from tests.sandbox import apirig


def test_an_eviction_without_a_budget_deletes_the_pod_gracefully(
    ask: apirig.Client, server: apiserver.ApiServer
) -> None:
    server.store.create(apirig.a_pod())

    answer = ask.evict("p1")

    assert (answer.code, answer.body["status"]) == (201, "Success")
    pod = server.get(resources.PODS, "p1", "default")
    assert pod["metadata"]["deletionGracePeriodSeconds"] == 30
    condition = pod["status"]["conditions"][-1]
    assert (condition["type"], condition["reason"]) == (
        "DisruptionTarget",
        "EvictionByEvictionAPI",
    )


def test_a_budget_whose_status_lags_asks_to_wait_ten_seconds(
    ask: apirig.Client, server: apiserver.ApiServer
) -> None:
    server.store.create(apirig.a_pod(app="x"))
    budget = apirig.a_budget("guard", {}, maxUnavailable=1)
    server.store.create(budget)
    server.stop_budget_controller()
    server.modify(
        resources.BUDGETS,
        "guard",
        lambda it: it["metadata"].update(generation=2),
        namespace="default",
    )

    answer = ask.evict("p1")

    assert answer.code == 429
    assert answer.headers["Retry-After"] == "10"
    assert answer.body["details"]["retryAfterSeconds"] == 10
    assert "still being processed" in answer.body["details"]["causes"][0]["message"]


@pytest.mark.parametrize(
    ("spec", "desired", "allowed"),
    [
        ({"minAvailable": 2}, 2, 1),
        ({"minAvailable": "50%"}, 2, 1),
        ({"minAvailable": "100%"}, 3, 0),
        ({"maxUnavailable": 0}, 3, 0),
        ({"maxUnavailable": 5}, 0, 3),
        ({"maxUnavailable": "34%"}, 1, 2),
        ({}, 1, 2),
    ],
)
def test_the_status_of_a_budget_counts_the_healthy(
    ask: apirig.Client,
    server: apiserver.ApiServer,
    spec: apirig.Object,
    desired: int,
    allowed: int,
) -> None:
    for name in "abc":
        server.store.create(apirig.a_pod(name, app="x"))
    server.store.create(apirig.a_pod("d", app="other"))
    server.store.create(
        apirig.a_budget(
            "guard",
            {"matchExpressions": [{"key": "app", "operator": "In", "values": ["x"]}]},
            **spec,
        )
    )

    path = "/apis/policy/v1/namespaces/default/poddisruptionbudgets/guard"
    status = ask("GET", path).body["status"]

    assert (status["expectedPods"], status["currentHealthy"]) == (3, 3)
    assert (status["desiredHealthy"], status["disruptionsAllowed"]) == (desired, allowed)


def test_only_a_real_eviction_uses_up_a_budget_whose_controller_lags(
    ask: apirig.Client, server: apiserver.ApiServer
) -> None:
    for name in ("p1", "p2"):
        server.store.create(apirig.a_pod(name))
    server.store.create(apirig.a_budget("guard", {}, maxUnavailable=1))
    server.stop_budget_controller()
    path = "/apis/policy/v1/namespaces/default/poddisruptionbudgets/guard"

    for name in ("p1", "p2", "p1"):
        assert ask.evict(name, dryRun=["All"]).code == 201
    assert ask("GET", path).body["status"]["disruptionsAllowed"] == 1
    assert ask.evict("p1").code == 201

    status = ask("GET", path).body["status"]
    assert (status["disruptionsAllowed"], set(status["disruptedPods"])) == (0, {"p1"})
    assert ask.evict("p2").code == 429


def test_each_eviction_uses_up_the_budget_until_a_replacement_is_ready(
    ask: apirig.Client, server: apiserver.ApiServer
) -> None:
    owner = {"kind": "ReplicaSet", "name": "rs", "controller": True}
    replica_set = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "metadata": {"name": "rs"}}
    server.store.create(replica_set | {"spec": {"replicas": 2}})
    for name in ("p1", "p2"):
        pod = apirig.a_pod(name, app="x")
        pod["metadata"]["ownerReferences"] = [owner]
        server.store.create(pod)
    server.store.create(apirig.a_budget("guard", {"matchLabels": {"app": "x"}}, maxUnavailable=1))

    assert ask.evict("p1").code == 201
    blocked = ask.evict("p2")
    assert (blocked.code, blocked.body["reason"]) == (429, "TooManyRequests")
    # The real server asks for no particular wait when the budget is simply used up.
    assert "Retry-After" not in blocked.headers
    server.delete(resources.PODS, "p1", "default")
    assert ask.evict("p2").code == 429
    pod = apirig.a_pod("p3", app="x")
    pod["metadata"]["ownerReferences"] = [owner]
    server.store.create(pod)
    assert ask.evict("p2").code == 201


def test_an_unready_pod_may_go_while_enough_others_are_healthy(
    ask: apirig.Client, server: apiserver.ApiServer
) -> None:
    for name in ("p1", "p2"):
        server.store.create(apirig.a_pod(name))
    server.modify(
        resources.PODS, "p1", lambda pod: pod["status"].update(conditions=[]),
        namespace="default",
    )  # fmt: skip
    server.store.create(apirig.a_budget("guard", {}, minAvailable=1))

    assert ask.evict("p2").code == 429
    assert ask.evict("p1").code == 201


def test_an_eviction_can_be_guarded_tried_and_misaddressed(
    ask: apirig.Client, server: apiserver.ApiServer
) -> None:
    server.store.create(apirig.a_pod())
    path = f"{apirig.PODS}/p1/eviction"

    assert ask.evict("p1", preconditions={"uid": "another"}).code == 409
    assert ask.evict("p1", dryRun=["All"]).code == 201
    assert ask("POST", f"{path}?dryRun=All", apirig.an_eviction()).code == 201
    assert ask("POST", path, apirig.an_eviction("p2")).code == 400
    assert ask.evict("p2").code == 404
    pod = server.get(resources.PODS, "p1", "default")
    assert "deletionTimestamp" not in pod["metadata"]
