"""What a list of the embedded Kubernetes API shows: selectors, pages, moments, forms."""

import pytest

from mig_manager.sandbox.apiserver import rendering, resources
from testkit import apiserver
from tests.sandbox import apirig


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
        ("size>3", "b"),
        ("size<3", "a"),
        ("nvidia.com/mig.config=", "c"),
        ("", "abc"),
    ],
)
def test_label_selectors_have_the_whole_grammar(
    ask: apirig.Client, server: apiserver.ApiServer, selector: str, names: str
) -> None:
    server.store.create(apirig.a_node("a", app="x", size="1"))
    server.store.create(apirig.a_node("b", app="y", tier="web", size="10"))
    server.store.create(apirig.a_node("c", **{"nvidia.com/mig.config": ""}))

    nodes = ask("GET", f"{apirig.NODES}?labelSelector={selector.replace(' ', '%20')}").body

    assert "".join(node["metadata"]["name"] for node in nodes["items"]) == names


@pytest.mark.parametrize("selector", ["a=b=c", "a in x", "a in (x", ",", "a=b,", "a>x"])
def test_a_label_selector_that_cannot_be_parsed_is_a_bad_request(
    ask: apirig.Client, selector: str
) -> None:
    assert ask("GET", f"{apirig.NODES}?labelSelector={selector.replace(' ', '%20')}").code == 400


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
    server.store.create(apirig.a_node("n1"))
    server.store.create(apirig.a_node("n2") | {"spec": {"unschedulable": True}})
    server.store.create(apirig.a_pod("p1"))
    server.store.create(apirig.a_pod("p2", phase="Failed"))
    involved = {"kind": "Node", "name": "n1"}
    event = {"apiVersion": "v1", "kind": "Event", "metadata": {"name": "e"}}
    server.store.create(event | {"involvedObject": involved})

    found = ask("GET", f"{path}?fieldSelector={selector}").body["items"]

    assert [each["metadata"]["name"] for each in found] == names


def test_an_unknown_field_is_a_bad_request(ask: apirig.Client) -> None:
    answer = ask("GET", f"{apirig.PODS}?fieldSelector=spec.color=red")

    assert answer.code == 400
    assert answer.body["message"] == "field label not supported: spec.color"


def test_pages_of_a_list_show_one_moment(ask: apirig.Client, server: apiserver.ApiServer) -> None:
    for name in "abcde":
        server.store.create(apirig.a_node(name))

    first = ask("GET", f"{apirig.NODES}?limit=2").body
    server.delete(resources.NODES, "d")
    server.store.create(apirig.a_node("bb"))
    second = ask("GET", f"{apirig.NODES}?limit=2&continue={first['metadata']['continue']}").body
    third = ask("GET", f"{apirig.NODES}?limit=2&continue={second['metadata']['continue']}").body

    names = [each["metadata"]["name"] for page in (first, second, third) for each in page["items"]]
    assert "".join(names) == "abcde"
    assert first["metadata"]["remainingItemCount"] == 3
    assert second["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"]
    assert "continue" not in third["metadata"]


def test_a_page_of_a_forgotten_moment_is_expired(
    ask: apirig.Client, server: apiserver.ApiServer
) -> None:
    for name in "abc":
        server.store.create(apirig.a_node(name))
    token = ask("GET", f"{apirig.NODES}?limit=1").body["metadata"]["continue"]
    server.store.create(apirig.a_node("d"))
    server.compact()

    answer = ask("GET", f"{apirig.NODES}?limit=1&continue={token}")

    assert (answer.code, answer.body["reason"]) == (410, "Expired")
    assert ask("GET", f"{apirig.NODES}?continue=nonsense").code == 400


def test_items_of_a_list_carry_no_kind(ask: apirig.Client, server: apiserver.ApiServer) -> None:
    server.store.create(apirig.a_node())

    whole = ask("GET", apirig.NODES).body

    assert whole["kind"] == "NodeList"
    assert "kind" not in whole["items"][0]
    assert ask("GET", f"{apirig.NODES}?resourceVersion=x").code == 400


def test_a_table_has_the_columns_that_people_read(
    ask: apirig.Client, server: apiserver.ApiServer
) -> None:
    server.store.create(apirig.a_node() | {"spec": {"unschedulable": True}})
    server.store.create(apirig.a_pod())

    nodes, pods = (
        ask("GET", apirig.NODES, Accept=apirig.TABLE).body,
        ask("GET", apirig.PODS, Accept=apirig.TABLE).body,
    )

    assert nodes["kind"] == "Table"
    columns = [each["name"] for each in nodes["columnDefinitions"] if not each["priority"]]
    assert columns == ["Name", "Status", "Roles", "Age", "Version"]
    assert nodes["rows"][0]["cells"][:2] == ["n1", "Ready,SchedulingDisabled"]
    assert nodes["rows"][0]["object"]["kind"] == "PartialObjectMetadata"
    assert pods["rows"][0]["cells"][:4] == ["p1", "1/1", "Running", 2]
    server.store.create(apirig.a_budget("guard", {}, minAvailable=1))
    budgets = ask("GET", "/apis/policy/v1/poddisruptionbudgets", Accept=apirig.TABLE).body
    assert budgets["rows"][0]["cells"][:4] == ["guard", 1, "N/A", 0]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-3, "0s"), (5, "5s"), (119, "119s"), (120, "2m"), (330, "5m30s"), (3600, "60m"),
        (12_000, "3h20m"), (100_000, "27h"), (200_000, "2d7h"), (10**6, "11d"), (10**8, "3y"),
    ],
)  # fmt: skip
def test_ages_are_printed_as_kubectl_prints_them(seconds: int, text: str) -> None:
    assert rendering.duration(seconds) == text


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
