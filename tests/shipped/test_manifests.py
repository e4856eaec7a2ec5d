"""Manifests agree with the settings and the behaviour of the agent."""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import kubernetes.client
import pytest
import yaml

import mig_manager
from mig_manager.agent import settings
from mig_manager.core import model
from mig_manager.core.node import cluster
from testkit import apiserver
from tests import plain_node
from tests.shipped.unit_files import (
    Asked,
    agent_settings,
    longest_stop_s,
    unit_command_line,
    unit_environ,
)

ROOT = pathlib.Path(__file__).parents[2]
KUBECTL = shutil.which("kubectl")
AGENT_TOKEN = "sandbox"  # noqa: S105 - identifies requests of the agent
LAYOUT = "all-1g.5gb"
OPERATOR_NAMESPACE = "gpu-operator"

Object = dict[str, Any]
Right = tuple[str, str, str]
"""API group, resource with its subresource, verb."""


AGENTS = ("unprivileged", "privileged", "simulated")
"""The overlays that start an agent."""
OVERLAYS = (*AGENTS, "budget", "gpu-operator")


def render(folder: str) -> list[Object]:
    """Return what ``kubectl apply -k`` would apply."""
    if KUBECTL is None:
        pytest.skip("kubectl is not installed")
    rendered = subprocess.run(  # noqa: S603 - the arguments are this file's own
        [KUBECTL, "kustomize", str(ROOT / folder)], capture_output=True, text=True, check=False
    )
    assert rendered.returncode == 0, rendered.stderr
    return list(yaml.safe_load_all(rendered.stdout))


def by_kind(documents: list[Object]) -> dict[str, Object]:
    """Return the objects of a namespace and its rights; each kind is there once."""
    ours = [each for each in documents if "AdmissionPolicy" not in each["kind"]]
    found = {each["kind"]: each for each in ours}
    assert len(found) == len(ours)
    return found


@pytest.fixture(scope="module")
def rendered() -> dict[str, list[Object]]:
    """All overlays, by name."""
    return {name: render(f"deploy/overlays/{name}") for name in OVERLAYS}


@pytest.fixture(scope="module")
def overlays(rendered: dict[str, list[Object]]) -> dict[str, dict[str, Object]]:
    """All overlays by name, their objects by kind."""
    return {name: by_kind(documents) for name, documents in rendered.items()}


@pytest.fixture(scope="module")
def manifests(overlays: dict[str, dict[str, Object]]) -> dict[str, Object]:
    """What ``kubectl apply -k deploy`` would apply, by kind."""
    return overlays["unprivileged"]


def pod_of(objects: Mapping[str, Object]) -> Object:
    spec: Object = objects["DaemonSet"]["spec"]["template"]["spec"]
    return spec


def container_of(objects: Mapping[str, Object]) -> Object:
    (only,) = pod_of(objects)["containers"]
    found: Object = only
    return found


@pytest.fixture
def pod(manifests: dict[str, Object]) -> Object:
    return pod_of(manifests)


@pytest.fixture
def container(manifests: dict[str, Object]) -> Object:
    return container_of(manifests)


# -- objects ----------------------------------------------------------------------------------


def test_without_a_choice_the_agent_is_unprivileged(manifests: dict[str, Object]) -> None:
    assert by_kind(render("deploy")) == manifests


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_object_is_what_the_api_defines_and_has_no_field_that_it_would_ignore(
    rendered: dict[str, list[Object]], overlay: str
) -> None:
    with kubernetes.client.ApiClient() as client:
        for thing in rendered[overlay]:
            typed = client.deserialize(json.dumps(thing), f"V1{thing['kind']}", "application/json")

            assert client.sanitize_for_serialization(typed) == thing


@pytest.mark.parametrize("overlay", AGENTS)
def test_all_that_has_a_namespace_lives_in_the_one_that_is_shipped(
    overlays: dict[str, dict[str, Object]], overlay: str
) -> None:
    manifests = overlays[overlay]
    name = manifests["Namespace"]["metadata"]["name"]

    assert {
        kind: thing["metadata"].get("namespace")
        for kind, thing in manifests.items()
        if kind not in ("Namespace", "ClusterRole", "ClusterRoleBinding")
    } == {"ServiceAccount": name, "ConfigMap": name, "DaemonSet": name}


def test_pod_security_lets_the_agent_mount_folders_of_the_host(
    manifests: dict[str, Object],
) -> None:
    labels = manifests["Namespace"]["metadata"]["labels"]

    assert labels == {"pod-security.kubernetes.io/enforce": "privileged"}


