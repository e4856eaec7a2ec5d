"""What the agent reads in the API's answers, from the embedded server and from a real one."""

import dataclasses
import functools
import http
import itertools
import pathlib
from collections.abc import Iterator, Mapping

import pytest

from mig_manager import errors
from mig_manager.adapters import host
from mig_manager.adapters.kubernetes import api, node, pods, responses
from mig_manager.core import ports
from mig_manager.core.node import cluster
from tests.cluster import clusters

NAME = "answering"
NODES = "/api/v1/nodes"
PODS = "/api/v1/namespaces/default/pods"
OTHERS_UID = "00000000-0000-0000-0000-000000000000"


@pytest.fixture
def kube(where: clusters.Cluster, tmp_path: pathlib.Path) -> Iterator[api.KubeApi]:
    with where.admit(tmp_path, clusters.SHIPPED) as credentials:
        people = api.KubeApi.connect(kubeconfig=str(credentials.people))
        people.post(NODES, {"metadata": {"name": NAME, "labels": {"a": "1"}}})
        yield people
        people.close()


@pytest.fixture
def workloads(kube: api.KubeApi) -> pods.KubeWorkloads:
    return pods.KubeWorkloads(kube, node_name=NAME)


def create(kube: api.KubeApi, workloads: pods.KubeWorkloads, name: str = "train") -> cluster.Pod:
    spec = {"nodeName": NAME, "containers": [{"name": "main", "image": "app:1"}]}
    labels = {"app": "train"}
    made = kube.post(PODS, {"metadata": {"name": name, "labels": labels}, "spec": spec})
    running = {"status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}}
    kube.patch(f"{PODS}/{made['metadata']['name']}/status", running, kind=api.PatchType.MERGE)
    return next(pod for pod in workloads.list() if pod.name == name)


def namesake(pod: cluster.Pod) -> cluster.Pod:
    return dataclasses.replace(pod, uid=OTHERS_UID)


def a_budget(name: str, spec: Mapping[str, object]) -> clusters.Object:
    return {"metadata": {"name": name}, "spec": spec}


def add_budget(where: clusters.Cluster, kube: api.KubeApi, name: str, allowed: int) -> None:
    spec = {"maxUnavailable": allowed, "selector": {"matchLabels": {"app": "train"}}}
    kube.post(clusters.BUDGETS, a_budget(name, spec))
    where.count_disruptions(kube, name)


def test_an_eviction_lets_the_pod_stop_in_its_own_time(
    kube: api.KubeApi, workloads: pods.KubeWorkloads
) -> None:
    pod = create(kube, workloads)

    assert workloads.evict(pod).answer is ports.Eviction.ACCEPTED

    (seen,) = workloads.list()
    assert seen.is_terminating
    kept = kube.get(f"{PODS}/train")
    assert kept["metadata"]["deletionGracePeriodSeconds"] == 30


def test_an_eviction_that_is_only_tried_leaves_the_pod_alone(
    kube: api.KubeApi, workloads: pods.KubeWorkloads
) -> None:
    pod = create(kube, workloads)

    assert workloads.can_evict(pod).answer is ports.Eviction.ACCEPTED

    (seen,) = workloads.list()
    assert not seen.is_terminating


def test_a_namesake_of_the_pod_is_neither_evicted_nor_deleted(
    kube: api.KubeApi, workloads: pods.KubeWorkloads
) -> None:
    pod = create(kube, workloads)

    assert workloads.evict(namesake(pod)).answer is ports.Eviction.GONE
    workloads.delete(namesake(pod))

    (seen,) = workloads.list()
    assert not seen.is_terminating


def test_the_eviction_of_a_pod_that_has_gone_is_done(
    kube: api.KubeApi, workloads: pods.KubeWorkloads
) -> None:
    pod = create(kube, workloads)
    kube.delete(f"{PODS}/train", {"gracePeriodSeconds": 0})

    assert workloads.evict(pod).answer is ports.Eviction.GONE
    workloads.delete(pod)
    assert workloads.list() == ()


def test_a_budget_that_forbids_an_eviction_is_named(
    where: clusters.Cluster, kube: api.KubeApi, workloads: pods.KubeWorkloads
) -> None:
    pod = create(kube, workloads)
    add_budget(where, kube, "guard", 0)

    for ask in (workloads.can_evict, workloads.evict):
        verdict = ask(pod)
        assert verdict.answer is ports.Eviction.BLOCKED
        assert "Cannot evict pod as it would violate the pod's disruption budget." in verdict.why
        assert "The disruption budget guard needs" in verdict.why


def test_a_dry_run_does_not_use_up_a_budget_and_an_eviction_does(
    where: clusters.Cluster, kube: api.KubeApi, workloads: pods.KubeWorkloads
) -> None:
    one, other = create(kube, workloads, "one"), create(kube, workloads, "other")
    add_budget(where, kube, "guard", 1)
    where.count_disruptions(kube, "guard", 1)

    for pod in (one, other, one):
        assert workloads.can_evict(pod).answer is ports.Eviction.ACCEPTED
    (before,) = workloads.budgets({"default"})
    assert workloads.evict(one).answer is ports.Eviction.ACCEPTED
    assert workloads.evict(other).answer is ports.Eviction.BLOCKED

    (after,) = workloads.budgets({"default"})
    assert (before.allowed, after.allowed) == (1, 0)
    assert before.is_current
    assert {pod.name for pod in workloads.covered(after)} == {"one", "other"}


@pytest.mark.parametrize("phase", ["Pending", "Succeeded", "Failed"])
def test_a_pod_that_does_not_run_passes_every_budget(
    where: clusters.Cluster, kube: api.KubeApi, workloads: pods.KubeWorkloads, phase: str
) -> None:
    pod = create(kube, workloads)
    change = {"status": {"phase": phase}}
    kube.patch(f"{PODS}/train/status", change, kind=api.PatchType.MERGE)
    add_budget(where, kube, "one", 0)
    add_budget(where, kube, "other", 0)

    assert workloads.can_evict(pod).answer is ports.Eviction.ACCEPTED


@pytest.mark.parametrize(
    ("selector", "is_guarded"),
    [
        ({}, True),
        (None, False),
        ({"matchLabels": {"app": "train"}}, True),
        ({"matchLabels": {"app": "train", "tier": "a"}}, False),
        ({"matchExpressions": [{"key": "app", "operator": "Exists"}]}, True),
        ({"matchExpressions": [{"key": "app", "operator": "DoesNotExist"}]}, False),
        ({"matchExpressions": [{"key": "tier", "operator": "NotIn", "values": ["a"]}]}, True),
        ({"matchExpressions": [{"key": "app", "operator": "In", "values": ["a", "b"]}]}, False),
    ],
)
def test_a_budget_covers_the_pods_that_the_api_server_says_it_covers(
    where: clusters.Cluster,
    kube: api.KubeApi,
    workloads: pods.KubeWorkloads,
    selector: clusters.Object | None,
    *,
    is_guarded: bool,
) -> None:
    pod = create(kube, workloads)
    spec = {"maxUnavailable": 0} | ({} if selector is None else {"selector": selector})
    kube.post(clusters.BUDGETS, a_budget("guard", spec))
    where.count_disruptions(kube, "guard")

    (budget,) = workloads.budgets({"default"})

    assert budget.covers(pod) is is_guarded
    assert (workloads.can_evict(pod).answer is ports.Eviction.BLOCKED) is is_guarded
    assert bool(workloads.covered(budget)) is is_guarded


@pytest.mark.parametrize(
    ("driver", "may_be_gpu"), [("nic.example.com", False), (cluster.GPU_CLAIM_DRIVER, True)]
)
def test_the_driver_of_a_pods_claim_is_read(
    kube: api.KubeApi, workloads: pods.KubeWorkloads, driver: str, *, may_be_gpu: bool
) -> None:
    path = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"
    request = {"name": "r", "exactly": {"deviceClassName": "some"}}
    kube.post(path, {"metadata": {"name": "claim"}, "spec": {"devices": {"requests": [request]}}})
    result = {"request": "r", "driver": driver, "pool": "p", "device": "d"}
    status = {"status": {"allocation": {"devices": {"results": [result]}}}}
    kube.patch(f"{path}/claim/status", status, kind=api.PatchType.MERGE)
    spec = {
        "nodeName": NAME,
        "containers": [{"name": "main", "image": "app:1"}],
        "resourceClaims": [{"name": "c", "resourceClaimName": "claim"}],
    }
    try:
        kube.post(PODS, {"metadata": {"name": "train"}, "spec": spec})

        (pod,) = workloads.list()

        assert pod.has_claims is may_be_gpu
    finally:
        kube.delete(f"{path}/claim")


def test_a_pod_with_two_budgets_cannot_be_evicted(
    where: clusters.Cluster, kube: api.KubeApi, workloads: pods.KubeWorkloads
) -> None:
    pod = create(kube, workloads)
    add_budget(where, kube, "one", 1)
    add_budget(where, kube, "other", 1)

    verdict = workloads.evict(pod)

    assert verdict.answer is ports.Eviction.BLOCKED
    assert "This pod has more than one PodDisruptionBudget" in verdict.why


def test_a_list_of_pods_comes_page_by_page_and_of_one_node_only(
    kube: api.KubeApi, workloads: pods.KubeWorkloads
) -> None:
    names = [f"train-{i}" for i in range(5)]
    for name in names:
        create(kube, workloads, name)
    kube.post(
        PODS, {"metadata": {"name": "x"}, "spec": {"containers": [{"name": "m", "image": "i"}]}}
    )
    query = {"fieldSelector": f"spec.nodeName={NAME}", "limit": "2"}
    seen: list[str] = []
    sizes: list[int] = []
    while True:
        page = kube.get("/api/v1/pods", query)
        sizes.append(len(page["items"]))
        seen += [item["metadata"]["name"] for item in page["items"]]
        if not page["metadata"].get("continue"):
            break
        query["continue"] = page["metadata"]["continue"]

    assert seen == names
    assert sizes == [2, 2, 1]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "words"),
    [
        ("get", f"{NODES}/none", None, 404, 'nodes "none" not found'),
        ("post", NODES, {"metadata": {"name": NAME}}, 409, f'nodes "{NAME}" already exists'),
        ("post", NODES, {"metadata": {"name": "A"}}, 422, "is invalid: metadata.name: Invalid"),
        (
            "merge",
            f"{NODES}/{NAME}",
            {"metadata": {"labels": {"a b": "c"}}},
            422,
            "is invalid: metadata.labels: Invalid value",
        ),
        (
            "merge",
            f"{NODES}/{NAME}",
            {"metadata": {"resourceVersion": "1"}},
            409,
            "the object has been modified; please apply your changes to the latest version",
        ),
        (
            "post",
            clusters.EVENTS,
            {"metadata": {"name": "e"}, "firstTimestamp": "noon"},
            400,
            'Event in version "v1" cannot be handled as a Event: parsing time "noon"',
        ),
        ("get", "/api/v1/nothing", None, 404, "the server could not find the requested resource"),
        *(
            ("post", clusters.BUDGETS, a_budget("odd", spec), 422, "is invalid: spec")
            for spec in (
                {"minAvailable": "half"},
                {"maxUnavailable": -1},
                {"minAvailable": 1, "maxUnavailable": 1},
                {"selector": {"matchExpressions": [{"key": "a", "operator": "Like"}]}},
            )
        ),
    ],
)  # fmt: skip
def test_a_refusal_has_the_same_status_and_words(
    kube: api.KubeApi,
    method: str,
    path: str,
    body: Mapping[str, object] | None,
    status: int,
    words: str,
) -> None:
    requests = {
        "get": functools.partial(kube.get, path),
        "post": functools.partial(kube.post, path, body or {}),
        "merge": functools.partial(kube.patch, path, body or {}, kind=api.PatchType.MERGE),
    }

    with pytest.raises(responses.ApiError) as raised:
        requests[method]()

    assert raised.value.status == status
    assert words in raised.value.explanation


