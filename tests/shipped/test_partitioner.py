"""The partitioner's manifests agree with its settings, and give it little."""

import pytest
import yaml

import mig_manager
from mig_manager.adapters.kubernetes import leader
from mig_manager.cli import registry
from mig_manager.cli.toolkit import parser
from mig_manager.partitioner import partitioner_settings
from tests.rigs.api_objects import Object
from tests.rigs.shipped import overlays
from tests.rigs.shipped.unit_files import RecordedEnvironment

NAME = "mig-manager-partitioner"


@pytest.fixture(scope="module")
def objects() -> dict[str, Object]:
    """The objects of ``deploy/partitioner`` by kind."""
    documents = list(yaml.safe_load_all(overlays.kustomize("deploy/partitioner")))
    assert {each["metadata"]["name"] for each in documents} == {NAME}
    return {each["kind"]: each for each in documents}


@pytest.fixture(scope="module")
def pod(objects: dict[str, Object]) -> Object:
    spec: Object = objects["Deployment"]["spec"]["template"]["spec"]
    return spec


def read(pod: Object) -> tuple[partitioner_settings.PartitionerSettings, RecordedEnvironment]:
    """Return the settings that the container has, and its environment."""
    (container,) = pod["containers"]
    environ = overlays.environment(container)
    parsed = parser.parse(registry.PROGRAM, container["args"])
    assert parsed["command"] == "partitioner"
    return partitioner_settings.PartitionerSettings.read(parsed, environ), environ


def test_the_partitioner_recommends_by_default_and_knows_its_pod(pod: Object) -> None:
    of_pod, environ = read(pod)

    assert of_pod.mode is partitioner_settings.Mode.RECOMMEND
    assert (of_pod.pod_name, of_pod.lease_namespace) == ("pod-1", "mig-manager")
    assert environ.keys() - environ.names == {"NVIDIA_VISIBLE_DEVICES"}
    (container,) = pod["containers"]
    assert container["ports"] == [{"name": "metrics", "containerPort": of_pod.health_port}]
    assert container["image"] == f"mig-manager:{mig_manager.__version__}"
    assert of_pod.lease_duration_s > leader.MAX_WRITE_S


def test_replicas_meet_the_pod_security_standard_restricted(
    objects: dict[str, Object], pod: Object
) -> None:
    (container,) = pod["containers"]

    assert objects["Deployment"]["spec"]["replicas"] == 2
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert {"hostPID", "hostIPC", "hostNetwork", "volumes"}.isdisjoint(pod)
    assert {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"} in container["env"]
    assert "resources" in container
    assert not any(name.startswith("nvidia.com/") for name in container["resources"]["limits"])


def test_the_partitioner_has_only_the_rights_of_its_work(objects: dict[str, Object]) -> None:
    def verbs_of(kind: str) -> dict[tuple[str, ...], list[str]]:
        return {
            (*rule["resources"], *rule.get("resourceNames", ())): rule["verbs"]
            for rule in objects[kind]["rules"]
        }

    assert verbs_of("ClusterRole") == {
        ("nodes",): ["list", "watch", "patch"],
        ("pods",): ["list", "watch"],
        ("deviceclasses", "resourceslices", "resourceclaims"): ["list", "watch"],
        ("events",): ["create"],
    }
    assert verbs_of("Role") == {("leases",): ["create"], ("leases", NAME): ["get", "update"]}
    for kind in ("ClusterRoleBinding", "RoleBinding"):
        (subject,) = objects[kind]["subjects"]
        assert (subject["name"], objects[kind]["roleRef"]["name"]) == (NAME, NAME)


def test_the_overlay_adds_it_to_agents_with_custom_layouts() -> None:
    plain, made = overlays.overlay("unprivileged"), overlays.overlay("partitioner")
    of_partitioner = list(yaml.safe_load_all(overlays.kustomize("deploy/partitioner")))

    assert {"name": "MIG_MANAGER_CUSTOM_LAYOUTS", "value": "true"} in made.container["env"]
    for thing in (
        *of_partitioner,
        *(each for each in plain.objects if each["kind"] != "DaemonSet"),
    ):
        assert thing in made.objects
