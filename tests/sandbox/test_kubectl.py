"""The real kubectl against the embedded Kubernetes API."""

import json
import os
import pathlib
import shutil
import subprocess
from collections.abc import Callable, Iterator

import pytest

from mig_manager.sandbox.apiserver import resources, store
from testkit import apiserver
from tests.sandbox import apirig

KUBECTL = shutil.which("kubectl")
TIMEOUT_S = 30

Kubectl = Callable[..., str]


@pytest.fixture(scope="module")
def discovery_cache(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("discovery")


@pytest.fixture
def server() -> Iterator[apiserver.ApiServer]:
    if KUBECTL is None:
        pytest.skip("kubectl is not installed")
    with apiserver.serve() as running:
        running.store.create(apirig.a_node("n1"))
        running.store.create(apirig.a_pod("p1", app="x"))
        yield running


@pytest.fixture
def kubectl(
    server: apiserver.ApiServer, tmp_path: pathlib.Path, discovery_cache: pathlib.Path
) -> Kubectl:
    environment = {
        "HOME": str(tmp_path),
        "KUBECONFIG": str(server.kubeconfig(tmp_path / "kubeconfig")),
        "PATH": os.environ["PATH"],
    }

    def run(*arguments: str, fails: bool = False) -> str:
        done = subprocess.run(  # noqa: S603 - the arguments are this file's own
            [str(KUBECTL), "--cache-dir", str(discovery_cache), *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert (done.returncode != 0) is fails, done.stderr
        return done.stderr if fails else done.stdout

    return run


@pytest.fixture
def obedient_kubelet(server: apiserver.ApiServer) -> Iterator[None]:
    """Let pods go as soon as they are asked to."""

    def follow(record: store.Record) -> None:
        if record.key[0] == "pods" and "deletionTimestamp" in record.obj["metadata"]:
            server.store.remove(record.key)

    unsubscribe = server.store.subscribe(follow)
    yield
    unsubscribe()


def test_nodes_and_pods_are_shown_as_tables(kubectl: Kubectl) -> None:
    assert kubectl("get", "nodes").split()[:8] == [
        "NAME", "STATUS", "ROLES", "AGE", "VERSION", "n1", "Ready", "<none>",
    ]  # fmt: skip
    wide = kubectl("get", "pods", "-A", "-o", "wide").splitlines()
    assert wide[0].split()[:8] == [
        "NAMESPACE", "NAME", "READY", "STATUS", "RESTARTS", "AGE", "IP", "NODE",
    ]  # fmt: skip
    assert wide[1].split()[:5] == ["default", "p1", "1/1", "Running", "2"]


def test_an_object_can_be_read_in_every_output_format(kubectl: Kubectl) -> None:
    assert json.loads(kubectl("get", "node", "n1", "-o", "json"))["kind"] == "Node"
    assert "kind: Node" in kubectl("get", "no", "n1", "-o", "yaml")
    label = "jsonpath={.metadata.labels.kubernetes\\.io/hostname}"
    assert kubectl("get", "node/n1", "-o", label) == "n1"
    assert kubectl("get", "pods", "-l", "app=x", "-o", "name") == "pod/p1\n"
    assert 'nodes "n2" not found' in kubectl("get", "node", "n2", fails=True)


def test_labels_are_set_overwritten_and_removed(
    kubectl: Kubectl, server: apiserver.ApiServer
) -> None:
    def value() -> str | None:
        labels = server.get(resources.NODES, "n1")["metadata"]["labels"]
        return labels.get("nvidia.com/mig.config")  # type: ignore[no-any-return]

    kubectl("label", "node", "n1", "nvidia.com/mig.config=all-1g.5gb")
    assert value() == "all-1g.5gb"
    kubectl("label", "node", "n1", "nvidia.com/mig.config=all-disabled", fails=True)
    kubectl("label", "node", "n1", "nvidia.com/mig.config=all-disabled", "--overwrite")
    assert value() == "all-disabled"
    kubectl("label", "node", "n1", "nvidia.com/mig.config-")
    assert value() is None


def test_a_wait_ends_when_the_label_is_there(
    kubectl: Kubectl, server: apiserver.ApiServer
) -> None:
    def answer(record: store.Record) -> None:
        labels = record.obj["metadata"].get("labels") or {}
        if record.key[0] == "nodes" and labels.get("layout") and "applied" not in labels:
            server.modify(
                resources.NODES,
                "n1",
                lambda node: node["metadata"]["labels"].update({"applied": labels["layout"]}),
            )

    server.store.subscribe(answer)
    kubectl("label", "node", "n1", "layout=balanced")

    output = kubectl("wait", "node/n1", "--for=jsonpath={.metadata.labels.applied}=balanced")

    assert "condition met" in output
    assert "condition met" in kubectl("wait", "pod/p1", "--for=condition=Ready")
    expired = kubectl("wait", "pod/p1", "--for=condition=Other", "--timeout=1s", fails=True)
    assert "timed out" in expired


def test_a_node_is_described_with_its_pods_and_events(
    kubectl: Kubectl, server: apiserver.ApiServer
) -> None:
    server.store.create(
        {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": "n1.1"},
            "involvedObject": {
                "apiVersion": "v1",
                "kind": "Node",
                "name": "n1",
                "uid": "n1",
            },
            "reason": "Applied",
            "message": "layout all-1g.5gb is active",
            "type": "Normal",
            "count": 1,
            "lastTimestamp": store.timestamp(),
        }
    )

    described = kubectl("describe", "node", "n1")

    assert "p1" in described
    assert "layout all-1g.5gb is active" in described
    assert "node/n1" in kubectl("get", "events")
    assert "Applied" in kubectl("events", "--for", "node/n1")


@pytest.mark.usefixtures("obedient_kubelet")
def test_a_pod_is_created_and_deleted(
    kubectl: Kubectl, server: apiserver.ApiServer, tmp_path: pathlib.Path
) -> None:
    manifest = tmp_path / "pod.json"
    manifest.write_text(json.dumps(apirig.a_pod("p2")))

    assert kubectl("create", "-f", str(manifest)) == "pod/p2 created\n"
    assert "AlreadyExists" in kubectl("create", "-f", str(manifest), fails=True)
    assert "deleted" in kubectl("delete", "pod", "p2")

    assert not server.store.find(resources.PODS, "p2", "default")


@pytest.mark.usefixtures("obedient_kubelet")
def test_a_node_is_cordoned_drained_tainted_and_restored(
    kubectl: Kubectl, server: apiserver.ApiServer
) -> None:
    kubectl("cordon", "n1")
    assert server.get(resources.NODES, "n1")["spec"]["unschedulable"] is True

    drained = kubectl("drain", "n1", "--force")
    assert "pod/p1 evicted" in drained
    assert server.log.count("create", "pods/eviction") == 1

    kubectl("taint", "node", "n1", "a=b:NoSchedule")
    kubectl("uncordon", "n1")
    spec = server.get(resources.NODES, "n1")["spec"]
    assert spec["taints"] == [{"key": "a", "value": "b", "effect": "NoSchedule"}]
    assert not spec.get("unschedulable")


def test_access_can_be_asked_for(kubectl: Kubectl) -> None:
    assert kubectl("auth", "can-i", "patch", "nodes") == "yes\n"
    assert "system:anonymous" in kubectl("auth", "whoami")
