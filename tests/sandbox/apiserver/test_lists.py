"""What a list of the embedded Kubernetes API shows: selectors, pages, moments, forms."""

import pytest

from mig_manager.sandbox.apiserver import kinds
from testkit import apiserver
from tests.rigs import api_objects
from tests.rigs.cluster import apirig


@pytest.mark.parametrize(
    ("selector", "names"),
    [
        ("app=x", "a"),
        ("app==x", "a"),
        ("app!=x", "bc"),
        ("app in (x, y)", "ab"),
        ("app notin (x)", "bc"),
        ("app", "ab"),
        ("!app", "c"),
        ("app,tier=web", "b"),
        ("nvidia.com/mig.config=", "c"),
        ("", "abc"),
        *[(malformed, None) for malformed in ("a=b=c", "a in x", "a in (x", ",", "a=b,")],
    ],
)
def test_label_selectors_have_the_grammar_of_the_real_server(
    ask: apirig.Client, server: apiserver.ApiServer, selector: str, names: str | None
) -> None:
    server.create(
        api_objects.a_node("a", {"app": "x"}),
        api_objects.a_node("b", {"app": "y", "tier": "web"}),
        api_objects.a_node("c", {"nvidia.com/mig.config": ""}),
    )

    answer = ask("GET", f"{apirig.NODES}?labelSelector={selector.replace(' ', '%20')}")

    assert answer.code == (400 if names is None else 200)
    items = answer.body.get("items", ())
    assert "".join(node["metadata"]["name"] for node in items) == (names or "")


@pytest.mark.parametrize(
    ("path", "selector", "names"),
    [
        ("/api/v1/pods", "spec.nodeName=n1,status.phase!=Failed", ["p1"]),
        ("/api/v1/pods", "metadata.namespace=default,metadata.name=p2", ["p2"]),
        (apirig.NODES, "spec.unschedulable=true", ["n2"]),
        (apirig.NODES, "spec.unschedulable=false", ["n1"]),
        ("/api/v1/events", "involvedObject.kind=Node,involvedObject.name=n1", ["e"]),
    ],
)
def test_field_selectors_reach_the_fields_of_the_real_server(
    ask: apirig.Client, server: apiserver.ApiServer, path: str, selector: str, names: list[str]
) -> None:
    server.create(
        api_objects.a_node("n1"),
        api_objects.a_node("n2") | {"spec": {"unschedulable": True}},
        api_objects.a_pod("p1"),
        api_objects.a_pod("p2", phase="Failed"),
    )
    event = {"apiVersion": "v1", "kind": "Event", "metadata": {"name": "e"}}
    server.create(event | {"involvedObject": {"kind": "Node", "name": "n1"}})

    items = ask("GET", f"{path}?fieldSelector={selector}").body["items"]

    assert [each["metadata"]["name"] for each in items] == names
    unknown = ask("GET", f"{path}?fieldSelector=spec.color=red")
    assert (unknown.code, unknown.body["message"]) == (
        400,
        "field label not supported: spec.color",
    )


def test_pages_of_a_list_show_one_moment_until_it_is_forgotten(
    ask: apirig.Client, server: apiserver.ApiServer
) -> None:
    server.create(*(api_objects.a_node(name) for name in "abcde"))

    def page(after: api_objects.Object) -> apirig.ApiAnswer:
        return ask("GET", f"{apirig.NODES}?limit=2&continue={after['metadata']['continue']}")

    first = ask("GET", f"{apirig.NODES}?limit=2").body
    server.delete(kinds.NODES, "d")
    server.create(api_objects.a_node("bb"))
    second = page(first).body
    third = page(second).body

    names = [each["metadata"]["name"] for got in (first, second, third) for each in got["items"]]
    assert "".join(names) == "abcde"
    assert second["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"]
    assert "continue" not in third["metadata"]
    server.compact()
    expired = page(first)
    assert (expired.code, expired.body["reason"]) == (410, "Expired")
    assert ask("GET", f"{apirig.NODES}?continue=nonsense").code == 400


def test_items_of_a_list_carry_no_kind(ask: apirig.Client, server: apiserver.ApiServer) -> None:
    server.create(api_objects.a_node())

    whole = ask("GET", apirig.NODES).body

    assert whole["kind"] == "NodeList"
    assert "kind" not in whole["items"][0]
    assert ask("GET", f"{apirig.NODES}?resourceVersion=x").code == 400


def test_discovery_lists_the_served_resources(
    ask: apirig.Client, server: apiserver.ApiServer
) -> None:
    groups = [each["name"] for each in ask("GET", "/apis").body["groups"]]
    core = {each["name"]: each for each in ask("GET", "/api/v1").body["resources"]}

    assert {"apps", "policy", "coordination.k8s.io"} <= set(groups)
    assert core["pods/eviction"]["group"] == "policy"
    assert core["nodes"]["shortNames"] == ["no"]
    assert ask("GET", "/apis/apps").body["preferredVersion"]["version"] == "v1"
    for path in ("/healthz", "/readyz", "/livez/ping"):
        assert ask.http.request("GET", server.url + path).data == b"ok"
