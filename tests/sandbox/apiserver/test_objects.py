"""What the embedded API server takes, changes and deletes, beyond tests/cluster/test_api.py."""

import pytest

from mig_manager.sandbox.apiserver import kinds, store
from testkit import apiserver
from tests.rigs import api_objects
from tests.rigs.cluster import apirig

NODE = f"{apirig.NODES}/n1"
POD = f"{apirig.PODS}/p1"
BUDGET = "/apis/policy/v1/namespaces/default/poddisruptionbudgets/guard"


def test_a_created_object_gets_identity_and_version_from_the_server(ask: apirig.Client) -> None:
    sent = {"metadata": {"name": "n1", "uid": "mine", "generation": 7}}

    answer = ask("POST", apirig.NODES, sent)

    metadata = answer.body["metadata"]
    assert (answer.code, answer.body["kind"]) == (201, "Node")
    assert metadata["uid"] != "mine"
    assert "generation" not in metadata
    assert metadata["creationTimestamp"].endswith("Z")
    assert metadata["resourceVersion"].isdigit()
    assert ask("GET", NODE).body == answer.body


def test_update_needs_no_version_except_for_a_lease(ask: apirig.Client) -> None:
    ask("POST", apirig.NODES, api_objects.a_node())
    lease = ask("POST", apirig.LEASES, {"metadata": {"name": "l"}, "spec": {}}).body

    def update(lease: api_objects.Object) -> apirig.ApiAnswer:
        return ask("PUT", f"{apirig.LEASES}/l", lease)

    assert ask("PUT", NODE, api_objects.a_node(labels={"more": "labels"})).code == 200
    assert "must be specified for an update" in update({"spec": {}}).body["message"]
    assert update(lease | {"spec": {"holderIdentity": "a"}}).code == 200
    assert update(lease | {"spec": {"holderIdentity": "b"}}).code == 409


def test_spec_and_status_have_their_own_paths_and_specs_are_counted(ask: apirig.Client) -> None:
    ask("POST", apirig.NODES, api_objects.a_node())
    both = {"spec": {"unschedulable": True}, "status": {"phase": "x"}}
    daemons = "/apis/apps/v1/namespaces/default/daemonsets"
    ask("POST", daemons, {"metadata": {"name": "d"}, "spec": {"minReadySeconds": 1}})

    ask.merge(f"{NODE}/status", both)
    assert "spec" not in ask("GET", NODE).body
    node = ask.merge(NODE, both | {"status": None}).body
    labelled = ask.merge(f"{daemons}/d", {"metadata": {"labels": {"a": "b"}}}).body
    changed = ask.merge(f"{daemons}/d", {"spec": {"minReadySeconds": 2}}).body

    assert node["spec"] == {"unschedulable": True}
    assert node["status"]["phase"] == "x"
    assert [each["metadata"]["generation"] for each in (labelled, changed)] == [1, 2]


def test_pod_is_bound_once_and_only_its_image_can_change(ask: apirig.Client) -> None:
    ask("POST", apirig.PODS, api_objects.a_pod(node=""))
    image = {"spec": {"containers": [{"name": "main", "image": "app:2"}]}}

    assert ask.strategic(POD, image).body["spec"]["containers"] == image["spec"]["containers"]
    assert ask("POST", f"{POD}/binding", {"target": {"name": "n1"}}).code == 201
    assert ask("POST", f"{POD}/binding", {"target": {"name": "n2"}}).code == 409
    moved = ask.merge(POD, {"spec": {"nodeName": "n2"}})
    assert "pod updates may not change fields" in moved.body["message"]
    assert ask("GET", POD).body["spec"]["nodeName"] == "n1"


def test_bodies_and_answers_are_json(ask: apirig.Client, server: apiserver.ApiServer) -> None:
    answer = ask("POST", apirig.NODES, {}, content_type="application/vnd.kubernetes.protobuf")

    assert (answer.code, answer.body["reason"]) == (415, "UnsupportedMediaType")
    assert ask.http.request("POST", server.url + apirig.NODES, body="{").status == 400
    assert ask("GET", apirig.NODES, Accept="application/yaml").code == 406
    # Dry runs of anything but an eviction would have an effect.
    assert ask("POST", f"{apirig.NODES}?dryRun=All", {"metadata": {"name": "n2"}}).code == 400


