"""Which objects the embedded Kubernetes API takes, and how it changes and deletes them."""

import pytest

from mig_manager.sandbox.apiserver import resources, store
from testkit import apiserver
from tests.sandbox import apirig


def test_a_created_object_gets_identity_and_version_from_the_server(ask: apirig.Client) -> None:
    answer = ask(
        "POST", apirig.NODES, {"metadata": {"name": "n1", "uid": "mine", "generation": 7}}
    )

    metadata = answer.body["metadata"]
    assert answer.code == 201
    assert answer.body["kind"] == "Node"
    assert metadata["uid"] != "mine"
    assert "generation" not in metadata
    assert metadata["creationTimestamp"].endswith("Z")
    assert metadata["resourceVersion"].isdigit()
    assert ask("GET", f"{apirig.NODES}/n1").body == answer.body


def test_a_generated_name_starts_with_the_prefix(ask: apirig.Client) -> None:
    answer = ask("POST", apirig.PODS, apirig.a_pod() | {"metadata": {"generateName": "job-"}})

    assert answer.body["metadata"]["name"].startswith("job-")
    assert len(answer.body["metadata"]["name"]) == 9


def test_an_update_without_a_version_is_blind_except_for_leases(ask: apirig.Client) -> None:
    ask("POST", apirig.NODES, apirig.a_node())
    ask("POST", apirig.LEASES, {"metadata": {"name": "l"}, "spec": {"holderIdentity": "me"}})

    assert ask("PUT", f"{apirig.NODES}/n1", apirig.a_node(more="labels")).code == 200
    answer = ask("PUT", f"{apirig.LEASES}/l", {"metadata": {"name": "l"}, "spec": {}})
    assert answer.code == 422
    assert "must be specified for an update" in answer.body["message"]


@pytest.mark.parametrize(
    ("spec", "code"),
    [
        ({"leaseDurationSeconds": 15, "renewTime": "2026-01-02T03:04:05.000006Z"}, 201),
        ({"renewTime": "2026-01-02T03:04:05Z"}, 400),
        ({"renewTime": "soon"}, 400),
        ({"leaseDurationSeconds": "15"}, 400),
        ({"leaseDurationSeconds": 0}, 422),
        ({"leaseTransitions": -1}, 422),
    ],
)
def test_a_lease_has_times_to_the_microsecond_and_a_duration(
    ask: apirig.Client, spec: apirig.Object, code: int
) -> None:
    assert ask("POST", apirig.LEASES, {"metadata": {"name": "l"}, "spec": spec}).code == code


def test_of_two_who_update_a_lease_from_the_same_version_one_is_refused(
    ask: apirig.Client,
) -> None:
    seen = ask("POST", apirig.LEASES, {"metadata": {"name": "l"}, "spec": {}}).body

    assert ask("PUT", f"{apirig.LEASES}/l", seen | {"spec": {"holderIdentity": "a"}}).code == 200
    assert ask("PUT", f"{apirig.LEASES}/l", seen | {"spec": {"holderIdentity": "b"}}).code == 409
    answer = ask("POST", apirig.LEASES, {"metadata": {"name": "l"}, "spec": {}})
    assert (answer.code, answer.body["reason"]) == (409, "AlreadyExists")


def test_spec_and_status_are_written_through_their_own_paths(ask: apirig.Client) -> None:
    ask("POST", apirig.NODES, apirig.a_node())
    both = {"spec": {"unschedulable": True}, "status": {"phase": "x"}}

    ask.merge(f"{apirig.NODES}/n1/status", both)
    assert "spec" not in ask("GET", f"{apirig.NODES}/n1").body
    node = ask.merge(f"{apirig.NODES}/n1", both | {"status": None}).body

    assert node["spec"] == {"unschedulable": True}
    assert node["status"]["phase"] == "x"


def test_generation_counts_changes_of_the_spec_only(ask: apirig.Client) -> None:
    path = "/apis/apps/v1/namespaces/default/daemonsets"
    ask("POST", path, {"metadata": {"name": "d"}, "spec": {"minReadySeconds": 1}})

    labelled = ask.merge(f"{path}/d", {"metadata": {"labels": {"a": "b"}}})
    changed = ask.merge(f"{path}/d", {"spec": {"minReadySeconds": 2}})

    assert labelled.body["metadata"]["generation"] == 1
    assert changed.body["metadata"]["generation"] == 2


