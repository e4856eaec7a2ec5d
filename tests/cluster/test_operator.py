"""In the place of NVIDIA's MIG manager: with what the operator sets, and with what it allows."""

import pathlib

import pytest

from mig_manager.core import model
from mig_manager.sandbox.demo import stages
from tests.cluster import worlds

LAYOUT = "all-1g.5gb"
OPERATORS_ENVIRONMENT = {
    "NODE_NAME": worlds.NODE,
    "POD_NAME": "nvidia-mig-manager-x7k2p",
    "POD_NAMESPACE": worlds.OPERATOR_NAMESPACE,
    "GPU_CLIENTS_FILE": "/gpu-clients/clients.yaml",
    "DEFAULT_GPU_CLIENTS_NAMESPACE": worlds.OPERATOR_NAMESPACE,
    "WITH_REBOOT": "false",
    "WITH_SHUTDOWN_HOST_GPU_CLIENTS": "false",
    "NVIDIA_VISIBLE_DEVICES": "all",
    "NVIDIA_MIG_CONFIG_DEVICES": "all",
    "NVIDIA_DRIVER_CAPABILITIES": "utility",
    "NVIDIA_DISABLE_REQUIRE": "true",
}


class OperatorsStage(stages.Stage):
    """A stage whose agent learns of node and config by the operator's variables alone."""

    config_variable = "CONFIG_FILE"

    def agent_arguments(self) -> list[str]:
        # What a container has by itself, and the pace that tests need.
        return [
            *("--kubeconfig", str(self.kubeconfig)),
            *("--pod-resources-socket", str(self.socket)),
            *("--simulate-state", str(self.state_file)),
            *("--poll-interval-s", "0.2"),
            *self._agent_options,
            *worlds.PATIENT,
        ]

    def start_agent(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in OPERATORS_ENVIRONMENT.items():
                patch.setenv(name, value)
            patch.setenv(self.config_variable, str(self.config_file))
            super().start_agent()


class DefaultConfigStage(OperatorsStage):
    """Without a ConfigMap of the user's the operator names its default in another variable."""

    config_variable = "DEFAULT_CONFIG_FILE"


@pytest.mark.parametrize("kind", [OperatorsStage, DefaultConfigStage])
def test_in_the_operators_place_a_layout_that_evicts_nobody_succeeds_without_events(
    where_in_depth: worlds.Cluster, tmp_path: pathlib.Path, kind: type[stages.Stage]
) -> None:
    with worlds.stage(where_in_depth, tmp_path, rights=worlds.STOCK_OPERATOR, kind=kind) as world:
        world.label(LAYOUT)

        assert world.wait_for_end(LAYOUT) is model.State.SUCCESS
        assert world.allocatable() == {"nvidia.com/mig-1g.5gb": 7}
        # The Event comes after the labels; an agent that has stopped has tried.
        assert world.stop_agent() == 0
        assert worlds.event_reasons(world) == ()
        assert world.agent_log.read_text().count('"events_forbidden"') == 1
        worlds.assert_nothing_taken(world)


def test_in_the_operators_place_a_layout_that_must_evict_fails_in_the_end_and_costs_nothing(
    where_in_depth: worlds.Cluster, tmp_path: pathlib.Path
) -> None:
    with worlds.stage(
        where_in_depth,
        tmp_path,
        *("--drain-timeout-s", "2"),
        rights=worlds.STOCK_OPERATOR,
        kind=OperatorsStage,
    ) as world:
        world.run_pods(worlds.gpu_pods(["train"]))
        held, before = world.devices_by_pod(), world.gpus.observe()

        world.label(LAYOUT)

        assert world.wait_for_end(LAYOUT) is model.State.FAILED
        assert world.status()["reason"] == "Forbidden"
        assert "default/train (the agent may not evict it" in world.status()["message"]
        assert "pods/eviction" in world.status()["message"]
        assert (world.devices_by_pod(), world.gpus.observe()) == (held, before)
        worlds.assert_nothing_taken(world)


def test_in_the_operators_place_a_layout_waits_until_the_pods_have_left_by_themselves(
    where_in_depth: worlds.Cluster, tmp_path: pathlib.Path
) -> None:
    with worlds.stage(
        where_in_depth, tmp_path, rights=worlds.STOCK_OPERATOR, kind=OperatorsStage
    ) as world:
        world.run_pods(worlds.gpu_pods(["train"]))
        world.label(LAYOUT)
        world.wait(lambda: '"pod_not_moved"' in world.agent_log.read_text(), "the refusal")

        world.api.delete("/api/v1/namespaces/default/pods/train", {})

        assert world.wait_for_end(LAYOUT) is model.State.SUCCESS
        worlds.assert_nothing_taken(world)


def test_beside_the_operators_own_manager_nothing_is_touched_until_it_has_gone(
    where: worlds.Cluster, tmp_path: pathlib.Path
) -> None:
    pods = f"/api/v1/namespaces/{worlds.OPERATOR_NAMESPACE}/pods"
    image = "nvcr.io/nvidia/cloud-native/k8s-mig-manager:v0.15.0"
    containers = [{"name": "nvidia-mig-manager", "image": image}]
    manager = {
        "metadata": {"name": "nvidia-mig-manager-abcde", "labels": {"app": "nvidia-mig-manager"}},
        "spec": {"nodeName": worlds.NODE, "containers": containers},
    }
    with worlds.stage(where, tmp_path) as world:
        world.api.post(pods, manager)
        before = world.gpus.observe()

        world.label(LAYOUT)

        assert world.wait_for_end(LAYOUT) is model.State.FAILED
        assert world.status()["reason"] == "ForeignManager"
        assert (
            f"{worlds.OPERATOR_NAMESPACE}/nvidia-mig-manager-abcde (NVIDIA's mig-manager)"
            in world.status()["message"]
        )
        assert world.gpus.observe() == before
        world.api.delete(f"{pods}/nvidia-mig-manager-abcde", {"gracePeriodSeconds": 0})
        world.wait(lambda: world.status().get("reason") == "Applied", "the next try")
        worlds.assert_nothing_taken(world)
