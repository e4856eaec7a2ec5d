"""The real agent on a node without GPUs: what it simulates the node offers to the scheduler."""

import pathlib
import sys
from collections.abc import Iterator

import pytest

from testkit import apiserver
from tests import plain_node


@pytest.fixture
def rig(tmp_path: pathlib.Path) -> Iterator[plain_node.PlainNode]:
    with apiserver.serve() as server:
        server.store.create(plain_node.NODE)
        command = [
            *(sys.executable, "-m", "mig_manager", "agent", "--node-name", "plain"),
            *("--kubeconfig", str(server.kubeconfig(tmp_path / "kubeconfig"))),
            *("--pod-resources-socket", str(tmp_path / "none.sock")),
            *("--simulate", "8xA100-SXM4-40GB", "--simulate-state", str(tmp_path / "gpus.json")),
            *("--advertise-simulated", "--poll-interval-s", "0.2"),
        ]
        log = tmp_path / "agent.log"
        with (
            plain_node.running(command, log),
            plain_node.PlainNode(server.url, log).watched() as found,
        ):
            yield found


def test_a_node_without_gpus_offers_the_simulated_ones_as_each_layout_cuts_them(
    rig: plain_node.PlainNode,
) -> None:
    rig.wait(lambda: rig.schedulable() == {"nvidia.com/gpu": "8"})

    rig.label("all-1g.5gb")

    assert rig.wait_for_end("all-1g.5gb") == "success"
    assert rig.schedulable() == {"nvidia.com/gpu": "0", "nvidia.com/mig-1g.5gb": "56"}

    rig.label("all-3g.20gb")

    assert rig.wait_for_end("all-3g.20gb") == "success"
    assert rig.schedulable() == {
        "nvidia.com/gpu": "0",
        "nvidia.com/mig-1g.5gb": "0",
        "nvidia.com/mig-3g.20gb": "16",
    }
