"""The overlays of ``deploy`` as ``kubectl apply -k`` would apply them."""

import functools
import pathlib

import yaml

from mig_manager.agent import agent_settings
from tests.rigs import programs
from tests.rigs.api_objects import Object
from tests.rigs.shipped.unit_files import RecordedEnvironment, settings_of_agent

ROOT = pathlib.Path(__file__).parents[3]
AGENTS = ("unprivileged", "privileged", "simulated")  # the overlays that start an agent
OVERLAYS = (*AGENTS, "budget", "gpu-operator", "partitioner")


def kustomize(folder: str | pathlib.Path) -> str:
    """Return the manifest that kubectl makes of a folder of the repository."""
    return programs.output(programs.path_or_skip("kubectl"), "kustomize", ROOT / folder)


class Overlay:
    def __init__(self, folder: str) -> None:
        self.objects: list[Object] = list(yaml.safe_load_all(kustomize(folder)))
        named = [
            each
            for each in self.objects
            if "AdmissionPolicy" not in each["kind"]
            and each["metadata"]["name"] != "mig-manager-partitioner"
        ]
        self.by_kind: dict[str, Object] = {each["kind"]: each for each in named}
        """All but the policies and the partitioner; each kind is there once."""
        assert len(self.by_kind) == len(named)

    @property
    def pod(self) -> Object:
        spec: Object = self.by_kind["DaemonSet"]["spec"]["template"]["spec"]
        return spec

    @property
    def container(self) -> Object:
        (only,) = self.pod["containers"]
        container: Object = only
        return container

    @property
    def environ(self) -> RecordedEnvironment:
        return environment(self.container)

    @property
    def settings(self) -> agent_settings.AgentSettings:
        """What the agent reads from command line and environment of the container."""
        return settings_of_agent(self.container["args"], self.environ)

    def mount(self, path: pathlib.Path) -> tuple[Object, Object]:
        """Return the mount at a path of the container, and its volume."""
        (mount,) = (
            each for each in self.container["volumeMounts"] if each["mountPath"] == str(path)
        )
        (volume,) = (each for each in self.pod["volumes"] if each["name"] == mount["name"])
        return mount, volume


def environment(container: Object) -> RecordedEnvironment:
    """Return the variables of a container, in a pod with certain fields."""
    fields = {
        "metadata.name": "pod-1",
        "metadata.namespace": "mig-manager",
        "metadata.uid": "uid-1",
        "spec.nodeName": "node-1",
    }
    return RecordedEnvironment(
        {
            each["name"]: each["value"]
            if "value" in each
            else fields[each["valueFrom"]["fieldRef"]["fieldPath"]]
            for each in container["env"]
        }
    )


@functools.cache
def overlay(name: str) -> Overlay:
    return Overlay(f"deploy/overlays/{name}")
