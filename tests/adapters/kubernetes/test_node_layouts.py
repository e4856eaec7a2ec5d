"""The ConfigMap with the layouts of one node, on the embedded API server."""

import dataclasses
from typing import Any

import pytest
import structlog.testing

from mig_manager.adapters.kubernetes import api, node_layouts
from mig_manager.sandbox.apiserver import kinds
from testkit import apiserver
from tests.rigs.node import fakes

NAMESPACE = "gpu-operator"
POD = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "agent-1", "namespace": NAMESPACE},
    "spec": {"containers": [{"name": "agent", "image": "agent"}]},
}


@dataclasses.dataclass
class LayoutsRig:
    server: apiserver.ApiServer
    kube: api.KubeApi
    clock: fakes.FakeClock = dataclasses.field(default_factory=fakes.FakeClock)

    def agent(self, pod: str, uid: str | None = None) -> node_layouts.KubeNodeLayouts:
        return node_layouts.KubeNodeLayouts(
            self.kube,
            self.clock,
            node_name="node-a",
            namespace=NAMESPACE,
            pod_name=pod,
            pod_uid=uid,
        )

    def config_maps(self) -> list[dict[str, Any]]:
        return list(self.server.objects(kinds.CONFIG_MAPS, NAMESPACE))

    def count(self) -> int:
        return self.server.log.count("create", "configmaps")


@pytest.fixture
def rig(server: apiserver.ApiServer, kube: api.KubeApi) -> LayoutsRig:
    return LayoutsRig(server, kube)


def test_layouts_are_in_the_config_map_of_nvidias_agent(rig: LayoutsRig) -> None:
    uid = rig.server.store.create(POD)["metadata"]["uid"]

    rig.agent("agent-1").write("version: v1\n")

    (config_map,) = rig.config_maps()
    metadata = config_map["metadata"]
    assert metadata["name"] == "node-a-mig-config"
    assert metadata["labels"] == {
        "app.kubernetes.io/component": "nvidia-mig-manager",
        "nvidia.com/node-name": "node-a",
    }
    owner = {"apiVersion": "v1", "kind": "Pod", "name": "agent-1", "uid": uid}
    assert metadata["ownerReferences"] == [owner]
    assert config_map["data"].keys() == {"config.yaml"}
    header, text = config_map["data"]["config.yaml"].splitlines()
    assert header.startswith("#")
    assert text == "version: v1"


def test_an_agent_takes_over_the_config_map_of_the_one_before(rig: LayoutsRig) -> None:
    rig.agent("agent-1", "uid-1").write("version: v1\n")

    rig.agent("agent-2", "uid-2").write("version: v1  # changed\n")

    (config_map,) = rig.config_maps()
    assert [each["uid"] for each in config_map["metadata"]["ownerReferences"]] == ["uid-2"]
    assert "changed" in config_map["data"]["config.yaml"]


def test_config_map_deleted_before_the_takeover_is_created_again(rig: LayoutsRig) -> None:
    # It was there, and the garbage collector removes it with the pod before.
    rig.server.inject(apiserver.Fault(path="/configmaps", verb="create", status=409, times=1))

    assert rig.agent("agent-2", "uid-2").write("version: v1\n")

    (config_map,) = rig.config_maps()
    assert [each["uid"] for each in config_map["metadata"]["ownerReferences"]] == ["uid-2"]
    assert rig.count() == 2


@pytest.mark.parametrize(("forbidden", "uid"), [("pods", None), ("configmaps", "uid-1")])
def test_a_missing_right_is_logged_once_and_tried_again_after_ten_minutes(
    rig: LayoutsRig, forbidden: str, uid: str | None
) -> None:
    rig.server.create(POD)
    rig.server.inject(apiserver.Fault(resource=forbidden, status=403, times=None))
    with structlog.testing.capture_logs() as logs:
        agent = rig.agent("agent-1", uid)
        assert [agent.write(text) for text in ("a", "b")] == [False, False]

        assert rig.count() == (0 if forbidden == "pods" else 1)
        rig.clock.now_s += 601
        assert not agent.write("c")
        rig.server.clear_faults()
        assert not agent.write("d")
        rig.clock.now_s += 601
        assert agent.write("e")

    assert [each["event"] for each in logs] == ["node_layouts_not_written"]
    assert len(rig.config_maps()) == 1


@pytest.mark.parametrize("status", [401, 404])
def test_a_write_that_fails_otherwise_is_logged_and_the_next_one_is_tried(
    rig: LayoutsRig, status: int
) -> None:
    rig.server.create(POD)
    rig.server.inject(apiserver.Fault(resource="pods", status=status))
    with structlog.testing.capture_logs() as logs:
        agent = rig.agent("agent-1")
        assert [agent.write(text) for text in ("a", "b")] == [False, True]

    assert [each["event"] for each in logs] == ["node_layouts_not_written"]
    assert len(rig.config_maps()) == 1