def test_the_daemon_set_selects_its_own_pods(manifests: dict[str, Object]) -> None:
    spec = manifests["DaemonSet"]["spec"]
    labels = spec["template"]["metadata"]["labels"]

    assert spec["selector"]["matchLabels"].items() <= labels.items()


def test_the_pods_account_is_the_one_that_has_the_rights(
    manifests: dict[str, Object], pod: Object
) -> None:
    account = manifests["ServiceAccount"]["metadata"]
    binding = manifests["ClusterRoleBinding"]

    assert pod["serviceAccountName"] == account["name"]
    assert binding["roleRef"]["name"] == manifests["ClusterRole"]["metadata"]["name"]
    assert binding["subjects"] == [
        {"kind": "ServiceAccount", "name": account["name"], "namespace": account["namespace"]}
    ]


def test_the_config_map_carries_the_shipped_profiles_verbatim(
    manifests: dict[str, Object],
) -> None:
    shipped = (ROOT / "profiles" / "mig-parted.yaml").read_text(encoding="utf-8")

    assert manifests["ConfigMap"]["data"] == {"config.yaml": shipped}


def test_the_pod_goes_where_its_own_taint_and_nvidias_keep_others_away(pod: Object) -> None:
    assert pod["tolerations"] == [
        {"key": key, "operator": "Exists", "effect": "NoSchedule"}
        for key in ("nvidia.com/gpu", cluster.HOLD_TAINT)
    ]


def test_the_container_is_not_privileged_and_has_the_one_power_that_mig_needs(
    pod: Object, container: Object
) -> None:
    # NVIDIA's container toolkit refuses NVIDIA_MIG_CONFIG_DEVICES without CAP_SYS_ADMIN.
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "runAsUser": 0,
        "capabilities": {"drop": ["ALL"], "add": ["SYS_ADMIN"]},
    }
    assert {"hostPID", "hostIPC", "hostNetwork", "securityContext"}.isdisjoint(pod)


def test_the_privileged_container_has_the_hosts_devices_files_and_processes(
    overlays: dict[str, dict[str, Object]],
) -> None:
    pod, container = pod_of(overlays["privileged"]), container_of(overlays["privileged"])

    assert container["securityContext"] == {
        "privileged": True,
        "readOnlyRootFilesystem": True,
        "runAsUser": 0,
    }
    assert pod["hostPID"]
    assert {"hostIPC", "hostNetwork"}.isdisjoint(pod)
    host = {each["name"]: each.get("hostPath", {}).get("path") for each in pod["volumes"]}
    mounts = {each["mountPath"]: each for each in container["volumeMounts"]}
    assert host[mounts["/dev"]["name"]] == "/dev"
    assert host[mounts["/host"]["name"]] == "/"
    # What is mounted on the host after the agent has started is seen as well.
    assert mounts["/host"]["mountPropagation"] == "HostToContainer"
    assert mounts["/host"]["readOnly"]


def test_the_simulating_container_has_no_power_and_wants_no_gpu(
    overlays: dict[str, dict[str, Object]],
) -> None:
    pod, container = pod_of(overlays["simulated"]), container_of(overlays["simulated"])
    environ = container_environ(container)

    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "runAsUser": 0,
        "capabilities": {"drop": ["ALL"]},
    }
    assert "affinity" not in pod
    assert pod["nodeSelector"] == {"mig-manager.io/simulated": "true"}
    # The image requests GPUs; "void" makes NVIDIA's toolkit give this container none.
    asked = {name: value for name, value in environ.items() if name.startswith("NVIDIA_")}
    assert asked == {"NVIDIA_VISIBLE_DEVICES": "void"}


@pytest.mark.parametrize("overlay", AGENTS)
def test_the_image_has_the_version_of_the_program(
    overlays: dict[str, dict[str, Object]], overlay: str
) -> None:
    image = f"mig-manager:{mig_manager.__version__}"

    assert container_of(overlays[overlay])["image"] == image
    assert f"docker build -t {image} " in (ROOT / "Dockerfile").read_text(encoding="utf-8")


# -- settings ---------------------------------------------------------------------------------


def container_environ(container: Object) -> dict[str, str]:
    fields = {"spec.nodeName": "node-1", "metadata.uid": "uid-1"}
    return {
        each["name"]: each["value"]
        if "value" in each
        else fields[each["valueFrom"]["fieldRef"]["fieldPath"]]
        for each in container["env"]
    }


