"""What the agent reads in the API's answers, from the embedded server and from a real one."""

import dataclasses
import itertools
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from mig_manager.adapters import host
from mig_manager.adapters.kubernetes import api, kube_node, lease_slots, pods, responses
from mig_manager.core.node import eviction_rules
from mig_manager.core.objects import pod_object, well_known
from tests.rigs import api_objects, waiting
from tests.rigs.cluster import account_rights, api_servers
from tests.rigs.cluster.apirig import NODES, PODS

NAME = "answering"
OTHERS_UID = "00000000-0000-0000-0000-000000000000"


@pytest.fixture
def kube(where: api_servers.Cluster, tmp_path: pathlib.Path) -> Iterator[api.KubeApi]:
    with where.admit(tmp_path, account_rights.SHIPPED) as credentials:
        people = api.KubeApi.connect(kubeconfig=str(credentials.people))
        people.post(NODES, {"metadata": {"name": NAME, "labels": {"a": "1"}}})
        yield people
        people.close()


@pytest.fixture
def workloads(kube: api.KubeApi) -> pods.KubeWorkloads:
    return pods.KubeWorkloads(kube, node_name=NAME, clock=host.SystemClock())


def create(
    kube: api.KubeApi, workloads: pods.KubeWorkloads, name: str = "train"
) -> pod_object.Pod:
    spec = {"nodeName": NAME, "containers": [{"name": "main", "image": "app:1"}]}
    kube.post(PODS, {"metadata": {"name": name, "labels": {"app": "train"}}, "spec": spec})
    running = {"status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}}
    kube.patch(f"{PODS}/{name}/status", running)
    return next(pod for pod in workloads.list() if pod.name == name)


@pytest.fixture
def pod(kube: api.KubeApi, workloads: pods.KubeWorkloads) -> pod_object.Pod:
    """Run a pod that a budget may select by ``app=train``."""
    return create(kube, workloads)


def add_budget(
    where: api_servers.Cluster, kube: api.KubeApi, name: str, spec: Mapping[str, object]
) -> None:
    kube.post(api_servers.BUDGETS, a_budget(name, spec))
    where.count_disruptions(kube, name)


def a_budget(name: str, spec: Mapping[str, object]) -> api_objects.Object:
    return {"metadata": {"name": name}, "spec": spec}


def at_most(allowed: int) -> api_objects.Object:
    return {"maxUnavailable": allowed, "selector": {"matchLabels": {"app": "train"}}}


# -- pods and their budgets -------------------------------------------------------------------


@pytest.mark.parametrize("is_eviction", [True, False], ids=["evicted", "deleted"])
def test_a_pod_that_is_evicted_or_deleted_stops_within_its_grace_period(
    kube: api.KubeApi, workloads: pods.KubeWorkloads, pod: pod_object.Pod, *, is_eviction: bool
) -> None:
    namesake = dataclasses.replace(pod, uid=OTHERS_UID)
    assert workloads.can_evict(pod).answer is eviction_rules.EvictionAnswer.ACCEPTED
    assert workloads.evict(namesake).answer is eviction_rules.EvictionAnswer.GONE
    workloads.delete(namesake)
    (listed_pod,) = workloads.list()
    assert not listed_pod.is_terminating

    if is_eviction:
        assert workloads.evict(pod).answer is eviction_rules.EvictionAnswer.ACCEPTED
    else:
        workloads.delete(pod)

    (listed_pod,) = workloads.list()
    assert listed_pod.is_terminating
    assert kube.get(f"{PODS}/train")["metadata"]["deletionGracePeriodSeconds"] == 30


def test_the_eviction_of_a_pod_that_has_gone_is_done(
    kube: api.KubeApi, workloads: pods.KubeWorkloads, pod: pod_object.Pod
) -> None:
    kube.delete(f"{PODS}/train", {"gracePeriodSeconds": 0})

    assert workloads.evict(pod).answer is eviction_rules.EvictionAnswer.GONE
    workloads.delete(pod)
    assert workloads.list() == ()


def test_a_bound_pod_does_not_stay_unschedulable(kube: api.KubeApi) -> None:
    spec = {"containers": [{"name": "main", "image": "app:1"}], "schedulerName": "another"}
    refused = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    kube.post(PODS, {"metadata": {"name": "train"}, "spec": spec})
    kube.patch_lists(f"{PODS}/train/status", {"status": {"conditions": [refused]}})

    target = {"apiVersion": "v1", "kind": "Node", "name": NAME}
    kube.post(f"{PODS}/train/binding", {"metadata": {"name": "train"}, "target": target})

    (condition,) = kube.get(f"{PODS}/train")["status"]["conditions"]
    assert (condition["type"], condition["status"]) == ("PodScheduled", "True")
    assert not condition.get("reason")


@pytest.mark.parametrize(
    ("budgets", "phase", "words"),
    [
        (
            {"guard": 0},
            "Running",
            (
                "Cannot evict pod as it would violate the pod's disruption budget.",
                "The disruption budget guard needs",
            ),
        ),
        ({"one": 1, "other": 1}, "Running", ("This pod has more than one PodDisruptionBudget",)),
        *(({"one": 0, "other": 0}, phase, ()) for phase in ("Pending", "Succeeded", "Failed")),
    ],
)
def test_budgets_block_the_eviction_of_a_running_pod_and_are_named(
    where: api_servers.Cluster,
    kube: api.KubeApi,
    workloads: pods.KubeWorkloads,
    budgets: Mapping[str, int],
    phase: str,
    words: tuple[str, ...],
) -> None:
    pod = create(kube, workloads)
    change = {"status": {"phase": phase}}
    kube.patch(f"{PODS}/train/status", change)
    for name, allowed in budgets.items():
        add_budget(where, kube, name, at_most(allowed))

    for ask in (workloads.can_evict, workloads.evict):
        verdict = ask(pod)
        assert (verdict.answer is eviction_rules.EvictionAnswer.BLOCKED) is bool(words)
        assert [text for text in words if text not in verdict.why] == []


def test_a_dry_run_does_not_use_up_a_budget_and_an_eviction_does(
    where: api_servers.Cluster, kube: api.KubeApi, workloads: pods.KubeWorkloads
) -> None:
    one, other = create(kube, workloads, "one"), create(kube, workloads, "other")
    add_budget(where, kube, "guard", at_most(1))
    where.count_disruptions(kube, "guard", 1)

    for pod in (one, other, one):
        assert workloads.can_evict(pod).answer is eviction_rules.EvictionAnswer.ACCEPTED
    (before,) = workloads.budgets({"default"})
    assert workloads.evict(one).answer is eviction_rules.EvictionAnswer.ACCEPTED
    assert workloads.evict(other).answer is eviction_rules.EvictionAnswer.BLOCKED

    (after,) = workloads.budgets({"default"})
    assert (before.allowed, after.allowed) == (1, 0)
    assert before.is_current
    assert {pod.name for pod in workloads.covered_by(after)} == {"one", "other"}


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
    where: api_servers.Cluster,
    kube: api.KubeApi,
    workloads: pods.KubeWorkloads,
    pod: pod_object.Pod,
    selector: api_objects.Object | None,
    *,
    is_guarded: bool,
) -> None:
    spec = {"maxUnavailable": 0} | ({} if selector is None else {"selector": selector})
    add_budget(where, kube, "guard", spec)

    (budget,) = workloads.budgets({"default"})

    assert budget.covers(pod) is is_guarded
    assert (workloads.can_evict(pod).answer is eviction_rules.EvictionAnswer.BLOCKED) is is_guarded
    assert bool(workloads.covered_by(budget)) is is_guarded


