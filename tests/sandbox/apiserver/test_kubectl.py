"""The real kubectl and the embedded API server, beyond the workflow of tests/shell/plugin."""

import json
import pathlib
import shutil
from collections.abc import Callable, Iterator

import pytest

from mig_manager.sandbox.apiserver import kinds, store
from testkit import apiserver
from tests.rigs import api_objects, programs

KUBECTL = shutil.which("kubectl")

Kubectl = Callable[..., str]


@pytest.fixture
def server() -> Iterator[apiserver.ApiServer]:
    """A server with a node and a pod, where pods end as soon as they are asked to."""
    if KUBECTL is None:
        pytest.skip("kubectl is not installed")
    with apiserver.serve() as running:
        running.create(api_objects.a_node("n1"), api_objects.a_pod("p1", {"app": "x"}))

        def follow(record: store.Record) -> None:
            if record.key[0] == "pods" and "deletionTimestamp" in record.obj["metadata"]:
                running.store.remove(record.key)

        running.store.subscribe(follow)
        yield running


@pytest.fixture
def kubectl(server: apiserver.ApiServer, tmp_path: pathlib.Path) -> Kubectl:
    kubeconfig = str(server.kubeconfig(tmp_path / "kubeconfig"))

    def run(*arguments: str, fails: bool = False) -> str:
        done = programs.run(str(KUBECTL), *arguments, cwd=tmp_path, KUBECONFIG=kubeconfig)
        assert (done.returncode != 0) is fails, done.stderr
        return done.stderr if fails else done.stdout

    return run


def test_objects_are_shown_as_tables_with_all_columns(kubectl: Kubectl) -> None:
    assert kubectl("get", "nodes").split()[:8] == [
        "NAME", "STATUS", "ROLES", "AGE", "VERSION", "n1", "Ready", "<none>",
    ]  # fmt: skip
    head, line = kubectl("get", "pods", "-A", "-o", "wide").splitlines()
    assert head.split() == [
        "NAMESPACE", "NAME", "READY", "STATUS", "RESTARTS", "AGE", "IP", "NODE",
    ]  # fmt: skip
    assert line.split()[:5] == ["default", "p1", "1/1", "Running", "2"]
    assert kubectl("get", "all", "--output=name") == "pod/p1\n"
    assert 'nodes "n2" not found' in kubectl("get", "node", "n2", fails=True)


def test_a_pod_is_created_and_deleted(
    kubectl: Kubectl, server: apiserver.ApiServer, tmp_path: pathlib.Path
) -> None:
    manifest = tmp_path / "pod.json"
    manifest.write_text(json.dumps(api_objects.a_pod("p2")))

    assert kubectl("create", "-f", str(manifest)) == "pod/p2 created\n"
    assert "AlreadyExists" in kubectl("create", "-f", str(manifest), fails=True)
    assert "deleted" in kubectl("delete", "pod", "p2")
    assert [each["metadata"]["name"] for each in server.objects(kinds.PODS)] == ["p1"]


def test_a_node_is_drained_tainted_and_restored(
    kubectl: Kubectl, server: apiserver.ApiServer
) -> None:
    assert "pod/p1 evicted" in kubectl("drain", "n1", "--force")
    assert server.log.count("create", "pods/eviction") == 1
    assert server.get(kinds.NODES, "n1")["spec"]["unschedulable"] is True

    kubectl("taint", "node", "n1", "a=b:NoSchedule")
    kubectl("uncordon", "n1")

    spec = server.get(kinds.NODES, "n1")["spec"]
    assert spec["taints"] == [{"key": "a", "value": "b", "effect": "NoSchedule"}]
    assert not spec.get("unschedulable")