@pytest.mark.parametrize("overlay", AGENTS)
def test_command_line_and_environment_of_the_container_agree_with_its_mounts(
    overlays: dict[str, dict[str, Object]], overlay: str
) -> None:
    manifests = overlays[overlay]
    pod, container = pod_of(manifests), container_of(manifests)
    parsed = agent_settings(container["args"], container_environ(container))

    mounted = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    volumes = {each["name"]: each for each in pod["volumes"]}
    assert mounted.keys() == volumes.keys()
    assert parsed.node_name == "node-1"
    assert parsed.kubeconfig is None
    assert str(parsed.config_file.parent) == mounted["config"]
    assert parsed.config_file.name in manifests["ConfigMap"]["data"]
    assert volumes["config"]["configMap"]["name"] == manifests["ConfigMap"]["metadata"]["name"]
    assert str(parsed.pod_resources_socket.parent) == mounted["pod-resources"]
    assert volumes["pod-resources"]["hostPath"]["path"] == mounted["pod-resources"]


def test_mounts_are_whole_and_read_only_but_for_the_lock_and_the_saved_layout(
    container: Object,
) -> None:
    # kubelet never updates the file behind a subPath.
    assert all("subPath" not in each for each in container["volumeMounts"])
    assert [each["name"] for each in container["volumeMounts"] if not each.get("readOnly")] == [
        "run",
        "state",
    ]


@pytest.mark.parametrize("overlay", ["unprivileged", "privileged"])
def test_the_lock_is_the_hosts_so_that_managers_outside_of_the_pod_are_kept_off(
    overlays: dict[str, dict[str, Object]], overlay: str
) -> None:
    pod, container = pod_of(overlays[overlay]), container_of(overlays[overlay])
    parsed = agent_settings(container["args"], container_environ(container))

    mounts = {each["mountPath"]: each for each in container["volumeMounts"]}
    volumes = {each["name"]: each["hostPath"] for each in pod["volumes"] if "hostPath" in each}
    mount = mounts[str(parsed.lock_file.parent)]
    assert not mount.get("readOnly")
    assert volumes[mount["name"]] == {"path": mount["mountPath"], "type": "DirectoryOrCreate"}
    assert parsed.lock_file == agent_settings(unit_command_line(), unit_environ()).lock_file


@pytest.mark.parametrize("overlay", AGENTS)
def test_the_agent_knows_its_own_pod(overlays: dict[str, dict[str, Object]], overlay: str) -> None:
    container = container_of(overlays[overlay])

    assert agent_settings(container["args"], container_environ(container)).own_pod_uid == "uid-1"


@pytest.mark.parametrize("overlay", AGENTS)
def test_every_variable_of_the_container_is_read_by_the_agent_or_by_nvidias_toolkit(
    overlays: dict[str, dict[str, Object]], overlay: str
) -> None:
    container = container_of(overlays[overlay])
    environ = Asked(container_environ(container))
    parsed = agent_settings(container["args"], environ)

    unread = environ.keys() - environ.names
    assert unread <= {
        "NVIDIA_DRIVER_CAPABILITIES",
        "NVIDIA_MIG_CONFIG_DEVICES",
        "NVIDIA_VISIBLE_DEVICES",
    }
    assert not parsed.not_needed


def test_kubelet_leaves_the_agent_the_time_to_finish_or_undo_a_change(
    pod: Object, container: Object
) -> None:
    parsed = agent_settings(container["args"], container_environ(container))

    assert pod["terminationGracePeriodSeconds"] > longest_stop_s(parsed)


def test_only_real_gpus_are_served_unless_simulated_ones_are_asked_for(
    overlays: dict[str, dict[str, Object]],
) -> None:
    def served(overlay: str) -> settings.AgentSettings:
        container = container_of(overlays[overlay])
        return agent_settings(container["args"], container_environ(container))

    assert not served("unprivileged").gpus.is_simulated
    assert served("unprivileged").gpus.driver_roots == ("/",)
    assert not served("privileged").gpus.is_simulated
    assert served("privileged").gpus.driver_roots == ("/host",)
    assert served("simulated").gpus.is_simulated
    assert served("simulated").advertises_simulated


