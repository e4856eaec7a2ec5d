"""Access, discovery, and a real client of the embedded Kubernetes API."""

import pathlib

import kubernetes
import pytest

from testkit import apiserver
from tests.sandbox import apirig

ADMIN, AGENT = "admin", "agent"


def test_a_forbidden_request_has_the_message_of_rbac() -> None:
    def no_evictions(access: apiserver.Access) -> bool:
        return access.subresource != "eviction" or access.token == ADMIN

    with apiserver.serve(apiserver.ApiServer(authorizer=no_evictions)) as server:
        ask = apirig.Client(server)
        server.store.create(apirig.a_pod())

        weak = ask(
            "POST",
            f"{apirig.PODS}/p1/eviction",
            apirig.an_eviction(),
            Authorization=f"Bearer {AGENT}",
        )
        assert (weak.code, weak.body["reason"]) == (403, "Forbidden")
        assert weak.body["message"] == (
            'pods "p1" is forbidden: User "system:serviceaccount:sandbox:client" cannot create '
            'resource "pods/eviction" in API group "" in the namespace "default"'
        )
        strong = ask(
            "POST",
            f"{apirig.PODS}/p1/eviction",
            apirig.an_eviction(),
            Authorization=f"Bearer {ADMIN}",
        )
        assert strong.code == 201

        review = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
        asked = {"verb": "create", "resource": "pods", "subresource": "eviction"}
        answer = ask("POST", review, {"spec": {"resourceAttributes": asked}})
        assert answer.body["status"] == {"allowed": False}
        ask.http.clear()


def test_discovery_lists_what_is_served(ask: apirig.Client, server: apiserver.ApiServer) -> None:
    assert ask("GET", "/version").body["major"] == "1"
    assert ask("GET", "/api").body["versions"] == ["v1"]
    groups = [each["name"] for each in ask("GET", "/apis").body["groups"]]
    assert {"apps", "policy", "coordination.k8s.io"} <= set(groups)
    core = {each["name"]: each for each in ask("GET", "/api/v1").body["resources"]}
    assert core["pods/eviction"]["group"] == "policy"
    assert core["nodes"]["shortNames"] == ["no"]
    assert ask("GET", "/apis/apps").body["preferredVersion"]["version"] == "v1"
    for path in ("/healthz", "/readyz", "/livez/ping"):
        assert ask.http.request("GET", server.url + path).data == b"ok"


@pytest.mark.slow
def test_the_kubernetes_package_reads_the_kubeconfig_and_gets_along(
    server: apiserver.ApiServer, tmp_path: pathlib.Path
) -> None:
    server.store.create(apirig.a_node())
    path = server.kubeconfig(tmp_path / "kubeconfig", token=AGENT)
    configuration = kubernetes.client.Configuration()
    load = kubernetes.config.load_kube_config
    load(str(path), client_configuration=configuration)  # type: ignore[no-untyped-call]

    with kubernetes.client.ApiClient(configuration) as client:
        core = kubernetes.client.CoreV1Api(client)
        patched = core.patch_node("n1", {"metadata": {"labels": {"a": "b"}}})
        listed = core.list_node()
        with pytest.raises(kubernetes.client.ApiException, match="NotFound") as caught:
            core.read_node("n2")
        plain = client.sanitize_for_serialization

    assert plain(patched)["metadata"]["labels"]["a"] == "b"
    assert [each["metadata"]["name"] for each in plain(listed)["items"]] == ["n1"]
    assert caught.value.status == 404
    assert server.log.requests()[-1].token == AGENT
    assert server.log.count("patch", "nodes") == 1