def test_a_forbidden_request_is_reported_with_verb_and_resource(
    where: clusters.Cluster, tmp_path: pathlib.Path
) -> None:
    lame = clusters.SHIPPED.without(("", "pods", "list"))
    with where.admit(tmp_path, lame) as credentials:
        agent = api.KubeApi.connect(kubeconfig=str(credentials.agent))
        with pytest.raises(responses.ApiError) as raised:
            agent.get("/api/v1/pods")
        agent.close()

    assert raised.value.status == http.HTTPStatus.FORBIDDEN
    assert raised.value.reason is errors.Reason.FORBIDDEN
    assert raised.value.explanation.startswith('pods is forbidden: User "system:serviceaccount:')
    assert raised.value.explanation.endswith(
        'cannot list resource "pods" in API group "" at the cluster scope'
    )


def test_a_patch_that_changes_nothing_makes_no_new_version(kube: api.KubeApi) -> None:
    path, change = f"{NODES}/{NAME}", {"metadata": {"labels": {"a": "1", "b": None}}}
    before = kube.get(path)["metadata"]["resourceVersion"]

    after = kube.patch(path, change, kind=api.PatchType.MERGE)

    assert after["metadata"]["resourceVersion"] == before


def test_a_watch_delivers_what_came_after_its_version_and_only_of_its_node(
    kube: api.KubeApi,
) -> None:
    begun = kube.get(NODES)["metadata"]["resourceVersion"]
    kube.post(NODES, {"metadata": {"name": "another"}})
    kube.patch(f"{NODES}/{NAME}", {"metadata": {"labels": {"a": "2"}}}, kind=api.PatchType.MERGE)
    kube.delete(f"{NODES}/{NAME}")
    query = {"fieldSelector": f"metadata.name={NAME}", "resourceVersion": begun}
    with kube.watch(NODES, query=query, timeout_s=5, idle_timeout_s=10) as events:
        seen = [
            (event["type"], event["object"]["metadata"]) for event in itertools.islice(events, 2)
        ]

    assert [(kind, metadata["labels"]["a"]) for kind, metadata in seen] == [
        ("MODIFIED", "2"),
        ("DELETED", "2"),
    ]


