"""The rights that are shipped, and the agent with them alone or in the operator's place."""

import contextlib
import itertools
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping

import pytest
import yaml

import mig_manager
from mig_manager.core.layout import layout_parser
from mig_manager.sandbox.apiserver import kinds
from testkit import apiserver
from tests.rigs import programs, waiting
from tests.rigs.api_objects import Object
from tests.rigs.cluster import account_rights, operator_pod
from tests.rigs.shipped.overlays import AGENTS, OVERLAYS, ROOT, kustomize, overlay
from tests.rigs.shipped.unit_files import settings_of_agent
from tests.rigs.stage import plain_node

LAYOUT = "all-1g.5gb"


@contextlib.contextmanager
def alone(
    rights: account_rights.Rights, folder: pathlib.Path
) -> Iterator[tuple[apiserver.ApiServer, str]]:
    """A cluster of one node without GPUs in which the agent has these rights and no more."""
    with apiserver.serve(apiserver.ApiServer(authorizer=rights.authorize)) as server:
        yield (
            server,
            str(server.kubeconfig(folder / "kubeconfig", token=account_rights.AGENT_TOKEN)),
        )


@contextlib.contextmanager
def running(command: list[str], log: pathlib.Path, environ: Mapping[str, str]) -> Iterator[None]:
    with (
        log.open("wb") as stream,
        subprocess.Popen(  # noqa: S603 - our own program and our own arguments
            command, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, env=environ
        ) as agent,
    ):
        yield
        agent.terminate()


@pytest.mark.slow
def test_the_simulated_overlay_makes_any_node_a_node_with_gpus(tmp_path: pathlib.Path) -> None:
    simulated = overlay("simulated")
    command = [sys.executable, "-m", "mig_manager", *simulated.container["args"]]
    with alone(account_rights.SHIPPED, tmp_path) as (server, kubeconfig):
        environ = simulated.environ | {
            "NODE_NAME": "plain",
            "KUBECONFIG": kubeconfig,
            "CONFIG_FILE": str(ROOT / "profiles" / "mig-parted.yaml"),
            "MIG_MANAGER_SIMULATE_STATE": str(tmp_path / "gpus.json"),
            # Several tests at once share this machine's ports.
            "MIG_MANAGER_HEALTH_PORT": "0",
        }
        log = tmp_path / "agent.log"
        node = plain_node.PlainNode(server)
        with running(command, log, environ):
            node.label(LAYOUT)

            assert node.wait_for_end(LAYOUT) == "success"
            assert node.schedulable() == {"nvidia.com/gpu": "0", "nvidia.com/mig-1g.5gb": "56"}


def test_every_overlay_grants_the_same_rights() -> None:
    for name in (*AGENTS, "gpu-operator"):
        role = overlay(name).by_kind["ClusterRole"]
        assert account_rights.rights_of(role) == account_rights.SHIPPED.everywhere


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_policies_confine_the_account_that_has_the_rights(name: str) -> None:
    (account,) = overlay(name).by_kind["ClusterRoleBinding"]["subjects"]
    user = f"system:serviceaccount:{account['namespace']}:{account['name']}"
    conditions = conditions_of(overlay(name).objects)

    assert conditions
    assert set(conditions) == {f"'{user}:' == request.userInfo.username + ':'"}


@pytest.mark.parametrize("prefix", ["", "team-"])
def test_the_policies_follow_the_accounts_that_are_renamed(
    tmp_path: pathlib.Path, prefix: str
) -> None:
    deploy = pathlib.Path(os.path.relpath(ROOT / "deploy", tmp_path))
    kustomization = {
        "namespace": "gpus",
        "namePrefix": prefix,
        "resources": [f"{deploy}/overlays/partitioner"],
        "components": [f"{deploy}/budget", f"{deploy}/evictions"],
        "transformers": [f"{deploy}/policy/user"],
    }
    (tmp_path / "kustomization.yaml").write_text(json.dumps(kustomization))
    objects = list(yaml.safe_load_all(kustomize(tmp_path)))

    user = f"system:serviceaccount:gpus:{prefix}mig-manager"
    expected = f"'{user}:' == request.userInfo.username + ':'"
    assert [each[: len(expected)] for each in conditions_of(objects)] == [expected] * 4
    (partitioners,) = conditions_of(objects, of_partitioner=True)
    starts, contains = re.findall(r"username[.](?:startsWith|contains)\('([^']*)'\)", partitioners)
    assert f"{user}-partitioner".startswith(starts)
    assert contains in f"{user}-partitioner"