@pytest.mark.parametrize(
    ("driver", "may_be_gpu"), [("nic.example.com", False), (well_known.GPU_CLAIM_DRIVER, True)]
)
def test_the_driver_of_a_pods_claim_is_read(
    kube: api.KubeApi, workloads: pods.KubeWorkloads, driver: str, *, may_be_gpu: bool
) -> None:
    path = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"
    request = {"name": "r", "exactly": {"deviceClassName": "some"}}
    kube.post(path, {"metadata": {"name": "claim"}, "spec": {"devices": {"requests": [request]}}})
    result = {"request": "r", "driver": driver, "pool": "p", "device": "d"}
    status = {"status": {"allocation": {"devices": {"results": [result]}}}}
    kube.patch(f"{path}/claim/status", status)
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


def test_a_list_of_pods_comes_page_by_page_and_of_one_node_only(
    kube: api.KubeApi, workloads: pods.KubeWorkloads
) -> None:
    for name in ("one", "three", "two"):
        create(kube, workloads, name)
    unbound = {"containers": [{"name": "main", "image": "app:1"}]}
    kube.post(PODS, {"metadata": {"name": "unbound"}, "spec": unbound})

    query = {"fieldSelector": f"spec.nodeName={NAME}", "limit": "2"}
    first = kube.get("/api/v1/pods", query)
    second = kube.get("/api/v1/pods", query | {"continue": first["metadata"]["continue"]})

    pages = [[each["metadata"]["name"] for each in page["items"]] for page in (first, second)]
    assert pages == [["one", "three"], ["two"]]
    assert not second["metadata"].get("continue")