def test_simulated_gpus_outlive_the_pod_as_real_ones_do(
    overlays: dict[str, dict[str, Object]],
) -> None:
    pod, container = pod_of(overlays["simulated"]), container_of(overlays["simulated"])
    parsed = agent_settings(container["args"], container_environ(container))

    mounts = {each["mountPath"]: each for each in container["volumeMounts"]}
    mount = mounts[str((parsed.gpus.simulate_state or pathlib.Path()).parent)]
    (volume,) = (each for each in pod["volumes"] if each["name"] == mount["name"])
    assert not mount.get("readOnly")
    assert volume["hostPath"]["type"] == "DirectoryOrCreate"
    assert str(parsed.lock_file.parent) == mount["mountPath"]


# -- rights -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rights:
    """What roles give: cluster-wide, and beyond that within one namespace."""

    everywhere: frozenset[Right]
    namespace: str = ""
    within: frozenset[Right] = frozenset()

    def allow(self, access: apiserver.Access) -> bool:
        resource = "/".join(filter(None, (access.resource, access.subresource)))
        asked = (access.group, resource, access.verb)
        is_within = bool(self.namespace) and access.namespace == self.namespace
        return asked in self.everywhere or (is_within and asked in self.within)


def rights_to(resource: str, *verbs: str) -> frozenset[Right]:
    return frozenset(("", resource, verb) for verb in verbs)


def granted(role: Object) -> frozenset[Right]:
    return frozenset(
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    )


STOCK_OPERATOR = Rights(
    everywhere=rights_to("nodes", "get", "list", "watch", "update", "patch")
    | rights_to("pods", "list"),
    namespace=OPERATOR_NAMESPACE,
    within=rights_to("pods", "get", "list", "watch", "delete")
    | rights_to("configmaps", "create", "get", "list", "update", "patch"),
)
"""What NVIDIA's GPU operator gives its MIG manager."""


@contextlib.contextmanager
def alone(rights: Rights, folder: pathlib.Path) -> Iterator[tuple[apiserver.ApiServer, str]]:
    """A cluster of one node without GPUs in which the agent has these rights and no more."""

    def authorize(access: apiserver.Access) -> bool:
        return access.token != AGENT_TOKEN or rights.allow(access)

    with apiserver.serve(apiserver.ApiServer(authorizer=authorize)) as server:
        server.store.create(plain_node.NODE)
        yield server, str(server.kubeconfig(folder / "kubeconfig"))


def test_the_simulated_overlay_makes_any_node_a_node_with_gpus(
    overlays: dict[str, dict[str, Object]], tmp_path: pathlib.Path
) -> None:
    container = container_of(overlays["simulated"])
    rights = Rights(everywhere=granted(overlays["simulated"]["ClusterRole"]))
    command = [sys.executable, "-m", "mig_manager", *container["args"]]
    with alone(rights, tmp_path) as (server, kubeconfig):
        environ = container_environ(container) | {
            "NODE_NAME": "plain",
            "KUBECONFIG": kubeconfig,
            "CONFIG_FILE": str(ROOT / "profiles" / "mig-parted.yaml"),
            "MIG_MANAGER_SIMULATE_STATE": str(tmp_path / "gpus.json"),
            # Several tests at once share this machine's ports.
            "MIG_MANAGER_HEALTH_PORT": "0",
        }
        log = tmp_path / "agent.log"
        watched = plain_node.PlainNode(server.url, log).watched()
        with plain_node.running(command, log, environ), watched as node:
            node.label(LAYOUT)

            assert node.wait_for_end(LAYOUT) == "success"
            assert node.schedulable() == {"nvidia.com/gpu": "0", "nvidia.com/mig-1g.5gb": "56"}


def test_no_other_overlay_may_write_the_nodes_status(
    overlays: dict[str, dict[str, Object]],
) -> None:
    shipped = granted(overlays["unprivileged"]["ClusterRole"])

    assert granted(overlays["simulated"]["ClusterRole"]) == shipped | rights_to(
        "nodes/status", "patch"
    )
    assert granted(overlays["privileged"]["ClusterRole"]) == shipped
    assert granted(overlays["gpu-operator"]["ClusterRole"]) == shipped


# -- in the place of the operator's own MIG manager -------------------------------------------

