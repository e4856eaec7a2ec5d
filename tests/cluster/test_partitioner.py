"""What the partitioner's token is worth on a real API server: a label, an annotation, a Lease."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import structlog.testing

from mig_manager.adapters import host
from mig_manager.adapters.kubernetes import api, events, leader, partitioner_cluster
from mig_manager.core.objects import well_known
from mig_manager.partitioner import announcer, demand_signal
from tests.rigs import api_objects, waiting
from tests.rigs.cluster import account_rights, api_servers, deploy_files
from tests.rigs.cluster.apirig import NODES, PODS
from tests.rigs.stage import clusters

pytestmark = pytest.mark.cluster

NAME = "mig-manager-partitioner"
ACCOUNT = account_rights.Account(namespace="mig-manager", name=NAME)
OPTED_IN, OTHER = "opted-in", "other"
LAYOUT = "{version: v1, mig-configs: {custom: [{devices: [0], mig-devices: {1g.5gb: 7}}]}}"
REQUEST = {
    "metadata": {
        "labels": {well_known.CONFIG_LABEL: well_known.CUSTOM_LAYOUT},
        "annotations": {well_known.LAYOUT_ANNOTATION: LAYOUT},
    }
}

Act = Callable[[api.KubeApi], Any]


def unheard() -> demand_signal.DemandSignal:
    return demand_signal.DemandSignal(quiet_s=1.0, max_s=1.0, clock=host.SystemClock())


@pytest.fixture(scope="module")
def kube(
    real_cluster: api_servers.EnvtestCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[api.KubeApi]:
    """The API as the partitioner's account has it, with the shipped rights and policy."""
    folder = tmp_path_factory.mktemp("partitioner")
    people = real_cluster.kube
    shipped = deploy_files.manifest_objects("partitioner/partitioner.yaml")
    made = [each for each in shipped if each["kind"] != "Deployment"]
    for obj in made:
        people.post(deploy_files.collection(obj), obj)
    for name, node_labels in (
        (OPTED_IN, {well_known.PARTITIONING_LABEL: well_known.ON_DEMAND}),
        (OTHER, {}),
    ):
        people.post(NODES, {"metadata": {"name": name, "labels": node_labels}})
    path = real_cluster.kubeconfig(folder / "kubeconfig", ACCOUNT)
    with contextlib.closing(api.KubeApi.connect(kubeconfig=str(path))) as client:
        # Roles and policies become active a moment after their creation.
        waiting.until(lambda: is_admitted(client, patching(REQUEST)), "the partitioner's rights")
        waiting.until(
            lambda: bool(clusters.refusal(lambda: patching({}, OTHER)(client))), "the policy"
        )
        yield client
    real_cluster.clear()
    for obj in made:
        people.delete(f"{deploy_files.collection(obj)}/{NAME}")


def is_admitted(kube: api.KubeApi, act: Act) -> bool:
    with contextlib.suppress(Exception):
        act(kube)
        return True
    return False


def patching(change: api_objects.Object, name: str = OPTED_IN) -> Act:
    return lambda kube: kube.patch(f"{NODES}/{name}", change)


def labels(**values: str | None) -> api_objects.Object:
    return {"metadata": {"labels": values}}


def annotations(**values: str | None) -> api_objects.Object:
    return {"metadata": {"annotations": values}}


def publishing(kind: str, name: str = "x", **metadata: object) -> Act:
    event = {
        "metadata": {"generateName": "test-", **metadata},
        "involvedObject": {"apiVersion": "v1", "kind": kind, "name": name, "namespace": "default"},
        "reason": "Test",
    }
    return lambda kube: kube.post(api_servers.EVENTS, event)


def test_the_shipped_rights_are_enough_for_its_work(kube: api.KubeApi) -> None:
    of_claims = "/apis/resource.k8s.io/v1"
    devices = [f"{of_claims}/{each}" for each in ("deviceclasses", "resourceslices")]
    for path in (NODES, "/api/v1/pods", *devices, f"{of_claims}/resourceclaims"):
        assert kube.get(path)["items"] is not None
        query: dict[str, str] = {}
        kube.watch(path, query=query, timeout_s=1, idle_timeout_s=5).__exit__()
    written = patching(REQUEST)(kube)
    assert written["metadata"]["labels"][well_known.CONFIG_LABEL] == well_known.CUSTOM_LAYOUT
    assert written["metadata"]["annotations"][well_known.LAYOUT_ANNOTATION] == LAYOUT
    assert publishing("Pod")(kube)["reason"] == "Test"
    candidate = leader.Leader(
        kube,
        namespace=ACCOUNT.namespace,
        name=NAME,
        identity="a",
        duration_s=60,
        clock=host.SystemClock(),
    )
    assert candidate.campaign()
    cluster = partitioner_cluster.PartitionerCluster(
        kube, clock=host.SystemClock(), reporter="a", listener=unheard()
    )
    with structlog.testing.capture_logs() as logs:
        assert announcer.Announcer(cluster, candidate, host.SystemClock()).announce("Test", "sums")
    assert logs == []
    candidate.release()
    lease = kube.get(f"{api_servers.LEASES}/{NAME}")
    assert not lease["spec"].get("holderIdentity")