def test_dry_run_judges_and_answers_but_stores_nothing(
    ask: apirig.Client, server: apiserver.ApiServer
) -> None:
    server.store.create(apirig.a_node())
    version = server.store.version

    assert ask("POST", f"{apirig.NODES}?dryRun=All", apirig.a_node("n2")).code == 201
    assert ask("POST", f"{apirig.NODES}?dryRun=All", apirig.a_node()).code == 409
    patch = {"metadata": {"labels": {"a": "b"}}}
    answer = ask.merge(f"{apirig.NODES}/n1?dryRun=All", patch)
    assert answer.body["metadata"]["labels"]["a"] == "b"
    deleted = ask("DELETE", f"{apirig.NODES}/n1", {"dryRun": ["All"]}).body
    assert (deleted["kind"], deleted["status"]) == ("Status", "Success")
    assert deleted["details"]["name"] == "n1"
    assert server.store.version == version


@pytest.mark.parametrize(
    ("metadata", "field", "message"),
    [
        ({"labels": {"nvidia.com/mig.config": "all 1g"}}, "metadata.labels", "a valid label"),
        ({"labels": {"a": "x" * 64}}, "metadata.labels", "no more than 63 characters"),
        ({"labels": {"no/two/slashes": "x"}}, "metadata.labels", "prefix part"),
        ({"labels": {"-a": "x"}}, "metadata.labels", "name part"),
        ({"labels": {"a/": "x"}}, "metadata.labels", "name part must be non-empty"),
        ({"annotations": {"a b": "x"}}, "metadata.annotations", "name part"),
        ({"annotations": {"a": "x" * 270_000}}, "metadata.annotations", "Too long"),
        ({"name": "Not_A_Name"}, "metadata.name", "RFC 1123 subdomain"),
        ({"name": ""}, "metadata.name", "name or generateName is required"),
    ],
)
def test_metadata_that_breaks_the_syntax_is_invalid(
    ask: apirig.Client, metadata: apirig.Object, field: str, message: str
) -> None:
    answer = ask("POST", apirig.NODES, {"metadata": {"name": "n1"} | metadata})

    assert (answer.code, answer.body["reason"]) == (422, "Invalid")
    [cause] = answer.body["details"]["causes"]
    assert cause["field"] == field
    assert message in cause["message"]
    assert answer.body["message"].startswith('Node "')


def test_a_label_that_is_no_text_is_a_bad_request(ask: apirig.Client) -> None:
    assert ask("POST", apirig.NODES, {"metadata": {"name": "n1", "labels": {"a": 1}}}).code == 400
    assert ask("POST", apirig.NODES, {"metadata": {"name": "n1", "labels": ["a"]}}).code == 400


@pytest.mark.parametrize(
    ("taint", "reason"),
    [
        ({"key": "a"}, "FieldValueRequired"),
        ({"key": "a", "effect": "Sometimes"}, "FieldValueNotSupported"),
        ({"key": "a b", "effect": "NoSchedule"}, "FieldValueInvalid"),
    ],
)
def test_a_taint_must_be_well_formed(
    ask: apirig.Client, taint: apirig.Object, reason: str
) -> None:
    answer = ask("POST", apirig.NODES, apirig.a_node() | {"spec": {"taints": [taint]}})

    assert answer.code == 422
    assert answer.body["details"]["causes"][0]["reason"] == reason


def test_the_spec_of_a_pod_cannot_change_but_its_image_can(
    ask: apirig.Client, server: apiserver.ApiServer
) -> None:
    server.store.create(apirig.a_pod())

    moved = ask.merge(f"{apirig.PODS}/p1", {"spec": {"nodeName": "n2"}})
    image = {"spec": {"containers": [{"name": "main", "image": "app:2"}]}}
    updated = ask.strategic(f"{apirig.PODS}/p1", image)

    assert moved.code == 422
    assert "pod updates may not change fields" in moved.body["message"]
    assert updated.body["spec"]["containers"] == [{"name": "main", "image": "app:2"}]


def test_a_pod_is_bound_once(ask: apirig.Client) -> None:
    ask("POST", apirig.PODS, apirig.a_pod(node=""))

    assert ask("POST", f"{apirig.PODS}/p1/binding", {"target": {"name": "n1"}}).code == 201
    assert ask("GET", f"{apirig.PODS}/p1").body["spec"]["nodeName"] == "n1"
    assert ask("POST", f"{apirig.PODS}/p1/binding", {"target": {"name": "n2"}}).code == 409


@pytest.mark.parametrize(
    ("namespace", "involved", "code"),
    [
        ("default", {"kind": "Node", "name": "n1"}, 201),
        ("elsewhere", {"kind": "Node", "name": "n1"}, 422),
        ("elsewhere", {"kind": "Pod", "name": "p", "namespace": "elsewhere"}, 201),
        ("elsewhere", {"kind": "Pod", "name": "p", "namespace": "default"}, 422),
    ],
)
def test_an_event_lives_where_its_object_does(
    ask: apirig.Client, namespace: str, involved: apirig.Object, code: int
) -> None:
    event = {"metadata": {"name": "e"}, "involvedObject": involved, "reason": "R"}

    assert ask("POST", f"/api/v1/namespaces/{namespace}/events", event).code == code