# -- refusals ---------------------------------------------------------------------------------


def item(name: str = NAME, **metadata: object) -> api_objects.Object:
    return {"metadata": {"name": name, **metadata}}


def a_lease(**spec: object) -> api_objects.Object:
    return item("odd") | {"spec": spec}


LABELS, ANNOTATIONS = "is invalid: metadata.labels: Invalid", "is invalid: metadata.annotations: "
ELSEWHERE = f"/api/v1/namespaces/{account_rights.MANAGER.namespace}/events"
REFUSALS: list[tuple[str, str, object, int, str]] = [
    ("get", f"{NODES}/none", {}, 404, 'nodes "none" not found'),
    ("get", "/api/v1/nothing", {}, 404, "the server could not find the requested resource"),
    ("get", f"{NODES}/{NAME}/eviction", {}, 404, ""),
    ("get", "/apis/apps/v2/daemonsets", {}, 404, ""),
    ("get", f"{PODS}/train/eviction", {}, 405, ""),
    ("post", f"{NODES}/{NAME}", {}, 405, ""),
    ("post", "/api/v1/pods", {}, 405, ""),
    # -- names, kinds and types ---------------------------------------------------------------
    ("post", NODES, item(), 409, f'nodes "{NAME}" already exists'),
    ("post", NODES, item("A"), 422, "is invalid: metadata.name: Invalid"),
    ("post", NODES, item(""), 422, "is invalid: metadata.name: Required value"),
    ("post", NODES, item("b") | {"kind": "Pod"}, 400, ""),
    ("post", NODES, item("b") | {"spec": 3}, 400, ""),
    ("post", NODES, item("b", labels={"a": 1}), 400, ""),
    ("post", NODES, [], 400, ""),
    ("post", PODS, item("p", namespace="other"), 400, ""),
    ("post", f"{PODS}/p1/eviction", item("p2"), 400, ""),
    ("put", f"{NODES}/{NAME}", item("b"), 400, ""),
    ("patch", f"{NODES}/{NAME}", item("b"), 400, ""),
    ("patch", f"{NODES}/{NAME}", [], 400, ""),
    ("patch", f"{NODES}/{NAME}", item(resourceVersion="1"), 409, "please apply your changes to"),
    # -- labels, annotations and taints -------------------------------------------------------
    ("patch", f"{NODES}/{NAME}", item(labels={"a b": "c"}), 422, LABELS),
    ("patch", f"{NODES}/{NAME}", item(labels={"a": "all 1g"}), 422, "a valid label"),
    ("patch", f"{NODES}/{NAME}", item(labels={"a": "x" * 64}), 422, LABELS),
    ("patch", f"{NODES}/{NAME}", item(labels={"x" * 64: "a"}), 422, LABELS),
    ("patch", f"{NODES}/{NAME}", item(labels={"no/two/slashes": "x"}), 422, LABELS),
    ("patch", f"{NODES}/{NAME}", item(labels={"a/": "x"}), 422, "name part must be non-empty"),
    ("patch", f"{NODES}/{NAME}", item(annotations={"a b": "x"}), 422, ANNOTATIONS),
    ("patch", f"{NODES}/{NAME}", item(annotations={"a": "x" * 270_000}), 422, ANNOTATIONS),
    (
        "patch",
        f"{NODES}/{NAME}",
        {"spec": {"taints": [{"key": "a"}]}},
        422,
        "metadata.taints[0].effect: Required value",
    ),
    (
        "patch",
        f"{NODES}/{NAME}",
        {"spec": {"taints": [{"key": "a", "effect": "Sometimes"}]}},
        422,
        "metadata.taints[0].effect: Unsupported value",
    ),
    (
        "patch",
        f"{NODES}/{NAME}",
        {"spec": {"taints": [{"key": "a", "effect": "NoSchedule"}] * 2}},
        422,
        "metadata.taints[1]: Duplicate value",
    ),
    # -- Events, Leases and budgets -----------------------------------------------------------
    (
        "post",
        api_servers.EVENTS,
        item("e") | {"firstTimestamp": "noon"},
        400,
        'Event in version "v1" cannot be handled as a Event: parsing time "noon"',
    ),
    ("post", ELSEWHERE, item("e") | {"involvedObject": {"kind": "Node", "name": "n"}}, 422, ""),
    (
        "post",
        ELSEWHERE,
        item("e") | {"involvedObject": {"kind": "Pod", "name": "p", "namespace": "default"}},
        422,
        "does not match event.namespace",
    ),
    ("post", api_servers.LEASES, a_lease(renewTime="2026-01-02T03:04:05Z"), 400, ""),
    ("post", api_servers.LEASES, a_lease(leaseDurationSeconds="15"), 400, ""),
    ("post", api_servers.LEASES, a_lease(leaseDurationSeconds=0), 422, "must be greater than 0"),
    (
        "post",
        api_servers.LEASES,
        a_lease(leaseTransitions=-1),
        422,
        "must be greater than or equal",
    ),
    *(
        ("post", api_servers.BUDGETS, a_budget("odd", spec), 422, "is invalid: spec")
        for spec in (
            {"minAvailable": "half"},
            {"maxUnavailable": -1},
            {"minAvailable": 1, "maxUnavailable": 1},
            {"selector": {"matchExpressions": [{"key": "a", "operator": "Like"}]}},
        )
    ),
]
"""Method, path, body, and the answer's status and words."""


