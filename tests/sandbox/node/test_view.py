from collections.abc import Iterator

import pytest

from mig_manager import errors
from mig_manager.adapters.kubernetes import api
from mig_manager.sandbox.node import cluster_view, manifests, objects
from testkit import apiserver
from tests.rigs import waiting

_POD = manifests.gpu_pod("p1", "nvidia.com/gpu")
_PATH = "/api/v1/namespaces/default/pods"


@pytest.fixture
def cluster(server: apiserver.ApiServer) -> Iterator[cluster_view.ClusterView]:
    with cluster_view.ClusterView(server.url) as result:
        yield result


def names(cluster: cluster_view.ClusterView) -> set[str]:
    return {objects.name(pod) for pod in cluster.list(cluster_view.WatchedKind.POD)}


def test_changes_by_others_are_visible_and_reported(
    cluster: cluster_view.ClusterView, kube: api.KubeApi
) -> None:
    reported: list[str] = []
    forget = cluster.listen(lambda _kind, obj: reported.append(objects.name(obj)))
    kube.post(_PATH, _POD)
    waiting.until(lambda: names(cluster) == {"p1"}, "the pods")
    kube.delete(f"{_PATH}/p1")
    waiting.until(lambda: not names(cluster), "the pods")
    forget()
    heard = len(reported)
    kube.post(_PATH, _POD)
    waiting.until(lambda: names(cluster) == {"p1"}, "the pods")

    assert set(reported) == {"p1"}
    assert len(reported) == heard


def test_our_own_writes_are_visible_at_once(cluster: cluster_view.ClusterView) -> None:
    for _ in range(20):
        cluster.create(cluster_view.WatchedKind.POD, _POD)
        (pod,) = cluster.list(cluster_view.WatchedKind.POD)
        cluster.patch_status(cluster_view.WatchedKind.POD, pod, manifests.running(pod, restarts=0))
        (pod,) = cluster.list(cluster_view.WatchedKind.POD)
        assert objects.is_ready(pod)
        cluster.delete(cluster_view.WatchedKind.POD, pod, now=True)
        assert not names(cluster)


def test_late_answer_does_not_restore_a_deleted_object(
    cluster: cluster_view.ClusterView, kube: api.KubeApi
) -> None:
    cluster.create(cluster_view.WatchedKind.POD, _POD)
    late = kube.patch(f"{_PATH}/p1", {"metadata": {"labels": {"a": "b"}}})
    kube.delete(f"{_PATH}/p1")
    waiting.until(lambda: not names(cluster), "the pods")

    cluster._put(cluster_view.WatchedKind.POD, late)

    assert names(cluster) == set()


def test_repeated_writes_and_writes_to_missing_objects_do_nothing(
    cluster: cluster_view.ClusterView,
) -> None:
    cluster.create(cluster_view.WatchedKind.POD, _POD)
    cluster.create(cluster_view.WatchedKind.POD, _POD)
    (pod,) = cluster.list(cluster_view.WatchedKind.POD)
    for node in ("n1", "n2"):
        cluster.bind(pod, node)
    (pod,) = cluster.list(cluster_view.WatchedKind.POD)
    assert objects.node_name(pod) == "n1"
    cluster.delete(cluster_view.WatchedKind.POD, pod, now=True)
    cluster.delete(cluster_view.WatchedKind.POD, pod, now=True)
    cluster.patch(cluster_view.WatchedKind.POD, pod, {"metadata": {"labels": {"a": "b"}}})
    cluster.bind(pod, "n1")

    assert not names(cluster)


def test_a_successor_of_the_same_name_is_not_deleted(
    cluster: cluster_view.ClusterView,
) -> None:
    cluster.create(cluster_view.WatchedKind.POD, _POD)
    (old,) = cluster.list(cluster_view.WatchedKind.POD)
    cluster.delete(cluster_view.WatchedKind.POD, old, now=True)
    cluster.create(cluster_view.WatchedKind.POD, _POD)
    cluster.delete(cluster_view.WatchedKind.POD, old, now=True)

    assert names(cluster) == {"p1"}


def test_a_refusal_that_no_earlier_write_explains_is_raised(
    server: apiserver.ApiServer, cluster: cluster_view.ClusterView
) -> None:
    server.inject(apiserver.Fault(method="POST", status=403))

    with pytest.raises(errors.ClusterError):
        cluster.create(cluster_view.WatchedKind.POD, _POD)