def test_the_operators_account_is_confined_with_each_component(tmp_path: pathlib.Path) -> None:
    for name in ("deploy", "profiles"):
        shutil.copytree(ROOT / name, tmp_path / name)
    file = tmp_path / "deploy/overlays/gpu-operator/kustomization.yaml"
    text = file.read_text(encoding="utf-8")
    uncommented = re.sub("^# (components:|- )", r"\1", text, flags=re.MULTILINE)
    file.write_text(uncommented, encoding="utf-8")
    objects = list(yaml.safe_load_all(kustomize(file.parent)))

    account = {"namespace": operator_pod.NAMESPACE, "name": "nvidia-mig-manager"}
    bound = [each["subjects"] for each in objects if each["kind"].endswith("RoleBinding")]
    assert bound == [[{"kind": "ServiceAccount", **account}]] * 2
    prefix = "system:serviceaccount:mig-manager:mig-manager:"
    user = f"system:serviceaccount:{account['namespace']}:{account['name']}:"
    shipped = itertools.chain.from_iterable(
        yaml.safe_load_all((tmp_path / "deploy" / name).read_text(encoding="utf-8"))
        for name in ("policy/policy.yaml", "budget/slots.yaml", "evictions/evictions.yaml")
    )
    expected = [each.replace(prefix, user) for each in conditions_of(list(shipped))]
    assert sorted(conditions_of(objects)) == sorted(expected)


def conditions_of(objects: list[Object], *, of_partitioner: bool = False) -> list[str]:
    """Return whom the policies of the agents confine, or that of the partitioner."""
    return [
        each["spec"]["matchConditions"][0]["expression"]
        for each in objects
        if each["kind"] == "ValidatingAdmissionPolicy"
        and each["metadata"]["name"].endswith("mig-manager-partitioner") is of_partitioner
    ]


# -- in the place of the operator's own MIG manager -------------------------------------------