@pytest.mark.parametrize("last", ["-", ".", "b"])
def test_events_about_pods_with_the_longest_names_are_accepted(
    kube: api.KubeApi, last: str
) -> None:
    name = f"{'a' * 219}{last}{'c' * 33}"
    subject = events.EventSubject(kind="Pod", name=name, namespace="default", uid="u")
    event = events.Event(
        subject=subject, reason="NoRoomPossible", message="é" * 4000, is_warning=True
    )
    port = partitioner_cluster.PartitionerCluster(
        kube,
        clock=host.SystemClock(),
        reporter="p" * 253 + "_0",
        listener=unheard(),
    )

    for _ in range(2):
        port.publish(event, about=last)


@pytest.mark.parametrize(
    ("words", "acts"),
    [
        (
            "only nodes with the label mig-manager.io/partitioning=on-demand",
            [patching(REQUEST, OTHER), patching(annotations(**{"a.b/c": "d"}), OTHER)],
        ),
        (
            "may set nvidia.com/mig.config to custom",
            [
                patching(labels(**{well_known.CONFIG_LABEL: "all-1g.5gb"})),
                patching(labels(**{well_known.CONFIG_LABEL: None})),
                patching(labels(**{well_known.STATE_LABEL: "success"})),
                patching(labels(**{well_known.PARTITIONING_LABEL: None})),
                patching(labels(**{"example.com/rack": "7"})),
            ],
        ),
        (
            "may set mig-manager.io/layout",
            [
                patching(annotations(**{well_known.LAYOUT_ANNOTATION: None})),
                patching(annotations(**{well_known.JOURNAL_ANNOTATION: "{}"})),
                patching(annotations(**{"example.com/owner": "me"})),
            ],
        ),
        (
            "one label and one annotation of a node, and nothing else",
            [
                patching({"spec": {"unschedulable": True}}),
                patching({"spec": {"taints": [{"key": "a", "effect": "NoExecute"}]}}),
                patching({"spec": {"providerID": "cloud://1"}}),
                patching({"metadata": {"finalizers": ["example.com/keep"]}}),
            ],
        ),
        (
            "writes plain Events about nodes, pods and its own Lease alone",
            [
                publishing("Namespace"),
                publishing("Lease"),
                publishing("Secret", NAME),
                publishing("Pod", finalizers=["example.com/keep"]),
            ],
        ),
        (
            "writes its own Lease alone",
            [
                lambda kube: kube.post(api_servers.LEASES, {"metadata": {"name": "other"}}),
                lambda kube: kube.post(
                    api_servers.LEASES, {"metadata": {"name": NAME, "finalizers": ["a.b/keep"]}}
                ),
            ],
        ),
    ],
)
def test_the_policy_refuses_all_but_the_request_for_a_custom_layout(
    kube: api.KubeApi, words: str, acts: list[Act]
) -> None:
    patching(REQUEST)(kube)
    for act in acts:
        assert words in clusters.refusal(functools.partial(act, kube))


@pytest.mark.parametrize(
    "act",
    [
        lambda kube: kube.get(f"{NODES}/{OPTED_IN}"),
        lambda kube: kube.delete(f"{NODES}/{OPTED_IN}"),
        lambda kube: kube.patch(f"{NODES}/{OPTED_IN}/status", {"status": {}}),
        lambda kube: kube.get("/api/v1/namespaces/default/secrets"),
        lambda kube: kube.post(f"{PODS}/x/eviction", {"metadata": {"name": "x"}}),
        lambda kube: kube.delete(f"{PODS}/x"),
        lambda kube: kube.get(api_servers.LEASES),
        lambda kube: kube.get(f"{api_servers.LEASES}/other"),
    ],
)
def test_the_role_grants_nothing_else(kube: api.KubeApi, act: Act) -> None:
    with pytest.raises(Exception, match="403"):
        act(kube)
