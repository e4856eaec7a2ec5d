"""The image as it is built: its size, and the agent in it against the embedded API server."""

import json
import pathlib
import shutil
from collections.abc import Iterator

import pytest

from mig_manager.sandbox.driver import state_file
from testkit import apiserver
from tests.realnode import container, images, namespaces, real_cluster
from tests.rigs import waiting
from tests.rigs.cluster import deploy_files
from tests.rigs.shipped import dockerfile, overlays
from tests.rigs.stage import plain_node

pytestmark = pytest.mark.realnode

OWN_LIMIT_MB = 45  # of what we add to the base: dependencies, program, bytecode


@pytest.fixture(scope="module")
def built() -> images.Images:
    missing = namespaces.missing()
    if missing:
        pytest.skip(missing)
    every = images.Images(real_cluster.CACHE)
    every.agent()
    return every


@pytest.fixture
def node(tmp_path: pathlib.Path) -> Iterator[plain_node.PlainNode]:
    """A cluster of one node in a network of its own, where the agent's port is free."""
    with namespaces.another_network(), apiserver.serve() as server:
        plain = plain_node.PlainNode(server)
        config = tmp_path / "config"
        config.mkdir()
        shutil.copy(deploy_files.ROOT / "profiles/mig-parted.yaml", config / "config.yaml")
        server.kubeconfig(config / "kubeconfig")
        yield plain


@pytest.fixture
def agent(
    built: images.Images, node: plain_node.PlainNode, tmp_path: pathlib.Path
) -> Iterator[container.Container]:
    """A container with the image's own command, as the simulated overlay confines it."""
    environ = {"NODE_NAME": node.name, "KUBECONFIG": "/etc/mig-manager/kubeconfig"}
    overlay = overlays.overlay("simulated")
    with built.mount() as image, container.running(image, overlay, tmp_path, environ) as running:
        yield running


def test_the_image_adds_little_to_its_base(built: images.Images) -> None:
    assert 0 < built.size().own_mb <= OWN_LIMIT_MB


def test_images_command_serves_a_layout_is_healthy_and_ends_cleanly(
    agent: container.Container, node: plain_node.PlainNode, tmp_path: pathlib.Path
) -> None:
    waiting.until(lambda: node.schedulable() == {"nvidia.com/gpu": "8"}, "the devices")

    node.label("all-1g.5gb")

    assert node.wait_for_end("all-1g.5gb") == "success"
    assert node.schedulable() == {"nvidia.com/gpu": "0", "nvidia.com/mig-1g.5gb": "56"}
    gpus = state_file.SharedState(tmp_path / "state" / "gpus.json").read().gpus
    assert [len(gpu.instances) for gpu in gpus] == [7] * 8

    (check,) = dockerfile.instructions("HEALTHCHECK")
    healthy = agent.execute(*json.loads(check.partition("CMD ")[2]))
    assert (healthy.returncode, healthy.stdout) == (0, "ok\n"), healthy.stderr
    written = agent.execute("sh", "-c", "echo > /opt/mig-manager/file")
    assert "Read-only file system" in written.stderr
    assert "CapEff:\t0000000000000000\n" in agent.execute("cat", "/proc/1/status").stdout

    assert agent.terminate() == 0


@pytest.mark.usefixtures("built")
def test_network_of_one_test_leaves_a_running_clusters_alone() -> None:
    namespace = pathlib.Path("/proc/thread-self/ns/net")
    before = namespace.readlink()

    with namespaces.another_network():
        inside = namespace.readlink()

    assert inside != before
    assert namespace.readlink() == before
