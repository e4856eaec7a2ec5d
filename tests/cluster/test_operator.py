"""In the place of NVIDIA's MIG manager: with what the operator sets, and with what it allows."""

import pathlib

import pytest

from mig_manager.core.layout import layout_parser
from mig_manager.core.records import run_status
from mig_manager.sandbox import machines
from tests.rigs import api_objects
from tests.rigs.cluster import account_rights, api_servers, operator_pod
from tests.rigs.stage import agent_stage, clusters

LAYOUT = "all-1g.5gb"
LAYOUTS = f"{clusters.NODE}-mig-config"  # the ConfigMap that NVIDIA's agent writes, too


class OperatorsStage(agent_stage.AgentStage):
    """A stage whose agent learns of node and config by the operator's variables alone."""

    def arguments(self, machine: machines.Machine) -> list[str]:
        # What a container has by itself, and the backoff that tests need.
        return [
            *("--kubeconfig", str(self.kubeconfig)),
            *("--pod-resources-socket", str(self.machine.socket)),
            *("--simulate-state", str(self.machine.state_file)),
            *("--poll-interval-s", "0.2"),
            *self._agent_options,
            *agent_stage.PATIENT,
        ]

    def start_agent(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            variables = {"NODE_NAME": clusters.NODE, "CONFIG_FILE": str(self.config_file)}
            for name, value in (operator_pod.ENVIRON | variables).items():
                patch.setenv(name, value)
            super().start_agent()


def test_operators_rights_suffice_for_a_layout_that_evicts_no_pod(
    where_in_depth: api_servers.Cluster, tmp_path: pathlib.Path
) -> None:
    with clusters.stage(
        where_in_depth, tmp_path, rights=account_rights.STOCK_OPERATOR, kind=OperatorsStage
    ) as stage:
        namespace = f"/api/v1/namespaces/{operator_pod.NAMESPACE}"
        # On no node, where the agent would take it for another manager.
        pod = stage.api.post(f"{namespace}/pods", operator_pod.POD)

        stage.apply_layout(LAYOUT)

        config_maps = f"{namespace}/configmaps"

        def written() -> list[api_objects.Object]:
            """Return the ConfigMaps of the node's layouts."""
            items = stage.api.get(config_maps)["items"]
            return [each for each in items if each["metadata"]["name"] == LAYOUTS]

        stage.wait(lambda: bool(written()), "the ConfigMap of the layouts")
        (config_map,) = written()
        assert config_map["metadata"]["ownerReferences"][0]["uid"] == pod["metadata"]["uid"]
        assert (
            LAYOUT
            in layout_parser.parse(config_map["data"]["config.yaml"], source=LAYOUTS).layouts
        )
        stage.api.delete(f"{namespace}/pods/{operator_pod.NAME}", {"gracePeriodSeconds": 0})
        stage.api.delete(f"{config_maps}/{LAYOUTS}")
        assert stage.allocatable() == {"nvidia.com/mig-1g.5gb": 7}
        assert clusters.event_reasons(stage) == set()
        assert stage.machine.log.read_text().count('"events_forbidden"') == 1
        stage.assert_restored()


def test_a_layout_that_must_evict_fails_cleanly_with_operators_rights(
    where_in_depth: api_servers.Cluster, tmp_path: pathlib.Path
) -> None:
    with clusters.stage(
        where_in_depth,
        tmp_path,
        *("--drain-timeout-s", "2"),
        rights=account_rights.STOCK_OPERATOR,
        kind=OperatorsStage,
    ) as stage:
        stage.run_pods(clusters.TRAIN)
        devices, before = stage.devices_by_pod(), stage.gpus.observe()

        status = stage.fail_to_apply(LAYOUT)

        assert status["reason"] == "Forbidden"
        assert "default/train (the agent may not evict it" in status["message"]
        assert "pods/eviction" in status["message"]
        assert (stage.devices_by_pod(), stage.gpus.observe()) == (devices, before)
        stage.assert_restored()


def test_operators_rights_let_a_layout_wait_until_the_pods_have_ended(
    where_in_depth: api_servers.Cluster, tmp_path: pathlib.Path
) -> None:
    with clusters.stage(
        where_in_depth, tmp_path, rights=account_rights.STOCK_OPERATOR, kind=OperatorsStage
    ) as stage:
        stage.run_pods(clusters.TRAIN)
        stage.label(LAYOUT)
        stage.wait(lambda: '"pod_not_evicted"' in stage.machine.log.read_text(), "the refusal")

        stage.api.delete("/api/v1/namespaces/default/pods/train", {})

        assert stage.wait_for_end(LAYOUT) is run_status.State.SUCCESS
        stage.assert_restored()


def test_nothing_is_touched_beside_the_operators_own_manager(
    where_in_depth: api_servers.Cluster, tmp_path: pathlib.Path
) -> None:
    pods = f"/api/v1/namespaces/{operator_pod.NAMESPACE}/pods"
    name = "nvidia-mig-manager-abcde"
    image = "nvcr.io/nvidia/cloud-native/k8s-mig-manager:v0.15.0"
    containers = [{"name": "nvidia-mig-manager", "image": image}]
    manager = {
        "metadata": {"name": name, "labels": {"app": "nvidia-mig-manager"}},
        "spec": {"nodeName": clusters.NODE, "containers": containers},
    }
    with clusters.stage(where_in_depth, tmp_path) as stage:
        stage.api.post(pods, manager)
        before = stage.gpus.observe()

        status = stage.fail_to_apply(LAYOUT)

        assert status["reason"] == "ForeignManager"
        named = f"{operator_pod.NAMESPACE}/{name} (NVIDIA's mig-manager)"
        assert named in status["message"]
        assert stage.gpus.observe() == before
        stage.api.delete(f"{pods}/{name}", {"gracePeriodSeconds": 0})
        stage.wait(lambda: stage.status().get("reason") == "Applied", "the next try")
        stage.assert_restored()