OPERATOR_ENVIRON = operator_pod.ENVIRON | {"NODE_NAME": "plain"}
DRIVER_READY = {
    "host": {"IS_HOST_DRIVER": "true"}
    | dict.fromkeys(("NVIDIA_DRIVER_ROOT", "NVIDIA_DEV_ROOT"), "/")
    | dict.fromkeys(("DRIVER_ROOT_CTR_PATH", "DEV_ROOT_CTR_PATH"), "/host"),
    "container": {"IS_HOST_DRIVER": "false"}
    | dict.fromkeys(("NVIDIA_DRIVER_ROOT", "NVIDIA_DEV_ROOT"), "/run/nvidia/driver")
    | dict.fromkeys(("DRIVER_ROOT_CTR_PATH", "DEV_ROOT_CTR_PATH"), "/driver-root"),
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
def test_environment_of_the_operator_gives_valid_settings(
    driver: str, tmp_path: pathlib.Path
) -> None:
    kubelet = tmp_path / "var/lib/kubelet/pod-resources"
    kubelet.mkdir(parents=True)
    ready = DRIVER_READY[driver]
    environ = OPERATOR_ENVIRON | ready | {"WITH_SHUTDOWN_HOST_GPU_CLIENTS": "true"}

    # The operator mounts the host's root at /host, the agent's default.
    parsed = settings_of_agent(["agent"], environ | {"HOST_ROOT_MOUNT": str(tmp_path)})

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
    text = programs.output("/bin/sh", "-c", wrapper)
    (folder / "nvidia-mig-manager").write_text(text, encoding="utf-8")
    (folder / "nvidia-mig-manager").chmod(0o755)
    line = f'exec {shlex.quote(sys.executable)} -m mig_manager "$@"'
    programs.write_script(folder / "mig-manager", line)


@pytest.mark.slow
@pytest.mark.parametrize("variable", ["CONFIG_FILE", "DEFAULT_CONFIG_FILE"])
def test_the_image_serves_layouts_when_the_operators_entrypoint_starts_it(
    variable: str, tmp_path: pathlib.Path
) -> None:
    ready = "".join(f"{name}={value}\n" for name, value in DRIVER_READY["container"].items())
    (tmp_path / "driver-ready").write_text(ready, encoding="utf-8")
    (tmp_path / "bin").mkdir()
    image_commands(tmp_path / "bin")
    with alone(account_rights.STOCK_OPERATOR, tmp_path) as (server, kubeconfig):
        pod = server.store.create(operator_pod.POD)
        environ = OPERATOR_ENVIRON | {
            "CONFIG_FILE": "",
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
            "VALIDATIONS": str(tmp_path),
            "KUBECONFIG": kubeconfig,
            variable: str(ROOT / "profiles" / "mig-parted.yaml"),
            "MIG_MANAGER_SIMULATE": "1xA30",
            "MIG_MANAGER_SIMULATE_STATE": str(tmp_path / "gpus.json"),
        }
        log = tmp_path / "agent.log"
        command = ["/bin/sh", "-c", OPERATOR_ENTRYPOINT]
        node = plain_node.PlainNode(server)
        with running(command, log, environ):
            node.label("all-1g.6gb")

            assert node.wait_for_end("all-1g.6gb") == "success"
            status = node.status()
            waiting.until(
                lambda: bool(server.objects(kinds.CONFIG_MAPS, operator_pod.NAMESPACE)),
                "the ConfigMap",
            )
    is_default = variable == "DEFAULT_CONFIG_FILE"
    assert (status["origin"] == "generated for NVIDIA A30") is is_default
    (written,) = server.objects(kinds.CONFIG_MAPS, operator_pod.NAMESPACE)
    assert written["metadata"]["name"] == "plain-mig-config"
    assert written["metadata"]["ownerReferences"][0]["uid"] == pod["metadata"]["uid"]
    layouts = layout_parser.parse(written["data"]["config.yaml"], source="ConfigMap").layouts
    assert sorted(layouts) == [
        "all-1g.6gb", "all-1g.6gb.me", "all-2g.12gb", "all-2g.12gb.me", "all-4g.24gb",
        "all-balanced", "all-disabled", "all-enabled",
    ]  # fmt: skip


def test_the_operators_account_gets_our_rights_and_its_agent_our_layouts() -> None:
    shipped = overlay("gpu-operator").by_kind
    values = yaml.safe_load(
        (ROOT / "deploy/overlays/gpu-operator/values.yaml").read_text(encoding="utf-8")
    )["migManager"]

    assert shipped.keys() == {"ClusterRole", "ClusterRoleBinding", "ConfigMap"}
    assert shipped["ClusterRoleBinding"]["subjects"] == [
        {
            "kind": "ServiceAccount",
            "name": "nvidia-mig-manager",
            "namespace": operator_pod.NAMESPACE,
        }
    ]
    assert shipped["ConfigMap"]["metadata"]["namespace"] == operator_pod.NAMESPACE
    assert values["config"]["name"] == shipped["ConfigMap"]["metadata"]["name"]
    added = {each["name"]: each["value"] for each in values["env"]}
    parsed = settings_of_agent(["agent"], OPERATOR_ENVIRON | added)
    plain = settings_of_agent(["agent"], OPERATOR_ENVIRON)
    assert parsed.lock_file == pathlib.Path("/host") / plain.lock_file.relative_to("/")
    assert f"{values['image']}:{values['version']}" == f"mig-manager:{mig_manager.__version__}"