OPERATOR_ENVIRON = {
    "NODE_NAME": "plain",
    "POD_NAME": "nvidia-mig-manager-x7k2p",
    "POD_NAMESPACE": OPERATOR_NAMESPACE,
    "CONFIG_FILE": "/mig-parted-config/config.yaml",
    "GPU_CLIENTS_FILE": "/gpu-clients/clients.yaml",
    "DEFAULT_GPU_CLIENTS_NAMESPACE": OPERATOR_NAMESPACE,
    "CDI_ENABLED": "true",
    "NVIDIA_CDI_HOOK_PATH": "/usr/local/nvidia/toolkit/nvidia-cdi-hook",
}
"""What the operator's DaemonSet sets, with a config of the user's own and with CDI."""
DRIVER_READY = {
    "host": {
        "IS_HOST_DRIVER": "true",
        "NVIDIA_DRIVER_ROOT": "/",
        "DRIVER_ROOT_CTR_PATH": "/host",
        "NVIDIA_DEV_ROOT": "/",
        "DEV_ROOT_CTR_PATH": "/host",
    },
    "container": {
        "IS_HOST_DRIVER": "false",
        "NVIDIA_DRIVER_ROOT": "/run/nvidia/driver",
        "DRIVER_ROOT_CTR_PATH": "/driver-root",
        "NVIDIA_DEV_ROOT": "/run/nvidia/driver",
        "DEV_ROOT_CTR_PATH": "/driver-root",
    },
}
"""What its validator leaves for the entrypoint, by where the driver is."""
OPERATOR_ENTRYPOINT = """
set -o allexport
. "$VALIDATIONS/driver-ready"
export WITH_SHUTDOWN_HOST_GPU_CLIENTS="$IS_HOST_DRIVER"
exec nvidia-mig-manager
"""
"""In the order in which the operator's entrypoint does it."""


@pytest.mark.parametrize("driver", DRIVER_READY)
def test_the_operators_environment_makes_settings_that_work_in_its_container(
    driver: str, tmp_path: pathlib.Path
) -> None:
    kubelet = tmp_path / "var/lib/kubelet/pod-resources"
    kubelet.mkdir(parents=True)
    ready = DRIVER_READY[driver]
    environ = OPERATOR_ENVIRON | ready | {"WITH_SHUTDOWN_HOST_GPU_CLIENTS": "true"}

    # The operator mounts the host's root at /host, the agent's default.
    parsed = agent_settings(["agent"], environ | {"HOST_ROOT_MOUNT": str(tmp_path)})

    assert parsed.node_name == "plain"
    assert parsed.config_file == pathlib.Path("/mig-parted-config/config.yaml")
    assert parsed.pod_resources_socket == kubelet / "kubelet.sock"
    assert parsed.gpus.driver_roots[0] == ready["DRIVER_ROOT_CTR_PATH"]
    assert not parsed.gpus.is_simulated


