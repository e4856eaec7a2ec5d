"""``kubectl mig`` with few rights, and on nodes whose texts mean harm."""

import contextlib
import json
import pathlib
from collections.abc import Iterator

import pytest
import yaml

from mig_manager.core.layout import layout_list
from testkit import apiserver
from tests.rigs import api_objects
from tests.rigs.shell import plugin_rig

DOCS = pathlib.Path(__file__).parents[3] / "docs" / "kubectl-plugin.md"
NASTY = "\x1b]0;owned\x07\x1b[2Jgone\r\u202etxt"
"""Control sequences that name a terminal's window, clear it, and reverse the text after them."""


def rules() -> list[dict[str, list[str]]]:
    """Return what the documentation says is enough."""
    _, _, rest = DOCS.read_text(encoding="utf-8").partition("```yaml\n")
    role_rules: list[dict[str, list[str]]] = yaml.safe_load(rest.partition("```")[0])["rules"]
    return role_rules


def allows(granted: list[dict[str, list[str]]], access: apiserver.Access) -> bool:
    return any(
        access.group in rule["apiGroups"]
        and access.resource in rule["resources"]
        and access.verb in rule["verbs"]
        and access.name in rule.get("resourceNames", [access.name])
        for rule in granted
    )


def without(*kinds: str) -> list[dict[str, list[str]]]:
    return [
        rule | {"resources": [kind for kind in rule["resources"] if kind not in kinds]}
        for rule in rules()
    ]


@contextlib.contextmanager
def user_with(
    granted: list[dict[str, list[str]]], home: pathlib.Path
) -> Iterator[plugin_rig.KubectlUser]:
    """Yield a user with these rights in a cluster of one node."""
    gpus = plugin_rig.gpus_with("1xA100-SXM4-40GB", "all-balanced")
    server = apiserver.ApiServer(authorizer=lambda access: allows(granted, access))
    for each in (
        plugin_rig.node("n1", gpus=gpus, requested="all-balanced"),
        plugin_rig.pod("train", "n1", mig_3g_20gb=1),
        api_objects.a_config_map(plugin_rig.CONFIG),
        api_objects.an_event("n1", "Applied", "it is", at=plugin_rig.ago(minutes=40)),
    ):
        server.store.create(each)
    with apiserver.serve(server):
        yield plugin_rig.kubectl_user(server, home)


def test_the_rights_that_the_documentation_lists_are_enough(tmp_path: pathlib.Path) -> None:
    with user_with(rules(), tmp_path) as user:
        lines = ("status n1", "plan all-1g.5gb", "validate", "history n1")
        answers = [user.run_plugin(*line.split()) for line in lines]

    assert [each.status for each in answers] == [0, 0, 0, 0]
    assert not any("not known" in each.out or "forbidden" in each.err for each in answers)


def test_a_viewer_may_try_out_a_layout_and_not_request_it(tmp_path: pathlib.Path) -> None:
    layout = "version: v1\nmig-configs:\n  a:\n  - {devices: all, mig-enabled: false}\n"
    with user_with(rules(), tmp_path) as user:
        tried = user.run_plugin("apply", "n1", "-f", "-", "--dry-run", stdin=layout)
        requested = user.run_plugin("apply", "n1", "-f", "-", stdin=layout)

    assert (tried.status, requested.status) == (0, 1)
    assert "forbidden" in requested.err
    assert "docs/kubectl-plugin.md" in requested.err


def test_without_rights_to_pods_and_events_the_rest_is_shown(tmp_path: pathlib.Path) -> None:
    with user_with(without("pods", "events"), tmp_path) as user:
        lines = ("status n1", "plan all-1g.5gb n1", "history n1")
        status, plan, history = (user.run_plugin(*line.split()) for line in lines)

    assert [status.status, plan.status, history.status] == [0, 0, 0]
    assert "3g.20gb" in status.out
    assert "The pods using the GPUs are unknown: pods is forbidden" in status.out
    assert "The affected pods are unknown: pods is forbidden" in plan.out
    assert "Events cannot be read: events is forbidden" in history.out
    assert "all-balanced" in history.out