@pytest.mark.parametrize(
    ("method", "path", "body", "code"),
    [
        ("POST", apirig.NODES, {"kind": "Pod", "metadata": {"name": "n1"}}, 400),
        ("POST", apirig.PODS, {"metadata": {"name": "p", "namespace": "other"}}, 400),
        ("PUT", f"{apirig.NODES}/n1", {"metadata": {"name": "n2"}}, 400),
        ("POST", apirig.NODES, [], 400),
        ("POST", apirig.NODES, {"metadata": {"name": "n1"}, "spec": 3}, 400),
        ("POST", f"{apirig.NODES}/n1", {}, 405),
        ("PUT", apirig.NODES, {}, 405),
        ("GET", f"{apirig.PODS}/p1/eviction", None, 405),
        ("POST", "/api/v1/pods", {}, 405),
        ("GET", "/api/v1/widgets", None, 404),
        ("GET", "/apis/apps/v2/daemonsets", None, 404),
        ("GET", f"{apirig.NODES}/n1/eviction", None, 404),
        ("GET", "/nowhere", None, 404),
    ],
)
def test_a_request_that_makes_no_sense_gets_its_own_code(
    ask: apirig.Client, method: str, path: str, body: object, code: int
) -> None:
    answer = ask(method, path, body)

    assert (answer.code, answer.body["code"]) == (code, code)
    assert answer.body["kind"] == "Status"


def test_bodies_must_be_json(ask: apirig.Client, server: apiserver.ApiServer) -> None:
    answer = ask("POST", apirig.NODES, {}, content_type="application/vnd.kubernetes.protobuf")
    assert (answer.code, answer.body["reason"]) == (415, "UnsupportedMediaType")
    broken = ask.http.request("POST", server.url + apirig.NODES, body="{")
    assert broken.status == 400
    assert ask("GET", apirig.NODES, Accept="application/yaml").code == 406


def test_a_bound_pod_stays_until_its_kubelet_lets_it_go(
    ask: apirig.Client, server: apiserver.ApiServer
) -> None:
    server.store.create(apirig.a_pod())

    asked = ask("DELETE", f"{apirig.PODS}/p1")
    assert asked.body["metadata"]["deletionGracePeriodSeconds"] == 30
    assert asked.body["metadata"]["deletionTimestamp"] > store.timestamp()
    shorter = ask("DELETE", f"{apirig.PODS}/p1", {"gracePeriodSeconds": 5})
    assert shorter.body["metadata"]["deletionGracePeriodSeconds"] == 5
    longer = ask("DELETE", f"{apirig.PODS}/p1?gracePeriodSeconds=60")
    assert longer.body == shorter.body

    assert ask("DELETE", f"{apirig.PODS}/p1", {"gracePeriodSeconds": 0}).code == 200
    assert ask("GET", f"{apirig.PODS}/p1").code == 404


@pytest.mark.parametrize(
    "pod", [apirig.a_pod(node=""), apirig.a_pod(phase="Succeeded"), apirig.a_pod(phase="Failed")]
)
def test_a_pod_that_runs_nowhere_is_gone_at_once(
    ask: apirig.Client, server: apiserver.ApiServer, pod: apirig.Object
) -> None:
    server.store.create(pod)

    ask("DELETE", f"{apirig.PODS}/p1")

    assert ask("GET", f"{apirig.PODS}/p1").code == 404


def test_delete_preconditions_guard_against_another_object_of_that_name(
    ask: apirig.Client, server: apiserver.ApiServer
) -> None:
    uid = server.store.create(apirig.a_pod())["metadata"]["uid"]

    for preconditions in ({"uid": "another"}, {"resourceVersion": "1"}):
        answer = ask("DELETE", f"{apirig.PODS}/p1", {"preconditions": preconditions})
        assert (answer.code, answer.body["reason"]) == (409, "Conflict")
    assert ask("DELETE", f"{apirig.PODS}/p1", {"preconditions": {"uid": uid}}).code == 200


def test_an_object_with_a_finalizer_goes_when_the_finalizer_does(ask: apirig.Client) -> None:
    node = apirig.a_node()
    node["metadata"]["finalizers"] = ["example.com/hold"]
    ask("POST", apirig.NODES, node)

    ask("DELETE", f"{apirig.NODES}/n1")
    assert "deletionTimestamp" in ask("GET", f"{apirig.NODES}/n1").body["metadata"]
    ask.merge(f"{apirig.NODES}/n1", {"metadata": {"finalizers": None}})

    assert ask("GET", f"{apirig.NODES}/n1").code == 404


def test_a_namespace_takes_its_objects_with_it(
    ask: apirig.Client, server: apiserver.ApiServer
) -> None:
    server.store.create(apirig.a_pod())

    ask("DELETE", "/api/v1/namespaces/default")

    assert server.objects(resources.PODS) == []