def image_commands(folder: pathlib.Path) -> None:
    """Put into a folder what the image has on its PATH."""
    (wrapper,) = re.findall(
        r"^RUN (printf .*) > /opt/mig-manager/bin/nvidia-mig-manager",
        (ROOT / "Dockerfile").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    text = subprocess.run(  # noqa: S603 - our own Dockerfile
        ["/bin/sh", "-c", wrapper], capture_output=True, text=True, check=True
    ).stdout
    program = f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m mig_manager "$@"\n'
    for name, script in (("nvidia-mig-manager", text), ("mig-manager", program)):
        (folder / name).write_text(script, encoding="utf-8")
        (folder / name).chmod(0o755)


def test_the_image_serves_layouts_when_the_operators_entrypoint_starts_it(
    tmp_path: pathlib.Path,
) -> None:
    ready = "".join(f"{name}={value}\n" for name, value in DRIVER_READY["container"].items())
    (tmp_path / "driver-ready").write_text(ready, encoding="utf-8")
    (tmp_path / "bin").mkdir()
    image_commands(tmp_path / "bin")
    with alone(STOCK_OPERATOR, tmp_path) as (server, kubeconfig):
        environ = OPERATOR_ENVIRON | {
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
            "VALIDATIONS": str(tmp_path),
            "KUBECONFIG": kubeconfig,
            "CONFIG_FILE": str(ROOT / "profiles" / "mig-parted.yaml"),
            "MIG_MANAGER_SIMULATE": "1xA30",
            "MIG_MANAGER_SIMULATE_STATE": str(tmp_path / "gpus.json"),
        }
        log = tmp_path / "agent.log"
        command = ["/bin/sh", "-c", OPERATOR_ENTRYPOINT]
        watched = plain_node.PlainNode(server.url, log).watched()
        with plain_node.running(command, log, environ), watched as node:
            node.label("all-1g.6gb")

            assert node.wait_for_end("all-1g.6gb") == "success"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_policies_confine_the_account_that_has_the_rights(
    rendered: dict[str, list[Object]], overlays: dict[str, dict[str, Object]], overlay: str
) -> None:
    (account,) = overlays[overlay]["ClusterRoleBinding"]["subjects"]
    user = f"system:serviceaccount:{account['namespace']}:{account['name']}"
    policies = [
        each["spec"] for each in rendered[overlay] if each["kind"] == "ValidatingAdmissionPolicy"
    ]

    assert policies
    for policy in policies:
        assert [each["expression"] for each in policy["matchConditions"]] == [
            f"request.userInfo.username == '{user}'"
        ]


def test_the_operators_account_gets_our_rights_and_its_agent_our_layouts(
    overlays: dict[str, dict[str, Object]],
) -> None:
    shipped = overlays["gpu-operator"]
    values = yaml.safe_load(
        (ROOT / "deploy/overlays/gpu-operator/values.yaml").read_text(encoding="utf-8")
    )["migManager"]

    assert shipped.keys() == {"ClusterRole", "ClusterRoleBinding", "ConfigMap"}
    assert shipped["ClusterRoleBinding"]["subjects"] == [
        {
            "kind": "ServiceAccount",
            "name": "nvidia-mig-manager",
            "namespace": OPERATOR_NAMESPACE,
        }
    ]
    assert shipped["ConfigMap"]["metadata"]["namespace"] == OPERATOR_NAMESPACE
    assert values["config"]["name"] == shipped["ConfigMap"]["metadata"]["name"]
    added = {each["name"]: each["value"] for each in values["env"]}
    parsed = agent_settings(["agent"], OPERATOR_ENVIRON | added)
    ours = agent_settings(["agent"], OPERATOR_ENVIRON)
    assert parsed.lock_file == pathlib.Path("/host") / ours.lock_file.relative_to("/")
    assert f"{values['image']}:{values['version']}" == f"mig-manager:{mig_manager.__version__}"


# -- pages -----------------------------------------------------------------------

GUIDE = ROOT / "docs" / "install.md"


def test_the_guide_names_every_overlay_and_of_no_path_that_is_not_there() -> None:
    page = GUIDE.read_text(encoding="utf-8")
    paths = set(re.findall(r"\b(?:deploy|charts|docs)/[\w./-]*\w", page))

    assert {path for path in paths if not (ROOT / path).exists()} == set()
    assert {path.name for path in (ROOT / "deploy" / "overlays").iterdir()} == set(OVERLAYS)
    # The unprivileged one goes by a shorter name.
    assert {f"deploy/overlays/{name}" for name in OVERLAYS} - paths == {
        "deploy/overlays/unprivileged"
    }
    assert "kubectl apply -k deploy`" in page


def test_the_guide_names_the_image_by_its_version_and_the_operators_fields_as_the_values_do() -> (
    None
):  # fmt: skip
    page = GUIDE.read_text(encoding="utf-8")
    (patch,) = re.findall(r"--type merge -p \\\n  '(.*)'", page)
    values = yaml.safe_load(
        (ROOT / "deploy/overlays/gpu-operator/values.yaml").read_text(encoding="utf-8")
    )

    assert json.loads(patch)["spec"] == values
    assert set(re.findall(r"mig-manager:(\d[\w.]*)", page)) == {mig_manager.__version__}


def test_the_guides_wait_follows_the_label_that_the_agent_writes() -> None:
    (path,) = re.findall(r"--for=jsonpath='\{(.*)\}'=success", GUIDE.read_text(encoding="utf-8"))

    assert path == ".metadata.labels." + cluster.STATE_LABEL.replace(".", r"\.")


def test_the_guide_to_crashes_has_every_phase_and_the_keys_and_times_that_count(
    pod: Object, container: Object
) -> None:
    page = (ROOT / "docs" / "crash-safety.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| (`.*?) \|", page.split("| Killed in phase |")[1].split("\n\n")[0], re.MULTILINE
    )
    keys = (
        cluster.APPLIED_LABEL,
        cluster.CORDON_ANNOTATION,
        cluster.JOURNAL_ANNOTATION,
        cluster.STATUS_ANNOTATION,
        cluster.UNREADABLE_JOURNAL_ANNOTATION,
    )
    parsed = agent_settings(container["args"], container_environ(container))

    phases = {phase.value for phase in model.Phase} - {model.Phase.DONE.value}
    assert set(re.findall(r"\w+", " ".join(rows))) == phases
    assert [key for key in keys if f"`{key}`" not in page] == []
    assert f"{pod['terminationGracePeriodSeconds']} s to end" in page
    assert f"{parsed.gpu_timeout_s:g} s (`--gpu-timeout-s`)" in page
    assert f"`{parsed.lock_file}`" in page