def test_two_writers_of_taints_both_get_their_way(kube: api.KubeApi) -> None:
    ours = node.KubeNode(kube, name=NAME, clock=host.SystemClock())
    foreign = {"key": "example.com/flaky", "effect": "PreferNoSchedule"}
    kube.patch(f"{NODES}/{NAME}", {"spec": {"taints": [foreign]}}, kind=api.PatchType.MERGE)

    ours.update(lambda _view: cluster.NodePatch(hold_taint=True))
    taints = kube.get(f"{NODES}/{NAME}")["spec"]["taints"]
    ours.update(lambda _view: cluster.NodePatch(hold_taint=False))

    assert taints == [foreign, {"key": cluster.HOLD_TAINT, "effect": "NoSchedule"}]
    assert kube.get(f"{NODES}/{NAME}")["spec"]["taints"] == [foreign]


def test_an_event_is_found_by_its_node(kube: api.KubeApi) -> None:
    ours = node.KubeNode(kube, name=NAME, clock=host.SystemClock())

    ours.emit(reason="Applied", message="all is well", is_warning=False)
    assert ours.flush_events(30)

    query = {"fieldSelector": f"involvedObject.kind=Node,involvedObject.uid={NAME}"}
    (found,) = kube.get(clusters.EVENTS, query)["items"]
    assert (found["reason"], found["type"], found["count"]) == ("Applied", "Normal", 1)
