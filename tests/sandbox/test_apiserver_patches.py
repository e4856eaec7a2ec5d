"""How the embedded Kubernetes API applies patches."""

import pytest

from tests.sandbox import apirig


@pytest.mark.parametrize("content_type", [apirig.MERGE, apirig.STRATEGIC])
def test_labels_merge_and_null_removes(ask: apirig.Client, content_type: str) -> None:
    ask("POST", apirig.NODES, apirig.a_node(old="x", kept="y"))

    patch = {"metadata": {"labels": {"old": None, "new": "z", "never": None}}}
    node = ask("PATCH", f"{apirig.NODES}/n1", patch, content_type=content_type).body

    labels = {"kubernetes.io/hostname": "n1", "kept": "y", "new": "z"}
    assert node["metadata"]["labels"] == labels


def test_a_merge_patch_replaces_lists_and_a_strategic_one_merges_by_key(
    ask: apirig.Client,
) -> None:
    ask("POST", apirig.NODES, apirig.a_node())
    patch = {"status": {"conditions": [{"type": "MemoryPressure", "status": "False"}]}}

    strategic = ask.strategic(f"{apirig.NODES}/n1/status", patch).body
    merged = ask.merge(f"{apirig.NODES}/n1/status", patch).body

    types = [each["type"] for each in strategic["status"]["conditions"]]
    assert types == ["Ready", "MemoryPressure"]
    assert merged["status"] == patch["status"]


def test_even_a_strategic_patch_replaces_all_taints(ask: apirig.Client) -> None:
    old = {"key": "old", "effect": "NoSchedule"}
    ask("POST", apirig.NODES, apirig.a_node() | {"spec": {"taints": [old]}})

    patch = {"spec": {"taints": [{"key": "new", "effect": "NoExecute"}]}}
    node = ask.strategic(f"{apirig.NODES}/n1", patch).body

    assert [each["key"] for each in node["spec"]["taints"]] == ["new"]


def test_strategic_directives_delete_replace_and_order(ask: apirig.Client) -> None:
    node = apirig.a_node()
    node["status"]["conditions"] = [{"type": name, "status": "True"} for name in "ABC"]
    ask("POST", apirig.NODES, node)

    def conditions(*patch: apirig.Object, **order: object) -> list[str]:
        body = {"status": {"conditions": patch} | order}
        answer = ask.strategic(f"{apirig.NODES}/n1/status", body)
        return [each["type"] for each in answer.body["status"]["conditions"]]

    assert conditions({"type": "B", "$patch": "delete"}) == ["A", "C"]
    order = [{"type": "C"}, {"type": "A"}]
    assert conditions(**{"$setElementOrder/conditions": order}) == ["C", "A"]
    assert conditions({"$patch": "replace"}, {"type": "D", "status": "True"}) == ["D"]
    patch = {"status": {"conditions": [{"status": "True"}]}}
    assert ask.strategic(f"{apirig.NODES}/n1/status", patch).code == 400


def test_a_json_patch_operates_on_pointers(ask: apirig.Client) -> None:
    ask("POST", apirig.NODES, apirig.a_node(a="1"))
    labels = "/metadata/labels"

    node = ask(
        "PATCH",
        f"{apirig.NODES}/n1",
        [
            {"op": "test", "path": f"{labels}/a", "value": "1"},
            {"op": "add", "path": f"{labels}/nvidia.com~1mig.config", "value": "all"},
            {"op": "replace", "path": f"{labels}/a", "value": "3"},
            {"op": "remove", "path": f"{labels}/kubernetes.io~1hostname"},
            {"op": "add", "path": "/spec", "value": {"taints": []}},
            {
                "op": "add",
                "path": "/spec/taints/-",
                "value": {"key": "t", "effect": "NoSchedule"},
            },
        ],
        content_type=apirig.JSON,
    ).body

    assert node["metadata"]["labels"] == {"nvidia.com/mig.config": "all", "a": "3"}
    assert node["spec"]["taints"][0]["key"] == "t"


@pytest.mark.parametrize(
    "operation",
    [
        {"op": "test", "path": "/metadata/name", "value": "other"},
        {"op": "remove", "path": "/metadata/nothing"},
        {"op": "replace", "path": "/nothing", "value": 1},
        {"op": "add", "path": "/a/b/c", "value": 1},
        {"op": "dance", "path": "/metadata"},
        {"op": "add", "path": "no-pointer", "value": 1},
    ],
)
def test_a_json_patch_that_does_not_apply_is_invalid_and_changes_nothing(
    ask: apirig.Client, operation: apirig.Object
) -> None:
    before = ask("POST", apirig.NODES, apirig.a_node()).body
    first = {"op": "add", "path": "/metadata/labels/a", "value": "b"}

    answer = ask("PATCH", f"{apirig.NODES}/n1", [first, operation], content_type=apirig.JSON)

    assert (answer.code, answer.body["reason"]) == (422, "Invalid")
    assert ask("GET", f"{apirig.NODES}/n1").body == before


@pytest.mark.parametrize(
    ("content_type", "body", "code"),
    [
        ("application/apply-patch+yaml", {}, 415),
        ("application/json", {}, 415),
        (apirig.MERGE, [], 400),
        (apirig.JSON, {}, 400),
        (apirig.MERGE, {"metadata": {"name": "n2"}}, 400),
    ],
)
def test_a_patch_of_another_kind_or_shape_is_refused(
    ask: apirig.Client, content_type: str, body: object, code: int
) -> None:
    ask("POST", apirig.NODES, apirig.a_node())

    assert ask("PATCH", f"{apirig.NODES}/n1", body, content_type=content_type).code == code