def test_refusals_have_the_same_status_and_words(kube: api.KubeApi) -> None:
    calls: dict[str, Callable[..., object]] = {
        "get": kube.get,
        "post": kube.post,
        "put": kube.put,
        "patch": kube.patch,
    }
    for method, path, body, status, words in REFUSALS:
        with pytest.raises(responses.ApiError) as raised:
            calls[method](path, body)

        explanation = raised.value.explanation
        is_same = raised.value.status == status and words in explanation
        assert is_same, (method, path, body, raised.value.status, explanation)


# -- nodes ------------------------------------------------------------------------------------


def test_a_patch_that_changes_nothing_makes_no_new_version(kube: api.KubeApi) -> None:
    path, change = f"{NODES}/{NAME}", {"metadata": {"labels": {"a": "1", "b": None}}}
    before = kube.get(path)["metadata"]["resourceVersion"]

    after = kube.patch(path, change)

    assert after["metadata"]["resourceVersion"] == before


def test_a_watch_delivers_what_came_after_its_version_and_only_of_its_node(
    kube: api.KubeApi,
) -> None:
    begun = kube.get(NODES)["metadata"]["resourceVersion"]
    kube.post(NODES, {"metadata": {"name": "another"}})
    kube.patch(f"{NODES}/{NAME}", {"metadata": {"labels": {"a": "2"}}})
    kube.delete(f"{NODES}/{NAME}")
    query = {"fieldSelector": f"metadata.name={NAME}", "resourceVersion": begun}
    with kube.watch(NODES, query=query, timeout_s=5, idle_timeout_s=10) as events:
        changes = [
            (event["type"], event["object"]["metadata"]) for event in itertools.islice(events, 2)
        ]

    assert [(kind, metadata["labels"]["a"]) for kind, metadata in changes] == [
        ("MODIFIED", "2"),
        ("DELETED", "2"),
    ]


def test_kubectl_describe_node_shows_the_event(kube: api.KubeApi) -> None:
    node_port = kube_node.KubeNode(kube, name=NAME, clock=host.SystemClock())

    node_port.emit(reason="Applied", message="all is well", is_warning=False)
    assert node_port.flush_events(30)

    # The query of kubectl's describe: by name, kind and the node's NAME in place of its uid.
    selector = (
        f"involvedObject.name={NAME},involvedObject.kind=Node,involvedObject.uid={NAME},"
        "involvedObject.namespace="
    )
    (event,) = kube.get("/api/v1/events", {"fieldSelector": selector})["items"]
    assert event["metadata"]["namespace"] == "default"
    assert (event["reason"], event["message"]) == ("Applied", "all is well")
    assert (event["type"], event["count"]) == ("Normal", 1)
    assert event["source"]["component"] == event["reportingComponent"] == "mig-manager"
    assert event["firstTimestamp"] == event["lastTimestamp"]


def test_slots_are_acquired_renewed_and_released_over_the_api(kube: api.KubeApi) -> None:
    first, second = (
        lease_slots.LeaseSlots(
            kube,
            namespace=account_rights.MANAGER.namespace,
            node_name=name,
            limit=1,
            clock=host.SystemClock(),
            renew_s=0.05,
        )
        for name in ("a", "b")
    )

    def slot() -> Mapping[str, Any]:
        (lease,) = kube.get(api_servers.LEASES)["items"]
        spec: Mapping[str, Any] = lease["spec"]
        return spec

    assert first.take() is None
    assert "under change now: a" in str(second.take())
    before = slot()["renewTime"]
    waiting.until(lambda: slot()["renewTime"] > before, "a renewal")
    first.release()
    assert second.take() is None
    assert slot()["leaseTransitions"] == 1
    second.release()