@pytest.mark.parametrize(
    ("missing", "words", "instead"),
    [
        ("nodes", ("status",), ""),
        ("nodes", ("history", "n1"), ""),
        ("configmaps", ("validate",), "; -f FILE needs no ConfigMap\n"),
    ],
)
def test_missing_rights_are_an_error_with_a_remedy(
    tmp_path: pathlib.Path, missing: str, words: tuple[str, ...], instead: str
) -> None:
    with user_with(without(missing), tmp_path) as user:
        answer = user.run_plugin_with_kubectl(*words)

    assert (answer.status, answer.out) == (1, "")
    assert "forbidden" in answer.err
    assert instead in answer.err
    assert "viewer's rights" in answer.err


def test_texts_on_a_node_cannot_control_the_terminal(
    empty_cluster: plugin_rig.KubectlUser,
) -> None:
    gpus = plugin_rig.gpus_with("1xA100-SXM4-40GB")
    thing = plugin_rig.node(
        "n1", gpus=gpus, requested="all-balanced", reported=NASTY, message=NASTY
    )
    notes = thing["metadata"]["annotations"]
    notes["mig-manager.io/gpus"] = notes["mig-manager.io/gpus"].replace(
        gpus[0].name, json.dumps(NASTY)[1:-1]
    )
    del thing["metadata"]["labels"]["mig-manager.io/applied"]
    entry = layout_list.Entry(name=NASTY, content_hash=NASTY, origin=NASTY)
    notes["mig-manager.io/layouts"] = layout_list.to_json([entry])
    layouts = json.dumps({"version": "v1", "mig-configs": {NASTY: [
        {"devices": "all", "mig-enabled": True, "mig-devices": {"9g.5gb": 1}}
    ]}})  # fmt: skip
    empty_cluster.server.store.create(thing)
    empty_cluster.server.store.create(api_objects.a_config_map(layouts))
    empty_cluster.server.store.create(
        api_objects.an_event("n1", "Applied", NASTY, at=plugin_rig.ago(minutes=1))
    )
    for words in (
        ("status", "n1"),
        ("status", "n1", "-o", "json"),
        ("status", "n1", "-o", "yaml"),
        ("plan", NASTY, "n1"),
        ("validate",),
        ("layouts", "n1"),
        ("history", "n1"),
        ("history", NASTY.replace("\x1b", "")),
    ):
        answer = empty_cluster.run_plugin(*words)
        text = answer.out + answer.err
        assert all(letter.isprintable() or letter == "\n" for letter in text), repr(text)
        assert "gone" in text, words


@pytest.mark.parametrize("text", [None, "version: ["])
def test_layouts_of_nodes_are_completed_without_a_usable_config_map(
    empty_cluster: plugin_rig.KubectlUser, text: str | None
) -> None:
    node = plugin_rig.node("n1")
    entry = layout_list.Entry(name="night", content_hash="0" * 12, origin="config.yaml:1")
    node["metadata"]["annotations"]["mig-manager.io/layouts"] = layout_list.to_json([entry])
    empty_cluster.server.store.create(node)
    if text is None:
        empty_cluster.server.inject(apiserver.Fault(resource="configmaps", status=403, times=None))
    else:
        empty_cluster.server.store.create(api_objects.a_config_map(text))

    assert empty_cluster.complete("plan", "").out == "night\n:4\n"


def test_a_name_with_shell_syntax_is_not_completed(
    empty_cluster: plugin_rig.KubectlUser,
) -> None:
    names = ["fine", "a;id", "$(id)", "a b", NASTY]
    layouts = {name: [{"devices": "all", "mig-enabled": False}] for name in names}
    text = json.dumps({"version": "v1", "mig-configs": layouts})
    empty_cluster.server.store.create(api_objects.a_config_map(text))

    assert empty_cluster.complete("plan", "").out == "fine\n:4\n"
