"""The user at a shell, the clusters of the plugin's tests, and the node of the doctor's."""

import pathlib
from collections.abc import Iterator

import pytest

from mig_manager import reasons
from mig_manager.core.records import run_status
from testkit import apiserver
from tests.rigs import api_objects, programs
from tests.rigs.shell import commandline, doctor_rig, plugin_rig, shell_node


@pytest.fixture
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[commandline.Shell]:
    yield commandline.Shell(tmp_path_factory.mktemp("home"))
    commandline.forget()


@pytest.fixture
def layouts(shell: commandline.Shell) -> str:
    """A file with a layout for an A30, and one without MIG."""
    return shell.file("""
version: v1
mig-configs:
  mine: [{devices: all, mig-enabled: true, mig-devices: {2g.12gb: 1, 1g.6gb: 2}}]
  off: [{devices: all, mig-enabled: false}]
""")


@pytest.fixture(scope="module")
def five_node_cluster(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[plugin_rig.KubectlUser]:
    """A user of a cluster of five GPU nodes and one other; tests remove what they add."""
    programs.path_or_skip("kubectl")
    with apiserver.serve() as server:
        for each in [*nodes(), *others()]:
            server.store.create(each)
        yield plugin_rig.kubectl_user(server, tmp_path_factory.mktemp("home"))


@pytest.fixture
def empty_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[plugin_rig.KubectlUser]:
    """A user of an empty cluster."""
    programs.path_or_skip("kubectl")
    with apiserver.serve() as server:
        yield plugin_rig.kubectl_user(server, tmp_path_factory.mktemp("home"))


@pytest.fixture
def node(tmp_path: pathlib.Path) -> shell_node.ShellNode:
    """One GPU with a layout that tests replace."""
    return shell_node.ShellNode(tmp_path, "1xA100-SXM4-40GB", active="before")


@pytest.fixture
def pair(tmp_path: pathlib.Path) -> shell_node.ShellNode:
    """Two GPUs with 2g.10gb and 3g.20gb each."""
    return shell_node.ShellNode(tmp_path, "2xA100-SXM4-40GB", active="before")


@pytest.fixture
def doctor(tmp_path: pathlib.Path) -> doctor_rig.DoctorRig:
    return doctor_rig.DoctorRig(tmp_path)


def nodes() -> list[api_objects.Object]:
    a100 = "1xA100-SXM4-40GB"
    return [
        plugin_rig.node(
            "gpu-1",
            gpus=plugin_rig.gpus_with("8xA100-SXM4-40GB", "all-balanced"),
            requested="all-balanced",
            labels={"pool": "train"},
        ),
        plugin_rig.node(
            "gpu-2",
            gpus=plugin_rig.gpus_with("2xH100-SXM5-80GB"),
            requested="all-1g.5gb",
            state=run_status.State.FAILED,
            reason=reasons.Reason.UNKNOWN_PROFILE,
            message="GPU 0 has no profile 1g.5gb",
            labels={"pool": "train"},
        ),
        plugin_rig.node(
            "gpu-3",
            gpus=plugin_rig.gpus_with(a100, "all-1g.5gb"),
            requested="all-balanced",
            reported="all-1g.5gb",
            is_ready=False,
        ),
        plugin_rig.node(
            "gpu-4",
            gpus=plugin_rig.gpus_with(a100),
            requested="all-1g.5gb",
            state=run_status.State.PENDING,
            reason=None,
            message="draining",
            minutes=100,
        ),
        plugin_rig.node(
            "gpu-5",
            requested="all-balanced",
            state=None,
            labels={
                "nvidia.com/gpu.product": "NVIDIA-A30-SHARED",
                "nvidia.com/gpu.count": "4",
            },
        ),
        {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "cpu"}},
    ]


def others() -> list[api_objects.Object]:
    return [
        plugin_rig.pod("train", "gpu-1", mig_3g_20gb=1),
        plugin_rig.pod("serve", "gpu-1", mig_1g_5gb=2),
        plugin_rig.pod("elsewhere", "gpu-4", gpu=1),
        api_objects.a_config_map(plugin_rig.CONFIG, "gpu-operator/default-mig-parted-config"),
        api_objects.an_event("gpu-1", "Recovered", "resumed", at=plugin_rig.ago(hours=4)),
        api_objects.an_event(
            "gpu-1", "Applied", "Layout all-balanced is applied", at=plugin_rig.ago(hours=3)
        ),
        api_objects.an_event(
            "gpu-1", "AlreadyApplied", "it was applied", at=plugin_rig.ago(minutes=4)
        ),
        api_objects.an_event(
            "gpu-1",
            "NodeReady",
            "of kubelet",
            at=plugin_rig.ago(minutes=6),
            source={"component": "kubelet"},
            reportingComponent="kubelet",
        ),
    ]