def test_a_bound_pod_exists_until_its_kubelet_has_ended_it(
    ask: apirig.Client, server: apiserver.ApiServer
) -> None:
    uid = server.store.create(api_objects.a_pod())["metadata"]["uid"]

    foreign = ask("DELETE", POD, {"preconditions": {"uid": "another"}})
    terminating = ask("DELETE", POD, {"preconditions": {"uid": uid}}).body["metadata"]
    shorter = ask("DELETE", POD, {"gracePeriodSeconds": 5}).body
    longer = ask("DELETE", POD, {"gracePeriodSeconds": 60}).body

    assert (foreign.code, foreign.body["reason"]) == (409, "Conflict")
    assert terminating["deletionGracePeriodSeconds"] == 30
    assert terminating["deletionTimestamp"] > store.timestamp()
    assert shorter["metadata"]["deletionGracePeriodSeconds"] == 5
    assert longer == shorter
    ask("DELETE", POD, {"gracePeriodSeconds": 0})
    assert ask("GET", POD).code == 404


@pytest.mark.parametrize(
    "pod",
    [
        api_objects.a_pod(node=""),
        api_objects.a_pod(phase="Succeeded"),
        api_objects.a_pod(phase="Failed"),
    ],
)
def test_a_pod_that_runs_nowhere_is_gone_at_once(
    ask: apirig.Client, server: apiserver.ApiServer, pod: api_objects.Object
) -> None:
    server.create(pod)

    ask("DELETE", POD)

    assert server.objects(kinds.PODS) == []


# -- patches ----------------------------------------------------------------------------------


@pytest.mark.parametrize("content_type", [apirig.MERGE, apirig.STRATEGIC])
def test_a_patch_merges_labels_removes_nulls_and_replaces_taints(
    ask: apirig.Client, content_type: str
) -> None:
    old, new = ({"key": key, "effect": "NoSchedule"} for key in ("old", "new"))
    made = api_objects.a_node(labels={"old": "x", "kept": "y"})
    ask("POST", apirig.NODES, made | {"spec": {"taints": [old]}})
    labels = {"old": None, "new": "z", "never": None}
    patch = {"metadata": {"labels": labels}, "spec": {"taints": [new]}}

    node = ask("PATCH", NODE, patch, content_type=content_type).body

    expected = {"kubernetes.io/hostname": "n1", "kept": "y", "new": "z"}
    assert node["metadata"]["labels"] == expected
    assert node["spec"]["taints"] == [new]


def test_a_merge_patch_replaces_lists_and_a_strategic_one_merges_by_key(
    ask: apirig.Client,
) -> None:
    ask("POST", apirig.NODES, api_objects.a_node())
    pressure = {"type": "MemoryPressure", "status": "False"}

    def types(conditions: list[api_objects.Object], patch: str) -> list[str]:
        body = {"status": {"conditions": conditions}}
        answer = ask("PATCH", f"{NODE}/status", body, content_type=patch)
        return [each["type"] for each in answer.body["status"]["conditions"]]

    assert types([pressure], apirig.STRATEGIC) == ["Ready", "MemoryPressure"]
    assert types([{"type": "Ready", "$patch": "delete"}], apirig.STRATEGIC) == ["MemoryPressure"]
    assert types([pressure | {"type": "Other"}], apirig.MERGE) == ["Other"]
    nameless = {"status": {"conditions": [{"status": "True"}]}}
    assert ask.strategic(f"{NODE}/status", nameless).code == 400
    assert ask("PATCH", NODE, [], content_type="application/json-patch+json").code == 415


# -- evictions --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "desired", "allowed"),
    [
        ({"minAvailable": 2}, 2, 1),
        ({"minAvailable": "50%"}, 2, 1),
        ({"maxUnavailable": 0}, 3, 0),
        ({"maxUnavailable": 5}, 0, 3),
        ({"maxUnavailable": "34%"}, 1, 2),
        ({}, 1, 2),
    ],
)
def test_the_status_of_a_budget_counts_the_healthy(
    ask: apirig.Client,
    server: apiserver.ApiServer,
    spec: api_objects.Object,
    desired: int,
    allowed: int,
) -> None:
    server.create(*(api_objects.a_pod(name, {"app": "x"}) for name in "abc"))
    server.create(
        api_objects.a_pod("d", {"app": "other"}),
        api_objects.a_budget("guard", {"matchLabels": {"app": "x"}}, **spec),
    )

    status = ask("GET", BUDGET).body["status"]

    assert (status["expectedPods"], status["currentHealthy"]) == (3, 3)
    assert (status["desiredHealthy"], status["disruptionsAllowed"]) == (desired, allowed)


def test_an_unready_pod_may_go_while_enough_others_are_healthy(
    ask: apirig.Client, server: apiserver.ApiServer
) -> None:
    server.create(
        api_objects.a_pod("p1") | {"status": {"phase": "Running"}},
        api_objects.a_pod("p2"),
        api_objects.a_budget("guard", {}, minAvailable=1),
    )

    blocked = ask.evict("p2")
    assert (blocked.code, blocked.body["reason"]) == (429, "TooManyRequests")
    # The real server asks for no particular wait when the budget is used up.
    assert "Retry-After" not in blocked.headers
    assert ask.evict("p1").code == 201
