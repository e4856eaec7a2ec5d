"""Manifests and their guides agree with the settings and the behaviour of the agent."""

import json
import pathlib

import kubernetes.client
import pytest

import mig_manager
from mig_manager.core.objects import well_known
from tests.rigs.api_objects import Object
from tests.rigs.shipped.overlays import AGENTS, OVERLAYS, ROOT, Overlay, overlay
from tests.rigs.shipped.unit_files import (
    longest_stop_s,
    settings_of_agent,
    unit_command_line,
    unit_environ,
)

every_agent = pytest.mark.parametrize("name", AGENTS)


# -- objects ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", OVERLAYS)
def test_objects_have_only_fields_that_the_api_defines(name: str) -> None:
    with kubernetes.client.ApiClient() as client:
        for thing in overlay(name).objects:
            typed = client.deserialize(json.dumps(thing), f"V1{thing['kind']}", "application/json")

            assert client.sanitize_for_serialization(typed) == thing


def test_default_is_the_unprivileged_agent_with_shipped_profiles() -> None:
    default = overlay("unprivileged")
    text = (ROOT / "profiles" / "mig-parted.yaml").read_text(encoding="utf-8")
    namespace = default.by_kind["Namespace"]["metadata"]

    assert Overlay("deploy").by_kind == default.by_kind
    assert default.by_kind["ConfigMap"]["data"] == {"config.yaml": text}
    # The agent mounts folders of the host.
    assert namespace["labels"] == {"pod-security.kubernetes.io/enforce": "privileged"}
    assert default.pod["tolerations"] == [
        {"key": key, "operator": "Exists", "effect": "NoSchedule"}
        for key in ("nvidia.com/gpu", well_known.RECONFIGURING_TAINT)
    ]
    assert default.pod["terminationGracePeriodSeconds"] > longest_stop_s(default.settings)
    mounts = default.container["volumeMounts"]
    # kubelet never updates the file behind a subPath.
    assert all("subPath" not in each for each in mounts)
    assert [each["name"] for each in mounts if not each.get("readOnly")] == ["run", "state"]


UNPRIVILEGED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "runAsUser": 0,
    "seccompProfile": {"type": "RuntimeDefault"},
    "capabilities": {"drop": ["ALL"]},
}
SECURITY: dict[str, Object] = {
    # NVIDIA's container toolkit refuses NVIDIA_MIG_CONFIG_DEVICES without CAP_SYS_ADMIN.
    "unprivileged": UNPRIVILEGED | {"capabilities": {"drop": ["ALL"], "add": ["SYS_ADMIN"]}},
    "privileged": {"privileged": True, "readOnlyRootFilesystem": True, "runAsUser": 0},
    "simulated": UNPRIVILEGED,
}


@every_agent
def test_container_has_the_power_of_its_mode_and_is_not_process_1(name: str) -> None:
    pod = overlay(name).pod

    assert overlay(name).container["securityContext"] == SECURITY[name]
    assert {"hostIPC", "hostNetwork", "securityContext"}.isdisjoint(pod)
    # One of them, or the agent is process 1 and misses an early SIGTERM.
    shared = {key for key in ("hostPID", "shareProcessNamespace") if pod.get(key)}
    assert shared == {"hostPID" if name == "privileged" else "shareProcessNamespace"}


def test_privileged_container_sees_the_hosts_devices_and_files() -> None:
    privileged = overlay("privileged")

    assert privileged.mount(pathlib.Path("/dev"))[1]["hostPath"]["path"] == "/dev"
    mount, volume = privileged.mount(pathlib.Path("/host"))
    assert volume["hostPath"]["path"] == "/"
    # What is mounted on the host after the agent has started is seen as well.
    assert mount["mountPropagation"] == "HostToContainer"
    assert mount["readOnly"]


@pytest.mark.parametrize("name", ["unprivileged", "privileged"])
def test_agent_ends_before_a_driver_manager_unloads_the_driver(name: str) -> None:
    required = overlay(name).pod["affinity"]["nodeAffinity"]
    terms = required["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]

    pause = {
        "key": "nvidia.com/gpu.deploy.mig-manager",
        "operator": "NotIn",
        "values": ["paused-for-driver-upgrade"],
    }
    assert all(pause in term["matchExpressions"] for term in terms)


def test_the_simulating_container_wants_no_gpu() -> None:
    simulated = overlay("simulated")

    assert "affinity" not in simulated.pod
    assert simulated.pod["nodeSelector"] == {"mig-manager.io/simulated": "true"}
    # The image requests GPUs; "void" makes NVIDIA's toolkit give this container none.
    variables = {
        key: value for key, value in simulated.environ.items() if key.startswith("NVIDIA_")
    }
    assert variables == {"NVIDIA_VISIBLE_DEVICES": "void"}


# -- settings ---------------------------------------------------------------------------------


@every_agent
def test_the_container_mounts_the_paths_of_its_settings(name: str) -> None:
    of = overlay(name)
    parsed = of.settings
    image = f"mig-manager:{mig_manager.__version__}"

    assert of.container["image"] == image
    assert f"docker build -t {image} " in (ROOT / "Dockerfile").read_text(encoding="utf-8")
    mounted = {each["name"] for each in of.container["volumeMounts"]}
    assert mounted == {each["name"] for each in of.pod["volumes"]}
    assert (parsed.node_name, parsed.own_pod_uid, parsed.kubeconfig) == ("node-1", "uid-1", None)
    _, config = of.mount(parsed.config_file.parent)
    assert parsed.config_file.name in of.by_kind["ConfigMap"]["data"]
    assert config["configMap"]["name"] == of.by_kind["ConfigMap"]["metadata"]["name"]
    mount, sockets = of.mount(parsed.pod_resources_socket.parent)
    assert sockets["hostPath"]["path"] == mount["mountPath"]


@pytest.mark.parametrize("name", ["unprivileged", "privileged"])
def test_lock_is_shared_with_managers_outside_of_the_pod(name: str) -> None:
    lock_file = overlay(name).settings.lock_file
    mount, volume = overlay(name).mount(lock_file.parent)

    assert not mount.get("readOnly")
    assert volume["hostPath"] == {"path": mount["mountPath"], "type": "DirectoryOrCreate"}
    assert lock_file == settings_of_agent(unit_command_line(), unit_environ()).lock_file


@every_agent
def test_variables_of_the_container_are_read(name: str) -> None:
    environ = overlay(name).environ
    parsed = settings_of_agent(overlay(name).container["args"], environ)
    toolkit = ("DRIVER_CAPABILITIES", "MIG_CONFIG_DEVICES", "VISIBLE_DEVICES")

    assert environ.keys() - environ.names <= {f"NVIDIA_{each}" for each in toolkit}
    assert not parsed.not_needed


def test_only_real_gpus_are_served_unless_simulated_ones_are_requested() -> None:
    served = {name: overlay(name).settings for name in AGENTS}

    assert [name for name in AGENTS if served[name].gpus.is_simulated] == ["simulated"]
    assert served["unprivileged"].gpus.driver_roots == ("/",)
    assert served["privileged"].gpus.driver_roots == ("/host",)
    assert served["simulated"].advertises_simulated


def test_simulated_gpus_outlive_the_pod_as_real_ones_do() -> None:
    simulated = overlay("simulated")
    state = simulated.settings.gpus.simulate_state
    assert state is not None
    mount, volume = simulated.mount(state.parent)

    assert not mount.get("readOnly")
    assert volume["hostPath"]["type"] == "DirectoryOrCreate"
    assert simulated.settings.lock_file.parent == state.parent
