"""What an agent's token is worth: its own node, its own keys, and pods of its own node."""

import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from mig_manager import errors
from mig_manager.adapters.kubernetes import api
from mig_manager.core.node import cluster
from tests import waiting
from tests.cluster import clusters

pytestmark = pytest.mark.cluster

OWN, OTHER = "sandbox", "other"
PODS = "/api/v1/namespaces/default/pods"
GENEROUS = dataclasses.replace(
    clusters.SHIPPED,
    everywhere=clusters.SHIPPED.everywhere | clusters.to("nodes", "create", "delete"),
)
"""With rights that were added, to see what the policy alone forbids."""
TAINT = {"key": "example.com/flaky", "effect": "NoSchedule"}
HOLD = {"key": cluster.HOLD_TAINT, "effect": "NoSchedule"}
LABELS = {
    cluster.CONFIG_LABEL: "all-disabled",
    cluster.PLUGIN_DEPLOY_LABEL: "true",
    "example.com/rack": "7",
}
ANNOTATIONS = {"example.com/owner": "team-a"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """Two nodes with a pod each, and a pod that waits for a node."""

    people: api.KubeApi
    agent: api.KubeApi
    unbound: api.KubeApi
    """With a token that is bound to no pod."""

    def patch(self, change: Mapping[str, Any], node: str = OWN) -> clusters.Object:
        return self.agent.patch(f"/api/v1/nodes/{node}", change, kind=api.PatchType.MERGE)


@pytest.fixture(scope="module")
def scene(
    real_cluster: clusters.Real, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("policy")
    people = real_cluster.kube
    with (
        real_cluster.admit(folder, GENEROUS) as credentials,
        contextlib.ExitStack() as exits,
    ):

        def connect(path: pathlib.Path) -> api.KubeApi:
            kube = api.KubeApi.connect(kubeconfig=str(path))
            exits.callback(kube.close)
            return kube

        for node in (OWN, OTHER):
            people.post("/api/v1/nodes", a_node(node))
        for place in (OWN, OTHER, None):
            people.post(PODS, a_pod(f"pod-of-{place}", place))
        bare = real_cluster.kubeconfig(folder / "unbound", clusters.OURS, None)
        found = Scene(people=people, agent=connect(credentials.agent), unbound=connect(bare))
        # The policy becomes active, and the pods into its view, a moment after their creation.
        for name in (f"pod-of-{OTHER}", "pod-of-None"):
            waiting.until(functools.partial(is_refused, found, name), f"the guard of {name}")
        waiting.until(
            lambda: bool(clusters.refusal(lambda: found.patch({}, OTHER))),
            "the policy of the nodes",
        )
        yield found


def is_refused(scene: Scene, pod: str) -> bool:
    return bool(clusters.refusal(lambda: evict(scene.agent, pod, dry=True)))


@pytest.fixture(autouse=True)
def _as_it_was(scene: Scene) -> None:
    """Make the nodes what each test begins with; the server has tainted them as not ready."""
    for node in (OWN, OTHER):
        path = f"/api/v1/nodes/{node}"
        version = scene.people.get(path)["metadata"]["resourceVersion"]
        wanted = a_node(node)
        wanted["metadata"]["resourceVersion"] = version
        scene.people.put(path, wanted)


def a_node(name: str) -> clusters.Object:
    metadata = {"name": name, "labels": dict(LABELS), "annotations": dict(ANNOTATIONS)}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": metadata,
        "spec": {"taints": [dict(TAINT)]},
    }


def a_pod(name: str, node: str | None) -> clusters.Object:
    spec: clusters.Object = {"containers": [{"name": "main", "image": "app:1"}]}
    if node is not None:
        spec["nodeName"] = node
    metadata = {"name": name.lower(), "namespace": "default"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def evict(kube: api.KubeApi, pod: str, *, dry: bool = False) -> clusters.Object:
    body: clusters.Object = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": pod.lower(), "namespace": "default"},
    }
    if dry:
        body["deleteOptions"] = {"dryRun": ["All"]}
    return kube.post(f"{PODS}/{pod.lower()}/eviction", body)


# -- nodes ------------------------------------------------------------------------------------


def labels(**values: str | None) -> clusters.Object:
    return {"metadata": {"labels": values}}


def annotations(**values: str | None) -> clusters.Object:
    return {"metadata": {"annotations": values}}


def taints(*values: clusters.Object) -> clusters.Object:
    return {"spec": {"taints": list(values)}}


def test_the_agent_may_write_and_withdraw_all_that_its_work_needs_on_its_own_node(
    scene: Scene,
) -> None:
    published = {cluster.STATE_LABEL: "pending", cluster.APPLIED_LABEL: "all-disabled"}
    paused = {
        cluster.PLUGIN_DEPLOY_LABEL: cluster.PAUSED_VALUE,
        cluster.PLUGIN_CONFIG_LABEL: "large",
    }
    resumed = {cluster.PLUGIN_CONFIG_LABEL: None, cluster.PLUGIN_DEPLOY_LABEL: "true"}
    spoilt = {
        cluster.JOURNAL_ANNOTATION: None,
        cluster.UNREADABLE_JOURNAL_ANNOTATION: "nonsense",
    }
    scene.patch(labels(**published, **paused))
    scene.patch(annotations(**{cluster.STATUS_ANNOTATION: "{}", cluster.JOURNAL_ANNOTATION: "{}"}))
    scene.patch(taints(TAINT, HOLD))
    scene.patch(annotations(**spoilt))
    scene.patch(labels(**resumed))
    resumed_node = scene.patch(taints(TAINT))
    scene.patch(labels(**{cluster.APPLIED_LABEL: None}))
    withdrawn = scene.patch(annotations(**{cluster.UNREADABLE_JOURNAL_ANNOTATION: None}))

    assert resumed_node["spec"]["taints"] == [TAINT]
    assert resumed_node["metadata"]["labels"] == LABELS | published
    assert cluster.APPLIED_LABEL not in withdrawn["metadata"]["labels"]
    assert cluster.UNREADABLE_JOURNAL_ANNOTATION not in withdrawn["metadata"]["annotations"]


LABELS_OF_OTHERS = (
    (cluster.CONFIG_LABEL, "all-enabled"),
    (cluster.CONFIG_LABEL, None),
    ("example.com/rack", "8"),
    ("example.com/rack", None),
    ("example.com/new", "1"),
    ("node-role.kubernetes.io/control-plane", ""),
    (f"{cluster.DEPLOY_LABEL_PREFIX}new", "true"),
    (cluster.PLUGIN_DEPLOY_LABEL, None),
)
ANNOTATIONS_OF_OTHERS = (("example.com/owner", "me"), ("example.com/owner", None), ("a.b/c", "d"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        *(
            (labels(**{key: value}), f"mig-manager may not change the labels {key}")
            for key, value in LABELS_OF_OTHERS
        ),
        *(
            (annotations(**{key: value}), f"mig-manager may not change the annotations {key}")
            for key, value in ANNOTATIONS_OF_OTHERS
        ),
        *(
            (taints(*values), "mig-manager may not change taints of others")
            for values in (
                [],
                [HOLD],
                [TAINT, TAINT | {"effect": "NoExecute"}],
                [TAINT | {"value": "x"}],
            )
        ),
        ({"spec": {"providerID": "cloud://1"}}, "and nothing else"),
        ({"spec": {"podCIDR": "10.9.0.0/24", "podCIDRs": ["10.9.0.0/24"]}}, "and nothing else"),
        ({"metadata": {"finalizers": ["example.com/keep"]}}, "and nothing else"),
        ({"spec": {"unschedulable": True}}, "may not cordon"),
    ],
)
def test_the_agent_may_not_change_what_is_of_others_on_its_own_node(
    scene: Scene, change: clusters.Object, words: str
) -> None:
    assert words in clusters.refusal(lambda: scene.patch(change))


@pytest.mark.parametrize(
    "change",
    [
        labels(**{cluster.STATE_LABEL: "failed"}),
        annotations(**{cluster.STATUS_ANNOTATION: "{}"}),
        {"spec": {"unschedulable": True}},
    ],
    ids=["label", "annotation", "cordon"],
)
def test_the_agent_may_not_change_another_node(scene: Scene, change: clusters.Object) -> None:
    message = clusters.refusal(lambda: scene.patch(change, OTHER))

    assert f"mig-manager of node {OWN} may not change another node" in message


def test_the_agent_may_not_lift_a_cordon_of_others(scene: Scene) -> None:
    path = f"/api/v1/nodes/{OWN}"
    scene.people.patch(path, {"spec": {"unschedulable": True}}, kind=api.PatchType.MERGE)
    try:
        message = clusters.refusal(lambda: scene.patch({"spec": {"unschedulable": None}}))
    finally:
        scene.people.patch(path, {"spec": {"unschedulable": None}}, kind=api.PatchType.MERGE)
    assert "may not cordon" in message


def test_the_agent_may_lift_the_cordon_of_an_older_version(scene: Scene) -> None:
    scene.patch(annotations(**{cluster.CORDON_ANNOTATION: "all-disabled"}))
    change = {"spec": {"unschedulable": True}}
    scene.people.patch(f"/api/v1/nodes/{OWN}", change, kind=api.PatchType.MERGE)

    mark = {"annotations": {cluster.CORDON_ANNOTATION: None}}
    after = scene.patch({"metadata": mark, "spec": {"unschedulable": False}})

    assert not after["spec"].get("unschedulable")


def test_the_agent_may_create_and_delete_no_node_whatever_its_role_says(scene: Scene) -> None:
    for act in (
        lambda: scene.agent.post("/api/v1/nodes", a_node("new")),
        lambda: scene.agent.delete(f"/api/v1/nodes/{OWN}"),
    ):
        assert "mig-manager creates and deletes no nodes" in clusters.refusal(act)


def test_a_token_that_is_bound_to_no_pod_opens_no_node(scene: Scene) -> None:
    def patch() -> object:
        change = {"metadata": {"labels": {cluster.STATE_LABEL: "failed"}}}
        return scene.unbound.patch(f"/api/v1/nodes/{OWN}", change, kind=api.PatchType.MERGE)

    assert "mig-manager's token names no node" in clusters.refusal(patch)
    message = clusters.refusal(lambda: evict(scene.unbound, f"pod-of-{OWN}"))
    assert "mig-manager's token names no node" in message


def test_people_are_not_confined(scene: Scene) -> None:
    change = {"metadata": {"labels": {"example.com/rack": "8"}}}
    path = f"/api/v1/nodes/{OTHER}"

    assert scene.people.patch(path, change, kind=api.PatchType.MERGE)


# -- pods -------------------------------------------------------------------------------------


@pytest.mark.parametrize("pod", [f"pod-of-{OTHER}", "pod-of-None"])
def test_the_agent_may_neither_evict_nor_delete_a_pod_that_is_not_on_its_node(
    scene: Scene, pod: str
) -> None:
    path = f"{PODS}/{pod.lower()}"
    evicting = clusters.refusal(lambda: evict(scene.agent, pod))
    deleting = clusters.refusal(lambda: scene.agent.delete(path))

    assert f"mig-manager of node {OWN} may not evict pods of others" in evicting
    assert f"mig-manager of node {OWN} may not delete pods of others" in deleting
    assert scene.people.get(path)["metadata"].get("deletionTimestamp") is None


def test_the_agent_may_evict_and_delete_pods_of_its_own_node(scene: Scene) -> None:
    path = f"{PODS}/pod-of-{OWN}"

    evict(scene.agent, f"pod-of-{OWN}")
    assert scene.people.get(path)["metadata"]["deletionTimestamp"]

    scene.agent.delete(path, {"gracePeriodSeconds": 0})
    with pytest.raises(errors.ClusterError, match="404"):
        scene.people.get(path)


@pytest.mark.parametrize("namespace", ["default", "kube-public"])
def test_a_pod_that_has_gone_is_gone_to_the_agent_and_not_forbidden(
    scene: Scene, namespace: str
) -> None:
    path = f"/api/v1/namespaces/{namespace}/pods/gone"
    body = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": "gone", "namespace": namespace},
    }

    with pytest.raises(errors.ClusterError, match="404"):
        scene.agent.post(f"{path}/eviction", body)
    with pytest.raises(errors.ClusterError, match="404"):
        scene.agent.delete(path)


# -- events -----------------------------------------------------------------------------------


def an_event(kind: str, name: str) -> clusters.Object:
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"generateName": "test-", "namespace": "default"},
        "involvedObject": {"apiVersion": "v1", "kind": kind, "name": name},
        "reason": "Test",
        "source": {"component": "mig-manager"},
    }


def test_the_agent_may_publish_events_of_its_own_node(scene: Scene) -> None:
    assert scene.agent.post(clusters.EVENTS, an_event("Node", OWN))["reason"] == "Test"


@pytest.mark.parametrize(("kind", "name"), [("Node", OTHER), ("Namespace", OWN)])
def test_the_agent_may_publish_events_of_nothing_else(scene: Scene, kind: str, name: str) -> None:
    message = clusters.refusal(lambda: scene.agent.post(clusters.EVENTS, an_event(kind, name)))

    assert f"mig-manager of node {OWN} may not write Events about other objects" in message
